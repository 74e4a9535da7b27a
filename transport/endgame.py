"""Decide whether a stream with nothing left to do should help one that is slow.

Pure: no sockets, no clock, no locks (the caller holds one). It takes over chunks that the slow one has not
begun; of the chunk that it has, a second copy is fetched, and the first one that is whole counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from transport.ledger import Extent


@dataclass(eq=False, slots=True)
class Flight:
    """An extent under way: one stream alone writes to its place, up to `end`."""

    source: str
    extent: Extent
    cut: Callable[[], None]
    """Wakes the stream up, from any thread."""
    begun: float
    at: int = field(init=False)
    """All before it has arrived."""
    end: int = field(init=False)
    rival: str | None = None
    """The source that is asked for a second copy of the chunk that is being received."""
    beaten: bool = False
    """The second copy is whole: what still arrives does not count."""
    over: bool = False
    """Its stream does not write any more."""
    _marks: list[tuple[int, float]] = field(init=False)

    def __post_init__(self) -> None:
        self.at, self.end = self.extent.start, self.extent.end
        self._marks = [(self.at, self.begun)] * 2

    @property
    def left(self) -> int:
        """Return the bytes that have not arrived."""
        return self.end - self.at

    def advance(self, n: int, now: float, span_s: float) -> None:
        """Note that `n` bytes have arrived; the rate is that of the last one or two spans of time."""
        self.at += n
        if now - self._marks[1][1] >= span_s:
            self._marks = [self._marks[1], (self.at, now)]

    def left_s(self, now: float) -> float:
        """Return how long the rest takes at the rate of late, which is what counts once it crawls."""
        at, since = self._marks[0]
        got = self.at - at
        return self.left * (now - since) / got if got else float("inf")


def slowest(
    flights: Iterable[Flight], source: str, rate: float, *, chunk: int, now: float, slow_s: float
) -> Flight | None:
    """Return the flight that would last longest, if this source would bring its share of it much sooner.

    `rate` is that of the source in bytes per second, 0 when not known.
    """
    worst: Flight | None = None
    worst_s = 0.0
    for flight in flights:
        if flight.rival is not None or not flight.left or now - flight.begun < slow_s:
            continue
        if source in flight.extent.avoid:
            continue
        share = max(chunk, flight.left // 2)
        left_s, ours_s = flight.left_s(now), share / rate if rate else 0.0
        if left_s > 2 * ours_s + slow_s / 2 and left_s > worst_s:
            worst, worst_s = flight, left_s
    return worst


def split(flight: Flight, chunk: int) -> Extent | None:
    """Take the later half of the chunks that a flight has not begun; None if there are none."""
    first = flight.at // chunk + 1  # not begun, or about to be: its stream looks at `end` before each chunk
    last = -(-flight.end // chunk)
    if last <= first:
        return None
    start, end = (first + (last - first) // 2) * chunk, flight.end
    flight.end = start
    return Extent(start, end, flight.extent.avoid)
