"""The store at which members meet."""

from __future__ import annotations

import os
import socket

import pytest

from ftkit.errors import ConfigError
from ftkit.groups import sockets
from ftkit.groups.store import RendezvousStore, join_address, split_address


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
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(5):
        RendezvousStore().close()
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before


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
