"""Machines that cannot reach each other: network namespaces whose switch is parted, in silence."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftkit.chaos.netns import Machines, missing
from ftkit.chaos.orders import Order
from ftkit.keeper.embedded import find_etcd
from ftkit.keeper.processes import process_state
from tests.runtime.cluster import Cluster, Group

MakeCluster = Callable[..., Cluster]


@contextlib.contextmanager
def etcd_on(machines: Machines, host: str, folder: Path, network: str) -> Iterator[str]:
    """Run etcd on a machine and return its URL."""
    url = f"http://{machines.address(host, network)}:2379"
    flags = [f"--listen-client-urls={url}", f"--advertise-client-urls={url}", "--log-level=error"]
    words = machines.command(host, str(find_etcd()), f"--data-dir={folder / 'etcd'}", *flags)
    with (folder / "etcd.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Four machines for trainers and one for etcd, all in a network for data and one for etcd."""
    why_not = missing()
    if why_not:
        pytest.skip(why_not)
    with Machines(("etcd", *(f"trainer-{i}" for i in range(4))), networks=("data", "etcd")) as made:
        yield made


def start(
    c: Cluster, machines: Machines, names: list[str], *args: object, inside: bool = False
) -> list[Group]:
    c.wrap = machines.command
    groups = []
    for name in names:
        address = machines.address(name, "data")
        groups.append(c.start(name, *args, inside=inside, bind=address, advertise=address))
    c.wait_together(groups)
    return groups


@pytest.mark.long
def test_of_two_sides_one_commits(cluster: MakeCluster, machines: Machines, tmp_path: Path) -> None:
    """I3: with `min_replicas=1` both halves would be enough; the one without etcd must stand still."""
    names = [f"trainer-{i}" for i in range(4)]
    with etcd_on(machines, "etcd", tmp_path, "etcd") as url:
        c = cluster(url, lease_ttl=2, min_replicas=1)
        groups = start(c, machines, names, "--period-ms", 20)
        for network in ("data", "etcd"):
            machines.part(("etcd", *names[:2]), names[2:], network=network)
        since = time.monotonic()
        near, far = groups[:2], groups[2:]
        c.wait(lambda: all(len(g.commits(since, 2)) >= 20 for g in near), "one side", groups)
        until = time.monotonic()
        assert not [r for g in far for r in g.commits(since + 0.5) if r["t"] < until]
        for network in ("data", "etcd"):
            machines.join(network)
        c.wait_together(groups, since=time.monotonic())
        assert all(any(e["at"] > since for e in g.events("healed")) for g in far)
        c.check_versions()
        c.end()


def test_of_two_sides_that_both_reach_etcd_one_commits(
    cluster: MakeCluster, machines: Machines, tmp_path: Path
) -> None:
    """I6: no lease runs out, so nobody is dead; those who reach each other must not wait for the others."""
    names = [f"trainer-{i}" for i in range(4)]
    with etcd_on(machines, "etcd", tmp_path, "etcd") as url:
        c = cluster(url, lease_ttl=2, min_replicas=1, timeout=6)
        groups = start(c, machines, names, "--period-ms", 20)
        machines.part(names[:2], names[2:], network="data")
        since = time.monotonic()
        sides = (groups[:2], groups[2:])
        c.wait(
            lambda: any(all(len(g.commits(since + 1.0, 2)) >= 20 for g in side) for side in sides),
            "one side",
            groups,
        )
        assert not all(g.commits(since + 1.0) for g in groups)
        machines.join("data")
        c.wait_together(groups, since=time.monotonic())
        c.check_versions()
        c.end()


def ballot_waits(machines: Machines, host: str) -> bool:
    """Say whether something that a peer has sent lies unread in a socket of a machine."""
    table = subprocess.run(machines.command(host, "cat", "/proc/net/tcp"), capture_output=True, check=True)
    rows = [line.split() for line in table.stdout.decode().splitlines()[1:]]
    return any(row[3] == "01" and int(row[4].partition(":")[2], 16) > 0 for row in rows)


def test_a_vote_that_reached_one_member_only_is_not_trusted_when_that_one_returns(
    cluster: MakeCluster, machines: Machines, tmp_path: Path
) -> None:
    """I4: A commits step s in epoch e and is cut off, B commits step s in epoch e + 1: A must heal."""
    names = ["trainer-0", "trainer-1"]
    with etcd_on(machines, "etcd", tmp_path, "etcd") as url:
        c = cluster(url, lease_ttl=2)
        a, b = start(c, machines, names, "--period-ms", 50, inside=True)
        c.orders.give("trainer-0", Order(number=1, act="stop", phase="vote"))
        c.wait(lambda: process_state(a.process.pid) == "T", "A to stop before it votes", [a, b])
        c.wait(lambda: ballot_waits(machines, "trainer-0"), "B's ballot to arrive", [a, b])
        for network in ("data", "etcd"):
            machines.part(("etcd", "trainer-1"), ("trainer-0",), network=network)
        since = a.signal(signal.SIGCONT)
        c.wait(lambda: bool(a.commits(since)), "A to commit, with B's ballot but without its ear", [a, b])
        c.wait(lambda: len(b.commits(since, 1)) >= 2, "B to go on alone", [a, b])
        [last], ahead = a.commits(since), b.commits(since, 1)[0]
        assert last["n"] == 2
        assert (last["epoch"] + 1, last["step"]) == (ahead["epoch"], ahead["step"])
        assert last["hash"] != ahead["hash"], "two states of one step number"
        for network in ("data", "etcd"):
            machines.join(network)
        c.wait_together([a, b], since=time.monotonic())
        healed = [e for e in a.events("healed") if e["at"] > since]
        assert healed
        assert healed[0]["epoch"] > ahead["epoch"]
        assert not [e for e in b.events("healed") if e["at"] > since]
        c.check_versions()
        c.end()
