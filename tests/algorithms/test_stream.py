"""The arithmetic of who takes which sample."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.algorithms.stream import Draw, Place, Span, Stream
from ftkit.errors import ConfigError


def flat(spans: Iterable[Span]) -> list[int]:
    return [p for start, stop in spans for p in range(start, stop)]


@st.composite
def places(draw: st.DrawFn) -> Place:
    """A place with up to three holes."""
    edges = sorted(draw(st.sets(st.integers(0, 40), max_size=6)))
    holes = tuple(zip(edges[::2], edges[1::2], strict=False))
    return Place(draw(st.integers(edges[-1] if edges else 0, 60)), holes)


@given(
    place=places(),
    rest=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    replicas=st.integers(1, 6),
    ranks=st.integers(1, 3),
)
def test_the_shares_of_a_batch_are_disjoint_whole_and_nearly_equal(
    place: Place, rest: int, batch_size: int, replicas: int, ranks: int
) -> None:
    """Each sample is taken by exactly one rank, in the stream's last batch too; holes come first."""
    shares, total = replicas * ranks, place.position + rest
    draws = [
        Draw.at(place, batch_size=batch_size, shares=shares, share=i, ranks=ranks, total=total)
        for i in range(shares)
    ]
    to_do = flat(place.holes) + list(range(place.position, total))
    taken = [p for d in draws for p in flat(d.mine)]
    assert taken == to_do[: batch_size * shares]
    counts = [d.num_mine for d in draws]
    assert max(counts) - min(counts) <= 1
    assert max(counts) <= batch_size
    assert len({(d.after, d.short) for d in draws}) == 1
    after = draws[0].after
    assert flat(after.holes) + list(range(after.position, total)) == to_do[batch_size * shares :]
    assert all(len(flat(d.loaded)) == max(1, d.num_mine) for d in draws)
    for r in range(replicas):
        group = draws[r * ranks : (r + 1) * ranks]
        assert flat(draws[0].of_replica(r)) == [p for d in group for p in flat(d.mine)]
        assert {d.weight for d in group} == {sum(d.num_mine for d in group)}
        if group[0].weight and ranks > 1:
            # The mean over ranks of (scale × mean over the rank's samples) is the mean over the samples.
            assert all(d.loss_scale / ranks == pytest.approx(d.num_mine / group[0].weight) for d in group)
        again = after.without(draws[0].of_replica(r))
        assert again.num_trained == after.num_trained - group[0].weight
        assert again.without(()) == again


def test_draws_that_follow_each_other_cover_the_stream() -> None:
    draw: Draw | None = Draw.at(Place(5, ((1, 2), (3, 4))), batch_size=3, shares=2, share=1, total=20)
    seen = []
    while draw is not None:
        seen.append((draw.batch, flat(draw.mine)))
        draw = draw.following()
    assert seen == [
        (((1, 2), (3, 4), (5, 9)), [6, 7, 8]),
        (((9, 15),), [12, 13, 14]),
        (((15, 20),), [18, 19]),
    ]


def test_impossible_draws_are_refused() -> None:
    with pytest.raises(ValueError, match="share 2 of 2"):
        Draw.at(Place(), batch_size=1, shares=2, share=2)
    with pytest.raises(ValueError, match="nothing is left"):
        Draw.at(Place(9), batch_size=1, shares=1, share=0, total=9)


@given(st.integers(1, 40), st.integers(0, 2**62), st.data())
def test_every_data_epoch_is_a_permutation_and_runs_may_cross_its_border(
    length: int, seed: int, data: st.DataObject
) -> None:
    stream = Stream(length, seed=seed)
    whole = stream.indices([(0, 3 * length)])
    for k in range(3):
        assert sorted(whole[k * length : (k + 1) * length]) == list(range(length))
    lo = data.draw(st.integers(0, 3 * length))
    hi = data.draw(st.integers(lo, 3 * length))
    assert Stream(length, seed=seed).indices([(lo, hi), (0, lo)]) == whole[lo:hi] + whole[:lo]


def test_seed_and_data_epoch_each_change_the_order() -> None:
    """Added up, seed 1 in epoch 0 would repeat seed 0 in epoch 1."""
    n = 50
    orders = [
        tuple(Stream(n, seed=seed).indices([(e * n, (e + 1) * n)])) for seed in range(3) for e in range(3)
    ]
    assert len(set(orders)) == 9
    assert Stream(n, shuffle=False).indices([(n, 2 * n)]) == list(range(n))


def test_impossible_streams_are_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        Stream(0)
    with pytest.raises(ConfigError, match="epochs"):
        Stream(5, epochs=0)
