"""What `ftkit status` says of a job, given its keys."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ftkit.core.model import (
    Abort,
    Control,
    Departed,
    Epoch,
    JobConfig,
    Policy,
    Record,
    Seat,
    Ticket,
    Version,
)
from ftkit.dashboard.job import Job, parse
from ftkit.dashboard.report import Dater, Report, report
from ftkit.dashboard.text import duration, render, size, table


class Key(NamedTuple):
    key: str
    value: bytes


def member(i: int, incarnation: str = "i") -> Record:
    return Record(replica_id=f"t{i}", incarnation=incarnation, host=f"h{i}", pid=100 + i)


def seat(i: int, epoch: int = 6, step: int = 50) -> Seat:
    return Seat(f"t{i}", "i", Version(epoch, step))


def job(members: list[Record], epoch: Epoch | None = None, **more: object) -> Job:
    found = Job("j", config=JobConfig(min_replicas=2), epoch=epoch, **more)  # type: ignore[arg-type]
    found.members = {m.replica_id: m for m in members}
    return found


def describe(found: Job, now: float = 1000.0, dater: Dater | None = None) -> Report:
    return report(found, Policy(), now=now, wall=5000.0, dater=dater)


EPOCH = Epoch(id=7, seats=(seat(0), seat(1)), time=4900.0, reason="joined: t1")


def test_a_job_at_work_is_training() -> None:
    found = job([member(0), member(1)], EPOCH, stats={"t0": {"step": 61, "epoch": 7, "steps_per_s": 2.5}})
    told = describe(found)
    assert (told.state, told.epoch, told.step, told.epoch_age_s) == ("training", 7, 61, 100.0)
    assert [(m.replica_id, m.rank, m.step) for m in told.members] == [("t0", 0, 61), ("t1", 1, 50)]


def test_figures_from_before_the_epoch_do_not_turn_the_clock_back() -> None:
    old = {"epoch": 5, "step": 44, "phase": "waiting", "time": 4899.0}
    told = describe(job([member(0), member(1)], EPOCH, stats={"t0": old})).members[0]
    assert (told.step, told.phase) == (50, "")


def test_a_newcomer_does_not_stop_the_training() -> None:
    ticket = Ticket(replica_id="t2", incarnation="i", epoch=8)
    told = describe(job([member(0), member(1), member(2)], EPOCH, tickets={"t2": ticket}))
    assert told.state == "training"
    assert told.members[2].note == "asks for epoch 8 with version 0-0"


def test_no_quorum_comes_with_the_reason_that_the_proposers_have() -> None:
    ticket = Ticket(replica_id="t0", incarnation="i", epoch=1)
    told = describe(job([member(0)], tickets={"t0": ticket}))
    assert told.state == "waiting"
    assert "1 of at least 2 replica groups are ready" in told.reason


def test_who_holds_the_others_up_is_named() -> None:
    ticket = Ticket(replica_id="t0", incarnation="i", epoch=8, version=Version(7, 60))
    told = describe(
        job([member(0), member(1)], EPOCH, tickets={"t0": ticket}, abort=Abort(epoch=7, by="t0", why="x"))
    )
    assert told.state == "waiting"
    assert "aborted by t0 (x)" in told.reason
    assert "waiting for t1 of epoch 7 to stop" in told.reason


def test_looking_again_knows_how_long_it_has_been_waited() -> None:
    ticket = Ticket(replica_id="t0", incarnation="i", epoch=8)
    found, dater = job([member(0), member(1)], EPOCH, tickets={"t0": ticket}), Dater()
    describe(found, 1000.0, dater)
    assert "30.1 s of 60 s" in describe(found, 1030.0, dater).reason


def test_an_epoch_that_may_form_says_of_whom() -> None:
    tickets = {f"t{i}": Ticket(replica_id=f"t{i}", incarnation="i", epoch=1) for i in (0, 1)}
    told = describe(job([member(0), member(1)], tickets=tickets))
    assert told.state == "forming"
    assert "epoch 1 may form of t0, t1" in told.reason


def test_the_dead_are_told_from_the_disappeared() -> None:
    """One is proven, for the other the job has to wait: the operator needs to know which."""
    gone = {
        "t0": Departed(replica_id="t0", incarnation="i", how="SIGKILL", host="h0", version=Version(7, 60))
    }
    told = describe(job([], EPOCH, departed=gone))
    assert told.state == "empty"
    assert [m.note for m in told.members] == ["gone: SIGKILL", "gone without proof of death (lease ran out)"]
    assert told.departed == ("t0: SIGKILL on h0 at version 7-60",)


def test_a_new_incarnation_is_not_the_member_of_the_epoch() -> None:
    told = describe(job([member(0), member(1, "new")], EPOCH))
    assert [(m.replica_id, m.rank, m.live) for m in told.members] == [
        ("t0", 0, True),
        ("t1", 1, False),
        ("t1", None, True),
    ]
    assert told.members[1].note == "was started again"
    assert "has lost t1" in told.reason


def test_who_heals_from_whom_is_shown_until_it_is_done() -> None:
    epoch = Epoch(id=7, seats=(seat(0), seat(1, 0, 0), seat(2)))
    found = job([member(i) for i in range(3)], epoch)
    assert describe(found).members[1].heals_from == ("t0", "t2")
    found.stats = {"t1": {"step": 51}}
    assert describe(found).members[1].heals_from == ()
    found.stats = {"t1": {"step": 50, "epoch": 5}}
    assert describe(found).members[1].heals_from == ("t0", "t2"), "the figures are from before the epoch"
    found.stats = {"t1": {"step": 51, "epoch": 7}}
    assert describe(found).members[1].heals_from == ()
    found.stats = {"t1": {"phase": "healing"}}
    assert describe(found).members[1].heals_from == ("t0", "t2")
    assert "heals from t0, t2" in render(describe(found))


def test_requests_and_broken_keys_are_shown() -> None:
    keys = [
        Key("/ftkit/j/members/t0", msgspec.json.encode(member(0))),
        Key("/ftkit/j/members/t1", b'{"replica_id": 3}'),
        Key("/ftkit/j/control/drain/t0", msgspec.json.encode(Control(what="drain", replica_id="t0"))),
        Key("/ftkit/j/stats/t0", b"\xff"),
        Key("/ftkit/j/later/thing", b"of another release"),
    ]
    told = describe(parse("j", keys))
    assert told.requests == ("drain t0",)
    assert told.members[0].note == "asked to drain"
    assert [b.split(":")[0] for b in told.broken] == ["members/t1", "stats/t0"]


def test_figures_of_an_earlier_incarnation_are_not_shown() -> None:
    found = job([member(0), member(1)], EPOCH, stats={"t0": {"step": 61, "incarnation": "old"}})
    assert describe(found).members[0].step == 50


def test_stats_of_another_release_do_no_harm() -> None:
    strange = {"t2": {"step": "many", "steps_per_s": None, "wait_s": True, "bytes_healed": 3.0}}
    told = describe(job([member(0), member(1), member(2)], EPOCH, stats=strange)).members[2]
    assert (told.step, told.steps_per_s, told.wait_s, told.bytes_healed) == (None, None, None, 3)


def test_the_text_of_an_empty_job_says_so() -> None:
    assert render(describe(Job("j"))) == "job j: empty\n  etcd knows no job j"


def test_times_and_sizes_read_well() -> None:
    assert [duration(s) for s in (0.44, 12, 200, 7500, 350_000)] == [
        "0.4 s",
        "12 s",
        "3m 20s",
        "2h 5m",
        "4d 1h",
    ]
    assert [size(n) for n in (12, 2048, 3 << 30)] == ["12 B", "2.0 KiB", "3.0 GiB"]
    assert table([("a", "bcd"), ("efg", "h")]) == ["a    bcd", "efg  h"]
