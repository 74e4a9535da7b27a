"""Host buffers on the way to a device. The copies run in a thread here, by the code that a device uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.transport.proxy import Proxy
from tests.transport.test_pg import Job
from transport import HTTPTransport, TransportAborted, decode, encode
from transport.manifest import Manifest
from transport.place import Plan
from transport.staging import RING, Copy, Ring, ThreadCopies

Make = Callable[..., HTTPTransport]
MakeProxy = Callable[..., Proxy]
Same = Callable[[Any, Any], None]
WaitUntil = Callable[..., None]

KB = 1024
CPU = torch.device("cpu")


class Watched(ThreadCopies):
    """Copies that can be held up, or fail, and that are remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.fail = False
        self.num_begun = self.num_done = 0
        self.written: list[bytes] = []

    def begin(self, pairs: Sequence[Copy]) -> Callable[[], object]:
        self.num_begun += 1
        return super().begin(pairs)

    def _copy(self, pairs: Sequence[Copy]) -> None:
        assert self.go.wait(20)
        if self.fail:
            raise RuntimeError("the device is lost")
        super()._copy(pairs)
        self.written += [source.numpy().tobytes() for _, source in pairs]
        self.num_done += 1


@pytest.fixture
def copies() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.go.set()
    made.close()


@pytest.fixture
def plans(copies: Watched, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Let what is received go through a ring, and show each fetch's plan."""
    made: list[Plan] = []

    def plan(manifest: Manifest, into: object) -> Plan:
        made.append(Plan(manifest, into, copies=copies))
        return made[-1]

    monkeypatch.setattr("transport.fetch.Plan", plan)
    monkeypatch.setattr("transport.encoded.Plan", plan)
    return made


def state(fill: float = 1.0) -> dict[str, Any]:
    large = {f"w{i}": torch.arange(500_000 + i, dtype=torch.float32) * fill for i in range(4)}
    tied = torch.full((100, 200), fill)
    return {
        "large": large,
        "small": [torch.full((9,), fill, dtype=torch.float64)] * 3,
        "tied": [tied, tied.t()],
    }


def ring_of(plan: Plan) -> Ring:
    assert plan._ring is not None
    return plan._ring


# the ring


def test_a_few_buffers_are_enough_for_many_chunks(copies: Watched) -> None:
    ring = Ring(8, [CPU], copies, limit=3)
    to = torch.zeros(800, dtype=torch.uint8)
    for chunk in range(100):
        ring.buffer(chunk).fill_(chunk)
        ring.leave(chunk, [(to[8 * chunk : 8 * chunk + 8], 0)])
    ring.flush()
    assert torch.equal(to, torch.arange(100, dtype=torch.uint8).repeat_interleave(8))
    assert ring.num_buffers <= 3


def test_parts_of_one_chunk_share_a_buffer_and_go_to_several_places(copies: Watched) -> None:
    ring = Ring(8, [CPU], copies)
    ring.buffer(5)[:3] = 1
    ring.buffer(5)[3:] = 2
    one, other = torch.zeros(3, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
    ring.leave(5, [(one, 0), (other, 3)])
    ring.flush()
    assert one.tolist() == [1] * 3
    assert other.tolist() == [2] * 5


def test_a_buffer_is_not_received_into_while_it_is_being_copied(
    copies: Watched, wait_until: WaitUntil
) -> None:
    ring = Ring(8, [CPU], copies, limit=2)
    to = torch.zeros(3, 8, dtype=torch.uint8)
    copies.go.clear()
    for chunk in (0, 1):
        ring.buffer(chunk).fill_(chunk + 1)
        ring.leave(chunk, [(to[chunk], 0)])

    def third() -> None:
        ring.buffer(2).fill_(3)
        ring.leave(2, [(to[2], 0)])

    thread = threading.Thread(target=third)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    copies.go.set()
    thread.join(10)
    ring.flush()
    assert to[:, 0].tolist() == [1, 2, 3]
    assert ring.num_buffers == 2


def test_chunks_that_wait_for_the_rest_of_their_bytes_do_not_hold_up_the_stream_that_brings_it(
    copies: Watched,
) -> None:
    ring = Ring(8, [CPU], copies, limit=2)
    kept = [ring.buffer(chunk) for chunk in range(3)]
    assert len({buffer.data_ptr() for buffer in kept}) == 3
    assert ring.buffer(0) is kept[0]


def test_a_copy_that_fails_is_told_to_who_needs_its_buffer_and_to_who_waits_for_all(copies: Watched) -> None:
    ring = Ring(8, [CPU], copies, limit=1)
    copies.fail = True
    ring.buffer(0)
    ring.leave(0, [(torch.zeros(8, dtype=torch.uint8), 0)])
    with pytest.raises(RuntimeError, match="lost"):
        ring.buffer(1)
    with pytest.raises(RuntimeError, match="lost"):
        ring.flush()


# whole fetches


def test_a_state_goes_through_the_ring_in_place_with_little_memory(
    make_transport: Make, assert_same: Same, plans: list[Plan]
) -> None:
    source = make_transport(chunk_bytes=64 * KB)
    source.publish("v", state())
    into = state(0.0)
    got: Any = make_transport(streams=4).fetch([source.address], "v", into, deadline_s=20)
    assert_same(got, state())
    assert got["large"]["w2"] is into["large"]["w2"]
    assert plans[0].manifest.num_chunks > 4 * RING
    assert ring_of(plans[0]).num_buffers <= RING


def test_new_tensors_are_made_through_the_ring_too(
    make_transport: Make, assert_same: Same, plans: list[Plan]
) -> None:
    source = make_transport(chunk_bytes=64 * KB)
    source.publish("v", state())
    assert_same(make_transport().fetch([source.address], "v", None, deadline_s=20), state())
    assert len(plans) == 1


def test_a_file_is_read_through_the_ring_too(assert_same: Same, plans: list[Plan]) -> None:
    into = state(0.0)
    assert_same(decode(encode(state(), chunk_bytes=64 * KB).tobytes(), into), state())
    assert_same(into, {**state(), "small": into["small"]})
    assert ring_of(plans[0]).num_buffers <= RING


def test_a_group_fills_the_ring_as_well(make_transport: Make, assert_same: Same, plans: list[Plan]) -> None:
    job = Job(make_transport, 3)
    try:
        job.publish(state())
        assert_same(job.fetch(state(0.0)), state())
        assert job.bytes_sent == plans[0].manifest.size
    finally:
        job.close()


def test_a_flipped_bit_is_not_even_copied(
    make_transport: Make, make_proxy: MakeProxy, assert_same: Same, plans: list[Plan], copies: Watched
) -> None:
    source = make_transport(chunk_bytes=64 * KB)
    source.publish("v", state())
    flips = iter([300_000])

    def mangle(proxy: Proxy, before: int, data: bytes) -> bytes:
        if before > 200_000 and next(flips, None) is not None:
            return data[:-1] + bytes([data[-1] ^ 4])
        return data

    proxy = make_proxy(source.address, mangle)
    assert_same(make_transport(streams=1).fetch([proxy.address], "v", state(0.0), deadline_s=20), state())
    assert next(flips, None) is None
    assert sum(map(len, copies.written)) == plans[0].manifest.size  # each chunk once


def test_after_an_abort_nobody_writes_into_the_destination_any_more(
    make_transport: Make, plans: list[Plan], copies: Watched, wait_until: WaitUntil
) -> None:
    source, joiner = make_transport(chunk_bytes=64 * KB), make_transport()
    source.publish("v", state())
    errors: list[BaseException] = []
    undone: list[int] = []

    def fetch() -> None:
        try:
            joiner.fetch([source.address], "v", state(0.0), deadline_s=30)
        except TransportAborted as error:
            errors.append(error)
            undone.append(copies.num_begun - copies.num_done)

    copies.go.clear()
    thread = threading.Thread(target=fetch)
    thread.start()
    wait_until(lambda: copies.num_begun >= RING, "all buffers are being copied")
    joiner.abort()
    thread.join(0.2)
    assert thread.is_alive()  # a copy is under way: the tensors are not the caller's yet
    copies.go.set()
    thread.join(10)
    assert len(errors) == 1
    assert undone == [0]


def test_a_device_that_fails_makes_the_fetch_fail(
    make_transport: Make, plans: list[Plan], copies: Watched
) -> None:
    source = make_transport(chunk_bytes=64 * KB)
    source.publish("v", state())
    copies.fail = True
    with pytest.raises(RuntimeError, match="the device is lost"):
        make_transport().fetch([source.address], "v", state(0.0), deadline_s=20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_large_tensor_gets_to_a_device_through_a_few_pinned_buffers(
    make_transport: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Plan] = []

    def plan(manifest: Manifest, into: object) -> Plan:
        made.append(Plan(manifest, into))
        return made[-1]

    monkeypatch.setattr("transport.fetch.Plan", plan)
    source = make_transport(chunk_bytes=256 * KB)
    right = torch.randn(10_000_000)
    source.publish("v", {"w": right.cuda()})
    into = {"w": torch.zeros(10_000_000, device="cuda")}
    make_transport().fetch([source.address], "v", into, deadline_s=30)
    assert torch.equal(into["w"].cpu(), right)
    ring = ring_of(made[0])
    assert ring.num_buffers <= RING
    assert ring.buffer(0).is_pinned()
