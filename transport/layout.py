"""Decide where each tensor's bytes lie in the data section.

Tensors that share memory become views of one block, so that shared bytes are sent once; memory that no
tensor refers to is never sent. Knows no sockets. Equal states get equal layouts: the order of blocks
depends on dtypes and names only.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from transport.dtypes import NAMES
from transport.manifest import MASK_ELEMENTS, SPARSE_FLOOR, SPARSE_SPAN, Block, TensorEntry
from transport.tensors import (
    bytes_in_storage,
    is_gapless,
    num_elements_spanned,
    overlaps_itself,
)
from transport.tree import Leaf

Indices = npt.NDArray[np.int64]


@dataclass(slots=True)
class _View:
    """A leaf with its span of bytes in its storage."""

    index: int
    leaf: Leaf
    low: int
    high: int

    @property
    def geometry(self) -> tuple[object, ...]:
        tensor = self.leaf.tensor
        stride = (s if n > 1 else 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return (self.low, tensor.dtype, tuple(tensor.shape), tuple(stride))


@dataclass(slots=True)
class _Group:
    """Views that become one block: their memory, and how it is packed."""

    views: list[_View]
    memory: torch.Tensor  # flat uint8
    pack: str = ""
    span: int = 0
    align: int = 1

    @property
    def sort_key(self) -> tuple[int, str]:
        return (-self.align, min(view.leaf.path for view in self.views))


@dataclass(slots=True)
class Layout:
    """Blocks with their memory (flat uint8 tensors), and the tensors as views of them."""

    blocks: list[Block] = field(default_factory=list)
    memories: list[torch.Tensor] = field(default_factory=list)
    tensors: list[TensorEntry] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Return the bytes in the data section."""
        return self.blocks[-1].offset + self.blocks[-1].nbytes if self.blocks else 0


def lay_out(leaves: Sequence[Leaf]) -> Layout:
    """Lay out the leaves of a state; only tensors with holes in them are copied."""
    groups = sorted(_group(leaves), key=lambda group: group.sort_key)
    layout = Layout()
    entries: list[TensorEntry | None] = [None] * len(leaves)
    end = 0
    for number, group in enumerate(groups):
        nbytes = group.memory.numel()
        layout.blocks.append(Block(end, nbytes, group.pack, group.span))
        layout.memories.append(group.memory)
        end += nbytes
        start = min(view.low for view in group.views)
        for view in group.views:
            offset = 0 if group.pack == "rows" else view.low - start
            entries[view.index] = _entry(view.leaf, number, offset, group.pack)
    layout.tensors = [entry for entry in entries if entry is not None]
    return layout


def _entry(leaf: Leaf, block: int, offset: int, pack: str) -> TensorEntry:
    tensor = leaf.tensor
    shape = tuple(tensor.shape)
    stride: tuple[int, ...] | None = None
    if pack != "rows" and not tensor.is_contiguous():
        stride = tuple(tensor.stride())
    return TensorEntry(
        leaf.path, NAMES[tensor.dtype], shape, stride, block, offset, tensor.device.type, leaf.dist
    )


