"""Keep what is known of a job's keys up to date, and say at any moment what a dashboard should show.

Pure: listings and changes of keys in, a `Snapshot` out; the caller says what time it is. What leaves is
chosen field by field: neither the job's token nor addresses, nor anything else that members write for each
other. Each list and each text has a bound, however large the job or the values are.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from ftkit.core.model import Epoch, Policy
from ftkit.core.quorum import View, standing_ticket
from ftkit.dashboard.job import Job, decode, parse
from ftkit.dashboard.report import Dater, Member, Report, number, report
from ftkit.dashboard.timeline import Moment, Timeline
from ftkit.keeper.keys import JobKeys

NUM_MEMBERS = 200
NUM_MOMENTS = 200
NUM_SPANS = 60
NUM_NAMES = 40
"""Names of an epoch that are kept for the picture of its past."""
NUM_LISTED = 20
NUM_RATES = 180
NUM_MEMBER_RATES = 30
TEXT = 400
"""Characters of a text that are shown; a reason can name thousands of members."""

PASSED_OVER_S = 5.0
"""A newcomer left out of an epoch for this long is a spare; sooner it may just have come too late for it."""


class Change(Protocol):
    """A key that was listed or has changed."""

    @property
    def key(self) -> str:
        """The whole key."""

    @property
    def value(self) -> bytes | None:
        """The value, JSON; None: the key is gone."""

    @property
    def mod_revision(self) -> int:
        """When it was written."""

    @property
    def create_revision(self) -> int:
        """When it came into being."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One member as it is shown."""

    replica_id: str
    state: str
    """`in epoch`, `healing`, `waiting`, `spare`, `starting`, `leaving`, `suspect` or `gone`."""
    rank: int | None
    host: str
    pid: int
    step: int | None
    steps_per_s: float | None
    compute_s: float | None
    wait_s: float | None
    bytes_healed: int | None
    phase: str
    note: str
    rates: tuple[float, ...]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch of the past."""

    epoch: int
    time: float
    num_members: int
    members: tuple[str, ...]
    reason: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All that a dashboard shows; times are seconds since 1970."""

    job: str
    state: str
    reason: str
    epoch: int
    epoch_time: float | None
    epoch_reason: str
    min_replicas: int
    step: int | None
    counts: dict[str, int]
    """How many members are in each state."""
    rows: tuple[Row, ...]
    num_hidden: int
    """Members for whom there was no room; those in trouble come first."""
    rates: tuple[tuple[float, float], ...]
    """Time and steps per second of the job."""
    spans: tuple[Span, ...]
    moments: tuple[Moment, ...]
    """Newest last."""
    departed: tuple[str, ...]
    requests: tuple[str, ...]
    broken: tuple[str, ...]
    etcd_error: str = ""


class _Entry(NamedTuple):
    value: bytes
    mod_revision: int
    create_revision: int


class _Key(NamedTuple):
    key: str
    value: bytes


