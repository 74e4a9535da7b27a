"""Say in a few numbers which bytes of a data section make up a box of a tensor, and gather them.

A box is a number of equally long runs of bytes at regular distances. Knows no sockets; a source checks here
what a client asks for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from transport.readers import Views
from transport.staging import HostReader

MAX_BYTES: Final = 16 << 20
"""That one request may ask for."""
MAX_ITEMS: Final = 300
MAX_DIMS: Final = 64

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Rows:
    """Runs of `run` bytes, the first at `offset`; of all of them, in order, `length` bytes after `skip`.

    `dims` says how they lie: pairs of a count and a distance in bytes, the outermost first.
    """

    offset: int
    run: int
    skip: int
    length: int
    dims: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """Return the number of runs."""
        return math.prod(n for n, _ in self.dims)

    @property
    def end(self) -> int:
        """Return the byte past the last one of all runs."""
        return self.offset + self.run + sum((n - 1) * distance for n, distance in self.dims)

    def part(self, start: int, end: int) -> Rows:
        """Return bytes `start` to `end` of these."""
        return replace(self, skip=self.skip + start, length=end - start)


def box_rows(
    base: int, itemsize: int, strides: Sequence[int], offset: Sequence[int], shape: Sequence[int]
) -> Rows:
    """Return the rows of a box: `offset` and `shape` in elements, in a tensor at byte `base`."""
    start = base + itemsize * sum(o * s for o, s in zip(offset, strides, strict=True))
    run = itemsize
    dims: list[tuple[int, int]] = []
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        if not dims and stride * itemsize == run:
            run *= n
        else:
            dims.append((n, stride * itemsize))
    return Rows(start, run, 0, itemsize * math.prod(shape), tuple(reversed(dims)))


def dump(items: Sequence[Rows]) -> str:
    """Return rows as text for a query."""
    return ";".join(
        ",".join(map(str, (r.offset, r.run, r.skip, r.length, *(n for dim in r.dims for n in dim))))
        for r in items
    )


def parse(text: str, size: int) -> list[Rows]:
    """Read rows of a data section of `size` bytes; ValueError says what is wrong with them."""
    items = []
    for part in text.split(";", MAX_ITEMS):
        numbers = [int(number) for number in part.split(",", 4 + 2 * MAX_DIMS)]
        if len(numbers) < 4 or len(numbers) % 2 or any(not 0 <= n < 1 << 62 for n in numbers):
            raise ValueError("rows are offset, run, skip, length and pairs of a count and a distance")
        offset, run, skip, length, *rest = numbers
        rows = Rows(offset, run, skip, length, tuple(zip(rest[::2], rest[1::2], strict=True)))
        if not length or not run or any(n < 1 for n, _ in rows.dims) or rows.end > size:
            raise ValueError("rows reach beyond the data")
        if skip + length > run * rows.count:
            raise ValueError("there are fewer bytes in these rows")
        items.append(rows)
    if sum(rows.length for rows in items) > MAX_BYTES:
        raise ValueError(f"at most {MAX_BYTES} bytes at a time")
    return items


def gather(items: Sequence[Rows], views: Views, reader: HostReader) -> bytes:
    """Return a copy of the bytes of rows, one after the other."""
    out = np.empty(sum(rows.length for rows in items), np.uint8)
    at = 0
    for rows in items:
        for offset, run, distance, count in _planes(rows):
            into = out[at : at + count * run].reshape(count, run)
            at += count * run
            span = next(views(offset, offset + (count - 1) * distance + run, reader))
            if len(span) > (count - 1) * distance + run - 1:
                source = np.frombuffer(span, np.uint8)
                into[:] = np.lib.stride_tricks.as_strided(source, (count, run), (distance, 1))
                continue
            for i in range(count):  # memory of a device, or in pieces: only what is asked for
                _fill(into[i], views(offset + i * distance, offset + i * distance + run, reader))
    return out.tobytes()


def _fill(into: Bytes, pieces: Iterator[memoryview]) -> None:
    at = 0
    for piece in pieces:
        into[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)


def _planes(rows: Rows) -> Iterator[tuple[int, int, int, int]]:
    """Yield offset, length, distance and count of runs that lie one after the other."""
    *outer, (inner, distance) = rows.dims or ((1, 0),)
    number, within = divmod(rows.skip, rows.run)
    left = rows.length
    while left:
        plane, row = divmod(number, inner)
        offset = rows.offset + row * distance
        for n, far in reversed(outer):
            plane, index = divmod(plane, n)
            offset += index * far
        if within or left < rows.run:
            length = min(left, rows.run - within)
            yield offset + within, length, 0, 1
            number, within, left = number + 1, 0, left - length
            continue
        count = min(inner - row, left // rows.run)
        yield offset, rows.run, distance, count
        number, left = number + count, left - count * rows.run
