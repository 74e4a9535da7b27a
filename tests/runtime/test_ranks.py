"""Replica groups of several ranks: they live, vote, heal and die together."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from ftkit.chaos.orders import Order
from ftkit.keeper.embedded import free_ports
from tests.runtime.cluster import Cluster, Group

MakeCluster = Callable[..., Cluster]


def start_group(c: Cluster, name: str, *args: object, inside: bool = False) -> list[Group]:
    """Start both ranks of a group, as torchrun would."""
    port = free_ports(1)[0]
    made = []
    for rank in range(2):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        c.env.update({k: str(v) for k, v in variables.items()})
        made.append(c.start(name, "--period-ms", 20, *args, inside=inside))
    return made


def test_a_rank_that_dies_takes_its_group_along_and_the_group_heals(
    cluster: MakeCluster, etcd_url: str
) -> None:
    c = cluster(etcd_url)
    a, b = start_group(c, "trainer-0"), start_group(c, "trainer-1")

    def together(groups: list[Group], since: float, n: int) -> None:
        c.wait(lambda: all(len(g.commits(since, n)) >= 5 for g in groups), "commits", groups)

    together([*a, *b], 0.0, 2)
    since = b[1].signal(signal.SIGKILL)
    together(a, since, 1)
    assert not [e for g in a for e in g.events("salvaged")], "one rank cannot without the other"
    b[0].process.kill()
    b = start_group(c, "trainer-1")
    together([*a, *b], b[0].started, 2)
    assert all(g.events("healed") for g in b)
    for plane in (0, 1):
        seen: dict[str, str] = {}
        for g in (a[plane], b[plane]):
            for r in g.commits():
                assert seen.setdefault(r["version"], r["hash"]) == r["hash"]
    leaver = time.monotonic()
    for g in b:
        g.signal(signal.SIGTERM)
    together(a, leaver, 1)
    assert [g.process.wait(20) for g in b] == [0, 0]
    assert not [r for g in a for r in g.steps(leaver) if not r["ok"]]


def test_a_rank_whose_script_fails_takes_its_group_along(cluster: MakeCluster, etcd_url: str) -> None:
    """It says goodbye although its sibling does not: neither the others nor the sibling may wait for more."""
    c = cluster(etcd_url)
    a, b = start_group(c, "trainer-0"), start_group(c, "trainer-1", inside=True)
    c.wait(lambda: all(len(g.commits(0.0, 2)) >= 5 for g in (*a, *b)), "commits", [*a, *b])
    since = time.monotonic()
    c.orders.give("trainer-1", Order(number=1, act="raise", phase="forward"))
    c.wait(lambda: all(len(g.commits(since, 1)) >= 5 for g in a), "the other group to go on", a)
    assert sorted(g.process.wait(20) for g in b) == [0, 1], "one fails, the other is asked to leave"


def test_no_rank_begins_a_step_that_its_sibling_does_not_begin(cluster: MakeCluster, etcd_url: str) -> None:
    """One would wait in the user's own collective for the other, who waits for it to want the next epoch."""
    c = cluster(etcd_url)
    a, b = (start_group(c, name, "--lag-ms", 150) for name in ("trainer-0", "trainer-1"))
    c.wait(lambda: all(len(g.commits(0.0, 2)) >= 3 for g in (*a, *b)), "commits", [*a, *b])
    since = b[0].signal(signal.SIGKILL)
    c.wait(lambda: all(len(g.commits(since, 1)) >= 2 for g in a), "the other group to go on", a)
