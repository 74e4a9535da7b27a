"""A keeper's life, with real processes and a real etcd."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from ftkit.config import Settings
from ftkit.keeper.client import KeeperClient
from ftkit.keeper.embedded import EtcdServer
from ftkit.keeper.wire import WireError, connect
from tests.keeper.conftest import World, alive, wait_until


def test_a_group_joins_trains_and_leaves(world: World):
    (a,) = world.train("a", stats_interval=0.2)
    record = world.member("a")
    assert record["pid"] == a.process.pid
    assert record["transports"] == ["127.0.0.1:7000"]
    epoch = world.get(world.keys.epoch)
    assert epoch["id"] == 1
    assert epoch["time"] > 1e9, "the pure core has no clock; the keeper stamps the epoch"
    assert world.get(world.keys.timeline_of(1)) == epoch
    a.do("mark", 4, 0)
    wait_until(lambda: (world.get(world.keys.stats_of("a")) or {}).get("phase") == "compute")
    a.do("goodbye", False)
    a.wait("Gone")
    assert world.member("a") is None
    assert world.get(world.keys.departed_of("a"))["how"] == "left"


def test_the_keeper_starts_fast_and_without_torch(world: World):
    """It is there before the model is built, and costs no trainer's memory."""
    begun = time.monotonic()
    a = world.start("a")
    pid = a.wait("up")["value"]["keeper"]
    assert time.monotonic() - begun < 5.0  # two interpreters on a busy machine
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "torch" not in maps
    assert "grpc" in maps
    trainer = Path(f"/proc/{a.process.pid}/maps").read_text()
    assert "grpc" not in trainer, "a trainer may fork, so it must have no threads of gRPC"


def test_the_death_of_a_trainer_is_proven_at_once(world: World):
    """The survivors must not wait for a lease to run out, nor for a collective's timeout."""
    a, b, c = world.train("a", "b", "c")
    killed = time.monotonic()
    c.kill()
    news = [r.wait("AbortEpoch", epoch=1) for r in (a, b)]
    assert max(n["at"] for n in news) - killed < 1.0
    assert "SIGKILL" in news[0]["value"]["why"]
    proof = world.get(world.keys.departed_of("c"))
    assert (proof["how"], proof["incarnation"]) == ("SIGKILL", c.setup["incarnation"])
    assert world.member("c") is None
    assert world.get(world.keys.abort)["epoch"] == 1
    for r in (a, b):
        r.do("want", [1, 7], "peer died")
    assert [r.epoch()["id"] for r in (a, b)] == [2, 2]


def test_a_trainer_that_exits_without_goodbye_is_dead_with_its_exit_code(world: World):
    a, b = world.train("a", "b")
    b.do("exit", 3)
    assert "exit 3" in a.wait("AbortEpoch")["value"]["why"]


def test_forked_children_do_not_hide_their_trainers_death(world: World):
    """DataLoader workers inherit the connection and live on for a while."""
    a, b = world.train("a", "b")
    b.do("fork")
    b.wait("forked")
    killed = time.monotonic()
    b.kill()
    assert a.wait("AbortEpoch")["at"] - killed < 1.0
    os.killpg(b.process.pid, signal.SIGKILL)


def test_training_goes_on_when_a_keeper_dies(world: World):
    """The ranks start another one, which takes the record over: no abort, no new epoch."""
    a, b = world.train("a", "b")
    first = b.keeper_pid()
    os.kill(first, signal.SIGKILL)
    second = wait_until(lambda: (p := b.keeper_pid()) != first and p)
    b.wait("Welcome")
    lease = world.etcd.get(world.keys.member_of("b")).lease
    assert wait_until(lambda: world.etcd.keep_alive(lease) > 0)
    assert world.get(world.keys.epoch)["id"] == 1
    # The new keeper knows what its ranks run in: it notices the end of that epoch.
    a.kill()
    b.wait("AbortEpoch", epoch=1)
    assert not [r for r in b.seen if r["kind"] == "lost"]
    assert alive(second)


def test_a_wish_is_not_lost_with_the_keeper_that_heard_it(world: World):
    a, b = world.train("a", "b")
    os.kill(b.keeper_pid(), signal.SIGKILL)
    b.do("want", [1, 3], "")
    a.do("want", [1, 3], "")
    assert a.epoch()["seats"] == b.epoch()["seats"]


def test_a_stopped_keeper_is_replaced(world: World):
    """It can no longer keep the lease; it must not come back to life beside its successor either."""
    (a,) = world.train("a")
    first = a.keeper_pid()
    os.kill(first, signal.SIGSTOP)
    a.wait("Welcome", timeout_s=30)
    assert not alive(first)
    assert world.member("a")["incarnation"] == a.setup["incarnation"]


