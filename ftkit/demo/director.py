"""Decide when the demo kills and freezes whom, and when it is over.

Pure: the story and the time go in, actions come out. The moments are random but follow from the seed, and
each fault waits until the job has got over the last one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from msgspec.structs import replace

from ftkit.demo.recovery import Fault
from ftkit.demo.story import Story

PATIENCE_S = 60.0
"""How long the demo waits for the next thing that should happen."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to the trainer; launch starts it again."""

    victim: str


@dataclass(frozen=True, slots=True)
class Freeze:
    """Send SIGSTOP to the trainer and its keeper, as when a machine stands still."""

    victim: str


@dataclass(frozen=True, slots=True)
class Thaw:
    """Send SIGCONT to them."""

    victim: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Ask all groups to leave at a step boundary; `trouble` says what did not happen in time."""

    trouble: str = ""


Action = Kill | Freeze | Thaw | Finish


class Director:
    """Leads through the demo: gather, for each fault a calm time and the fault, a last calm time, the end."""

    def __init__(
        self, replicas: tuple[str, ...], *, seed: int, seconds: float, kill: bool = True, freeze: bool = True
    ) -> None:
        self._replicas = replicas
        self._rng = random.Random(seed)
        self._seconds = seconds
        self._todo: list[type[Kill] | type[Freeze]] = [Kill] * kill + [Freeze] * freeze
        self.faults: list[Fault] = []
        self.phase = "gather"
        self._since: float | None = None
        self._begun: float | None = None
        self._wait_s = 0.0

    @property
    def begun(self) -> float | None:
        """When all groups trained together for the first time."""
        return self._begun

    def decide(self, story: Story, now: float) -> Action | None:
        """Return what is to be done now, if anything."""
        if self._since is None:
            self._since = now
        action: Action | None = getattr(self, f"_{self.phase}")(story, now)
        if action is None and self.phase not in ("calm", "over") and now - self._since > PATIENCE_S:
            action = self._finish(f"{self._awaited()} within {PATIENCE_S:g} s")
        return action

    def _go(self, phase: str, now: float, wait_s: float = 0.0) -> None:
        self.phase, self._since, self._wait_s = phase, now, wait_s

    def _waited(self, now: float) -> bool:
        return self._since is not None and now - self._since >= self._wait_s

    def _awaited(self) -> str:
        if self.phase == "gather":
            return f"{', '.join(self._replicas)} did not train together"
        fault = self.faults[-1]
        if self.phase == "hit":
            return f"after {fault.kind} to {fault.victim} the others did not go on"
        return f"{fault.victim} did not come back after {fault.kind}"

    def _gather(self, story: Story, now: float) -> None:
        if story.together(self._replicas):
            self._begun = now
            self._rest(now)

    def _rest(self, now: float) -> None:
        """Train in peace: a random while before a fault, what is left of the time after the last."""
        assert self._begun is not None, "the demo has begun"
        if self._todo:
            wait_s = self._seconds * self._rng.uniform(0.1, 0.3)
        else:
            wait_s = max(0.1 * self._seconds, self._begun + self._seconds - now)
        self._go("calm", now, wait_s)

    def _calm(self, story: Story, now: float) -> Action | None:
        if not self._waited(now):
            return None
        if not self._todo:
            return self._finish()
        what = self._todo.pop(0)
        spared = {f.victim for f in self.faults}
        victim = self._rng.choice([r for r in self._replicas if r not in spared] or self._replicas)
        newest = story.newest()
        assert newest is not None, "a job that rests has trained"
        kind = "SIGKILL" if what is Kill else "SIGSTOP"
        self.faults.append(Fault(kind=kind, victim=victim, at=now, epoch=newest.epoch))
        self._go("hit", now)
        return what(victim)

    def done(self, now: float) -> None:
        """Note when exactly the last action was carried out."""
        if not self.faults:
            return
        fault = self.faults[-1]
        if self.phase == "hit":
            self.faults[-1] = replace(fault, at=now)
        elif self.phase == "back" and fault.kind == "SIGSTOP":
            self.faults[-1] = replace(fault, thawed_at=now)

    def _hit(self, story: Story, now: float) -> None:
        """Wait until the survivors have gone on."""
        fault = self.faults[-1]
        if story.together((r for r in self._replicas if r != fault.victim), fault.epoch):
            if fault.kind == "SIGSTOP":
                self._go("frozen", now, min(3.0, self._seconds * self._rng.uniform(0.02, 0.1)))
            else:
                self._go("back", now)

    def _frozen(self, story: Story, now: float) -> Action | None:
        """Let the survivors train alone for a while."""
        if not self._waited(now):
            return None
        self._go("back", now)
        return Thaw(self.faults[-1].victim)

    def _back(self, story: Story, now: float) -> None:
        """Wait until the victim trains with the others again."""
        if story.together(self._replicas, self.faults[-1].epoch):
            self._rest(now)

    def _over(self, story: Story, now: float) -> None:
        """Nothing is left to do."""

    def _finish(self, trouble: str = "") -> Finish:
        self.phase = "over"
        return Finish(trouble)
