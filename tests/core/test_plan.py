"""Every member reads the same plan from the same epoch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.core.model import BROKEN, FRESH, Epoch, Seat, Version
from ftkit.core.plan import plan


def epoch(**versions: Version) -> Epoch:
    return Epoch(id=9, seats=tuple(Seat(r, f"{r}1", v) for r, v in sorted(versions.items())))


def test_all_who_have_the_highest_version_are_sources_and_the_others_heal() -> None:
    made = plan(epoch(a=Version(8, 101), b=Version(7, 101), c=Version(8, 101), d=FRESH), "b")
    assert made.version == Version(8, 101)
    assert made.sources == ("a", "c")
    assert made.healing == ("b", "d")
    assert made.heals
    assert (made.replica_rank, made.num_replicas, made.store) == (1, 4, "a")


def test_the_same_step_of_an_older_epoch_is_not_up_to_date() -> None:
    """I4: B went on alone to step 101; A has a step 101 of its own."""
    assert plan(epoch(a=Version(7, 101), b=Version(8, 101)), "a").heals


def test_at_step_0_the_first_member_is_the_one_source() -> None:
    """Two models that were just built differ, unless the user says that they do not."""
    made = plan(epoch(a=FRESH, b=FRESH), "b")
    assert made.sources == ("a",)
    assert made.heals
    without = plan(epoch(a=FRESH, b=FRESH), "b", init_sync=False)
    assert without.sources == ("a", "b")
    assert not without.heals


def test_a_half_written_state_is_never_a_source_beside_a_whole_one() -> None:
    """I5, also at step 0."""
    made = plan(epoch(a=BROKEN, b=FRESH), "a")
    assert made.sources == ("b",)
    assert made.heals
    assert plan(epoch(a=BROKEN, b=FRESH), "a", init_sync=False).heals


def test_a_stranger_has_no_part() -> None:
    with pytest.raises(KeyError, match="x is not a member of epoch 9"):
        plan(epoch(a=FRESH), "x")


some_versions = st.builds(Version, st.integers(-1, 3), st.integers(0, 3))


@given(st.dictionaries(st.sampled_from("abcdef"), some_versions, min_size=1), st.booleans())
def test_the_plans_of_all_members_fit_together(versions: dict[str, Version], init_sync: bool) -> None:
    """Nothing is negotiated, so nothing may depend on who asks."""
    made = [plan(epoch(**versions), r, init_sync=init_sync) for r in sorted(versions)]
    assert len({(m.version, m.sources, m.healing, m.store) for m in made}) == 1
    assert [m.replica_rank for m in made] == list(range(len(made)))
    first = made[0]
    assert first.sources
    assert not set(first.sources) & set(first.healing)
    assert all(versions[r] == first.version for r in first.sources)
    assert all(r in first.healing for r, v in versions.items() if v < first.version)
    assert [m.heals for m in made] == [r in first.healing for r in sorted(versions)]
