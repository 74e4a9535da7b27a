"""The description of a published state that goes ahead of its bytes, and the check of a foreign one.

Decides what a peer may claim. Pure: no sockets, no tensors' memory. A manifest describes a data section
(blocks of bytes, one after the other), the tensors as strided views of these blocks (so that aliases and
views of one storage are sent once) and the skeleton of the state.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import xxhash

from transport.dtypes import ITEMSIZES
from transport.errors import MalformedState
from transport.tensors import DistSpec, contiguous_stride, num_elements_spanned

FORMAT: Final = 1
ALGORITHM: Final = "xxh3_128"
HASH_BYTES: Final = 16
DEFAULT_CHUNK: Final = 8 << 20
MAX_MANIFEST: Final = 64 << 20
MAX_TENSORS: Final = 1 << 20
MAX_DIMS: Final = 64
MAX_CHUNKS: Final = 1 << 22
MIN_CHUNK: Final = 1 << 10
MAX_CHUNK: Final = 1 << 30
SPARSE_SPAN: Final = 64
"""A packed block may span at most this many times its size (or `SPARSE_FLOOR` bytes) when spread out."""
SPARSE_FLOOR: Final = 64 << 20
MASK_ELEMENTS: Final = 16
"""The views of a `mask` block may have at most this many elements for each byte of its span."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """A run of bytes in the data section."""

    offset: int
    nbytes: int
    pack: str = ""
    """`""`: the bytes of a span of memory as they are. `rows`: the elements of one tensor with holes, in
    row-major order. `mask`: the bytes that any of several views refers to, in order of address."""
    span: int = 0
    """For `mask`: the bytes from the first to past the last one referred to."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as a strided view of a block."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    """In elements; None when row-major."""
    block: int
    offset: int = 0
    """In bytes, from the start of the block's span."""
    device: str = "cpu"
    """The type of device that it lives on at the source."""
    dist: DistSpec | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the strides in elements."""
        return contiguous_stride(self.shape) if self.stride is None else self.stride

    @property
    def nbytes_spanned(self) -> int:
        """Return the distance from the first to past the last byte."""
        return num_elements_spanned(self.shape, self.strides) * ITEMSIZES[self.dtype]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All that a joiner must know before it can receive a state in place."""

    format: int = FORMAT
    version: str = ""
    shard: str = "state"
    size: int
    """Bytes in the data section."""
    chunk: int
    """Bytes per checksum; the last chunk may be shorter."""
    algo: str = ALGORITHM
    etag: str
    """Digest of the layout: two sources with the same one hold the same bytes at the same offsets."""
    blocks: list[Block]
    tensors: list[TensorEntry]
    tree: Any
    """The skeleton of the state; `["T", i]` in it stands for `tensors[i]`."""
    hashes: str | None = None
    """The checksums of all chunks in hexadecimal, one after the other; None when not computed yet."""
    file_header: str | None = None
    """The header of the safetensors file that is served; None when it follows from all the rest."""

    @property
    def num_chunks(self) -> int:
        """Return how many chunks the data section has."""
        return -(-self.size // self.chunk)


def layout_digest(chunk: int, blocks: list[Block], tensors: list[TensorEntry]) -> str:
    """Return the digest of a layout; the order in which tensors occur in the tree does not count."""
    table = sorted(tensors, key=lambda entry: entry.name)
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([FORMAT, chunk, blocks, table]))


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Manifest)


def dump(manifest: Manifest) -> bytes:
    """Return a manifest as JSON."""
    return _encoder.encode(manifest)


def parse(raw: bytes | bytearray | memoryview) -> Manifest:
    """Read a foreign manifest; raise `MalformedState` if it contradicts itself or exceeds a limit."""
    if len(raw) > MAX_MANIFEST:
        raise MalformedState(f"the manifest has {len(raw)} bytes, more than {MAX_MANIFEST}")
    try:
        manifest = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedState(f"the manifest is not valid: {error}") from error
    check(manifest)
    return manifest


