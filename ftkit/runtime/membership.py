"""Move one rank from an epoch to the next: leave, ask, meet.

Whoever calls decides when; this carries it out, on the training thread at a step boundary or on the
reformer's thread in the middle of a step. It knows neither gradients nor votes; healing is the caller's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from ftkit.config import Settings
from ftkit.core.model import Epoch
from ftkit.core.plan import Plan
from ftkit.core.vote import Lineage
from ftkit.errors import Aborted, GroupError, QuorumTimeout
from ftkit.groups.reach import unreachable
from ftkit.keeper.client import KeeperClient
from ftkit.keeper.messages import EpochOffer, WantEpoch
from ftkit.runtime.inbox import Inbox
from ftkit.runtime.links import Links, first_line
from ftkit.runtime.telemetry import Timeline

logger = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""How long members that leave an epoch together wait for each other, so that nobody misses the vote."""

LOOK_AROUND_S = 1.0
REPORT_WAIT_S = 10.0

REACH_S = 1.0
"""How long a machine may take to answer; more than a packet that is lost once and sent again."""

REPROBE_S = 5.0
"""How often a member that waits for an epoch looks whether those who did not answer do so now."""


class Membership:
    """Which epoch this rank is in, and whether that epoch still holds."""

    def __init__(
        self,
        settings: Settings,
        *,
        keeper: KeeperClient,
        inbox: Inbox,
        links: Links,
        lineage: Lineage,
        timeline: Timeline,
    ) -> None:
        """Begin outside of any epoch."""
        self._settings = settings
        self._keeper = keeper
        self._inbox = inbox
        self._links = links
        self._lineage = lineage
        self._timeline = timeline
        self._lock = threading.Lock()
        self.epoch: Epoch | None = None
        self.plan: Plan | None = None
        self.error: Exception | None = None
        """Why the running epoch is over; None while it holds."""
        self.error_is_own = False
        self.left_out = False
        """The others have gone on without this group."""
        self._want = WantEpoch(version=lineage.version)
        self._together = False
        """Whether all members of the epoch that was left last ask for the next one at the same version."""
        self._peers: dict[str, str] = {}
        """Rendezvous addresses of the others in the last epoch, while that has not come to anything."""

    # -- the end of an epoch -------------------------------------------------------------------------

    def report(self, error: Exception, *, own: bool = False) -> bool:
        """Note why the running epoch is over; say whether this is the first reason."""
        with self._lock:
            if self.error is not None:
                return False
            self.error, self.error_is_own = error, own
        self.record("abort", why=first_line(error))
        return True

    def cut(self, epoch: int, why: str, *, left_out: bool = False) -> int:
        """End the work in flight of `epoch` (0: whatever is running).

        Returns the epoch that is over now, 0 when that one is not running.
        """
        running = self.epoch
        if running is None or (epoch and running.id != epoch):
            return 0
        self.left_out = left_out
        self.report(Aborted(why))
        self._links.abort(why)
        self.record("aborted")
        return running.id

    def leave(self, *, planned: bool, for_good: bool = False) -> str:
        """Take leave of the running epoch; return why it failed, empty when all leave it at one boundary."""
        failed, self._together = "", False
        if self.epoch is not None:
            if planned and self.error is None:
                self._together = self.farewell(for_good)
            else:
                failed = first_line(self.error) if self.error is not None else "the epoch was left"
                if self.error_is_own:  # the others will read it
                    failed = f"{self._settings.replica_id}: {failed}"
            if failed:
                self._links.abort(failed)
            # Else the groups end gently, when all have met in the next epoch: nobody's last vote is cut off.
        with self._lock:
            self.error, self.error_is_own, self.left_out = None, False, False
            self.epoch = None
        dropped = self._inbox.clear_epoch()
        if dropped is not None and not failed:
            failed = f"{self._settings.replica_id} had given up waiting when epoch {dropped} was offered"
        return failed

    def farewell(self, for_good: bool) -> bool:
        """See that all members have read the last vote before anyone closes its sockets.

        Return whether all of them, who hold one version now, will ask for the next epoch.
        """
        try:
            (leaver,) = self._links.agree([int(for_good)], timeout_s=FAREWELL_S)
        except GroupError as error:
            logger.debug("not everyone said farewell: %s", error)
            return False
        return not leaver

    # -- the beginning of the next -------------------------------------------------------------------

    def ask(self, failed: str, *, shrink_only: bool = False) -> None:
        """Ask for the next epoch."""
        self.record("want")
        self._links.begin()
        want = WantEpoch(
            version=self._lineage.version,
            failed=failed,
            together=self._together and not failed,
            shrink_only=shrink_only,
            offered=self._inbox.offered,
            unreached=self._unreached(),
        )
        if want.unreached:
            logger.warning("no connection to %s, who are live members", ", ".join(want.unreached))
        self._want = want
        self._keeper.send(want)

    def _unreached(self) -> tuple[str, ...]:
        """Name the members whom this machine cannot reach, if the last epoch came to nothing (I6)."""
        return unreachable(self._peers, REACH_S) if self._peers else ()

    def _look_again(self) -> None:
        """Ask anew when somebody can be reached now who could not before, or the other way round."""
        unreached = self._unreached()
        if unreached != self._want.unreached:
            logger.info("no connection to %s now", ", ".join(unreached) or "nobody")
            self._want = msgspec.structs.replace(self._want, unreached=unreached)
            self._keeper.send(self._want)

    def wait_offer(self, timeout_s: float, interrupted: Callable[[], bool]) -> EpochOffer | None:
        """Wait for an epoch, and say now and then what for; None when interrupted.

        Raises:
            QuorumTimeout: none formed in time.
        """
        begun = reported = looked = time.monotonic()
        while True:
            left = begun + timeout_s - time.monotonic()
            offer = self._inbox.take_offer(max(0.0, min(LOOK_AROUND_S, left)), interrupted)
            if offer is not None or interrupted():
                return offer
            now = time.monotonic()
            if now >= begun + timeout_s:
                raise QuorumTimeout(f"no epoch formed within {timeout_s:g} s: {self._inbox.waiting}")
            if self._want.unreached and now - looked >= REPROBE_S:
                self._look_again()
                looked = time.monotonic()
            if now - reported >= REPORT_WAIT_S:
                reported = now
                logger.warning("still waiting after %.0f s: %s", now - begun, self._inbox.waiting)

    def enter(self, offer: EpochOffer) -> Plan:
        """Take an offer; from here on errors count for its epoch."""
        epoch, me = offer.epoch, self._settings.replica_id
        plan = self._lineage.enter(epoch, me, init_sync=self._settings.init_sync)
        with self._lock:
            self.error, self.error_is_own, self.left_out = None, False, False
            self.epoch, self.plan = epoch, plan
        self._peers = {r: record.rendezvous for r, record in offer.records.items() if r != me}
        self.record("epoch", members=[s.replica_id for s in epoch.seats])
        return plan

    def meet(self, plan: Plan, offer: EpochOffer) -> None:
        """Configure the process groups of the epoch that was entered.

        Raises:
            GroupError: it came to nothing.
        """
        epoch = offer.epoch
        over = self._inbox.over.get(epoch.id)
        if over is not None:  # the news came before the epoch was entered
            raise Aborted(over)
        self._links.configure(plan, offer.records, self._settings.replica_id)
        self.record("configured")
        logger.info(
            "epoch %d with %d members: %s (%s)",
            epoch.id,
            len(epoch.seats),
            ", ".join(s.replica_id for s in epoch.seats[:8]),
            epoch.reason,
        )

    def agree(self, doubt: bool) -> bool:
        """Say whether any member, or any rank of this group, has a doubt."""
        doubts = self._links.agree([int(doubt)])
        self._peers = {}  # all have met
        if self._links.inner is not None:
            doubts = self._links.agree(doubts, inside=True)
        return bool(doubts[0])

    def record(self, kind: str, **detail: object) -> None:
        """Record an event of the timeline at the current epoch and step."""
        epoch = 0 if self.epoch is None else self.epoch.id
        self._timeline.record(kind, epoch, self._lineage.version.step, **detail)

    def fence(self) -> str | None:
        """I3: say why this member may not commit: it has not heard of etcd and may have been replaced."""
        silence = self._inbox.silence_s()
        if silence <= self._settings.outage_grace:
            return None
        return f"no word from etcd for {silence:.0f} s (outage_grace)"