class Board:
    """What is known of a job; one thread owns it."""

    def __init__(self, job: str, policy: Policy) -> None:
        self.name = job
        self.keys = JobKeys(job)
        self.last_epoch = 0
        """The id of the last epoch that was told."""
        self._policy = policy
        self.range = (self.keys.prefix, self.keys.timeline)
        """The keys to be watched: all but the past epochs, the last ones in order, which can be many."""
        self.complete = False
        """Whether the range has been listed."""
        self._known: dict[str, _Entry] = {}
        self._timeline = Timeline(job)
        self._dater = Dater()
        self._moments: deque[Moment] = deque(maxlen=NUM_MOMENTS)
        self._spans: deque[Span] = deque(maxlen=NUM_SPANS)
        self._rates: deque[tuple[float, float]] = deque(maxlen=NUM_RATES)
        self._member_rates: dict[str, deque[float]] = {}

    def listed(self, keys: Iterable[Change], history: Iterable[Change], wall: float) -> None:
        """Take a listing of `range`; `history` holds the epochs that were not told so far."""
        before, self._known = self._known, {}
        for key in keys:
            self._note(key)
        first, self.complete = not self.complete, True
        past = {k.key: k.value for k in history if k.value is not None}
        for name in sorted(past):
            self._span(past[name])
        if self.keys.epoch in self._known:
            self._span(self._known[self.keys.epoch].value)
        for name, entry in self._known.items():
            if name not in before or before[name].value != entry.value:
                self._figures(name, entry.value)
        found = {**past, **{name: entry.value for name, entry in self._known.items()}}
        moments = self._timeline.listed(found, num_history=NUM_SPANS)
        if first:  # they may have been there for days
            moments = [msgspec.structs.replace(m, earlier=True) for m in moments]
        self._tell(moments, wall)

    def changed(self, changes: Iterable[Change], wall: float) -> None:
        """Take changes, in their order."""
        for change in changes:
            self._note(change)
            if change.key == self.keys.epoch and change.value is not None:
                self._span(change.value)
            self._figures(change.key, change.value)
            self._tell(self._timeline.changed(change.key, change.value), wall)

    def untold(self, keys: Iterable[Change]) -> tuple[str, str] | None:
        """Return the range of the history that is to be read beside a listing; None when nothing is new."""
        value = next((k.value for k in keys if k.key == self.keys.epoch), None)
        epoch = None if value is None else decode(value, Epoch)
        if not isinstance(epoch, Epoch) or epoch.id <= self.last_epoch:
            return None
        first = max(1, self.last_epoch + 1, epoch.id - NUM_SPANS + 1)
        return self.keys.timeline_of(first), self.keys.timeline_of(epoch.id + 1)

    def snapshot(self, now: float, wall: float, etcd_error: str = "") -> Snapshot:
        """Return what is to be shown; `now` is monotonic, `wall` the time of day."""
        job = parse(self.name, [_Key(name, entry.value) for name, entry in self._known.items()])
        told = report(job, self._policy, now=now, wall=wall, dater=self._dater)
        view = View(members=job.members, tickets=job.tickets, departed=job.departed, epoch=job.epoch)
        rows = [self._row(m, told, job, view, wall) for m in told.members]
        self._member_rates = {r: s for r, s in self._member_rates.items() if r in job.members}
        self._sample(rows, wall)
        shown = rows if len(rows) <= NUM_MEMBERS else sorted(rows, key=lambda r: r.state == "in epoch")
        return Snapshot(
            job=told.job,
            state=told.state,
            reason=clip(told.reason),
            epoch=told.epoch,
            epoch_time=job.epoch.time if job.epoch is not None and job.epoch.time else None,
            epoch_reason=clip(told.epoch_reason),
            min_replicas=told.min_replicas,
            step=told.step,
            counts=dict(Counter(row.state for row in rows)),
            rows=tuple(shown[:NUM_MEMBERS]),
            num_hidden=max(0, len(rows) - NUM_MEMBERS),
            rates=tuple(self._rates),
            spans=tuple(self._spans),
            moments=tuple(self._moments),
            departed=_some(told.departed),
            requests=_some(told.requests),
            broken=_some(told.broken),
            etcd_error=clip(etcd_error),
        )

    def _note(self, change: Change) -> None:
        if change.value is None:
            self._known.pop(change.key, None)
        else:
            self._known[change.key] = _Entry(change.value, change.mod_revision, change.create_revision)

    def _tell(self, moments: Sequence[Moment], wall: float) -> None:
        for moment in moments:
            # What is told by a listing has happened at some time before, unless its key says when.
            time = wall if moment.time is None and not moment.earlier else moment.time
            self._moments.append(msgspec.structs.replace(moment, text=clip(moment.text), time=time))

    def _span(self, value: bytes) -> None:
        epoch = decode(value, Epoch)
        if isinstance(epoch, str):
            return
        self.last_epoch = epoch.id
        last = self._spans[-1] if self._spans else None
        if last is not None and (last.epoch, last.time) == (epoch.id, epoch.time):
            return
        self._spans.append(
            Span(
                epoch=epoch.id,
                time=epoch.time,
                num_members=len(epoch.seats),
                members=tuple(clip(s.replica_id) for s in epoch.seats[:NUM_NAMES]),
                reason=clip(epoch.reason),
            )
        )

    def _figures(self, key: str, value: bytes | None) -> None:
        """Keep the step rates that a member has published."""
        if value is None or not key.startswith(self.keys.stats):
            return
        stats = decode(value, dict[str, object])
        if isinstance(stats, str):
            return
        rates = self._member_rates.setdefault(
            key.removeprefix(self.keys.stats), deque(maxlen=NUM_MEMBER_RATES)
        )
        rates.append(round(number(stats, "steps_per_s") or 0.0, 3))

    def _sample(self, rows: Sequence[Row], wall: float) -> None:
        """Note the job's step rate: all members of an epoch take their steps together."""
        rates = [r.steps_per_s for r in rows if r.rank is not None and r.steps_per_s is not None]
        if rates and (not self._rates or wall >= self._rates[-1][0] + 1.0):
            self._rates.append((round(wall, 1), round(max(rates), 3)))

    def _row(self, member: Member, told: Report, job: Job, view: View, wall: float) -> Row:
        note = member.note
        if member.heals_from:
            note = "; ".join(filter(None, (f"heals from {', '.join(member.heals_from[:8])}", note)))
        return Row(
            replica_id=clip(member.replica_id),
            state=self._standing(member, told, job, view, wall),
            rank=member.rank,
            host=clip(member.host),
            pid=member.pid,
            step=member.step,
            steps_per_s=member.steps_per_s,
            compute_s=member.compute_s,
            wait_s=member.wait_s,
            bytes_healed=member.bytes_healed,
            phase=clip(member.phase),
            note=clip(note),
            rates=tuple(self._member_rates.get(member.replica_id, ())) if member.live else (),
        )

    def _standing(self, member: Member, told: Report, job: Job, view: View, wall: float) -> str:
        """Say in one word how a member is placed."""
        if not member.live:
            departed = job.departed.get(member.replica_id)
            proven = departed is not None and departed.incarnation == member.incarnation
            return "gone" if proven or member.replica_id in job.members else "suspect"
        ticket = standing_ticket(view, member.replica_id)
        if ticket is not None and ticket.leaving:
            return "leaving"
        if member.rank is not None:
            return "waiting" if ticket is not None else "healing" if member.heals_from else "in epoch"
        if ticket is None:
            return "starting"
        return "spare" if self._passed_over(member.replica_id, told, job, wall) else "waiting"

    def _passed_over(self, replica_id: str, told: Report, job: Job, wall: float) -> bool:
        """Say whether a newcomer had asked before the running epoch was formed, and is still not in it."""
        ticket = self._known.get(self.keys.ticket_of(replica_id))
        epoch = self._known.get(self.keys.epoch)
        if ticket is None or epoch is None or job.epoch is None or told.state != "training":
            return False
        limit = self._policy.max_replicas if job.config is None else job.config.max_replicas
        full = limit and len(job.epoch.seats) >= limit
        waited = wall - job.epoch.time >= PASSED_OVER_S
        return bool(full) or (ticket.create_revision < epoch.mod_revision and waited)


def clip(text: str) -> str:
    """Return a text short enough to be shown, and without anything that could steer a terminal."""
    cut = text if len(text) <= TEXT else f"{text[:TEXT]} …"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in cut)


def _some(items: Sequence[str]) -> tuple[str, ...]:
    more = len(items) - NUM_LISTED
    shown = [clip(item) for item in items[:NUM_LISTED]]
    return (*shown, f"and {more} more") if more > 0 else tuple(shown)


def counted(counts: Mapping[str, int]) -> str:
    """Return how many members are in each state, in words."""
    return ", ".join(f"{n} {state}" for state, n in sorted(counts.items(), key=lambda i: (-i[1], i[0])))
