"""Each sample is trained on once, whatever membership and votes do."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkit.algorithms.cursor import Cursor
from ftkit.algorithms.stream import Place, Stream
from ftkit.errors import ConfigError, JobMismatch

from .scripted import ScriptedManager, World

LENGTH = 13


class Replica:
    def __init__(self, world: World, batch_size: int) -> None:
        self.manager = ScriptedManager(world)
        self.stream = Stream(LENGTH, seed=3, epochs=2)
        self.cursor = Cursor(self.manager, self.stream, batch_size=batch_size)


@settings(max_examples=200, deadline=None)
@given(batch_size=st.integers(1, 5), data=st.data())
def test_each_sample_counts_once_through_any_sequence_of_faults(batch_size: int, data: st.DataObject) -> None:
    """Joins, deaths, failed votes, salvaged steps, accumulation, in any order."""
    world = World()
    live = [Replica(world, batch_size) for _ in range(data.draw(st.integers(1, 3)))]
    world.form([r.manager for r in live])
    trained: Counter[int] = Counter()
    for _ in range(400):
        event = data.draw(st.sampled_from(["commit", "commit", "abort", "death", "salvage", "doubt", "join"]))
        dying = data.draw(st.sampled_from(live)) if len(live) > 1 else None
        when = data.draw(st.integers(0, 2))
        for r in live:
            if not r.cursor.finished:
                r.manager.start_step()
        for k in range(data.draw(st.integers(1, 2))):
            if event == "salvage" and dying is not None and k == when:
                world.lose(dying.manager)
                live = [r for r in live if r is not dying]
            draws = [r.cursor.draw() for r in live]
            assert len({d is None for d in draws}) == 1, "all replicas end together"
        if not live[0].cursor.draws or live[0].cursor.finished:
            break
        drawn = [[i for d in r.cursor.draws for i in r.stream.indices(d.mine)] for r in live]
        weights = [r.manager.weight for r in live]
        assert weights == [None] * len(live) or weights == [len(d) for d in drawn]
        if weights == [None] * len(live):
            assert len({len(d) for d in drawn}) == 1, "unequal shares must be weighted"
        if event == "salvage" and dying is not None and dying in live:
            world.lose(dying.manager)
            drawn.pop(live.index(dying))
            live.remove(dying)
        if event in ("abort", "death"):
            for r in live:
                r.manager.abort()
            if event == "death" and dying is not None:
                live.remove(dying)
        else:
            trained.update(i for d in drawn for i in d)
            for r in live:
                if event == "doubt" and r is dying:
                    r.manager.abort()
                else:
                    r.manager.commit()
            if event == "doubt" and dying is not None:
                # Another one dies, and in the epoch without it the step turns out to be committed.
                gone = data.draw(st.sampled_from(live))
                live = [r for r in live if r is not gone or r is dying]
                world.form([r.manager for r in live])
                dying.manager.commit()
            if event == "join" and len(live) < 4:
                live.append(Replica(world, batch_size))
        live.sort(key=lambda r: r.manager.replica_id)
        assert len({r.cursor.place for r in live if r.manager.step}) <= 1, "the place is replicated state"
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
    return [[p for start, stop in d.mine for p in range(start, stop)] for d in draws if d is not None]


def test_a_commit_in_doubt_that_turns_out_passed_moves_the_cursor() -> None:
    """A member whose vote failed may learn later that the step was committed and apply it itself."""
    world, cursors = two()
    assert taken(cursors) == [[0, 1], [2, 3]]
    world.members[0].commit()
    world.members[1].abort()
    world.members[1].commit()
    assert [c.place.position for c in cursors] == [4, 4]
    assert taken(cursors) == [[4, 5], [6, 7]]


def test_a_step_without_a_draw_moves_nothing() -> None:
    world, cursors = two()
    taken(cursors)
    for _ in range(2):
        for m in world.members:
            m.commit()
    assert [c.place.position for c in cursors] == [4, 4]


def test_the_samples_of_a_member_that_died_in_the_step_come_first_in_the_next() -> None:
    """The survivors commit the step without it; what it had been given is still to be done."""
    world, cursors = two()
    taken(cursors)
    world.lose(world.members[0])
    world.members[0].commit()
    assert cursors[1].place == Place(4, ((0, 2),))
    assert cursors[1].place.num_trained == 2
    assert taken(cursors[1:]) == [[0, 1]]
    joined = Cursor(ScriptedManager(world), Stream(10, shuffle=False), batch_size=2)
    joined.load_state_dict(cursors[1].state_dict())
    assert joined.place == cursors[1].place


def test_a_member_that_leaves_in_mid_step_does_not_move_the_shares_of_later_draws() -> None:
    """Some replicas draw before they hear of the death, some after; their shares must not overlap."""
    world, cursors = two()
    for m in world.members:
        m.start_step()
    survivor = world.members[1]
    world.lose(world.members[0])
    assert taken(cursors[1:]) == [[2, 3]]
    survivor.commit()
    assert cursors[1].place == Place(4, ((0, 2),))


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
    assert [d.mine for d in draws if d] == [((0, 1),), ((1, 2),), ()]
    assert [d.loaded for d in draws if d] == [((0, 1),), ((1, 2),), ((0, 1),)]
    assert [m.weight for m in world.members] == [1.0, 1.0, 0.0]


def test_a_last_batch_whose_only_owner_has_died_is_split_anew() -> None:
    """The survivors have no weight between them: that fails the step, not their processes."""
    world = World(2)
    cursors = [Cursor(m, Stream(1, epochs=1), batch_size=4) for m in world.members]
    owner, survivor = world.members
    for m in world.members:
        m.start_step()
    world.lose(owner)
    survivor.no_weight = True
    drawn = cursors[1].draw()
    assert drawn is not None
    assert drawn.mine == ()
    assert len(survivor.errors) == 1
    survivor.abort()
    survivor.no_weight = False
    world.form([survivor])
    assert taken(cursors[1:]) == [[0]]


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
    b.load_state_dict({**a.state_dict(), "position": 7, "holes": [[2, 4]], "batch_size": 3})
    assert b.place == Place(7, ((2, 4),))


def test_impossible_settings_are_refused() -> None:
    world = World(1)
    with pytest.raises(ConfigError, match="batch_size"):
        Cursor(world.members[0], Stream(4), batch_size=0)
    with pytest.raises(ConfigError, match="group rank 2"):
        Cursor(world.members[0], Stream(4), batch_size=1, group_rank=2, group_world_size=2)
