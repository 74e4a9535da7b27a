"""When the demo strikes whom; with a job that is told, not run."""

import pytest

from ftkit.demo.director import PATIENCE_S, Action, Director, Finish, Freeze, Kill, Thaw
from ftkit.demo.story import Story
from tests.demo.lines import step

ABC = ("a", "b", "c")


def play(director: Director, *, stuck_after: type[Action] | None = None) -> list[tuple[float, Action]]:
    """Lead a job that takes 0.3 s to get over anything, unless it is stuck after an action."""
    story, now, epoch, number = Story(), 0.0, 1, 0
    members, due = set(ABC), 0.0
    done: list[tuple[float, Action]] = []
    stuck = False
    while now < 1000.0:
        number += 1
        if now >= due and not stuck:
            for r in members:
                story.absorb(step(r, now, epoch, number, "".join(sorted(members))))
        action = director.decide(story, now)
        if action is not None:
            done.append((now, action))
            director.done(now)
            if isinstance(action, Finish):
                return done
            epoch, due, stuck = epoch + 1, now + 0.3, isinstance(action, stuck_after or ())
            members = set(ABC) if isinstance(action, Thaw) else set(ABC) - {action.victim}
        elif director.phase == "back" and isinstance(done[-1][1], Kill) and len(members) == 2:
            epoch, due, members = epoch + 1, now + 0.3, set(ABC)
        now = round(now + 0.05, 2)
    raise AssertionError("it never ended")


def test_the_demo_kills_one_freezes_one_thaws_it_and_ends() -> None:
    director = Director(ABC, seed=0, seconds=30.0)
    done = play(director)
    assert [type(a) for _, a in done] == [Kill, Freeze, Thaw, Finish]
    assert done[-1][1] == Finish()
    assert done[-1][0] >= 30.0
    assert [f.kind for f in director.faults] == ["SIGKILL", "SIGSTOP"]
    assert director.faults[1].thawed_at == done[2][0]
    assert director.faults[0].epoch < director.faults[1].epoch


@pytest.mark.parametrize("seed", range(5))
def test_each_fault_hits_another_one(seed: int) -> None:
    director = Director(ABC, seed=seed, seconds=5.0)
    play(director)
    assert len({f.victim for f in director.faults}) == 2


def test_the_moments_follow_from_the_seed() -> None:
    assert play(Director(ABC, seed=3, seconds=20.0)) == play(Director(ABC, seed=3, seconds=20.0))
    others = {play(Director(ABC, seed=s, seconds=20.0))[0] for s in range(10)}
    assert len(others) > 5


@pytest.mark.parametrize(("kill", "freeze"), [(False, True), (True, False), (False, False)])
def test_faults_can_be_left_out(kill: bool, freeze: bool) -> None:
    kinds = [type(a) for _, a in play(Director(ABC, seed=0, seconds=5.0, kill=kill, freeze=freeze))]
    assert kinds == [*[Kill] * kill, *[Freeze, Thaw] * freeze, Finish]


@pytest.mark.parametrize(
    ("after", "words"), [(Kill, "the others did not go on"), (Thaw, "did not come back after SIGSTOP")]
)
def test_a_job_that_does_not_recover_ends_the_demo_with_the_reason(after: type[Action], words: str) -> None:
    at, last = play(Director(ABC, seed=0, seconds=5.0), stuck_after=after)[-1]
    assert isinstance(last, Finish)
    assert words in last.trouble
    assert at > PATIENCE_S


def test_nobody_is_harmed_before_all_have_trained_together() -> None:
    director = Director(ABC, seed=0, seconds=1.0)
    story = Story([step("a", 0.0, 1, 1, "ab"), step("b", 0.0, 1, 1, "ab")])
    assert [director.decide(story, float(t)) for t in range(50)] == [None] * 50
    last = director.decide(story, PATIENCE_S + 1)
    assert isinstance(last, Finish)
    assert "a, b, c did not train together" in last.trouble
