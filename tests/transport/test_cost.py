"""What a publish and a fetch cost in time and memory, with wide margins for a busy machine."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from transport import HTTPTransport

Make = Callable[..., HTTPTransport]


def small_state(fill: float) -> dict[str, Any]:
    """One MiB in twenty tensors, as a small model and its optimizer have it."""
    return {"model": {f"p{i}": torch.full((13107,), fill) for i in range(20)}, "step": 7}


@pytest.mark.parametrize("num_sources", [1, 2])
def test_a_small_state_is_there_within_milliseconds(make_transport: Make, num_sources: int) -> None:
    """With hooks at every step boundary, the fixed cost of a heal counts as much as the speed."""
    sources, joiner = [make_transport() for _ in range(num_sources)], make_transport()
    addresses = [source.address for source in sources]
    state, into = small_state(1.0), small_state(0.0)
    publishing, whole = [], []
    for i in range(30):
        begun = time.perf_counter()
        for source in sources:
            source.publish(f"v{i}", state)
        published = time.perf_counter()
        joiner.fetch(addresses, f"v{i}", into, deadline_s=10)
        whole.append(time.perf_counter() - begun)
        publishing.append((published - begun) / num_sources)
        for source in sources:
            source.withdraw()
    assert torch.equal(into["model"]["p3"], state["model"]["p3"])
    assert min(publishing) < 0.002
    assert min(whole) < 0.010


def memory(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="cannot reset the peak of memory")
def test_a_fetch_in_place_makes_no_second_copy(make_transport: Make) -> None:
    size = 96 << 20
    state = {f"p{i}": torch.ones(size // 8, dtype=torch.uint8) for i in range(8)}
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    sources = [make_transport() for _ in range(2)]
    for source in sources:
        source.publish("v", state)
    joiner = make_transport()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    joiner.fetch([s.address for s in sources], "v", into, deadline_s=30)
    assert memory("VmHWM") - before < size // 3
