"""Receive bytes from one source over one connection: an extent into its place, or a second copy of a chunk.

Only the stream that holds a flight writes to its place. A second copy goes to memory of its own, and into
place once that stream has let go, so that no two ever write to one place. What went wrong is judged in
`worker.py`.
"""

from __future__ import annotations

import re
import statistics
import time
from typing import Final

import numpy as np
import xxhash

from transport import visits, wire
from transport.ask import ask
from transport.endgame import Flight
from transport.ledger import Extent
from transport.link import Garbled, Link, Reply
from transport.passing import SUM
from transport.session import Over, Session, Source

SLOWER: Final = 4
"""An extent may take this many times as long as it would from a source of the median rate."""
CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class Beaten(Exception):
    """Another stream was faster."""


class Overdue(Exception):
    """The extent took too long, and another source could be asked for it."""


class Receiver:
    """The bytes of one connection."""

    def __init__(self, session: Session, source: Source) -> None:
        self.session, self.source = session, source
        self._flight: Flight | None = None
        """What is received at the moment; its bytes are this stream's unless it is a rival's."""
        self._rival = False

    def check(self) -> None:
        """Raise if there is a reason to stop waiting for the source."""
        self.session.check()
        if self.source.dead is not None:
            raise Over  # for this stream, because of what another has found out
        flight = self._flight
        if flight is None:
            return
        if flight.over if self._rival else flight.beaten:
            raise Beaten
        if not self._rival and self._overdue(flight) and self._others():
            raise Overdue

    def _others(self) -> bool:
        assert self._flight is not None
        with self.session.changed:
            return any(
                s is not self.source and s.ready and s.dead is None
                for s in self.session.sources
                if s.address not in self._flight.extent.avoid
            )

    def _overdue(self, flight: Flight) -> bool:
        """Say whether it takes too long, compared with the sources whose rates are known by now."""
        late = time.monotonic() - flight.begun - self.session.settings.stall_s
        if late < 0:
            return False
        rates = [s.rate for s in self.session.sources if s.rate and s.dead is None]
        nbytes = flight.extent.end - flight.extent.start
        return bool(rates) and late > SLOWER * nbytes / statistics.median(rates)

    def extent(self, link: Link, extent: Extent) -> None:
        """Receive an extent into its place; whatever happens, the rest of it goes back."""
        session, source = self.session, self.source
        _, ledger, _ = session.work
        flight = Flight(source.address, extent, link.cut, time.monotonic())
        avoid = extent.avoid
        with session.changed:
            session.flights.add(flight)
            source.num_busy += 1
        self._flight, self._rival = flight, False
        try:
            self._ask(link, extent.start, extent.end)
            while flight.at < flight.end:
                self._chunk(link, flight)
            if flight.end < extent.end:
                link.close()  # another stream took the rest over
        except Overdue:
            avoid |= {source.address}
            raise
        finally:
            self._flight = None
            with session.changed:
                session.flights.discard(flight)
                source.num_busy -= 1
                flight.over = True
                if not flight.beaten:
                    ledger.give_back(flight.at, flight.end, avoid)
                source.busy_s += time.monotonic() - flight.begun
                if flight.left or flight.rival is not None:
                    session.changed.notify_all()

    def _chunk(self, link: Link, flight: Flight) -> None:
        """Receive up to the end of the chunk or of the flight; check the chunk if it is complete."""
        session, source = self.session, self.source
        _, ledger, plan = session.work
        stop = min(flight.end, (flight.at // ledger.chunk + 1) * ledger.chunk)
        views = plan.views(flight.at, stop)
        while views:
            n = link.read_into(views)
            with session.changed:
                source.received(n)
                if flight.beaten:
                    raise Beaten
                complete = ledger.arrived(source.address, flight.at, flight.at + n)
                flight.advance(n, time.monotonic(), session.settings.slow_s)
            if complete is not None:
                session.check_chunk(complete)
            self.check()
            views = wire.advance(views, n)

    def second_copy(self, link: Link, flight: Flight) -> None:
        """Fetch the chunk that another stream is receiving; if it comes first, put it in place."""
        session, source = self.session, self.source
        _, ledger, plan = session.work
        number = (flight.end - 1) // ledger.chunk
        start, end = ledger.bounds(number)
        copy = np.empty(end - start, np.uint8)
        self._flight, self._rival = flight, True
        begun = time.monotonic()
        try:
            self._ask(link, start, end)
            view = copy.data
            while view:
                n = link.read_into([view])
                view = view[n:]
                with session.changed:
                    source.received(n)
                self.check()
            digest = xxhash.xxh3_128_digest(copy.data)
            with session.changed:
                if flight.over:
                    return
                expected = ledger.expected(number)
                if expected is not None and digest != expected:
                    session.blame(source, start, end)
                    return
                flight.beaten = True
            flight.cut()
            with session.changed:
                while not flight.over:
                    session.wait()
        except Beaten:
            link.close()
            return
        finally:
            self._flight = None
            with session.changed:
                flight.rival = None
                source.busy_s += time.monotonic() - begun
        at = 0
        for place in plan.views(start, end):
            place[:] = copy.data[at : at + len(place)]
            at += len(place)
        with session.changed:
            ledger.replace(number, source.address)
            right = ledger.hashed(number, digest)
        if right is not None:
            session.settle(number, right)

    def _ask(self, link: Link, start: int, end: int) -> None:
        manifest, ledger, _ = self.session.work
        selection = self.session.selection
        if selection is not None:
            query = f"rows?at={selection.spec(start, end)}"
            reply = ask(link, self.session.version, query, {"If-Match": f'"{manifest.etag}"'})
            if reply.status != 200 or reply.length != end - start:
                raise Garbled("it sent another number of bytes than asked for")
            return
        what = "data" if self.source.peer is None else "part"
        headers = {"Range": f"bytes={start}-{end - 1}", "If-Match": f'"{manifest.etag}"'}
        if self.session.sums_follow and self.source is self.session.reference:
            headers[SUM] = "1"
        if manifest.num_chunks <= visits.MAX_LISTED:
            headers[visits.HAVE] = visits.dump(ledger.verified)
        _check_range(ask(link, self.session.version, what, headers), start, end)


def _check_range(reply: Reply, start: int, end: int) -> None:
    """Make sure that the body is exactly the range."""
    found = CONTENT_RANGE.fullmatch(reply.headers.get("content-range", ""))
    fits = reply.status == 206 and reply.length == end - start and found is not None
    if not fits or found is None or (int(found[1]), int(found[2]) + 1) != (start, end):
        raise Garbled("it sent another range than the one asked for")
