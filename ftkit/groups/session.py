"""One underlying torch group, good for one epoch: what `configure` makes and `abort` ends.

Keeps account of the collectives in flight, so that `drain` can say when the last one has ended. How its
connections are cut is the subclass's affair. Knows nothing of how the peers met.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import Work

from ftkit.errors import Aborted, GroupError
from ftkit.groups import sockets
from ftkit.groups.store import StoreLink, leak


class Session(ABC):
    """One underlying torch group: what `configure` makes and `abort` ends."""

    store_is_spent: bool
    """Whether the torch group needs the store no more once it has formed."""

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self.backend = backend
        self.rank = rank
        self.size = size
        # Reasons are kept as text: a stored exception would keep alive what its traceback saw, tensors too.
        self.error: str | None = None
        self.aborted: str | None = None
        self.link: StoreLink | None = None
        self.pending: deque[Work] = deque()
        self._group: dist.ProcessGroup | None = None
        sockets.hidden.add(self)

    @abstractmethod
    def sever(self) -> None:
        """Make all pending and later operations fail; may be called again and again."""

    @abstractmethod
    def is_severed(self) -> bool:
        """Say whether nothing can write into a tensor any more, once the pending collectives have ended."""

    @abstractmethod
    def hidden_fds(self) -> list[int]:
        """Return the descriptors that a forked child must let go of."""

    @abstractmethod
    def process_group(self) -> dist.ProcessGroup:
        """Return the session as a full ProcessGroup, made when first asked for."""

    def forget_in_child(self) -> None:
        """Never be freed in a forked child, whoever held this session, even garbage not yet collected."""
        leak(self)

    def failed(self, message: str) -> GroupError:
        """Note a failed operation, and return the error that its caller should see."""
        if self.aborted is not None:
            return Aborted(self.aborted)
        message = f"a collective of rank {self.rank} of {self.size} failed: {message}"
        if self.error is None:
            self.error = message
        return GroupError(message)

    def prune(self) -> None:
        """Forget the collectives that have ended, and note if one has failed."""
        pending = self.pending
        with suppress(IndexError):  # another thread prunes as well
            while pending and pending[0].is_completed():
                try:
                    pending.popleft().wait()
                except RuntimeError as error:
                    self.failed(str(error))

    def drain(self, timeout_s: float) -> bool:
        """Sever, and wait until nothing can write into a tensor any more; say whether that was reached."""
        until = time.monotonic() + timeout_s
        pause = 0.0001
        while True:
            self.sever()
            if self.is_severed() and all(w.is_completed() for w in list(self.pending)):
                self.pending.clear()
                return True
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(pause * 1.3, 0.01)