def test_a_second_process_of_the_same_name_is_refused(world: World):
    """It is told who has the name, since the person who started it must find that process."""
    (a,) = world.train("a", lease_ttl=4)
    second = world.start("a", lease_ttl=4)
    refusal = second.wait("Refused")["value"]
    assert refusal["error"] == "NameInUse"
    assert str(a.process.pid) in refusal["message"]
    assert world.member("a")["host"] in refusal["message"]
    assert world.member("a")["pid"] == a.process.pid


def test_a_name_is_free_again_when_its_lease_has_run_out(world: World):
    """A machine that was reset comes back before its lease has run out; that is no name in use."""
    (a,) = world.train("a")
    keeper = a.keeper_pid()
    os.kill(keeper, signal.SIGSTOP)
    a.kill()
    os.kill(keeper, signal.SIGKILL)
    again = world.start("a")
    again.wait("Welcome")
    assert world.member("a")["pid"] == again.process.pid


def test_a_member_that_differs_is_told_in_what(world: World):
    world.train("a", min_replicas=1)
    refusal = world.start("b", min_replicas=2).wait("Refused")["value"]
    assert refusal["error"] == "JobMismatch"
    assert "min_replicas is 2 here and 1 in the job" in refusal["message"]


def test_another_model_is_named_by_its_first_difference(world: World):
    a = world.start("a", more={"fingerprint": "f1", "layout": ["w [2, 2] float32", "b [2] float32"]})
    a.wait("Welcome")
    b = world.start("b", more={"fingerprint": "f2", "layout": ["w [2, 2] float32", "b [3] float32"]})
    refusal = b.wait("Refused")["value"]
    assert "b [3] float32 here, b [2] float32 in the job" in refusal["message"]


def test_members_share_a_secret_that_the_first_one_made(world: World):
    tokens = {world.start(n).wait("Welcome")["value"]["job_token"] for n in "ab"}
    assert len(tokens) == 1
    assert len(tokens.pop()) >= 32


def test_a_group_of_several_ranks_is_one_member(world: World):
    """It joins when all its ranks are there, and is dead when one of them is."""
    first = world.start("a", group_world_size=2)
    address = first.wait("up")["value"]["address"]
    more = {"address": address}
    second = world.start("a", rank=1, incarnation=first.setup["incarnation"], more=more, group_world_size=2)
    for r in (first, second):
        r.wait("Welcome")
    assert len(world.member("a")["transports"]) == 2
    reasons = [s["value"]["reason"] for s in first.seen if s["kind"] == "StillWaiting"]
    assert "waiting for rank 1 of this replica group" in reasons
    first.do("want", [0, 0], "")
    second.do("want", [0, 0], "")
    assert first.epoch() == second.epoch()
    second.kill()
    refusal = first.wait("Refused")["value"]
    assert "rank 1: SIGKILL" in refusal["message"]
    proof = wait_until(lambda: world.get(world.keys.departed_of("a")))
    assert proof["how"] == "rank 1: SIGKILL"


def test_a_frozen_trainer_steps_aside_and_comes_back(world: World):
    """Others must not wait for a process under a debugger; it must find its way back by itself."""
    a, b = world.train("a", "b", freeze_grace=0.5)
    b.kill(signal.SIGSTOP)
    why = a.wait("AbortEpoch", epoch=1)["value"]["why"]
    assert "frozen" in why
    wait_until(lambda: world.member("b") is None)
    b.kill(signal.SIGCONT)
    b.wait("AbortEpoch", epoch=1)
    wait_until(lambda: world.member("b") is not None)


def test_a_hung_trainer_departs_and_is_killed(world: World):
    a, b = world.train("a", "b", progress_timeout=0.6)
    b.do("mark", 4, 0)
    why = a.wait("AbortEpoch", epoch=1)["value"]["why"]
    assert "hung" in why
    assert b.process.wait(5) == -signal.SIGKILL


def test_waiting_for_peers_is_no_hang(world: World):
    (a,) = world.train("a", progress_timeout=0.4)
    a.do("mark", 4, 2)
    a.wait("Contact")
    a.wait("Contact")
    a.wait("Contact")
    a.wait("Contact")
    assert a.process.poll() is None


def test_an_operator_can_drain_and_evict(world: World):
    a, b = world.train("a", "b")
    world.etcd.put(world.keys.control_of("drain", "b"), b'{"what":"drain","replica_id":"b"}')
    b.wait("PleaseLeave", what="drain")
    wait_until(lambda: world.get(world.keys.control_of("drain", "b")) is None)
    # One that does not react to being evicted is ended by force.
    world.etcd.put(world.keys.control_of("evict", "b"), b'{"what":"evict","replica_id":"b"}')
    b.wait("PleaseLeave", what="evict")
    a.wait("AbortEpoch", epoch=1)
    assert b.process.wait(5) == -signal.SIGKILL
    assert world.get(world.keys.departed_of("b"))["how"] == "evicted"


def test_a_keeper_whose_trainer_died_before_it_connected_ends(world: World, tmp_path):
    """Nobody else would ever end it."""
    a = world.start("a", group_world_size=2)
    keeper = a.wait("up")["value"]["keeper"]
    a.kill()
    wait_until(lambda: not alive(keeper))


