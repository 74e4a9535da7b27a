"""The transport over `torch.distributed`: bytes by send and receive on a process group of CPU tensors (gloo).

Manifest, checksums and the wish for bytes travel over an `HTTPTransport`, and so does whatever the group
does not deliver: the group is only a way for bytes that is tried first. Both sides cut the data section into
the same buckets: a large block is sent from and received into its own memory, small ones are gathered. Of S
sources each sends every S-th bucket. Nothing is pickled. The group is the caller's, who alone can abort it.

A gloo device is one socket and one thread for each pair of members, which is what limits the rate. A group
that has several devices (`GLOO_SOCKET_IFNAME=eth0,eth0`) uses them in turn, by the tag of a message.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final
from urllib.parse import quote

import torch
import torch.distributed as dist

from transport.api import Progress
from transport.ask import SMALL_BODY, NotPublished, ask
from transport.errors import SourceError
from transport.http import HTTPTransport
from transport.link import Garbled, Lost
from transport.manifest import Manifest
from transport.publication import Publication
from transport.readers import Views, Withdrawn
from transport.session import Over, Session, Source
from transport.staging import HostReader
from transport.wire import Stalled

log = logging.getLogger(__name__)

LARGE: Final = 1 << 20
"""A block from this size on is sent from its own memory."""
GATHERED: Final = 4 << 20
"""Bytes of smaller blocks that are gathered into one bucket, at most (but for one block)."""
BUCKET: Final = 16 << 20
"""Of a larger block, one bucket: smaller ones cost more than is won by checking them in the cache."""
AHEAD: Final = 128 << 20
"""Bytes under way at a time, of one source: gloo's threads must never wait for us."""
COPIED: Final = 4
"""Bytes of a bucket in memory of its own count so many times."""
WAIT_S: Final = 1.0
"""For a source that is about to publish."""
TAGS: Final = 1 << 30

_UnderWay = tuple[Any, torch.Tensor, bool]
"""An operation, its memory, and whether that is the state's own."""


def buckets(manifest: Manifest) -> list[tuple[int, int]]:
    """Cut the data section into buckets; both sides come to the same result."""
    result: list[tuple[int, int]] = []
    start = end = 0  # of the small blocks that are being gathered
    for block in manifest.blocks:
        if block.nbytes < LARGE:
            if end - start + block.nbytes > GATHERED:
                result.append((start, end))
                start = end
            end = block.offset + block.nbytes
            continue
        if end > start:
            result.append((start, end))
        start = end = block.offset + block.nbytes
        result += [(at, min(end, at + BUCKET)) for at in range(block.offset, end, BUCKET)]
    if end > start:
        result.append((start, end))
    return result


