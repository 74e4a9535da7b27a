"""Turn a state into a JSON skeleton plus a list of tensors, and back; never pickle.

Decides which types a state may hold and how each is written. Knows nothing of memory layout or of
sockets. In the skeleton `null`, booleans, strings, finite floats and 64-bit integers stand for
themselves, an object is a dict with string keys, and an array is `[tag, ...]` for everything else. The
order of a dict is part of the state; that of a set is not.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import torch

from transport.dtypes import DTYPES, NAMES
from transport.errors import MalformedState, UnsupportedState
from transport.tensors import DistSpec, local_tensor

MAX_DEPTH: Final = 128
"""Containers nested deeper are refused; that also ends the walk of one that contains itself."""

INLINE_BYTES: Final = 1024
"""Bytes objects up to this size are written into the skeleton, larger ones travel as tensors."""

_FACTORIES: Final[dict[str, Callable[[], object]]] = {
    f.__name__: f for f in (int, float, str, bool, list, dict, set, tuple, bytes)
}
_NUMPY_KINDS: Final = "biufcSUmM"
_BYTES_DTYPE: Final = torch.uint8


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a state: its path, its local memory and, for a DTensor, how it is distributed."""

    path: str
    tensor: torch.Tensor
    dist: DistSpec | None = None


@dataclass(slots=True)
class Flat:
    """A state taken apart; `["T", i]` in the tree stands for `leaves[i]`."""

    tree: Any
    leaves: list[Leaf] = field(default_factory=list)


def flatten(state: object) -> Flat:
    """Take a state apart; raise `UnsupportedState` (a TypeError) that names the path of a misfit."""
    encoder = _Encoder()
    tree = encoder.encode(state, "", 0)
    return Flat(tree, encoder.leaves)


def unflatten(tree: object, leaves: Sequence[object]) -> object:
    """Rebuild the state; `leaves[i]` is put where the tree says `["T", i]`."""
    try:
        return _Decoder(leaves).decode(tree, 0)
    except MalformedState:
        raise
    except (TypeError, ValueError, KeyError, IndexError, OverflowError, RuntimeError, struct.error) as error:
        raise MalformedState(f"the skeleton of the state is malformed: {error}") from error


def numpy_dtype(name: object) -> np.dtype[Any]:
    """Return the numpy dtype of this name, if it is one whose memory means the same everywhere."""
    if not isinstance(name, str) or len(name) > 64:
        raise MalformedState(f"{name!r} is not the name of a numpy dtype")
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise MalformedState(f"{name!r} is not the name of a numpy dtype") from error
    if dtype.kind not in _NUMPY_KINDS or dtype.hasobject or dtype.subdtype is not None:
        raise MalformedState(f"numpy dtype {name!r} is not supported")
    return dtype


