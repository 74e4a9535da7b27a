"""Decide where each received byte goes, and rebuild the state from what arrived.

A plan is made from a manifest and from the state to receive into. It refuses before anything is written
if the two do not fit. Blocks whose layout here equals that at the source are received straight into the
tensors' memory; others (on a device, or strided in another way) pass through a host buffer that lives
until the block is complete. Knows no sockets.
"""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from transport.dtypes import DTYPES, ITEMSIZES
from transport.errors import MalformedState, StateMismatch
from transport.layout import mask_unit, referenced_units
from transport.manifest import Block, Manifest, TensorEntry
from transport.match import Target, match
from transport.staging import host_buffer, wait_for_device
from transport.tensors import (
    bytes_in_storage,
    is_gapless,
    memory_view,
    num_elements_spanned,
    overlaps_itself,
    same_stride,
    view_of_bytes,
)
from transport.tree import unflatten


@dataclass(slots=True)
class _Home:
    """Where a block is received, and what has to be done once it is complete."""

    block: Block
    memory: torch.Tensor
    """Flat uint8: the block's bytes in their final place, or a buffer to copy from."""
    missing: int
    copies: list[tuple[TensorEntry, torch.Tensor]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    """Tensors that are allocated from the unpacked block."""
    direct: bool = False
    """The memory is that of tensors to receive into, all of it."""
    stage: memoryview | None = None
    staged: torch.Tensor | None = None


class Plan:
    """The places in memory of all bytes of one data section. Thread safe after construction."""

    @torch.no_grad()
    def __init__(self, manifest: Manifest, into: object) -> None:
        self.manifest = manifest
        self._lock = threading.Lock()
        self._targets = match(manifest, into)
        self._results: list[object] = [target.result for target in self._targets]
        _refuse_shared(manifest, self._targets)
        self._device = next(
            (
                t.memory.device
                for t in self._targets
                if t.memory is not None and t.memory.device.type != "cpu"
            ),
            None,
        )
        members: list[list[int]] = [[] for _ in manifest.blocks]
        for index, entry in enumerate(manifest.tensors):
            members[entry.block].append(index)
        homes = [self._home(block, indices) for block, indices in zip(manifest.blocks, members, strict=True)]
        for home in homes:
            if not home.block.nbytes:
                self._complete(home)
        self._homes = [home for home in homes if home.block.nbytes]
        self._starts = [home.block.offset for home in self._homes]

    def views(self, start: int, end: int) -> list[memoryview]:
        """Return the writable memory for bytes `start` to `end` of the data section, in order."""
        result = []
        index = bisect.bisect_right(self._starts, start) - 1
        while start < end:
            home = self._homes[index]
            view = home.stage
            if view is None:
                view = self._open(home)
            low = start - home.block.offset
            piece = view[low : low + end - start]
            result.append(piece)
            start += len(piece)
            index += 1
        return result

    @property
    def bytes_in_place(self) -> int:
        """Return how many of the bytes are received into memory where they stay."""
        return sum(home.block.nbytes for home in self._homes if home.memory.device.type == "cpu")

    def in_place(self, start: int, end: int) -> bool:
        """Say whether the memory for these bytes stays as it is once they have come."""
        index = bisect.bisect_right(self._starts, start) - 1
        while start < end:
            home = self._homes[index]
            if home.memory.device.type != "cpu":
                return False  # only on their way there
            start = home.block.offset + home.block.nbytes
            index += 1
        return True

    def is_destination(self, start: int, end: int) -> bool:
        """Say whether the memory for these bytes holds what is to be overwritten, and is all that will be."""
        index = bisect.bisect_right(self._starts, start) - 1
        while start < end:
            home = self._homes[index]
            if not home.direct:
                return False
            start = home.block.offset + home.block.nbytes
            index += 1
        return True

    @torch.no_grad()
    def accept(self, start: int, end: int) -> None:
        """Note that these bytes (never before accepted ones) have arrived and are verified."""
        index = bisect.bisect_right(self._starts, start) - 1
        while start < end:
            home = self._homes[index]
            high = min(end, home.block.offset + home.block.nbytes)
            with self._lock:
                home.missing -= high - start
                complete = home.missing == 0
            if complete:
                self._complete(home)
            start = high
            index += 1

    def result(self) -> object:
        """Return the whole state, once all bytes have been accepted."""
        return unflatten(self.manifest.tree, self._results)

    def _open(self, home: _Home) -> memoryview:
        with self._lock:
            if home.stage is None:
                memory = home.memory
                if memory.device.type != "cpu":
                    home.staged = memory = host_buffer(home.block.nbytes, memory.device)
                home.stage = memory_view(memory)
            return home.stage

    def _complete(self, home: _Home) -> None:
        if home.staged is not None:
            home.memory.copy_(home.staged)
            wait_for_device(home.memory.device)
            home.staged = home.stage = None
        memory = home.memory
        if home.block.pack == "mask":
            memory = self._unpack(home)
        for entry, destination in home.copies:
            destination.copy_(_view(memory, entry, home.block))
            wait_for_device(destination.device)
        for index in home.late:
            target, entry = self._targets[index], self.manifest.tensors[index]
            self._results[index] = target.finish(_view(memory, entry, home.block))
        home.copies, home.late = [], []

    def _unpack(self, home: _Home) -> torch.Tensor:
        entries = [e for e in self.manifest.tensors if self.manifest.blocks[e.block] is home.block]
        geometries = [(e.offset, ITEMSIZES[e.dtype], e.shape, e.strides) for e in entries]
        unit = mask_unit(geometries)
        indices = referenced_units(geometries, unit)
        if indices.size * unit != home.block.nbytes:
            raise MalformedState(
                f"the block of tensor {entries[0].name!r} has not as many bytes as its views need"
            )
        span = torch.zeros(home.block.span, dtype=torch.uint8, device="cpu")
        np_span = span.numpy()[: home.block.span // unit * unit].reshape(-1, unit)
        np_span[indices] = home.memory.numpy().reshape(-1, unit)
        return span.to(self._device_for(entries[0]))

    def _home(self, block: Block, indices: list[int]) -> _Home:
        entries = self.manifest.tensors
        present: list[tuple[int, torch.Tensor]] = []
        for i in indices:
            memory = self._targets[i].memory
            if memory is not None:
                present.append((i, memory))
        if not indices:
            raise MalformedState("a block belongs to no tensor")
        absent = [i for i in indices if self._targets[i].memory is None]
        if block.pack != "mask":
            direct = self._direct(block, present)
            if direct is not None:
                memory, in_place = direct
                copies = [(entries[i], t) for i, t in present if i not in in_place]
                return _Home(block, memory, block.nbytes, copies, absent, direct=memory.device.type == "cpu")
        if block.pack == "mask" or present:
            memory = torch.empty(block.nbytes, dtype=torch.uint8, device="cpu")
        else:
            memory = torch.empty(
                block.nbytes, dtype=torch.uint8, device=self._device_for(entries[indices[0]])
            )
        return _Home(block, memory, block.nbytes, [(entries[i], t) for i, t in present], absent)

    def _device_for(self, entry: TensorEntry) -> torch.device:
        """Return the device for a tensor that is not there yet: of the kind that it has at the source."""
        if entry.device == "cpu":
            return torch.device("cpu")
        if self._device is not None:
            return self._device
        if entry.device == "cuda" and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _direct(
        self, block: Block, present: list[tuple[int, torch.Tensor]]
    ) -> tuple[torch.Tensor, set[int]] | None:
        """Find tensors of `into` whose memory has the very layout of the block, and fills it."""
        if len(present) == 1:  # nearly always
            index, tensor = present[0]
            entry = self.manifest.tensors[index]
            whole = tensor.numel() * tensor.dtype.itemsize == block.nbytes
            if whole and entry.stride is None and entry.offset == 0 and tensor.is_contiguous():
                start = int(tensor.storage_offset()) * tensor.dtype.itemsize
                return bytes_in_storage(tensor, start, block.nbytes), {index}
        bases: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for index, tensor in present:
            entry = self.manifest.tensors[index]
            if same_stride(entry.shape, entry.strides, tensor.stride()):
                bases.setdefault(tensor.data_ptr() - entry.offset, []).append((index, tensor))
        for base, members in bases.items():
            spans = []
            for index, _ in members:
                entry = self.manifest.tensors[index]
                if is_gapless(entry.shape, entry.strides):
                    spans.append((entry.offset, entry.offset + entry.nbytes_spanned))
            reach = 0
            for low, high in sorted(spans):
                if low > reach:
                    break
                reach = max(reach, high)
            tensor = members[0][1]
            storage = tensor.untyped_storage()
            offset = base - storage.data_ptr()
            if reach >= block.nbytes and offset >= 0 and offset + block.nbytes <= storage.nbytes():
                return bytes_in_storage(tensor, offset, block.nbytes), {index for index, _ in members}
        return None


def _view(memory: torch.Tensor, entry: TensorEntry, block: Block) -> torch.Tensor:
    return view_of_bytes(memory, DTYPES[entry.dtype], entry.offset, entry.shape, entry.strides)


def _refuse_shared(manifest: Manifest, targets: list[Target]) -> None:
    """Raise if two tensors share memory here that the source holds apart: one would overwrite the other."""
    spans: list[tuple[Any, int, int, int, str]] = []
    for entry, target in zip(manifest.tensors, targets, strict=True):
        tensor = target.memory
        if tensor is None or not tensor.numel():
            continue
        low = high = tensor.data_ptr()
        shape, stride = tuple(tensor.shape), tensor.stride()
        if tensor.is_contiguous():
            high += tensor.numel() * tensor.dtype.itemsize
        elif overlaps_itself(shape, stride) and not same_stride(shape, entry.strides, stride):
            raise StateMismatch(entry.name, "its elements share memory here, but not at the source")
        elif is_gapless(shape, stride):
            high += num_elements_spanned(shape, stride) * tensor.dtype.itemsize
        if high > low:
            spans.append((str(tensor.device), low, high, entry.block, entry.name))
    spans.sort()
    last: tuple[Any, int, int, int, str] | None = None
    for span in spans:
        if last is not None and span[0] == last[0] and span[1] < last[2] and span[3] != last[3]:
            raise StateMismatch(span[4], f"it shares memory with {last[4]} here, but not at the source")
        if last is None or span[0] != last[0] or span[2] > last[2]:
            last = span
