"""Bring the members that are behind to the state of the epoch, at a step boundary.

Sources serve their live tensors while they wait here; a member that heals receives in place, and serves what
it has to the others that heal, from tensors that stay as they are until all have met. The transport moves the
bytes; this decides who serves, who fetches, and when all may go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from ftkit.core.model import FRESH, Record
from ftkit.core.plan import Plan
from ftkit.core.vote import Lineage
from ftkit.errors import GroupError, HealError
from ftkit.runtime.links import Links, first_line
from ftkit.runtime.state import StateRegistry
from transport import (
    HTTPTransport,
    Progress,
    SourceError,
    Transport,
    TransportAborted,
    TransportError,
    TransportTimeout,
)

logger = logging.getLogger(__name__)


class Healed(msgspec.Struct, frozen=True, kw_only=True):
    """What a heal moved."""

    bytes: int
    seconds: float
    sources: tuple[str, ...]


class Healer:
    """One rank's part in the healing of an epoch."""

    def __init__(
        self, transport: Transport, state: StateRegistry, links: Links, *, group_rank: int, timeout_s: float
    ) -> None:
        """`timeout_s` bounds the whole of a heal, for those who heal and for those who serve."""
        self._transport = transport
        self._state = state
        self._links = links
        self._group_rank = group_rank
        self._timeout_s = timeout_s
        self._healed: Healed | None = None
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._name = ""
        """What is being moved."""
        self._over = 0
        """The newest epoch that is known to be over."""

    def warm_up(self) -> None:
        """Let the transport do once what takes longer the first time."""
        if isinstance(self._transport, HTTPTransport):
            try:
                self._transport.warm_up()
            except TransportError as error:
                logger.info("this replica cannot fetch from itself: %s", error)

    def prepare(
        self, plan: Plan, records: Mapping[str, Record], lineage: Lineage, settle: Callable[[], bool]
    ) -> None:
        """Begin to serve, or receive; what fails is told by `complete`, since the others must hear of it.

        Needs no process group, so that it can run while these are configured. `settle` applies the update
        that was in doubt, when that is all that is missing, and says whether it could.
        """
        name = f"{plan.epoch}.{plan.version}.{self._group_rank}"
        self._healed, self._failure = None, None
        try:
            with self._lock:
                self._name = name
                if self._over >= plan.epoch:
                    raise TransportAborted(f"epoch {plan.epoch} is over")
            if plan.heals:
                self._healed = self._receive(name, plan, records, lineage, settle)
            else:
                self._transport.publish(name, self._state.save())
        except Exception as error:
            self._failure = error

    def complete(self, plan: Plan) -> Healed | None:
        """Wait until all members of the epoch hold its state; return what was received, if anything was.

        Raises:
            HealError: the state could not be received; this member is broken until it heals again (I5).
            GroupError: another member failed to heal, or disappeared.
        """
        failure, healed = self._failure, self._healed
        self._meet(failure is not None)
        if failure is not None:
            what = "heal to" if plan.heals else "serve"
            text = first_line(failure) if isinstance(failure, TransportError) else repr(failure)
            raise HealError(f"could not {what} version {plan.version}: {text}") from failure
        return healed

    @staticmethod
    def is_own_fault(error: Exception) -> bool:
        """Say whether trying again with other peers would not help: a state that does not fit, a callback."""
        cause = error.__cause__
        peers = (SourceError, TransportAborted, TransportTimeout, GroupError)
        return isinstance(error, HealError) and cause is not None and not isinstance(cause, peers)

    def end(self) -> None:
        """Serve no longer."""
        with self._lock:
            self._name = ""
        self._transport.withdraw()

    def abort(self, epoch: int) -> None:
        """End the fetch of an epoch that is over, in flight or about to begin; any thread."""
        with self._lock:
            self._over = max(self._over, epoch)
            name = self._name
        if name:
            self._transport.abort(name)

    def _receive(
        self,
        name: str,
        plan: Plan,
        records: Mapping[str, Record],
        lineage: Lineage,
        settle: Callable[[], bool],
    ) -> Healed | None:
        if lineage.undecided == plan.version and self._settle(lineage, settle):
            logger.info("applied the update of version %s, which was in doubt", plan.version)
            return None
        begun = time.monotonic()
        sources, healing = (
            [records[r].transports[self._group_rank] for r in ids] for ids in (plan.sources, plan.healing)
        )
        into = self._state.save()
        received = 0

        def progress(p: Progress) -> None:
            nonlocal received
            received = p.bytes_done

        fresh = lineage.version == FRESH
        lineage.begin_heal()
        state = self._transport.fetch(
            sources,
            name,
            into,
            deadline_s=self._timeout_s,
            progress=progress,
            joiners=healing if len(healing) > 1 else (),
            reuse=not fresh,  # what a heal that failed has brought, too
        )
        self._state.load(state)
        lineage.end_heal(plan.version)
        return Healed(bytes=received, seconds=time.monotonic() - begun, sources=plan.sources)

    @staticmethod
    def _settle(lineage: Lineage, settle: Callable[[], bool]) -> bool:
        """Commit in doubt: the gradients of the committed step are still here, so apply them."""
        try:
            settled = settle()
        except BaseException:
            lineage.fail_update()
            raise
        if settled:
            lineage.settle()
        return settled

    def _meet(self, failed: bool) -> None:
        """Wait for all members of the epoch; a source must not train on while its tensors are read."""
        (failures,) = self._links.agree([int(failed)], timeout_s=self._timeout_s)
        if failures and not failed:
            raise GroupError("a member of the epoch could not heal")
