"""Decide which bytes are fetched next, from which source, and when the whole is complete.

Pure bookkeeping: no sockets, no clock, no locks (the caller holds one). Bytes are handed out as extents,
ranges of the data section cut at multiples of the chunk size. An extent that is given back begins at the
exact byte where its source stopped, so nothing is fetched twice, except chunks whose checksum is wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

MAX_RUN: Final = 8
"""Chunks in one extent, at most."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes to fetch; `avoid` names sources that should not be asked for it if others can be."""

    start: int
    end: int
    avoid: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Chunk:
    missing: int
    suppliers: set[str] = field(default_factory=set)
    digest: bytes | None = None
    verified: bool = False


class Ledger:
    """Which bytes are still to be fetched, which have come, and which chunks are verified."""

    def __init__(self, size: int, chunk: int) -> None:
        self.size, self.chunk = size, chunk
        self._chunks = [_Chunk(min(chunk, size - start)) for start in range(0, size, chunk)]
        self._expected: list[bytes | None] = [None] * len(self._chunks)
        self._pending: deque[Extent] = deque([Extent(0, size)] if size else [])
        self.bytes_pending = size
        """Bytes that nobody is fetching."""
        self.num_verified = 0
        self._known = 0  # the right digests of all chunks before this one are known

    @property
    def complete(self) -> bool:
        """Say whether all chunks are verified."""
        return self.num_verified == len(self._chunks)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """Return the range of bytes of a chunk."""
        return chunk * self.chunk, min(self.size, (chunk + 1) * self.chunk)

    def take(self, source: str, usable: Collection[str], num_workers: int) -> Extent | None:
        """Hand out the next extent for a source; None when there is none that it should fetch."""
        for index, extent in enumerate(self._pending):
            if source in extent.avoid and any(other not in extent.avoid for other in usable):
                continue
            share = self.bytes_pending // (2 * max(1, num_workers) * self.chunk)
            run = min(MAX_RUN, max(1, share))
            end = min(extent.end, (extent.start // self.chunk + run) * self.chunk)
            if end == extent.end:
                del self._pending[index]
            else:
                self._pending[index] = Extent(end, extent.end, extent.avoid)
            self.bytes_pending -= end - extent.start
            return Extent(extent.start, end, extent.avoid)
        return None

    def take_all(self) -> None:
        """Hand out all bytes at once, to one who gives back what does not come."""
        self._pending.clear()
        self.bytes_pending = 0

    def give_back(self, start: int, end: int, avoid: Iterable[str] = ()) -> None:
        """Put the rest of an extent back, before all others."""
        if start < end:
            self._pending.appendleft(Extent(start, end, frozenset(avoid)))
            self.bytes_pending += end - start

    def arrived(self, source: str, start: int, end: int) -> int | None:
        """Note bytes of one chunk from a source; return the chunk if it is now there and must be hashed."""
        number = start // self.chunk
        chunk = self._chunks[number]
        chunk.missing -= end - start
        chunk.suppliers.add(source)
        assert chunk.missing >= 0, "bytes were received twice"
        return number if chunk.missing == 0 else None

    def hashed(self, number: int, digest: bytes) -> bool | None:
        """Note the digest of what arrived; return whether it is right, None if that is not known yet."""
        self._chunks[number].digest = digest
        return self._compare(number)

    def expect(self, number: int, digest: bytes) -> bool | None:
        """Note what the digest must be; return whether what arrived is right, None if nothing has."""
        self._expected[number] = digest
        return self._compare(number)

    def _compare(self, number: int) -> bool | None:
        chunk, expected = self._chunks[number], self._expected[number]
        if chunk.digest is None or expected is None or chunk.verified:
            return None
        return chunk.digest == expected

    def verified(self, number: int) -> None:
        """Note that a chunk is right and in its place."""
        chunk = self._chunks[number]
        assert not chunk.verified
        chunk.verified = True
        self.num_verified += 1

    def reject(self, number: int) -> set[str]:
        """Queue a chunk again whose digest was wrong; return who had sent it."""
        chunk = self._chunks[number]
        suppliers = chunk.suppliers
        start, end = self.bounds(number)
        chunk.missing, chunk.digest, chunk.suppliers = end - start, None, set()
        self.give_back(start, end, suppliers)
        return suppliers

    def next_unknown(self, limit: int) -> tuple[int, int] | None:
        """Return a run of at most `limit` chunks whose right digests are not known yet."""
        first, total = self._known, len(self._expected)
        while first < total and self._expected[first] is not None:
            first += 1
        self._known = first
        if first == total:
            return None
        last = first
        while last < min(total, first + limit) and self._expected[last] is None:
            last += 1
        return first, last
