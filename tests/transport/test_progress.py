"""A fetch tells how far it is and who sends how fast: to a callback, and to the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from transport import HTTPTransport, Progress, TransportError

Make = Callable[..., HTTPTransport]
KB, MB = 1 << 10, 1 << 20


def new_state(megabytes: int) -> dict[str, torch.Tensor]:
    return {f"p{i}": torch.randint(0, 256, (MB,), dtype=torch.uint8) for i in range(megabytes)}


def test_progress_tells_bytes_and_rates_source_by_source(make_transport: Make) -> None:
    state = new_state(16)
    into = {name: tensor + (name != "p3") for name, tensor in state.items()}
    sources = [make_transport(chunk_bytes=256 * KB) for _ in range(2)]
    gone = make_transport()
    gone.close()
    for source in sources:
        source.publish("v", state)
    addresses = [source.address for source in (*sources, gone)]
    seen: list[Progress] = []
    make_transport().fetch(addresses, "v", into, deadline_s=30, reuse=True, progress=seen.append)
    last = seen[-1]
    assert [source.address for source in last.sources] == addresses
    assert [source.failed for source in last.sources] == [False, False, True]
    assert "refused" in last.sources[2].state
    assert sum(source.bytes_received for source in last.sources) == 15 * MB
    assert (last.bytes_kept, last.bytes_done, last.num_sources) == (MB, 16 * MB, 2)
    assert last.rate == pytest.approx(15 * MB / last.elapsed_s)
    assert sum(source.rate for source in last.sources) == pytest.approx(last.rate)
    assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen)


def test_the_log_gets_one_line_at_the_end(make_transport: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "transport.fetch")
    state = new_state(4)
    source = make_transport(chunk_bytes=256 * KB)
    source.publish("v", state)
    make_transport().fetch([source.address], "v", None, deadline_s=30)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "transport.fetch"]
    assert line.startswith("fetched version v: 4.2 MB in ")
    assert line.endswith(f": {source.address} 4.2 MB")


def test_a_warm_up_leaves_nothing_behind(make_transport: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    transport, other = make_transport(), make_transport()
    transport.warm_up()
    assert not caplog.records
    with pytest.raises(TransportError):
        other.fetch([transport.address], "warm-up", {"x": torch.zeros(1)}, deadline_s=0.3)
    transport.publish("v", {"x": torch.full((3,), 2.0)})
    assert other.fetch([transport.address], "v", {"x": torch.zeros(3)}, deadline_s=5.0) == {"x": ANY}


def test_a_source_below_the_floor_is_warned_of_once_by_its_address(
    make_transport: Make, make_proxy: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.randint(0, 256, (300 * KB,), dtype=torch.uint8)}
    source = make_transport(chunk_bytes=64 * KB)
    source.publish("v", state)

    def crawl(proxy: Any, before: int, data: bytes) -> bytes:
        for at in range(0, len(data), KB):
            proxy.stop.wait(0.01)
            proxy._sockets[1].send(data[at : at + KB])
        return b""

    slow = make_proxy(source.address, crawl)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    make_transport(min_rate=1e6, streams=1).fetch([slow.address], "v", into, deadline_s=60)
    assert all(torch.equal(into[name], state[name]) for name in state)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"source {slow.address} sends 0.")
    assert warnings[0].endswith("of version v, less than 1.0 MB/s")
