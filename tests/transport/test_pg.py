"""The transport over a gloo group: real groups of several ranks in one process, and what breaks them."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from transport import DistributedTransport, HTTPTransport, TransportTimeout
from transport.encoded import encode
from transport.pg import AHEAD, BUCKET, COPIED, GATHERED, buckets

Make = Callable[..., HTTPTransport]
Same = Callable[[Any, Any], None]
ROOT = Path(__file__).resolve().parents[2]


class Group:
    """A member of a gloo group that counts what it sends, and can go wrong."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.bytes_sent = 0
        self.tags: list[int] = []
        self.most_bytes = 0
        """That were under way at a time."""
        self._under_way: list[weakref.ref[torch.Tensor]] = []
        self.mute = False
        self.flip = False
        self.recv_left = 1 << 30

    def rank(self) -> int:
        return self._inner.rank()

    def size(self) -> int:
        return self._inner.size()

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        if self.mute:
            tag = (1 << 31) - 1 - tag  # nobody waits for that
        if self.flip:
            self.flip = False
            tensors = [tensors[0].clone()]
            tensors[0][5] ^= 1
        self.bytes_sent += tensors[0].numel()
        self.tags.append(tag)
        self._under_way = [each for each in self._under_way if each() is not None]
        self._under_way.append(weakref.ref(tensors[0]))
        now = [tensor.numel() for each in self._under_way if (tensor := each()) is not None]
        self.most_bytes = max(self.most_bytes, sum(now))
        return self._inner.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.recv_left -= 1
        if self.recv_left < 0:
            raise RuntimeError("the group is broken")
        return self._inner.recv(tensors, rank, tag)


def join_group(store: Any, rank: int, count: int, devices: int = 1) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=20)
    options._devices = [gloo.create_device(hostname="127.0.0.1") for _ in range(devices)]
    return gloo(store, rank, count, options)


def make_groups(count: int, store: Any = None, others: int = 0, devices: int = 1) -> list[Group]:
    """Make the first members of a group; `others` more join from elsewhere."""
    store = store or HashStore()
    groups: dict[int, Group] = {}

    def join(rank: int) -> None:
        # A wait holds a TCPStore: each member needs its own connection to it.
        own = TCPStore("127.0.0.1", store.port, is_master=False) if isinstance(store, TCPStore) else store
        groups[rank] = Group(join_group(own, rank, count + others, devices))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[rank] for rank in range(count)]


class Job:
    """Some sources and, last, a joiner."""

    def __init__(
        self,
        make: Make,
        count: int,
        *,
        store: Any = None,
        others: int = 0,
        devices: int = 1,
        **settings: Any,
    ) -> None:
        self.groups = make_groups(count, store, others, devices)
        https = [make(chunk_bytes=1 << 20) for _ in range(count)]
        self.members = [DistributedTransport(http, **{"timeout_s": 10.0, **settings}) for http in https]
        for member, group in zip(self.members, self.groups, strict=True):
            member.configure(group, "epoch 4")  # type: ignore[arg-type]
        self.sources = [member.address for member in self.members[:-1]]

    def publish(self, state: Any) -> None:
        for member in self.members[:-1]:
            member.publish("v", state)

    def fetch(self, into: Any, deadline_s: float = 20.0) -> Any:
        return self.members[-1].fetch(self.sources, "v", into, deadline_s=deadline_s)

    @property
    def bytes_sent(self) -> int:
        return sum(group.bytes_sent for group in self.groups)

    def close(self) -> None:
        for member in self.members:
            member.close()


@pytest.fixture
def job(make_transport: Make) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(count: int, **settings: Any) -> Job:
        jobs.append(Job(make_transport, count, **settings))
        return jobs[-1]

    yield make
    for each in jobs:
        each.close()


def state(fill: float = 1.0) -> dict[str, Any]:
    large = {f"w{i}": torch.arange(400_000 + i, dtype=torch.float32) * fill for i in range(6)}
    small = {f"b{i}": torch.arange(50 + i, dtype=torch.float64) * fill for i in range(40)}
    tied = torch.full((10, 20), fill)
    return {"large": large, "small": small, "tied": [tied, tied.t()], "step": int(fill), "lr": 0.1 * fill}


def size_of(value: Any) -> int:
    return encode(value).size


@pytest.mark.parametrize("num_sources", [1, 2, 3])
def test_all_bytes_come_over_the_group_in_place(
    job: Callable[..., Job], assert_same: Same, num_sources: int
) -> None:
    here = job(num_sources + 1)
    here.publish(state())
    into = state(0.0)
    before = into["large"]["w3"].data_ptr()
    got = here.fetch(into)
    assert_same(got, state())
    assert got["large"]["w3"].data_ptr() == before
    assert here.bytes_sent == size_of(state())
    assert all(group.bytes_sent > 0 for group in here.groups[:-1])


