"""What the threads of one fetch share: the sources and how they behave, the ledger, the end.

Decides when a source is given up and what becomes of a chunk once its checksum is known. Opens no
connection itself. `Session.changed` guards all fields.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from transport.crew import Crew, Task
from transport.endgame import Flight
from transport.errors import ChecksumError, SourceError
from transport.ledger import Ledger, Mask
from transport.link import Link
from transport.manifest import Manifest
from transport.place import Plan
from transport.reshard import Selection
from transport.share import Share
from transport.swarm import Peer, Swarm

log = logging.getLogger(__name__)

MAX_BAD: Final = 2
"""Chunks with a wrong checksum after which a source is asked no more."""
END_WAIT_S: Final = 5.0


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
    total_lost: int = 0
    total_stalls: int = 0
    num_bad: int = 0
    audit_failures: int = 0
    num_busy: int = 0
    """Connections on which something is being received."""
    bytes_received: int = 0
    busy_s: float = 0.0
    resume_at: float = 0.0
    peer: Peer | None = None
    """It is no source of the whole, but a joiner that serves what it has verified."""

    def received(self, nbytes: int) -> None:
        """Note bytes that it has sent."""
        self.bytes_received += nbytes
        self.num_lost = self.num_stalls = 0
        if self.dead is None:
            self.last = "was sending"

    @property
    def report(self) -> str:
        """Say what it did, for an error message."""
        counts = {"times silent": self.total_stalls, "connections lost": self.total_lost}
        details = [f"{self.bytes_received} bytes received"] if self.bytes_received else []
        details += [f"{count} {what}" for what, count in counts.items() if count > 1 or (count and details)]
        return f"{self.last} ({', '.join(details)})" if details else self.last

    @property
    def rate(self) -> float:
        """Bytes per second and connection, while busy; 0 when not known."""
        return self.bytes_received / self.busy_s if self.busy_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a fetch goes about it."""

    make_link: Callable[[str, Callable[[], None]], Link]
    crew: Crew
    streams: int
    stall_s: float
    min_rate: float = 0.0
    """A source that sends fewer bytes per second is warned of."""
    report_chunks: bool = False
    """Wake the calling thread for each chunk, because somebody wants to see the progress."""
    slow_s: float = 0.5
    """How long an extent may take before it is looked at whether an idle stream would be faster."""


