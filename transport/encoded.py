"""A state as a safetensors file whose data section is the live tensors' memory.

Decides the bytes of the file's header; knows no sockets. `encode` copies nothing except tensors with
holes; `Encoded.views` gives the memory of any range of the data section.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import xxhash

from transport.dtypes import ITEMSIZES, safetensors_code
from transport.errors import MalformedState
from transport.layout import lay_out
from transport.manifest import (
    DEFAULT_CHUNK,
    MAX_MANIFEST,
    Block,
    Manifest,
    TensorEntry,
    layout_digest,
    parse,
)
from transport.place import Plan
from transport.staging import HostReader
from transport.tensors import contiguous_stride, memory_view
from transport.tree import flatten

PAGE: Final = 4096
"""The header is padded so that the data section begins on a page."""

MANIFEST_KEY: Final = "ftkit.manifest"
"""The entry of the file's `__metadata__` from which the exact state is rebuilt."""


class Encoded:
    """An encoded state. Its memory is that of the live tensors: valid while nobody changes them."""

    def __init__(self, manifest: Manifest, memories: list[torch.Tensor]) -> None:
        self.manifest = manifest
        # Empty blocks would only get in the way of the search by offset.
        used = [i for i, block in enumerate(manifest.blocks) if block.nbytes]
        self._starts = [manifest.blocks[i].offset for i in used]
        self._memories: list[memoryview | torch.Tensor] = [
            memory_view(memories[i]) if memories[i].device.type == "cpu" else memories[i] for i in used
        ]
        self.devices = {memory.device for memory in memories if memory.device.type != "cpu"}
        self.on_cpu = all(isinstance(memory, memoryview) for memory in self._memories)

    @property
    def size(self) -> int:
        """Return the bytes in the data section."""
        return self.manifest.size

    @cached_property
    def header(self) -> bytes:
        """Return the head of the safetensors file: length, JSON and padding."""
        return file_header(self.manifest)

    @cached_property
    def file_etag(self) -> str:
        """Return the entity tag of the whole file."""
        digest = xxhash.xxh3_128(self.header)
        digest.update(self.manifest.version.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def views(self, start: int, end: int, reader: HostReader | None = None) -> Iterator[memoryview]:
        """Yield the memory of bytes `start` to `end` of the data section, in order.

        Memory of a device is read in pieces by `reader`, each of which is valid until the next is asked for.
        """
        index = bisect.bisect_right(self._starts, start) - 1
        while start < end:
            memory = self._memories[index]
            low = start - self._starts[index]
            if isinstance(memory, memoryview):
                piece = memory[low : low + end - start]
                yield piece
                start += len(piece)
            else:
                high = min(memory.numel(), low + end - start)
                reader = reader or HostReader()
                yield from reader.read(memory, low, high)
                start += high - low
            index += 1

    def tobytes(self) -> bytes:
        """Return the whole file; this is a copy."""
        return b"".join((self.header, *map(bytes, self.views(0, self.size))))

    def write(self, path: str | Path) -> None:
        """Write the safetensors file."""
        with open(path, "wb") as file:
            file.write(self.header)
            for view in self.views(0, self.size):
                file.write(view)


@torch.no_grad()
def encode(state: object, *, version: str = "", chunk_bytes: int = DEFAULT_CHUNK) -> Encoded:
    """Describe a state (nested dicts, lists, tensors, numbers, strings …) without copying its tensors.

    Equal states give equal bytes. A value that has no encoding raises `UnsupportedState`, a TypeError
    that names its path.
    """
    flat = flatten(state)
    layout = lay_out(flat.leaves)
    manifest = Manifest(
        version=version,
        size=layout.size,
        chunk=chunk_bytes,
        etag=layout_digest(chunk_bytes, layout.blocks, layout.tensors),
        blocks=layout.blocks,
        tensors=layout.tensors,
        tree=flat.tree,
    )
    return Encoded(manifest, layout.memories)


def file_header(manifest: Manifest) -> bytes:
    """Return the head of the safetensors file that a manifest describes: length, JSON and padding."""
    if manifest.file_header is not None:
        given = manifest.file_header.encode()
        return len(given).to_bytes(8, "little") + given
    primary: dict[int, TensorEntry] = {}
    for entry in sorted(manifest.tensors, key=lambda entry: entry.name):
        best = primary.get(entry.block)
        if best is None or _describes(entry, manifest.blocks) > _describes(best, manifest.blocks):
            primary[entry.block] = entry
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", MANIFEST_KEY: msgspec.json.encode(manifest).decode()}
    }
    for number, block in enumerate(manifest.blocks):
        entry = primary[number]
        dtype, shape = _file_shape(entry, block)
        header[entry.name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [block.offset, block.offset + block.nbytes],
        }
    text = msgspec.json.encode(header)
    text += b" " * (-(len(text) + 8) % PAGE)
    return len(text).to_bytes(8, "little") + text


def _describes(entry: TensorEntry, blocks: list[Block]) -> bool:
    """Say whether the tensor is the block: all its bytes, as they lie there, row by row."""
    return _file_shape(entry, blocks[entry.block])[0] != "U8" or entry.dtype == "uint8"


def _file_shape(entry: TensorEntry, block: Block) -> tuple[str, list[int]]:
    code = safetensors_code(entry.dtype)
    elements = 1
    for n in entry.shape:
        elements *= n
    whole = code is not None and elements * ITEMSIZES[entry.dtype] == block.nbytes and block.pack != "mask"
    if whole and code is not None:
        if block.pack == "rows" or entry.stride is None:
            return code, list(entry.shape)
        # A permuted tensor: as it lies in memory it is row-major with its dimensions in another order.
        dims = sorted(range(len(entry.shape)), key=lambda i: (-entry.strides[i], entry.shape[i] != 1, i))
        shape = [entry.shape[i] for i in dims]
        strides = [entry.strides[i] for i in dims]
        if all(n == 1 or s == t for n, s, t in zip(shape, strides, contiguous_stride(shape), strict=True)):
            return code, shape
    return "U8", [block.nbytes]


def decode(data: bytes | bytearray | memoryview, into: object = None) -> object:
    """Rebuild the state from a safetensors file made by `encode`; in place where `into` has the tensors.

    Raises `MalformedState` when the file was not made by `encode` or is damaged in its structure.
    """
    raw = memoryview(data).cast("B")
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > min(len(raw) - 8, MAX_MANIFEST):
        raise MalformedState("the file is shorter than its header says, or its header is too long")
    try:
        header = msgspec.json.decode(raw[8 : 8 + length], type=dict[str, dict[str, Any]])
        text = header["__metadata__"][MANIFEST_KEY].encode()
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, KeyError, AttributeError) as error:
        raise MalformedState("the file does not hold a state written by this package") from error
    manifest = parse(text)
    content = raw[8 + length :]
    if len(content) != manifest.size:
        raise MalformedState(f"the file holds {len(content)} bytes of data instead of {manifest.size}")
    plan = Plan(manifest, into)
    try:
        for start in range(0, manifest.size, manifest.chunk):
            at, end = start, min(manifest.size, start + manifest.chunk)
            for view in plan.views(start, end):
                view[:] = content[at : at + len(view)]
                at += len(view)
            plan.accept(start, end)
        return plan.result()
    finally:
        plan.close()
