"""List a range of keys, then watch it, whatever happens to etcd in between.

The stream is registered again at once after an error, from the last revision seen. It is listed anew when
that revision is compacted, or when etcd no longer remembers it as we do: etcd was wiped, or restored from
a backup (I8). A cluster id does not show that, since an etcd started anew with the same settings has the
same one; so each return first compares the last change that we know of with what etcd has at that revision.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import tenacity

from ftkit.errors import EtcdError, EtcdUnavailable
from ftkit.keeper.etcd import KV, Compacted, Etcd
from ftkit.keeper.link import grpc, rpc

log = logging.getLogger(__name__)

_SHORT_LIFE_S = 0.5
"""A stream that breaks sooner than this without having brought anything counts as a failure to register."""


class WatchEvent(NamedTuple):
    """One change: the new value of a key, or None when it was deleted or its lease ran out."""

    key: str
    value: bytes | None
    mod_revision: int
    create_revision: int = 0
    lease: int = 0


class _Mark(NamedTuple):
    """What must still be so at a revision for the history to be the one we know."""

    mod_revision: int
    value: bytes


def _ignore(*_: object) -> None:
    """Do nothing."""


_open: weakref.WeakSet[Watch] = weakref.WeakSet()


def _close_all() -> None:
    """Leave no stream open for the interpreter's end, which could then wait for a lock of gRPC's for ever."""
    watches = list(_open)
    for watch in watches:
        watch.close(wait=False)
        watch.etcd.close()  # a request that is being repeated ends, too
    for watch in watches:
        watch.close()


atexit.register(_close_all)


class Watch:
    """Calls back from a thread of its own, which starts at once; `close` ends it. A context manager.

    `on_listing(kvs, revision)` replaces all that was known; it comes first, and again after a gap.
    `on_events(events, revision)` brings what changed since. `on_word()` comes with every message of etcd;
    `on_trouble(error)` with every failure, after which the watch goes on trying. A callback that raises
    ends the watch: the exception is the last thing that `on_trouble` gets.
    """

    def __init__(
        self,
        etcd: Etcd,
        start: str,
        end: str,
        on_listing: Callable[[list[KV], int], None],
        on_events: Callable[[list[WatchEvent], int], None],
        on_word: Callable[[], None] = _ignore,
        on_trouble: Callable[[Exception], None] = _ignore,
    ) -> None:
        self.etcd = etcd
        self.start = start
        self.end = end
        self.revision = 0
        """The last revision of which everything has been handed out."""
        self._on_listing = on_listing
        self._on_events = on_events
        self._on_word = on_word
        self._on_trouble = on_trouble
        self._on_fresh: Callable[[], None] | None = None
        self._known: dict[str, _Mark] = {}
        self._listed = False
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name=f"watch {start}", daemon=True)
        self._thread.start()
        _open.add(self)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, *, wait: bool = True) -> None:
        """End the watch; with `wait`, no callback comes after this returns (unless it is called from one)."""
        self._closed.set()
        with self._lock:
            if self._call is not None:
                self._call.cancel()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(self.etcd.settings.timeout_s + 5.0)

    def refresh(self, on_fresh: Callable[[], None]) -> None:
        """Make sure that nothing which is so by now is missing, then call `on_fresh` from the thread.

        For when time was lost somewhere (a frozen server, a frozen process) and old news may be queued.
        """
        with self._lock:
            self._on_fresh = on_fresh
            if self._call is not None:
                self._call.cancel()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._retrying()(self._session)
        except tenacity.RetryError:
            return  # closed meanwhile
        except EtcdError as error:
            if not self._closed.is_set():
                self._on_trouble(error)
        except Exception as error:
            log.exception("the watch of %s ends", self.start)
            self._on_trouble(error)

    def _retrying(self) -> tenacity.Retrying:
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(EtcdError),
            # The first wait is as good as none; thousands of watchers must not return in step, though.
            wait=tenacity.wait_random_exponential(multiplier=0.02, max=2.0),
            stop=lambda _: self._closed.is_set(),
            sleep=self._rest,
            before_sleep=self._failed,
        )

    def _rest(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def _failed(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, Exception) and not self._closed.is_set():
            level = logging.WARNING if state.attempt_number == 1 else logging.DEBUG
            log.log(level, "the watch of %s was interrupted: %s", self.start, error)
            self._on_trouble(error)

    def _session(self) -> None:
        """Run one stream to its end; return if it was of use, raise if it was not."""
        on_fresh = self._on_fresh
        if on_fresh is not None:
            if not (self._listed and self._is_current()):
                self._list()
            with self._lock:
                if self._on_fresh is on_fresh:
                    self._on_fresh = None
            on_fresh()
        elif not (self._listed and self._same_history()):
            self._list()
        began, before = time.monotonic(), self.revision
        try:
            self._follow()
        except Compacted as error:
            log.info("the watch of %s lists anew: %s", self.start, error)
            self._listed = False
        except EtcdUnavailable as error:
            if self._closed.is_set() or self._on_fresh is not None:
                return
            if time.monotonic() - began < _SHORT_LIFE_S and self.revision == before:
                raise
            log.info("the watch of %s is registered again: %s", self.start, error)
            self._on_trouble(error)

    def _list(self) -> None:
        kvs, revision = self.etcd.range(self.start, self.end)
        self._known = {kv.key: _Mark(kv.mod_revision, kv.value) for kv in kvs}
        self.revision = revision
        self._listed = True
        self._on_word()
        self._on_listing(kvs, revision)

    def _same_history(self) -> bool:
        """Say whether etcd has, at the last revision seen, what we have."""
        try:
            theirs = self.etcd.newest(self.start, self.end, self.revision)
        except Compacted as error:
            log.info("the watch of %s lists anew: %s", self.start, error)
            return False
        self._on_word()
        if not self._agrees(theirs):
            log.warning("etcd's history is not the one we know (it was wiped or restored): listing anew")
            return False
        return True

    def _is_current(self) -> bool:
        """Say whether etcd has now what we have: as many keys, and the same last change."""
        count, newest, revision = self.etcd.summary(self.start, self.end)
        if count != len(self._known) or revision < self.revision or not self._agrees(newest):
            return False
        self.revision = revision
        self._on_word()
        return True

    def _agrees(self, newest: KV | None) -> bool:
        """Compare the last change that etcd has with the last that we know."""
        ours = max(self._known.items(), key=lambda item: item[1].mod_revision, default=None)
        if ours is None or newest is None:
            return ours is None and newest is None
        return ours == (newest.key, _Mark(newest.mod_revision, newest.value))

    def _follow(self) -> None:
        """Register the stream after the last revision and hand out what it brings, until it breaks."""
        client, metadata = self.etcd.link.client()
        create = rpc.WatchCreateRequest(
            key=self.start.encode(),
            range_end=self.end.encode(),
            start_revision=self.revision + 1,
            progress_notify=True,  # keeps the revision young in a quiet range, out of reach of compactions
        )
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(rpc.WatchRequest(create_request=create))
        try:
            call = rpc.WatchStub(client.channel).Watch(iter(requests.get, None), metadata=metadata)
            with self._lock:
                self._call = call
            if self._closed.is_set() or self._on_fresh is not None:
                call.cancel()
            for response in call:
                self.etcd.link.answered()
                self._take(response)
                if self._closed.is_set():
                    return
        except grpc.RpcError as raw:
            raise self.etcd.link.failed(client, raw) from None
        except ValueError:
            raise EtcdUnavailable("the connection to etcd was replaced") from None
        finally:
            requests.put(None)
            with self._lock:
                call, self._call = self._call, None
            if call is not None:
                call.cancel()
        raise EtcdUnavailable("etcd ended the watch")

    def _take(self, response: Any) -> None:
        """Hand out one message of the stream."""
        if response.canceled:
            if response.compact_revision:
                raise Compacted(f"the history before revision {response.compact_revision} is gone")
            raise EtcdUnavailable(f"etcd cancelled the watch: {response.cancel_reason or 'no reason given'}")
        self._on_word()
        if response.created:
            return
        events = [_event(e) for e in response.events]
        if events:
            for event in events:
                if event.value is None:
                    self._known.pop(event.key, None)
                else:
                    self._known[event.key] = _Mark(event.mod_revision, event.value)
            self.revision = max(self.revision, events[-1].mod_revision)
            self._on_events(events, self.revision)
        else:
            # A progress notice: everything up to here has been sent.
            self.revision = max(self.revision, int(response.header.revision))


def _event(event: Any) -> WatchEvent:
    kv = event.kv
    deleted = event.type == 1
    return WatchEvent(
        kv.key.decode(errors="replace"),
        None if deleted else bytes(kv.value),
        int(kv.mod_revision),
        int(kv.create_revision),
        int(kv.lease),
    )
