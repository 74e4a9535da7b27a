"""Fetch one state from many sources.

Decides which source is asked what, what becomes of one that fails, and when the fetch is over. The first
source that answers gives the manifest and the checksums (it is the reference: the result is its state,
bit for bit); all sources, it included, then give the bytes. A worker thread per connection takes extents
from the ledger; when it fails, the rest of its extent goes back. The calling thread reports progress and
keeps the deadline. No thread touches the destination's memory after `run` has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from transport.api import Progress
from transport.errors import (
    ChecksumError,
    ProtocolError,
    SourceError,
    TokenRefused,
    TransportError,
    TransportTimeout,
    VersionMismatch,
)
from transport.ledger import Ledger
from transport.link import Link
from transport.manifest import Manifest
from transport.place import Plan

log = logging.getLogger(__name__)

HEDGE_S: Final = 0.1
"""How long a source may take to give the manifest before the next one is asked as well."""
PROGRESS_S: Final = 0.1
MAX_BAD: Final = 2
"""Chunks with a wrong checksum after which a source is asked no more."""
MAX_LOST: Final = 3
"""Broken connections in a row, without a byte in between, after which a source is asked no more."""


class Over(Exception):
    """The fetch is over, for whatever reason; its threads end."""


@dataclass(slots=True)
class Source:
    """What is known of one source during a fetch."""

    address: str
    turn: int
    ready: bool = False
    """It has shown that it holds the version, in the reference's layout."""
    dead: SourceError | None = None
    last: str = "not asked yet"
    num_lost: int = 0
    num_stalls: int = 0
    num_bad: int = 0
    audit_failures: int = 0
    idle: int = 0
    """Workers that have nothing to do."""
    bytes_received: int = 0
    busy_s: float = 0.0
    resume_at: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second and connection, while busy; 0 when not known."""
        return self.bytes_received / self.busy_s if self.busy_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a fetch goes about it."""

    token: str
    make_link: Callable[[str, Callable[[], None]], Link]
    streams: int
    stall_s: float
    slow_s: float = 0.5
    """How long an extent may take before it is looked at whether an idle source would be faster."""


