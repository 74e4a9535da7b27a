"""States that are hard to hand over: buffers of each replica's own, callbacks that need a whole group."""

from __future__ import annotations

from collections.abc import Callable

from tests.runtime.cluster import Cluster
from tests.runtime.test_ranks import start_group

MakeCluster = Callable[..., Cluster]


def test_the_buffers_of_batch_norm_come_whole_from_one_source(cluster: MakeCluster, etcd_url: str) -> None:
    """Each replica's statistics are its own; a joiner must not get a mixture of two, nor fail over them."""
    c = cluster(etcd_url)
    words = ("--batch-norm", "--width", 60_000, "--period-ms", 100)
    sources = c.start_all(2, *words)
    joiner = c.start("trainer-2", *words)
    c.wait_together([*sources, joiner], since=joiner.started)
    first = joiner.commits()[0]
    begun = {g.replica_id: r["buffers"] for g in sources for r in g.commits() if r["step"] == first["step"]}
    assert len(set(begun.values())) == 2, "the sources' statistics differ"
    assert first["buffers"] in begun.values()
    c.check_versions()


def test_a_state_callback_may_use_a_collective_of_its_group(cluster: MakeCluster, etcd_url: str) -> None:
    """All ranks of a group are in the callback at once, as source and as joiner; FSDP's state needs that."""
    c = cluster(etcd_url)
    a = start_group(c, "trainer-0", "--shared-state")
    c.wait(lambda: all(len(g.commits(0.0, 1)) >= 5 for g in a), "the first group", a)
    b = start_group(c, "trainer-1", "--shared-state")
    since = b[0].started
    c.wait(lambda: all(len(g.commits(since, 2)) >= 5 for g in (*a, *b)), "both groups", [*a, *b])
    assert all(g.events("healed") for g in b)
    for rank in range(2):
        hashes = [{r["version"]: r["hash"] for r in g.commits(since, 2)} for g in (a[rank], b[rank])]
        same = hashes[0].keys() & hashes[1].keys()
        assert same
        assert all(hashes[0][v] == hashes[1][v] for v in same)
