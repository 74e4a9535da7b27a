"""Many at once: joiners, spares, and everything going wrong in the same moment."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from ftkit.keeper.embedded import EtcdServer
from tests.runtime.cluster import Cluster, Group

MakeCluster = Callable[..., Cluster]
START_S = 150.0
"""Five processes that import torch at once, on a machine that may be busy."""


def in_epoch(groups: list[Group], n: int, since: float) -> list[Group]:
    """The groups that have committed with n members since then."""
    return [g for g in groups if g.commits(since, n)]


@pytest.mark.timeout(2 * START_S + 120)
def test_five_join_at_once_and_the_spare_one_takes_over(cluster: MakeCluster, etcd_url: str) -> None:
    """Who is above `max_replicas` waits without a word against it, and fills the first gap."""
    c = cluster(etcd_url, max_replicas=5, lease_ttl=3)
    words = ("--period-ms", 30)
    first = c.start_all(1, *words)[0]
    since = time.monotonic()
    joiners = [c.start(f"trainer-{i}", *words) for i in range(1, 6)]
    groups = [first, *joiners]
    c.wait(lambda: len(in_epoch(groups, 5, since)) == 5, "five to train", groups, START_S)
    [spare] = [g for g in groups if not g.commits()]
    assert not [r for r in first.steps(since) if not r["ok"]], "joins cost the first one no step"
    healed = [g.events("healed")[0]["epoch"] for g in joiners if g is not spare]
    assert len(set(healed)) <= 3, f"joiners come in few epochs, not one by one: {healed}"

    victim = next(g for g in joiners if g is not spare)
    victim.process.kill()
    died = time.monotonic()
    left = [g for g in groups if g is not victim]
    c.wait(lambda: len(in_epoch(left, 5, died)) == 5, "the spare to take over", left, START_S)
    assert spare.events("healed")
    c.check_versions()


@pytest.mark.long
def test_etcd_is_wiped_while_one_member_dies_and_another_joins(
    cluster: MakeCluster, own_etcd: EtcdServer
) -> None:
    """I8: nobody is there to prove the death to, and the newcomer may be faster than the old epoch."""
    c = cluster(own_etcd.url, lease_ttl=2)
    groups = c.start_all(3, "--period-ms", 20)
    own_etcd.wipe()
    groups[2].process.kill()
    joiner = c.start("trainer-3", "--period-ms", 20)
    own_etcd.start()
    since = time.monotonic()
    left = [*groups[:2], joiner]
    c.wait(lambda: len(in_epoch(left, 3, since)) == 3, "the survivors and the newcomer", left)
    last = groups[0].commits(n=3)[-1]["step"]
    assert joiner.commits()[0]["step"] > groups[2].commits()[-1]["step"] - 5, "it healed from the survivors"
    steps = sorted({r["step"] for g in groups[:2] for r in g.commits()})
    assert steps == list(range(steps[0], steps[-1] + 1)), json.dumps(steps[-20:])
    assert last >= steps[-1] - 5
    c.check_versions()
