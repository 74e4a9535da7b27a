"""One underlying torch group, good for one epoch: what `configure` makes and `abort` ends.

Keeps account of the collectives in flight, so that `drain` can say when the last one has ended. How its
connections are cut is the subclass's affair. Knows nothing of how the peers met.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import Work

from ftkit.errors import Aborted, GroupError
from ftkit.groups import sockets
from ftkit.groups.sockets import leak
from ftkit.groups.work import GroupWork, PeerWork


class Session(ABC):
    """One underlying torch group: what `configure` makes and `abort` ends."""

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self.backend = backend
        self.rank = rank
        self.size = size
        # Reasons are kept as text: a stored exception would keep alive what its traceback saw, tensors too.
        self.error: str | None = None
        self.aborted: str | None = None
        self.released = False
        self._draining = threading.Lock()
        self.pending: deque[Work] = deque()
        self._on_release: list[Callable[[], None]] = []
        self._group: dist.ProcessGroup | None = None
        sockets.hidden.add(self)

    @abstractmethod
    def sever(self) -> None:
        """Make all pending and later operations fail; may be called again and again."""

    @abstractmethod
    def is_severed(self) -> bool:
        """Say whether nothing can write into a tensor any more, once the pending collectives have ended."""

    @abstractmethod
    def at_rest(self) -> bool:
        """Say whether the operations that have not ended only wait, and write nothing."""

    def hush(self) -> None:
        """Let what cannot be ended at least cost nothing; called once, when nothing can write any more."""
        return

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
        while self.pending:
            try:
                work = self.pending[0]
                if not work.is_completed():
                    return
                # This very one: another thread may have taken it, and the next may be in flight.
                self.pending.remove(work)
            except (IndexError, ValueError):
                continue
            try:
                work.wait()
            except RuntimeError as error:
                self.failed(str(error))

    def ended(self, work: Work) -> None:
        """Count a collective as ended, whose future says so before the work itself does."""
        with suppress(ValueError):  # another thread was faster
            self.pending.remove(work)

    def free(self) -> None:
        """Let go of torch's objects, here and now; takes until the timeout if an operation was left behind.

        Works that somebody keeps refer to this session: without this, who drops the last would have to wait.
        """
        self.backend = self._group = None

    def wrap(self, inner: Work, *, tracked: bool) -> Work:
        """Keep account of what has just been launched, and return what the caller is to hold."""
        if not tracked:
            return PeerWork(inner, self)
        self.pending.append(inner)
        return GroupWork(inner, self)

    def on_release(self, callback: Callable[[], None]) -> None:
        """Call back when the session is released, or at once if it is already."""
        self._on_release.append(callback)
        if self.released:
            self._release()

    def drain(self, timeout_s: float) -> bool:
        """Sever, and wait until nothing can write into a tensor any more; say whether that was reached.

        Usually all operations have failed by then. One that its backend forgot to tell is left behind once
        it can do no harm; it ends at its own timeout, and nobody waits for it.
        """
        with self._draining:  # two threads may abort at once
            return self.released or self._drain(timeout_s)

    def _drain(self, timeout_s: float) -> bool:
        start = time.monotonic()
        pause = 0.0001
        num_rests = 0
        while True:
            self.sever()
            severed = self.is_severed()
            if severed and all(w.is_completed() for w in list(self.pending)):
                break
            spent = time.monotonic() - start
            if spent > timeout_s:
                return False
            if severed and spent > 0.01:
                num_rests = num_rests + 1 if self.at_rest() else 0
                if num_rests >= 3:
                    break
            time.sleep(pause)
            pause = min(pause * 1.3, 0.005)
        self._release()
        return True

    def _release(self) -> None:
        self.released = True
        self.pending.clear()
        callbacks, self._on_release = self._on_release, []
        for callback in callbacks:
            callback()
