"""What a joiner serves to others that fetch the same version: the chunks that it has verified.

Knows no HTTP. Its memory is that of the destination, which stays as it is from a chunk's verification until
`withdraw`; chunks that are only staged on their way to a device are not served.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final

import numpy as np

from transport.manifest import Manifest
from transport.place import Plan
from transport.readers import Readers, Views, Withdrawn


class Share:
    """The verified chunks of one fetch, under way or done. All methods may be called from any thread."""

    on_cpu: Final = True
    slot: Final = None
    leaving = False

    def __init__(self, manifest: Manifest, plan: Plan) -> None:
        self.version, self.etag, self.size, self.chunk = (
            manifest.version,
            manifest.etag,
            manifest.size,
            manifest.chunk,
        )
        self._plan = plan
        self._readers = Readers(f"the share of version {manifest.version}")
        self._changed = threading.Condition()
        self._have = np.zeros(manifest.num_chunks, np.bool_)
        self._count = 0
        self._over = False

    def add(self, chunk: int) -> None:
        """Serve a chunk from now on, if its place is memory that can be sent."""
        start = chunk * self.chunk
        if not self._plan.in_place(start, min(self.size, start + self.chunk)):
            return
        with self._changed:
            self._have[chunk] = True
            self._count += 1
            self._changed.notify_all()

    def have(self, known: int, wait_s: float) -> bytes:
        """Return one bit per chunk, the first in the highest bit; wait until there are more than `known`."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while not self._over and self._count <= known:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            if self._over:
                raise Withdrawn
            return np.packbits(self._have).tobytes()

    def has(self, start: int, end: int) -> bool:
        """Say whether all chunks of a range of bytes can be served."""
        with self._changed:
            return bool(self._have[start // self.chunk : -(-end // self.chunk)].all())

    def passing(self, start: int, end: int) -> None:
        """Compute none: they come from a source."""

    def answering(self) -> AbstractContextManager[None]:
        """Announce several readings, one after the other."""
        return self._readers.answering()

    @contextlib.contextmanager
    def reading(self, cut: Callable[[], None]) -> Iterator[Views]:
        """Keep the memory valid inside the block; `cut` is called from another thread to end it early."""
        with self._readers.reading(cut):
            yield lambda start, end, reader: iter(self._plan.views(start, end))

    def withdraw(self, grace_s: float) -> None:
        """Serve no longer; return once nobody reads the memory any more. Idempotent."""
        with self._changed:
            self._over = self.leaving = True
            self._changed.notify_all()
        self._readers.close(grace_s)


class ShareBoard:
    """The place where the share of the current fetch hangs; requests look here, and may wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._current: Share | None = None
        self._closed = False

    def put(self, share: Share | None) -> Share | None:
        """Hang up another share, or none; return the one before."""
        with self._changed:
            before, self._current = self._current, share
            self._changed.notify_all()
        return before

    def wait(self, version: str, timeout_s: float) -> Share | None:
        """Return the share of this version; while there is none, wait for it at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._closed:
                if self._current is not None and self._current.version == version:
                    return self._current
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return None

    def close(self) -> None:
        """Let all that wait return."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
