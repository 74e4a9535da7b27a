"""What a collective returns: torch's Work, whose failures are ftkit's errors.

`wait()` raises `Aborted` after `abort()`, `GroupError` after any other failure. The future of
`get_future()` is torch's own and fails with RuntimeError. Knows nothing of sockets or stores.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from ftkit.errors import GroupError


class GroupWork(Work):
    """A collective in flight."""

    def __init__(self, inner: Work, failed: Callable[[str], GroupError]) -> None:
        super().__init__()
        self._inner = inner
        self._failed = failed

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective has ended; raise GroupError or Aborted when it has failed."""
        try:
            done = self._inner.wait() if timeout is None else self._inner.wait(timeout)
        except RuntimeError as error:
            raise self._failed(str(error)) from error
        if not done:
            raise self._failed("the operation was interrupted")
        return True

    def is_completed(self) -> bool:
        """Say whether the collective has ended, well or not."""
        return self._inner.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return torch's own future of the collective."""
        return self._inner.get_future()

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors of a collective that has ended."""
        return self._inner.result()

    def synchronize(self) -> None:
        """Make the current stream wait for the collective."""
        self._inner.synchronize()

    def source_rank(self) -> int:
        """Return the sender of what a `recv` has received."""
        return self._inner.source_rank()


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