def bytes_of_array(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return an array's memory as a flat uint8 tensor: shared when that is possible, else copied."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
    if not flat.flags.writeable:
        flat = flat.copy()
    return torch.from_numpy(flat)


def join_path(path: str, key: object) -> str:
    """Return the path of an item of a container."""
    if isinstance(key, int):
        # Python refuses to print thousands of digits.
        text = str(key) if abs(key) < 2**64 else hex(key)
    else:
        text = key if isinstance(key, str) else repr(key)
    return f"{path}/{text}" if path else text


class _Encoder:
    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self._names: set[str] = {"__metadata__", ""}
        self._inline = 0  # > 0 inside a key or a set, where no tensor may be

    def encode(self, value: object, path: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return _encode_str(value)  # type: ignore[arg-type]
        if kind is int:
            return _encode_int(value)  # type: ignore[arg-type]
        if kind is float:
            return _encode_float(value)  # type: ignore[arg-type]
        if depth >= MAX_DEPTH:
            raise UnsupportedState(path, f"nested deeper than {MAX_DEPTH} levels, or contains itself")
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        container = _CONTAINERS.get(kind)
        if container is not None:
            return container(self, value, path, depth + 1)
        return self._other(value, path)

    # tensors and other memory

    def _add(self, path: str, tensor: torch.Tensor, dist: DistSpec | None = None) -> int:
        if self._inline:
            raise UnsupportedState(path, "a tensor or array cannot be a dict key or the member of a set")
        name, n = path, 1
        while name in self._names:
            n += 1
            name = f"{path}~{n}"
        self._names.add(name)
        self.leaves.append(Leaf(name, tensor, dist))
        return len(self.leaves) - 1

    def _tensor(self, value: torch.Tensor, path: str) -> list[Any]:
        tensor, dist = local_tensor(value, path)
        if tensor.dtype not in NAMES:
            raise UnsupportedState(path, f"tensors of dtype {tensor.dtype} are not supported")
        return ["T", self._add(path, tensor, dist)]

    def _other(self, value: object, path: str) -> list[Any]:
        if isinstance(value, np.generic):
            if value.dtype.kind not in _NUMPY_KINDS:
                raise UnsupportedState(path, f"numpy scalars of dtype {value.dtype} are not supported")
            return ["ns", value.dtype.str, value.tobytes().hex()]
        if type(value) is np.ndarray:
            if value.dtype.kind not in _NUMPY_KINDS:
                raise UnsupportedState(path, f"numpy arrays of dtype {value.dtype} are not supported")
            return ["n", self._add(path, bytes_of_array(value)), value.dtype.str, list(value.shape)]
        if type(value) in (bytes, bytearray):
            return self._bytes(value, path)  # type: ignore[arg-type]
        if type(value) is complex:
            return ["x", struct.pack(">dd", value.real, value.imag).hex()]
        if isinstance(value, torch.dtype) and value in NAMES:
            return ["dtype", NAMES[value]]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if type(value) is range:
            return ["range", *(self.encode(v, path, 0) for v in (value.start, value.stop, value.step))]
        if type(value) is slice:
            return ["slice", *(self.encode(v, path, 0) for v in (value.start, value.stop, value.step))]
        what = "functions and other callables" if callable(value) else "values"
        raise UnsupportedState(
            path, f"{what} of type {type(value).__module__}.{type(value).__qualname__} cannot be encoded"
        )

    def _bytes(self, value: bytes | bytearray, path: str) -> list[Any]:
        tag = "b" if type(value) is bytes else "ba"
        if self._inline or len(value) <= INLINE_BYTES:
            return [tag, base64.b64encode(value).decode("ascii")]
        # A copy: torch refuses read-only memory, and a bytearray must not be locked against resizing.
        memory = torch.from_numpy(np.frombuffer(bytearray(value), np.uint8))
        return [tag.upper(), self._add(path, memory)]

    # containers

    def dict_(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if all(type(key) is str for key in value) and all(map(_is_utf8, value)):
            return {key: self.encode(item, join_path(path, key), depth) for key, item in value.items()}
        return ["d", *self._pairs(value, path, depth)]

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> list[list[Any]]:
        return [
            [self._key(key, path, depth), self.encode(item, join_path(path, key), depth)]
            for key, item in value.items()
        ]

    def _key(self, key: object, path: str, depth: int) -> Any:
        if type(key) is str and _is_utf8(key):
            return key
        self._inline += 1
        try:
            return self.encode(key, f"{path} (a key of type {type(key).__name__})", depth)
        finally:
            self._inline -= 1

    def ordered_dict(self, value: OrderedDict[Any, Any], path: str, depth: int) -> Any:
        # Module.state_dict() hangs the version of each submodule on its result as an attribute.
        metadata = getattr(value, "_metadata", None)
        return [
            "od",
            self.encode(metadata, join_path(path, "_metadata"), depth),
            *self._pairs(value, path, depth),
        ]

    def default_dict(self, value: defaultdict[Any, Any], path: str, depth: int) -> Any:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and _FACTORIES.get(name) is not factory:
            raise UnsupportedState(path, f"defaultdict with the factory {factory!r} cannot be encoded")
        return ["dd", name, *self._pairs(value, path, depth)]

    def counter(self, value: Counter[Any], path: str, depth: int) -> Any:
        return ["c", *self._pairs(value, path, depth)]

    def list_(self, value: list[Any], path: str, depth: int) -> Any:
        return ["l", *self._items(value, path, depth)]

    def tuple_(self, value: tuple[Any, ...], path: str, depth: int) -> Any:
        return ["t", *self._items(value, path, depth)]

    def size(self, value: torch.Size, path: str, depth: int) -> Any:
        return ["size", *(int(n) for n in value)]

    def deque_(self, value: deque[Any], path: str, depth: int) -> Any:
        return ["q", value.maxlen, *self._items(value, path, depth)]

    def set_(self, value: set[Any], path: str, depth: int) -> Any:
        return ["s", *self._members(value, path, depth)]

    def frozenset_(self, value: frozenset[Any], path: str, depth: int) -> Any:
        return ["fs", *self._members(value, path, depth)]

    def _items(self, value: Iterable[Any], path: str, depth: int) -> list[Any]:
        return [self.encode(item, join_path(path, i), depth) for i, item in enumerate(value)]

    def _members(self, value: Iterable[Any], path: str, depth: int) -> list[Any]:
        self._inline += 1
        try:
            return sorted((self.encode(v, join_path(path, v), depth) for v in value), key=msgspec.json.encode)
        finally:
            self._inline -= 1


_CONTAINERS: Final[dict[type, Callable[[_Encoder, Any, str, int], Any]]] = {
    dict: _Encoder.dict_,
    OrderedDict: _Encoder.ordered_dict,
    defaultdict: _Encoder.default_dict,
    Counter: _Encoder.counter,
    list: _Encoder.list_,
    tuple: _Encoder.tuple_,
    torch.Size: _Encoder.size,
    deque: _Encoder.deque_,
    set: _Encoder.set_,
    frozenset: _Encoder.frozenset_,
}


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_str(value: str) -> Any:
    return value if _is_utf8(value) else ["u", value.encode("utf-8", "surrogatepass").hex()]


def _encode_int(value: int) -> Any:
    return value if -(2**63) <= value < 2**63 else ["i", hex(value)]


def _encode_float(value: float) -> Any:
    # The bits of a NaN are part of the state as well.
    return value if math.isfinite(value) else ["f", struct.pack(">d", value).hex()]


class _Decoder:
    def __init__(self, leaves: Sequence[object]) -> None:
        self._leaves = leaves

    def decode(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise MalformedState(f"the skeleton is nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, dict):
            return {key: self.decode(value, depth + 1) for key, value in node.items()}
        if not isinstance(node, list):
            return node
        if not node or not isinstance(node[0], str):
            raise MalformedState("the skeleton holds an array without a tag")
        tag, args = node[0], node[1:]
        if tag in _LEAF_TAGS:
            return self._leaves[args[0]]
        plain = _PLAIN.get(tag)
        if plain is not None:
            return plain(*args)
        nested = _NESTED.get(tag)
        if nested is None:
            raise MalformedState(f"the skeleton holds the unknown tag {tag!r}")
        return nested(self, args, depth + 1)

    def items(self, args: list[Any], depth: int) -> list[Any]:
        return [self.decode(arg, depth) for arg in args]

    def pairs(self, args: list[Any], depth: int) -> list[tuple[Any, Any]]:
        return [(self.decode(key, depth), self.decode(value, depth)) for key, value in args]

    def ordered_dict(self, args: list[Any], depth: int) -> OrderedDict[Any, Any]:
        result = OrderedDict(self.pairs(args[1:], depth))
        metadata = self.decode(args[0], depth)
        if metadata is not None:
            result._metadata = metadata  # type: ignore[attr-defined]
        return result

    def default_dict(self, args: list[Any], depth: int) -> defaultdict[Any, Any]:
        factory = None if args[0] is None else _FACTORIES[args[0]]
        return defaultdict(factory, self.pairs(args[1:], depth))


def _numpy_scalar(name: object, data: str) -> Any:
    dtype = numpy_dtype(name)
    raw = bytes.fromhex(data)
    if len(raw) != dtype.itemsize:
        raise MalformedState(f"a numpy scalar of dtype {name} has {len(raw)} bytes")
    return np.frombuffer(raw, dtype)[0] if raw else np.zeros((), dtype)[()]


_LEAF_TAGS: Final = frozenset(("T", "n", "B", "BA"))
_PLAIN: Final[dict[str, Callable[..., Any]]] = {
    "u": lambda data: bytes.fromhex(data).decode("utf-8", "surrogatepass"),
    "i": lambda data: int(data, 16),
    "f": lambda data: struct.unpack(">d", bytes.fromhex(data))[0],
    "x": lambda data: complex(*struct.unpack(">dd", bytes.fromhex(data))),
    "b": lambda data: base64.b64decode(data, validate=True),
    "ba": lambda data: bytearray(base64.b64decode(data, validate=True)),
    "ns": _numpy_scalar,
    "dtype": lambda name: DTYPES[name],
    "device": lambda name: torch.device(name),
    "size": lambda *dims: torch.Size(dims),
}
_NESTED: Final[dict[str, Callable[[_Decoder, list[Any], int], Any]]] = {
    "d": lambda d, args, depth: dict(d.pairs(args, depth)),
    "od": _Decoder.ordered_dict,
    "dd": _Decoder.default_dict,
    "c": lambda d, args, depth: Counter(dict(d.pairs(args, depth))),
    "l": _Decoder.items,
    "t": lambda d, args, depth: tuple(d.items(args, depth)),
    "q": lambda d, args, depth: deque(d.items(args[1:], depth), args[0]),
    "s": lambda d, args, depth: set(d.items(args, depth)),
    "fs": lambda d, args, depth: frozenset(d.items(args, depth)),
    "range": lambda d, args, depth: range(*d.items(args, depth)),
    "slice": lambda d, args, depth: slice(*d.items(args, depth)),
}
