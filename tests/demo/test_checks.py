"""The demo's claims: each check must be able to fail, or it says nothing."""

import pytest

from ftkit.algorithms.stream import Stream
from ftkit.demo.checks import recovered, same_bits, samples_once, steps_in_a_row
from ftkit.demo.recovery import Fault, measure
from ftkit.demo.story import Story
from tests.demo.lines import digest, draw, end, start, step, together

AB = ("a", "b")


def test_equal_digests_at_equal_versions_are_the_same_bits() -> None:
    story = Story([digest(r, v, v * 8) for v in ("1-10", "2-9") for r in AB])
    check = same_bits(story, AB)
    assert check.ok
    assert "2-9" in check.detail, "the version is a pair: epoch 2 is newer"


def test_one_different_digest_fails_and_names_who_had_what() -> None:
    story = Story([digest("a", "1-10", "aaaa"), digest("b", "1-10", "bbbb")])
    check = same_bits(story, AB)
    assert not check.ok
    assert check.detail == "at version 1-10: a aaaa, b bbbb"


def test_nothing_compared_is_no_success() -> None:
    assert not same_bits(Story([digest("a", "1-10", "x"), digest("b", "1-20", "x")]), AB).ok


def test_a_gap_in_the_steps_is_seen() -> None:
    assert steps_in_a_row(Story(together("ab", 1, range(1, 4), 0.0))).ok
    assert not steps_in_a_row(Story([step("a", 0.0, 1, 1, "a"), step("a", 0.0, 1, 3, "a")])).ok
    assert not steps_in_a_row(Story()).ok


def job(*, repeat: int | None = None, skip: bool = False, holes: tuple[tuple[int, int], ...] = ()) -> Story:
    """Two replicas, three steps of two samples each; in step 3 b dies and a commits it alone."""
    order = Stream(100, seed=0).indices([(0, 12)])
    story = Story([start("a", 0.0), start("b", 0.0)])
    for number in (1, 2, 3):
        at = 4 * (number - 1)
        for i, r in enumerate("ab"):
            mine = order[at + 2 * i : at + 2 * i + 2]
            if repeat == number:
                mine = order[0:2]
            if not (skip and r == "b"):
                story.absorb(draw(r, float(number), 1, number, mine))
    for number in (1, 2):
        for r in AB:
            story.absorb(step(r, number + 0.5, 1, number, "ab"))
    story.absorb(step("a", 4.0, 2, 3, "a"))
    story.absorb(end("a", 5.0, "2-3", 12, holes=holes))
    return story


def test_samples_of_a_step_are_those_of_the_members_that_committed_it() -> None:
    """What the dead one drew was not trained on: it is a hole, to be handed out later."""
    check = samples_once(job(holes=((10, 12),)))
    assert check.ok, check.detail
    assert check.detail == "10 samples of 100"


@pytest.mark.parametrize(
    ("story", "words"),
    [
        (job(), "never: ["),
        (job(repeat=2, holes=((10, 12),)), "too often: ["),
        (job(skip=True, holes=((10, 12),)), "b drew nothing for step 1"),
        (Story([start("a", 0.0)]), "no trainer has ended in order"),
    ],
)
def test_a_sample_lost_or_used_twice_is_seen(story: Story, words: str) -> None:
    check = samples_once(story)
    assert not check.ok
    assert words in check.detail


def test_a_step_repeated_in_a_later_epoch_counts_with_its_last_draw() -> None:
    order = Stream(100, seed=0).indices([(0, 4)])
    story = Story([start("a", 0.0)])
    story.absorb(draw("a", 1.0, 1, 1, order[2:4]))
    story.absorb(step("a", 1.1, 1, 1, "ab", committed=False))
    story.absorb(draw("a", 1.2, 2, 1, order[0:2]))
    story.absorb(step("a", 1.3, 2, 1, "a"))
    story.absorb(end("a", 2.0, "2-1", 2))
    assert samples_once(story).ok


def test_a_fault_that_was_not_survived_fails() -> None:
    story = Story([*together("ab", 1, range(1, 4), 0.0), *together("a", 2, range(4, 6), 1.0)])
    fault = Fault(kind="SIGKILL", victim="b", at=0.25, epoch=1)
    check = recovered([measure(story, fault)])
    assert not check.ok
    assert "did not come back" in check.detail
    stuck = recovered([measure(Story(together("ab", 1, range(1, 4), 0.0)), fault)])
    assert "not all survivors went on" in stuck.detail
    assert recovered([]).ok
