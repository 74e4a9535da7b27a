"""The store at which members meet."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

from ftkit.errors import ConfigError, GroupError
from ftkit.groups import sockets
from ftkit.groups import store as module
from ftkit.groups.link import StoreLink
from ftkit.groups.store import (
    LENGTH,
    MAX_STRANGERS,
    RendezvousStore,
    join_address,
    pack,
    prove,
    split_address,
    without_key,
)


def test_the_store_listens_on_its_address_only() -> None:
    """A store that listens on all interfaces is an open door on a shared network."""
    before = sockets.socket_inodes()
    with RendezvousStore() as store:
        new = [d for d in sockets.open_sockets() if d.inode not in before and sockets.is_listening(d)]
        ends = []
        for descriptor in new:
            sock = sockets.borrow(descriptor)
            assert sock is not None
            with sock:
                ends.append(sock.getsockname()[:2])
        assert ends == [split_address(store.address)]


def test_the_advertised_host_is_what_the_others_are_told() -> None:
    with RendezvousStore("0.0.0.0", advertise="trainer-0.example") as store:
        assert split_address(store.address)[0] == "trainer-0.example"


def test_a_closed_store_leaves_nothing_behind() -> None:
    RendezvousStore().close()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        RendezvousStore().close()
    deadline = time.monotonic() + 10  # a thread that has ended is on the books for a moment longer
    while len(os.listdir("/proc/self/fd")) > descriptors + 5 or threading.active_count() > threads + 5:
        assert time.monotonic() < deadline, "one of something is left of each store"
        time.sleep(0.01)


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        RendezvousStore("203.0.113.1")


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:http", "host:0", "host:70000"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        split_address(address)


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "trainer-0"])
def test_addresses_survive_being_written_and_read(host: str) -> None:
    assert split_address(join_address(host, 29500)) == (host, 29500)


def meet(store: RendezvousStore, prefix: str, rank: int, size: int) -> StoreLink:
    return meet_as(store.address, prefix, rank, size)


def meet_as(address: str, prefix: str, rank: int, size: int) -> StoreLink:
    link = StoreLink(address)
    link.connect(time.monotonic() + 10)
    link.join(prefix, rank, size)
    return link


def test_what_a_member_leaves_behind_is_forgotten_with_the_last_one() -> None:
    """Whether the rendezvous succeeds or not: its host lives through thousands of them."""
    with RendezvousStore() as store:
        links = [meet(store, "epoch/1", rank, 2) for rank in range(2)]
        assert all(link.wait_all(time.monotonic() + 10) for link in links)
        links[0].set("key", b"value")
        assert links[1].get("key") == b"value"
        assert store.num_keys() == 1
        links[0].finish()
        links[1].close()
        until = time.monotonic() + 10
        while store.num_keys() and time.monotonic() < until:
            threading.Event().wait(0.005)
        assert store.num_keys() == 0


def test_a_member_that_gave_up_before_all_came_may_come_again() -> None:
    with RendezvousStore() as store:
        meet(store, "epoch/1", 0, 2).close()
        other = meet(store, "epoch/1", 1, 2)
        assert other.wait_all(time.monotonic() + 0.05) is False
        assert other.missing(time.monotonic() + 10) == [0]
        again = meet(store, "epoch/1", 0, 2)
        assert again.wait_all(time.monotonic() + 10)
        assert other.wait_all(time.monotonic() + 10)
        again.close()
        with pytest.raises(GroupError, match="rank 0 broke off"):
            other.get("key")
        other.close()


def test_members_that_disagree_are_told() -> None:
    with RendezvousStore() as store:
        first = meet(store, "epoch/1", 0, 2)
        for rank, size, problem in ((1, 3, "expects 3 ranks"), (0, 2, "a rank 0 here already")):
            wrong = meet(store, "epoch/1", rank, size)
            with pytest.raises(GroupError, match=problem):
                wrong.wait_all(time.monotonic() + 10)
            wrong.close()
        first.close()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1\xc1", b"\0\0\0\2\x91\x01", b"\0"])
def test_noise_does_no_harm(noise: bytes) -> None:
    """Port scanners and mistaken clients come by; the members must not notice."""
    with RendezvousStore() as store:
        with socket.create_connection(split_address(store.address)) as stranger:
            stranger.sendall(noise)
            links = [meet(store, "epoch/1", rank, 2) for rank in range(2)]
            assert all(link.wait_all(time.monotonic() + 10) for link in links)
        for link in links:
            link.finish()


def test_who_does_not_know_the_key_takes_no_place_and_reads_nothing() -> None:
    """Prefixes can be guessed; who joins may publish the address that the members then connect to."""
    with RendezvousStore() as store:
        for address in (without_key(store.address), without_key(store.address) + "#" + "0" * 32):
            stranger = meet_as(address, "epoch/1", 0, 2)
            with pytest.raises(GroupError, match=r"hung up|is lost"):
                stranger.wait_all(time.monotonic() + 10)
            stranger.close()
        links = [meet(store, "epoch/1", rank, 2) for rank in range(2)]
        assert all(link.wait_all(time.monotonic() + 10) for link in links)
        for link in links:
            assert store.address.partition("#")[2] not in link.address, "messages name it"
            link.finish()


def test_a_proof_is_good_for_one_connection_and_one_place() -> None:
    with RendezvousStore() as store:
        proofs = {prove(store.address, nonce, "e", rank, 2) for nonce in (b"1", b"2") for rank in (0, 1)}
        assert len(proofs | {prove(store.address, b"1", "f", 0, 2), prove("h:1#k", b"1", "e", 0, 2)}) == 6


@pytest.mark.parametrize(
    "message",
    [
        ("join", "epoch/1", 0, 10**15, b""),
        ("join", "epoch/1", float("inf"), 2, b""),
        ("set", "key", 10**12),
        ("get", ["key"]),
        ("no such thing",),
        (),
        (None,),
    ],
)
def test_what_is_no_message_costs_its_sender_the_connection_and_nobody_else_anything(message: tuple) -> None:
    """A size that nobody has, taken at its word, would fill the memory of the trainer that hosts it."""
    with RendezvousStore() as store:
        with socket.create_connection(split_address(store.address), 10) as stranger:
            stranger.sendall(pack(*message))
            while stranger.recv(100):
                pass
        member = meet(store, "epoch/1", 0, 2)
        member._send(*message)
        with pytest.raises(GroupError, match=r"hung up|is lost"):
            member.wait_all(time.monotonic() + 10)
        member.close()
        again = [meet(store, "epoch/2", rank, 2) for rank in range(2)]
        assert all(link.wait_all(time.monotonic() + 10) for link in again)
        for link in again:
            link.finish()


def test_messages_nested_too_deep_do_not_break_the_store_down() -> None:
    with RendezvousStore() as store:
        deep = b"\x91" * 900
        with socket.create_connection(split_address(store.address), 10) as stranger:
            stranger.sendall(LENGTH.pack(len(deep)) + deep)
            while stranger.recv(100):
                pass
        meet(store, "epoch/1", 0, 1).finish()


def test_a_crowd_of_strangers_does_not_keep_the_members_out() -> None:
    with RendezvousStore() as store, contextlib.ExitStack() as crowd:
        for _ in range(3 * MAX_STRANGERS):
            crowd.enter_context(socket.create_connection(split_address(store.address), 10))
        links = [meet(store, "epoch/1", rank, 2) for rank in range(2)]
        assert all(link.wait_all(time.monotonic() + 10) for link in links)
        until = time.monotonic() + 10
        while len(store._strangers) > MAX_STRANGERS and time.monotonic() < until:
            threading.Event().wait(0.005)
        assert len(store._callers) <= MAX_STRANGERS + 2
        for link in links:
            link.finish()


def test_a_stranger_that_only_sits_there_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOIN_S", 0.2)
    with (
        RendezvousStore() as store,
        socket.create_connection(split_address(store.address), 10) as stranger,
    ):
        while stranger.recv(100):
            pass


def test_a_closed_store_is_an_error_for_those_who_wait() -> None:
    store = RendezvousStore()
    link = meet(store, "epoch/1", 0, 2)
    assert link.missing(time.monotonic() + 10) == [1]
    store.close()
    with pytest.raises(GroupError, match="hung up"):
        link.wait_all(time.monotonic() + 10)
    link.close()


def test_a_descriptor_that_was_recycled_is_not_cut() -> None:
    """Numbers are reused at once: only the inode tells one socket from the next."""
    first, other = socket.socketpair()
    with other:
        stale = sockets.Descriptor(first.fileno(), os.fstat(first.fileno()).st_ino)
        first.close()
        second, peer = socket.socketpair()
        with second, peer:
            assert stale.fd in {second.fileno(), peer.fileno()}
            assert sockets.cut(stale) is False
            second.sendall(b"x")
            assert peer.recv(1) == b"x"