class Session:
    """The shared state of one fetch. Its methods may be called from any thread."""

    def __init__(self, sources: Sequence[str], version: str, settings: Settings, deadline_s: float) -> None:
        self.version, self.settings = version, settings
        self.started = time.monotonic()
        self.deadline = self.started + deadline_s
        self.changed = threading.Condition()
        self.sources = [Source(address, turn) for turn, address in enumerate(dict.fromkeys(sources))]
        self.peers: list[Source] = []
        """Others that fetch the same, and serve what they have."""
        self.swarm: Swarm | None = None
        self.share: Share | None = None
        """What is served to them."""
        self.manifest: Manifest | None = None
        self.reference: Source | None = None
        """The source that gave the manifest."""
        self.plan: Plan | None = None
        self.selection: Selection | None = None
        """What is fetched is this part of the sources' state."""
        self.ledger: Ledger | None = None
        self.flights: set[Flight] = set()
        """The extents under way over HTTP."""
        self.hurry = False
        """Something went wrong with a source: ask the others at once."""
        self.sums_follow = False
        """Checksums are asked for after the bytes, so that the reference computes them in passing."""
        self.begun = False
        """Bytes may be asked for."""
        self.num_workers = 0
        self.bytes_done = 0
        """Verified and in place, whether received or kept."""
        self.bytes_kept = 0
        """Of these, what was there before the fetch."""
        self.failure: BaseException | None = None
        self.over = False
        self._links: set[Link] = set()
        self._tasks: list[Task] = []

    @property
    def work(self) -> tuple[Manifest, Ledger, Plan]:
        """Return manifest, ledger and plan, once they exist."""
        assert self.manifest is not None
        assert self.ledger is not None
        assert self.plan is not None
        return self.manifest, self.ledger, self.plan

    def allowed(self, source: Source, now: float) -> Mask | None:
        """Return, with `changed` held, which chunks a source is to be asked for; None stands for all."""
        if self.swarm is None:
            return None
        if source.peer is not None:
            return source.peer.have
        _, ledger, _ = self.work
        for peer in self.peers:
            if peer.peer is not None:
                peer.peer.good = peer.dead is None and not peer.num_stalls and not peer.num_lost
                peer.peer.chunk_s = ledger.chunk / peer.rate if peer.rate else 0.0
        rate = max(each.rate for each in self.sources)
        wanted = self.swarm.wanted(
            [peer.peer for peer in self.peers if peer.peer is not None],
            ledger.open,
            now,
            ledger.chunk / rate if rate else 0.0,
        )
        return wanted | ledger.avoided

    def start_thread(self, target: Callable[[], None]) -> None:
        """Start a thread that ends with this fetch, unless it is already over."""
        with self.changed:
            if not self.over:
                self._tasks.append(self.settings.crew.start(target, "transport-fetch"))

    def check(self) -> None:
        """Raise `Over` if a thread of this fetch should end."""
        if self.failure is not None or self.over or time.monotonic() >= self.deadline:
            raise Over

    def wait(self, limit_s: float = float("inf")) -> None:
        """Wait, with `changed` held, for a change, the deadline, or at most `limit_s`; then check."""
        self.check()
        left = min(limit_s, self.deadline - time.monotonic())
        if left > 0:
            self.changed.wait(left)
        self.check()

    def pause(self, seconds: float) -> None:
        """Do nothing for a while, or until the fetch is over."""
        until = time.monotonic() + seconds
        with self.changed:
            while (left := until - time.monotonic()) > 0:
                self.wait(left)

    def fail(self, error: BaseException) -> None:
        """Let the fetch fail with this error, unless it is over already."""
        with self.changed:
            if self.failure is None and not self.over:
                self.failure = error
        self._interrupt()

    def end(self) -> None:
        """Stop all threads, and wait until none of them can write into the destination any more."""
        self.over = True
        self._interrupt()
        for task in self._tasks:
            # A link that was cut receives nothing, even if its thread is still resolving a name.
            if not task.wait(END_WAIT_S):
                log.warning("a thread of the fetch of %s is still ending", self.version)

    def _interrupt(self) -> None:
        with self.changed:
            links = list(self._links)
            self.changed.notify_all()
        for link in links:
            link.cut()

    def new_link(self, source: Source, check: Callable[[], None] | None = None) -> Link:
        """Return a link that is cut when the fetch ends."""
        link = self.settings.make_link(source.address, check or self.check)
        with self.changed:
            self.check()
            self._links.add(link)
        return link

    def drop_link(self, link: Link) -> None:
        """Close a link for good."""
        with self.changed:
            self._links.discard(link)
        link.close()

    def note(self, source: Source, what: str, pause_s: float = 0.0) -> None:
        """Remember what a source did last, and leave it in peace for a while."""
        with self.changed:
            if source.dead is None:
                source.last = what
            if pause_s:
                source.resume_at = time.monotonic() + pause_s
            self.hurry = True
            self.changed.notify_all()

    def kill(self, source: Source, error: SourceError) -> None:
        """Ask a source no more."""
        with self.changed:
            if source.dead is None:
                source.dead, source.last = error, str(error)
                if not self.over:
                    log.warning(
                        "source %s is out of the fetch of %s: %s", source.address, self.version, error
                    )
            self.hurry = True
            self.changed.notify_all()

    def check_chunk(self, chunk: int) -> None:
        """Hash a chunk that is there, and settle it if its checksum is known already."""
        _, ledger, plan = self.work
        digest = xxhash.xxh3_128()
        for view in plan.views(*ledger.bounds(chunk)):
            digest.update(view)
        with self.changed:
            right = ledger.hashed(chunk, digest.digest())
            if right is None and self.sums_follow:
                self.changed.notify_all()
        if right is not None:
            self.settle(chunk, right)

    def settle(self, chunk: int, right: bool) -> None:
        """Put a chunk whose checksum is known to be right in its place, or have it fetched again."""
        _, ledger, plan = self.work
        start, end = ledger.bounds(chunk)
        if right:
            plan.accept(start, end)
            if self.share is not None:
                self.share.add(chunk)
            with self.changed:
                ledger.verify(chunk)
                self.bytes_done += end - start
                if ledger.complete or self.settings.report_chunks:
                    self.changed.notify_all()
            return
        with self.changed:
            suppliers = ledger.reject(chunk)
            blamed = [s for s in (*self.sources, *self.peers) if s.address in suppliers]
            self.changed.notify_all()
        log.warning(
            "bytes %d to %d of version %s from %s have a wrong checksum",
            start,
            end,
            self.version,
            " and ".join(source.address for source in blamed),
        )
        if len(blamed) == 1:
            self.blame(blamed[0], start, end)
        # Else nobody knows whose part was wrong: the next time it comes from one source.

    def keep(self, chunk: int) -> None:
        """Note that a chunk was here, and right, before anything was received."""
        _, ledger, plan = self.work
        start, end = ledger.bounds(chunk)
        plan.accept(start, end)
        if self.share is not None:
            self.share.add(chunk)
        with self.changed:
            ledger.keep(chunk)
            self.bytes_done += end - start
            self.bytes_kept += end - start

    def blame(self, source: Source, start: int, end: int) -> None:
        """Note that a source has sent a chunk with a wrong checksum."""
        with self.changed:
            source.num_bad += 1
        self.note(source, f"sent bytes {start} to {end} with a wrong checksum")
        if source.num_bad >= MAX_BAD:
            self.kill(source, ChecksumError(f"it sent {source.num_bad} chunks with a wrong checksum"))
