"""Enter an epoch: meet its members, and heal whoever is behind, this member or another.

What fails is noted with the membership; whether to go on or to ask for another epoch is the caller's
business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from ftkit.core.plan import Plan
from ftkit.core.vote import Lineage
from ftkit.errors import GroupError, HealError
from ftkit.keeper.messages import EpochOffer
from ftkit.keeper.progress import Phase
from ftkit.runtime.healing import Healer
from ftkit.runtime.links import Links, first_line
from ftkit.runtime.membership import Membership
from ftkit.runtime.progress import Progress
from ftkit.runtime.side_by_side import SideBySide

logger = logging.getLogger(__name__)


class Entry:
    """The way of one rank into an epoch, on the training thread."""

    def __init__(
        self,
        *,
        membership: Membership,
        links: Links,
        healer: Healer,
        lineage: Lineage,
        progress: Progress,
        settle: Callable[[], bool],
    ) -> None:
        """`settle` applies an update that was in doubt, and says whether it could."""
        self._membership = membership
        self._links = links
        self._healer = healer
        self._lineage = lineage
        self._progress = progress
        self._settle = settle
        self.blocked_since: float | None = None
        """Since when peers are waited for (monotonic clock); None when none are."""
        self.first_commit_due = False
        """Whether no step has been committed in the epoch yet."""

    def enter(self, offer: EpochOffer) -> None:
        """Meet the members and heal; when that fails, `membership.error` says why."""
        self._progress.mark(Phase.CONFIGURING)
        plan = self._membership.enter(offer)

        def meet() -> None:
            self._membership.meet(plan, offer)
            # One who salvages a step meets us here too, and must hear that we cannot before it serves.
            self._membership.agree(True)

        with self._entering(offer):
            with SideBySide(self._links.crew, meet, partial(self._healer.abort, plan.epoch)):
                # The state travels meanwhile.
                self._prepare_heal(plan, offer)
            self._complete_heal(plan)

    def finish(self, offer: EpochOffer) -> None:
        """Heal whoever is behind in an epoch that the reformer has met already, this member or another."""
        plan = self._membership.plan
        assert plan is not None, "met with a plan"
        with self._entering(offer):
            self._prepare_heal(plan, offer)
            self._complete_heal(plan)

    @contextmanager
    def _entering(self, offer: EpochOffer) -> Iterator[None]:
        """Wait for peers in the body; an epoch in which it fails has come to nothing."""
        self.blocked_since = time.monotonic()
        try:
            yield
        except (GroupError, HealError) as error:
            self._come_to_nothing(offer, error)
        finally:
            self._healer.end()
            self.blocked_since = None

    def _come_to_nothing(self, offer: EpochOffer, error: Exception) -> None:
        self._membership.report(error, own=self._healer.is_own_fault(error))
        self._links.abort(first_line(error))
        logger.warning("epoch %d came to nothing: %s", offer.epoch.id, first_line(error))

    def _prepare_heal(self, plan: Plan, offer: EpochOffer) -> None:
        if not plan.healing:
            return
        self._progress.mark(Phase.HEALING)
        if plan.heals:
            self._membership.record("healing", sources=list(plan.sources))
        self._healer.prepare(plan, offer.records, self._lineage, self._settle)

    def _complete_heal(self, plan: Plan) -> None:
        healed = self._healer.complete(plan) if plan.healing else None
        if plan.healing and self._links.inner is not None:
            self._links.agree([0], inside=True)
        self._links.form()
        self._lineage.forget_undecided()
        self.first_commit_due = True
        membership = self._membership
        if healed is not None:
            self._progress.healed(healed.bytes)
            membership.record("healed", bytes=healed.bytes, seconds=healed.seconds)
            logger.info(
                "healed to version %s: %.1f MB in %.3f s (%.2f GB/s) from %s",
                plan.version,
                healed.bytes / 1e6,
                healed.seconds,
                healed.bytes / max(healed.seconds, 1e-9) / 1e9,
                ", ".join(healed.sources),
            )
        elif plan.heals:
            membership.record("settled")