def test_signals_to_the_terminals_processes_do_not_reach_the_keeper(world: World):
    """Ctrl-C ends the trainers; the keeper must live long enough to tell etcd."""
    a, b = world.train("a", "b")
    keeper = b.keeper_pid()
    assert os.getsid(keeper) == keeper
    os.kill(keeper, signal.SIGINT)
    os.kill(keeper, signal.SIGTERM)
    b.wait("Contact")
    b.wait("Contact")
    assert alive(keeper)
    assert a.process.poll() is None


def test_only_a_thousand_epochs_of_history_are_kept(world: World):
    for i in (1, 2, 500, 1501):
        world.etcd.put(world.keys.timeline_of(i), b"{}")
    a = world.start("a")
    a.wait("Welcome")
    a.do("want", [1600, 5], "")
    assert a.epoch()["id"] == 1601
    kvs = wait_until(lambda: len(k := world.etcd.list(world.keys.timeline)[0]) == 2 and k)
    assert [kv.key for kv in kvs] == [world.keys.timeline_of(i) for i in (1501, 1601)]


def test_nonsense_in_etcd_harms_nobody(world: World):
    world.etcd.put(world.keys.members + "x", b"\xff\x00 no json")
    world.etcd.put(world.keys.tickets + "x", b"[]")
    world.etcd.put(world.keys.control_of("drain", "a"), b"7")
    (a,) = world.train("a")
    assert a.process.poll() is None


def test_a_lost_machine_is_a_suspect_when_its_lease_has_run_out(world: World):
    """Keeper and trainer vanish together: no proof of death, so nobody may take it for dead (I7)."""
    a, b = world.train("a", "b")
    keeper = b.keeper_pid()
    os.kill(keeper, signal.SIGSTOP)
    b.kill()
    os.kill(keeper, signal.SIGKILL)
    assert a.wait("SuspectMembers", epoch=1)["value"]["names"] == ["b"]
    assert world.get(world.keys.departed_of("b")) is None
    assert not [r for r in a.seen if r["kind"] == "AbortEpoch"]


def test_members_live_on_while_their_tokens_run_out(auth_server: EtcdServer, job: str):
    """Keep-alives, watches and writes all carry a token, which lives for a second here."""
    with closing(World(job, auth_server.url, user="me", password="pw")) as world:
        a, b = world.train("a", "b")
        lease = world.etcd.get(world.keys.member_of("b")).lease
        for _ in range(8):
            a.wait("Contact")
        assert world.etcd.get(world.keys.member_of("b")).lease == lease, "it was never lost"
        b.kill()
        a.wait("AbortEpoch", epoch=1)
        a.do("want", [1, 4], "peer died")
        assert a.epoch()["id"] == 2


def test_a_wrong_password_ends_the_start_with_its_reason(auth_server: EtcdServer, job: str):
    with closing(World(job, auth_server.url, user="me", password="no")) as world:
        refusal = world.start("a").wait("Refused")["value"]
    assert refusal["error"] == "EtcdAuthError"
    assert "password" in refusal["message"]


def test_a_whole_group_that_stood_still_finds_its_way_back(world: World):
    """A machine that was suspended: the keeper's lease is gone, what it believes is old."""
    a, b = world.train("a", "b", freeze_grace=30.0)
    keeper = b.keeper_pid()
    for pid in (keeper, b.process.pid):
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: world.member("b") is None)
    a.do("want", [1, 5], "b is gone")
    assert [s[0] for s in a.epoch()["seats"]] == ["a"]
    for pid in (keeper, b.process.pid):
        os.kill(pid, signal.SIGCONT)
    b.wait("AbortEpoch", epoch=1)
    b.do("want", [1, 5], "aborted")
    a.wait("WishReconfigure", epoch=2)
    a.do("want", [2, 6], "")
    assert [s[0] for s in b.epoch()["seats"]] == ["a", "b"]


def test_embedded_means_one_etcd_for_all_groups_of_the_machine(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first keeper starts it, the last one ends it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with closing(World(job, "embedded")) as world:
        a, b = world.train("a", "b", gather_window=1.0)
        for r in (a, b):
            r.do("goodbye", False)
            r.wait("Gone")
    assert not list(tmp_path.glob("ftkit-etcd-*/data"))


def test_a_keeper_that_nobody_has_spoken_to_ends_with_its_client(job: str, etcd_url: str):
    """A trainer may fail between its construction and its first step."""
    settings = Settings.resolve({}, etcd=etcd_url, job=job, replica_id="a")
    client = KeeperClient(
        settings,
        rank=0,
        incarnation=job,
        hello=lambda: pytest.fail("it never connects"),
        on_message=lambda message: None,
        on_lost=lambda error: None,
    )
    address = client.start()
    assert address.secret not in repr(address)
    client.close()
    with pytest.raises(WireError):
        connect(address.host, address.port, address.secret)
