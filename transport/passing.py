"""Compute checksums of chunks while their bytes are on the way out.

Hashing reads memory, and so does sending. What was hashed a moment ago is sent from the processor's caches,
so that the second reading costs next to nothing.
"""

from __future__ import annotations

from typing import Final

import xxhash

SUM: Final = "x-sum"
"""Header of a request: whoever asks for these bytes will ask for the checksums of their chunks, too."""


class Passing:
    """The chunks that an answer holds whole, from `start` to `end`; it is shown the bytes in order."""

    def __init__(self, digests: list[bytes | None], size: int, chunk: int, start: int, end: int) -> None:
        """Checksums that are not known yet are put into `digests`."""
        self._digests, self._size, self._chunk, self._end = digests, size, chunk, end
        self._at = -(-start // chunk) * chunk
        self._hasher = xxhash.xxh3_128()

    def show(self, start: int, view: memoryview) -> None:
        """Look at the bytes from `start` on, which are sent next; some may have been shown before."""
        stop = start + len(view)
        while self._at < stop:
            number = self._at // self._chunk
            low, high = number * self._chunk, min(self._size, (number + 1) * self._chunk)
            if high > self._end:
                return
            if self._at == low:
                if self._digests[number] is not None:
                    self._at = high
                    continue
                self._hasher.reset()
            upto = min(stop, high)
            self._hasher.update(view[self._at - start : upto - start])
            self._at = upto
            if upto == high:
                self._digests[number] = self._hasher.digest()
