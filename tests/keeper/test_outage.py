"""What happens to members when their etcd is restarted, frozen, wiped or full."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ftkit.errors import EtcdNoSpace
from ftkit.keeper.embedded import EtcdCluster, EtcdServer, find_etcd
from ftkit.keeper.etcd import Etcd
from tests.keeper.conftest import Rank, World, wait_until


def etcdctl(server: EtcdServer, *arguments: str) -> str:
    command = [str(find_etcd().with_name("etcdctl")), f"--endpoints={server.url}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"ETCDCTL_API": "3"})
    return done.stdout


def undisturbed(*ranks: Rank) -> None:
    """Training went on: nobody was told to stop, to wait or to end."""
    for r in ranks:
        assert r.process.poll() is None
        bad = [
            s
            for s in r.seen
            if s["kind"] in ("AbortEpoch", "Refused", "lost", "EpochOffer") and s["at"] > r.t0
        ]
        assert not bad, bad


def mark(*ranks: Rank) -> None:
    for r in ranks:
        r.t0 = time.monotonic()


def fresh_contact(rank: Rank, timeout_s: float = 20.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while True:
        news = rank.wait("Contact", deadline - time.monotonic())
        if news["at"] > rank.t0 and news["value"]["age_s"] < 1.5:
            return news


def test_a_restart_of_etcd_disturbs_nobody(own_world: World, own_etcd: EtcdServer):
    """Its data and leases are kept; the watches resume where they were."""
    a, b = own_world.train("a", "b")
    own_etcd.kill()
    own_etcd.start()
    mark(a, b)
    fresh_contact(a)
    fresh_contact(b)
    assert own_world.get(own_world.keys.epoch)["id"] == 1
    undisturbed(a, b)
    c = own_world.start("c")
    c.wait("Welcome")
    c.do("want", [0, 0], "")
    assert "joining: c" in a.wait("WishReconfigure")["value"]["why"]


def test_an_etcd_frozen_for_longer_than_the_leases_live_costs_no_step(own_world: World, own_etcd: EtcdServer):
    """I7: all leases are lost in one moment; healthy trainers put their keys back."""
    a, b, c = own_world.train("a", "b", "c")
    leases = {own_world.etcd.get(own_world.keys.member_of(n)).lease for n in "abc"}
    mark(a, b, c)
    own_etcd.freeze()
    wait_until(lambda: a.wait("Contact")["value"]["age_s"] > 4.0, 15)
    own_etcd.thaw()

    def back() -> bool:
        kvs = [own_world.etcd.get(own_world.keys.member_of(n)) for n in "abc"]
        return all(kv is not None and own_world.etcd.keep_alive(kv.lease) for kv in kvs)

    wait_until(back)
    for r in (a, b, c):
        fresh_contact(r)
    undisturbed(a, b, c)
    assert own_world.get(own_world.keys.epoch)["id"] == 1
    assert leases.isdisjoint(own_world.etcd.get(own_world.keys.member_of(n)).lease for n in "abc")


def test_a_wiped_etcd_is_filled_again(own_world: World, own_etcd: EtcdServer):
    """I8: the data is gone; what the members know is put back, and training goes on."""
    a, b = own_world.train("a", "b")
    before = own_world.get(own_world.keys.epoch)
    config = own_world.get(own_world.keys.config)
    mark(a, b)
    own_etcd.wipe()
    own_etcd.start()
    wait_until(lambda: own_world.get(own_world.keys.epoch) == before)
    wait_until(lambda: own_world.member("a") and own_world.member("b"))
    wait_until(lambda: own_world.get(own_world.keys.config) == config)
    undisturbed(a, b)
    # And it works on: a death is noticed, the next epoch follows.
    b.kill()
    a.wait("AbortEpoch", epoch=1)
    a.do("want", [1, 9], "peer died")
    assert a.epoch()["id"] == 2


def test_members_outlive_an_etcd_that_is_away(own_world: World, own_etcd: EtcdServer):
    """They are told how long it has been away, so that they can stop in time (I3)."""
    a, b = own_world.train("a", "b")
    mark(a, b)
    own_etcd.kill()
    wait_until(lambda: a.wait("Contact")["value"]["age_s"] > 2.0)
    own_etcd.start()
    fresh_contact(a)
    fresh_contact(b)
    undisturbed(a, b)


def test_a_keeper_that_dies_while_etcd_is_away_is_replaced(own_world: World, own_etcd: EtcdServer):
    a, b = own_world.train("a", "b")
    mark(a, b)
    own_etcd.kill()
    first = a.keeper_pid()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: a.keeper_pid() not in (0, first))
    own_etcd.start()
    a.wait("Welcome")
    wait_until(lambda: own_world.member("a"))
    undisturbed(a, b)


def test_an_etcd_that_is_away_at_the_start_is_waited_for(own_world: World, own_etcd: EtcdServer):
    own_etcd.kill()
    a = own_world.start("a")
    reason = wait_until(lambda: (r := a.wait("StillWaiting")["value"]["reason"]) and "etcd" in r and r)
    assert own_etcd.url in reason
    own_etcd.start()
    a.wait("Welcome")


def fill(etcd: Etcd) -> None:
    for i in range(100):
        etcd.put(f"/filler/{i}", b"x" * 200_000)
        time.sleep(0.005)  # etcd counts what it has every tenth of a second


def test_a_full_etcd_is_reported_with_what_to_do(job: str, tmp_path: Path):
    server = EtcdServer(data_dir=tmp_path / "small", extra=("--quota-backend-bytes=2000000",))
    with server, closing(World(job, server.url)) as world, Etcd(world.etcd.settings) as etcd:
        (a,) = world.train("a")
        mark(a)
        with pytest.raises(EtcdNoSpace, match="etcdctl defrag"):
            fill(etcd)
        assert any("NOSPACE" in alarm for alarm in etcd.status()[0].alarms)
        # The member lives on; it is told why its wish cannot be fulfilled.
        a.do("want", [1, 2], "")
        wait_until(lambda: "NOSPACE" in a.wait("StillWaiting")["value"]["reason"])
        # A newcomer is not kept waiting for what only an operator can change.
        refusal = world.start("b").wait("Refused")["value"]
        assert refusal["error"] == "EtcdNoSpace"
        assert "etcdctl defrag" in refusal["message"]
        # The remedy of the message works.
        etcd.delete_prefix("/filler/")
        etcdctl(server, "compact", str(etcd.status()[0].revision))
        etcdctl(server, "defrag")
        etcdctl(server, "alarm", "disarm")
        assert a.epoch()["id"] == 2


def test_the_servers_of_a_cluster_may_die_one_after_another(job: str, tmp_path: Path):
    """Keepers go to another server; a new leader gives all leases their full time again."""
    with EtcdCluster(tmp_path) as cluster, closing(World(job, *cluster.endpoints)) as world:
        a, b = world.train("a", "b", lease_ttl=3)
        for server in cluster.servers:
            server.kill()
            mark(a, b)
            fresh_contact(a)
            fresh_contact(b)
            server.start()
            undisturbed(a, b)
        b.kill()
        assert "SIGKILL" in a.wait("AbortEpoch", epoch=1)["value"]["why"]


class Cable:
    """A TCP proxy in front of etcd that can be unplugged without anyone being told."""

    def __init__(self, port: int) -> None:
        self.to = port
        self.plugged = threading.Event()
        self.plugged.set()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.server.getsockname()[1]}"
        self.sockets: list[socket.socket] = []
        self.closed = False
        self.thread = threading.Thread(target=self.accept, daemon=True)
        self.thread.start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self.server.accept()[0]
                far = socket.create_connection(("127.0.0.1", self.to))
                self.sockets += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self.pump, args=(one, other), daemon=True).start()

    def pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                self.plugged.wait()
                other.sendall(data)
        for sock in (one, other):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.plugged.set()
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        self.thread.join()
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def test_a_member_that_is_cut_off_knows_it_and_comes_back(own_world: World, own_etcd: EtcdServer):
    """It is told how long it has heard nothing (I3); once back, it learns that the others went on (I4)."""
    with closing(Cable(own_etcd.client_port)) as cable:
        a = own_world.start("a")
        b = own_world.start("b", etcd=cable.url)
        for r in (a, b):
            r.wait("Welcome")
        for r in (a, b):
            r.do("want", [0, 0], "")
        assert [len(r.epoch()["seats"]) for r in (a, b)] == [2, 2]
        cable.plugged.clear()
        a.wait("SuspectMembers", epoch=1, names=["b"])
        wait_until(lambda: b.wait("Contact")["value"]["age_s"] > 2.5)
        a.do("want", [1, 5], "the collective makes no progress")
        assert [s[0] for s in a.epoch()["seats"]] == ["a"]
        assert not [r for r in b.seen if r["kind"] == "AbortEpoch"]
        cable.plugged.set()
        why = b.wait("AbortEpoch", epoch=1)["value"]["why"]
        assert why
        b.do("want", [1, 5], "aborted")
        assert "b" in a.wait("WishReconfigure")["value"]["why"]
        a.do("want", [2, 9], "")
        epoch = b.epoch()
        assert [(s[0], s[2]) for s in epoch["seats"]] == [("a", [2, 9]), ("b", [1, 5])]
        b.do("goodbye", False)
        b.wait("Gone")
