"""Follow a job in etcd and hand out what a dashboard shows, to any number of viewers.

One watch, whoever looks and however often: the load on etcd does not depend on the viewers. The past epochs,
which can be many, are not watched: they are read once, and no further back than is shown.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import msgspec

from ftkit.core.model import Policy
from ftkit.dashboard.board import Board, Snapshot
from ftkit.errors import EtcdError, FtkitError
from ftkit.keeper.etcd import KV, Etcd
from ftkit.keeper.watch import Watch, WatchEvent

log = logging.getLogger(__name__)

REST_S = 0.2
"""Changes within this time are shown together."""

TICK_S = 1.0
"""How often a reason that counts seconds is renewed."""

TROUBLE_S = 1.0
"""An interruption is told when it lasts for longer than this."""


class Update(NamedTuple):
    """A snapshot, numbered, and as JSON."""

    number: int
    snapshot: Snapshot
    data: bytes


class _Listing(NamedTuple):
    kvs: Sequence[KV]


class _Events(NamedTuple):
    events: Sequence[WatchEvent]


class _Word(NamedTuple):
    """etcd has answered."""


class _Trouble(NamedTuple):
    error: Exception


_News = _Listing | _Events | _Word | _Trouble | None


class Feed:
    """The job as it is now, for viewers in any threads; a context manager."""

    def __init__(self, etcd: Etcd, job: str, policy: Policy) -> None:
        self._etcd = etcd
        self._board = Board(job, policy)
        self._inbox: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._latest: Update | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._trouble: tuple[float, str] | None = None
        """Since when the watch shows nothing, and why."""
        self._watch: Watch | None = None
        self._thread = threading.Thread(target=self._run, name="dashboard feed", daemon=True)

    def __enter__(self) -> Feed:
        put = self._inbox.put
        self._watch = Watch(
            self._etcd,
            *self._board.range,
            on_listing=lambda kvs, _: put(_Listing(kvs)),
            on_events=lambda events, _: put(_Events(events)),
            on_word=lambda: put(_Word()),
            on_trouble=lambda error: put(_Trouble(error)),
        )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the watches and send the viewers away."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._watch is not None:
            # Its callbacks only fill the inbox; with etcd away, waiting for its thread would take seconds.
            self._watch.close(wait=False)
        self._inbox.put(None)
        self._thread.join(10.0)

    @property
    def closed(self) -> bool:
        """Whether there will be no further update."""
        with self._changed:
            return self._closed

    def latest(self) -> Update | None:
        """Return the newest update; None while the job has not been read."""
        with self._changed:
            return self._latest

    def wait_newer(self, number: int, timeout_s: float) -> Update | None:
        """Wait for an update after `number` and return the newest; None when there is none in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._number() > number, timeout_s)
            return self._latest if self._number() > number and not self._closed else None

    def wait_end(self, timeout_s: float | None) -> None:
        """Return when the feed is closed or the time is over; raise what ended it, if it has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, timeout_s)
            if self._failure is not None:
                raise FtkitError("the dashboard failed; this is an error in ftkit") from self._failure

    # -- the thread that owns the board ------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:
            log.debug("the feed failed", exc_info=True)
            with self._changed:
                self._failure, self._closed = error, True
                self._changed.notify_all()

    def _follow(self) -> None:
        dirty, rest_until = False, 0.0
        while not self.closed:
            now = time.monotonic()
            wait = max(0.0 if dirty else TICK_S, rest_until - now)
            try:
                news = self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
                dirty = self._absorb(news, time.monotonic()) or dirty
                if time.monotonic() < rest_until or not dirty:
                    continue
            except queue.Empty:
                pass
            began = time.monotonic()
            self._build(began)
            dirty = False
            # A job of thousands takes longer to describe: never more than a tenth of a processor for it.
            rest_until = time.monotonic() + max(REST_S, 9 * (time.monotonic() - began))

    def _absorb(self, news: _News, now: float) -> bool:
        """Take one piece of news and say whether there may be something new to show."""
        if isinstance(news, _Listing):
            self._board.listed(news.kvs, self._history(news.kvs), time.time())
        elif isinstance(news, _Events):
            self._board.changed(news.events, time.time())
        elif isinstance(news, _Word):
            before, self._trouble = self._trouble, None
            return before is not None
        elif isinstance(news, _Trouble):
            since = now if self._trouble is None else self._trouble[0]
            self._trouble = since, str(news.error)
        return True

    def _history(self, listing: Sequence[KV]) -> Sequence[KV]:
        """Read the epochs that a listing shows to have gone by; without them the past just begins later."""
        wanted = self._board.untold(listing)
        try:
            return () if wanted is None else self._etcd.range(*wanted)[0]
        except EtcdError as error:
            log.debug("the history was not read: %s", error)
            return ()

    def _build(self, now: float) -> None:
        """Describe the job, and publish that if it is anything new."""
        if not self._board.complete:
            return
        since, error = self._trouble or (now, "")
        trouble = error if now >= since + TROUBLE_S else ""
        wall = time.time()
        snapshot = self._board.snapshot(now, wall, trouble)
        with self._changed:
            if self._latest is not None and self._latest.snapshot == snapshot:
                return
            data = msgspec.json.encode({"at": wall, "board": snapshot})
            self._latest = Update(self._number() + 1, snapshot, data)
            self._changed.notify_all()

    def _number(self) -> int:
        return 0 if self._latest is None else self._latest.number
