"""Decide which bytes are fetched next, from which source, and when the whole is complete.

Pure bookkeeping: no sockets, no clock, no locks (the caller holds one). Bytes are handed out as extents,
ranges of the data section cut at multiples of the chunk size. What is given back begins at the exact byte
where its source stopped, so nothing is fetched twice, except chunks whose checksum is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

MAX_RUN: Final = 8
"""Chunks in one extent, at most."""
NOBODY: Final[frozenset[str]] = frozenset()

Mask = npt.NDArray[np.bool_]
"""One flag per chunk."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes to fetch; `avoid` names sources that should not be asked for it if others can be."""

    start: int
    end: int
    avoid: frozenset[str] = NOBODY


@dataclass(slots=True)
class _Chunk:
    missing: int
    suppliers: set[str] = field(default_factory=set)
    digest: bytes | None = None
    holes: list[tuple[int, int]] | None = None
    """What of it nobody is fetching, if that is not all of it."""
    avoid: frozenset[str] = NOBODY
    whole: bool = False
    """It is to come from one source, so that it is known whom to blame for it."""


class Ledger:
    """Which bytes are still to be fetched, which have come, and which chunks are verified.

    `first` is the chunk from which they are handed out, in order; those before it come last.
    """

    def __init__(self, size: int, chunk: int, *, first: int = 0) -> None:
        self.size, self.chunk, self.first = size, chunk, first
        self.max_run = MAX_RUN
        self._chunks = [_Chunk(min(chunk, size - start)) for start in range(0, size, chunk)]
        self._expected: list[bytes | None] = [None] * len(self._chunks)
        self.open: Mask = np.ones(len(self._chunks), np.bool_)
        """Chunks of which nobody is fetching some bytes."""
        self.verified: Mask = np.zeros(len(self._chunks), np.bool_)
        self.avoided: Mask = np.zeros(len(self._chunks), np.bool_)
        """Chunks of which some source should not be asked for the rest."""
        self.num_verified = 0
        self.bytes_pending = size
        """Bytes that nobody is fetching."""
        self._unsure: set[int] = set()  # chunks that have arrived, and whose right digest is not known
        self._known = 0  # the right digests of all chunks before this one are known

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks."""
        return len(self._chunks)

    @property
    def complete(self) -> bool:
        """Say whether all chunks are verified."""
        return self.num_verified == len(self._chunks)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the range of bytes of a chunk."""
        return number * self.chunk, min(self.size, (number + 1) * self.chunk)

    def take(
        self, source: str, usable: Collection[str], num_workers: int, allowed: Mask | None = None
    ) -> Extent | None:
        """Hand out the next extent for a source, out of the `allowed` chunks; None when there is none."""
        if not self.bytes_pending:
            return None
        wanted = self.open if allowed is None else self.open & allowed
        for number in self._in_order(wanted):
            avoid = self._chunks[number].avoid
            if source in avoid and any(other not in avoid for other in usable):
                continue
            share = self.bytes_pending // (2 * max(1, num_workers) * self.chunk)
            start, end = self._cut(number, wanted, min(self.max_run, max(1, share)))
            self.bytes_pending -= end - start
            return Extent(start, end, avoid)
        return None

    def _in_order(self, wanted: Mask) -> Iterator[int]:
        found = np.flatnonzero(wanted)
        turn = int(np.searchsorted(found, self.first))
        for part in (found[turn:], found[:turn]):
            yield from map(int, part)

    def _cut(self, number: int, wanted: Mask, run: int) -> tuple[int, int]:
        """Remove at most `run` chunks from what is open, beginning with this one; return their range."""
        head = self._chunks[number]
        start, end = self.bounds(number)
        if head.holes is not None:
            start, end = head.holes.pop(0)
            if head.holes:
                return start, end
            head.holes = None
        self.open[number] = False
        last = number + 1
        while (
            end == last * self.chunk
            and last < min(len(self._chunks), number + run)
            and wanted[last]
            and self._chunks[last].holes is None
            and self._chunks[last].avoid == head.avoid
        ):
            self.open[last] = False
            _, end = self.bounds(last)
            last += 1
        return start, end

    def take_all(self) -> None:
        """Hand out all bytes at once, to one who gives back what does not come."""
        self.open[:] = False
        self.bytes_pending = 0

    def keep(self, number: int) -> None:
        """Note that a chunk is right and in its place already, before anything of it was handed out."""
        start, end = self.bounds(number)
        assert self.open[number], "it has been handed out"
        self.open[number] = False
        self.bytes_pending -= end - start
        self._chunks[number].missing = 0
        self.verify(number)

    def give_back(self, start: int, end: int, avoid: Iterable[str] = ()) -> None:
        """Put the rest of an extent back."""
        avoid = frozenset(avoid)
        while start < end:
            number = start // self.chunk
            low, high = self.bounds(number)
            chunk, stop = self._chunks[number], min(end, high)
            if self.verified[number]:  # kept, though it had been handed out with all the rest
                start = stop
                continue
            chunk.avoid, self.avoided[number] = avoid, bool(avoid)
            if chunk.whole:
                self._clear(number)
                stop = high
            elif (start, stop) == (low, high):
                chunk.holes = None
                self.bytes_pending += stop - start
            else:
                chunk.holes = [*(chunk.holes or ()), (start, stop)]
                self.bytes_pending += stop - start
            self.open[number] = True
            start = stop

    def arrived(self, source: str, start: int, end: int) -> int | None:
        """Note bytes of one chunk from a source; return the chunk if it is now there and must be hashed."""
        number = start // self.chunk
        chunk = self._chunks[number]
        chunk.missing -= end - start
        chunk.suppliers.add(source)
        assert chunk.missing >= 0, "bytes were received twice"
        return number if chunk.missing == 0 else None

    def missing(self, number: int) -> int:
        """Return how many bytes of a chunk have not arrived."""
        return self._chunks[number].missing

    def replace(self, number: int, source: str) -> None:
        """Note that a chunk that another was sending has come from this source, whole."""
        chunk = self._chunks[number]
        assert not self.open[number]
        chunk.missing, chunk.suppliers = 0, {source}

    def hashed(self, number: int, digest: bytes) -> bool | None:
        """Note the digest of what arrived; return whether it is right, None if that is not known yet."""
        self._chunks[number].digest = digest
        if self._expected[number] is None:
            self._unsure.add(number)
        return self._compare(number)

    def expected(self, number: int) -> bytes | None:
        """Return the right digest of a chunk, None when it is not known yet."""
        return self._expected[number]

    def expect(self, number: int, digest: bytes) -> bool | None:
        """Note what the digest must be; return whether what arrived is right, None if nothing has."""
        self._expected[number] = digest
        self._unsure.discard(number)
        return self._compare(number)

    def _compare(self, number: int) -> bool | None:
        digest, expected = self._chunks[number].digest, self._expected[number]
        if digest is None or expected is None or self.verified[number]:
            return None
        return digest == expected

    def verify(self, number: int) -> None:
        """Note that a chunk is right and in its place."""
        assert not self.verified[number]
        self.verified[number] = True
        self.num_verified += 1

    def reject(self, number: int) -> set[str]:
        """Queue a chunk again whose digest was wrong; return who had sent it."""
        chunk = self._chunks[number]
        suppliers = chunk.suppliers
        chunk.whole = chunk.whole or len(suppliers) > 1
        chunk.avoid, self.avoided[number] = frozenset(suppliers), True
        self._clear(number)
        self.open[number] = True
        return suppliers

    def _clear(self, number: int) -> None:
        """Forget what has arrived of a chunk."""
        chunk = self._chunks[number]
        start, end = self.bounds(number)
        if not self.open[number]:
            self.bytes_pending += end - start
        chunk.missing, chunk.digest, chunk.suppliers, chunk.holes = end - start, None, set(), None

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

    def next_unsure(self, limit: int) -> tuple[int, int] | None:
        """Return a run of at most `limit` chunks that have arrived, and whose right digests are not known."""
        if not self._unsure:
            return None
        first = min(self._unsure)
        last = first + 1
        while last < first + limit and last in self._unsure:
            last += 1
        return first, last
