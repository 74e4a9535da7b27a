"""A safetensors file as a state to serve, and as the place to receive one.

Decides how the header of a foreign file becomes a manifest, and when a received file gets its name. The
bytes of a served file are its own pages; those of a received file go straight into its pages. No sockets.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from transport.dtypes import ITEMSIZES, codes
from transport.encoded import Encoded, file_header
from transport.errors import MalformedState
from transport.manifest import (
    DEFAULT_CHUNK,
    MAX_MANIFEST,
    Block,
    Manifest,
    TensorEntry,
    check,
    dump,
    layout_digest,
)
from transport.place import Plan

_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0)


def open_file(path: str | Path, *, version: str, chunk_bytes: int = DEFAULT_CHUNK) -> Encoded:
    """Return a safetensors file as a published state whose memory is the mapped file; nothing is copied.

    The file must not be written to or cut while it is served. Raises `MalformedState` or OSError.
    """
    path = Path(path)
    _check_file(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length)
        # Private and writable, so that torch takes it; not reserved, so that it may exceed the memory.
        flags, access = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0, flags, access), dtype=torch.uint8)
    manifest = _describe(text, memory.numel() - 8 - length, version, chunk_bytes)
    check(manifest)
    if len(dump(manifest)) > MAX_MANIFEST:
        raise MalformedState(f"{path}: its header is too long to be served")
    data = memory[8 + length :]
    return Encoded(manifest, [data[b.offset : b.offset + b.nbytes] for b in manifest.blocks])


def _check_file(path: Path) -> None:
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, UnicodeDecodeError) as error:
        raise MalformedState(f"{path} is not a safetensors file: {error}") from error


def _describe(text: bytes, size: int, version: str, chunk_bytes: int) -> Manifest:
    header: dict[str, dict[str, Any]] = msgspec.json.decode(text)
    header.pop("__metadata__", None)
    names = codes()
    blocks: list[Block] = []
    tensors: list[TensorEntry] = []
    for name, item in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
        start, end = item["data_offsets"]
        dtype, shape = names.get(item["dtype"], ""), tuple(item["shape"])
        elements = 1
        for n in shape:
            elements *= n
        if not dtype or elements * ITEMSIZES[dtype] != end - start:
            dtype, shape = (
                "uint8",
                (end - start,),
            )  # a dtype that this torch has not; its code is in the header
        tensors.append(TensorEntry(name, dtype, shape, None, len(blocks)))
        blocks.append(Block(start, end - start))
    return Manifest(
        version=version,
        size=size,
        chunk=chunk_bytes,
        etag=layout_digest(chunk_bytes, blocks, tensors),
        blocks=blocks,
        tensors=tensors,
        tree={entry.name: ["T", i] for i, entry in enumerate(tensors)},
        file_header=text.decode(),
    )


class FileSink:
    """A file that comes into being: it has its name only once it is whole.

    A context manager; leaving it without `commit` removes what there is.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise IsADirectoryError(f"{self.path} is a directory")
        self._part = self.path.with_name(f".{self.path.name[:200]}.{secrets.token_hex(4)}.part")
        # Now, so that a folder that cannot be written to is noticed before anything is fetched.
        self._fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def plan(self, manifest: Manifest) -> Plan:
        """Make the file as large as it will be, and return the places in it for the bytes to receive."""
        header = file_header(manifest)
        # Room first: a full disk is then an error here, and not a signal when a page is written to.
        os.posix_fallocate(self._fd, 0, len(header) + manifest.size)
        os.pwrite(self._fd, header, 0)
        return _FilePlan(manifest, mmap.mmap(self._fd, len(header) + manifest.size), len(header))

    def commit(self) -> None:
        """Give the file its name, if it is a valid safetensors file."""
        _check_file(self._part)
        self._part.replace(self.path)

    def __enter__(self) -> FileSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
        with contextlib.suppress(FileNotFoundError):
            self._part.unlink()


class _FilePlan(Plan):
    """The data section as it is, in a file."""

    def __init__(self, manifest: Manifest, memory: mmap.mmap, start: int) -> None:
        self.manifest = manifest
        self._data = memoryview(memory)[start:]

    def views(self, start: int, end: int) -> list[memoryview]:
        return [self._data[start:end]]

    @property
    def mostly_in_place(self) -> bool:
        return True

    def in_place(self, start: int, end: int) -> bool:
        return True

    def is_destination(self, start: int, end: int) -> bool:
        return False  # a new file holds nothing yet

    def accept(self, start: int, end: int) -> None:
        pass

    def result(self) -> object:
        return None
