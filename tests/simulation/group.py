"""Process groups of the imagination: barriers that complete only while all members are there to take part.

A barrier that completes has completed for everybody; what each member gets to know of it, and when, is
another matter.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulation.world import World

from ftkit.core.model import Epoch

if TYPE_CHECKING:
    from simulation.trainer import Trainer

POLL_S = 0.1


@dataclass
class Barrier:
    """One collective."""

    arrived: dict[str, list[int]] = field(default_factory=dict)
    done: bool = False


@dataclass
class Luck:
    """How often groups fail; changed by faults for a while."""

    vote_split: float = 0.0
    """A vote's result does not reach a member."""
    collective: float = 0.0
    """A collective of the step fails at one member."""
    rendezvous: float = 0.0
    heal: float = 0.0
    update: float = 0.0
    """The optimizer raises in the middle of its update."""
    hits: int = 0
    """How often any of them struck."""


class Group:
    """The process groups of one epoch, seen from all its members at once."""

    def __init__(self, world: World, epoch: Epoch, luck: Luck) -> None:
        """Nobody has come yet."""
        self.world, self.epoch, self.luck = world, epoch, luck
        self.members: dict[str, Trainer] = {}
        self.left: set[str] = set()
        self.barriers: dict[Hashable, Barrier] = {}

    def arrive(self, kind: Hashable, trainer: Trainer, ballot: list[int]) -> None:
        """Take part in a collective; `trainer.on_result` or `on_failure` tells how it ended."""
        self.members[trainer.name] = trainer
        barrier = self.barriers.setdefault(kind, Barrier())
        barrier.arrived[trainer.name] = ballot
        self._try(kind)

    def _try(self, kind: Hashable) -> None:
        barrier = self.barriers[kind]
        seats = [s.replica_id for s in self.epoch.seats]
        if barrier.done or self.left or len(barrier.arrived) < len(seats):
            return
        present = [self.members[r] for r in seats]
        job = present[0].replica.job
        able = all(t.runs() for t in present)
        if not able or not all(job.can_talk(a, b) for a in present for b in present if a.name < b.name):
            self.world.after(POLL_S, self._try, kind)
            return
        barrier.done = True
        result = [max(column) for column in zip(*barrier.arrived.values(), strict=True)]
        what = kind[0] if isinstance(kind, tuple) else kind
        for trainer in present:
            delay = self.world.rng.expovariate(1 / (0.02 if what == "configure" else 0.002))
            if self.world.chance(self._odds(str(what))):
                self.luck.hits += 1
                trainer.later(delay, trainer.on_failure, kind, "lost its connection")
            else:
                trainer.later(delay, trainer.on_result, kind, result)

    def _odds(self, what: str) -> float:
        luck = self.luck
        table = {"vote": luck.vote_split, "grads": luck.collective, "configure": luck.rendezvous}
        return table.get(what, 0.0)

    def leave(self, trainer: Trainer, *, sockets_close: bool = True) -> None:
        """Abort: what others wait for can no longer complete; some get an error, the rest only wait."""
        self.left.add(trainer.name)
        if not sockets_close:
            return
        for kind, barrier in self.barriers.items():
            if barrier.done or trainer.name not in self.members:
                continue
            for name in sorted(barrier.arrived):
                other = self.members[name]
                if other is not trainer and self.world.chance(0.4):
                    delay = self.world.between(0.001, 0.01)
                    other.later(delay, other.on_failure, kind, f"{trainer.name} closed its connection")
