"""Decide which bytes of which shard make up the part of a state that this rank holds.

From the manifests of all shards and the state to receive into come selections: for each shard, the boxes that
are needed from it, as one run of bytes that a `Plan` receives like any other. Knows no sockets.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from transport import rows
from transport.boxes import Box, cover, pieces
from transport.dtypes import DTYPES, ITEMSIZES
from transport.errors import MalformedState, StateMismatch
from transport.manifest import DEFAULT_CHUNK, MIN_CHUNK, Block, Manifest, TensorEntry
from transport.match import Target, match
from transport.rows import Rows
from transport.tensors import contiguous_stride
from transport.tree import unflatten

PIECE: Final = 8 << 20
"""Bytes of a part that is received at a time, at most."""
SMALL: Final = 64 << 10
"""Parts below this size go together, so that one request lists only so many."""


@dataclass(slots=True)
class Selection:
    """What is needed from one shard, one part after the other, as a data section of its own."""

    manifest: Manifest
    into: list[torch.Tensor]
    items: list[Rows]

    def spec(self, start: int, end: int) -> str:
        """Return which bytes of the shard are bytes `start` to `end` of the selection, for a query."""
        blocks = self.manifest.blocks
        index = bisect.bisect_right(blocks, start, key=lambda block: block.offset) - 1
        result = []
        while start < end:
            block = blocks[index]
            stop = min(end, block.offset + block.nbytes)
            result.append(self.items[index].part(start - block.offset, stop - block.offset))
            start = stop
            index += 1
        return rows.dump(result)


@dataclass(slots=True)
class _Draft:
    """A selection that is being collected."""

    parts: list[tuple[Rows, TensorEntry, torch.Tensor]] = field(default_factory=list)

    def finish(self, manifest: Manifest) -> Selection:
        """Number the parts in the order in which they lie at the source."""
        self.parts.sort(key=lambda part: part[0].offset)
        blocks: list[Block] = []
        entries: list[TensorEntry] = []
        end = 0
        for number, (part, entry, into) in enumerate(self.parts):
            blocks.append(Block(end, part.length))
            entries.append(
                TensorEntry(f"{entry.name}@{number}", entry.dtype, tuple(into.shape), None, number)
            )
            end += part.length
        selected = Manifest(
            version=manifest.version,
            size=end,
            chunk=_chunk(blocks, end),
            etag=manifest.etag,
            blocks=blocks,
            tensors=entries,
            tree=["l", *(["T", number] for number in range(len(blocks)))],
        )
        return Selection(selected, [into for _, _, into in self.parts], [part for part, _, _ in self.parts])


def _chunk(blocks: Sequence[Block], size: int) -> int:
    """Return a size of chunk such that no chunk has more parts than a request may list."""
    starts = [block.offset for block in blocks]
    chunk = DEFAULT_CHUNK
    while chunk > MIN_CHUNK:
        counts = (
            bisect.bisect_left(starts, min(size, at + chunk)) - bisect.bisect_right(starts, at) + 1
            for at in range(0, size, chunk)
        )
        if all(count <= rows.MAX_ITEMS for count in counts):
            break
        chunk //= 2
    return chunk


class Resharding:
    """The selections from all shards, and the state that comes of them."""

    @torch.no_grad()
    def __init__(self, manifests: Sequence[Manifest], into: object, *, prefer: int) -> None:
        """`prefer` is a number that differs among ranks: which of several equal shards to ask first."""
        self._manifests = manifests
        self._tables = [{entry.name: entry for entry in manifest.tensors} for manifest in manifests]
        self._tree = manifests[0].tree
        self._drafts = [(_Draft(), _Draft()) for _ in manifests]
        self._results: list[Any] = []
        self._seen: set[tuple[object, ...]] = set()
        self._late: list[tuple[Target, torch.Tensor] | None] = []
        targets = match(manifests[0], into, boxes=True)
        for number, (entry, target) in enumerate(zip(manifests[0].tensors, targets, strict=True)):
            memory = target.memory
            if memory is None:
                if ITEMSIZES[entry.dtype] * math.prod(entry.shape) > manifests[0].size:
                    raise StateMismatch(
                        entry.name, "it is larger than what is sent; create it before fetching"
                    )
                memory = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu")
            self._late.append(None if target.memory is not None else (target, memory))
            self._results.append(target.result)
            self._select(
                entry, target.box or Box((0,) * memory.dim(), tuple(memory.shape)), memory, prefer + number
            )

    @property
    def selections(self) -> list[tuple[Selection, Selection]]:
        """Return for each shard the selections of large and of small parts."""
        return [
            (large.finish(manifest), small.finish(manifest))
            for manifest, (large, small) in zip(self._manifests, self._drafts, strict=True)
        ]

    def result(self) -> object:
        """Return the whole state, once all has been received."""
        for index, late in enumerate(self._late):
            if late is not None:
                target, memory = late
                self._results[index] = target.finish(memory)
        return unflatten(self._tree, self._results)

    def _select(self, entry: TensorEntry, wanted: Box, memory: torch.Tensor, prefer: int) -> None:
        name = entry.name
        key = (memory.device, memory.data_ptr(), tuple(memory.shape), memory.stride())
        if not wanted.size or key in self._seen:
            return  # an alias of one that is received
        self._seen.add(key)
        held = [self._box(table.get(name), entry) for table in self._tables]
        parts = cover(wanted, held, prefer)
        if parts is None:
            raise StateMismatch(name, "the shards together do not hold all of it, or overlap")
        itemsize = ITEMSIZES[entry.dtype]
        for shard, part in parts:
            theirs = self._tables[shard][name]
            base, strides = self._place(shard, theirs)
            for piece in pieces(part, PIECE // itemsize):
                offset = tuple(a - b for a, b in zip(piece.offset, held[shard].offset, strict=True))
                found = rows.box_rows(base, itemsize, strides, offset, piece.shape)
                draft = self._drafts[shard][found.length < SMALL]
                draft.parts.append((found, theirs, memory[piece.within(wanted)]))

    @staticmethod
    def _box(theirs: TensorEntry | None, first: TensorEntry) -> Box:
        """Return which part of a tensor a shard holds."""
        if theirs is None or theirs.dtype != first.dtype or whole_shape(theirs) != whole_shape(first):
            raise StateMismatch(first.name, "the shards do not agree on what it is")
        shape = whole_shape(theirs)
        if theirs.dist is None:
            return Box((0,) * len(shape), shape)
        offset = theirs.dist.offset
        if offset is None:
            raise StateMismatch(first.name, f"a DTensor {theirs.dist.placements} cannot be taken apart")
        inside = len(offset) == len(shape) == len(theirs.shape) and all(
            (o >= 0 and o + n <= m) or not n for o, n, m in zip(offset, theirs.shape, shape, strict=True)
        )
        if not inside:
            raise MalformedState(f"tensor {first.name[:200]!r} lies outside of itself")
        return Box(offset, theirs.shape)

    def _place(self, shard: int, entry: TensorEntry) -> tuple[int, tuple[int, ...]]:
        block = self._manifests[shard].blocks[entry.block]
        if block.pack == "mask":
            raise StateMismatch(
                entry.name, "it shares memory with others, with gaps, and cannot be taken apart"
            )
        if block.pack == "rows":
            return block.offset, contiguous_stride(entry.shape)
        return block.offset + entry.offset, entry.strides


def whole_shape(entry: TensorEntry) -> tuple[int, ...]:
    """Return the shape of a tensor, of which a DTensor's entry is a part."""
    return entry.shape if entry.dist is None else entry.dist.shape
