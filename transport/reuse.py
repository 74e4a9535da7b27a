"""Find out which chunks of a state are here already, so that only the rest is fetched.

Hashes the destination's memory chunk by chunk and compares. A few chunks, spread over the whole, are tried
first: if none of them is here (after a step of most optimizers none is), nothing more is hashed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

import xxhash

from transport import wire
from transport.ask import SMALL_BODY, NotPublished, ask, checked_body
from transport.errors import SourceError
from transport.ledger import Ledger
from transport.link import Garbled, Link, Lost
from transport.manifest import HASH_BYTES
from transport.place import Plan
from transport.session import Over, Session

log = logging.getLogger(__name__)

SAMPLE: Final = 16
"""Chunks that are tried first; states of no more are compared whole."""


class Reuse:
    """The search, in the calling thread, before any bytes are asked for."""

    def __init__(self, session: Session, check: Callable[[], None]) -> None:
        """`check` is called with `session.changed` held, and raises when the fetch is to end."""
        self._session, self._check = session, check

    def run(self) -> None:
        """Note in the ledger what is here."""
        try:
            self._run()
        except Over:
            with self._session.changed:
                self._check()

    def _run(self) -> None:
        _, ledger, plan = self._session.work
        begun = time.monotonic()
        if ledger.num_chunks > SAMPLE and not self._sample(ledger, plan):
            return
        for number in range(ledger.num_chunks):
            if plan.is_destination(*ledger.bounds(number)) and not self._compare(ledger, plan, number):
                break
        log.info(
            "%d of %d MB of version %s were here already, found in %.3f s",
            self._session.bytes_kept // 10**6,
            ledger.size // 10**6,
            self._session.version,
            time.monotonic() - begun,
        )

    def _sample(self, ledger: Ledger, plan: Plan) -> bool:
        """Say whether any of a few chunks is here, or whether that is not known."""
        session = self._session
        assert session.reference is not None
        link = session.new_link(session.reference)
        try:
            for i in range(SAMPLE):
                number = (2 * i + 1) * ledger.num_chunks // (2 * SAMPLE)
                if not plan.is_destination(*ledger.bounds(number)):
                    continue
                expected = ledger.expected(number) or self._ask(link, number)
                if expected == _digest(ledger, plan, number):
                    return True
        except (NotPublished, Lost, Garbled, SourceError, wire.Stalled) as error:
            log.info("no checksums from source %s: %r", session.reference.address, error)
            return True
        finally:
            session.drop_link(link)
        return False

    def _ask(self, link: Link, number: int) -> bytes:
        reply = ask(link, self._session.version, f"hashes?first={number}&last={number + 1}")
        raw = checked_body(link, reply, SMALL_BODY)
        if len(raw) != HASH_BYTES:
            raise Garbled("it sent another number of checksums than asked for")
        return raw

    def _compare(self, ledger: Ledger, plan: Plan, number: int) -> bool:
        """Keep a chunk if it is right; return False when nobody says what is."""
        session = self._session
        late = time.monotonic() + session.settings.stall_s
        with session.changed:
            while (expected := ledger.expected(number)) is None:
                if time.monotonic() >= late:
                    return False
                session.wait(late - time.monotonic())
            session.check()
        if _digest(ledger, plan, number) == expected:
            session.keep(number)
        return True


def _digest(ledger: Ledger, plan: Plan, number: int) -> bytes:
    digest = xxhash.xxh3_128()
    for view in plan.views(*ledger.bounds(number)):
        digest.update(view)
    return digest.digest()
