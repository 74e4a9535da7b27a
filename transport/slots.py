"""A copy of a state's bytes in a memfd, which stays as it is while the live tensors change.

Decides when the memory of such a copy may be written to again: not before everybody who was sent its pages
has shown that it has them, for `sendfile` hands out the pages themselves. Knows no HTTP and no versions.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import torch

from transport.readers import Withdrawn

_F_ADD_SEALS: Final = 1033
_SEALS: Final = 0x2 | 0x4 | 0x10
"""No shrinking, no growing, no writing but through the mapping that there is already."""
MARGIN: Final = 1 << 30
"""Memory that a copy leaves to all others."""


class Slot:
    """A memfd of `size` bytes. It counts who holds it; the one who makes it is the first."""

    def __init__(self, size: int, done: Callable[[Slot], None] | None = None) -> None:
        """`done` is called when nobody holds the slot any more; without it the slot is then closed."""
        self.size = size
        self.spoilt = False
        """Somebody who was cut off may still read it, so that it must not be written to again."""
        self._done = done or Slot.close
        self._lock = threading.Lock()
        self._holds = 1
        self._memory: torch.Tensor | None = None
        self.fd = os.memfd_create("transport", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, max(size, 1))
        except BaseException:
            os.close(self.fd)
            raise
        _slots.add(self)

    def write(self, at: int, views: Iterable[memoryview]) -> None:
        """Copy bytes into it, one view after the other; the first time, before `seal`."""
        for view in views:
            if self._memory is None:
                # Memory that is new is filled by the kernel in half the time.
                done = 0
                while done < len(view):
                    done += os.pwrite(self.fd, view[done:], at + done)
            else:
                self._memory[at : at + len(view)].copy_(torch.frombuffer(view, dtype=torch.uint8))
            at += len(view)

    def fill(self, pieces: Iterable[tuple[int, Iterable[memoryview]]]) -> None:
        """Write all pieces, each to its place, and seal; after an error the slot is gone."""
        try:
            for at, views in pieces:
                self.write(at, views)
            self.seal()
        except BaseException:
            self.spoilt = True
            self.release()
            raise

    def seal(self) -> None:
        """Let nobody else change the bytes, so that the descriptor can be handed out. Idempotent."""
        if self._memory is None:
            mapped = mmap.mmap(self.fd, max(self.size, 1))
            # Nor shrink it: who has mapped it needs not fear a SIGBUS.
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)
            mapped.madvise(mmap.MADV_DONTFORK)
            self._memory = torch.frombuffer(mapped, dtype=torch.uint8)[: self.size]

    def views(self, start: int, end: int) -> Iterator[memoryview]:
        """Yield the memory of a range of bytes."""
        assert self._memory is not None
        yield self._memory[start:end].numpy().data

    def hold(self) -> None:
        """Keep the bytes as they are until `release`; `Withdrawn` if it is free already."""
        with self._lock:
            if not self._holds:
                raise Withdrawn
            self._holds += 1

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the bytes as they are inside the block."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Let go of it."""
        with self._lock:
            self._holds -= 1
            over = self._holds == 0
        if over:
            self._done(self)

    def renew(self) -> None:
        """Make it as if new: held by one."""
        self._holds = 1

    def close(self) -> None:
        """Free the memory, once those who were handed the descriptor have closed it, too."""
        self._memory = None
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Slots:
    """Keeps two slots, one to serve from and one to fill, since memory used before is filled faster."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._closed = False

    def take(self, size: int) -> Slot:
        """Return a slot of at least `size` bytes that nobody reads."""
        with self._lock:
            fitting = [slot for slot in self._free if size <= slot.size <= 2 * size]
            others = [slot for slot in self._free if slot not in fitting]
            self._free = fitting[1:]
        for slot in others:
            slot.close()
        if not fitting:
            return Slot(size, self._put)
        fitting[0].renew()
        return fitting[0]

    def _put(self, slot: Slot) -> None:
        with self._lock:
            keep = not self._closed and not slot.spoilt and len(self._free) < 2
            if keep:
                self._free.append(slot)
        if not keep:
            slot.close()

    def close(self) -> None:
        """Free what is not in use now, and the rest when it is no longer."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for slot in free:
            slot.close()


def available_memory() -> int:
    """Return how many bytes may still be used, by the word of the machine and of this container."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = int(found[1]) << 10 if found is not None else 0
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no limit
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        free = min(free, int(limit) - int(used))
    return free


_slots: weakref.WeakSet[Slot] = weakref.WeakSet()


def _after_fork() -> None:
    for slot in list(_slots):
        slot.close()


os.register_at_fork(after_in_child=_after_fork)
