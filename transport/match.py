"""Compare the state that a manifest describes with the state to receive into.

Decides which tensors are received in place and which have to be allocated, and names the first
difference that forbids it. Writes nothing. Rules: whatever is a tensor on both sides must agree in
shape and dtype; a tensor that only the source has is allocated; a tensor that only `into` has is an error
in a dict with string keys that is not empty at the source (another model), and is dropped elsewhere
(optimizer state that the source has not created). Anything that is not a tensor is taken from the source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from transport.boxes import Box
from transport.dtypes import NAMES
from transport.errors import MalformedState, StateMismatch
from transport.manifest import Manifest
from transport.tensors import DistSpec, local_tensor, placements_of
from transport.tree import MAX_DEPTH, join_path, numpy_dtype, unflatten


@dataclass(slots=True)
class Target:
    """What becomes of one tensor of the manifest: an existing one, or one to allocate."""

    memory: torch.Tensor | None = None
    """The existing tensor's local memory; None when it has to be allocated."""
    result: object = None
    """What stands in the received state."""
    numpy: tuple[np.dtype[Any], tuple[int, ...]] | None = None
    as_bytes: type | None = None
    box: Box | None = None
    """Which part of the whole tensor the memory is, where that may differ from the source's part."""
    dist: DistSpec | None = None
    mesh: DeviceMesh | None = None

    def finish(self, tensor: torch.Tensor) -> object:
        """Make what stands in the received state out of newly allocated memory."""
        if self.numpy is not None:
            dtype, shape = self.numpy
            return (
                np.frombuffer(tensor.numpy(), dtype).reshape(shape)
                if tensor.numel()
                else np.empty(shape, dtype)
            )
        if self.as_bytes is not None:
            return self.as_bytes(tensor.numpy().tobytes())
        if self.dist is not None and self.mesh is not None:
            return DTensor.from_local(
                tensor,
                self.mesh,
                placements_of(self.dist.placements),
                run_check=False,
                shape=torch.Size(self.dist.shape),
                stride=self.dist.stride,
            )
        return tensor


_MISSING: Final = object()
_DICTS: Final = {"d": 1, "od": 2, "dd": 2, "c": 1}
"""Tag -> where its pairs begin in the array."""
_LISTS: Final = {"l": 1, "t": 1, "q": 2}


def match(manifest: Manifest, into: object, *, boxes: bool = False) -> list[Target]:
    """Return a target for each tensor of the manifest, or raise `StateMismatch`.

    With `boxes`, the tensors here may be other parts of the whole ones than those of the manifest.
    """
    matcher = _Matcher(manifest, boxes=boxes)
    try:
        matcher.walk(manifest.tree, into, "", 0)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise MalformedState(f"the skeleton of the state is malformed: {error}") from error
    matcher.find_meshes()
    return matcher.targets


