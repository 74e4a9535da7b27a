"""Cut tensors that are distributed in one way into the parts that another distribution needs.

Pure geometry: a box is a part of a global tensor, of the shape that a rank holds, at an offset.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return where it lies in a box that contains it."""
        return tuple(
            slice(a - b, a - b + n) for a, b, n in zip(self.offset, outer.offset, self.shape, strict=True)
        )


def intersect(a: Box, b: Box) -> Box | None:
    """Return what two boxes have in common, None if that is nothing."""
    offset = tuple(map(max, a.offset, b.offset))
    ends = (min(x + n, y + m) for x, n, y, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
    return Box(offset, shape) if all(n > 0 for n in shape) else None


def cover(wanted: Box, held: Sequence[Box], prefer: int) -> list[tuple[int, Box]] | None:
    """Return which part of a box to take from which of the boxes that others hold.

    Of several that hold the same, the one is taken that comes first from `prefer` on, so that different
    ranks ask different ones. None if they leave something out, or overlap in part.
    """
    if not wanted.size:
        return []
    parts: list[tuple[int, Box]] = []
    seen: set[Box] = set()
    for turn in range(len(held)):
        index = (prefer + turn) % len(held)
        part = intersect(wanted, held[index])
        if part is None or held[index] in seen:
            continue
        seen.add(held[index])
        parts.append((index, part))
    return parts if sum(part.size for _, part in parts) == wanted.size else None


def pieces(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box along its first dimensions into parts of at most `limit` elements each."""
    if box.size <= limit:
        yield box
        return
    dim = next(i for i, n in enumerate(box.shape) if n > 1)
    step = max(1, limit // (box.size // box.shape[dim]))
    for start in range(0, box.shape[dim], step):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += start
        shape[dim] = min(step, box.shape[dim] - start)
        yield from pieces(Box(tuple(offset), tuple(shape)), limit)
