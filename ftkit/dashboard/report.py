"""Say how a job is doing: who is in, in which epoch and step, who heals, and why there is no quorum.

Pure: keys in, a report out. The reason is the one that the job's proposers give themselves (`decide`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from ftkit.core.model import Epoch, JobConfig, Policy, Record, Seat, Version
from ftkit.core.plan import Plan, plan
from ftkit.core.quorum import Propose, View, decide, is_live, standing_ticket
from ftkit.dashboard.job import Job


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One replica group as etcd shows it; None and "" where nothing is known."""

    replica_id: str
    rank: int | None = None
    """Its replica rank in the current epoch; None: not in it."""
    live: bool = True
    host: str = ""
    pid: int = 0
    incarnation: str = ""
    entered_with: str = ""
    """The version with which it entered the current epoch."""
    step: int | None = None
    steps_per_s: float | None = None
    compute_s: float | None = None
    wait_s: float | None = None
    bytes_healed: int | None = None
    phase: str = ""
    heals_from: tuple[str, ...] = ()
    """Whom it receives its state from at present."""
    note: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How a job is doing."""

    job: str
    state: str
    """`training`, `forming`, `waiting` or `empty`."""
    reason: str
    epoch: int
    epoch_age_s: float | None
    epoch_reason: str
    min_replicas: int
    step: int | None
    members: tuple[Member, ...]
    departed: tuple[str, ...]
    requests: tuple[str, ...]
    """Operators' requests that have not been acknowledged."""
    broken: tuple[str, ...]


class Dater:
    """Remember since when tickets stand and seats are empty, over several looks at a job."""

    def __init__(self) -> None:
        self._tickets: dict[tuple[str, str, int], float] = {}
        self._gone: dict[str, float] = {}
        self._first = True

    def view(self, job: Job, policy: Policy, now: float) -> View:
        """Return the view that `decide` wants; what stood at the first look is taken to have gathered."""
        bare = View(members=job.members, tickets=job.tickets, departed=job.departed, epoch=job.epoch)
        since = now - policy.gather_window if self._first else now
        self._first = False
        seats = () if job.epoch is None else job.epoch.seats
        standing = {(r, t.incarnation, t.epoch): r for r in job.tickets if (t := standing_ticket(bare, r))}
        gone = [s.replica_id for s in seats if not is_live(bare, s)]
        self._tickets = {key: self._tickets.get(key, since) for key in standing}
        self._gone = {r: self._gone.get(r, now) for r in gone}
        return msgspec.structs.replace(
            bare,
            tickets_seen={standing[key]: at for key, at in self._tickets.items()},
            gone_since=self._gone,
        )


def job_policy(config: JobConfig, policy: Policy) -> Policy:
    """Return the limits of a job: what its members have agreed on, the rest from `policy`."""
    return msgspec.structs.replace(
        policy,
        min_replicas=config.min_replicas,
        max_replicas=config.max_replicas,
        outage_grace=config.outage_grace,
        takeover_after=config.takeover_after,
    )


def report(job: Job, policy: Policy, *, now: float, wall: float, dater: Dater | None = None) -> Report:
    """Describe the job; `now` is monotonic, `wall` the time of day that epochs are stamped with."""
    if job.config is not None:
        policy = job_policy(job.config, policy)
    view = (dater or Dater()).view(job, policy, now)
    state, reason = _state(job, view, policy, now)
    members = tuple(_members(job, view))
    steps = [m.step for m in members if m.step is not None and m.rank is not None]
    epoch = job.epoch
    entered = max((s.version for s in epoch.seats), default=Version(0, 0)) if epoch else None
    return Report(
        job=job.name,
        state=state,
        reason=reason,
        epoch=0 if epoch is None else epoch.id,
        epoch_age_s=None if epoch is None or not epoch.time else max(0.0, wall - epoch.time),
        epoch_reason="" if epoch is None else epoch.reason,
        min_replicas=policy.min_replicas,
        step=max([*steps, *([entered.step] if entered else [])], default=None),
        members=members,
        departed=tuple(
            f"{d.replica_id}: {d.how or 'ended'}{' on ' + d.host if d.host else ''} at version {d.version}"
            for _, d in sorted(job.departed.items())
        ),
        requests=tuple(f"{c.what} {c.replica_id}" for _, c in sorted(job.control.items())),
        broken=tuple(job.broken),
    )


def _state(job: Job, view: View, policy: Policy, now: float) -> tuple[str, str]:
    if job.empty:
        return "empty", f"etcd knows no job {job.name}"
    if not job.members:
        return "empty", "no replica group is running"
    epoch = job.epoch
    over = _why_over(job, epoch, view)
    if epoch is not None and not over:
        return "training", ""
    decision = decide(view, policy, now)
    if isinstance(decision, Propose):
        names = ", ".join(s.replica_id for s in decision.seats)
        return "forming", f"epoch {decision.id} may form of {names} ({decision.reason})"
    return "waiting", f"{over}; {decision.reason}" if over else decision.reason


