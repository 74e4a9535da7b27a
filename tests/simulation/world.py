"""Virtual time: a queue of events, one source of chance, and the story of what happened.

Knows nothing of members or etcd. Two runs with one seed are equal to the last event.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Violation(Exception):
    """An invariant of the design does not hold."""

    def __init__(self, invariant: str, what: str) -> None:
        """Name the invariant (`I1` to `I8`) and say what was seen."""
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


@dataclass
class World:
    """The clock, the queue and the story."""

    seed: object = 0
    now: float = 0.0
    num_events: int = 0
    keep_story: bool = False
    story: list[tuple[float, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"simulation {self.seed}")
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        """Call something `delay` seconds from now."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, call, args))

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Run up to a time, or until `stop` says so after some event; say whether it did."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, call, args = heapq.heappop(self._heap)
            self.num_events += 1
            call(*args)
            if stop():
                return True
        self.now = until
        return False

    def say(self, who: str, what: str, *args: object) -> None:
        """Add a line to the story."""
        if self.keep_story:
            self.story.append((self.now, who, what % args if args else what))

    def chance(self, probability: float) -> bool:
        """Throw a coin; costs no randomness when the answer is certain."""
        return probability > 0 and self.rng.random() < probability

    def between(self, low: float, high: float) -> float:
        """Draw a time."""
        return low + (high - low) * self.rng.random()


class Pipe:
    """A connection between two processes of one machine: fast, and first in first out."""

    def __init__(self, world: World) -> None:
        """Begin empty."""
        self.world = world
        self.slowest = 0.003
        self._due = 0.0

    def send(self, call: Callable[..., None], *args: Any) -> None:
        """Deliver a message: call something a moment from now."""
        self._due = max(self._due, self.world.now + self.world.between(0.0005, self.slowest))
        self.world.after(self._due - self.world.now, call, *args)


def tell(story: list[tuple[float, str, str]]) -> str:
    """Format a story, one line each: when, who, what."""
    width = max((len(who) for _, who, _ in story), default=0)
    return "\n".join(f"{when:9.3f}  {who:<{width}}  {what}" for when, who, what in story)
