"""Decide whether a replica group that ended is started again, and after what delay.

Pure: no clock, no processes, no randomness of its own. The caller says how the group ended, how long it
ran, and hands in a number between 0 and 1 for the jitter.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

CONFIG_EXIT = 2
"""The exit code of a configuration error: the next start would end the same way."""

TERMINATED_EXIT = 128 + signal.SIGTERM
"""A rank without a manager yet (it still imports) ends so when it is asked to leave, and loses nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often and how fast a failing replica group is started again; times in seconds."""

    max_restarts: int = 10
    """Restarts in a row, without a healthy period in between; -1: no limit, 0: never restart."""
    first_delay_s: float = 1.0
    max_delay_s: float = 60.0
    factor: float = 2.0
    jitter: float = 0.25
    """The delay is spread over ± this fraction, so that groups do not start in step with each other."""
    healthy_after_s: float = 60.0
    """A group that ran this long is healthy: its count of restarts begins anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Start the group again after `delay_s`; it is the `attempt`-th restart in a row."""

    delay_s: float
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The group ended well and is not started again."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The group failed and is not started again."""

    code: int
    reason: str


Verdict = Restart | Finished | GiveUp


def shell_code(code: int) -> int:
    """Return the exit code as a shell shows it: a death by signal n is 128 + n."""
    return 128 - code if code < 0 else code


def delay(policy: RestartPolicy, attempt: int, uniform: float) -> float:
    """Return the wait before the `attempt`-th restart in a row (from 1); `uniform` lies in [0, 1)."""
    # The exponent is capped: factor ** 2000 would overflow for a group that never stops failing.
    base = min(policy.max_delay_s, policy.first_delay_s * policy.factor ** min(attempt - 1, 64))
    return base * (1.0 + policy.jitter * (2.0 * uniform - 1.0))


def after_exit(
    policy: RestartPolicy,
    *,
    code: int,
    ran_s: float,
    restarts_in_a_row: int,
    uniform: float,
    stopping: bool = False,
) -> Verdict:
    """Say what follows an exit with `code` (negative: by signal) after `ran_s` seconds of running."""
    if code == 0:
        return Finished(reason="finished" if not stopping else "left in order")
    shown = shell_code(code)
    if stopping and shown == TERMINATED_EXIT:
        return Finished(reason="ended by SIGTERM, as it was asked to")
    if stopping:
        return GiveUp(code=shown, reason="ended while launch was stopping")
    if code == CONFIG_EXIT:
        return GiveUp(code=shown, reason="a configuration error (exit 2) does not go away by a restart")
    if policy.max_restarts == 0:
        return GiveUp(code=shown, reason="restarts are off (--max-restarts 0)")
    attempt = 1 if ran_s >= policy.healthy_after_s else restarts_in_a_row + 1
    if 0 <= policy.max_restarts < attempt:
        return GiveUp(
            code=shown,
            reason=f"restarted {policy.max_restarts} times in a row without running for "
            f"{policy.healthy_after_s:g} s (see --max-restarts, --healthy-after)",
        )
    return Restart(delay_s=delay(policy, attempt, uniform), attempt=attempt)
