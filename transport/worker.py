"""Get bytes from one source over one connection.

Decides what the connection does next. Whatever goes wrong with the source is turned here into words, a
pause, or the end of that source; what several workers share is in `session.py`.
"""

from __future__ import annotations

import os
import time
from typing import Final

import numpy as np

from transport import wire
from transport.ask import SMALL_BODY, NotPublished, OtherLayout, ask, checked_body
from transport.endgame import Flight, slowest, split
from transport.errors import MalformedState, ProtocolError, SourceError, TokenRefused, VersionMismatch
from transport.ledger import Extent, Ledger
from transport.link import Garbled, Link, Lost
from transport.manifest import MAX_MANIFEST, Manifest, parse
from transport.receive import Beaten, Overdue, Receiver
from transport.session import Over, Session, Source
from transport.swarm import Peer

POLL_S: Final = 2.0
"""How long one request waits at a source that has published nothing yet."""
PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0
HEDGE_S: Final = 0.1
"""How long a source may take to give the manifest before the next one is asked as well."""
MAX_LOST: Final = 3
"""Broken connections in a row, without a byte in between, after which a source is asked no more."""
WATCH_S: Final = 0.01
"""Times the number of other joiners: between two looks at what one has. It answers once it has more."""
VERSION_GRACE_S: Final = 0.5
"""How long a source may still have another version published: it may be about to change."""


