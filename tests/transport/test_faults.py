"""Sources die, stall, lie and crawl in the middle of a fetch.

The others finish it, or the error says who did what.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.transport.source_process import make_state
from transport import (
    ChecksumError,
    HTTPTransport,
    Progress,
    SourceError,
    TransportAborted,
    TransportError,
    TransportTimeout,
)

HERE = Path(__file__).parent
MB = 1 << 20
Make = Callable[..., HTTPTransport]


def zeros(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


def flip(at: int) -> Callable[..., bytes]:
    """Flip one bit of the byte `at` of each connection."""

    def mangle(proxy: Any, before: int, data: bytes) -> bytes:
        if before <= at < before + len(data):
            raw = bytearray(data)
            raw[at - before] ^= 4
            return bytes(raw)
        return data

    return mangle


def stall(after: int) -> Callable[..., bytes | None]:
    def mangle(proxy: Any, before: int, data: bytes) -> bytes | None:
        if before + len(data) > after:
            proxy.stop.wait(60)
            return None
        return data

    return mangle


def truncate(after: int) -> Callable[..., bytes | None]:
    return lambda proxy, before, data: data if before + len(data) <= after else None


def crawl(after: int) -> Callable[..., bytes | None]:
    def mangle(proxy: Any, before: int, data: bytes) -> bytes | None:
        if before > after:
            for byte in data[:100]:
                proxy.stop.wait(0.05)
                proxy._sockets[1].send(bytes([byte]))
            proxy.stop.wait(60)
            return None
        return data

    return mangle


@pytest.fixture(scope="module")
def victim() -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, str(HERE / "source_process.py"), "5", "64"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL], ids=["freezes", "dies"])
def test_a_source_that_dies_or_freezes_in_the_middle_is_replaced_by_the_others(
    make_transport: Make,
    victim: tuple[subprocess.Popen[str], str],
    sent: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transport.fetch.PROGRESS_S", 0.0)
    process, address = victim
    state = make_state(5, 64)
    into = zeros(state)
    others = [make_transport(chunk_bytes=MB) for _ in range(2)]
    for source in others:
        source.publish("v", state)
    done: list[int] = []

    def progress(report: Progress) -> None:
        if not done and report.bytes_done > 8 * MB:
            process.send_signal(sent)
            done.append(report.bytes_done)

    begun = time.monotonic()
    make_transport(streams=6, stall_s=1.0).fetch(
        [address, *(s.address for s in others)], "v", into, deadline_s=60, progress=progress
    )
    assert done
    assert done[0] < 64 * MB
    assert equal(into, state)
    assert time.monotonic() - begun < 20
    process.send_signal(signal.SIGCONT)


def test_one_flipped_bit_is_found_and_fetched_again_elsewhere(
    make_transport: Make, make_proxy: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state(1, 8)
    into = zeros(state)
    sources = [make_transport(chunk_bytes=MB) for _ in range(2)]
    for source in sources:
        source.publish("v", state)
    proxy = make_proxy(sources[0].address, flip(at=600_000))
    make_transport().fetch([proxy.address, sources[1].address], "v", into, deadline_s=20)
    assert equal(into, state)
    assert f"from {proxy.address} have a wrong checksum" in caplog.text


def test_with_no_other_source_a_damaged_chunk_is_fetched_again_from_the_same(
    make_transport: Make, make_proxy: Callable[..., Any]
) -> None:
    state = make_state(1, 8)
    into = zeros(state)
    source = make_transport(chunk_bytes=MB)
    source.publish("v", state)
    flips = iter([600_000])

    def once(proxy: Any, before: int, data: bytes) -> bytes:
        if before > 500_000 and next(flips, None) is not None:
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    make_transport().fetch([make_proxy(source.address, once).address], "v", into, deadline_s=20)
    assert equal(into, state)


def test_a_source_that_keeps_damaging_is_banned_by_name(
    make_transport: Make, make_proxy: Callable[..., Any]
) -> None:
    state = make_state(1, 8)
    source = make_transport(chunk_bytes=MB)
    source.publish("v", state)

    def always(proxy: Any, before: int, data: bytes) -> bytes:
        return data[:1000] + bytes([data[1000] ^ 1]) + data[1001:] if len(data) > 60_000 else data

    proxy = make_proxy(source.address, always)
    with pytest.raises(ChecksumError, match=f"{proxy.address}: it sent 2 chunks with a wrong checksum"):
        make_transport().fetch([proxy.address], "v", zeros(state), deadline_s=20)


def test_a_source_whose_bits_differ_is_found_out(make_transport: Make) -> None:
    """Its own checksums would all be right; they are compared with those of the reference."""
    state = make_state(1, 8)
    other = {name: tensor.clone() for name, tensor in state.items()}
    other["p1"][5] += 1
    right, wrong = (make_transport(chunk_bytes=MB) for _ in range(2))
    right.publish("v", state)
    wrong.publish("v", other)
    into = zeros(state)
    make_transport().fetch([right.address, wrong.address], "v", into, deadline_s=20)
    assert equal(into, state)


@pytest.mark.parametrize("at", [0, 20, 300, 5000, 600_000])
def test_damage_anywhere_in_what_one_source_sends_does_no_harm(
    make_transport: Make, make_proxy: Callable[..., Any], at: int
) -> None:
    """Also in the heads of its answers and in the manifest."""
    state = make_state(1, 4)
    sources = [make_transport(chunk_bytes=MB) for _ in range(2)]
    for source in sources:
        source.publish("v", state)
    into = zeros(state)
    proxy = make_proxy(sources[0].address, flip(at))
    make_transport(stall_s=0.5).fetch([proxy.address, sources[1].address], "v", into, deadline_s=30)
    assert equal(into, state)


@pytest.mark.parametrize("after", [100, 70_000, 1_000_000])
@pytest.mark.parametrize("how", [stall, truncate], ids=["stalls", "truncates"])
def test_a_source_that_stalls_or_truncates_loses_its_bytes_to_the_others(
    make_transport: Make, make_proxy: Callable[..., Any], how: Callable[[int], Any], after: int
) -> None:
    state = make_state(1, 8)
    sources = [make_transport(chunk_bytes=MB) for _ in range(2)]
    for source in sources:
        source.publish("v", state)
    into = zeros(state)
    proxy = make_proxy(sources[0].address, how(after))
    begun = time.monotonic()
    make_transport(stall_s=0.5).fetch([proxy.address, sources[1].address], "v", into, deadline_s=30)
    assert equal(into, state)
    assert time.monotonic() - begun < 10


def test_what_has_arrived_is_not_fetched_again(make_transport: Make, make_proxy: Callable[..., Any]) -> None:
    """A connection that breaks costs the bytes that had not come, and a head or two."""
    state = make_state(1, 8)
    source = make_transport(chunk_bytes=MB)
    source.publish("v", state)
    into = zeros(state)
    proxy = make_proxy(source.address, truncate(3_000_000))
    make_transport(streams=1).fetch([proxy.address], "v", into, deadline_s=30)
    assert equal(into, state)
    assert proxy.bytes_sent < 8 * MB + 20_000


def test_a_source_that_crawls_does_not_hold_up_the_end(
    make_transport: Make, make_proxy: Callable[..., Any]
) -> None:
    """It is never silent, so that no time limit of silence would end this."""
    state = make_state(1, 8)
    sources = [make_transport(chunk_bytes=MB) for _ in range(2)]
    for source in sources:
        source.publish("v", state)
    into = zeros(state)
    proxy = make_proxy(sources[0].address, crawl(200_000))
    begun = time.monotonic()
    make_transport(stall_s=5, streams=2).fetch([proxy.address, sources[1].address], "v", into, deadline_s=60)
    assert equal(into, state)
    assert time.monotonic() - begun < 5


def test_the_error_names_every_source_and_what_it_did(
    make_transport: Make, make_proxy: Callable[..., Any]
) -> None:
    state = make_state(1, 4)
    source, wrong, gone = make_transport(), make_transport(token="other"), make_transport()
    source.publish("v", state)
    wrong.publish("v", state)
    gone.close()
    broken = make_proxy(source.address, truncate(100))
    with pytest.raises(SourceError) as caught:
        make_transport().fetch([broken.address, wrong.address, gone.address], "v", {}, deadline_s=30)
    text = str(caught.value)
    assert f"{broken.address}: it closed the connection" in text
    assert f"{wrong.address}: it refused the token" in text
    assert f"{gone.address}: cannot connect: Connection refused" in text


def test_a_lone_source_that_is_silent_is_given_until_the_deadline(
    make_transport: Make, make_proxy: Callable[..., Any]
) -> None:
    source = make_transport()
    source.publish("v", make_state(1, 4))
    proxy = make_proxy(source.address, stall(100_000))
    begun = time.monotonic()
    with pytest.raises(TransportTimeout, match=f"{proxy.address}: .*times silent"):
        make_transport(stall_s=0.3).fetch([proxy.address], "v", {}, deadline_s=1.5)
    assert 1.4 < time.monotonic() - begun < 3


def test_abort_in_mid_transfer_leaves_nobody_writing(
    make_transport: Make, make_proxy: Callable[..., Any], wait_until: Callable[..., None]
) -> None:
    state = make_state(1, 8)
    source, joiner = make_transport(chunk_bytes=MB), make_transport()
    source.publish("v", state)
    proxy = make_proxy(source.address, stall(2_000_000))
    into, caught = zeros(state), []

    def fetch() -> None:
        try:
            joiner.fetch([proxy.address], "v", into, deadline_s=60)
        except TransportError as error:
            caught.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    wait_until(lambda: proxy.bytes_sent > 1_000_000, "the transfer is under way")
    begun = time.monotonic()
    joiner.abort()
    thread.join(10)
    assert time.monotonic() - begun < 1
    assert isinstance(caught[0], TransportAborted)
    assert not [t for t in threading.enumerate() if t.name == "transport-fetch"]


def test_withdraw_cuts_off_a_reader_that_takes_nothing(
    make_transport: Make, make_proxy: Callable[..., Any], wait_until: Callable[..., None]
) -> None:
    """A trainer must never wait for a joiner that hangs."""
    state = make_state(1, 64)
    source, joiner = make_transport(drain_s=0.2), make_transport(stall_s=30)
    source.publish("v", state)
    proxy = make_proxy(source.address, stall(2_000_000))
    caught: list[BaseException] = []

    def fetch() -> None:
        try:
            joiner.fetch([proxy.address], "v", {}, deadline_s=20)
        except TransportError as error:
            caught.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    wait_until(lambda: proxy.bytes_sent > 1_000_000, "the transfer is under way")
    begun = time.monotonic()
    source.withdraw()
    assert time.monotonic() - begun < 1
    joiner.abort()
    thread.join(10)
    assert caught


def test_withdraw_that_keeps_nothing_is_an_error_that_says_so(
    make_transport: Make, make_proxy: Callable[..., Any]
) -> None:
    state = make_state(1, 64)
    source, joiner = make_transport(chunk_bytes=MB, drain_s=0, linger_s=0), make_transport(streams=1)
    source.publish("v", state)

    def progress(report: Progress) -> None:
        if report.bytes_done > 0:
            source.withdraw()

    slow = make_proxy(source.address, lambda proxy, before, data: proxy.stop.wait(0.001) or data)
    with pytest.raises(SourceError, match=r"withdrawn|nothing"):
        joiner.fetch([slow.address], "v", {}, deadline_s=20, progress=progress)
