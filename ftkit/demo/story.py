"""Put the lines of all replicas together: who trains, in which epoch and step, and which steps count.

Pure: lines go in, answers come out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from statistics import fmean, median

from ftkit.demo.journal import Draw, End, Eval, Event, Hash, Line, Start, Step

RATE_OVER_S = 3.0


class Story:
    """All that the journals have told so far."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.starts: list[Start] = []
        self._draws: dict[tuple[str, int], list[Draw]] = {}
        self.steps: dict[str, list[Step]] = {}
        """Each replica's attempts, committed or not."""
        self.events: dict[str, list[Event]] = {}
        self.hashes: dict[str, dict[str, str]] = {}
        """Digest by version and replica."""
        self.evals: dict[int, Eval] = {}
        self.ends: list[End] = []
        for line in lines:
            self.absorb(line)

    def absorb(self, line: Line) -> None:
        """Take in one line."""
        if isinstance(line, Start):
            self.starts.append(line)
        elif isinstance(line, Draw):
            self._draws.setdefault((line.replica, line.step), []).append(line)
        elif isinstance(line, Step):
            self.steps.setdefault(line.replica, []).append(line)
        elif isinstance(line, Event):
            self.events.setdefault(line.replica, []).append(line)
        elif isinstance(line, Hash):
            self.hashes.setdefault(line.version, {})[line.replica] = line.sha256
        elif isinstance(line, Eval):
            self.evals[line.step] = line
        else:
            self.hashes.setdefault(line.version, {})[line.replica] = line.sha256
            self.ends.append(line)

    def pid(self, replica: str) -> int | None:
        """Return the process that runs under this name, as far as is known."""
        return next((s.pid for s in reversed(self.starts) if s.replica == replica), None)

    def draws(self, replica: str, step: int) -> list[Draw]:
        """Return what a replica drew for a step, the last attempt last."""
        return self._draws.get((replica, step), [])

    def committed(self, replica: str) -> list[Step]:
        """Return the steps that a replica saw committed, in their order."""
        return [s for s in self.steps.get(replica, ()) if s.committed]

    def last_commit(self, replica: str) -> Step | None:
        """Return the newest step that a replica saw committed."""
        return next((s for s in reversed(self.steps.get(replica, ())) if s.committed), None)

    def newest(self) -> Step | None:
        """Return the newest committed step of all: later epochs beat more steps."""
        last = [s for r in self.steps if (s := self.last_commit(r)) is not None]
        return max(last, key=lambda s: (s.epoch, s.step), default=None)

    def together(self, replicas: Iterable[str], after_epoch: int = 0) -> bool:
        """Say whether these are the members of one epoch, a later one than given, and each has committed."""
        names = tuple(sorted(replicas))
        last = [self.last_commit(r) for r in names]
        return (
            all(s is not None and s.members == names and s.epoch > after_epoch for s in last)
            and len({s.epoch for s in last if s is not None}) == 1
        )

    def lineage(self) -> list[Step]:
        """Return the committed steps that count, one line for each step number.

        A step may have been committed twice: by a replica that died with it, and again by those who went
        on without having heard of it. The later epoch is the one that lived on.
        """
        found: dict[int, Step] = {}
        for steps in self.steps.values():
            for s in steps:
                if s.committed and (s.step not in found or s.epoch > found[s.step].epoch):
                    found[s.step] = s
        return [found[number] for number in sorted(found)]

    def losses(self) -> list[tuple[float, int, float]]:
        """Return (time, step, mean loss of the replicas) of each step that counts."""
        told: dict[tuple[int, int], list[float]] = {}
        for steps in self.steps.values():
            for s in steps:
                if s.committed:
                    told.setdefault((s.epoch, s.step), []).append(s.loss)
        return [(s.monotonic, s.step, fmean(told[s.epoch, s.step])) for s in self.lineage()]

    def rate(self, replica: str, now: float) -> float:
        """Return a replica's committed steps per second of late."""
        recent = 0
        for s in reversed(self.steps.get(replica, ())):
            if s.monotonic < now - RATE_OVER_S:
                break
            recent += s.committed
        return recent / RATE_OVER_S

    def usual_step_s(self) -> float | None:
        """Return the median time between two commits within one epoch."""
        gaps = [
            b.monotonic - a.monotonic
            for r in self.steps
            for a, b in itertools.pairwise(self.committed(r))
            if a.epoch == b.epoch and a.pid == b.pid
        ]
        return median(gaps) if gaps else None
