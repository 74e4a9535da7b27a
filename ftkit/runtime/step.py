"""The step of one rank: be in an epoch, reduce, vote, commit or repeat.

All decisions are the core's (`Lineage`, `tally`, `plan`); this carries them out on the training thread.
Other threads only say that the epoch is over, and change the members while this one computes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch.distributed import Work

from ftkit.config import Settings
from ftkit.core.vote import Lineage, Verdict, tally
from ftkit.errors import FtkitError, GroupError, Left, StepFailed
from ftkit.groups.ballots import BallotBox
from ftkit.keeper.client import KeeperClient
from ftkit.keeper.messages import GoodbyeKeeper
from ftkit.keeper.progress import Phase
from ftkit.runtime.collectives import Collective, Collectives
from ftkit.runtime.entry import Entry
from ftkit.runtime.healing import Healer
from ftkit.runtime.inbox import Inbox
from ftkit.runtime.links import Links, first_line
from ftkit.runtime.membership import Membership
from ftkit.runtime.progress import Progress
from ftkit.runtime.reformer import Reformer
from ftkit.runtime.warmup import warm_up
from ftkit.runtime.weights import Weights

logger = logging.getLogger(__name__)

LAST_WORD_S = 2.0
"""How long the keeper may take to tell what has become of a rank that has closed its connections."""

PATIENCE = 3
"""A member that itself fails leaves after `max_retries`; the others bear with it this many times longer."""


class Step:
    """The training thread's side of the protocol; see the module's docstring."""

    def __init__(
        self,
        settings: Settings,
        *,
        keeper: KeeperClient,
        inbox: Inbox,
        links: Links,
        healer: Healer,
        lineage: Lineage,
        membership: Membership,
        progress: Progress,
        settle: Callable[[], bool],
    ) -> None:
        """Wire the parts together; nothing happens before the first `start`."""
        self._settings = settings
        self._keeper = keeper
        self._inbox = inbox
        self._links = links
        self._healer = healer
        self.lineage = lineage
        self.membership = membership
        self._progress = progress
        self._entry = Entry(
            membership=membership,
            links=links,
            healer=healer,
            lineage=lineage,
            progress=progress,
            settle=settle,
        )
        self._weights = Weights(links)
        self.started = False
        self.begun_by: tuple[str, ...] = ()
        self.committing = False
        self.leaving: str | None = None
        self._in_step = False
        self._blocked_since: float | None = None
        self._planned = False
        self._failures_in_a_row = 0
        self._own_failures = 0
        self.collectives = Collectives(self._launch, self.fail)
        self._reformer = Reformer(
            membership, lambda: self.collectives, form=links.form, may_salvage=self._may_salvage
        )

    # -- what other threads may call ---------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """The running epoch does not work any more: a collective has failed."""
        if self.membership.report(error) and self._in_step:
            self.collectives.pause()
            self._reformer.wake()

    def abort(self, epoch: int, why: str, *, left_out: bool = False) -> None:
        """The running epoch (`epoch`, or 0 for whichever) is over: end the work in flight.

        `left_out`: the others have gone on without this member.
        """
        over = self.membership.cut(epoch, why, left_out=left_out)
        if over:
            self._healer.abort(over)
            if self._in_step:
                self.collectives.pause()
                self._reformer.wake()

    def report_error(self, error: Exception) -> None:
        """This member itself cannot commit the step."""
        self.membership.report(error, own=True)

    def stalled_s(self) -> float:
        """Seconds for which peers have been waited for without any progress; 0 when none are."""
        waits = [self._blocked_since, self._entry.blocked_since, self._links.voting_since()]
        if self.collectives.num_pending():
            waits.append(self.collectives.moved_at)
        return max((time.monotonic() - w for w in waits if w is not None), default=0.0)

    def num_pending(self) -> int:
        """Count what waits for peers right now."""
        others = (
            self._blocked_since is not None,
            self._entry.blocked_since is not None,
            self._links.voting_since() is not None,
            self._reformer.busy,
        )
        return self.collectives.num_pending() + sum(others)

    # -- the step ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a step, in an epoch and healed; costs nothing when nothing has changed."""
        if self.started:
            return
        if self.committing:
            self.finish(None)
        membership = self.membership
        self._reformer.wait_idle()
        while True:
            unfinished, self._reformer.unfinished = self._reformer.unfinished, None
            if self._must_change():
                self._change_epoch()
            elif unfinished is not None:
                self._entry.finish(unfinished)
            else:
                break
        if self._inbox.fatal is not None:
            raise self._inbox.fatal
        self.collectives.begin()
        # Before `_in_step`: from there on the members may change in the background.
        self.begun_by = (
            () if membership.epoch is None else tuple(x.replica_id for x in membership.epoch.seats)
        )
        self.started = self._in_step = True
        self._progress.mark(Phase.COMPUTE)
        if membership.error is not None:  # in this very moment
            self._reformer.wake()

    def _must_change(self) -> bool:
        """Say whether the running epoch cannot be used any more; all ranks of a group say the same.

        Else one would begin a step and wait, in a collective of the user's, for another that wants an epoch.
        """
        membership = self.membership
        must = membership.epoch is None or membership.error is not None or self._planned
        siblings = self._links.siblings
        if siblings is None:
            return must
        self._release_peers()
        try:
            must, leaving = map(bool, siblings.highest([int(must), int(self._asked_to_leave())]))
        except GroupError as error:
            self._inbox.wait_end(LAST_WORD_S)
            if self._inbox.fatal is None and self._asked_to_leave():
                self.leave(planned=False)
            raise self._inbox.fatal or StepFailed(f"a rank of this group has ended: {error}") from error
        if must and leaving and self.leaving is None:
            self.leaving = "another rank of the group leaves"
        return must

    def _release_peers(self) -> None:
        """When the epoch is over, let go of its members, for whom the siblings may wait."""
        if self.membership.error is not None:
            self._links.abort(first_line(self.membership.error))

    def reduce(
        self,
        tensor: torch.Tensor,
        *,
        average: bool = True,
        restore: Callable[[], None] | None = None,
        held: bool = False,
        last: bool = False,
        divided_by: int = 1,
    ) -> Collective:
        """Sum or average a tensor over the members, in place and in the background; see `Collective`."""
        call = Collective(
            self.collectives,
            tensor,
            average=average,
            restore=restore,
            held=held,
            last=last,
            divided_by=divided_by,
        )
        return self.collectives.reduce(call)

    def num_contributors(self) -> int:
        """Return by how much to divide what is averaged; 1 when the replicas have weights in this step."""
        plan = self.membership.plan
        return 1 if plan is None or self._weights.used else plan.num_replicas

    def _launch(self, call: Collective) -> Work | None:
        plan = self.membership.plan
        assert plan is not None, "a started step has a plan"
        if call.average:
            self._weights.apply(call.tensor, plan.num_replicas, call.divided_by)
        return self._links.reduce(call.tensor) if plan.num_replicas > 1 else None

    def set_weight(self, weight: float) -> None:
        """Enter the step's averages with this weight."""
        self._reformer.wait_idle()
        self._weights.used = True
        if self.membership.error is not None:
            return
        self._blocked_since = time.monotonic()
        try:
            self._weights.set(weight)
        except GroupError as error:
            self.fail(error)
        finally:
            self._blocked_since = None

    def _may_salvage(self) -> bool:
        """With several ranks in the group the step is repeated: one could not salvage it without the others.

        They are at different gradients, and one that has lost its step waits for the others in a collective
        of the user's, while these wait for it to ask for an epoch.
        """
        membership = self.membership
        lost = membership.error_is_own or membership.left_out or self._weights.used
        return self._in_step and not lost and self._links.inner is None

    # -- the vote ----------------------------------------------------------------------------------

    def vote(self) -> bool:
        """End the step; True when every member of the epoch commits it. The update is then due."""
        if not self.started:
            self.start()
        self._progress.mark(Phase.VOTING)
        self.collectives.drain()
        self._in_step = False
        self._reformer.wait_idle()
        verdict = self._cast()
        if verdict is None or not verdict.commit:
            self._reject(verdict)
            return False
        self._planned = verdict.reconfigure
        self.committing = True
        return True

    def _cast(self) -> Verdict | None:
        """Vote with the peers, then inside the group; None when the vote itself failed."""
        membership = self.membership
        lost = membership.error is not None or self.collectives.failed or membership.epoch is None
        # When it is lost the others learn it from `abort`, they may be stuck in a collective.
        verdict = None if lost else self._vote_with_peers()
        if self._links.siblings is not None:
            self._release_peers()
            verdict = self._agree_inside(self._links.siblings, verdict)
        if verdict is None and not lost:
            self.lineage.lose_vote()
        return verdict

    def _vote_with_peers(self) -> Verdict | None:
        epoch, plan = self.membership.epoch, self.membership.plan
        assert epoch is not None, "as its caller has seen"
        assert plan is not None, "as its caller has seen"
        fence = self.membership.fence()
        if fence is not None:
            self.membership.report(FtkitError(fence))
        ballot = self.lineage.votes(fence is None)
        ballot[1] = int(self._wish(epoch.id))
        verdict = None
        try:
            reduced = self._links.agree(ballot)
        except GroupError as error:
            self.membership.report(error)
        else:
            verdict = tally(
                reduced,
                participants=plan.num_replicas,
                min_replicas=self._settings.min_replicas,
            )
        return verdict

    def _agree_inside(self, siblings: BallotBox, verdict: Verdict | None) -> Verdict | None:
        """All ranks of a group commit, or none does: each has voted with its own peers only."""
        lost = int(verdict is None)
        no = int(verdict is None or not verdict.commit)
        switch = int(verdict is None or verdict.reconfigure)
        ballot = [lost, no, switch, int(self.leaving is not None)]
        try:
            ballot = siblings.highest(ballot)
        except GroupError as error:
            self.membership.report(error)
            return None
        lost, no, switch, leaving = ballot
        if leaving and self.leaving is None:
            self.leaving = "another rank of the group leaves"
        if lost:
            self.membership.report(GroupError("another rank of the group lost its vote"))
            return None
        why = (
            "" if not no else ((verdict.why if verdict else "") or "another rank of the group was voted down")
        )
        return Verdict(commit=not no, reconfigure=bool(switch or no), why=why)

    def _wish(self, epoch: int) -> bool:
        if self._inbox.leave is not None and self.leaving is None:
            self.leaving = self._inbox.leave
        if self.leaving is not None:
            return True
        return self._inbox.wish is not None and self._inbox.wish_epoch == epoch

    def _reject(self, verdict: Verdict | None) -> None:
        self.started = False
        self._weights.reset()
        if verdict is not None:
            self.lineage.reject()
            self.membership.report(GroupError(verdict.why))
        error = self.membership.error
        self.membership.record("failed_step", why="" if error is None else first_line(error))
        self._progress.failed()

    def finish(self, error: BaseException | None) -> None:
        """The update that the vote allowed has been applied, or has failed half way."""
        if not self.committing:
            return
        self.committing = self.started = False
        self._weights.reset()
        if error is not None:
            self.lineage.fail_update()
            what = f"{type(error).__name__}: {first_line(error)}"
            self.report_error(FtkitError(f"the update failed half way: {what}"))
            return
        self.lineage.commit()
        self._failures_in_a_row = self._own_failures = 0
        if self._entry.first_commit_due:
            self._entry.first_commit_due = False
            self.membership.record("commit")
        self._progress.committed(self.lineage.version)

    @property
    def current_step(self) -> int:
        """Steps committed so far, counting one whose update is being applied."""
        return max(self.lineage.version.step, 0) + int(self.committing)

    # -- from one epoch to the next, at a step boundary ----------------------------------------------

    def _change_epoch(self) -> None:
        """Leave the running epoch, if any, and enter the next one; one attempt."""
        self._reformer.wait_idle()
        membership = self.membership
        before, own = membership.epoch, membership.error_is_own
        leaving = self._asked_to_leave()
        failed = membership.leave(planned=self._planned, for_good=leaving)
        planned, self._planned = self._planned and not failed, False
        if leaving:
            self.leave(planned=planned)
        self._own_failures += int(own)
        self._count(failed)
        self._progress.mark(Phase.WAITING)
        membership.ask(failed)
        if not self._inbox.offered:  # nobody waits for this member yet
            warm_up(self._healer, self._links)
        offer = membership.wait_offer(self._settings.quorum_timeout, self._asked_to_leave)
        if offer is None:
            self.leave(planned=False)
            return
        if before is not None and [s[:2] for s in before.seats] != [s[:2] for s in offer.epoch.seats]:
            self._failures_in_a_row = 0
        self._entry.enter(offer)

    def _asked_to_leave(self) -> bool:
        return self.leaving is not None or self._inbox.leave is not None

    def _count(self, failed: str) -> None:
        """Give up when the same members fail again and again."""
        limit = self._settings.max_retries
        patience = PATIENCE * limit
        if self._own_failures > limit:
            raise self._give_up(f"this member itself failed {self._own_failures} times in a row: {failed}")
        if failed:
            self._failures_in_a_row += 1
        if self._failures_in_a_row > patience:
            raise self._give_up(f"a step failed {self._failures_in_a_row} times in a row: {failed}")

    def _give_up(self, why: str) -> StepFailed:
        self.say_goodbye(planned=False, how=f"gave up: {why}")
        return StepFailed(f"{self._settings.replica_id}: {why} (max_retries={self._settings.max_retries})")

    # -- the end ------------------------------------------------------------------------------------

    def leave(self, *, planned: bool) -> None:
        """Say goodbye and end training here, in order.

        Raises:
            Left: always.
        """
        why = self.leaving or self._inbox.leave or "asked to leave"
        self.say_goodbye(planned=planned)
        logger.info("left the job at step %d: %s", self.lineage.version.step, why)
        raise Left(f"left the job in order ({why})")

    def say_goodbye(self, *, planned: bool, how: str = "left") -> None:
        """Tell the keeper that the end of this process is no death, and wait until etcd knows."""
        self._progress.mark(Phase.LEAVING)
        self.membership.record("left")
        self._keeper.send(GoodbyeKeeper(version=self.lineage.version, how=how, planned=planned))
        self._inbox.wait_gone(self._settings.lease_ttl)

    def close(self) -> None:
        """End the last epoch: see that the others have read the last vote, then say goodbye."""
        if self.committing:
            self.finish(None)
        self._in_step = False
        self._reformer.close()
        membership = self.membership
        if membership.epoch is not None and membership.error is None and not self.started:
            # In a step the others wait for our gradients, and would not answer.
            membership.farewell(for_good=True)
        membership.leave(planned=False)
        self.say_goodbye(planned=False)
