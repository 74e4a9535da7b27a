"""The arithmetic of who takes which sample."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.algorithms.stream import Draw, Stream
from ftkit.errors import ConfigError


@given(
    start=st.integers(0, 50),
    rest=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    replicas=st.integers(1, 6),
    ranks=st.integers(1, 3),
)
def test_the_shares_of_a_batch_are_disjoint_whole_and_nearly_equal(
    start: int, rest: int, batch_size: int, replicas: int, ranks: int
) -> None:
    """Each sample is taken by exactly one rank, in the stream's last batch too."""
    shares = replicas * ranks
    draws = [
        Draw(start=start, batch_size=batch_size, shares=shares, share=i, ranks=ranks, total=start + rest)
        for i in range(shares)
    ]
    taken = [p for d in draws for p in d.positions]
    assert taken == list(range(start, min(start + rest, start + batch_size * shares)))
    counts = [len(d.positions) for d in draws]
    assert max(counts) - min(counts) <= 1
    assert max(counts) <= batch_size
    assert len({(d.stop, d.short) for d in draws}) == 1
    assert all(len(d.loaded) == max(1, len(d.positions)) for d in draws)
    for r in range(replicas):
        group = draws[r * ranks : (r + 1) * ranks]
        assert {d.weight for d in group} == {sum(len(d.positions) for d in group)}
        if group[0].weight and ranks > 1:
            # The mean over ranks of (scale × mean over the rank's samples) is the mean over the samples.
            assert sum(d.loss_scale for d in group) == pytest.approx(ranks)
            assert all(
                d.loss_scale / ranks == pytest.approx(len(d.positions) / group[0].weight) for d in group
            )


def test_draws_that_follow_each_other_cover_the_stream() -> None:
    draw: Draw | None = Draw(start=0, batch_size=3, shares=2, share=1, total=20)
    seen = []
    while draw is not None:
        seen.append((draw.start, draw.stop, list(draw.positions)))
        draw = draw.following()
    assert seen == [
        (0, 6, [3, 4, 5]),
        (6, 12, [9, 10, 11]),
        (12, 18, [15, 16, 17]),
        (18, 20, [19]),
    ]


@given(st.integers(1, 40), st.integers(0, 2**62), st.data())
def test_every_data_epoch_is_a_permutation_and_runs_may_cross_its_border(
    length: int, seed: int, data: st.DataObject
) -> None:
    stream = Stream(length, seed=seed)
    whole = stream.indices(range(3 * length))
    for k in range(3):
        assert sorted(whole[k * length : (k + 1) * length]) == list(range(length))
    lo = data.draw(st.integers(0, 3 * length))
    hi = data.draw(st.integers(lo, 3 * length))
    assert Stream(length, seed=seed).indices(range(lo, hi)) == whole[lo:hi]


def test_seed_and_data_epoch_each_change_the_order() -> None:
    """Added up, seed 1 in epoch 0 would repeat seed 0 in epoch 1."""
    n = 50
    orders = [
        tuple(Stream(n, seed=seed).indices(range(e * n, (e + 1) * n))) for seed in range(3) for e in range(3)
    ]
    assert len(set(orders)) == 9
    assert Stream(n, shuffle=False).indices(range(n, 2 * n)) == list(range(n))


def test_impossible_streams_are_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        Stream(0)
    with pytest.raises(ConfigError, match="epochs"):
        Stream(5, epochs=0)