def check(manifest: Manifest) -> None:
    """Raise `MalformedState` unless the blocks tile the data section and every tensor lies in its block."""
    if manifest.format != FORMAT or manifest.algo != ALGORITHM:
        raise MalformedState(
            f"the manifest has format {manifest.format} with {manifest.algo}, this version of the "
            f"package knows {FORMAT} with {ALGORITHM}"
        )
    if not MIN_CHUNK <= manifest.chunk <= MAX_CHUNK:
        raise MalformedState(f"a chunk size of {manifest.chunk} bytes is out of bounds")
    if len(manifest.tensors) > MAX_TENSORS or len(manifest.blocks) > MAX_TENSORS:
        raise MalformedState(f"the manifest lists more than {MAX_TENSORS} tensors")
    end = 0
    for block in manifest.blocks:
        if block.offset != end or block.nbytes < 0 or block.span < 0:
            raise MalformedState(
                f"a block at {block.offset} of {block.nbytes} bytes does not follow byte {end}"
            )
        end += block.nbytes
    if end != manifest.size or manifest.num_chunks > MAX_CHUNKS:
        raise MalformedState(f"the blocks end at byte {end} of {manifest.size}")
    for entry in manifest.tensors:
        _check_entry(entry, manifest.blocks)
    if manifest.hashes is not None and len(manifest.hashes) != 2 * HASH_BYTES * manifest.num_chunks:
        raise MalformedState("the manifest has not one checksum for each chunk")
    _check_tree(manifest)


def _check_entry(entry: TensorEntry, blocks: list[Block]) -> None:
    name = entry.name[:200]
    itemsize = ITEMSIZES.get(entry.dtype)
    if itemsize is None:
        raise MalformedState(f"tensor {name!r} has the dtype {entry.dtype[:40]!r}, unknown here")
    if not 0 <= entry.block < len(blocks):
        raise MalformedState(f"tensor {name!r} lies in block {entry.block}, which does not exist")
    if len(entry.shape) > MAX_DIMS or any(n < 0 for n in entry.shape):
        raise MalformedState(f"tensor {name!r} has an impossible shape")
    if entry.stride is not None and (
        len(entry.stride) != len(entry.shape) or any(not 0 <= s < 2**62 for s in entry.stride)
    ):
        raise MalformedState(f"tensor {name!r} has impossible strides")
    block = blocks[entry.block]
    elements = 1
    for n in entry.shape:
        elements *= n
    if elements >= 2**62:
        raise MalformedState(f"tensor {name!r} has an impossible shape")
    if block.pack == "rows":
        fits = entry.offset == 0 and entry.stride is None and elements * itemsize == block.nbytes
    elif block.pack in ("", "mask"):
        room = block.nbytes if block.pack == "" else block.span
        fits = entry.offset >= 0 and entry.offset % itemsize == 0
        fits = fits and entry.offset + entry.nbytes_spanned <= room
    else:
        raise MalformedState(f"block {entry.block} is packed in an unknown way, {block.pack[:40]!r}")
    if block.pack == "mask":
        fits = fits and elements <= MASK_ELEMENTS * block.span
        fits = fits and block.span <= max(SPARSE_FLOOR, SPARSE_SPAN * block.nbytes)
    if not fits:
        raise MalformedState(f"tensor {name!r} reaches beyond its block of {block.nbytes} bytes")


def _check_tree(manifest: Manifest) -> None:
    """Each tensor must stand in the tree exactly once."""
    seen = bytearray(len(manifest.tensors))
    stack: list[Any] = [manifest.tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            stack.extend(node.values())
        elif isinstance(node, list):
            if node and node[0] in ("T", "n", "B", "BA"):
                index = node[1] if len(node) > 1 else None
                if type(index) is not int or not 0 <= index < len(seen) or seen[index]:
                    raise MalformedState("the skeleton refers to a tensor that does not exist, or twice")
                seen[index] = 1
            else:
                # A list's items follow its tag; strings among them are values, never references.
                stack.extend(item for item in node if isinstance(item, (dict, list)))
    if not all(seen):
        raise MalformedState("the manifest lists a tensor that its skeleton does not mention")
