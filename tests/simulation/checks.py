"""The invariants of the design, checked at each commit, vote, heal and epoch while the simulation runs.

This is the omniscient observer: it sees all processes at once, which no member ever can.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulation.world import Violation

from ftkit.core.model import BROKEN, FRESH, Epoch, Version
from ftkit.core.plan import Plan

if TYPE_CHECKING:
    from simulation.replica import Job
    from simulation.trainer import Trainer


@dataclass
class Lived:
    """What is known of one epoch that was entered."""

    epoch: Epoch
    base: Version | None = None
    """The version that its first commit started from."""
    commits: dict[int, float] = field(default_factory=dict)
    """When each step was first committed."""


class Checks:
    """Watches a job."""

    def __init__(self, job: Job) -> None:
        """Begin with nothing seen."""
        self.job = job
        self.epochs: dict[tuple[int, int], tuple[object, ...]] = {}
        self.lived: dict[tuple[object, ...], Lived] = {}
        self.states: dict[Version, int] = {FRESH: 1}
        self.starts: dict[tuple[object, ...], tuple[Version, int]] = {}
        self.given_up: dict[int, set[str]] = {}
        self.num_epochs = 0
        self.num_failed = 0
        self.failures: list[tuple[float, str, str]] = []
        self.last_commit = 0.0
        self.longest_gap = 0.0
        self.first_fault: tuple[int, dict[str, int]] | None = None
        """At the first fault: how many epochs there were, and the step of each incarnation."""
        self.clusters: dict[tuple[object, ...], int] = {}
        """In which of etcd's lives an epoch was first written: a wiped etcd cannot keep I3 by itself."""
        self.forgiving = False
        """Whether a wiped etcd may have let an unrelated job count the same numbers (I8)."""

    def mark_fault(self) -> None:
        """A fault strikes: remember how things stood before the first."""
        if self.first_fault is None:
            steps = {t.incarnation: t.lineage.version.step for t in self.job.trainers()}
            self.first_fault = (self.num_epochs, steps)
            self.longest_gap, self.last_commit = 0.0, self.job.world.now
            self.failures.clear()

    # -- etcd -------------------------------------------------------------------------------------

    def put(self, key: str, value: object) -> None:
        """A key was written."""
        if key != "epoch" or not isinstance(value, Epoch):
            return
        self.num_epochs += 1
        seats = ", ".join(f"{s.replica_id}@{s.version}" for s in value.seats)
        self.job.world.say("etcd", "epoch %d: %s (by %s; %s)", value.id, seats, value.proposer, value.reason)
        self.given_up[value.id] = {t.incarnation for t in self.job.trainers() if t.goodbye or t.fenced()}
        self.clusters.setdefault((value.id, value.seats), self.job.etcd.cluster)
        self._agree(value)

    def _agree(self, epoch: Epoch) -> None:
        """I2: one member list for one number."""
        ids = tuple((s.replica_id, s.incarnation) for s in epoch.seats)
        known = self.epochs.setdefault((self.job.etcd.cluster if self.forgiving else 0, epoch.id), ids)
        if known != ids and not self.forgiving:
            raise Violation("I2", f"epoch {epoch.id} has members {known} and {ids}")
        if len(set(ids)) != len(ids) or list(ids) != sorted(ids):
            raise Violation("I2", f"epoch {epoch.id} is not a sorted set: {ids}")

    # -- members ----------------------------------------------------------------------------------

    def enter(self, trainer: Trainer, epoch: Epoch, plan: Plan) -> None:
        """A member has been offered an epoch."""
        self._agree(epoch)
        seat = epoch.seat(trainer.name)
        if seat is None or seat.incarnation != trainer.incarnation:
            raise Violation("I2", f"{trainer.name} entered epoch {epoch.id}, which does not name it")
        self.lived.setdefault((epoch.id, epoch.seats), Lived(epoch))
        best = max(s.version for s in epoch.seats)
        if not plan.heals and trainer.lineage.version != best:
            raise Violation(
                "I4", f"{trainer.name} at {trainer.lineage.version} counts as up to date with {best}"
            )

    def served(self, sources: list[Trainer], plan: Plan) -> None:
        """Some members served their state to one that heals."""
        for source in sources:
            if source.state is None or source.lineage.version == BROKEN:
                raise Violation("I5", f"{source.name} serves a half-written state")
            if source.lineage.version != plan.version:
                raise Violation("I4", f"{source.name} at {source.lineage.version} serves {plan.version}")
        if len({s.state for s in sources}) > 1:
            raise Violation("I1", f"sources of {plan.version} hold different states")

    def settled(self, trainer: Trainer) -> None:
        """A member applied the step that was in doubt."""
        self._name(trainer)

    def voted_ok(self, trainer: Trainer) -> None:
        """A member voted to commit."""
        if trainer.state is None or trainer.lineage.version == BROKEN:
            raise Violation("I5", f"{trainer.name} votes ok with a half-written state")

    def failed(self, trainer: Trainer, why: str) -> None:
        """A member left its epoch in error."""
        self.num_failed += 1
        self.failures.append((self.job.world.now, trainer.name, why))

    def _name(self, trainer: Trainer) -> None:
        """I1: a version names one state."""
        version, state = trainer.lineage.version, trainer.state
        assert state is not None, "a state was committed"
        if self.states.setdefault(version, state) != state and not self.forgiving:
            raise Violation("I1", f"{trainer.name} holds another state under {version}")

    def commit(self, trainer: Trainer, epoch: Epoch, before: Version, state: int | None) -> None:
        """A member committed a step of an epoch."""
        now = self.job.world.now
        if state is None:
            raise Violation("I5", f"{trainer.name} committed onto a half-written state")
        self._same_start(trainer, epoch, before, state)
        self._name(trainer)
        lived = self.lived[epoch.id, epoch.seats]
        step = trainer.lineage.version.step
        first = step not in lived.commits
        if first:
            if trainer.lineage.version.step != before.step + 1:
                raise Violation("I1", f"{trainer.name} went from {before} to {trainer.lineage.version}")
            if lived.base is None:
                lived.base = before
                if not self.forgiving:
                    self._keep_lineage(lived)
            self._no_split_brain(trainer, lived)
            lived.commits[step] = now
            self.longest_gap = max(self.longest_gap, now - self.last_commit)
            self.last_commit = now
        trainer.replica.checkpoint = (trainer.lineage.version, trainer.state or 0)

    def _same_start(self, trainer: Trainer, epoch: Epoch, before: Version, state: int) -> None:
        """I1: all members of an epoch begin a step with one state."""
        key = (epoch.id, epoch.seats, before.step)
        if self.starts.setdefault(key, (before, state)) != (before, state):
            raise Violation(
                "I1", f"{trainer.name} took step {before.step + 1} of epoch {epoch.id} from another state"
            )

    def _no_split_brain(self, trainer: Trainer, lived: Lived) -> None:
        """I3: once a later epoch commits, an earlier one may at most finish the step that was in doubt."""
        mine = {(s.replica_id, s.incarnation) for s in lived.epoch.seats}
        for other in self.lived.values():
            if other.epoch.id <= lived.epoch.id or not other.commits:
                continue
            if self._cluster(other) != self._cluster(lived):
                continue
            begun = min(other.commits.values())
            late = sum(when >= begun for when in lived.commits.values())
            theirs = {(s.replica_id, s.incarnation) for s in other.epoch.seats}
            if late > 0 or not mine & theirs:
                raise Violation(
                    "I3",
                    f"{trainer.name} commits {trainer.lineage.version} although "
                    f"epoch {other.epoch.id} has been committing since {begun:.3f}",
                )

    def _cluster(self, lived: Lived) -> int:
        return self.clusters.get((lived.epoch.id, lived.epoch.seats), 1)

    def _keep_lineage(self, lived: Lived) -> None:
        """I1: an epoch goes on from where the last one stopped, but for the step in doubt.

        Unless all who hold the newer state are dead, or have been gone for so long that they are replaced.
        """
        assert lived.base is not None, "called at the first commit"
        gone = self.given_up.get(lived.epoch.id, set())
        last = max((k for k in self.epochs if k[1] < lived.epoch.id), default=(0, 0))
        before = self.epochs.get(last, ())
        for trainer in self.job.trainers():
            version = trainer.lineage.version
            if trainer.state is None or version <= lived.base or version.epoch >= lived.epoch.id:
                continue
            if (trainer.name, trainer.incarnation) not in before:
                continue  # rule 4 asks the members of the last epoch only
            if version.step - lived.base.step > 1 and trainer.incarnation not in gone:
                disjoint = not set(before) & {(s.replica_id, s.incarnation) for s in lived.epoch.seats}
                raise Violation(
                    "I3" if disjoint else "I1",
                    f"epoch {lived.epoch.id} starts from {lived.base}, {trainer.name} lives with {version}",
                )