def _why_over(job: Job, epoch: Epoch | None, view: View) -> str:
    """Say why nobody can commit in the current epoch, or "" when all its members are at work in it."""
    if epoch is None:
        return "no epoch yet"
    if job.abort is not None and job.abort.epoch >= epoch.id:
        by = f" by {job.abort.by}" if job.abort.by else ""
        return f"epoch {epoch.id} was aborted{by} ({job.abort.why or 'no reason given'})"
    gone = [s.replica_id for s in epoch.seats if not is_live(view, s)]
    if gone:
        return f"epoch {epoch.id} has lost {', '.join(gone)}"
    out = [s.replica_id for s in epoch.seats if standing_ticket(view, s.replica_id)]
    return f"{', '.join(out)} stepped out of epoch {epoch.id}" if out else ""


def _members(job: Job, view: View) -> list[Member]:
    """Describe the members of the epoch in rank order, then the other live ones."""
    seats = () if job.epoch is None else job.epoch.seats
    # Who heals from whom is the same for all: planning it for each would cost the square of their number.
    part = plan(job.epoch, seats[0].replica_id) if job.epoch is not None and seats else None
    healing = frozenset(part.healing) if part is not None else frozenset()
    inside = [
        _member(job, view, s.replica_id, rank, s, part if s.replica_id in healing else None)
        for rank, s in enumerate(seats)
    ]
    known = {s.replica_id for s in seats if is_live(view, s)}
    return inside + [_member(job, view, r, None, None, None) for r in sorted(set(job.members) - known)]


def _member(
    job: Job, view: View, replica_id: str, rank: int | None, seat: Seat | None, heals: Plan | None
) -> Member:
    record = job.members.get(replica_id)
    live = record is not None and (seat is None or is_live(view, seat))
    stats = _stats(job, record) if live and record is not None else {}
    healed = number(stats, "bytes_healed")
    sources = _sources(heals, stats) if live and heals is not None else ()
    return Member(
        replica_id=replica_id,
        rank=rank,
        live=live,
        host=record.host if live and record is not None else "",
        pid=record.pid if live and record is not None else 0,
        incarnation=seat.incarnation
        if seat is not None
        else record.incarnation
        if record is not None
        else "",
        entered_with="" if seat is None else str(seat.version),
        step=_step(stats, None if sources or not live else seat),
        steps_per_s=number(stats, "steps_per_s"),
        compute_s=number(stats, "compute_s"),
        wait_s=number(stats, "wait_s"),
        bytes_healed=None if healed is None else int(healed),
        phase=_phase(job, stats),
        heals_from=sources,
        note=_note(job, view, replica_id, seat, live),
    )


def _stats(job: Job, record: Record) -> Mapping[str, object]:
    """Return the figures of this incarnation; a zero is not written, so what is missing is one."""
    stats = job.stats.get(record.replica_id)
    if stats is None or stats.get("incarnation", record.incarnation) != record.incarnation:
        return {}
    return {"step": 0, "steps_per_s": 0.0, **stats}


def _step(stats: Mapping[str, object], seat: Seat | None) -> int | None:
    """Return the last step known: the version that it entered the epoch with may be newer than stats."""
    step = number(stats, "step")
    if seat is None or seat.version.step == 0:
        return None if step is None else int(step)
    epoch = number(stats, "epoch")
    known = Version(seat.version.epoch if epoch is None else int(epoch), int(step or 0))
    return max(known, seat.version).step


def _phase(job: Job, stats: Mapping[str, object]) -> str:
    """Return what the member was doing, unless that was before the current epoch."""
    phase, when = stats.get("phase"), number(stats, "time")
    stale = job.epoch is not None and when is not None and when < job.epoch.time
    return phase.lower() if isinstance(phase, str) and not stale else ""


def _sources(part: Plan, stats: Mapping[str, object]) -> tuple[str, ...]:
    """Return whom a member that began the epoch without the state heals from, or () when it has it by now."""
    if str(stats.get("phase", "")).lower() == "healing":
        return part.sources
    epoch, step = number(stats, "epoch"), number(stats, "step")
    if step is None:
        return part.sources
    # Figures are seconds old: they may be from before the epoch, and then the member is yet to heal.
    behind = step < part.version.step if epoch is None else (epoch, step) < part.version
    return part.sources if behind else ()


def _note(job: Job, view: View, replica_id: str, seat: Seat | None, live: bool) -> str:
    if not live:
        gone = job.departed.get(replica_id)
        if gone is not None and seat is not None and gone.incarnation == seat.incarnation:
            return f"gone: {gone.how or 'ended'}"
        if replica_id in job.members:
            return "was started again"
        return "gone without proof of death (lease ran out)"
    asked = [what for what in ("drain", "evict", "pause") if f"{what}/{replica_id}" in job.control]
    if asked:
        return f"asked to {' and '.join(asked)}"
    ticket = standing_ticket(view, replica_id)
    if ticket is not None and ticket.leaving:
        return "is leaving"
    if ticket is not None:
        return f"asks for epoch {ticket.epoch} with version {ticket.version}"
    return "" if seat is not None else "starting"


def number(stats: Mapping[str, object], name: str) -> float | None:
    """Return a number out of published stats, which may come from another release of ftkit."""
    value = stats.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits is valid JSON
        return None
