"""At the end of a fetch idle streams help slow ones: no byte is late, and none is written by two."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.transport.source_process import __file__ as source_script
from tests.transport.source_process import make_state
from transport import HTTPTransport, Progress
from transport.endgame import Flight, slowest, split
from transport.ledger import Extent

Make = Callable[..., HTTPTransport]
MB = 1 << 20


def flight(source: str, start: int, end: int, **at: float) -> Flight:
    return Flight(source, Extent(start, end), lambda: None, begun=at.get("begun", 0.0))


def choose(flights: list[Flight], now: float, source: str = "b", rate: float = 100.0) -> Flight | None:
    return slowest(flights, source, rate, chunk=10, now=now, slow_s=0.5)


def test_the_flight_that_would_last_longest_is_helped() -> None:
    slow, slower = flight("a", 0, 10), flight("a", 10, 20)
    slow.advance(4, 1.0, 0.5)
    slower.advance(1, 1.0, 0.5)
    assert choose([slow, slower], now=1.0) is slower
    slower.rival = "c"
    assert choose([slow, slower], now=1.0) is slow


def test_a_flight_that_has_only_begun_or_is_about_to_end_is_left_alone() -> None:
    assert choose([flight("a", 0, 10)], now=0.4) is None
    quick = flight("a", 0, 1000)
    quick.advance(990, 1.0, 0.5)
    assert choose([quick], now=1.0) is None


def test_what_a_source_did_before_it_began_to_crawl_does_not_count() -> None:
    crawling = flight("a", 0, 1000)
    crawling.advance(980, 0.6, 0.5)
    for now in (1.2, 1.8, 2.4):
        crawling.advance(1, now, 0.5)
    assert choose([crawling], now=2.4) is crawling


def test_a_source_that_is_no_faster_or_must_be_avoided_does_not_help() -> None:
    slow = flight("a", 0, 10)
    slow.advance(4, 1.0, 0.5)
    assert choose([slow], now=1.0, rate=5.0) is None
    silent = Flight("a", Extent(0, 10, frozenset("b")), lambda: None, 0.0)
    assert choose([silent], now=9.0) is None
    assert choose([silent], now=9.0, source="c") is silent


def test_only_chunks_that_are_not_begun_are_taken_over() -> None:
    long = flight("a", 3, 60)
    long.advance(8, 1.0, 0.5)
    assert split(long, 10) == Extent(40, 60)
    assert long.end == 40
    assert split(long, 10) == Extent(30, 40)
    assert split(long, 10) == Extent(20, 30)
    assert split(long, 10) is None
    assert long.left == 9


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_the_last_chunk_is_raced_and_what_comes_late_is_not_written(
    make_transport: Make, make_proxy: Callable[..., Any], wrong: bool
) -> None:
    """One source crawls inside of its only chunk, with wrong bits or right ones; another is idle."""
    state = {"w": torch.randint(0, 256, (2 * MB,), dtype=torch.uint8)}
    into = {"w": torch.zeros_like(state["w"])}
    sources = [make_transport(chunk_bytes=MB) for _ in range(2)]
    for source in sources:
        source.publish("v", state)

    def crawl(proxy: Any, before: int, data: bytes) -> bytes | None:
        if before < 300_000:
            return data
        for byte in data:
            if proxy.stop.wait(0.02):
                return None
            proxy._sockets[1].send(bytes([byte ^ wrong]))
        return b""

    proxy = make_proxy(sources[0].address, crawl)
    begun = time.monotonic()
    make_transport(stall_s=20, streams=2).fetch([proxy.address, sources[1].address], "v", into, deadline_s=60)
    assert time.monotonic() - begun < 10
    assert torch.equal(into["w"], state["w"])


def test_a_wrong_second_copy_does_no_harm(make_transport: Make, make_proxy: Callable[..., Any]) -> None:
    """The one source is slow but right, the other quick but wrong."""
    state = {"w": torch.randint(0, 256, (4 * MB,), dtype=torch.uint8)}
    into = {"w": torch.zeros_like(state["w"])}
    sources = [make_transport(chunk_bytes=MB) for _ in range(2)]
    for source in sources:
        source.publish("v", state)
    slow = make_proxy(sources[0].address, lambda proxy, before, data: proxy.stop.wait(0.03) or data)
    wrong = make_proxy(
        sources[1].address, lambda proxy, before, data: data[:-1] + bytes([data[-1] ^ (len(data) > 60_000)])
    )
    make_transport(streams=2).fetch([slow.address, wrong.address], "v", into, deadline_s=60)
    assert torch.equal(into["w"], state["w"])


def test_an_extent_that_takes_too_long_is_given_to_others_long_before_the_end(
    make_transport: Make, make_proxy: Callable[..., Any]
) -> None:
    """Its source is never silent, and the others are busy, so that neither of these ends it."""
    state = {"w": torch.randint(0, 256, (28 * MB,), dtype=torch.uint8)}
    into = {"w": torch.zeros_like(state["w"])}
    sources = [make_transport(chunk_bytes=MB // 4) for _ in range(3)]
    for source in sources:
        source.publish("v", state)

    def crawl(proxy: Any, before: int, data: bytes) -> bytes | None:
        if before < 10_000:
            return data
        for byte in data:
            if proxy.stop.wait(0.02):
                return None
            proxy._sockets[1].send(bytes([byte]))
        return b""

    slow = make_proxy(sources[0].address, crawl)
    paced = [
        make_proxy(source.address, lambda proxy, before, data: proxy.stop.wait(0.01) or data)
        for source in sources[1:]
    ]
    seen: list[tuple[int, str]] = []

    def progress(report: Progress) -> None:
        seen.append((report.bytes_done, report.sources[0].state))

    make_transport(stall_s=0.4, streams=3).fetch(
        [slow.address, *(proxy.address for proxy in paced)], "v", into, deadline_s=60, progress=progress
    )
    assert torch.equal(into["w"], state["w"])
    assert any("took too long" in what and done < 25 * MB for done, what in seen)


@pytest.fixture
def mortal() -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, source_script, "5", "64"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def test_a_source_killed_at_half_costs_hardly_any_byte_twice(
    make_transport: Make,
    make_proxy: Callable[..., Any],
    mortal: tuple[subprocess.Popen[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three sources; all that they send is counted on the way."""
    monkeypatch.setattr("transport.fetch.PROGRESS_S", 0.0)
    process, address = mortal
    state = make_state(5, 64)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    others = [make_transport(chunk_bytes=MB) for _ in range(2)]
    for source in others:
        source.publish("v", state)
    proxies = [
        make_proxy(each, lambda proxy, before, data: data)
        for each in (address, *(source.address for source in others))
    ]
    killed: list[int] = []

    def progress(report: Progress) -> None:
        if not killed and report.bytes_done >= 32 * MB:
            process.send_signal(signal.SIGKILL)
            killed.append(report.bytes_done)

    make_transport().fetch([p.address for p in proxies], "v", into, deadline_s=60, progress=progress)
    assert killed
    assert killed[0] < 60 * MB
    assert all(torch.equal(into[name], state[name]) for name in state)
    assert all(proxy.bytes_sent > MB for proxy in proxies)
    assert sum(proxy.bytes_sent for proxy in proxies) <= 1.1 * 64 * MB
