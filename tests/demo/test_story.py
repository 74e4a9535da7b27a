"""What the journals of several replicas say together."""

import pytest

from ftkit.demo.story import Story
from tests.demo.lines import end, start, step, together


def test_of_a_step_committed_twice_the_later_epoch_counts() -> None:
    """A replica may commit a step, and die before the others have heard of it: they commit it again."""
    story = Story([*together("ab", 1, range(1, 3), 0.0), step("a", 0.2, 1, 3, "ab")])
    story.absorb(step("b", 0.5, 2, 3, "b"))
    assert [(s.epoch, s.step) for s in story.lineage()] == [(1, 1), (1, 2), (2, 3)]


def test_together_means_one_epoch_with_just_these_members() -> None:
    story = Story(together("ab", 2, range(1, 3), 0.0))
    assert story.together("ba")
    assert story.together("ab", after_epoch=1)
    assert not story.together("ab", after_epoch=2)
    assert not story.together("abc")
    story.absorb(step("a", 1.0, 3, 3, "ab"))
    assert not story.together("ab"), "b has not committed in epoch 3 yet"


def test_an_attempt_that_was_not_committed_is_no_commit() -> None:
    story = Story([step("a", 0.0, 1, 1, "a"), step("a", 0.1, 1, 2, "a", committed=False)])
    last = story.last_commit("a")
    assert last is not None
    assert last.step == 1
    assert [s.step for s in story.lineage()] == [1]


def test_the_loss_of_a_step_is_the_mean_over_its_replicas() -> None:
    lines = together("ab", 1, range(1, 2), 0.0)
    story = Story([*lines, step("b", 0.0, 1, 1, "ab", committed=False)])
    assert [(n, loss) for _, n, loss in story.losses()] == [(1, 5.0)]


def test_the_usual_step_leaves_out_changes_of_epoch_and_restarts() -> None:
    """They are what the pauses are compared with."""
    lines = [*together("a", 1, range(1, 6), 0.0), *together("a", 2, range(6, 9), 50.0)]
    story = Story([*lines, step("a", 99.0, 2, 9, "a", pid=2)])
    assert story.usual_step_s() == pytest.approx(0.1)


def test_the_newest_process_of_a_name_is_the_one_that_counts() -> None:
    story = Story([start("a", 0.0, pid=5), start("a", 9.0, pid=6), end("a", 10.0, "1-3", 5)])
    assert story.pid("a") == 6
    assert story.pid("b") is None
    assert story.hashes["1-3"] == {"a": "0"}