def test_a_group_with_two_devices_is_used_by_both_of_each_source(
    job: Callable[..., Job], assert_same: Same
) -> None:
    """gloo chooses the device by the tag; with every other bucket, a source would use only one of them."""
    here = job(3, devices=2)
    here.publish(state())
    assert_same(here.fetch(state(0.0)), state())
    assert here.bytes_sent == size_of(state())
    for group in here.groups[:-1]:
        assert {tag % 2 for tag in group.tags} == {0, 1}


def test_views_of_one_tensor_are_sent_once(job: Callable[..., Job]) -> None:
    flat = torch.randn(1_000_000)
    here = job(2)
    here.publish([flat[i:] for i in range(0, 1000, 10)])
    got: Any = here.fetch(None)
    assert torch.equal(got[7], flat[70:])
    assert here.bytes_sent <= 4_000_000


def test_one_transport_moves_several_states_one_after_the_other(
    job: Callable[..., Job], assert_same: Same
) -> None:
    here = job(2)
    for fill in (1.0, 2.0, 3.0):
        here.publish(state(fill))
        assert_same(here.fetch(state(0.0)), state(fill))
        here.members[0].withdraw()
    assert here.bytes_sent == 3 * size_of(state())


def test_a_flipped_bit_is_fetched_again_and_never_delivered(
    job: Callable[..., Job], assert_same: Same
) -> None:
    here = job(2)
    here.groups[0].flip = True
    here.publish(state())
    assert_same(here.fetch(state(0.0)), state())


def test_a_group_that_breaks_half_way_is_finished_over_http(
    job: Callable[..., Job], assert_same: Same
) -> None:
    here = job(2, timeout_s=0.5)
    here.groups[1].recv_left = 3
    here.publish(state())
    assert_same(here.fetch(state(0.0)), state())


def test_a_source_that_does_not_send_costs_the_timeout_and_no_more(
    job: Callable[..., Job], assert_same: Same
) -> None:
    """gloo then gives the whole group up; HTTP must bring what all the others owe as well."""
    here = job(3, timeout_s=0.5)
    here.groups[0].mute = True
    here.publish(state())
    assert_same(here.fetch(state(0.0), deadline_s=15), state())


def test_a_source_that_is_killed_half_way_costs_only_what_it_owed(
    job: Callable[..., Job], assert_same: Same
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "tests.transport.pg_source_process", str(store.port), "2", "3"]
    child = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with child:
        try:
            here = job(2, store=store, others=1)
            here.publish(state())
            assert child.stdout is not None
            here.sources.insert(0, child.stdout.readline().strip())
            begun = time.monotonic()
            assert_same(here.fetch(state(0.0)), state())
            assert time.monotonic() - begun < 8  # not the timeout of 10 s: its death is noticed
            assert child.wait(10) == -signal.SIGKILL
        finally:
            child.kill()
    assert here.bytes_sent > 0


def test_a_source_outside_of_the_group_helps_over_http(
    job: Callable[..., Job], make_transport: Make, assert_same: Same
) -> None:
    here = job(3)
    other = make_transport(chunk_bytes=1 << 20)
    here.publish(state())
    other.publish("v", state())
    here.members[1].configure(here.groups[1], "epoch 3")  # type: ignore[arg-type]
    here.sources.append(other.address)
    assert_same(here.fetch(state(0.0)), state())
    assert 0 < here.bytes_sent < size_of(state())
    assert here.groups[1].bytes_sent == 0


def test_without_a_group_all_goes_over_http(job: Callable[..., Job], assert_same: Same) -> None:
    here = job(2)
    here.members[1].configure(None)
    here.publish(state())
    assert_same(here.fetch(state(0.0)), state())
    assert here.bytes_sent == 0


def test_nobody_writes_into_the_destination_after_the_deadline(job: Callable[..., Job]) -> None:
    here = job(2, timeout_s=5.0)
    with pytest.raises(TransportTimeout):
        here.fetch(state(0.0), deadline_s=0.3)
    assert not [thread for thread in threading.enumerate() if thread.name == "transport-fetch"]


def test_small_tensors_take_little_memory_however_many_there_are(
    job: Callable[..., Job], assert_same: Same
) -> None:
    """They are copied to be sent together; without a limit in bytes, the state would be there twice."""
    many = [torch.full((60_000,), float(i)) for i in range(350)]
    here = job(2)
    here.publish(many)
    assert_same(here.fetch([torch.zeros(60_000) for _ in many]), many)
    limit = AHEAD // COPIED + GATHERED
    assert limit / 2 < here.groups[0].most_bytes <= limit < size_of(many) / 2


def test_buckets_tile_the_data_section() -> None:
    big = torch.empty(BUCKET // 4 * 2 + 17)
    manifest = encode([big, *(torch.empty(300_000) for _ in range(9)), torch.empty(3)]).manifest
    cut = buckets(manifest)
    assert cut[0][0] == 0
    assert cut[-1][1] == manifest.size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cut))
    assert all(0 < end - start <= BUCKET for start, end in cut)
    small = encode([torch.empty(200_000) for _ in range(20)]).manifest
    assert all(end - start <= GATHERED for start, end in buckets(small))
