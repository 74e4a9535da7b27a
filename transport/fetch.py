"""Fetch one state from many sources.

The first source that answers gives the manifest and the checksums (it is the reference: the result is its
state, bit for bit); all sources, it included, then give the bytes. A worker thread per connection takes
extents from the ledger; when it fails, the rest of its extent goes back. The calling thread, here, makes
the plan, reports progress, keeps the deadline, and decides when the fetch is over. No thread touches the
destination's memory after `run` has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from transport.api import Progress
from transport.auditor import Auditor
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
from transport.manifest import HASH_BYTES, Manifest
from transport.meter import Meter, summary
from transport.place import Plan
from transport.reshard import Selection
from transport.reuse import Reuse
from transport.session import Session, Settings, Source
from transport.share import Share
from transport.swarm import Peer, Swarm, neighbours
from transport.worker import Worker

log = logging.getLogger(__name__)

PROGRESS_S: Final = 0.1
MIN_SHARE: Final = 2
"""Chunks per joiner from which it is worth it that they serve each other."""


class Ahead(Protocol):
    """Another way for the bytes, tried first: it has all in hand, and gives back what did not come."""

    def start(self, session: Session) -> None:
        """Begin, in threads of the session."""

    def wait_ended(self) -> None:
        """Return once nothing can write into the destination any more."""


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
        progress: Callable[[Progress], None] | None = None,
        make_plan: Callable[[Manifest], Plan] | None = None,
        select: Callable[[Manifest], Selection] | None = None,
        ahead: Ahead | None = None,
        joiners: Sequence[str] = (),
        reuse: bool = False,
        own: str = "",
        serve: Callable[[Share], None] | None = None,
        quiet: bool = False,
    ) -> None:
        if not sources:
            raise ValueError("a fetch needs at least one source")
        self.version = version
        self._progress, self._deadline_s, self._quiet = progress, deadline_s, quiet
        self._ahead, self._select = ahead, select
        self._make_plan = make_plan or (lambda manifest: Plan(manifest, into))
        self._session = Session(sources, version, settings, deadline_s)
        self._meter = Meter(self._session, self._session.started)
        self._joiners, self._own, self._serve, self._reuse = joiners, own, serve, reuse

    def run(self) -> object:
        """Fetch the state and return it."""
        session = self._session
        try:
            for source in session.sources:
                session.start_thread(Worker(session, source, first=True).run)
            manifest = self._wait_manifest()
            if self._select is None:
                plan = self._make_plan(manifest)
            else:
                selection = self._select(manifest)
                session.selection, session.manifest = selection, selection.manifest
                manifest = selection.manifest
                plan = Plan(manifest, selection.into)
            self._meet_joiners(manifest, plan)
            with session.changed:
                session.ledger = _new_ledger(manifest, 0 if session.swarm is None else session.swarm.first)
                if session.selection is not None:
                    session.ledger.max_run = 1  # of so many parts that a request can list them
                session.plan = plan
            # The others need them beforehand: to compare, to do without the source later, or to free the
            # buffers in which chunks wait on their way to a device.
            beforehand = self._select or self._reuse or self._ahead or session.peers
            session.sums_follow = not beforehand and plan.mostly_in_place
            if manifest.hashes is None:
                session.start_thread(Auditor(session).run)
            if self._reuse:
                Reuse(session, self._raise_if_hopeless).run()
            with session.changed:
                if self._ahead is not None:
                    session.ledger.take_all()
                session.begun = True
                session.changed.notify_all()
            for peer in session.peers:
                session.start_thread(Worker(session, peer, first=True).run)
            if self._ahead is not None:
                self._ahead.start(session)
            self._wait_complete()
        finally:
            session.end()
            if self._ahead is not None:
                self._ahead.wait_ended()
            if session.plan is not None:
                session.plan.close()
        self._report(whole=True)
        return plan.result()

    def _meet_joiners(self, manifest: Manifest, plan: Plan) -> None:
        """Serve what is verified to the others that fetch the same, and let them serve us."""
        session, serve = self._session, self._serve
        swarm, turn = neighbours(self._joiners, self._own)
        if serve is None or manifest.num_chunks < MIN_SHARE * len(swarm) or len(swarm) == 1:
            return
        if not plan.mostly_in_place:
            return  # there is little to serve
        now = time.monotonic()
        session.swarm = Swarm(manifest.num_chunks, len(swarm), turn, now)
        nothing = np.zeros(manifest.num_chunks, np.bool_)
        known = {source.address for source in session.sources}
        session.peers = [
            Source(address, i, peer=Peer(i, nothing, now))
            for i, address in enumerate(swarm)
            if i != turn and address not in known
        ]
        session.share = Share(manifest, plan)
        serve(session.share)

    @property
    def sources(self) -> Sequence[Source]:
        """Return what is known of each source."""
        return self._session.sources

    def abort(self, error: BaseException) -> None:
        """Make `run` raise this error at once."""
        self._session.fail(error)

    def _wait_manifest(self) -> Manifest:
        session = self._session
        with session.changed:
            while session.manifest is None:
                self._raise_if_hopeless()
                session.changed.wait(max(0.0, session.deadline - time.monotonic()))
            return session.manifest

    def _wait_complete(self) -> None:
        session, floor = self._session, self._session.settings.min_rate
        _, ledger, _ = session.work
        report_at = 0.0
        while True:
            with session.changed:
                if session.failure is None and ledger.complete:
                    return
                self._raise_if_hopeless()
                now = time.monotonic()
                wait = session.deadline - now
                if self._progress is not None:
                    wait = min(wait, report_at - now)
                if floor:
                    wait = min(wait, self._meter.next_look - now)
                if session.peers:
                    wait = min(wait, session.settings.stall_s)  # nobody tells that nothing is new
                if wait > 0:
                    session.changed.wait(wait)
                slow = self._meter.slow(time.monotonic(), floor) if floor else []
            for address, rate in slow:
                log.warning(
                    "source %s sends %.1f MB/s of version %s, less than %.1f MB/s",
                    address,
                    rate / 1e6,
                    self.version,
                    floor / 1e6,
                )
            if time.monotonic() >= report_at:
                self._report()
                report_at = time.monotonic() + PROGRESS_S

    def _raise_if_hopeless(self) -> None:
        session = self._session
        if session.failure is not None:
            raise session.failure
        if time.monotonic() >= session.deadline:
            raise TransportTimeout(
                f"version {self.version!r} could not be fetched within {self._deadline_s:g} s: "
                + _describe((*session.sources, *session.peers))
            )
        if all(source.dead is not None for source in session.sources) and not self._peers_suffice():
            raise _no_source_left(self.version, session.sources, session.peers)

    def _peers_suffice(self) -> bool:
        """Say whether the rest will come from other joiners, now that no source is left."""
        session = self._session
        if session.ledger is None or session.ledger.next_unknown(1) is not None:
            return False  # nobody else can say what is right
        there = session.ledger.verified.copy()
        late = time.monotonic() - session.settings.stall_s
        for source in session.peers:
            if source.dead is None and source.peer is not None:
                if source.peer.news_at > late:
                    return True  # it may get more
                there |= source.peer.have
        return bool(there.all())

    def _report(self, *, whole: bool = False) -> None:
        """Tell the caller how far it has come; the log, once it is done."""
        told = whole and not self._quiet and log.isEnabledFor(logging.INFO)
        if self._progress is None and not told:
            return
        with self._session.changed:
            report = self._meter.report(time.monotonic(), whole=whole)
        if told:
            log.info("%s", summary(report))
        if self._progress is not None:
            self._progress(report)


def _new_ledger(manifest: Manifest, first: int) -> Ledger:
    ledger = Ledger(manifest.size, manifest.chunk, first=first)
    if manifest.hashes is not None:
        table = bytes.fromhex(manifest.hashes)
        for number in range(manifest.num_chunks):
            ledger.expect(number, table[HASH_BYTES * number : HASH_BYTES * (number + 1)])
    return ledger


def _describe(sources: Sequence[Source]) -> str:
    return "; ".join(f"{source.address}: {source.report}" for source in sources)


def _no_source_left(version: str, sources: Sequence[Source], peers: Sequence[Source]) -> TransportError:
    """Return the error that says of each source what it did, of the most telling type."""
    kind: type[SourceError] = SourceError
    for special in (VersionMismatch, TokenRefused, ChecksumError, ProtocolError):
        if all(isinstance(source.dead, special) for source in sources):
            kind = special
    return kind(
        f"no source can give version {version!r}: {_describe((*sources, *peers))}",
        {source.address: source.report for source in (*sources, *peers)},
    )
