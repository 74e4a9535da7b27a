"""What `ftkit watch` makes of the changes of a job's keys."""

from __future__ import annotations

import msgspec

from ftkit.core.model import Abort, Control, Departed, Epoch, Record, Seat, Ticket, Version
from ftkit.dashboard.timeline import Timeline

P = "/ftkit/j/"


def epoch(number: int, *names: str, **more: object) -> bytes:
    seats = tuple(Seat(n, "i", Version(number - 1, 10 * number)) for n in names or ("t0",))
    return msgspec.json.encode(Epoch(id=number, seats=seats, time=1000.0 + number, **more))  # type: ignore[arg-type]


def record(name: str, incarnation: str = "i") -> bytes:
    return msgspec.json.encode(Record(replica_id=name, incarnation=incarnation, host="h", pid=7))


def test_it_begins_with_the_last_epochs_and_who_is_there() -> None:
    keys = {f"{P}timeline/{n:010d}": epoch(n) for n in range(1, 8)}
    keys |= {f"{P}epoch": epoch(7), f"{P}members/t0": record("t0"), f"{P}stats/t0": b"{}"}
    moments = Timeline("j").listed(keys, num_history=3)
    assert [(m.event, m.epoch) for m in moments] == [("epoch", 5), ("epoch", 6), ("epoch", 7), ("joined", 0)]
    assert moments[0].time == 1005.0
    assert [m.earlier for m in moments] == [True, True, True, False]
    assert moments[2].text == "epoch 7: 1 replica group (t0), version 6-70"


def test_an_epoch_and_its_copy_are_one_event() -> None:
    timeline = Timeline("j")
    timeline.listed({})
    assert len(timeline.changed(f"{P}epoch", epoch(3, "t0", "t1"))) == 1
    assert timeline.changed(f"{P}timeline/0000000003", epoch(3, "t0", "t1")) == []


def test_an_etcd_that_was_wiped_may_count_from_one_again() -> None:
    timeline = Timeline("j")
    timeline.listed({f"{P}epoch": epoch(9)})
    assert [m.epoch for m in timeline.listed({f"{P}epoch": epoch(1)})] == [1]


def test_each_change_is_told_in_words() -> None:
    timeline = Timeline("j", tickets=True)
    timeline.listed({})
    gone = Departed(replica_id="t0", incarnation="i", how="SIGKILL", host="h", version=Version(3, 4))
    told = [
        timeline.changed(f"{P}members/t0", record("t0")),
        timeline.changed(
            f"{P}tickets/t0", msgspec.json.encode(Ticket(replica_id="t0", incarnation="i", epoch=4))
        ),
        timeline.changed(
            f"{P}control/drain/t0", msgspec.json.encode(Control(what="drain", replica_id="t0", by="me"))
        ),
        timeline.changed(f"{P}control/drain/t0", None),
        timeline.changed(f"{P}abort", msgspec.json.encode(Abort(epoch=3, by="t1", why="timeout"))),
        timeline.changed(f"{P}departed/t0", msgspec.json.encode(gone)),
        timeline.changed(f"{P}members/t0", None),
        timeline.changed(f"{P}departed/t0", None),
    ]
    assert [m.text for moments in told for m in moments] == [
        "t0 is live on h:7",
        "t0 asks for epoch 4, version 0-0",
        "drain of t0 asked for by me",
        "drain of t0 acknowledged",
        "epoch 3 aborted by t1: timeout",
        "t0 ended on h: SIGKILL, version 3-4",
        "t0 is no longer live",
    ]


def test_keys_put_back_after_a_lost_lease_are_no_news_but_a_new_incarnation_is() -> None:
    timeline = Timeline("j")
    timeline.listed({f"{P}members/t0": record("t0")})
    assert timeline.changed(f"{P}members/t0", record("t0")) == []
    [again] = timeline.changed(f"{P}members/t0", record("t0", "new"))
    assert again.text == "t0 is live again on h:7"


def test_what_happened_during_a_gap_is_caught_up() -> None:
    timeline = Timeline("j")
    timeline.listed({f"{P}members/t0": record("t0"), f"{P}members/t1": record("t1")})
    moments = timeline.listed({f"{P}members/t1": record("t1"), f"{P}members/t2": record("t2")})
    assert [(m.event, m.replica_id) for m in moments] == [("vanished", "t0"), ("joined", "t2")]


def test_values_that_cannot_be_read_do_not_end_it() -> None:
    timeline = Timeline("j", tickets=True)
    timeline.listed({})
    for section in (
        "epoch",
        "members/t0",
        "departed/t0",
        "abort",
        "control/drain/t0",
        "tickets/t0",
        "what/else",
    ):
        for moment in timeline.changed(P + section, b"\xff{"):
            assert moment.text