class Worker:
    """Owns one connection to one source; the first worker of a source also introduces it."""

    def __init__(self, session: Session, source: Source, *, first: bool) -> None:
        self.session = session
        self.source, self.first = source, first
        self._receiver = Receiver(session, source)
        self._link: Link | None = None

    def run(self) -> None:
        """Work until the fetch is over or the source is dead."""
        with self.session.changed:
            self.session.num_workers += 1
        try:
            if self.first and self.source.peer is None:
                self._wait_turn()
            while self._alive():
                if self._link is None:
                    self._link = self.session.new_link(self.source, self._receiver.check)
                self._once(self._link)
        except Over:
            pass
        except Exception as error:
            self.session.fail(error)  # not the source's fault: the calling thread raises it
        finally:
            self._drop_link()
            with self.session.changed:
                self.session.num_workers -= 1

    def _drop_link(self) -> None:
        if self._link is not None:
            self.session.drop_link(self._link)
            self._link = None

    def _alive(self) -> bool:
        self.session.check()
        return self.source.dead is None

    def _once(self, link: Link) -> None:
        """Take the next step with the source, and judge what came of it."""
        session, source = self.session, self.source
        try:
            self._pause()
            if self.first and source.peer is not None:
                self._watch(link, source.peer)
            elif not source.ready:
                self._introduce(link)
            elif isinstance(job := self._next_job(), Extent):
                self._receiver.extent(link, job)
            elif job is not None:
                self._receiver.second_copy(link, job)
            return
        except NotPublished:
            if source.ready:
                session.kill(source, SourceError("it has withdrawn the version in the middle"))
            session.note(source, "has published nothing yet", PAUSE_S)
            return
        except Beaten:
            session.note(source, "was slower than an idle source", MAX_PAUSE_S)
            self._drop_link()  # it has been cut, for good
        except Overdue:
            session.note(source, "took too long over its share", MAX_PAUSE_S)
        except wire.Stalled:
            source.total_stalls += 1
            source.num_stalls += self._is_news()
            session.note(
                source, f"was silent for {session.settings.stall_s:g} s", self._pause_s(source.num_stalls)
            )
        except Lost as error:
            source.total_lost += 1
            source.num_lost += self._is_news()
            if error.refused or source.num_lost >= MAX_LOST:
                session.kill(source, SourceError(str(error)))
            session.note(source, str(error), self._pause_s(source.num_lost))
        except Garbled as error:
            source.num_bad += 1
            if source.num_bad > MAX_LOST:
                session.kill(source, ProtocolError(str(error)))
            session.note(source, str(error), PAUSE_S)
        except VersionMismatch as error:
            late = time.monotonic() > session.started + VERSION_GRACE_S
            if source.ready or late or isinstance(error, OtherLayout):
                session.kill(source, error)
            session.note(source, str(error), PAUSE_S)
        except (TokenRefused, ProtocolError) as error:
            session.kill(source, error)
        link.close()

    def _is_news(self) -> bool:
        """Say whether a trouble is new, not the one that another connection to the source just had."""
        return time.monotonic() >= self.source.resume_at

    @staticmethod
    def _pause_s(times: int) -> float:
        return min(MAX_PAUSE_S, PAUSE_S * float(1 << min(times, 10)))

    def _pause(self) -> None:
        with self.session.changed:
            while (left := self.source.resume_at - time.monotonic()) > 0:
                self.session.check()
                self.session.changed.wait(min(left, self.session.deadline - time.monotonic() + 0.001))
        self.session.check()

    def _wait_turn(self) -> None:
        """Let the sources before this one answer first, for a moment, and send, if they are enough."""
        until = self.session.started + HEDGE_S * self.source.turn
        with self.session.changed:
            while not (self.session.hurry or self._is_needed()):
                self.session.check()
                left = until - time.monotonic()
                if left <= 0:
                    return
                self.session.changed.wait(left)

    def _is_needed(self) -> bool:
        manifest = self.session.manifest
        return manifest is not None and self.source.turn < manifest.num_chunks

    # introduction

    def _introduce(self, link: Link) -> None:
        """Make sure that the source holds the version; get the manifest if nobody has it yet."""
        session, source = self.session, self.source
        wait_s = max(0.0, min(POLL_S, self.session.deadline - time.monotonic()))
        query = f"wait={wait_s:.3f}"
        source.last = "was asked for the manifest"
        if session.manifest is None:
            reply = ask(link, session.version, f"manifest?hashes=auto&{query}", wait_s=wait_s)
            manifest = self._parse(checked_body(link, reply, MAX_MANIFEST))
            with session.changed:
                if session.manifest is None:
                    session.manifest, session.reference = manifest, source
                    session.changed.notify_all()
            if manifest.etag != session.manifest.etag:
                raise OtherLayout("its state has another layout than that of the other sources")
        else:
            etag = {"If-Match": f'"{session.manifest.etag}"'}
            ask(link, session.version, f"data?{query}", etag, method="HEAD", wait_s=wait_s)
        with session.changed:
            while not session.begun:
                session.wait()
            source.ready, source.last = True, "is ready"
            session.changed.notify_all()
        self._add_streams(link)

    def _parse(self, raw: bytes) -> Manifest:
        try:
            manifest = parse(raw)
        except MalformedState as error:
            raise ProtocolError(str(error)) from error
        if manifest.version != self.session.version:
            raise ProtocolError(f"its manifest is that of version {manifest.version[:200]!r}")
        return manifest

    def _add_streams(self, link: Link) -> None:
        """Open more connections to this source, if there is work for them."""
        session = self.session
        assert session.manifest is not None
        num_sources = len(session.sources)
        wanted = min(session.settings.streams, session.manifest.num_chunks)
        if link.is_local:
            wanted = min(wanted, len(os.sched_getaffinity(0)))  # more would take the caches from each other
        wanted = -(-wanted // num_sources)
        for _ in range(wanted - 1):
            self.session.start_thread(Worker(self.session, self.source, first=False).run)

    def _watch(self, link: Link, peer: Peer) -> None:
        """Keep an eye on what another joiner has; others of its workers get the bytes."""
        session, source = self.session, self.source
        manifest, _, _ = session.work
        known = int(peer.have.sum()) if source.ready else -1
        wait_s = max(0.0, min(POLL_S, session.deadline - time.monotonic()))
        query = f"have?known={known}&wait={wait_s:.3f}"
        reply = ask(link, session.version, query, wait_s=wait_s)
        raw = checked_body(link, reply, SMALL_BODY)
        if reply.headers.get("etag") != f'"{manifest.etag}"':
            raise OtherLayout("its state has another layout than that of the sources")
        if len(raw) != -(-manifest.num_chunks // 8):
            raise Garbled("it does not say of each chunk whether it has it")
        have = np.unpackbits(np.frombuffer(raw, np.uint8), count=manifest.num_chunks).astype(np.bool_)
        with session.changed:
            peer.update(have, time.monotonic())
            new, source.ready = not source.ready, True
            session.changed.notify_all()
        if new:
            session.start_thread(Worker(session, source, first=False).run)
        session.pause(float("inf") if have.all() else WATCH_S * len(session.peers))

    # bytes

    def _next_job(self) -> Extent | Flight | None:
        """Wait for bytes to fetch; at the end, help a stream that is slow."""
        session, source = self.session, self.source
        slow_s = session.settings.slow_s
        with session.changed:
            _, ledger, _ = session.work
            while source.dead is None:
                session.check()
                usable = [s.address for s in session.sources if s.ready and s.dead is None]
                allowed = session.allowed(source, time.monotonic())
                extent = ledger.take(source.address, usable, session.num_workers, allowed)
                if extent is not None:
                    return extent
                flight = slowest(
                    [flight for flight in session.flights if self._has(flight, ledger)],
                    source.address,
                    source.rate,
                    chunk=ledger.chunk,
                    now=time.monotonic(),
                    slow_s=slow_s,
                )
                if flight is not None and (job := self._share(flight, ledger)) is not None:
                    return job
                session.wait(slow_s / 2)
        return None

    def _has(self, flight: Flight, ledger: Ledger) -> bool:
        peer = self.source.peer
        if peer is None:
            return True
        return bool(peer.have[flight.at // ledger.chunk : -(-flight.end // ledger.chunk)].all())

    def _share(self, flight: Flight, ledger: Ledger) -> Extent | Flight | None:
        """Take over what a slow stream has not begun, else race it for its last chunk."""
        extent = split(flight, ledger.chunk)
        if extent is not None:
            return extent
        if ledger.missing((flight.end - 1) // ledger.chunk) != flight.left:
            return None  # a third one is sending another part of it
        flight.rival = self.source.address
        return flight
