"""Decide where each received byte goes, and rebuild the state from what arrived.

A plan is made from a manifest and from the state to receive into. It refuses before anything is written
if the two do not fit. Blocks whose layout here equals that at the source are received straight into the
tensors' memory; those strided in another way pass through a host buffer that lives until the block is
complete, and those on a device chunk by chunk through a ring of host buffers. Knows no sockets.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from transport.dtypes import DTYPES, ITEMSIZES
from transport.errors import MalformedState, StateMismatch
from transport.layout import mask_unit, referenced_units
from transport.manifest import Block, Manifest, TensorEntry
from transport.match import Target, match
from transport.staging import Copies, Ring, copies_to, wait_for_device
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
    view: memoryview | None = None
    """The memory; None where sockets cannot write, so that a verified chunk is copied there."""


class Plan:
    """The places in memory of all bytes of one data section. Thread safe after construction.

    What does the copies to a device is chosen by its kind, unless `copies` is given: then all memory counts
    as a device's.
    """

    _ring: Ring | None = None

    @torch.no_grad()
    def __init__(self, manifest: Manifest, into: object, *, copies: Copies | None = None) -> None:
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
        devices = {home.memory.device for home in homes}
        remote = {device for device in devices if copies is not None or device.type != "cpu"}
        if remote:
            self._ring = Ring(min(manifest.chunk, manifest.size), remote, copies or copies_to(remote))
        for home in homes:
            if home.memory.device not in remote:
                home.view = memory_view(home.memory)
        for home in homes:
            if not home.block.nbytes:
                self._complete(home)
        self._homes = [home for home in homes if home.block.nbytes]
        self._starts = [home.block.offset for home in self._homes]

    def views(self, start: int, end: int) -> list[memoryview]:
        """Return the writable memory for bytes `start` to `end` of the data section, in order."""
        result = []
        for home, low, high in self._pieces(start, end):
            if home.view is not None:
                result.append(home.view[low - home.block.offset : high - home.block.offset])
                continue
            assert self._ring is not None
            size = self.manifest.chunk
            for chunk in range(low // size, -(-high // size)):
                at = chunk * size
                buffer = memory_view(self._ring.buffer(chunk))
                result.append(buffer[max(low, at) - at : min(high, at + size) - at])
        return result

    def _pieces(self, start: int, end: int) -> Iterator[tuple[_Home, int, int]]:
        """Yield the blocks in which a range of bytes lies, and from where to where."""
        index = bisect.bisect_right(self._starts, start) - 1
        while start < end:
            home = self._homes[index]
            high = min(end, home.block.offset + home.block.nbytes)
            yield home, start, high
            start = high
            index += 1

    @property
    def mostly_in_place(self) -> bool:
        """Say whether most bytes are received where they stay, not only pass on their way to a device."""
        there = sum(home.block.nbytes for home in self._homes if home.view is not None)
        return 2 * there >= self.manifest.size

    def in_place(self, start: int, end: int) -> bool:
        """Say whether the memory for these bytes stays as it is once they have come."""
        return all(home.view is not None for home, _, _ in self._pieces(start, end))

    def is_destination(self, start: int, end: int) -> bool:
        """Say whether the memory for these bytes holds what is to be overwritten, and is all that will be."""
        return all(home.direct and home.view is not None for home, _, _ in self._pieces(start, end))

    @torch.no_grad()
    def accept(self, start: int, end: int) -> None:
        """Note that a chunk (never before accepted) has arrived and is verified."""
        places = [
            (home.memory[low - home.block.offset : high - home.block.offset], low - start)
            for home, low, high in self._pieces(start, end)
            if home.view is None
        ]
        if places:
            assert self._ring is not None
            self._ring.leave(start // self.manifest.chunk, places)
        for home, low, high in self._pieces(start, end):
            with self._lock:
                home.missing -= high - low
                complete = home.missing == 0
            if complete:
                self._complete(home)

    def result(self) -> object:
        """Return the whole state, once all bytes have been accepted."""
        if self._ring is not None:
            self._ring.flush()
        return unflatten(self.manifest.tree, self._results)

    def close(self) -> None:
        """Return once nothing is written to the tensors any more; to be called when the fetch has ended."""
        if self._ring is not None:
            self._ring.close()

    def _complete(self, home: _Home) -> None:
        if self._ring is not None and (home.copies or home.late or home.block.pack == "mask"):
            self._ring.flush()
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
                return _Home(block, memory, block.nbytes, copies, absent, direct=True)
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
