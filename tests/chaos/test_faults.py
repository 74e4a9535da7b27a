"""The plan of faults: a bad night can be replayed only if the seed alone decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.chaos import plan
from ftkit.chaos.kinds import ALL, DEFAULT, GROUP_FAULTS, TAKES_TWO
from ftkit.errors import ConfigError


@given(seed=st.integers(0, 2**32), groups=st.integers(1, 8), every=st.floats(0.5, 20.0))
def test_the_seed_alone_decides(seed: int, groups: int, every: float) -> None:
    one = plan(seed, seconds=100.0, groups=groups, every_s=every)
    assert one == plan(seed, seconds=100.0, groups=groups, every_s=every)
    assert [f.at for f in one] == sorted(f.at for f in one)
    for fault in one:
        assert 0 < fault.at < 100.0
        assert (fault.victim == -1) == (fault.kind not in GROUP_FAULTS)
        assert fault.victim < groups
        assert fault.lasting >= 0
        assert 0 <= fault.chance <= 1
        assert groups > 2 or fault.kind not in TAKES_TWO


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    """So that a fault found in a soak can be met again in a shorter run."""
    short, long = plan(3, seconds=60.0), plan(3, seconds=600.0)
    assert long[: len(short)] == short


def test_each_kind_comes_before_any_comes_again() -> None:
    faults = plan(5, seconds=1000.0)
    assert sorted(f.kind for f in faults[: len(DEFAULT)]) == sorted(DEFAULT)
    assert {f.kind for f in plan(5, seconds=1000.0, kinds=ALL)} == set(ALL)
    assert plan(5) != plan(6)


def test_a_blink_is_shorter_than_the_lease_and_a_freeze_longer() -> None:
    for fault in plan(7, seconds=3000.0, lease_ttl=4.0):
        if fault.kind == "blink":
            assert 0 < fault.lasting < 4.0
        if "freeze" in fault.kind:
            assert fault.lasting > 4.0


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="earthquake"):
        plan(0, kinds=("earthquake",))
    with pytest.raises(ConfigError, match="two groups"):
        plan(0, kinds=TAKES_TWO, groups=2)
    with pytest.raises(ConfigError, match="turmoil"):
        plan(0, turmoil=2.0)
