"""Get the checksums of all chunks, while the workers get the bytes.

Decides whom to ask: the reference as long as it answers, then any other source that is up. And when: after
the bytes, if that is soon enough, since the reference then knows them already.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from transport import wire
from transport.ask import SMALL_BODY, NotPublished, ask, checked_body
from transport.errors import SourceError
from transport.ledger import Ledger
from transport.link import Garbled, Link, Lost
from transport.manifest import HASH_BYTES
from transport.session import Over, Session, Source

log = logging.getLogger(__name__)

HASH_BATCH: Final = 16
PAUSE_S: Final = 0.05
GATHER: Final = 8
"""Chunks whose checksums are worth a request."""
GATHER_S: Final = 0.01
"""How long fewer of them wait for more."""


class Auditor:
    """Owns one connection, over which it asks for checksums."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self) -> None:
        """Work until all checksums are known or the fetch is over."""
        link: Link | None = None
        source: Source | None = None
        session = self.session
        _, ledger, _ = session.work
        try:
            while True:
                with session.changed:
                    wanted = self._next(ledger)
                    if wanted is None:
                        return
                    best = self._choose()
                if link is None or best is not source:
                    if link is not None:
                        self.session.drop_link(link)
                    link, source = self.session.new_link(best), best
                self._get(link, best, ledger, *wanted)
        except Over:
            pass
        except Exception as error:
            session.fail(error)
        finally:
            if link is not None:
                self.session.drop_link(link)

    def _next(self, ledger: Ledger) -> tuple[int, int] | None:
        """Return for which chunks to ask now; None when all checksums are known."""
        session = self.session
        unknown = ledger.next_unknown(HASH_BATCH if session.selection is None else 1)
        if unknown is None or not session.sums_follow:
            return unknown
        due = time.monotonic() + GATHER_S
        while True:
            unsure = ledger.next_unsure(HASH_BATCH)
            left = due - time.monotonic()
            if unsure is not None:
                enough = unsure[1] - unsure[0] >= GATHER or not ledger.bytes_pending
                if enough or left <= 0:
                    return unsure
            session.wait(left if unsure is not None else float("inf"))

    def _choose(self) -> Source:
        """Wait for a source that is up; prefer the reference."""
        session = self.session
        while True:
            self.session.check()
            up = [s for s in session.sources if (s.ready or s is session.reference) and s.dead is None]
            if up:
                return min(up, key=lambda s: (s.audit_failures, s is not session.reference, s.turn))
            session.wait()

    def _get(self, link: Link, source: Source, ledger: Ledger, first: int, last: int) -> None:
        try:
            selection = self.session.selection
            query = f"hashes?first={first}&last={last}"
            if selection is not None:
                query = f"rows?at={selection.spec(*ledger.bounds(first))}&digest=1"
            reply = ask(link, self.session.version, query)
            raw = checked_body(link, reply, SMALL_BODY)
            if len(raw) != HASH_BYTES * (last - first):
                raise Garbled("it sent another number of checksums than asked for")
        except (NotPublished, Lost, Garbled, wire.Stalled) as error:
            # Whether the source is dead is for its workers to find out.
            log.info("no checksums from source %s: %r", source.address, error)
            link.close()
            with self.session.changed:
                source.audit_failures += 1
                self.session.wait(PAUSE_S)
            return
        except SourceError as error:
            self.session.kill(source, error)
            return
        for number in range(first, last):
            at = HASH_BYTES * (number - first)
            with self.session.changed:
                right = ledger.expect(number, raw[at : at + HASH_BYTES])
            if right is not None:
                self.session.settle(number, right)
        if not self.session.begun:
            with self.session.changed:
                self.session.changed.notify_all()  # what is here is compared with these
