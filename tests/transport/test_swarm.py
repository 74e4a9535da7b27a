"""Joiners serve each other what they have verified, so that many cost the sources about what one does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from transport import HTTPTransport, Progress, TransportError
from transport.swarm import MAX_SWARM, Peer, Swarm, neighbours

Make = Callable[..., HTTPTransport]
Wait = Callable[..., None]
KB = 1 << 10


def mask(count: int, *ranges: tuple[int, int]) -> Any:
    result = np.zeros(count, np.bool_)
    for low, high in ranges:
        result[low:high] = True
    return result


def peers(*turns: int, have: Any = None) -> list[Peer]:
    return [Peer(turn, mask(40) if have is None else have, news_at=0.0, good=True) for turn in turns]


def wanted(swarm: Swarm, others: list[Peer], now: float = 0.0, chunk_s: float = 0.01) -> list[int]:
    return np.flatnonzero(swarm.wanted(others, mask(40, (0, 40)), now, chunk_s)).tolist()


def test_each_joiner_asks_the_sources_for_its_own_part() -> None:
    parts = [wanted(Swarm(40, 4, turn, 0.0), peers(*({0, 1, 2, 3} - {turn}))) for turn in range(4)]
    assert sorted(chunk for part in parts for chunk in part) == list(range(40))
    assert parts[2] == list(range(20, 30))
    assert Swarm(40, 4, 2, 0.0).first == 20


def test_the_part_of_a_dead_late_or_slow_joiner_is_shared_out_among_the_rest() -> None:
    swarm = Swarm(40, 4, 0, 0.0)
    dead = peers(1, 2, 3)
    dead[0].good = False
    assert wanted(swarm, dead) == [*range(10), *range(10, 13)]
    others = peers(1, 2, 3, have=mask(40, (20, 40)))
    for peer in others[1:]:
        peer.news_at = 5.0
    assert wanted(swarm, others, now=5.0) == [*range(10), *range(10, 13)], "no news of 1"
    slow = peers(1, 2, 3, have=mask(40, (10, 12)))
    for peer in slow:
        peer.news_at = 60.0
    slow[1].have = slow[2].have = mask(40, (20, 40))
    assert wanted(swarm, slow, now=60.0) == [*range(10), 12]


def test_what_another_joiner_has_comes_from_there_unless_that_is_slow() -> None:
    swarm = Swarm(40, 2, 0, 0.0)
    (other,) = peers(1, have=mask(40, (0, 5), (20, 40)))
    assert wanted(swarm, [other]) == list(range(5, 20))
    other.chunk_s = 1.0
    assert wanted(swarm, [other]) == list(range(40))


def test_large_swarms_are_cut_and_strangers_stay_alone() -> None:
    everyone = [f"j{i}" for i in range(40)]
    assert neighbours(everyone, "j17") == (everyone[16:32], 1)
    assert len(neighbours(everyone, "j0")[0]) == MAX_SWARM
    assert neighbours(everyone, "x") == (["x"], 0)


class Joiner:
    """One that fetches in a thread."""

    def __init__(self, transport: HTTPTransport, like: dict[str, torch.Tensor]) -> None:
        self.transport = transport
        self.into = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        self.error: BaseException | None = None
        self.done = 0
        self.thread = threading.Thread(target=lambda: None)

    def start(self, sources: list[str], joiners: list[str]) -> None:
        def progress(report: Progress) -> None:
            self.done = report.bytes_done

        def fetch() -> None:
            try:
                self.transport.fetch(
                    sources, "v", self.into, deadline_s=60, joiners=joiners, progress=progress
                )
            except TransportError as error:
                self.error = error

        self.thread = threading.Thread(target=fetch)
        self.thread.start()

    def finish(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive()


def new_state(chunks: int) -> dict[str, torch.Tensor]:
    return {f"p{i}": torch.randint(0, 256, (chunks * 256 * KB // 4,), dtype=torch.uint8) for i in range(4)}


def forward(proxy: Any, before: int, data: bytes) -> bytes:
    return data


def paced(proxy: Any, before: int, data: bytes) -> bytes:
    """About 15 MB/s and connection, so that the source is what limits."""
    proxy.stop.wait(0.004)
    return data


@pytest.mark.parametrize("pace", [forward, paced], ids=["fast", "slow"])
def test_four_joiners_cost_the_source_little_more_than_one(
    make_transport: Make, make_proxy: Callable[..., Any], pace: Callable[..., bytes]
) -> None:
    state = new_state(128)
    source = make_transport(chunk_bytes=256 * KB)
    source.publish("v", state)
    proxy = make_proxy(source.address, pace)
    joiners = [Joiner(make_transport(), state) for _ in range(4)]
    addresses = [joiner.transport.address for joiner in joiners]
    for joiner in joiners:
        joiner.start([proxy.address], addresses)
    for joiner in joiners:
        joiner.finish()
        assert joiner.error is None
        assert all(torch.equal(joiner.into[name], state[name]) for name in state)
    assert proxy.bytes_sent <= 1.3 * 128 * 256 * KB


def test_a_joiner_that_dies_while_it_serves_is_replaced(
    make_transport: Make, make_proxy: Callable[..., Any], wait_until: Wait
) -> None:
    state = new_state(128)
    source = make_transport(chunk_bytes=256 * KB)
    source.publish("v", state)
    proxy = make_proxy(source.address, paced)
    joiners = [Joiner(make_transport(), state) for _ in range(3)]
    addresses = [joiner.transport.address for joiner in joiners]
    for joiner in joiners:
        joiner.start([proxy.address], addresses)
    wait_until(lambda: joiners[1].done > 1 << 20, "it has begun")
    joiners[1].transport.close()
    for joiner in joiners:
        joiner.finish()
    assert joiners[1].error is not None
    for joiner in (joiners[0], joiners[2]):
        assert joiner.error is None
        assert all(torch.equal(joiner.into[name], state[name]) for name in state)


def test_joiners_go_on_without_the_source_when_they_hold_all_of_it_together(
    make_transport: Make, make_proxy: Callable[..., Any], wait_until: Wait
) -> None:
    """One has everything; the source is gone when the other has only begun."""
    state = new_state(64)
    source = make_transport(chunk_bytes=256 * KB)
    source.publish("v", state)
    first, second = (Joiner(make_transport(), state) for _ in range(2))
    addresses = [first.transport.address, second.transport.address]
    first.start([source.address], addresses)
    first.finish()
    assert first.error is None
    pace, slow = make_proxy(first.transport.address, paced), make_proxy(source.address, paced)
    second.start([slow.address], [pace.address, second.transport.address])
    wait_until(lambda: second.done > 0, "it has begun")
    source.close()
    slow.close()
    second.finish()
    assert second.error is None
    assert all(torch.equal(second.into[name], state[name]) for name in state)
    assert pace.bytes_sent > 30 * 256 * KB


def test_what_a_joiner_serves_ends_with_withdraw(
    make_transport: Make, make_proxy: Callable[..., Any]
) -> None:
    """After it the tensors may change; who still reads is cut off, and gets nothing wrong."""
    state = new_state(64)
    source = make_transport(chunk_bytes=256 * KB)
    source.publish("v", state)
    first, second = (Joiner(make_transport(drain_s=0.1), state) for _ in range(2))
    addresses = [first.transport.address, second.transport.address]
    first.start([source.address], addresses)
    first.finish()
    slow = make_proxy(first.transport.address, paced)
    second.start([source.address], [slow.address, second.transport.address])
    while not slow.bytes_sent and second.thread.is_alive():
        time.sleep(0.001)
    begun = time.monotonic()
    first.transport.withdraw()
    assert time.monotonic() - begun < 5
    for tensor in first.into.values():
        tensor.zero_()
    second.finish()
    assert second.error is None
    assert all(torch.equal(second.into[name], state[name]) for name in state)


def test_a_joiner_that_sends_wrong_bytes_is_found_out(
    make_transport: Make, make_proxy: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    state = new_state(64)
    source = make_transport(chunk_bytes=256 * KB)
    source.publish("v", state)
    first, second = (Joiner(make_transport(), state) for _ in range(2))
    first.start([source.address], [first.transport.address, second.transport.address])
    first.finish()

    def lie(proxy: Any, before: int, data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if before > 5000 else data

    liar = make_proxy(first.transport.address, lie)
    second.start([source.address], [liar.address, second.transport.address])
    second.finish()
    assert second.error is None
    assert all(torch.equal(second.into[name], state[name]) for name in state)
    assert f"from {liar.address} have a wrong checksum" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_joiners_on_a_device_do_not_wait_for_each_other(make_transport: Make) -> None:
    state = new_state(64)
    source = make_transport(chunk_bytes=256 * KB)
    source.publish("v", state)
    joiner, other = make_transport(), make_transport()
    into = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in state.items()}
    begun = time.monotonic()
    joiner.fetch([source.address], "v", into, deadline_s=30, joiners=[joiner.address, other.address])
    assert time.monotonic() - begun < 1
    assert all(torch.equal(into[name].cpu(), state[name]) for name in state)


def test_joiners_with_little_to_fetch_or_no_others_do_not_serve(make_transport: Make) -> None:
    source, joiner = make_transport(), make_transport()
    source.publish("v", {"a": torch.ones(3)})
    joiner.fetch([source.address], "v", {}, deadline_s=10, joiners=[joiner.address, "http://127.0.0.1:9"])
    assert joiner._board.shares.wait("v", 0) is None
