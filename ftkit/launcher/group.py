"""Decide what is done with the ranks of one replica group: start, end, restart, give up.

Pure: a state machine that absorbs events and returns effects; time and randomness are arguments. It does
not know what a process is: the supervisor carries the effects out and reports what became of them.

    waiting ── due ──> running ── a rank fails or Stop ──> ending ── last rank gone ──> waiting | over
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ftkit.launcher.restart import Finished, GiveUp, Restart, RestartPolicy, after_exit, shell_code


class Phase(Enum):
    """Where a group is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank of the group ended; `code` is negative when a signal ended it."""

    rank: int
    code: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the group for good: at once when `now`, otherwise with its grace period."""

    now: bool = False


Event = RankExited | Tick | Stop


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start all ranks of the group."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send SIGTERM to the ranks that are alive."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to the ranks that are alive."""


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the user."""

    text: str
    warn: bool = False


Effect = Spawn | Terminate | Kill | Say


def describe(code: int) -> str:
    """Return an exit status in words: `exit 1`, `SIGKILL`."""
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class GroupMachine:
    """The life of one replica group over all its incarnations."""

    def __init__(
        self,
        name: str,
        *,
        num_ranks: int,
        policy: RestartPolicy,
        grace_s: float,
        sibling_grace_s: float,
        uniform: Callable[[], float],
        now: float,
    ) -> None:
        self.name = name
        self.phase = Phase.WAITING
        self.exit_code: int | None = None
        """Set once the group is over."""
        self.restarts_in_a_row = 0
        self.incarnation = 0
        self._num_ranks = num_ranks
        self._policy = policy
        self._grace_s = grace_s
        self._sibling_grace_s = sibling_grace_s
        self._uniform = uniform
        self._due: float | None = now
        self._started = now
        self._alive: set[int] = set()
        self._failure: RankExited | None = None
        self._stopping = False

    def next_deadline(self) -> float | None:
        """Return when the machine wants its next Tick, or None when it waits for events only."""
        return self._due

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Absorb one event and return what is now to be done."""
        if isinstance(event, RankExited):
            return self._rank_exited(event, now)
        if isinstance(event, Stop):
            return self._stop(event, now)
        return self._tick(now)

    def _tick(self, now: float) -> list[Effect]:
        if self._due is None or now < self._due:
            return []
        self._due = None
        if self.phase is Phase.WAITING:
            self.phase = Phase.RUNNING
            self.incarnation += 1
            self._started = now
            self._alive = set(range(self._num_ranks))
            self._failure = None
            return [Spawn(self.incarnation)]
        if self.phase is Phase.ENDING:
            left = ", ".join(map(str, sorted(self._alive)))
            return [Say(f"{self.name}: grace period over, killing rank {left}", warn=True), Kill()]
        return []

    def _stop(self, event: Stop, now: float) -> list[Effect]:
        if self.phase is Phase.OVER:
            return []
        self._stopping = True
        if self.phase is Phase.WAITING:
            # Between two incarnations: it failed and its restart is called off; never started is no failure.
            code = 0 if self._failure is None else shell_code(self._failure.code)
            return self._over(code, f"{self.name}: not started again, launch is stopping", warn=False)
        if event.now:
            self.phase, self._due = Phase.ENDING, None
            return [Kill()]
        if self.phase is Phase.ENDING:  # SIGTERM has been sent, and the deadline stands
            return []
        self.phase, self._due = Phase.ENDING, now + self._grace_s
        return [Terminate()]

    def _rank_exited(self, event: RankExited, now: float) -> list[Effect]:
        self._alive.discard(event.rank)
        effects: list[Effect] = []
        if event.code != 0 and self._failure is None:
            self._failure = event
            if self._alive and self.phase is Phase.RUNNING:
                self.phase, self._due = Phase.ENDING, now + self._sibling_grace_s
                effects += [
                    Say(
                        f"{self.name}: rank {event.rank} ended ({describe(event.code)}), ending its siblings",
                        warn=True,
                    ),
                    Terminate(),
                ]
        return effects if self._alive else effects + self._all_gone(now)

    def _all_gone(self, now: float) -> list[Effect]:
        code = 0 if self._failure is None else self._failure.code
        ran_s = now - self._started
        verdict = after_exit(
            self._policy,
            code=code,
            ran_s=ran_s,
            restarts_in_a_row=self.restarts_in_a_row,
            uniform=self._uniform(),
            stopping=self._stopping,
        )
        ended = f"{self.name}: {describe(code)} after {ran_s:.1f} s"
        if isinstance(verdict, Finished):
            return self._over(0, f"{self.name}: {verdict.reason} after {ran_s:.1f} s", warn=False)
        if isinstance(verdict, GiveUp):
            return self._over(verdict.code, f"{ended}; {verdict.reason}", warn=True)
        assert isinstance(verdict, Restart)
        self.phase, self._due = Phase.WAITING, now + verdict.delay_s
        self.restarts_in_a_row = verdict.attempt
        limit = "" if self._policy.max_restarts < 0 else f" of {self._policy.max_restarts}"
        return [Say(f"{ended}; restart {verdict.attempt}{limit} in {verdict.delay_s:.1f} s", warn=True)]

    def _over(self, code: int, text: str, *, warn: bool) -> list[Effect]:
        self.phase, self._due, self.exit_code = Phase.OVER, None, code
        return [Say(text, warn=warn)]
