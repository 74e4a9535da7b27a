"""Whole jobs under faults, thousands of them: the invariants hold, and all is well in the end."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulation.faults import KINDS, Fault
from simulation.replica import Job
from simulation.run import (
    POLICY,
    Schedule,
    draw_any,
    draw_outage,
    draw_schedule,
    draw_takeover,
    draw_wipe,
    run,
)

from ftkit.core import quorum

BLOCK = 250


@pytest.mark.parametrize("block", range(8))
def test_no_schedule_breaks_an_invariant(block: int) -> None:
    """I1 to I8, for whatever the dice say; `scripts/simulate.py` runs as many more as one likes."""
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        outcome = run(draw_any(seed))
        assert not outcome.violation, f"python scripts/simulate.py --seed {seed}: {outcome.violation}"


@pytest.mark.parametrize("draw", [draw_outage, draw_wipe, draw_takeover])
def test_no_special_schedule_breaks_an_invariant(draw) -> None:  # type: ignore[no-untyped-def]
    """The stories behind I3, I7 and I8 are rare among random ones, so they are told more often here."""
    for seed in range(150):
        outcome = run(draw(seed))
        assert not outcome.violation, f"{draw.__name__}({seed}): {outcome.violation}"


faults = st.builds(
    Fault,
    at=st.floats(0.5, 8.0),
    what=st.sampled_from([k for k in KINDS if k != "wipe"]),
    who=st.integers(0, 4),
    seconds=st.floats(0.1, 9.0),
)
schedules = st.builds(
    Schedule,
    seed=st.integers(0, 9),
    num_replicas=st.integers(1, 4),
    faults=st.lists(faults, max_size=3).map(lambda f: tuple(sorted(f))),
)


@given(schedules)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_short_schedule_breaks_an_invariant(schedule: Schedule) -> None:
    """Random seeds find more; hypothesis tells the shorter story."""
    outcome = run(schedule)
    assert not outcome.violation, outcome.violation


def test_equal_seeds_tell_equal_stories() -> None:
    """A failing seed is worth something only if it fails again."""
    for seed in (5, 29, 77):
        first, second = (run(draw_any(seed), keep_story=True) for _ in range(2))
        assert first.story == second.story
        assert first.num_events == second.num_events


@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_without_faults_there_are_as_few_epochs_as_arrivals_and_no_step_fails(num: int) -> None:
    """No livelock: nobody who is content asks for another epoch."""
    for seed in range(10):
        outcome = run(Schedule(seed=seed, num_replicas=num))
        assert not outcome.violation
        assert outcome.num_epochs <= num
        assert outcome.checks is not None
        assert outcome.checks.num_failed == 0


def test_a_step_without_a_change_of_membership_asks_nothing_of_etcd() -> None:
    """The reason why etcd's load does not depend on the step rate."""
    seen: list[tuple[int, int]] = []

    def measure(job: Job) -> None:
        for _ in range(2):
            commits = sum(t.num_commits for t in job.trainers())
            seen.append((job.etcd.num_requests, commits))
            job.world.run(job.world.now + 30.0)

    assert not run(Schedule(seed=3, num_replicas=3), watch=measure).violation
    (requests, commits), (requests_later, commits_later) = seen
    assert requests_later == requests
    assert commits_later > commits + 300


def test_a_member_without_word_from_etcd_stops_before_it_may_be_replaced() -> None:
    """I3: the fence, seen from outside."""
    faults = (Fault(3.0, "cut", 0, 15.0), Fault(3.5, "join"))
    outcome = run(Schedule(seed=0, num_replicas=1, faults=faults, window=20.0), keep_story=True)
    assert not outcome.violation
    fenced = next(when for when, _, what in outcome.story if "no word from etcd" in what)
    replaced = next(when for when, who, what in outcome.story if who == "etcd" and what.startswith("epoch 2"))
    assert 3.0 + POLICY.outage_grace <= fenced < replaced


@pytest.mark.parametrize("who", [0, 1])
def test_a_member_that_the_others_cannot_reach_does_not_hold_them_up(
    who: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I6, while it lasts: etcd hears them all, so no lease runs out. Without its rule nobody commits."""

    def commits_meanwhile() -> int:
        fault = Fault(3.0, "island", who, 30.0)
        outcome = run(Schedule(seed=1, num_replicas=3, faults=(fault,), window=45.0), keep_story=True)
        assert not outcome.violation
        assert outcome.checks is not None
        lived = outcome.checks.lived.values()
        return sum(12.0 < when < 32.0 for life in lived for when in life.commits.values())

    assert commits_meanwhile() > 50
    monkeypatch.setattr(quorum, "_within_reach", lambda candidates, chosen, old, policy: chosen)
    assert commits_meanwhile() == 0


def test_the_simulation_has_seen_what_it_is_for() -> None:
    """A simulation in which nothing happens proves nothing."""
    tales = [what for seed in range(250) for _, _, what in run(draw_any(seed), keep_story=True).story]
    for happening in (
        "settles its undecided step",
        "salvages its step",
        "healed to",
        "no word from etcd for too long",
        "the optimizer raised",
        "heal: no source is left",
        "stands still",
        "as planned",
        "is gone: SIGKILL",
        "was started again",
        "superseded by epoch",
        "keeper is killed",
        "back without its data",
    ):
        assert any(happening in tale for tale in tales), happening


def test_a_story_can_be_told() -> None:
    """The story of a failing seed is for people."""
    outcome = run(draw_schedule(1), keep_story=True)
    assert "wants an epoch" in str(outcome)
    assert str(outcome).endswith("all is well")
