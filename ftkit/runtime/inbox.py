"""What the keeper has told this rank: written by its reader thread, read by the training thread.

It keeps the newest of each kind; it decides nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ftkit import errors
from ftkit.errors import FtkitError, KeeperError
from ftkit.keeper import messages as msg

T = TypeVar("T")


class Inbox:
    """The mailbox between the keeper's reader thread and the training thread."""

    def __init__(self, on_abort: Callable[[msg.AbortEpoch], None]) -> None:
        """`on_abort` is called at once, on the reader thread."""
        self._on_abort = on_abort
        self._changed = threading.Condition()
        self._offer: msg.EpochOffer | None = None
        self.offered = 0
        """The newest epoch that was offered to this rank, taken or not."""
        self.welcome: msg.Welcome | None = None
        self.fatal: Exception | None = None
        self.waiting = "the keeper to join the job"
        self.wish: str | None = None
        self.wish_epoch = 0
        self.leave: str | None = None
        self.suspects: tuple[str, ...] = ()
        self.suspects_since = 0.0
        self.gone = False
        self.over: dict[int, str] = {}
        self._last_word = time.monotonic()

    def deliver(self, message: msg.ToRank) -> None:
        """Take one message from the keeper."""
        abort: msg.AbortEpoch | None = None
        with self._changed:
            if isinstance(message, msg.EpochOffer):
                self._offer = message
                self.offered = message.epoch.id
            elif isinstance(message, msg.AbortEpoch):
                self.over = {message.epoch: message.why}
                abort = message
            elif isinstance(message, msg.WishReconfigure):
                self.wish, self.wish_epoch = message.why, message.epoch
            elif isinstance(message, msg.SuspectMembers):
                self.suspects, self.suspects_since = message.names, time.monotonic()
            elif isinstance(message, msg.StillWaiting):
                self.waiting = message.reason
            elif isinstance(message, msg.PleaseLeave):
                self.leave = message.what
            elif isinstance(message, msg.Contact):
                self._last_word = time.monotonic() - message.age_s
            elif isinstance(message, msg.Welcome):
                self.welcome = message
            elif isinstance(message, msg.Refused):
                kind = getattr(errors, message.error, FtkitError)
                self.fatal = self.fatal or kind(message.message)
            elif isinstance(message, msg.Gone):
                self.gone = True
            self._changed.notify_all()
        if abort is not None:
            self._on_abort(abort)

    def fail(self, error: Exception) -> None:
        """The keeper is lost and cannot be brought back."""
        with self._changed:
            self.fatal = self.fatal or KeeperError(str(error))
            self._changed.notify_all()

    def wake(self) -> None:
        """Let the training thread look around (a signal arrived)."""
        with self._changed:
            self._changed.notify_all()

    def silence_s(self) -> float:
        """Seconds since etcd was last heard, by this or any earlier keeper."""
        return time.monotonic() - self._last_word

    def clear_epoch(self) -> int | None:
        """Forget what was said about the epoch that is being left; return an offer that nobody took."""
        with self._changed:
            dropped, self._offer = self._offer, None
            self.wish = None
            self.suspects = ()
        return None if dropped is None else dropped.epoch.id

    def take_offer(self, timeout_s: float, interrupted: Callable[[], bool]) -> msg.EpochOffer | None:
        """Wait for the next offer; None when the time is over or `interrupted`. Raises what is fatal."""
        offer = self._wait(timeout_s, lambda: self._offer, interrupted)
        with self._changed:
            if self._offer is offer:
                self._offer = None
        return offer

    def wait_welcome(self, timeout_s: float, interrupted: Callable[[], bool]) -> msg.Welcome | None:
        """Wait until the group is a member of the job; None when the time is over or `interrupted`."""
        return self._wait(timeout_s, lambda: self.welcome, interrupted)

    def wait_end(self, timeout_s: float) -> None:
        """Wait until the keeper has said that this rank is to end, and why."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.fatal is not None or self.leave is not None or self.gone, timeout_s
            )

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait until the goodbye has been written."""
        with self._changed:
            return self._changed.wait_for(lambda: self.gone or self.fatal is not None, timeout_s)

    def _wait(
        self, timeout_s: float, find: Callable[[], T | None], interrupted: Callable[[], bool]
    ) -> T | None:
        def ready() -> bool:
            return find() is not None or self.fatal is not None or interrupted()

        with self._changed:
            self._changed.wait_for(ready, timeout_s)
            if self.fatal is not None:
                raise self.fatal
            return find()
