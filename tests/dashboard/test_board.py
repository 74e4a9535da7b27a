"""What a dashboard shows of a job, given its keys and their changes."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkit.core.model import Abort, Departed, Epoch, JobConfig, Policy, Record, Seat, Ticket, Version
from ftkit.dashboard import board as module
from ftkit.dashboard.board import Board, Snapshot, clip
from ftkit.dashboard.report import number


class Key(NamedTuple):
    key: str
    value: bytes | None
    mod_revision: int = 1
    create_revision: int = 1


class Scene:
    """A board, and the etcd that it would be watching."""

    def __init__(self, **limits: int) -> None:
        self.board = Board("j", Policy(**limits))  # type: ignore[arg-type]
        self.revision = 10
        self.at = 1000.0

    def list(self, values: dict[str, object], history: tuple[Key, ...] = ()) -> Snapshot:
        keys = [self.key(name, value) for name, value in values.items()]
        self.board.listed(keys, history, self.at)
        return self.look()

    def put(self, name: str, value: object, created: int | None = None) -> Snapshot:
        self.board.changed([self.key(name, value, created)], self.at)
        return self.look()

    def key(self, name: str, value: object, created: int | None = None) -> Key:
        self.revision += 1
        raw = None if value is None else value if isinstance(value, bytes) else msgspec.json.encode(value)
        return Key(f"/ftkit/j/{name}", raw, self.revision, self.revision if created is None else created)

    def look(self, later: float = 0.0) -> Snapshot:
        self.at += later
        return self.board.snapshot(self.at, self.at + 4000.0)


def record(name: str) -> Record:
    secret = {"key": "hunter2"}
    return Record(replica_id=name, incarnation="i", host="h", pid=7, transports=("h:1",), user_data=secret)


def seats(*names: str, behind: tuple[str, ...] = ()) -> tuple[Seat, ...]:
    return tuple(Seat(n, "i", Version(0, 0) if n in behind else Version(6, 50)) for n in names)


def running(*names: str, **more: object) -> dict[str, object]:
    epoch = Epoch(id=7, seats=seats(*names), time=4900.0, reason="joined: t1")
    return {"epoch": epoch, **{f"members/{n}": record(n) for n in names}, **more}


def states(snapshot: Snapshot) -> dict[str, str]:
    return {row.replica_id: row.state for row in snapshot.rows}


def test_each_member_has_a_state() -> None:
    scene = Scene()
    names = ("t0", "t1", "t2", "t3", "t4")
    epoch = Epoch(id=7, seats=seats(*names, behind=("t1",)), time=4900.0)
    values = running(*names) | {"epoch": epoch, "members/t5": record("t5"), "members/t6": record("t6")}
    values["tickets/t6"] = Ticket(replica_id="t6", incarnation="i", epoch=8)
    values["tickets/t4"] = Ticket(replica_id="t4", incarnation="i", epoch=8, leaving=True)
    told = scene.list(values)
    assert states(told) == {
        "t0": "in epoch",
        "t1": "healing",
        "t2": "in epoch",
        "t3": "in epoch",
        "t4": "leaving",
        "t5": "starting",
        "t6": "waiting",
    }
    scene.put("members/t2", None)
    scene.put("departed/t3", Departed(replica_id="t3", incarnation="i", how="SIGKILL"))
    told = scene.put("members/t3", None)
    assert (states(told)["t2"], states(told)["t3"]) == ("suspect", "gone")
    assert told.counts["suspect"] == 1
    assert told.reason, "there is a reason why nobody trains"


def test_a_spare_is_told_from_one_who_has_just_come() -> None:
    """A spare stays; whoever is waiting is let in at the next step."""
    scene = Scene()
    ticket = Ticket(replica_id="t2", incarnation="i", epoch=8)
    epoch = running("t0", "t1")["epoch"]
    scene.list({"members/t2": record("t2"), **running("t0", "t1")})
    assert states(scene.put("tickets/t2", ticket))["t2"] == "waiting"
    asked = scene.revision
    scene.put("epoch", msgspec.structs.replace(epoch, id=8, time=scene.at + 4000.0))  # type: ignore[type-var]
    ninth = Ticket(replica_id="t2", incarnation="i", epoch=9)
    assert states(scene.put("tickets/t2", ninth, created=asked))["t2"] == "waiting"
    assert states(scene.look(later=module.PASSED_OVER_S))["t2"] == "spare"


def test_a_full_epoch_has_spares_at_once() -> None:
    ticket = Ticket(replica_id="t2", incarnation="i", epoch=8)
    told = Scene(max_replicas=2).list(
        {**running("t0", "t1"), "members/t2": record("t2"), "tickets/t2": ticket}
    )
    assert states(told)["t2"] == "spare"


def test_the_reason_is_that_of_status_and_counts_on() -> None:
    scene = Scene()
    scene.list(running("t0", "t1"))
    scene.put("tickets/t0", Ticket(replica_id="t0", incarnation="i", epoch=8, version=Version(7, 60)))
    told = scene.put("abort", Abort(epoch=7, by="t0", why="reset"))
    assert told.state == "waiting"
    assert "aborted by t0 (reset); waiting for t1 of epoch 7 to stop, 0.0 s of 60 s" in told.reason
    assert "30.0 s of 60 s" in scene.look(later=30.0).reason


def test_nothing_secret_leaves() -> None:
    config = JobConfig(token="s3cret-token", token_sha256="s3cret-digest", fingerprint="s3cret-print")
    told = Scene().list({"config": config, **running("t0", "t1")})
    text = msgspec.json.encode(told).decode()
    for secret in ("s3cret", "hunter2", "h:1"):
        assert secret not in text
    broken = Scene().list({"config": b'{"token": "s3cret-token", "schema": "s3cret"}', **running("t0", "t1")})
    assert broken.broken
    assert "s3cret" not in msgspec.json.encode(broken).decode()


def past(number: int, *names: str) -> Key:
    epoch = Epoch(id=number, seats=seats(*names), time=4000.0 + number)
    return Key(f"/ftkit/j/timeline/{number:010d}", msgspec.json.encode(epoch))


def test_the_past_comes_from_the_history_and_goes_on_with_the_changes() -> None:
    scene = Scene()
    told = scene.list(running("t0", "t1"), history=(past(5, "t0"), past(6, "t0", "t2")))
    assert [s.epoch for s in told.spans] == [5, 6, 7]
    assert [m.epoch for m in told.moments if m.event == "epoch"] == [5, 6, 7]
    told = scene.put("epoch", Epoch(id=8, seats=seats("t0"), time=5000.0))
    assert [(s.epoch, s.members) for s in told.spans][-1] == (8, ("t0",))
    assert [m.epoch for m in told.moments if m.event == "epoch"] == [5, 6, 7, 8]


def test_what_went_by_in_a_gap_of_the_watch_is_told_once() -> None:
    scene = Scene()
    values = running("t0", "t1")
    scene.list(values, history=(past(6, "t0"),))
    newest = scene.key("epoch", Epoch(id=10, seats=seats("t0"), time=5000.0))
    wanted = scene.board.untold([newest])
    assert wanted == ("/ftkit/j/timeline/0000000008", "/ftkit/j/timeline/0000000011")
    history = [past(8, "t0"), past(9, "t0"), Key("/ftkit/j/timeline/0000000010", newest.value)]
    rest = [scene.key(name, value) for name, value in values.items() if name != "epoch"]
    scene.board.listed([newest, *rest], history, scene.at)
    told = scene.look()
    assert [m.epoch for m in told.moments if m.event == "epoch"] == [6, 7, 8, 9, 10]
    assert [s.epoch for s in told.spans] == [6, 7, 8, 9, 10]
    assert scene.board.untold([newest]) is None
    assert states(told) == {"t0": "in epoch", "t1": "starting"}


def test_step_rates_are_remembered() -> None:
    scene = Scene()
    scene.list(running("t0", "t1"))
    for i in range(3):
        scene.at += 10.0
        for name, rate in (("t0", 2.0 + i), ("t1", 1.0)):
            told = scene.put(f"stats/{name}", {"steps_per_s": rate, "incarnation": "i", "epoch": 7})
    assert [rate for _, rate in told.rates] == [2.0, 3.0, 4.0]
    assert told.rows[0].rates == (2.0, 3.0, 4.0)
    scene.put("members/t0", None)
    assert scene.look().rows[0].rates == ()


def test_a_job_of_any_size_fits() -> None:
    """The page must not choke on the thousands, and whoever is in trouble must not be among the hidden."""
    names = [f"t{i:04d}" for i in range(3000)]
    values = running(*names)
    del values[f"members/{names[-1]}"]
    for name in names:
        values[f"departed/x{name}"] = Departed(replica_id=f"x{name}", incarnation="i", how="y" * 5000)
    told = Scene().list(values)
    assert (len(told.rows), told.num_hidden) == (module.NUM_MEMBERS, 3000 - module.NUM_MEMBERS)
    assert told.rows[0].state == "suspect"
    assert told.departed[-1] == f"and {3000 - module.NUM_LISTED} more"
    assert len(msgspec.json.encode(told)) < 500_000


def test_texts_are_short_and_cannot_steer_a_terminal() -> None:
    assert clip("a\x1b[2Jb\nc") == "a\\x1b[2Jb\\x0ac"
    assert len(clip("x" * 10_000)) < 500
    assert clip("häufig 训练") == "häufig 训练"


@pytest.mark.parametrize("value", [10**400, True, "7", None, [1]])
def test_figures_that_are_no_numbers_count_as_missing(value: object) -> None:
    assert number({"step": value}, "step") is None


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = (
    "replica_id",
    "incarnation",
    "epoch",
    "version",
    "step",
    "time",
    "id",
    "seats",
    "steps_per_s",
    "phase",
)
SECTIONS = (
    "epoch",
    "abort",
    "config",
    "members/t0",
    "tickets/t0",
    "stats/t0",
    "departed/t0",
    "control/x",
    "x/y",
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(SECTIONS),
            st.binary(max_size=8)
            | json.map(msgspec.json.encode)
            | st.dictionaries(st.sampled_from(FIELDS), json, max_size=6).map(msgspec.json.encode),
        ),
        max_size=5,
    )
)
def test_no_value_ends_the_dashboard(changes: list[tuple[str, bytes]]) -> None:
    """Somebody will look at it when the keys are broken."""
    scene = Scene()
    scene.list(running("t0", "t1"))
    for section, value in changes:
        msgspec.json.encode(scene.put(section, value))
