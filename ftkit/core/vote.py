"""The vote that ends each step, and the lineage of versions that it extends.

Pure: the caller carries the ballots (one all-reduce, MAX) and applies the update.
"""

from __future__ import annotations

import msgspec

from ftkit.core.model import BROKEN, FRESH, Epoch, Version
from ftkit.core.plan import Plan, plan

BALLOT_SIZE = 6


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What all voters read from the reduced ballots."""

    commit: bool
    reconfigure: bool
    why: str = ""
    """Why not, when the step is not committed."""


def ballot(*, ok: bool, reconfigure: bool, epoch: int, step: int) -> list[int]:
    """Write one member's ballot; reduced element by element with MAX over all members.

    The negated copies turn MAX into MIN, so that a disagreement about step or epoch shows.
    """
    return [int(not ok), int(reconfigure), step, -step, epoch, -epoch]


def tally(reduced: list[int], *, participants: int, min_replicas: int) -> Verdict:
    """Read the verdict from the reduced ballots; all members read the same one."""
    not_ok, reconfigure, step_max, step_min, epoch_max, epoch_min = reduced
    why = ""
    if step_max != -step_min:
        why = f"members voted on different steps ({-step_min} to {step_max})"
    elif epoch_max != -epoch_min:
        why = f"members voted in different epochs ({-epoch_min} to {epoch_max})"
    elif not_ok:
        why = "a member voted no"
    elif participants < min_replicas:
        why = f"{participants} participants, at least {min_replicas} are needed"
    return Verdict(commit=not why, reconfigure=bool(reconfigure) or bool(why), why=why)


class Lineage:
    """The version of one member's state, and the only ways in which it may change.

    A member enters an epoch with the version on its ticket; heals, or is up to date; votes; commits.
    """

    def __init__(self, version: Version = FRESH) -> None:
        """Start at a version: FRESH, or that of a loaded checkpoint."""
        self.version = version
        self.epoch: Epoch | None = None
        self._voted_ok_on: Version | None = None
        self._undecided: Version | None = None

    @property
    def undecided(self) -> Version | None:
        """The version that the last step has if it was committed elsewhere (commit in doubt), or None.

        The averaged gradients of that step are still at hand; `forget_undecided` says they no longer are.
        """
        return self._undecided

    def enter(self, epoch: Epoch, replica_id: str, *, init_sync: bool = True) -> Plan:
        """Enter an epoch; the returned plan says whether this member must heal first."""
        self.epoch = epoch
        self._voted_ok_on = None
        return plan(epoch, replica_id, init_sync=init_sync)

    def begin_heal(self) -> None:
        """From here until `end_heal` the state is half written (I5)."""
        self.version = BROKEN
        self.forget_undecided()

    def end_heal(self, version: Version) -> None:
        """The state of `version` has been received whole and verified."""
        self.version = version

    def votes(self, ok: bool) -> list[int]:
        """Return this member's ballot for the step after its version; see `ballot` for the wish to switch."""
        assert self.epoch is not None, "a vote needs an epoch"
        self._voted_ok_on = self.next_version() if ok and self.version >= FRESH else None
        ok = self._voted_ok_on is not None
        return ballot(ok=ok, reconfigure=False, epoch=self.epoch.id, step=self.version.step)

    def next_version(self) -> Version:
        """The version that the running step leads to when it is committed."""
        assert self.epoch is not None, "a step needs an epoch"
        return Version(self.epoch.id, self.version.step + 1)

    def commit(self) -> None:
        """The vote said yes and the update has been applied."""
        self.version = self.next_version()
        self._voted_ok_on = None
        self.forget_undecided()

    def lose_vote(self) -> None:
        """The vote itself failed: the others may or may not have committed."""
        self._undecided = self._voted_ok_on
        self._voted_ok_on = None

    def reject(self) -> None:
        """The vote said no: nobody has committed."""
        self._voted_ok_on = None

    def settle(self) -> None:
        """The undecided step turned out to be committed, and its update has been applied here too."""
        assert self._undecided is not None, "no step is in doubt"
        self.version = self._undecided
        self.forget_undecided()

    def forget_undecided(self) -> None:
        """The gradients of the undecided step are gone."""
        self._undecided = None

    def fail_update(self) -> None:
        """The update was applied in part: this member must heal (I5)."""
        self.version = BROKEN
        self.forget_undecided()
