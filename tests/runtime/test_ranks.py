"""Replica groups of several ranks: they live, vote, heal and die together."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from ftkit.keeper.embedded import free_ports
from tests.runtime.cluster import Cluster, Group

MakeCluster = Callable[..., Cluster]


def start_group(c: Cluster, name: str, *args: object) -> list[Group]:
    """Start both ranks of a group, as torchrun would."""
    port = free_ports(1)[0]
    made = []
    for rank in range(2):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        c.env.update({k: str(v) for k, v in variables.items()})
        made.append(c.start(name, "--period-ms", 20, *args))
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
