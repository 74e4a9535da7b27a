"""Transports on loopback that are closed whatever happens, and a way to compare states bit for bit."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.transport.proxy import Mangle, Proxy
from transport import HTTPTransport


@pytest.fixture
def make_transport() -> Iterator[Callable[..., HTTPTransport]]:
    made: list[HTTPTransport] = []

    def make(**settings: Any) -> HTTPTransport:
        # By the network stack, as between machines, unless a test wants it otherwise.
        transport = HTTPTransport(**{"token": "secret", "same_host": False, **settings})
        made.append(transport)
        return transport

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def make_proxy() -> Iterator[Callable[..., Proxy]]:
    made: list[Proxy] = []

    def make(target: str, mangle: Mangle) -> Proxy:
        made.append(Proxy(target, mangle))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


@pytest.fixture
def wait_until() -> Callable[..., None]:
    def wait(condition: Callable[[], bool], what: str, deadline_s: float = 10.0) -> None:
        deadline = time.monotonic() + deadline_s
        pause = threading.Event()
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain until {what}"
            pause.wait(0.005)

    return wait


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return b"" if not flat.numel() else flat.view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any, path: str = "") -> None:
    assert type(a) is type(b), f"{path}: {type(a)} is not {type(b)}"
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert bits(a) == bits(b), f"{path}: the bits differ"
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), path
    elif isinstance(a, Mapping):
        assert list(a) == list(b), f"{path}: keys, in order"
        for key in a:
            same(a[key], b[key], f"{path}/{key}")
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None), path
    elif isinstance(a, (list, tuple, deque)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}/{i}")
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b), path
        assert math.isnan(a) or a == b
    elif isinstance(a, complex):
        same((a.real, a.imag), (b.real, b.imag), path)
    else:
        assert a == b, path


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Any, Any], None]:
    """Compare two states: types, order of keys, bits of tensors and floats."""
    return same
