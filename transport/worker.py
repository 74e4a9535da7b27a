"""The threads of a fetch: workers, one per connection, and the auditor that gets the checksums.

Each decides alone what its connection does next; what they share is in `fetch.Shared`. Whatever goes
wrong with a source is turned here into words, a pause or the end of that source.
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Final
from urllib.parse import quote

import xxhash

from transport import wire
from transport.errors import (
    MalformedState,
    ProtocolError,
    SourceError,
    TokenRefused,
    VersionMismatch,
)
from transport.fetch import HEDGE_S, MAX_LOST, Fetch, Over, Source
from transport.ledger import Extent, Ledger
from transport.link import Garbled, Link, Lost, Reply
from transport.manifest import HASH_BYTES, MAX_MANIFEST, Manifest, parse
from transport.place import Plan
from transport.routes import CHECKSUM

log = logging.getLogger(__name__)

POLL_S: Final = 2.0
"""How long one request waits at a source that has published nothing yet."""
PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0
SMALL_BODY: Final = 1 << 20
HASH_BATCH: Final = 16
CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class _NotPublished(Exception):
    """The source has nothing published at the moment."""


class _Slow(Exception):
    """An idle source would be faster."""


class _Asker:
    """What workers and the auditor have in common: asking one source, and reading its refusals."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch, self.shared = fetch, fetch.shared

    def path(self, what: str) -> str:
        return f"/v1/{quote(self.fetch.version, safe='')}/{what}"

    def ask(
        self, link: Link, method: str, what: str, headers: dict[str, str] | None = None, wait_s: float = 0.0
    ) -> Reply:
        """Send a request; return the head of the answer if it is a good one, else raise."""
        reply = link.request(method, self.path(what), headers or {}, patience_s=wait_s)
        if reply.status in (200, 206):
            return reply
        detail = link.read_body(reply, SMALL_BODY)
        if reply.status in (401, 403):
            raise TokenRefused("it refused the token")
        if reply.status == 404:
            raise _NotPublished
        if reply.status == 412:
            raise VersionMismatch(f"it serves {_other(detail, self.fetch.version)}")
        if reply.status == 503:
            raise Lost("it is busy")
        raise ProtocolError(f"it answered with status {reply.status}")

    def body(self, link: Link, reply: Reply, limit: int) -> bytes:
        """Return a body that carries its own checksum."""
        raw = link.read_body(reply, limit)
        if xxhash.xxh3_128_hexdigest(raw) != reply.headers.get(CHECKSUM):
            raise Garbled("its answer was damaged on the way")
        return raw


