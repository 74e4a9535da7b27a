"""Tell what happened and when: one event per epoch, abort, heal and first commit; never per step.

Subscribers get each event on the thread on which it happened and must be quick.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

logger = logging.getLogger(__name__)


class TimelineEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One moment in a trainer's life.

    `kind`: `abort` (the running epoch is over), `aborted` (nothing is in flight any more), `want` (a ticket
    is asked for), `epoch` (a new one names this member), `configured`, `healing`, `healed`, `settled`,
    `commit` (the first one of an epoch), `failed_step`, `fenced`, `left`.
    """

    kind: str
    epoch: int
    step: int
    monotonic: float
    """Seconds; the same clock for all processes of one machine."""
    detail: dict[str, object] = {}


class Timeline:
    """Where events are recorded and from where they are handed on."""

    def __init__(self) -> None:
        """Start without subscribers."""
        self._subscribers: list[Callable[[TimelineEvent], None]] = []

    def subscribe(self, fn: Callable[[TimelineEvent], None]) -> None:
        """Call `fn` with each event from now on."""
        self._subscribers.append(fn)

    def record(self, kind: str, epoch: int, step: int, **detail: object) -> None:
        """Hand an event to all subscribers; an error of theirs is logged, training goes on."""
        event = TimelineEvent(kind=kind, epoch=epoch, step=step, monotonic=time.monotonic(), detail=detail)
        for fn in self._subscribers:
            try:
                fn(event)
            except Exception:
                logger.exception("a timeline subscriber failed on %s", kind)
