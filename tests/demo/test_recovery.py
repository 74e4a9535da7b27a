"""What a fault cost: measured at the survivors, from commit to commit."""

import pytest

from ftkit.demo.recovery import Fault, measure
from ftkit.demo.story import Story
from tests.demo.lines import event, start, step, together

KILL = Fault(kind="SIGKILL", victim="c", at=10.0, epoch=1)
BEFORE = [*together("abc", 1, range(1, 5), 9.6), step("a", 9.95, 1, 5, "abc"), step("b", 9.98, 1, 5, "abc")]


def after_kill() -> Story:
    story = Story(BEFORE)
    for r, late in (("a", 0.0), ("b", 0.01)):
        for at, kind, epoch in (
            (10.02, "abort", 1),
            (10.03, "aborted", 1),
            (10.05, "epoch", 2),
            (10.06, "configured", 2),
        ):
            story.absorb(event(r, at + late, kind, epoch))
        story.absorb(step(r, 10.04 + late, 1, 6, "ab", committed=False))
        story.absorb(step(r, 10.20 + late, 2, 6, "ab"))
    return story


def test_each_moment_is_counted_from_the_fault() -> None:
    found = measure(after_kill(), KILL)
    assert found.survivors == ("a", "b")
    assert found.epoch == 2
    times = (found.detected_ms, found.aborted_ms, found.epoch_ms, found.configured_ms, found.first_commit_ms)
    assert times == pytest.approx((20.0, 40.0, 50.0, 70.0, 210.0))
    assert found.repeated_steps == 1


def test_the_pause_goes_from_the_last_commit_before_to_the_first_one_after() -> None:
    """Not from the fault: the step in flight when it struck is part of what was lost."""
    found = measure(after_kill(), KILL)
    assert found.pause_ms == pytest.approx({"a": 250.0, "b": 230.0})
    assert found.longest_pause_ms == pytest.approx(250.0)


def test_a_commit_of_the_old_epoch_after_the_fault_ends_no_pause() -> None:
    """A step whose vote was through when the victim died is committed after the fault, without a recovery."""
    story = Story(BEFORE)
    story.absorb(step("a", 10.01, 1, 6, "abc"))
    story.absorb(step("a", 10.5, 2, 7, "ab"))
    assert measure(story, KILL).pause_ms == pytest.approx({"a": 490.0})


def test_without_a_commit_of_all_survivors_there_is_no_recovery() -> None:
    story = Story([*BEFORE, step("a", 10.2, 2, 6, "ab")])
    assert measure(story, KILL).first_commit_ms is None
    assert measure(Story(BEFORE), KILL).longest_pause_ms is None


def test_the_return_of_a_killed_one_is_counted_from_the_fault() -> None:
    story = after_kill()
    story.absorb(start("c", 14.0, pid=2))
    for at, kind in ((14.2, "healing"), (14.3, "healed")):
        story.absorb(event("c", at, kind, 3, bytes=1000, seconds=0.1))
    story.absorb(step("c", 14.5, 3, 7, "abc", pid=2))
    story.absorb(step("a", 14.5, 3, 7, "abc"))
    back = measure(story, KILL).back
    assert back is not None
    assert (back.epoch, back.healed_bytes) == (3, 1000)
    times = (back.started_ms, back.healing_ms, back.healed_ms, back.first_commit_ms)
    assert times == pytest.approx((4000.0, 4200.0, 4300.0, 4500.0))
    assert back.pause_ms == pytest.approx({"a": 4300.0})


def test_the_return_of_a_frozen_one_is_counted_from_its_thaw() -> None:
    """What it wrote late about the step in which it froze is not its return."""
    story = after_kill()
    story.absorb(step("c", 13.01, 1, 5, "abc"))
    story.absorb(step("c", 13.4, 3, 9, "abc"))
    fault = Fault(kind="SIGSTOP", victim="c", at=10.0, epoch=1, thawed_at=13.0)
    back = measure(story, fault).back
    assert back is not None
    assert back.first_commit_ms == pytest.approx(400.0)
    assert back.started_ms is None
