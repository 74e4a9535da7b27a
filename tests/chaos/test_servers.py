"""The etcd that is broken on purpose: each harm is done, can be seen, and is taken back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftkit.chaos.servers import Servers, impossible
from ftkit.errors import ConfigError, EtcdAuthError, EtcdError, EtcdNoSpace
from ftkit.keeper.etcd import Etcd, EtcdSettings


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


def leader(servers: Servers) -> int:
    """Return which server leads, as at least two of them say; -1: none."""
    with servers.client() as client:
        told = client.status()
    if len({s.leader for s in told if not s.error}) != 1 or sum(not s.error for s in told) < 2:
        return -1
    return next((i for i, s in enumerate(told) if s.is_leader), -1)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("three"), "j", num=3, auth=True)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()


@pytest.mark.long
def test_the_leader_of_three_is_lost_and_the_others_elect_another(three: Servers) -> None:
    wait_until(lambda: leader(three) >= 0, "a leader")
    first = leader(three)
    undo = three.strike("etcd-lose-leader", 0.5)
    assert undo is not None
    assert [s.process is None for s in three.servers] == [i == first for i in range(3)]
    wait_until(lambda: leader(three) not in (-1, first), "another leader")
    undo()
    for server in three.servers:
        server.wait_ready()


@pytest.mark.long
def test_without_a_majority_nothing_is_written(three: Servers) -> None:
    undo = three.strike("etcd-lose-majority", 0.5)
    assert undo is not None
    assert sum(s.process is None for s in three.servers) == 2
    with pytest.raises(EtcdError), three.client() as client:
        client.put("/ftkit/j/x", b"x")
    undo()
    for server in three.servers:
        server.wait_ready()
    wait_until(lambda: leader(three) >= 0, "a leader")


def test_a_token_that_is_forgotten_is_asked_for_again(three: Servers) -> None:
    with Etcd(EtcdSettings(endpoints=three.urls)) as stranger, pytest.raises(EtcdAuthError):
        stranger.get("/ftkit/j/x")
    with three.client() as client:
        client.put("/ftkit/j/x", b"1")
        token = client.link._token
        assert three.strike("etcd-expire-token", 0.5) is None
        client.put("/ftkit/j/x", b"2")
        assert client.link._token != token, "the old one was refused"


def test_a_full_database_gets_room_again_and_leases_are_revoked_at_once(tmp_path: Path) -> None:
    servers = Servers(tmp_path, "j")
    try:
        servers.start()
        with servers.client() as client:
            for name in ("a", "b"):
                client.put(f"/ftkit/j/members/{name}", b"{}", client.grant(60))
            client.put("/ftkit/j/members/c", b"{}")
            assert servers.strike("revoke-all", 0.0) is None
            assert [kv.key[-1] for kv in client.list("/ftkit/j/members/")[0]] == ["c"]
            full = servers.strike("etcd-full", 0.0)
            with pytest.raises(EtcdNoSpace):
                client.put("/ftkit/j/x", b"x")
            size = servers.db_bytes()
            assert full is not None
            full()
            client.put("/ftkit/j/x", b"x")
            assert servers.db_bytes() < size / 4
    finally:
        servers.stop()


def test_a_database_is_full_though_etcd_counts_late(tmp_path: Path) -> None:
    """It knows its size since its last commit, and refuses nothing before the next one."""
    servers = Servers(tmp_path, "j")
    servers.servers[0].extra += ("--backend-batch-interval=1s", "--backend-batch-limit=1000000")
    try:
        servers.start()
        servers.strike("etcd-full", 0.0)
        with servers.client() as client, pytest.raises(EtcdNoSpace):
            client.put("/ftkit/j/x", b"x")
    finally:
        servers.stop()


def test_what_cannot_be_done_is_refused_with_the_reason() -> None:
    assert "--etcd-servers 3" in impossible("etcd-lose-one", num=1, auth=False)
    assert "--etcd-auth" in impossible("etcd-expire-token", num=1, auth=False)
    assert "users" in impossible("etcd-wipe", num=1, auth=True)
    assert impossible("etcd-lose-one", num=3, auth=False) == impossible("etcd-kill", num=1, auth=True) == ""
    with pytest.raises(ConfigError, match="one or three"):
        Servers(Path(), "j", num=2)
