"""A state that is sharded over some ranks is fetched by another number of them, each its part alone."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.transport import shard_process
from transport import HTTPTransport, SourceError, StateMismatch
from transport.boxes import Box, cover, pieces

Make = Callable[..., HTTPTransport]
MB = 1 << 20


class Ranks:
    """A group of ranks in processes, and what they say."""

    def __init__(self, target: Callable[..., None], size: int, store: Path, *, trainer: bool = False) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.transport.shard_process"])
        ends = [context.Pipe() for _ in range(size)]
        self.pipes = [ours for ours, _ in ends]
        self.processes = [
            context.Process(target=target, args=(rank, size, str(store), trainer, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()

    def hear(self) -> list[Any]:
        for pipe in self.pipes:
            assert pipe.poll(60), "a rank says nothing"
        return [pipe.recv() for pipe in self.pipes]

    def tell(self, what: object) -> None:
        for pipe in self.pipes:
            pipe.send(what)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def begin(target: Callable[..., None], size: int, **settings: Any) -> Ranks:
        made.append(Ranks(target, size, tmp_path / f"store{len(made)}", **settings))
        return made[-1]

    yield begin
    for ranks in made:
        ranks.close()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[str]]]:
    """Two shards, each at one source."""
    ranks = Ranks(shard_process.source, 2, tmp_path_factory.mktemp("group") / "store")
    try:
        yield [[address] for address in ranks.hear()]
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("there", "here", "trainer"),
    [(2, 4, False), (4, 2, True)],
    ids=["dtensors on more ranks", "fsdp2 on fewer ranks"],
)
def test_each_rank_fetches_only_its_part(
    start: Callable[..., Ranks], there: int, here: int, trainer: bool
) -> None:
    sources = start(shard_process.source, there, trainer=trainer)
    joiners = start(shard_process.joiner, here, trainer=trainer)
    joiners.hear()
    joiners.tell([[address] for address in sources.hear()])
    for answer in joiners.hear():
        assert answer["differences"] == []
        assert answer["in_place"]
        assert answer["received"] == answer["needed"]
        assert answer["step"] == (None if trainer else 7)


def whole(fill: float = 0.0) -> dict[str, Any]:
    """A state without DTensors to receive into, of the kind that the shards make up."""
    state: dict[str, Any] = shard_process.whole_tensors(fill)
    state["everywhere"] = torch.zeros(1003, 200)
    state["tied"] = state["first"]
    state["plain"] = torch.zeros(3, 7)
    state["many"] = [torch.zeros(8) for _ in range(400)]
    return {**state, "step": 0}


def check(got: Any) -> None:
    for name, tensor in shard_process.whole_tensors().items():
        assert torch.equal(got[name], tensor), name
    assert torch.equal(got["everywhere"], got["second"].t())
    assert got["tied"] is got["first"]
    assert torch.equal(got["plain"], got["short"])
    assert all(torch.equal(tensor, torch.full((8,), float(i))) for i, tensor in enumerate(got["many"]))
    assert got["step"] == 7


def test_shards_are_put_together_into_whole_tensors(make_transport: Make, shards: list[list[str]]) -> None:
    check(make_transport().fetch_shards(shards, "v", whole(), deadline_s=60))


def test_a_flipped_bit_in_a_box_is_fetched_again(
    make_transport: Make,
    make_proxy: Callable[..., Any],
    shards: list[list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    flips = iter([1])

    def once(proxy: Any, before: int, data: bytes) -> bytes:
        if before > 300_000 and next(flips, None) is not None:
            return data[:-1] + bytes([data[-1] ^ 4])
        return data

    proxy = make_proxy(shards[1][0], once)
    check(make_transport().fetch_shards([shards[0], [proxy.address]], "v", whole(), deadline_s=60))
    assert "wrong checksum" in caplog.text


def test_a_source_that_breaks_off_loses_its_part_to_another_of_the_same_shard(
    make_transport: Make, make_proxy: Callable[..., Any], shards: list[list[str]]
) -> None:
    broken = make_proxy(shards[1][0], lambda proxy, before, data: data if proxy.bytes_sent < 2 * MB else None)
    whole_one = make_proxy(shards[1][0], lambda proxy, before, data: data)
    sources = [shards[0], [broken.address, whole_one.address]]
    check(make_transport().fetch_shards(sources, "v", whole(), deadline_s=60))
    assert whole_one.bytes_sent > MB


def test_a_shard_without_a_source_is_an_error_that_names_it(
    make_transport: Make, shards: list[list[str]]
) -> None:
    gone = make_transport()
    gone.close()
    with pytest.raises(SourceError, match=f"{gone.address}: cannot connect"):
        make_transport().fetch_shards([shards[0], [gone.address]], "v", whole(), deadline_s=60)


def test_what_the_shards_do_not_hold_or_what_does_not_fit_is_refused(
    make_transport: Make, shards: list[list[str]]
) -> None:
    joiner = make_transport()
    with pytest.raises(StateMismatch, match="first: the shards together do not hold all of it"):
        joiner.fetch_shards(shards[:1], "v", whole(), deadline_s=60)
    wrong = whole()
    wrong["bias"] = torch.zeros(999)
    with pytest.raises(StateMismatch, match="bias"):
        joiner.fetch_shards(shards, "v", wrong, deadline_s=60)
    assert not any(tensor.any() for tensor in shard_process.tensors(wrong))
    with pytest.raises(StateMismatch, match="create it here before fetching"):
        joiner.fetch_shards(shards, "v", {}, deadline_s=60)


def test_boxes_are_covered_by_disjoint_ones_and_equal_ones_share_the_work() -> None:
    left, right = Box((0, 0), (4, 3)), Box((0, 3), (4, 5))
    wanted = Box((1, 1), (2, 4))
    assert cover(wanted, [left, right], 0) == [(0, Box((1, 1), (2, 2))), (1, Box((1, 3), (2, 2)))]
    assert cover(wanted, [left], 0) is None
    assert cover(wanted, [left, Box((0, 2), (4, 6))], 0) is None
    assert cover(left, [left, left, left], 2) == [(2, left)]
    assert cover(Box((), ()), [Box((), ())], 5) == [(0, Box((), ()))]


def test_boxes_are_cut_into_small_ones() -> None:
    box = Box((2, 3, 4), (3, 5, 7))
    parts = list(pieces(box, 10))
    assert all(part.size <= 10 for part in parts)
    assert sum(part.size for part in parts) == box.size
    assert list(pieces(Box((2,), (6,)), 4)) == [Box((2,), (4,)), Box((6,), (2,))]