def _group(leaves: Sequence[Leaf]) -> list[_Group]:
    groups: list[_Group] = []
    storages: defaultdict[tuple[torch.device, int], list[_View]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        tensor = leaf.tensor
        itemsize = tensor.dtype.itemsize
        if tensor.numel() == 0:
            memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            groups.append(_Group([_View(index, leaf, 0, 0)], memory, align=itemsize))
            continue
        low = int(tensor.storage_offset()) * itemsize
        if tensor.is_contiguous():
            high = low + tensor.numel() * itemsize
        else:
            high = low + num_elements_spanned(tensor.shape, tensor.stride()) * itemsize
        storages[tensor.device, tensor.untyped_storage().data_ptr()].append(_View(index, leaf, low, high))
    for views in storages.values():
        for component in _components(views):
            groups.extend(_pack(component))
    return groups


def _components(views: list[_View]) -> list[list[_View]]:
    """Split the views of one storage into those whose spans overlap."""
    if len(views) == 1:
        return [views]
    views.sort(key=lambda view: (view.low, -view.high, view.leaf.path))
    components, reach = [[views[0]]], views[0].high
    for view in views[1:]:
        if view.low < reach:
            components[-1].append(view)
        else:
            components.append([view])
        reach = max(reach, view.high)
    return components


def _pack(views: list[_View]) -> list[_Group]:
    tensor = views[0].leaf.tensor
    if len(views) == 1 and tensor.is_contiguous():  # nearly always
        return [_Group(views, _whole(tensor), align=tensor.dtype.itemsize)]
    low, high = min(v.low for v in views), max(v.high for v in views)
    align = max(v.leaf.tensor.dtype.itemsize for v in views)
    if any((v.low - low) % v.leaf.tensor.dtype.itemsize for v in views):
        return [group for view in views for group in _pack([view])]  # not alignable in any other memory
    if _covered(views, low, high):
        return [_Group(views, bytes_in_storage(tensor, low, high - low), align=align)]
    same = all(view.geometry == views[0].geometry for view in views)
    elements = sum(v.leaf.tensor.numel() for v in views)
    if same and (
        not overlaps_itself(tensor.shape, tensor.stride()) or elements > MASK_ELEMENTS * (high - low)
    ):
        return [_Group(views, _whole(tensor.contiguous()), "rows", align=align)]
    geometries = [
        (v.low - low, v.leaf.tensor.dtype.itemsize, tuple(v.leaf.tensor.shape), v.leaf.tensor.stride())
        for v in views
    ]
    span = high - low
    if elements <= MASK_ELEMENTS * span:
        unit = mask_unit(geometries)
        indices = referenced_units(geometries, unit)
        if span <= max(SPARSE_FLOOR, SPARSE_SPAN * indices.size * unit):
            memory = bytes_in_storage(tensor, low, span).cpu()
            packed = memory.view(-1, unit)[torch.from_numpy(indices)].reshape(-1)
            return [_Group(views, packed, "mask", span, align=unit)]
    by_geometry: defaultdict[object, list[_View]] = defaultdict(list)
    for view in views:
        by_geometry[view.geometry].append(view)
    return [
        _Group(alike, _whole(alike[0].leaf.tensor.contiguous()), "rows", align=align)
        for alike in by_geometry.values()
    ]


def _covered(views: list[_View], low: int, high: int) -> bool:
    """Say whether the gapless ones among the views leave no byte of the span out."""
    reach = low
    for view in views:  # sorted by `low`
        tensor = view.leaf.tensor
        if view.low > reach:
            return False
        if tensor.is_contiguous() or is_gapless(tensor.shape, tensor.stride()):
            reach = max(reach, view.high)
    return reach >= high


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    itemsize = tensor.dtype.itemsize
    return bytes_in_storage(tensor, int(tensor.storage_offset()) * itemsize, tensor.numel() * itemsize)


Geometry = tuple[int, int, Sequence[int], Sequence[int]]
"""Offset in bytes, itemsize, shape, strides in elements."""


def referenced_units(views: Sequence[Geometry], unit: int) -> Indices:
    """Return in order the units (of `unit` bytes) that any view refers to.

    Both sides compute this from the manifest alone.
    """
    parts = []
    for offset, itemsize, shape, stride in views:
        index = np.asarray([offset // unit], np.int64)
        for n, s in zip(shape, stride, strict=True):
            if n != 1 and s != 0:
                steps = np.arange(n, dtype=np.int64) * (s * itemsize // unit)
                index = (index[:, None] + steps).reshape(-1)
        parts.append((index[:, None] + np.arange(itemsize // unit, dtype=np.int64)).reshape(-1))
    return np.unique(np.concatenate(parts))


def mask_unit(views: Sequence[Geometry]) -> int:
    """Return the unit of a `mask` block: it divides every offset and every itemsize."""
    return math.gcd(*(view[0] for view in views), *(view[1] for view in views))
