"""Real ports of real jobs: whoever connects without credentials harms nobody."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from tests.runtime.cluster import Cluster
from tests.security.ports import harass, listening

MakeCluster = Callable[..., Cluster]


def test_noise_on_every_port_of_a_job_costs_it_nothing(cluster: MakeCluster, etcd_url: str) -> None:
    """Trainers, their keepers, their stores and transports: all that listens is tried, while they train."""
    c = cluster(etcd_url)
    groups = c.start_all(2)
    pids = [pid for g in groups for pid in (g.process.pid, g.keeper_pid())]
    addresses = {address for pid in pids for address in listening(pid)}
    assert {host for host, _ in addresses} == {"127.0.0.1"}, "etcd is on loopback"
    assert len(addresses) >= 3 * len(groups), "a keeper, a store and a transport each"
    epoch = groups[0].steps()[-1]["epoch"]
    with contextlib.ExitStack() as stack:
        for seed, address in enumerate(sorted(addresses)):
            for sock in harass(address, seed):
                stack.enter_context(sock)
        c.wait_together(groups, commits=20, since=time.monotonic())
        assert groups[0].steps()[-1]["epoch"] == epoch, "no epoch has had to be formed anew"
        newcomer = c.start("trainer-2")
        c.wait_together([*groups, newcomer], since=time.monotonic())
    assert [g.keeper_pid() for g in groups] == pids[1::2], "no keeper has had to be started again"
    c.finish([*groups, newcomer])
    c.check_versions()