class DistributedTransport:
    """Serve and fetch states over a process group; see `api.Transport` for the methods.

    Parameters
    ----------
    http: gives the address, the token, the manifest, and all bytes that the group does not deliver. It is
        closed together with this transport.
    timeout_s: the longest wait for one bucket. A gloo group is of no more use after a wait that was too long.
    """

    def __init__(self, http: HTTPTransport, *, timeout_s: float = 30.0) -> None:
        if timeout_s <= 0:
            raise ValueError("timeout_s must be positive")
        self._http, self._timeout_s = http, timeout_s
        self._lock = threading.Lock()
        self._group: dist.ProcessGroup | None = None
        self._name = ""
        self._abort_group: Callable[[], None] | None = None
        self._tag = 0
        http.sender = self

    @property
    def address(self) -> str:
        """Return the name under which others find this transport as a source."""
        return self._http.address

    def configure(
        self, group: dist.ProcessGroup | None, name: str = "", *, abort: Callable[[], None] | None = None
    ) -> None:
        """Use this group from now on; with None, bytes go over HTTP alone.

        `name` says which group it is: equal at all its members, and new for each new group. `abort` makes
        everything under way on it fail at once, if there is a way to do so; without it `abort` and `withdraw`
        may last up to `timeout_s`.
        """
        with self._lock:
            self._group, self._name, self._abort_group = group, name, abort

    def publish(self, version: str, state: object, *, snapshot: bool = False) -> None:
        """Serve the memory of the state's live tensors until `withdraw`, or a copy: see `HTTPTransport`."""
        self._http.publish(version, state, snapshot=snapshot)

    def withdraw(self) -> None:
        """Stop serving; return once nobody reads the live memory any more. Idempotent."""
        self._http.withdraw()

    def fetch(
        self,
        sources: Sequence[str],
        version: str,
        into: object,
        *,
        deadline_s: float,
        progress: Callable[[Progress], None] | None = None,
        joiners: Sequence[str] = (),
        reuse: bool = False,
    ) -> object:
        """Receive a state in place, by the group as far as it goes; sources outside of it help over HTTP."""
        with self._lock:
            group, name = self._group, self._name
            self._tag = (self._tag + 1) % (TAGS >> 20)
            tag = self._tag << 20
        ahead = None if group is None else _Receiver(group, name, tag, self._timeout_s)
        return self._http.fetch_with(
            ahead,
            sources,
            version,
            into,
            deadline_s=deadline_s,
            progress=progress,
            joiners=joiners,
            reuse=reuse,
        )

    def abort(self, version: str = "") -> None:
        """Make a fetch in flight in another thread fail; see `HTTPTransport.abort`."""
        self._http.abort(version)
        self._cut()

    def close(self) -> None:
        """Withdraw, abort and free all sockets and threads; the group stays the caller's."""
        self.configure(None)
        self._http.close()

    def __enter__(self) -> DistributedTransport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cut(self) -> None:
        with self._lock:
            abort = self._abort_group
        if abort is not None:
            abort()

    def send(self, publication: Publication, query: Mapping[str, str]) -> str:
        """Begin to send a share of the buckets to a member that has asked for it over HTTP."""
        with self._lock:
            group, name = self._group, self._name
        if group is None or query.get("group", "") != name:
            raise ValueError("this source is in another process group, or in none")
        to, tag = int(query.get("to", "")), int(query.get("tag", ""))
        turn, turns = int(query.get("turn", "")), int(query.get("turns", ""))
        if not 0 <= to < group.size() or to == group.rank() or not 0 <= tag < TAGS:
            raise ValueError("there is no such member to send to")
        if query.get("etag") != publication.encoded.manifest.etag or not 0 <= turn < turns:
            raise ValueError("the layout here is another one")
        wanted = int(query.get("wanted", ""), 16)
        ranges = enumerate(buckets(publication.encoded.manifest))
        share = [bounds for number, bounds in ranges if wanted >> number & 1][turn::turns]
        threading.Thread(
            target=self._send, args=(publication, group, to, tag, share), name="transport-send", daemon=True
        ).start()
        return json.dumps({"rank": group.rank()})

    def _send(
        self,
        publication: Publication,
        group: dist.ProcessGroup,
        to: int,
        tag: int,
        share: list[tuple[int, int]],
    ) -> None:
        reader = HostReader()
        under_way: list[_UnderWay] = []
        try:
            with publication.reading(self._cut) as views:
                try:
                    for at, (start, end) in enumerate(share, tag):
                        tensor, in_place = _gather(views, start, end, reader, in_place=publication.on_cpu)
                        under_way.append((group.send([tensor], to, at), tensor, in_place))
                        while _is_full(under_way):
                            _wait(under_way.pop(0)[0], self._timeout_s)
                finally:
                    # Also after an error: their memory is being read until they have ended.
                    errors = [error for work, _, _ in under_way if (error := _end(work, self._timeout_s))]
                if errors:
                    raise errors[0]
        except Withdrawn:
            pass
        except RuntimeError as error:
            log.info("could not send version %s to rank %d: %s", publication.version, to, error)


