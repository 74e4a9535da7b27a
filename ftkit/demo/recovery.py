"""Measure what a fault cost, at the survivors: when they noticed and went on, when the lost one was back.

Pure: the story and the fault go in. All times are of the clock that the processes of one machine share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

from ftkit.demo.journal import Event, Step
from ftkit.demo.story import Story


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to whom, and when."""

    kind: str
    """`SIGKILL` or `SIGSTOP`."""
    victim: str
    at: float
    epoch: int
    """The epoch that ran then."""
    thawed_at: float | None = None
    """When SIGCONT was sent."""


class Return(msgspec.Struct, frozen=True, kw_only=True):
    """How the victim came back; milliseconds since the fault, or since SIGCONT after a SIGSTOP."""

    epoch: int
    started_ms: float | None
    """Its new process was ready to join (after a SIGKILL)."""
    healing_ms: float | None
    healed_ms: float | None
    first_commit_ms: float
    healed_bytes: int
    heal_s: float
    pause_ms: dict[str, float]
    """At each of the others: from its last commit without the victim to the first one with it."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What followed from a fault; milliseconds since the fault unless said otherwise, None: not seen."""

    fault: Fault
    survivors: tuple[str, ...]
    detected_ms: float | None
    """The first survivor gave up the running epoch."""
    aborted_ms: float | None
    """No survivor had work in flight any more: it was cut, or had ended when the next epoch was asked for."""
    epoch_ms: float | None
    """A survivor was told the next epoch."""
    configured_ms: float | None
    """All survivors had met in it."""
    first_commit_ms: float | None
    """All survivors had committed a step in it."""
    epoch: int | None
    pause_ms: dict[str, float]
    """At each survivor: from its last commit in the old epoch to the first one in the new."""
    repeated_steps: int
    """Attempts that were not committed, of the survivor that had most."""
    back: Return | None

    @property
    def longest_pause_ms(self) -> float | None:
        """The pause of the survivor that waited longest."""
        return max(self.pause_ms.values(), default=None)


def measure(story: Story, fault: Fault) -> Recovery:
    """Return what followed from a fault, as far as it has been seen."""
    survivors = tuple(sorted(r for r in story.steps if r != fault.victim))
    pairs = {r: _across(story.committed(r), fault.epoch) for r in survivors}
    crossings = {r: p for r, p in pairs.items() if p is not None}
    whole = bool(survivors) and len(crossings) == len(survivors)
    last_s = max((after.monotonic for _, after in crossings.values()), default=None)
    until = last_s if whole and last_s is not None else float("inf")
    seen = {
        r: [e for e in story.events.get(r, ()) if fault.at <= e.monotonic <= until and e.epoch >= fault.epoch]
        for r in survivors
    }

    def since(at: float | None) -> float | None:
        return None if at is None else round(1000 * (at - fault.at), 1)

    new_epoch = max((after.epoch for _, after in crossings.values()), default=None)
    return Recovery(
        fault=fault,
        survivors=survivors,
        detected_ms=since(min(_times(seen, "abort"), default=None)),
        aborted_ms=since(max(_times(seen, "aborted", "want"), default=None)),
        epoch_ms=since(min(_times(seen, "epoch"), default=None)),
        configured_ms=since(max(_times(seen, "configured"), default=None)),
        first_commit_ms=since(last_s) if whole else None,
        epoch=new_epoch,
        pause_ms={r: _ms(before, after) for r, (before, after) in crossings.items()},
        repeated_steps=max((_failed(story, r, fault.at, until) for r in survivors), default=0),
        back=_back(story, fault, survivors),
    )


def _back(story: Story, fault: Fault, others: Iterable[str]) -> Return | None:
    victim = fault.victim
    first = next((s for s in story.committed(victim) if s.epoch > fault.epoch), None)
    if first is None:
        return None
    zero = fault.at if fault.thawed_at is None else fault.thawed_at

    def since(at: float | None) -> float | None:
        return None if at is None else round(1000 * (at - zero), 1)

    events = [e for e in story.events.get(victim, ()) if fault.at <= e.monotonic <= first.monotonic]
    healed = next((e for e in reversed(events) if e.kind == "healed"), None)
    healing = next((e for e in reversed(events) if e.kind == "healing"), None)
    started = next((s for s in story.starts if s.replica == victim and s.monotonic > fault.at), None)
    joins = {r: _across(story.committed(r), first.epoch - 1) for r in others}
    return Return(
        epoch=first.epoch,
        started_ms=since(started.monotonic if started is not None and started.pid == first.pid else None),
        healing_ms=since(None if healing is None else healing.monotonic),
        healed_ms=since(None if healed is None else healed.monotonic),
        first_commit_ms=round(1000 * (first.monotonic - zero), 1),
        healed_bytes=0 if healed is None else healed.bytes,
        heal_s=0.0 if healed is None else healed.seconds,
        pause_ms={r: _ms(*pair) for r, pair in joins.items() if pair is not None},
    )


def _across(steps: list[Step], epoch: int) -> tuple[Step, Step] | None:
    """Return the last commit up to an epoch and the first one after it, of one process."""
    for before, after in itertools.pairwise(steps):
        if before.epoch <= epoch < after.epoch:
            return (before, after) if before.pid == after.pid else None
    return None


def _ms(before: Step, after: Step) -> float:
    return round(1000 * (after.monotonic - before.monotonic), 1)


def _times(seen: dict[str, list[Event]], *kinds: str) -> list[float]:
    """Return when each survivor first told of such an event."""
    firsts = [next((e.monotonic for e in events if e.kind in kinds), None) for events in seen.values()]
    return [t for t in firsts if t is not None]


def _failed(story: Story, replica: str, since: float, until: float) -> int:
    return sum(not s.committed and since <= s.monotonic <= until for s in story.steps.get(replica, ()))
