"""Look at a tensor as memory: its local part, its span in the storage, its bytes.

Decides which tensors have memory that can be sent. Knows no format and no sockets.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from transport.errors import UnsupportedState


class DistSpec(msgspec.Struct, frozen=True, array_like=True):
    """How a DTensor is distributed; its local part alone travels."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    placements: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    offset: tuple[int, ...] | None = None
    """Where the local part begins in the whole; None when it is not one box of it."""


def local_tensor(value: torch.Tensor, path: str) -> tuple[torch.Tensor, DistSpec | None]:
    """Return the strided memory behind a tensor, detached, and its distribution if it is a DTensor."""
    dist = None
    if isinstance(value, DTensor):
        dist = dist_spec(value)
        value = value.to_local()
        wait = getattr(value, "wait", None)
        if wait is not None:
            value = wait()
    if is_traceable_wrapper_subclass(value):
        raise UnsupportedState(path, f"tensors of type {type(value).__qualname__} are not supported")
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        raise UnsupportedState(path, f"only dense strided tensors are supported, this one is {value.layout}")
    if value.device.type == "meta":
        raise UnsupportedState(path, "a tensor on the meta device has no content")
    tensor = value.detach()
    if tensor.is_neg() or (tensor.is_complex() and tensor.is_conj()):
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor, dist


def dist_spec(value: DTensor) -> DistSpec:
    """Describe the distribution of a DTensor in plain values."""
    offset: tuple[int, ...] | None = None
    if all(type(p) in (Shard, Replicate) for p in value.placements):
        _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return DistSpec(
        shape=tuple(value.shape),
        stride=tuple(value.stride()),
        placements=tuple(_placement_name(p) for p in value.placements),
        mesh_shape=tuple(value.device_mesh.shape),
        offset=offset,
    )


def _placement_name(placement: Placement) -> str:
    if type(placement) is Shard:
        return f"S{placement.dim}"
    if type(placement) is Replicate:
        return "R"
    if type(placement) is Partial:
        return f"P{placement.reduce_op}"
    return str(placement)


def placements_of(names: Sequence[str]) -> list[Placement] | None:
    """Return the placements of these names, or None when one is of a kind that cannot be rebuilt."""
    result: list[Placement] = []
    for name in names:
        if name == "R":
            result.append(Replicate())
        elif name[:1] == "S" and name[1:].isdecimal():
            result.append(Shard(int(name[1:])))
        elif name[:1] == "P" and name[1:] in ("sum", "avg", "max", "min", "product"):
            result.append(Partial(name[1:]))
        else:
            return None
    return result


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of a shape, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def same_stride(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Say whether two strides address the same elements; those of dimensions of size 1 do not count."""
    return all(n <= 1 or x == y for n, x, y in zip(shape, a, b, strict=True)) or 0 in shape


def num_elements_spanned(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the distance from the first to past the last element, in elements; 0 when empty."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def is_gapless(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Say whether the elements of a strided tensor fill its span without a hole (they may overlap)."""
    reach = 1
    for s, n in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if s > reach:
            return False
        reach += s * (n - 1)
    return True


def overlaps_itself(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Say whether two indices may address one element (an expanded tensor, a sliding window)."""
    reach = 1
    for s, n in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if s < reach:
            return True
        reach += s * (n - 1)
    return False


def bytes_in_storage(tensor: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """Return `nbytes` bytes of the tensor's storage from byte `offset` as a flat uint8 tensor."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset, (nbytes,), (1,))


def view_of_bytes(
    memory: torch.Tensor, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a strided view of flat uint8 memory; `offset` in bytes from its start."""
    start = memory.storage_offset() + offset
    if start % dtype.itemsize:
        raise ValueError(f"byte {start} of the storage is not aligned for {dtype}")
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), start // dtype.itemsize, tuple(shape), tuple(stride))


def memory_view(memory: torch.Tensor) -> memoryview:
    """Return the writable memory of a flat uint8 tensor on the CPU."""
    return memory.numpy().data
