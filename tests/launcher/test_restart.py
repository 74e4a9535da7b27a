"""When a replica group that ended is started again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.launcher.restart import Finished, GiveUp, Restart, RestartPolicy, after_exit, delay

POLICY = RestartPolicy(max_restarts=3, first_delay_s=1.0, max_delay_s=8.0, jitter=0.25, healthy_after_s=60.0)


def verdict(
    code: int, *, ran_s: float = 1.0, row: int = 0, stopping: bool = False
) -> Restart | Finished | GiveUp:
    return after_exit(POLICY, code=code, ran_s=ran_s, restarts_in_a_row=row, uniform=0.5, stopping=stopping)


def test_exit_0_is_the_end() -> None:
    assert isinstance(verdict(0), Finished)


@pytest.mark.parametrize("code", [1, 3, -9, -15, 137])
def test_a_failure_is_restarted_after_the_first_delay(code: int) -> None:
    assert verdict(code) == Restart(delay_s=1.0, attempt=1)


def test_a_configuration_error_is_final() -> None:
    """A wrong flag is wrong the next time too: restarting would bury its message under ten copies."""
    assert isinstance(verdict(2), GiveUp)


def test_delays_double_up_to_the_limit() -> None:
    assert [delay(POLICY, n, 0.5) for n in range(1, 7)] == [1, 2, 4, 8, 8, 8]


def test_a_healthy_run_starts_the_count_anew() -> None:
    assert verdict(1, ran_s=60.0, row=3) == Restart(delay_s=1.0, attempt=1)


def test_giving_up_names_the_flag_and_keeps_the_code() -> None:
    over = verdict(-9, row=3)
    assert isinstance(over, GiveUp)
    assert over.code == 137
    assert "--max-restarts" in over.reason


def test_zero_means_never_and_minus_one_for_ever() -> None:
    never, ever = RestartPolicy(max_restarts=0), RestartPolicy(max_restarts=-1)
    args = {"code": 1, "ran_s": 0.0, "uniform": 0.0}
    assert isinstance(after_exit(never, restarts_in_a_row=0, **args), GiveUp)  # type: ignore[arg-type]
    assert isinstance(after_exit(ever, restarts_in_a_row=100_000, **args), Restart)  # type: ignore[arg-type]


def test_nothing_is_restarted_while_stopping() -> None:
    assert verdict(-9, stopping=True) == GiveUp(code=137, reason="ended while launch was stopping")


@pytest.mark.parametrize("code", [-15, 143])
def test_to_end_of_sigterm_is_in_order_only_when_launch_has_sent_it(code: int) -> None:
    """A group that still imports when launch is told to stop has no handler yet, and nothing to lose."""
    assert verdict(code, stopping=True) == Finished(reason="ended by SIGTERM, as it was asked to")
    assert isinstance(verdict(code), Restart)


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
def test_the_delay_is_spread_around_a_bounded_value(attempt: int, uniform: float) -> None:
    assert 0.75 <= delay(POLICY, attempt, uniform) <= 8.0 * 1.25
