"""Several joiners, several sources, and a seed that decides what goes wrong with each of them.

Whatever it is, as long as one source is sound, every joiner gets the very bits, and soon.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from transport import HTTPTransport

Make = Callable[..., HTTPTransport]
KB, MB = 1 << 10, 1 << 20


def sound(proxy: Any, before: int, data: bytes) -> bytes:
    return data


def unsound(rng: random.Random) -> Callable[..., bytes | None]:
    """Return one of the ways in which a peer or the network may misbehave, somewhere on each connection."""
    at, bit, pause = rng.randrange(3 * MB // 2), 1 << rng.randrange(8), rng.uniform(0.3, 1.0)

    def flip(proxy: Any, before: int, data: bytes) -> bytes | None:
        if before <= at < before + len(data):
            return data[: at - before] + bytes([data[at - before] ^ bit]) + data[at - before + 1 :]
        return data

    def garble(proxy: Any, before: int, data: bytes) -> bytes | None:
        return bytes(len(data)) if before <= at < before + len(data) else data

    def cut(proxy: Any, before: int, data: bytes) -> bytes | None:
        return None if before + len(data) > at else data

    def stall(proxy: Any, before: int, data: bytes) -> bytes | None:
        if before + len(data) > at:
            proxy.stop.wait(pause)
        return data

    def slow(proxy: Any, before: int, data: bytes) -> bytes | None:
        proxy.stop.wait(0.01)
        return data

    return rng.choice([flip, garble, cut, stall, slow, sound])


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.long) for n in range(6, 200))]
)
def test_one_sound_source_is_enough(make_transport: Make, make_proxy: Callable[..., Any], seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 3, 6]) * MB
    state = {f"p{i}": torch.randint(0, 256, (size // 3 + i,), dtype=torch.uint8) for i in range(3)}
    chunk = rng.choice([16, 64, 256]) * KB
    sources = [make_transport(chunk_bytes=chunk) for _ in range(3)]
    for source in sources:
        source.publish("v", state)
    count = rng.choice([1, 3])
    joiners = [make_transport(stall_s=0.3, streams=rng.choice([2, 4, 6])) for _ in range(count)]
    ways = [make_proxy(joiner.address, unsound(rng)).address for joiner in joiners]
    intos = [{name: torch.zeros_like(tensor) for name, tensor in state.items()} for _ in joiners]
    reuse = rng.random() < 0.5
    if reuse:
        intos[0]["p1"].copy_(state["p1"])

    def fetch(index: int) -> None:
        addresses = [make_proxy(source.address, unsound(rng)).address for source in sources[:2]]
        addresses.append(make_proxy(sources[2].address, sound).address)
        rng.shuffle(addresses)
        everyone = [*ways[:index], joiners[index].address, *ways[index + 1 :]]
        joiners[index].fetch(
            addresses, "v", intos[index], deadline_s=60, joiners=everyone if count > 1 else (), reuse=reuse
        )

    begun = time.monotonic()
    threads = [threading.Thread(target=fetch, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for into in intos:
        assert all(torch.equal(into[name], state[name]) for name in state)
    assert time.monotonic() - begun < 30
    assert not [thread for thread in threading.enumerate() if thread.name == "transport-fetch"]