class _Matcher:
    def __init__(self, manifest: Manifest, *, boxes: bool) -> None:
        self._manifest, self._boxes = manifest, boxes
        self.targets = [Target() for _ in manifest.tensors]

    def walk(self, node: Any, value: object, path: str, depth: int) -> None:
        if depth > 2 * MAX_DEPTH:
            raise MalformedState("the skeleton of the state is nested too deep")
        if isinstance(node, dict):
            self._dict(list(node.items()), value, path, depth)
        elif not isinstance(node, list):
            self._no_tensor(node, value, path)
        elif node[0] == "T":
            self._tensor(node[1], value, path)
        elif node[0] in ("n", "B", "BA"):
            self._memory(node, value, path)
        elif node[0] in _DICTS:
            pairs = [(unflatten(key, ()), item) for key, item in node[_DICTS[node[0]] :]]
            self._dict(pairs, value, path, depth)
        elif node[0] in _LISTS:
            self._list(node[_LISTS[node[0]] :], value, path, depth)
        else:
            self._no_tensor(node, value, path)

    def _dict(self, pairs: list[tuple[Any, Any]], value: object, path: str, depth: int) -> None:
        here: Mapping[Any, object] = {}
        if isinstance(value, Mapping):
            here = value
        else:
            self._no_tensor("a dict", value, path)
        for key, item in pairs:
            self.walk(item, here.get(key, _MISSING), join_path(path, key), depth + 1)
        if not pairs:
            return
        keys = {key for key, _ in pairs}
        for key, item in here.items():
            if key not in keys and isinstance(key, str):
                for extra in _tensor_paths(item, join_path(path, key)):
                    raise StateMismatch(
                        extra, "this tensor exists here, but not at the source: another model?"
                    )

    def _list(self, items: list[Any], value: object, path: str, depth: int) -> None:
        here: list[object] = []
        if isinstance(value, (list, tuple, deque)):
            here = list(value)
        else:
            self._no_tensor("a list", value, path)
        for i, item in enumerate(items):
            self.walk(item, here[i] if i < len(here) else _MISSING, join_path(path, i), depth + 1)
        if items:
            for i in range(len(items), len(here)):
                for extra in _tensor_paths(here[i], join_path(path, i)):
                    raise StateMismatch(
                        extra, "this tensor exists here, but not at the source: another model?"
                    )

    def _no_tensor(self, node: object, value: object, path: str) -> None:
        if node is None or value is _MISSING:
            return
        for extra in _tensor_paths(value, path):
            raise StateMismatch(extra, f"here is a tensor, the source has {_kind(node)}")

    def _tensor(self, index: int, value: object, path: str) -> None:
        entry, target = self._manifest.tensors[index], self.targets[index]
        if isinstance(value, torch.Tensor) and value.device.type != "meta":
            memory, dist = local_tensor(value, path)
            dtype = NAMES.get(memory.dtype, str(memory.dtype))
            shape = tuple(memory.shape)
            if self._boxes:
                same = (entry.dtype, _whole(entry.shape, entry.dist)) == (dtype, _whole(shape, dist))
                target.box = _box(path, shape, dist)
            else:
                same = (entry.dtype, entry.shape, entry.dist) == (dtype, shape, dist)
            if not same:
                theirs = _text(entry.dtype, entry.shape, entry.dist)
                ours = _text(dtype, tuple(memory.shape), dist)
                raise StateMismatch(path, f"the source has {theirs}, here is {ours}")
            target.memory, target.result = memory, value
        elif isinstance(value, (dict, list, tuple, np.ndarray)):
            raise StateMismatch(path, f"the source has a tensor, here is {_kind(value)}")
        elif self._boxes and entry.dist is not None:
            raise StateMismatch(path, "the source has a DTensor; create it here before fetching")
        else:
            target.dist = entry.dist

    def _memory(self, node: list[Any], value: object, path: str) -> None:
        entry, target = self._manifest.tensors[node[1]], self.targets[node[1]]
        if isinstance(value, torch.Tensor):
            raise StateMismatch(path, "here is a tensor, the source has an array or bytes")
        if entry.dtype != "uint8" or len(entry.shape) != 1 or entry.dist is not None or entry.device != "cpu":
            raise MalformedState(f"{entry.name!r} is not a run of bytes")
        if node[0] != "n":
            target.as_bytes = bytes if node[0] == "B" else bytearray
            return
        dtype, shape = numpy_dtype(node[2]), tuple(node[3])
        count = 1
        for n in shape:
            if type(n) is not int or n < 0:
                raise MalformedState(f"array {entry.name!r} has an impossible shape")
            count *= n
        if count * dtype.itemsize != entry.shape[0]:
            raise MalformedState(
                f"array {entry.name!r} has {entry.shape[0]} bytes instead of {count} x {dtype}"
            )
        target.numpy = (dtype, shape)
        if (
            type(value) is np.ndarray
            and value.dtype == dtype
            and value.shape == shape
            and value.size
            and value.flags.c_contiguous
            and value.flags.writeable
        ):
            target.memory, target.result = torch.from_numpy(value.reshape(-1).view(np.uint8)), value

    def find_meshes(self) -> None:
        """Give DTensors that must be created the mesh of one that is there."""
        wanted = [(e, t) for e, t in zip(self._manifest.tensors, self.targets, strict=True) if t.dist]
        if not wanted:
            return
        meshes: dict[tuple[int, ...], DeviceMesh] = {}
        for target in self.targets:
            if isinstance(target.result, DTensor):
                mesh = target.result.device_mesh
                meshes.setdefault(tuple(mesh.shape), mesh)
        for entry, target in wanted:
            assert target.dist is not None
            target.mesh = meshes.get(target.dist.mesh_shape)
            if target.mesh is None or placements_of(target.dist.placements) is None:
                raise StateMismatch(
                    entry.name,
                    f"the source has a DTensor {target.dist.placements} on a mesh of shape "
                    f"{target.dist.mesh_shape}, which cannot be created here; create it before fetching",
                )


def _tensor_paths(value: object, path: str, depth: int = 0) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        yield path
    elif depth > MAX_DEPTH:
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensor_paths(item, join_path(path, key), depth + 1)
    elif isinstance(value, (list, tuple, deque)):
        for i, item in enumerate(value):
            yield from _tensor_paths(item, join_path(path, i), depth + 1)


def _kind(node: object) -> str:
    if isinstance(node, str) and node in ("a dict", "a list"):
        return node
    if isinstance(node, list):
        return "a value that is not a tensor"
    return f"a value of type {type(node).__name__}"


def _whole(shape: tuple[int, ...], dist: DistSpec | None) -> tuple[int, ...]:
    return shape if dist is None else dist.shape


def _box(path: str, shape: tuple[int, ...], dist: DistSpec | None) -> Box:
    offset = (0,) * len(shape) if dist is None else dist.offset
    if offset is None:
        assert dist is not None
        raise StateMismatch(path, f"a DTensor {dist.placements} cannot be put together from parts")
    return Box(offset, shape)


def _text(dtype: str, shape: tuple[int, ...], dist: DistSpec | None) -> str:
    text = f"{dtype}[{', '.join(map(str, shape))}]"
    if dist is not None:
        text += f" of a DTensor [{', '.join(map(str, dist.shape))}] {dist.placements} on {dist.mesh_shape}"
        text += f", from {dist.offset} on"
    return text
