"""A joiner's source that goes from bad to worse: throttled, then corrupt, then dead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

from ftkit.chaos.proxy import Proxy, Weather
from transport import HTTPTransport, Progress

MB = 1 << 20


def test_a_source_is_throttled_then_corrupts_then_dies_and_the_state_comes_whole(
    chaos_proxy: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("transport.fetch.PROGRESS_S", 0.0)
    generator = torch.Generator().manual_seed(1)
    state = {f"layer{i}": torch.rand(MB // 4, generator=generator) for i in range(16)}
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(HTTPTransport(token="t", chunk_bytes=MB // 4)) for _ in range(2)]
        for source in sources:
            source.publish("v", state)
        bad = chaos_proxy(sources[0].address, seed=1)
        good = chaos_proxy(sources[1].address)
        good.set(Weather(bytes_per_s=8.0 * MB))  # slow enough for all of it to happen to the other one
        worse = [
            (1 * MB, lambda: bad.set(Weather(bytes_per_s=2.0 * MB))),
            (3 * MB, lambda: bad.set(Weather(flip_after=1000))),
            (6 * MB, bad.close),
        ]

        def progress(report: Progress) -> None:
            while worse and report.bytes_done > worse[0][0]:
                worse.pop(0)[1]()

        joiner = stack.enter_context(HTTPTransport(token="t", stall_s=0.5))
        joiner.fetch([bad.url, good.url], "v", into, deadline_s=60, progress=progress)
    assert not worse, "everything has happened before the end"
    assert all(torch.equal(into[name], state[name]) for name in state)
    assert f"from {bad.url} have a wrong checksum" in caplog.text
