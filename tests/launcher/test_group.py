"""The life of one replica group, without any process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftkit.launcher.group import (
    Effect,
    GroupMachine,
    Kill,
    Phase,
    RankExited,
    Say,
    Spawn,
    Stop,
    Terminate,
    Tick,
)
from ftkit.launcher.restart import RestartPolicy


def machine(num_ranks: int = 1, **policy: float) -> GroupMachine:
    return GroupMachine(
        "trainer-0",
        num_ranks=num_ranks,
        policy=RestartPolicy(jitter=0.0, **policy),  # type: ignore[arg-type]
        grace_s=10.0,
        sibling_grace_s=3.0,
        uniform=lambda: 0.5,
        now=0.0,
    )


def acts(effects: list[Effect]) -> list[Effect]:
    return [e for e in effects if not isinstance(e, Say)]


def test_it_starts_at_once() -> None:
    assert machine().handle(Tick(), 0.0) == [Spawn(1)]


def test_the_failure_of_a_rank_ends_its_siblings_and_restarts_the_group() -> None:
    """The ranks hold parts of one model: without one of them the others can do nothing."""
    group = machine(3)
    group.handle(Tick(), 0.0)
    assert acts(group.handle(RankExited(1, 5), 1.0)) == [Terminate()]
    assert acts(group.handle(RankExited(0, -15), 1.1)) == []
    assert acts(group.handle(Tick(), 2.0)) == []
    assert acts(group.handle(Tick(), 4.0)) == [Kill()], "the grace of siblings is over"
    group.handle(RankExited(2, -9), 4.1)
    assert group.phase is Phase.WAITING
    assert acts(group.handle(Tick(), 5.0)) == []
    assert acts(group.handle(Tick(), 5.2)) == [Spawn(2)]


def test_the_group_ends_with_the_code_of_the_rank_that_failed_first() -> None:
    """Its siblings die of our SIGTERM: their 143 would hide the cause."""
    group = machine(2, max_restarts=0)
    group.handle(Tick(), 0.0)
    group.handle(RankExited(1, 7), 1.0)
    group.handle(RankExited(0, -15), 1.1)
    assert group.exit_code == 7


def test_ranks_may_finish_one_after_the_other() -> None:
    group = machine(2)
    group.handle(Tick(), 0.0)
    assert acts(group.handle(RankExited(0, 0), 1.0)) == []
    group.handle(RankExited(1, 0), 9.0)
    assert group.phase is Phase.OVER
    assert group.exit_code == 0


def test_stop_gives_grace_once_and_then_kills() -> None:
    group = machine()
    group.handle(Tick(), 0.0)
    assert acts(group.handle(Stop(), 5.0)) == [Terminate()]
    assert acts(group.handle(Stop(), 14.0)) == [], "asking again does not prolong it"
    assert acts(group.handle(Tick(), 15.0)) == [Kill()]
    group.handle(RankExited(0, -9), 15.1)
    assert group.exit_code == 137


def test_a_second_stop_kills_at_once() -> None:
    group = machine()
    group.handle(Tick(), 0.0)
    group.handle(Stop(), 5.0)
    assert acts(group.handle(Stop(now=True), 5.1)) == [Kill()]


def test_stop_calls_off_a_restart() -> None:
    group = machine()
    group.handle(Tick(), 0.0)
    group.handle(RankExited(0, 4), 1.0)
    group.handle(Stop(), 1.5)
    assert group.phase is Phase.OVER
    assert group.exit_code == 4
    assert acts(group.handle(Tick(), 100.0)) == []


def test_a_message_says_what_happened_and_what_follows() -> None:
    group = machine()
    group.handle(Tick(), 0.0)
    [said] = group.handle(RankExited(0, -9), 2.0)
    assert isinstance(said, Say)
    assert said.text == "trainer-0: SIGKILL after 2.0 s; restart 1 of 10 in 1.0 s"


@given(
    st.lists(
        st.tuples(st.sampled_from("etsk"), st.integers(0, 2), st.sampled_from([0, 0, 1, 2, -9])), max_size=60
    )
)
def test_whatever_happens_ranks_are_never_started_twice_and_the_end_is_final(
    script: list[tuple[str, int, int]],
) -> None:
    """Two incarnations at once would fight over one replica id."""
    group, alive, now, over = machine(3), set[int](), 0.0, False
    for what, rank, code in script:
        now += 0.7
        if what == "e" and rank not in alive:
            continue
        event = {"e": RankExited(rank, code), "t": Tick(), "s": Stop(), "k": Stop(now=True)}[what]
        alive -= {rank} if what == "e" else set()
        for effect in group.handle(event, now):
            if isinstance(effect, Spawn):
                assert not alive
                assert not over
                alive = {0, 1, 2}
        over = over or group.phase is Phase.OVER
        assert (group.exit_code is not None) == over
        if over:
            assert not alive
        else:
            assert group.next_deadline() is not None or alive
