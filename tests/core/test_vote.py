"""The vote, and the ways in which a version may change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.core.model import BROKEN, FRESH, Epoch, Seat, Version
from ftkit.core.vote import BALLOT_SIZE, Lineage, ballot, tally


def epoch(id: int, **versions: Version) -> Epoch:
    return Epoch(id=id, seats=tuple(Seat(r, f"{r}1", v) for r, v in sorted(versions.items())))


def reduce(*ballots: list[int]) -> list[int]:
    """All-reduce with MAX."""
    return [max(column) for column in zip(*ballots, strict=True)]


def entered() -> Lineage:
    """Return the lineage of a member that begins step 100 in epoch 7."""
    version = Version(6, 99)
    lineage = Lineage(version)
    lineage.enter(epoch(7, a=version, b=version), "a")
    return lineage


def test_a_step_commits_when_all_say_ok_at_one_step_of_one_epoch() -> None:
    good = ballot(ok=True, reconfigure=False, epoch=7, step=99)
    assert tally(reduce(good, good), participants=2, min_replicas=2).commit


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"ok": False}, "voted no"),
        ({"step": 98}, "different steps .98 to 99."),
        ({"epoch": 8}, "different epochs .7 to 8."),
    ],
)
def test_one_dissenter_is_enough_and_the_verdict_says_why(other: dict[str, int], why: str) -> None:
    good = {"ok": True, "reconfigure": False, "epoch": 7, "step": 99}
    bad = {**good, **other}
    verdict = tally(reduce(ballot(**good), ballot(**bad)), participants=2, min_replicas=1)  # type: ignore[arg-type]
    assert not verdict.commit
    assert verdict.reconfigure
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(verdict.why)


def test_too_few_participants_commit_nothing() -> None:
    good = ballot(ok=True, reconfigure=False, epoch=7, step=99)
    assert "1 participants, at least 2" in tally(good, participants=1, min_replicas=2).why


def test_one_wish_to_reconfigure_is_read_by_all_and_costs_no_step() -> None:
    """All switch at the same step boundary."""
    good = ballot(ok=True, reconfigure=False, epoch=7, step=99)
    wish = ballot(ok=True, reconfigure=True, epoch=7, step=99)
    verdict = tally(reduce(good, wish, good), participants=3, min_replicas=1)
    assert verdict.commit
    assert verdict.reconfigure


votes = st.builds(
    ballot, ok=st.booleans(), reconfigure=st.booleans(), epoch=st.integers(1, 3), step=st.integers(0, 3)
)


@given(st.lists(votes, min_size=1, max_size=5), st.integers(1, 4))
def test_the_verdict_is_what_reading_all_ballots_would_give(ballots: list[list[int]], least: int) -> None:
    """MAX over six integers loses nothing that matters."""
    verdict = tally(reduce(*ballots), participants=len(ballots), min_replicas=least)
    same = len({(b[2], b[4]) for b in ballots}) == 1
    assert all(len(b) == BALLOT_SIZE for b in ballots)
    assert verdict.commit == (same and not any(b[0] for b in ballots) and len(ballots) >= least)
    assert verdict.reconfigure == (any(b[1] for b in ballots) or not verdict.commit)


def test_a_commit_names_the_epoch_in_which_it_was_made() -> None:
    lineage = entered()
    assert lineage.votes(True) == ballot(ok=True, reconfigure=False, epoch=7, step=99)
    lineage.commit()
    assert lineage.version == Version(7, 100)


def test_a_step_in_doubt_is_settled_under_the_name_that_the_others_know() -> None:
    """The vote reached the others only; the averaged gradients are still here."""
    lineage = entered()
    lineage.votes(True)
    lineage.lose_vote()
    assert lineage.version == Version(6, 99)
    made = lineage.enter(epoch(8, a=Version(6, 99), b=Version(7, 100)), "a")
    assert made.heals
    assert lineage.undecided == made.version
    lineage.settle()
    assert lineage.version == Version(7, 100)
    assert lineage.undecided is None


def test_a_step_that_this_member_refused_is_never_in_doubt() -> None:
    """It voted no, so nobody has committed."""
    lineage = entered()
    assert lineage.votes(False)[0] == 1
    lineage.lose_vote()
    assert lineage.undecided is None


@pytest.mark.parametrize("end", ["commit", "reject"])
def test_a_vote_that_was_read_leaves_no_doubt(end: str) -> None:
    lineage = entered()
    lineage.votes(True)
    getattr(lineage, end)()
    assert lineage.undecided is None


def test_a_doubt_does_not_outlive_the_gradients() -> None:
    lineage = entered()
    lineage.votes(True)
    lineage.lose_vote()
    lineage.forget_undecided()
    with pytest.raises(AssertionError, match="no step is in doubt"):
        lineage.settle()


@pytest.mark.parametrize("breaks", ["begin_heal", "fail_update"])
def test_a_half_written_state_votes_no_and_is_below_all(breaks: str) -> None:
    """I5."""
    lineage = entered()
    getattr(lineage, breaks)()
    assert lineage.version == BROKEN < FRESH
    assert lineage.votes(True)[0] == 1


def test_a_healed_member_goes_on_from_the_version_it_received() -> None:
    lineage = Lineage()
    made = lineage.enter(epoch(8, a=FRESH, b=Version(7, 100)), "a")
    lineage.begin_heal()
    lineage.end_heal(made.version)
    assert lineage.votes(True)[0] == 0
    lineage.commit()
    assert lineage.version == Version(8, 101)


def test_a_vote_outside_of_an_epoch_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="a vote needs an epoch"):
        Lineage().votes(True)