class _Receiver:
    """Receives the buckets of one fetch; one thread per source."""

    def __init__(self, group: dist.ProcessGroup, name: str, tag: int, timeout_s: float) -> None:
        self._group, self._name, self._tag, self._timeout_s = group, name, tag, timeout_s
        self._changed = threading.Condition()
        self._num_running = 0
        self._wanted = 0
        """One bit for each bucket that is not here already, the first in the lowest."""

    def start(self, session: Session) -> None:
        """Give each source its share."""
        manifest, ledger, _ = session.work
        ranges = [
            (number, (start, end))
            for number, (start, end) in enumerate(buckets(manifest))
            if not ledger.verified[start // ledger.chunk : -(-end // ledger.chunk)].all()
        ]
        self._wanted = sum(1 << number for number, _ in ranges)
        bounds = [each for _, each in ranges]
        turns = len(session.sources)
        for source in session.sources:
            share = bounds[source.turn :: turns]
            with self._changed:
                self._num_running += 1
            session.start_thread(lambda source=source, share=share: self._run(session, source, share))  # type: ignore[misc]

    def wait_ended(self) -> None:
        """Return once all receiving threads have ended; each wait of theirs is limited."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_running == 0)

    def _run(self, session: Session, source: Source, share: list[tuple[int, int]]) -> None:
        left = list(share)
        try:
            rank = self._ask(session, source)
            with session.changed:
                source.num_busy += 1
            try:
                self._receive(session, source, rank, left)
            finally:
                with session.changed:
                    source.num_busy -= 1
        except Over:
            pass
        except (NotPublished, SourceError, Lost, Garbled, Stalled, RuntimeError) as error:
            log.warning(
                "%d of %d buckets of version %s from %s go over HTTP: %s",
                len(left),
                len(share),
                session.version,
                source.address,
                error or type(error).__name__,
            )
        except Exception as error:
            session.fail(error)
        finally:
            with session.changed:
                ledger = session.work[1]
                for start, end in reversed(left):
                    ledger.give_back(start, end)
                session.changed.notify_all()
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def _ask(self, session: Session, source: Source) -> int:
        """Have the source begin; return its rank. It sends only once we receive."""
        manifest = session.work[0]
        query = (
            f"send?group={quote(self._name, safe='')}&to={self._group.rank()}&tag={self._tag}"
            f"&turn={source.turn}&turns={len(session.sources)}&etag={manifest.etag}&wait={WAIT_S:g}"
            f"&wanted={self._wanted:x}"
        )
        link = session.new_link(source)
        try:
            reply = ask(link, session.version, query, wait_s=WAIT_S)
            rank = json.loads(link.read_body(reply, SMALL_BODY))["rank"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Garbled("it does not say which rank it has") from error
        finally:
            session.drop_link(link)
        if type(rank) is not int or not 0 <= rank < self._group.size() or rank == self._group.rank():
            raise Garbled(f"it says that it has rank {rank!r:.40}")
        return rank

    def _receive(self, session: Session, source: Source, rank: int, left: list[tuple[int, int]]) -> None:
        """Receive bucket by bucket; remove from `left` what has arrived."""
        plan = session.work[2]
        under_way: list[_UnderWay] = []
        coming = list(enumerate(left, self._tag))
        try:
            while left:
                while coming and not _is_full(under_way):
                    session.check()
                    tag, (start, end) = coming.pop(0)
                    views = plan.views(start, end) if plan.in_place(start, end) else []
                    in_place = len(views) == 1
                    tensor = (
                        torch.frombuffer(views[0], dtype=torch.uint8)
                        if in_place
                        else torch.empty(end - start, dtype=torch.uint8, device="cpu")
                    )
                    under_way.append((self._group.recv([tensor], rank, tag), tensor, in_place))
                begun = time.monotonic()
                work, tensor, in_place = under_way[0]
                _wait(work, min(self._timeout_s, session.deadline - begun))
                del under_way[0]
                start, end = left.pop(0)
                self._arrived(session, source, start, end, None if in_place else tensor.numpy().data)
                with session.changed:
                    source.busy_s += time.monotonic() - begun
        finally:
            for work, _, _ in under_way:
                _end(work, self._timeout_s)  # so that it cannot write any more

    def _arrived(
        self, session: Session, source: Source, start: int, end: int, elsewhere: memoryview | None
    ) -> None:
        """Note the bytes of a bucket, put them into place if they are not there, check what is complete."""
        _, ledger, plan = session.work
        while start < end:
            stop = min(end, (start // ledger.chunk + 1) * ledger.chunk)
            kept = ledger.verified[start // ledger.chunk]
            if elsewhere is not None:
                piece, elsewhere = elsewhere[: stop - start], elsewhere[stop - start :]
                for view in () if kept else plan.views(start, stop):
                    view[:], piece = piece[: len(view)], piece[len(view) :]
            with session.changed:
                source.bytes_received += stop - start
                chunk = None if kept else ledger.arrived(source.address, start, stop)
            if chunk is not None:
                session.check_chunk(chunk)
            start = stop


def _is_full(under_way: list[_UnderWay]) -> bool:
    return sum(tensor.numel() * (1 if in_place else COPIED) for _, tensor, in_place in under_way) >= AHEAD


def _gather(
    views: Views, start: int, end: int, reader: HostReader, *, in_place: bool
) -> tuple[torch.Tensor, bool]:
    """Return a bucket's bytes as one tensor, and whether it is the memory itself: one piece of the host's."""
    flat: torch.Tensor | None = None
    at = 0
    for view in views(start, end, reader):
        if len(view) == end - start and in_place:
            return torch.frombuffer(view, dtype=torch.uint8), True
        if flat is None:
            flat = torch.empty(end - start, dtype=torch.uint8, device="cpu")
        flat.numpy()[at : at + len(view)] = view
        at += len(view)
    assert flat is not None
    return flat, False


def _wait(work: Any, timeout_s: float) -> None:
    """Wait for an operation; a RuntimeError says that it failed or took too long."""
    if not work.wait(timedelta(seconds=max(0.001, timeout_s))):
        raise RuntimeError("an operation of the process group was not done in time")


def _end(work: Any, timeout_s: float) -> Exception | None:
    """Wait until an operation has ended, well or not; return its error."""
    try:
        _wait(work, timeout_s)
    except RuntimeError as error:
        return error
    return None
