"""Members that heal at the same time hand on what they have; what a heal brought before it failed is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from ftkit.core.model import FRESH, Epoch, Record, Seat, Version
from ftkit.core.vote import Lineage
from ftkit.runtime.healing import Healer
from ftkit.runtime.links import Links
from ftkit.runtime.state import StateRegistry
from tests.transport.proxy import Proxy
from transport import HTTPTransport, SourceError

MB = 1 << 20
SIZE = 24 * MB


class Member:
    """A member's state and transport; its way to the others counts what it sends."""

    def __init__(self, name: str, version: Version, limit: int = 1 << 40) -> None:
        self.name, self.lineage = name, Lineage(version)
        self.weights = torch.zeros(SIZE // 4)
        if version != FRESH:
            self.weights = torch.arange(SIZE // 4, dtype=torch.float32)
        self.transport = HTTPTransport(token="secret", chunk_bytes=MB, same_host=False)
        self.proxy = Proxy(
            self.transport.address, lambda proxy, before, data: data if proxy.bytes_sent < limit else None
        )
        state = StateRegistry()
        state.register("weights", lambda loaded: None, lambda: self.weights)
        # Which group agrees that all are done does not matter here.
        self.healer = Healer(self.transport, state, cast(Links, None), group_rank=0, timeout_s=30)

    def prepare(self, epoch: Epoch, members: list[Member]) -> None:
        records = {m.name: record(m, own=m is self) for m in members}
        plan = self.lineage.enter(epoch, self.name)
        self.healer.prepare(plan, records, self.lineage, lambda: False)

    def close(self) -> None:
        self.healer.end()
        self.proxy.close()
        self.transport.close()


def record(member: Member, *, own: bool) -> Record:
    address = member.transport.address if own else member.proxy.address
    return Record(replica_id=member.name, incarnation="i", transports=(address,))


def heal(members: list[Member], number: int) -> None:
    epoch = Epoch(id=number, seats=tuple(Seat(m.name, "i", m.lineage.version) for m in members))
    threads = [threading.Thread(target=m.prepare, args=(epoch, members)) for m in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


@pytest.fixture
def make() -> Iterator[Callable[..., Member]]:
    members: list[Member] = []

    def new(*args: Any) -> Member:
        members.append(Member(*args))
        return members[-1]

    yield new
    for member in members:
        member.close()


def test_four_that_heal_cost_the_source_little_more_than_one(make: Callable[..., Member]) -> None:
    source = make("a", Version(3, 7))
    healing = [make(name, FRESH) for name in "bcde"]
    heal([source, *healing], 4)
    assert all(torch.equal(member.weights, source.weights) for member in healing)
    assert all(member.lineage.version == Version(3, 7) for member in healing)
    assert source.proxy.bytes_sent <= 1.3 * SIZE
    assert sum(member.proxy.bytes_sent for member in healing) > 2 * SIZE


def test_a_heal_that_failed_is_taken_up_where_it_was(make: Callable[..., Member]) -> None:
    dying, other = make("a", Version(3, 7), SIZE // 2), make("b", Version(3, 7))
    joiner = make("c", FRESH)
    heal([dying, joiner], 4)
    assert isinstance(joiner.healer._failure, SourceError)
    heal([other, joiner], 5)
    assert torch.equal(joiner.weights, other.weights)
    assert dying.proxy.bytes_sent + other.proxy.bytes_sent < 1.2 * SIZE
