"""The watch goes on, and misses nothing, whatever happens to etcd."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ftkit.keeper.embedded import EtcdCluster, EtcdServer
from ftkit.keeper.etcd import KV, DeletePrefix, Etcd, EtcdSettings, Put
from ftkit.keeper.watch import Watch, WatchEvent
from tests.keeper.conftest import server_of, wait_until


class Mirror:
    """Rebuilds the range from what the watch tells, as every user of it does."""

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self.table: dict[str, bytes] = {}
        self.num_listings = 0
        self.num_words = 0
        self.batches: queue.Queue[list[WatchEvent]] = queue.Queue()
        self.troubles: list[Exception] = []
        self.watch = Watch(
            etcd,
            prefix,
            prefix[:-1] + "0",
            self.listed,
            self.changed,
            self.word,
            self.troubles.append,
        )

    def listed(self, kvs: list[KV], _revision: int) -> None:
        self.num_listings += 1
        self.table = {kv.key: kv.value for kv in kvs}

    def changed(self, events: list[WatchEvent], revision: int) -> None:
        for event in events:
            if event.value is None:
                self.table.pop(event.key, None)
            else:
                self.table[event.key] = event.value
        assert revision == events[-1].mod_revision
        self.batches.put(events)

    def word(self) -> None:
        self.num_words += 1


@pytest.fixture
def etcd(own_etcd: EtcdServer) -> Iterator[Etcd]:
    with Etcd(EtcdSettings(endpoints=(own_etcd.url,))) as etcd:
        yield etcd


@pytest.fixture
def mirror(etcd: Etcd) -> Iterator[Mirror]:
    etcd.put("/m/before", b"0")
    mirror = Mirror(etcd, "/m/")
    wait_until(lambda: mirror.num_listings)
    yield mirror
    mirror.watch.close()


def test_a_listing_comes_first_then_each_change(mirror: Mirror, etcd: Etcd):
    assert mirror.table == {"/m/before": b"0"}
    etcd.put("/m/a", b"1")
    etcd.put("/n/other", b"no business of ours")
    etcd.delete("/m/before")
    wait_until(lambda: mirror.table == {"/m/a": b"1"})
    assert mirror.num_listings == 1


def test_one_transaction_is_one_batch(mirror: Mirror, etcd: Etcd):
    """A death deletes keys and writes the proof: nobody may see the one without the other."""
    etcd.txn([], [Put("/m/x", b"1"), Put("/m/y", b"2"), DeletePrefix("/m/before")])
    events = mirror.batches.get(timeout=5)
    assert [(e.key, e.value) for e in sorted(events)] == [("/m/before", None), ("/m/x", b"1"), ("/m/y", b"2")]
    assert len({e.mod_revision for e in events}) == 1


def test_a_lease_that_runs_out_is_seen_as_a_deletion(mirror: Mirror, etcd: Etcd):
    lease = etcd.grant(60)
    etcd.put("/m/leased", b"", lease)
    assert mirror.batches.get(timeout=5)[0].lease == lease
    etcd.revoke(lease)
    assert mirror.batches.get(timeout=5)[0].value is None


def test_a_restart_is_bridged_from_the_last_revision(mirror: Mirror, etcd: Etcd, own_etcd: EtcdServer):
    """Nothing is listed anew: in a large job that would be a storm."""
    etcd.put("/m/a", b"1")
    wait_until(lambda: "/m/a" in mirror.table)
    own_etcd.kill()
    own_etcd.start()
    etcd.put("/m/a", b"2")
    etcd.put("/m/a", b"3")
    wait_until(lambda: mirror.table["/m/a"] == b"3")
    assert mirror.num_listings == 1
    seen = [e.value for batch in list(mirror.batches.queue) for e in batch]
    assert seen == [b"1", b"2", b"3"]


def test_a_compaction_in_the_meantime_leads_to_a_new_listing(mirror: Mirror, own_etcd: EtcdServer):
    """The revisions that were missed are gone; what is there now is not."""
    own_etcd.kill()
    wait_until(lambda: mirror.troubles)
    port, own_etcd.client_port = own_etcd.client_port, 0
    own_etcd.start()  # the watch does not find it at its new port
    with Etcd(EtcdSettings(endpoints=(own_etcd.url,))) as other:
        other.delete("/m/before")
        for i in range(5):
            revision = other.put("/m/a", b"%d" % i)
        other.compact(revision)
    own_etcd.stop()
    own_etcd.client_port = port
    own_etcd.start()
    wait_until(lambda: mirror.table == {"/m/a": b"4"})
    assert mirror.num_listings == 2


@pytest.mark.parametrize("refilled", [False, True])
def test_a_wiped_etcd_is_listed_anew(mirror: Mirror, own_etcd: EtcdServer, refilled: bool):
    """Its cluster id may be the same, and its revision soon as high as ours was (I8)."""
    own_etcd.wipe()
    wait_until(lambda: mirror.troubles)
    port, own_etcd.client_port = own_etcd.client_port, 0
    own_etcd.start()
    with Etcd(EtcdSettings(endpoints=(own_etcd.url,))) as other:
        for i in range(30 if refilled else 0):
            other.put("/m/other", b"%d" % i)
    own_etcd.stop()
    own_etcd.client_port = port
    own_etcd.start()
    wait_until(lambda: mirror.table == ({"/m/other": b"29"} if refilled else {}))
    assert mirror.num_listings == 2


def test_a_frozen_server_is_left_for_another(tmp_path: Any):
    """Its streams stay open and silent: the pings of HTTP/2, or any request, must notice."""
    with EtcdCluster(tmp_path) as cluster, Etcd(EtcdSettings(endpoints=cluster.endpoints)) as etcd:
        etcd.put("/m/a", b"1")
        mirror = Mirror(etcd, "/m/")
        wait_until(lambda: mirror.num_listings)
        frozen = server_of(etcd, cluster)
        others = tuple(s.url for s in cluster.servers if s is not frozen)
        frozen.freeze()
        with Etcd(EtcdSettings(endpoints=others, timeout_s=15.0)) as other:
            other.put("/m/a", b"2")
        # `etcd` sends nothing meanwhile, so only the pings can tell.
        wait_until(lambda: mirror.table["/m/a"] == b"2", 25)
        mirror.watch.close()


def test_refreshing_hands_out_all_that_is_so_by_now(mirror: Mirror, etcd: Etcd, own_etcd: EtcdServer):
    """After a standstill, old news may still be queued somewhere."""
    for round_ in range(20):
        etcd.put("/m/a", b"%d" % round_)
        fresh = threading.Event()
        tables: list[dict[str, bytes]] = []

        def on_fresh(fresh=fresh, tables=tables):
            tables.append(dict(mirror.table))
            fresh.set()

        mirror.watch.refresh(on_fresh)
        assert fresh.wait(10)
        assert tables[0]["/m/a"] == b"%d" % round_
    etcd.put("/m/a", b"last")
    wait_until(lambda: mirror.table["/m/a"] == b"last")


def test_nothing_is_called_back_after_the_end(mirror: Mirror, etcd: Etcd):
    mirror.watch.close()
    etcd.put("/m/late", b"")
    etcd.get("/m/late")
    assert "/m/late" not in mirror.table


def test_a_callback_that_fails_is_heard_of(etcd: Etcd):
    troubles: list[Exception] = []

    def fail(kvs: list[KV], revision: int) -> None:
        raise RuntimeError("a mistake of ours")

    watch = Watch(etcd, "/m/", "/m0", fail, lambda e, r: None, on_trouble=troubles.append)
    wait_until(lambda: troubles)
    assert str(troubles[0]) == "a mistake of ours"
    watch.close()
