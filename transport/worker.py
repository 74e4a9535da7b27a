"""Get bytes from one source over one connection.

Decides what the connection does next. Whatever goes wrong with the source is turned here into words, a
pause, or the end of that source; what several workers share is in `session.py`.
"""

from __future__ import annotations

import re
import time
from typing import Final

import xxhash

from transport import wire
from transport.ask import NotPublished, OtherLayout, ask, checked_body
from transport.errors import MalformedState, ProtocolError, SourceError, TokenRefused, VersionMismatch
from transport.ledger import Extent, Ledger
from transport.link import Garbled, Link, Lost, Reply
from transport.manifest import MAX_MANIFEST, Manifest, parse
from transport.place import Plan
from transport.session import Over, Session, Source

POLL_S: Final = 2.0
"""How long one request waits at a source that has published nothing yet."""
PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0
HEDGE_S: Final = 0.1
"""How long a source may take to give the manifest before the next one is asked as well."""
MAX_LOST: Final = 3
"""Broken connections in a row, without a byte in between, after which a source is asked no more."""
VERSION_GRACE_S: Final = 0.5
"""How long a source may still have another version published: it may be about to change."""
CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class _Slow(Exception):
    """An idle source would be faster."""


class Worker:
    """Owns one connection to one source; the first worker of a source also introduces it."""

    def __init__(self, session: Session, source: Source, *, first: bool) -> None:
        self.session = session
        self.source, self.first = source, first
        self._extent: Extent | None = None
        self._at = 0
        """Position in the extent: all before it has arrived."""
        self._mark, self._marked_at = 0, 0.0
        """An earlier position, and when it was reached."""

    def run(self) -> None:
        """Work until the fetch is over or the source is dead."""
        link: Link | None = None
        with self.session.changed:
            self.session.num_workers += 1
        try:
            link = self.session.new_link(self.source, self._check)
            if self.first:
                self._wait_turn()
            while self._alive():
                self._once(link)
        except Over:
            pass
        except Exception as error:
            self.session.fail(error)  # not the source's fault: the calling thread raises it
        finally:
            if link is not None:
                self.session.drop_link(link)
            with self.session.changed:
                self.session.num_workers -= 1

    def _check(self) -> None:
        """Raise if there is a reason to stop waiting for the source."""
        self.session.check()
        if self.source.dead is not None:
            raise Over  # for this worker, because of what another has found out
        if self._extent is not None and self._too_slow(self._extent):
            raise _Slow

    def _alive(self) -> bool:
        self.session.check()
        return self.source.dead is None

    def _once(self, link: Link) -> None:
        """Take the next step with the source, and judge what came of it."""
        session, source = self.session, self.source
        try:
            self._pause()
            if not source.ready:
                self._introduce(link)
            elif (extent := self._next_extent()) is not None:
                self._receive(link, extent)
            return
        except NotPublished:
            if source.ready:
                session.kill(source, SourceError("it has withdrawn the version in the middle"))
            session.note(source, "has published nothing yet", PAUSE_S)
            return
        except _Slow:
            session.note(source, "was slower than an idle source", MAX_PAUSE_S)
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
        """Let the sources before this one answer first, for a moment."""
        until = self.session.started + HEDGE_S * self.source.turn
        with self.session.changed:
            while self.session.manifest is None and not self.session.hurry:
                self.session.check()
                left = until - time.monotonic()
                if left <= 0:
                    return
                self.session.changed.wait(left)

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
            while session.plan is None:
                session.wait()
            source.ready, source.last = True, "is ready"
            session.changed.notify_all()
        self._add_streams()

    def _parse(self, raw: bytes) -> Manifest:
        try:
            manifest = parse(raw)
        except MalformedState as error:
            raise ProtocolError(str(error)) from error
        if manifest.version != self.session.version:
            raise ProtocolError(f"its manifest is that of version {manifest.version[:200]!r}")
        return manifest

    def _add_streams(self) -> None:
        """Open more connections to this source, if there is work for them."""
        session = self.session
        assert session.manifest is not None
        num_sources = len(session.sources)
        wanted = -(-min(session.settings.streams, session.manifest.num_chunks) // num_sources)
        for _ in range(wanted - 1):
            self.session.start_thread(Worker(self.session, self.source, first=False).run)

    # bytes

    def _next_extent(self) -> Extent | None:
        session, source = self.session, self.source
        with session.changed:
            _, ledger, _ = session.work
            source.idle += 1
            try:
                while source.dead is None:
                    self.session.check()
                    usable = [s.address for s in session.sources if s.ready and s.dead is None]
                    extent = ledger.take(source.address, usable, session.num_workers)
                    if extent is not None:
                        return extent
                    session.wait()
            finally:
                source.idle -= 1
        return None

    def _receive(self, link: Link, extent: Extent) -> None:
        """Receive an extent into its place; whatever happens, the rest of it goes back."""
        session, source = self.session, self.source
        manifest, ledger, plan = session.work
        avoid = extent.avoid
        begun = time.monotonic()
        self._extent, self._at = extent, extent.start
        self._mark, self._marked_at = extent.start, begun
        try:
            headers = {
                "Range": f"bytes={extent.start}-{extent.end - 1}",
                "If-Match": f'"{manifest.etag}"',
            }
            reply = ask(link, session.version, "data", headers)
            _check_range(reply, extent)
            while self._at < extent.end:
                self._receive_chunk(link, ledger, plan, extent.end)
        except _Slow:
            avoid |= {source.address}
            raise
        finally:
            self._extent = None
            with session.changed:
                ledger.give_back(self._at, extent.end, avoid)
                source.busy_s += time.monotonic() - begun
                if self._at < extent.end:
                    session.changed.notify_all()

    def _receive_chunk(self, link: Link, ledger: Ledger, plan: Plan, end: int) -> None:
        """Receive up to the end of the chunk or of the extent; check the chunk if it is complete."""
        source = self.source
        stop = min(end, (self._at // ledger.chunk + 1) * ledger.chunk)
        views = plan.views(self._at, stop)
        while views:
            n = link.read_into(views)
            with self.session.changed:
                complete = ledger.arrived(source.address, self._at, self._at + n)
                self._at += n
                source.bytes_received += n
                source.num_lost = source.num_stalls = 0
                if source.dead is None:
                    source.last = "was sending"
            if complete is not None:
                self._check_chunk(ledger, plan, complete)
            self._check()
            views = wire.advance(views, n)

    def _check_chunk(self, ledger: Ledger, plan: Plan, chunk: int) -> None:
        digest = xxhash.xxh3_128()
        for view in plan.views(*ledger.bounds(chunk)):
            digest.update(view)
        with self.session.changed:
            right = ledger.hashed(chunk, digest.digest())
        if right is not None:
            self.session.settle(chunk, right)

    def _too_slow(self, extent: Extent) -> bool:
        """Say whether a source that has nothing to do would bring the rest of the extent much sooner."""
        now, left = time.monotonic(), extent.end - self._at
        elapsed = now - self._marked_at
        if elapsed < self.session.settings.slow_s or not left:
            return False
        # Of late, not since the beginning: what a source did before it began to crawl does not count.
        mine = (self._at - self._mark) / elapsed
        self._mark, self._marked_at = self._at, now
        with self.session.changed:
            idle = [
                s
                for s in self.session.sources
                if s is not self.source and s.idle and s.ready and s.dead is None and s.resume_at <= now
            ]
            if all(s.address in extent.avoid for s in idle):
                return False  # there is none, or none that may be asked
            theirs = max(s.rate for s in idle)
        if not mine or not theirs:
            return not mine or left / mine > 2.0
        return left / mine > 2 * left / theirs + 0.25


def _check_range(reply: Reply, extent: Extent) -> None:
    """Make sure that the body is exactly the extent."""
    found = CONTENT_RANGE.fullmatch(reply.headers.get("content-range", ""))
    fits = reply.status == 206 and reply.length == extent.end - extent.start and found is not None
    if not fits or found is None or (int(found[1]), int(found[2]) + 1) != (extent.start, extent.end):
        raise Garbled("it sent another range than the one asked for")
