"""Salvage a step whose peer has died: form the next epoch meanwhile, and reduce again among the survivors.

The training thread goes on computing. It works only while no averaged gradient has been handed
out, and only if all survivors can; otherwise the step is repeated, in the epoch that stands by then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ftkit.errors import FtkitError, GroupError
from ftkit.keeper.messages import EpochOffer
from ftkit.runtime.collectives import Collectives
from ftkit.runtime.links import first_line
from ftkit.runtime.membership import Membership

logger = logging.getLogger(__name__)

SALVAGE_S = 2.0
"""How long the survivors may take to form an epoch before the step is given up.

More than a lease's end needs, less than a user would wait for nothing: the boundary waits for good.
"""


class Reformer:
    """The thread that changes the members in the middle of a step."""

    def __init__(
        self,
        membership: Membership,
        collectives: Callable[[], Collectives],
        *,
        form: Callable[[], None],
        may_salvage: Callable[[], bool],
    ) -> None:
        """`form` forms the gradients' group of an epoch that was met.

        `may_salvage` says whether the training thread is inside of a step that is not lost otherwise."""
        self._membership = membership
        self._collectives = collectives
        self._form = form
        self._may_salvage = may_salvage
        self._changed = threading.Condition()
        self.unfinished: EpochOffer | None = None
        """An epoch that was met, but in which someone has to heal: that waits for the step boundary."""
        self._asked = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ftkit-reformer", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """The running epoch is over in the middle of a step. Any thread."""
        with self._changed:
            self._asked = True
            self._changed.notify_all()

    @property
    def busy(self) -> bool:
        """Whether the members are being changed right now."""
        return self._asked

    def wait_idle(self) -> None:
        """Wait until the step is either salvaged or lost; bounded by the reformer's own deadlines."""
        if self._asked:
            with self._changed:
                self._changed.wait_for(lambda: not self._asked)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._closed)
                if self._closed:
                    self._collectives().fail()
                    self._asked = False
                    self._changed.notify_all()
                    return
            try:
                self._salvage()
            except Exception as error:  # this thread must not die with the training thread waiting for it
                if not isinstance(error, FtkitError):
                    logger.exception("could not salvage the step")
                self._give_up(error)
            finally:
                with self._changed:
                    self._asked = False
                    self._changed.notify_all()

    def _give_up(self, error: Exception) -> None:
        self._membership.report(error)
        self._collectives().fail()

    def _salvage(self) -> None:
        """One attempt, or several when members keep dying."""
        collectives, membership = self._collectives(), self._membership
        while membership.error is not None:
            if not (self._may_salvage() and collectives.can_salvage()):
                collectives.fail()
                return
            collectives.pause()
            failed = membership.leave(planned=False)
            membership.ask(failed, shrink_only=True)
            offer = membership.wait_offer(SALVAGE_S, lambda: self._closed)
            if offer is None:
                collectives.fail()
                return
            try:
                plan = membership.enter(offer)
                membership.meet(plan, offer)
                lost = membership.agree(bool(plan.healing) or not collectives.can_salvage())
            except GroupError as error:
                membership.report(error)
                logger.info("salvaging: epoch %d came to nothing: %s", offer.epoch.id, first_line(error))
                continue
            if lost:
                self.unfinished = offer
                collectives.fail()
                return
            self._form()
            membership.record("salvaged")
            collectives.resume()
