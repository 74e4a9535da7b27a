"""Which gradients travel together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftkit.algorithms.buckets import plan_buckets


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from("ab")), min_size=1, max_size=40),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_buckets_are_runs_of_neighbours_of_one_kind(
    parameters: list[tuple[int, str]], cap: int, first: int
) -> None:
    """The first backward sends slices of one flat buffer per kind: a bucket must be such a slice."""
    sizes = [size for size, _ in parameters]
    kinds = [kind for _, kind in parameters]
    buckets = plan_buckets(sizes, kinds, cap=cap, first_cap=first)
    assert sorted(i for b in buckets for i in b) == list(range(len(sizes)))
    for b in buckets:
        (kind,) = {kinds[i] for i in b}
        assert b == [i for i in range(b[0], b[-1] + 1) if kinds[i] == kind]
        assert sum(sizes[i] for i in b[1:]) < cap, "closed as soon as it is full"
    assert [b[0] for b in buckets] == sorted((b[0] for b in buckets), reverse=True)


def test_the_last_parameters_leave_first_in_a_small_bucket() -> None:
    assert plan_buckets([10, 10, 10, 4, 4], [0] * 5, cap=20, first_cap=5) == [[3, 4], [1, 2], [0]]
