"""Each sample is trained on once, whatever membership and votes do."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkit.algorithms.cursor import Cursor
from ftkit.algorithms.stream import Stream
from ftkit.errors import ConfigError, JobMismatch

from .scripted import ScriptedManager, World

LENGTH = 13


class Replica:
    def __init__(self, world: World, batch_size: int) -> None:
        self.manager = ScriptedManager(world)
        self.stream = Stream(LENGTH, seed=3, epochs=2)
        self.cursor = Cursor(self.manager, self.stream, batch_size=batch_size)


@settings(max_examples=150, deadline=None)
@given(batch_size=st.integers(1, 5), data=st.data())
def test_each_sample_counts_once_through_any_sequence_of_faults(batch_size: int, data: st.DataObject) -> None:
    """Joins, deaths, failed votes and accumulation in any order: two data epochs give each sample twice."""
    world = World()
    live = [Replica(world, batch_size) for _ in range(data.draw(st.integers(1, 3)))]
    world.form([r.manager for r in live])
    trained: Counter[int] = Counter()
    for _ in range(400):
        drawn: list[int] = []
        weights: list[float | None] = []
        sizes: list[int] = []
        for _ in range(data.draw(st.integers(1, 2))):
            draws = [r.cursor.draw() for r in live]
            assert len({d is None for d in draws}) == 1, "all replicas end together"
            for r, d in zip(live, draws, strict=True):
                if d is not None:
                    drawn += r.stream.indices(d.positions)
        if not drawn:
            break
        sizes = [sum(len(d.positions) for d in r.cursor.draws) for r in live]
        weights = [r.manager.weight for r in live]
        assert weights == [None] * len(live) or weights == sizes
        if weights == [None] * len(live):
            assert len(set(sizes)) == 1, "unequal shares must be weighted"
        event = data.draw(st.sampled_from(["commit", "commit", "abort", "death", "join", "give up"]))
        if event in ("commit", "join"):
            trained.update(drawn)
            for r in live:
                r.manager.commit()
            if event == "join" and len(live) < 4:
                live.insert(data.draw(st.integers(0, len(live))), Replica(world, batch_size))
                world.form([r.manager for r in live])
        else:
            if event != "give up":
                for r in live:
                    r.manager.abort()
            if event == "death" and len(live) > 1:
                live.pop(data.draw(st.integers(0, len(live) - 1)))
            world.form([r.manager for r in live])
    assert all(r.cursor.finished for r in live)
    assert trained == Counter(dict.fromkeys(range(LENGTH), 2))


def two(batch_size: int = 2, epochs: int | None = None) -> tuple[World, list[Cursor]]:
    world = World(2)
    return world, [
        Cursor(m, Stream(10, shuffle=False, epochs=epochs), batch_size=batch_size) for m in world.members
    ]


def taken(cursors: list[Cursor]) -> list[list[int]]:
    draws = [c.draw() for c in cursors]
    return [list(d.positions) for d in draws if d is not None]


def test_a_commit_in_doubt_that_turns_out_passed_moves_the_cursor() -> None:
    """A member whose vote failed may learn later that the step was committed and apply it itself."""
    world, cursors = two()
    assert taken(cursors) == [[0, 1], [2, 3]]
    world.members[0].commit()
    world.members[1].abort()
    world.members[1].commit()
    assert [c.position for c in cursors] == [4, 4]
    assert taken(cursors) == [[4, 5], [6, 7]]


def test_a_loop_that_tries_the_same_batch_again_does_not_lose_its_place() -> None:
    world, cursors = two()
    taken(cursors)
    for m in world.members:
        m.abort()
    for m in world.members:
        m.commit()
    assert [c.position for c in cursors] == [4, 4]
    for m in world.members:
        m.commit()
    assert [c.position for c in cursors] == [4, 4], "a step without a draw moves nothing"


def test_a_finished_stream_starts_no_step() -> None:
    """The peers may have left: a step started now would wait for them in vain."""
    world, cursors = two(batch_size=5, epochs=1)
    taken(cursors)
    for m in world.members:
        m.commit()
    before = world.members[0].starts
    assert cursors[0].draw() is None
    assert world.members[0].starts == before


def test_a_rank_without_a_sample_gets_a_stand_in_of_no_weight() -> None:
    world = World(3)
    cursors = [Cursor(m, Stream(2, shuffle=False, epochs=1), batch_size=4) for m in world.members]
    draws = [c.draw() for c in cursors]
    assert [len(d.positions) for d in draws if d] == [1, 1, 0]
    assert [list(d.loaded) for d in draws if d] == [[0], [1], [0]]
    assert [m.weight for m in world.members] == [1.0, 1.0, 0.0]


def test_ranks_of_a_group_split_its_batch() -> None:
    world = World(1)
    cursors = [
        Cursor(
            world.members[0],
            Stream(10, shuffle=False, epochs=1),
            batch_size=4,
            group_rank=r,
            group_world_size=3,
            name=f"{r}",
        )
        for r in range(3)
    ]
    assert taken(cursors) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert [c.draws[0].weight for c in cursors] == [10, 10, 10]


def test_the_state_of_another_stream_is_refused() -> None:
    """Positions of one order mean other samples in another."""
    _, (a, b) = two()
    for key, value in (("length", 11), ("seed", 5), ("shuffle", True)):
        with pytest.raises(JobMismatch, match=key):
            b.load_state_dict({**a.state_dict(), key: value})
    with pytest.raises(JobMismatch, match="not a place"):
        b.load_state_dict([1])
    b.load_state_dict({**a.state_dict(), "position": 7, "batch_size": 3})
    assert b.position == 7


def test_impossible_settings_are_refused() -> None:
    world = World(1)
    with pytest.raises(ConfigError, match="batch_size"):
        Cursor(world.members[0], Stream(4), batch_size=0)
    with pytest.raises(ConfigError, match="group rank 2"):
        Cursor(world.members[0], Stream(4), batch_size=1, group_rank=2, group_world_size=2)
