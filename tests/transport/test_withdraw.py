"""After `withdraw` the tensors may change, and those who were fetching get what they were promised."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tests.transport.proxy import Proxy
from transport import HTTPTransport, Progress, SourceError, TransportError, encode
from transport.slots import Slot, Slots
from transport.visits import Visits, dump

Make = Callable[..., HTTPTransport]
MB = 1 << 20


def make_state(megabytes: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(megabytes)
    return {
        f"p{i}": torch.randint(0, 256, (megabytes << 18,), dtype=torch.uint8, generator=generator)
        for i in range(4)
    }


def copies(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.fixture
def slow(make_proxy: Callable[..., Proxy]) -> Callable[[HTTPTransport], str]:
    """Put a thin pipe before a source."""

    def put(source: HTTPTransport) -> str:
        return make_proxy(source.address, lambda proxy, before, data: proxy.stop.wait(0.001) or data).address

    return put


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send as between machines, where a copy's pages go out without being copied again."""
    monkeypatch.setattr("transport.wire.is_local", lambda sock: False)


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_slow_joiner_gets_the_rest_although_training_goes_on(
    make_transport: Make, slow: Callable[[HTTPTransport], str], assert_same: Any, snapshot: bool
) -> None:
    """Nobody waits for it: `withdraw` takes as long as a copy does."""
    state = make_state(48)
    right, into = copies(state), {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    source, joiner = make_transport(chunk_bytes=MB), make_transport(streams=2)
    source.publish("v", state, snapshot=snapshot)
    at: list[int] = []
    took = 0.0

    def progress(report: Progress) -> None:
        nonlocal took
        if report.bytes_done > 0 and not at:
            at.append(report.bytes_done)
            begun = time.monotonic()
            source.withdraw()
            took = time.monotonic() - begun
            for tensor in state.values():
                tensor.zero_()
            source.publish("w", {"other": torch.ones(5)})

    begun = time.monotonic()
    joiner.fetch([slow(source)], "v", into, deadline_s=60, progress=progress)
    assert_same(into, right)
    assert at[0] < 40 * MB
    assert took < (time.monotonic() - begun) / 2
    other: Any = make_transport().fetch([source.address], "w", {}, deadline_s=10)
    assert torch.equal(other["other"], torch.ones(5))


def test_what_nobody_is_owed_is_not_copied(make_transport: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that is over is owed nothing, whatever it said last."""
    made: list[Slot] = []
    monkeypatch.setattr("transport.publication.Slot", lambda size: made.append(Slot(size)) or made[-1])
    source, state = make_transport(), make_state(16)
    source.publish("v", state)
    source.withdraw()
    source.publish("v", state)
    make_transport().fetch([source.address], "v", {}, deadline_s=10)
    source.withdraw()
    assert not made


def test_the_copy_is_freed_when_the_joiner_is_gone(
    make_transport: Make, slow: Callable[[HTTPTransport], str], wait_until: Callable[..., None]
) -> None:
    state = make_state(32)
    source, joiner = make_transport(chunk_bytes=MB), make_transport(streams=1)
    source.publish("v", state)

    def progress(report: Progress) -> None:
        if report.bytes_done > 0 and source._board.current is not None:
            source.withdraw()
            assert num_memfds()
            joiner.abort()

    with pytest.raises(Exception, match="aborted"):
        joiner.fetch([slow(source)], "v", {}, deadline_s=60, progress=progress)
    wait_until(lambda: num_memfds() == 0, "the copy was freed")


def num_memfds() -> int:
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            names.append(os.readlink(fd))
        except FileNotFoundError:
            continue
    return sum("memfd:transport" in name for name in names)


def test_strangers_to_a_withdrawn_state_do_not_get_it(
    make_transport: Make, slow: Callable[[HTTPTransport], str]
) -> None:
    """Only some of its bytes are there."""
    source, joiner = make_transport(chunk_bytes=MB), make_transport(streams=1)
    source.publish("v", make_state(32))
    errors: list[Exception] = []

    def progress(report: Progress) -> None:
        if report.bytes_done > 0 and not errors:
            source.withdraw()
            source.publish("w", {})
            with pytest.raises(SourceError) as caught:
                make_transport().fetch([source.address], "v", {}, deadline_s=5)
            errors.append(caught.value)

    joiner.fetch([slow(source)], "v", {}, deadline_s=60, progress=progress)
    assert len(errors) == 1


def test_an_answer_to_any_client_is_ended_from_the_copy(make_transport: Make) -> None:
    """curl names no fetch; it is owed the rest of what it is being sent."""
    source, state = make_transport(), make_state(48)
    right = encode(state, version="v").tobytes()
    source.publish("v", state)
    url = urlsplit(source.address)
    with socket.create_connection((url.hostname, url.port), 10) as sock:
        sock.sendall(b"GET /v1/v/state.safetensors HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n")
        received = sock.recv(1000)
        source.withdraw()
        for tensor in state.values():
            tensor.zero_()
        while received.find(b"\r\n\r\n") < 0 or len(received) - received.find(b"\r\n\r\n") - 4 < len(right):
            received += (piece := sock.recv(1 << 20))
            assert piece
    assert received.partition(b"\r\n\r\n")[2] == right


@pytest.mark.parametrize("local", [False, True])
def test_a_snapshot_is_what_was_published(
    make_transport: Make, assert_same: Any, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    monkeypatch.setattr("transport.wire.is_local", lambda sock: local)
    source, state = make_transport(chunk_bytes=MB), make_state(9)
    for version in ("1", "2", "3"):
        state["p0"].fill_(int(version))
        right = copies(state)
        source.publish(version, state, snapshot=True)
        state["p0"].fill_(77)
        assert_same(make_transport().fetch([source.address], version, {}, deadline_s=10), right)
    assert num_memfds() <= 4  # two slots, each with a descriptor for its mapping


@pytest.fixture
def slots() -> Iterator[Slots]:
    pool = Slots()
    yield pool
    pool.close()


def test_a_slot_is_not_written_to_while_somebody_reads_it(slots: Slots) -> None:
    first = slots.take(5000)
    first.write(0, [memoryview(bytearray(b"x" * 5000))])
    first.hold()  # a connection
    first.release()  # its publication
    second = slots.take(5000)
    assert second is not first
    first.release()
    assert slots.take(5000) is first
    assert slots.take(5000) not in (first, second)


def test_a_slot_is_thrown_away_if_its_pages_may_still_be_under_way(slots: Slots) -> None:
    slot = slots.take(5000)
    slot.spoilt = True
    slot.release()
    assert slot.fd == -1
    assert slots.take(5000) is not slot


def test_who_is_handed_a_slot_cannot_change_it() -> None:
    slot = Slot(5000)
    slot.write(0, [memoryview(bytearray(b"x" * 5000))])
    slot.seal()
    for change in (
        lambda: os.pwrite(slot.fd, b"x", 0),
        lambda: os.ftruncate(slot.fd, 10),
        lambda: os.ftruncate(slot.fd, 10_000),
    ):
        with pytest.raises(PermissionError):
            change()
    slot.write(4999, [memoryview(bytearray(b"y"))])
    assert os.pread(slot.fd, 2, 4998) == b"xy"
    slot.close()


class Visitor:
    def __init__(self) -> None:
        self.span = (0, 0)
        self.is_gone = self.was_cut = False

    def gone(self) -> bool:
        return self.is_gone

    def cut(self) -> None:
        self.was_cut = True


def test_what_is_owed_is_what_no_connected_fetch_has_said_it_has() -> None:
    visits = Visits(10, 100)
    a, b, curl = Visitor(), Visitor(), Visitor()
    assert not visits.owed().any()
    visits.see(a, "f", "")
    assert visits.owed().all()  # nothing is known of it yet
    have = ~visits.owed()
    have[:7] = True
    visits.see(b, "f", dump(have))
    visits.see(a, "f", "")
    assert visits.owed().tolist() == [False] * 7 + [True] * 3
    visits.see(curl, "", "")
    curl.span = (150, 301)
    assert visits.owed().tolist() == [False, True, True, True] + [False] * 3 + [True] * 3
    a.is_gone = True
    visits.leave(b)
    assert visits.owed().tolist() == [False, True, True, True] + [False] * 6
    assert visits.knows("f")
    assert not visits.knows("")


@pytest.mark.parametrize("have", ["x", "AAAA" * 9, "\u00ff", "===="])
def test_a_fetch_that_talks_nonsense_is_owed_everything(have: str) -> None:
    visits = Visits(10, 100)
    visits.see(Visitor(), "f", have)
    assert visits.owed().all()


@pytest.mark.parametrize("same_host", [False, True])
def test_no_moment_of_withdrawal_mixes_two_states(make_transport: Make, same_host: bool) -> None:
    """Whatever a joiner gets is what was published; and what it has begun to get, it gets."""
    # Tensors so small that torch needs no second thread for them, which on a busy machine comes late.
    state = {f"p{i}": torch.zeros(1 << 15, dtype=torch.int32) for i in range(32)}
    source = make_transport(chunk_bytes=MB // 4, same_host=same_host)
    joiner = make_transport(same_host=same_host, streams=3)
    into, rng, pause = copies(state), random.Random(1), threading.Event()
    for number in range(1, 13):
        for tensor in state.values():
            tensor.fill_(number)
        source.publish(f"{number}", state, snapshot=(snapshot := rng.random() < 0.3))
        if snapshot:
            for tensor in state.values():
                tensor.fill_(-1)
        seen, errors = threading.Event(), list[TransportError]()

        def join(number: int = number, seen: threading.Event = seen, errors: Any = errors) -> None:
            limit_s = 20.0 if number % 2 else 0.3  # one that comes too late waits in vain
            try:
                joiner.fetch(
                    [source.address], f"{number}", into, deadline_s=limit_s, progress=lambda _: seen.set()
                )
            except TransportError as error:
                errors.append(error)

        thread = threading.Thread(target=join)
        thread.start()
        if number % 2:
            assert seen.wait(20)
        pause.wait(rng.random() * 0.01)
        source.withdraw()
        for tensor in state.values():
            tensor.fill_(-1)
        thread.join()
        assert not (errors and number % 2)
        assert errors or all(bool((tensor == number).all()) for tensor in into.values())
