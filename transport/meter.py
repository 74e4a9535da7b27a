"""Tell how fast a fetch goes, source by source, and which source is slower than the user wants.

Knows no threads; the caller holds the session's lock, and the time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from transport.api import Progress, SourceProgress
from transport.session import Session, Source

WINDOW_S: Final = 1.0
"""Over which a rate is taken."""


class Meter:
    """The rates of one fetch."""

    def __init__(self, session: Session, now: float) -> None:
        self._session = session
        self._at = self._next = now
        self._before: dict[str, int] = {}
        self._marks: dict[str, int] = {}
        self._busy: set[str] = set()
        self._warned: set[str] = set()

    @property
    def next_look(self) -> float:
        """Return when `slow` has something to say again."""
        return self._next + WINDOW_S

    def _everyone(self) -> Iterator[Source]:
        yield from self._session.sources
        yield from self._session.peers

    def slow(self, now: float, floor: float) -> list[tuple[str, float]]:
        """Return the sources, each once, that sent less than `floor` bytes per second, and their rates.

        Only those count that were being received from, at both ends of a window of time.
        """
        if now < self.next_look:
            return []
        result = []
        busy = {source.address for source in self._everyone() if source.num_busy and source.dead is None}
        for source in self._everyone():
            address = source.address
            got = source.bytes_received - self._marks.get(address, 0)
            rate = got / (now - self._next)
            if address in busy & self._busy - self._warned and rate < floor:
                self._warned.add(address)
                result.append((address, rate))
            self._marks[address] = source.bytes_received
        self._next, self._busy = now, busy
        return result

    def report(self, now: float, *, whole: bool = False) -> Progress:
        """Return how far the fetch has come; rates are those since the report before, or of all of it."""
        session = self._session
        assert session.manifest is not None
        span = now - (session.started if whole else self._at)
        sources = []
        received = 0
        for source in self._everyone():
            before = 0 if whole else self._before.get(source.address, 0)
            self._before[source.address] = source.bytes_received
            received += source.bytes_received - before
            sources.append(
                SourceProgress(
                    address=source.address,
                    bytes_received=source.bytes_received,
                    rate=_rate(source.bytes_received - before, span),
                    state=source.last,
                    failed=source.dead is not None,
                    joiner=source.peer is not None,
                )
            )
        self._at = now
        return Progress(
            version=session.version,
            bytes_done=session.bytes_done,
            bytes_total=session.manifest.size,
            num_sources=sum(source.dead is None for source in session.sources),
            elapsed_s=now - session.started,
            bytes_kept=session.bytes_kept,
            rate=_rate(received, span),
            sources=tuple(sources),
        )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def summary(progress: Progress) -> str:
    """Return one line for the log."""
    parts = [
        f"{source.address}{' (a joiner)' if source.joiner else ''} {_mb(source.bytes_received)} MB"
        for source in progress.sources
        if source.bytes_received
    ]
    kept = f", {_mb(progress.bytes_kept)} MB were here" if progress.bytes_kept else ""
    return (
        f"fetched version {progress.version}: {_mb(progress.bytes_total)} MB in {progress.elapsed_s:.3f} s "
        f"({progress.rate / 1e9:.2f} GB/s){kept}{': ' if parts else ''}{', '.join(parts)}"
    )


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f}"