@dataclass(slots=True)
class Shared:
    """What the threads of one fetch share; `changed` guards all of it."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    sources: list[Source] = field(default_factory=list)
    manifest: Manifest | None = None
    reference: Source | None = None
    plan: Plan | None = None
    ledger: Ledger | None = None
    hurry: bool = False
    """Something went wrong with a source: ask the others at once."""
    num_workers: int = 0
    bytes_done: int = 0
    failure: BaseException | None = None
    over: bool = False
    links: set[Link] = field(default_factory=set)
    threads: list[threading.Thread] = field(default_factory=list)


class Fetch:
    """One fetch; `run` is called once, `abort` may be called from any other thread."""

    def __init__(
        self,
        sources: Sequence[str],
        version: str,
        into: object,
        settings: Settings,
        *,
        deadline_s: float,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        addresses = list(dict.fromkeys(sources))
        if not addresses:
            raise ValueError("a fetch needs at least one source")
        self.version, self.settings = version, settings
        self._into, self._progress = into, progress
        self._deadline_s = deadline_s
        self.started = time.monotonic()
        self.deadline = self.started + deadline_s
        self.shared = Shared(sources=[Source(address, i) for i, address in enumerate(addresses)])

    # for the calling thread

    def run(self) -> object:
        """Fetch the state and return it."""
        from transport.worker import Auditor, Worker

        try:
            for source in self.shared.sources:
                self.start_thread(Worker(self, source, first=True).run)
            manifest = self._wait_manifest()
            plan = Plan(manifest, self._into)
            with self.shared.changed:
                self.shared.ledger = self._new_ledger(manifest)
                self.shared.plan = plan
                self.shared.changed.notify_all()
            if manifest.hashes is None:
                self.start_thread(Auditor(self).run)
            self._wait_complete()
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)
        self._report()
        return plan.result()

    def abort(self, error: BaseException) -> None:
        """Make `run` raise this error at once."""
        with self.shared.changed:
            if self.shared.failure is None and not self.shared.over:
                self.shared.failure = error
            links = list(self.shared.links)
            self.shared.changed.notify_all()
        for link in links:
            link.cut()

    def _new_ledger(self, manifest: Manifest) -> Ledger:
        ledger = Ledger(manifest.size, manifest.chunk)
        if manifest.hashes is not None:
            table = bytes.fromhex(manifest.hashes)
            for number in range(manifest.num_chunks):
                ledger.expect(number, table[16 * number : 16 * number + 16])
        return ledger

    def _wait_manifest(self) -> Manifest:
        shared = self.shared
        with shared.changed:
            while shared.manifest is None:
                self._raise_if_hopeless()
                shared.changed.wait(max(0.0, self.deadline - time.monotonic()))
            return shared.manifest

    def _wait_complete(self) -> None:
        shared = self.shared
        assert shared.ledger is not None
        report_at = 0.0
        while True:
            with shared.changed:
                if shared.ledger.complete:
                    if shared.failure is not None:
                        raise shared.failure
                    return
                self._raise_if_hopeless()
                now = time.monotonic()
                wait = self.deadline - now
                if self._progress is not None:
                    wait = min(wait, report_at - now)
                if wait > 0:
                    shared.changed.wait(wait)
            if self._progress is not None and time.monotonic() >= report_at:
                self._report()
                report_at = time.monotonic() + PROGRESS_S

    def _raise_if_hopeless(self) -> None:
        shared = self.shared
        if shared.failure is not None:
            raise shared.failure
        if time.monotonic() >= self.deadline:
            raise TransportTimeout(
                f"version {self.version!r} could not be fetched within {self._deadline_s:g} s: "
                + _describe(shared.sources)
            )
        if all(source.dead is not None for source in shared.sources):
            raise _no_source_left(self.version, shared.sources)

    def _report(self) -> None:
        if self._progress is None:
            return
        shared = self.shared
        with shared.changed:
            assert shared.manifest is not None
            report = Progress(
                version=self.version,
                bytes_done=shared.bytes_done,
                bytes_total=shared.manifest.size,
                num_sources=sum(source.dead is None for source in shared.sources),
                elapsed_s=time.monotonic() - self.started,
            )
        self._progress(report)

    def _end(self, error: BaseException | None) -> None:
        """Stop all threads, and wait until none of them can write into the destination any more."""
        shared = self.shared
        with shared.changed:
            shared.over = True
            if shared.failure is None:
                shared.failure = error
            links = list(shared.links)
            shared.changed.notify_all()
        for link in links:
            link.cut()
        for thread in shared.threads:
            thread.join()

    # for the threads

    def start_thread(self, target: Callable[[], None]) -> None:
        """Start a thread that ends with this fetch, unless it is already over."""
        thread = threading.Thread(target=target, name="transport-fetch", daemon=True)
        with self.shared.changed:
            if self.shared.over:
                return
            self.shared.threads.append(thread)
            thread.start()

    def check(self) -> None:
        """Raise `Over` if a thread of this fetch should end."""
        shared = self.shared
        if shared.failure is not None or shared.over or time.monotonic() >= self.deadline:
            raise Over

    def new_link(self, source: Source) -> Link:
        """Return a link that is cut when the fetch ends."""
        link = self.settings.make_link(source.address, self.check)
        with self.shared.changed:
            self.check()
            self.shared.links.add(link)
        return link

    def drop_link(self, link: Link) -> None:
        """Close a link for good."""
        with self.shared.changed:
            self.shared.links.discard(link)
        link.close()

    def kill(self, source: Source, error: SourceError) -> None:
        """Ask a source no more."""
        with self.shared.changed:
            if source.dead is None:
                source.dead = error
                source.last = str(error)
                if not self.shared.over:
                    log.warning(
                        "source %s is out of the fetch of %s: %s", source.address, self.version, error
                    )
            self.shared.hurry = True
            self.shared.changed.notify_all()

    def settle(self, chunk: int, right: bool) -> None:
        """Put a chunk whose checksum is known to be right in its place, or have it fetched again."""
        shared = self.shared
        assert shared.ledger is not None
        assert shared.plan is not None
        start, end = shared.ledger.bounds(chunk)
        if right:
            shared.plan.accept(start, end)
            with shared.changed:
                shared.ledger.verified(chunk)
                shared.bytes_done += end - start
                if self._progress is not None or shared.ledger.complete:
                    shared.changed.notify_all()
            return
        with shared.changed:
            bad = shared.ledger.reject(chunk)
            blamed = [s for s in shared.sources if s.address in bad.suppliers]
            for source in blamed:
                source.num_bad += 1
                source.last = f"sent bytes {start} to {end} with a wrong checksum"
            shared.changed.notify_all()
        for source in blamed:
            log.warning("source %s %s, version %s", source.address, source.last, self.version)
            if source.num_bad >= MAX_BAD:
                self.kill(source, ChecksumError(f"{source.num_bad} chunks had a wrong checksum"))


def _describe(sources: Sequence[Source]) -> str:
    return "; ".join(f"{source.address}: {source.last}" for source in sources)


def _no_source_left(version: str, sources: Sequence[Source]) -> TransportError:
    """Return the error that says of each source what it did, of the most telling type."""
    kinds = {type(source.dead) for source in sources}
    kind: type[SourceError] = SourceError
    for special in (VersionMismatch, TokenRefused, ChecksumError, ProtocolError):
        if kinds == {special}:
            kind = special
    return kind(
        f"no source can give version {version!r}: {_describe(sources)}",
        {source.address: source.last for source in sources},
    )
