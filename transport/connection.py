"""One connection: read requests, send answers, within limits of size and time.

Decides how bytes leave: live memory in turns of some milliseconds, so that nobody who waits for that memory
waits for the peer; a slot by `sendfile`; and to a process on this machine, by saying where they are.
What is answered is decided in `routes.py`.
"""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from transport import near, wire
from transport.crew import Task
from transport.passing import Passing
from transport.publication import Board, Publication
from transport.readers import Content, Withdrawn
from transport.routes import REASONS, Request, Response, error, parse_request, respond
from transport.slots import Slot
from transport.staging import HostReader
from transport.visits import FETCH, HAVE

log = logging.getLogger(__name__)

PIECE: Final = 8 << 20
LIVE_S: Final = 0.004
"""About so long, twice at most, does `withdraw` wait for a peer that takes its time over live memory."""
_NOTHING: Final = Request("", "", {}, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one server allows."""

    connections: int = 256
    head_s: float = 5.0
    """From connecting, or from the first byte of a later request, to the end of its head."""
    idle_s: float = 60.0
    """Between two requests."""
    stall_s: float = 10.0
    """Without the client taking a byte of a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What all connections of one server have in common."""

    board: Board
    token: Callable[[], str]
    limits: Limits
    tls: ssl.SSLContext | None
    ended: Callable[[Connection], None]
    """Told when one is over."""


class Connection:
    """A connection that was accepted; `run` has to be called, on a thread of its own."""

    def __init__(self, service: Service, sock: socket.socket, *, is_near: bool) -> None:
        self.sock, self.is_near = sock, is_near
        self.since = time.monotonic()
        self.authorized = False
        self.evicted = False
        self._service = service
        self._stopping = False
        self._buffer = bytearray()
        self._reader = HostReader()
        self.span = (0, 0)
        """Which bytes of a data section are still to be sent."""
        self._visited: Publication | None = None
        self._held: Slot | None = None
        self._local = False
        self._send_s = -1.0
        self._heard_out = False
        """The client has closed the connection, after all that was sent."""
        self.task: Task | None = None
        """`run`, once it has begun."""

    def cut(self) -> None:
        """End it now; any thread."""
        wire.cut(self.sock)

    def stop(self) -> None:
        """End it now, and answer nothing any more; any thread."""
        self._stopping = True
        self.cut()

    def run(self) -> None:
        """Answer requests until the connection ends."""
        service = self._service
        try:
            self.sock.setblocking(True)
            wire.set_options(self.sock)
            self._let_send(service.limits.stall_s)
            self._local = wire.is_local(self.sock)
            if self._local:
                wire.set_local_options(self.sock)
            if service.tls is not None:
                self.sock.settimeout(service.limits.head_s)
                secure = service.tls.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
                self.sock = secure
                secure.do_handshake()
                secure.settimeout(None)
            while self._serve_one():
                pass
        except (OSError, wire.Stalled, ValueError) as err:
            log.debug("a connection ended: %r", err)
        except Exception:
            log.exception("a request could not be answered")
        finally:
            self._visit(None, _NOTHING)
            # Not so if it was cut: what is under way may still be read from the slot's pages.
            self._let_go(clean=self._heard_out)
            wire.cut(self.sock)
            self.sock.close()
            service.ended(self)

    def _serve_one(self) -> bool:
        service = self._service
        try:
            head = self._read_head()
            if head is None:
                return False
            self._let_go()
            request = parse_request(head)
        except wire.BadHead as err:
            self._send(error(431 if "long" in str(err) else 400, str(err), close=True), head_only=False)
            return False
        try:
            response = respond(request, service.token(), service.board, self._reader)
            if response.status != 401:
                self.authorized = True
            if not request.keep_alive:
                response.close = True
            self._visit(response.asked, request)
            if response.content is not None and not response.content.has(response.start, response.end):
                raise Withdrawn
            ways = request.headers.get(near.MEMORY, "") if self.is_near else ""
            if not (ways and self._hand_over(response, ways)):
                self._send(response, head_only=request.method == "HEAD")
        except Withdrawn:
            response = error(404, "nothing is published", latest=None)
            self._send(response, head_only=request.method == "HEAD")
        return not response.close and not self._stopping

    def _read_head(self) -> bytes | None:
        """Return the next request's head; None when the client is gone or took too long."""
        limits = self._service.limits
        begun = bool(self._buffer) or not self.authorized
        deadline = time.monotonic() + (limits.head_s if begun else limits.idle_s)
        while True:
            if self.is_near and self._buffer.startswith(near.DONE):
                del self._buffer[: len(near.DONE)]
                self._let_go()
                continue
            end = self._buffer.find(b"\r\n\r\n")
            if end >= 0:
                head = bytes(self._buffer[:end])
                del self._buffer[: end + 4]
                return head
            if len(self._buffer) > wire.MAX_HEAD:
                raise wire.BadHead("the head of the request is too long")
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            wire.set_recv_timeout(self.sock, left)
            try:
                data = self.sock.recv(4096)
            except wire.TIMED_OUT:
                return None
            if not data:
                self._heard_out = True
                return None
            if not begun:
                begun = True
                deadline = time.monotonic() + limits.head_s
            self._buffer += data

    def _hand_over(self, response: Response, ways: str) -> bool:
        """Say where the bytes are, and keep them there until the joiner is done; False if that cannot be."""
        content, start, end = response.content, response.start, response.end
        if content is None or response.body or start == end:
            return False
        slot = content.slot
        if slot is not None and near.FILE in ways:
            self._hold(slot)
            place = near.place_in_file(start, end)
            near.send_with(self.sock, _head(response, len(place), {near.MEMORY: near.FILE}) + place, slot.fd)
            return True
        if slot is not None or not content.on_cpu or near.PROCESS not in ways:
            return False
        with content.answering(), content.reading(self.cut) as views:
            there = near.place_in_process(views(start, end, self._reader))
            if there is None:
                return False
            self.span = (start, end)
            try:
                raw = _head(response, len(there), {near.MEMORY: near.PROCESS}) + there
                wire.send_views(self.sock, [memoryview(raw)], batch=True)
                self._wait_done()
            finally:
                self.span = (0, 0)
        return True

    def _wait_done(self) -> None:
        """Wait until the joiner has read what was handed over: it then sends something."""
        wire.set_recv_timeout(self.sock, self._service.limits.stall_s)
        try:
            data = self.sock.recv(4096)
        except wire.TIMED_OUT as err:
            raise wire.Stalled from err
        if not data:
            raise ConnectionAbortedError("the joiner closed the connection")
        self._buffer += data

    def _send(self, response: Response, *, head_only: bool) -> None:
        head = memoryview(_head(response, response.content_length, {}))
        if head_only:
            wire.send_views(self.sock, [head], batch=True)
        elif response.content is None or response.start == response.end:
            wire.send_views(self.sock, [head, memoryview(response.body)], batch=True)
        else:
            self._send_content(head, memoryview(response.body), response)

    def _send_content(self, head: memoryview, before: memoryview, response: Response) -> None:
        """Send bytes of a state; nobody waits for the peer while live memory is being read, but for TLS."""
        content, at = response.content, response.start
        assert content is not None
        passing = content.passing(at, response.end) if response.summed else None
        with content.answering():
            self.span = (at, response.end)
            wire.send_views(self.sock, [head, before], batch=True, more=True)
            try:
                while at < response.end:
                    n = self._send_some(content, at, response.end, passing)
                    if not n:
                        wire.wait_writable(self.sock, self._service.limits.stall_s)
                    at += n
                    self.span = (at, response.end)
            except Withdrawn as err:
                raise ConnectionAbortedError("the state was withdrawn in the middle of an answer") from err
            finally:
                self.span = (0, 0)
                self._let_send(self._service.limits.stall_s)

    def _let_send(self, seconds: float) -> None:
        """Let each send wait at most this long."""
        if seconds != self._send_s:
            wire.set_send_timeout(self.sock, seconds)
            self._send_s = seconds

    def _send_some(self, content: Content, start: int, end: int, passing: Passing | None) -> int:
        """Send as much as the way allows; return how many bytes that was."""
        slot, tls = content.slot, isinstance(self.sock, ssl.SSLSocket)
        # On one machine the copy costs less than page after page through the loopback.
        if slot is not None and not tls and not self._local:
            self._hold(slot)
            self._let_send(self._service.limits.stall_s)
            return wire.send_file(self.sock, slot.fd, start, end)
        sent = 0

        def show(at: int, view: memoryview) -> None:
            if passing is not None:
                passing.show(start + at, view)

        with content.reading(self.cut) as views:
            if content.on_cpu and not tls:
                self._let_send(LIVE_S)
                some = views(start, min(end, start + PIECE), self._reader)
                return wire.send_for(self.sock, some, LIVE_S, show)
            self._let_send(self._service.limits.stall_s)
            for view in views(start, end, self._reader):
                for low in range(0, len(view), PIECE):
                    piece = view[low : low + PIECE]
                    show(sent, piece)
                    wire.send_views(self.sock, [piece], batch=False)
                    sent += len(piece)
                    if content.leaving and content.slot is not slot:
                        return sent
        return sent

    def _hold(self, slot: Slot) -> None:
        """Keep a slot until the client has shown that it has all that was sent."""
        if self._held is not slot:
            self._let_go()
            slot.hold()
            self._held = slot

    def _let_go(self, *, clean: bool = True) -> None:
        slot, self._held = self._held, None
        if slot is not None:
            slot.spoilt |= not clean
            slot.release()

    def _visit(self, publication: Publication | None, request: Request) -> None:
        if publication is not self._visited and self._visited is not None:
            self._visited.visits.leave(self)
        self._visited = publication
        if publication is not None:
            publication.visits.see(self, request.headers.get(FETCH, ""), request.headers.get(HAVE, ""))

    def gone(self) -> bool:
        """Say whether the other side has closed the connection."""
        return wire.is_gone(self.sock)


def _head(response: Response, length: int, extra: dict[str, str]) -> bytes:
    headers = {**response.headers, **extra, "Content-Length": str(length)}
    if response.close:
        headers["Connection"] = "close"
    if response.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return wire.format_head(f"HTTP/1.1 {response.status} {REASONS[response.status]}", headers)