class Worker(_Asker):
    """Owns one connection to one source; the first worker of a source also introduces it."""

    def __init__(self, fetch: Fetch, source: Source, *, first: bool) -> None:
        super().__init__(fetch)
        self.source, self.first = source, first
        self._at = 0

    def run(self) -> None:
        """Work until the fetch is over or the source is dead."""
        link: Link | None = None
        with self.shared.changed:
            self.shared.num_workers += 1
        try:
            link = self.fetch.new_link(self.source)
            if self.first:
                self._wait_turn()
            while self._alive():
                self._once(link)
        except Over:
            pass
        except Exception as error:
            self.fetch.abort(error)  # not the source's fault: the calling thread raises it
        finally:
            if link is not None:
                self.fetch.drop_link(link)
            with self.shared.changed:
                self.shared.num_workers -= 1

    def _alive(self) -> bool:
        self.fetch.check()
        return self.source.dead is None

    def _once(self, link: Link) -> None:
        """Take the next step with the source, and judge what came of it."""
        source = self.source
        try:
            self._pause()
            if not source.ready:
                self._introduce(link)
            elif (extent := self._next_extent()) is not None:
                self._receive(link, extent)
            return
        except _NotPublished:
            if source.ready:
                self.fetch.kill(source, SourceError("it has withdrawn the version in the middle"))
            else:
                source.last = "has published nothing yet"
            self._hurry()
            return
        except _Slow:
            self._set_pause("was slower than an idle source", MAX_PAUSE_S)
        except wire.Stalled:
            source.num_stalls += 1
            self._set_pause(f"stalled (time {source.num_stalls})", PAUSE_S * 2**source.num_stalls)
        except Lost as error:
            source.num_lost += 1
            if error.refused or source.num_lost >= MAX_LOST:
                self.fetch.kill(source, SourceError(str(error)))
            self._set_pause(str(error), PAUSE_S * 2**source.num_lost)
        except Garbled as error:
            source.num_bad += 1
            if source.num_bad > MAX_LOST:
                self.fetch.kill(source, ProtocolError(str(error)))
            self._set_pause(str(error), PAUSE_S)
        except (TokenRefused, VersionMismatch, ProtocolError) as error:
            self.fetch.kill(source, error)
        link.close()
        self._hurry()

    def _hurry(self) -> None:
        with self.shared.changed:
            self.shared.hurry = True
            self.shared.changed.notify_all()

    def _set_pause(self, what: str, pause_s: float) -> None:
        with self.shared.changed:
            if self.source.dead is None:
                self.source.last = what
            self.source.resume_at = time.monotonic() + min(pause_s, MAX_PAUSE_S)

    def _pause(self) -> None:
        with self.shared.changed:
            while (left := self.source.resume_at - time.monotonic()) > 0:
                self.fetch.check()
                self.shared.changed.wait(min(left, self.fetch.deadline - time.monotonic() + 0.001))
        self.fetch.check()

    def _wait_turn(self) -> None:
        """Let the sources before this one answer first, for a moment."""
        until = self.fetch.started + HEDGE_S * self.source.turn
        with self.shared.changed:
            while self.shared.manifest is None and not self.shared.hurry:
                self.fetch.check()
                left = until - time.monotonic()
                if left <= 0:
                    return
                self.shared.changed.wait(left)

    # introduction

    def _introduce(self, link: Link) -> None:
        """Make sure that the source holds the version; get the manifest if nobody has it yet."""
        source, shared = self.source, self.shared
        wait_s = max(0.0, min(POLL_S, self.fetch.deadline - time.monotonic()))
        query = f"wait={wait_s:.3f}"
        source.last = "was asked for the manifest"
        if shared.manifest is None:
            reply = self.ask(link, "GET", f"manifest?hashes=auto&{query}", wait_s=wait_s)
            manifest = self._parse(self.body(link, reply, MAX_MANIFEST))
            with shared.changed:
                if shared.manifest is None:
                    shared.manifest, shared.reference = manifest, source
                    shared.changed.notify_all()
            if manifest.etag != shared.manifest.etag:
                raise VersionMismatch("its state has another layout than that of the other sources")
        else:
            etag = {"If-Match": f'"{shared.manifest.etag}"'}
            self.ask(link, "HEAD", f"data?{query}", etag, wait_s=wait_s)
        with shared.changed:
            while shared.plan is None:
                self.fetch.check()
                shared.changed.wait(max(0.0, self.fetch.deadline - time.monotonic()))
            source.ready, source.last = True, "is ready"
            shared.changed.notify_all()
        self._add_streams()

    def _parse(self, raw: bytes) -> Manifest:
        try:
            manifest = parse(raw)
        except MalformedState as error:
            raise ProtocolError(str(error)) from error
        if manifest.version != self.fetch.version:
            raise ProtocolError(f"its manifest is that of version {manifest.version[:200]!r}")
        return manifest

    def _add_streams(self) -> None:
        """Open more connections to this source, if there is work for them."""
        shared = self.shared
        assert shared.manifest is not None
        num_sources = len(shared.sources)
        wanted = min(
            -(-self.fetch.settings.streams // num_sources), -(-shared.manifest.num_chunks // num_sources)
        )
        for _ in range(wanted - 1):
            self.fetch.start_thread(Worker(self.fetch, self.source, first=False).run)

    # bytes

    def _next_extent(self) -> Extent | None:
        shared, source = self.shared, self.source
        with shared.changed:
            ledger = shared.ledger
            assert ledger is not None
            source.idle += 1
            try:
                while source.dead is None:
                    self.fetch.check()
                    usable = [s.address for s in shared.sources if s.ready and s.dead is None]
                    extent = ledger.take(source.address, usable, shared.num_workers)
                    if extent is not None:
                        return extent
                    shared.changed.wait(max(0.0, self.fetch.deadline - time.monotonic()))
            finally:
                source.idle -= 1
        return None

    def _receive(self, link: Link, extent: Extent) -> None:
        """Receive an extent into its place; whatever happens, the rest of it goes back."""
        shared, source = self.shared, self.source
        ledger, plan = shared.ledger, shared.plan
        assert ledger is not None and plan is not None and shared.manifest is not None
        self._at, begun, avoid = extent.start, time.monotonic(), extent.avoid
        try:
            headers = {
                "Range": f"bytes={extent.start}-{extent.end - 1}",
                "If-Match": f'"{shared.manifest.etag}"',
            }
            reply = self.ask(link, "GET", "data", headers)
            _check_range(reply, extent)
            while self._at < extent.end:
                self._receive_chunk(link, ledger, plan, extent.end)
                if self._too_slow(extent, begun):
                    raise _Slow
        except _Slow:
            avoid |= {source.address}
            raise
        finally:
            with shared.changed:
                ledger.give_back(self._at, extent.end, avoid)
                source.busy_s += time.monotonic() - begun
                if self._at < extent.end:
                    shared.changed.notify_all()

    def _receive_chunk(self, link: Link, ledger: Ledger, plan: Plan, end: int) -> None:
        """Receive up to the end of the chunk, or as much as comes at once; check the chunk if complete."""
        shared, source = self.shared, self.source
        stop = min(end, (self._at // ledger.chunk + 1) * ledger.chunk)
        views = plan.views(self._at, stop)
        entered = time.monotonic()
        while views:
            n = link.read_into(views)
            with shared.changed:
                complete = ledger.arrived(source.address, self._at, self._at + n)
                self._at += n
                source.bytes_received += n
                source.num_lost = source.num_stalls = 0
                source.last = "was sending"
            if complete is not None:
                self._check_chunk(ledger, plan, complete)
                return
            self.fetch.check()
            views = wire.advance(views, n)
            if time.monotonic() - entered > self.fetch.settings.slow_s:
                return

    def _check_chunk(self, ledger: Ledger, plan: Plan, chunk: int) -> None:
        digest = xxhash.xxh3_128()
        for view in plan.views(*ledger.bounds(chunk)):
            digest.update(view)
        with self.shared.changed:
            right = ledger.hashed(chunk, digest.digest())
        if right is not None:
            self.fetch.settle(chunk, right)

    def _too_slow(self, extent: Extent, begun: float) -> bool:
        """Say whether a source that has nothing to do would bring the rest of the extent much sooner."""
        now = time.monotonic()
        elapsed, left = now - begun, extent.end - self._at
        if elapsed < self.fetch.settings.slow_s or not left:
            return False
        with self.shared.changed:
            idle = [
                s
                for s in self.shared.sources
                if s is not self.source and s.idle and s.ready and s.dead is None and s.resume_at <= now
            ]
            if all(s.address in extent.avoid for s in idle):
                return False
            mine = (self._at - extent.start) / elapsed
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


def _other(detail: bytes, version: str) -> str:
    try:
        latest = json.loads(detail)["latest"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another version"
    return "another layout of this version" if latest == version else f"version {str(latest)[:200]!r}"


class Auditor(_Asker):
    """Gets the checksums of all chunks, from the reference as long as it lives."""

    def run(self) -> None:
        """Work until all checksums are known or the fetch is over."""
        link: Link | None = None
        source: Source | None = None
        shared, ledger = self.shared, self.shared.ledger
        try:
            while True:
                with shared.changed:
                    assert ledger is not None
                    wanted = ledger.next_unknown(HASH_BATCH)
                    if wanted is None:
                        return
                    best = self._choose()
                if link is None or best is not source:
                    if link is not None:
                        self.fetch.drop_link(link)
                    link, source = self.fetch.new_link(best), best
                self._get(link, best, ledger, *wanted)
        except Over:
            pass
        except Exception as error:
            self.fetch.abort(error)
        finally:
            if link is not None:
                self.fetch.drop_link(link)

    def _choose(self) -> Source:
        """Wait for a source that is up; prefer the reference."""
        shared = self.shared
        while True:
            self.fetch.check()
            up = [s for s in shared.sources if s.ready and s.dead is None]
            if up:
                return min(up, key=lambda s: (s.audit_failures, s is not shared.reference, s.turn))
            shared.changed.wait(max(0.0, self.fetch.deadline - time.monotonic()))

    def _get(self, link: Link, source: Source, ledger: Ledger, first: int, last: int) -> None:
        try:
            reply = self.ask(link, "GET", f"hashes?first={first}&last={last}")
            raw = self.body(link, reply, SMALL_BODY)
            if len(raw) != HASH_BYTES * (last - first):
                raise Garbled("it sent another number of checksums than asked for")
        except (_NotPublished, Lost, Garbled, wire.Stalled) as error:
            # Whether the source is dead is for its workers to find out.
            log.info("no checksums from source %s: %r", source.address, error)
            link.close()
            with self.shared.changed:
                source.audit_failures += 1
                self.shared.changed.wait(PAUSE_S)
            return
        except SourceError as error:
            self.fetch.kill(source, error)
            return
        for number in range(first, last):
            at = HASH_BYTES * (number - first)
            with self.shared.changed:
                right = ledger.expect(number, raw[at : at + HASH_BYTES])
            if right is not None:
                self.fetch.settle(number, right)
