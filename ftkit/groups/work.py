"""What a collective returns: torch's Work, whose failures are ftkit's errors and whose wait always ends.

`wait()` raises `Aborted` after `abort()`, `GroupError` after any other failure. gloo has a hole: an
operation whose message is half received when its connection is lost is not told, and waits for its
timeout. So no wait here relies on gloo alone: once the session is released, waits and futures end.
Knows nothing of sockets or stores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

import torch
from torch.distributed import Work

from ftkit.errors import GroupError

_SLICE_S = 0.02
_SLICE = timedelta(seconds=_SLICE_S)


class Owner(Protocol):
    """What a Work needs to know of the session in which it was launched."""

    aborted: str | None
    error: str | None
    released: bool
    """Set when nothing can write into a tensor any more: who still waits, waits for nothing."""

    def failed(self, message: str) -> GroupError:
        """Note a failed operation, and return the error that its caller should see."""

    def ended(self, work: Work) -> None:
        """Count a collective as ended, whose future says so before the work itself does."""

    def on_release(self, callback: Callable[[], None]) -> None:
        """Call back when the session is released, or at once if it is already."""


class GroupWork(Work):
    """A collective in flight."""

    def __init__(self, inner: Work, owner: Owner) -> None:
        super().__init__()
        self._inner = inner
        self._owner = owner

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective has ended; raise GroupError or Aborted when it has failed."""
        until = None if timeout is None else monotonic() + timeout.total_seconds()
        while True:
            # What ended just after its slice of time is asked again: only its last word counts.
            ended = self._inner.is_completed()
            try:
                self._inner.wait(_SLICE)
                return True
            except RuntimeError as error:
                if ended or self._owner.released:
                    raise self._owner.failed(str(error)) from error
            if until is not None and monotonic() > until:
                raise GroupError("the collective did not end within the time that wait() was given")

    def is_completed(self) -> bool:
        """Say whether the collective has ended, well or not."""
        return self._inner.is_completed() or self._owner.released

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the outputs; it fails like `wait`, and always ends."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        once = threading.Lock()

        def ended(raw: torch.futures.Future[Any]) -> None:
            # gloo completes the future first, then the work: a callback may abort, and must not wait for us.
            self._owner.ended(self._inner)
            if once.acquire(blocking=False):
                try:
                    value = raw.value()
                except RuntimeError as error:
                    future.set_exception(self._owner.failed(str(error)))
                else:
                    future.set_result(value)

        def released() -> None:
            if once.acquire(blocking=False):
                future.set_exception(self._owner.failed("the operation never ended"))

        self._inner.get_future().add_done_callback(ended)
        self._owner.on_release(released)
        return future

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors of a collective that has ended."""
        return self._inner.result()

    def synchronize(self) -> None:
        """Make the current stream wait for the collective."""
        self._inner.synchronize()


class PeerWork(Work):
    """A send or a receive in flight.

    Waiting for it with gloo's own time limit would break the group, so a thread waits in our stead.
    """

    def __init__(self, inner: Work, owner: Owner) -> None:
        super().__init__()
        self._inner = inner
        self._owner = owner
        self._ended: threading.Event | None = None
        self._error: str | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensor is sent or received; raise GroupError or Aborted when that failed."""
        until = None if timeout is None else monotonic() + timeout.total_seconds()
        if self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=self._wait, name="ftkit-peer-wait", daemon=True).start()
        while not self._ended.wait(_SLICE_S):
            if self._owner.released:
                raise self._owner.failed("the operation never ended")
            if until is not None and monotonic() > until:
                raise GroupError("the operation did not end within the time that wait() was given")
        if self._error is not None:
            raise self._owner.failed(self._error)
        return True

    def _wait(self) -> None:
        assert self._ended is not None
        try:
            if not self._inner.wait():
                self._error = "the operation was interrupted"
        except RuntimeError as error:
            self._error = str(error)
        finally:
            self._ended.set()

    def is_completed(self) -> bool:
        """Say whether it has ended; gloo knows that only once somebody waits."""
        return self._inner.is_completed() or self._owner.released

    def source_rank(self) -> int:
        """Return the sender of what was received."""
        return self._inner.source_rank()


class StreamWork(Work):
    """A collective on a CUDA stream: to wait for it is to order the current stream after it."""

    def __init__(self, inner: Work, owner: Owner) -> None:
        super().__init__()
        self._inner = inner
        self._owner = owner

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait (with a timeout: the CPU too); raise if the group has failed."""
        try:
            done = self._inner.wait() if timeout is None else self._inner.wait(timeout)
        except RuntimeError as error:
            raise self._owner.failed(str(error)) from error
        if self._owner.aborted is not None or self._owner.error is not None:
            raise self._owner.failed(self._owner.error or "")
        return done

    def is_completed(self) -> bool:
        """Say whether the collective has ended on the device, well or not."""
        return self._inner.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return torch's own future, which knows of streams."""
        return self._inner.get_future()

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self._inner.result()

    def synchronize(self) -> None:
        """Make the current stream wait for the collective."""
        self._inner.synchronize()


class FailedWork(Work):
    """A collective that had failed before it began: the group is aborted, broken or was never configured."""

    def __init__(self, kind: type[GroupError], why: str) -> None:
        super().__init__()
        self._kind = kind
        self._why = why

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raise the reason at once."""
        raise self._kind(self._why)

    def is_completed(self) -> bool:
        """Say yes: it has ended before it began."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that has failed."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_exception(self._kind(self._why))
        return future

    def result(self) -> list[torch.Tensor]:
        """Raise the reason at once."""
        raise self._kind(self._why)

    def synchronize(self) -> None:
        """Raise the reason at once."""
        raise self._kind(self._why)
