"""Serve requests, one thread per connection, within limits of number, size and time.

Knows sockets and threads; what is answered is decided in `routes.py`. A connection must send its
request's head within `head_s` of its beginning; one that has not shown the token yet is the first to go
when all places are taken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from transport import wire
from transport.publication import Board, Publication
from transport.readers import Content, Withdrawn
from transport.routes import REASONS, Request, Response, error, parse_request, respond
from transport.slots import Slot
from transport.staging import HostReader
from transport.visits import FETCH, HAVE

log = logging.getLogger(__name__)

PIECE: Final = 8 << 20
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


class Server:
    """Listens on one address from its construction until `close`."""

    def __init__(
        self,
        board: Board,
        token: Callable[[], str],
        *,
        bind: str,
        port: int,
        limits: Limits,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._board, self._token, self._limits, self._tls = board, token, limits, tls
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._closed = False
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((bind, port))
            self._listener.listen(512)
            self._listener.setblocking(False)
            self._wake, self._waker = socket.socketpair()
        except BaseException:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(
            target=self._accept, name=f"transport-accept-{self.port}", daemon=True
        )
        self._thread.start()
        _servers.add(self)

    def close(self) -> None:
        """Stop listening, cut all connections, and wait for their threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections)
        self._waker.send(b"x")
        self._thread.join()
        for connection in connections:
            connection.cut()
        deadline = time.monotonic() + 10
        for connection in connections:
            connection.thread.join(max(0.0, deadline - time.monotonic()))
        for sock in (self._listener, self._wake, self._waker):
            sock.close()

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._closed:
            poll.poll()
            if self._closed:
                return
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                continue
            except OSError as err:
                # Out of descriptors or memory: others must end before more can begin.
                log.warning("cannot accept a connection: %s", err)
                time.sleep(0.05)
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        connection = _Connection(self, sock)
        with self._lock:
            if self._closed:
                sock.close()
                return
            places = [c for c in self._connections if not c.evicted]
            if len(places) >= self._limits.connections:
                strangers = [c for c in places if not c.authorized]
                if not strangers or len(self._connections) >= 2 * self._limits.connections:
                    sock.close()
                    log.warning("refused a connection: all %d places are taken", self._limits.connections)
                    return
                oldest = min(strangers, key=lambda c: c.since)
                oldest.evicted = True
                oldest.cut()
            self._connections.add(connection)
        try:
            connection.thread.start()
        except RuntimeError as err:
            log.warning("cannot start a thread for a connection: %s", err)
            self.forget(connection)
            sock.close()

    def forget(self, connection: _Connection) -> None:
        """Drop a connection that has ended."""
        with self._lock:
            self._connections.discard(connection)

    def drop_after_fork(self) -> None:
        """Close this child's copies of the descriptors, so that the parent's death still closes them."""
        with contextlib.suppress(OSError):
            self._listener.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.sock.close()


class _Connection:
    def __init__(self, server: Server, sock: socket.socket) -> None:
        self.sock = sock
        self.since = time.monotonic()
        self.authorized = False
        self.evicted = False
        self._server = server
        self._buffer = bytearray()
        self._reader = HostReader()
        self.span = (0, 0)
        """Which bytes of a data section are still to be sent."""
        self._visited: Publication | None = None
        self._held: Slot | None = None
        self._heard_out = False
        """The client has closed the connection, after all that was sent."""
        self.thread = threading.Thread(target=self._run, name="transport-serve", daemon=True)

    def cut(self) -> None:
        wire.cut(self.sock)

    def _run(self) -> None:
        server = self._server
        try:
            self.sock.setblocking(True)
            wire.set_options(self.sock)
            wire.set_send_timeout(self.sock, server._limits.stall_s)
            if server._tls is not None:
                self.sock.settimeout(server._limits.head_s)
                secure = server._tls.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
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
            server.forget(self)

    def _serve_one(self) -> bool:
        server = self._server
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
            response = respond(request, server._token(), server._board, self._reader)
            if response.status != 401:
                self.authorized = True
            if not request.keep_alive:
                response.close = True
            self._visit(response.asked, request)
            if response.content is not None and not response.content.has(response.start, response.end):
                raise Withdrawn
            self._send(response, head_only=request.method == "HEAD")
        except Withdrawn:
            response = error(404, "nothing is published", latest=None)
            self._send(response, head_only=request.method == "HEAD")
        return not response.close and not server._closed

    def _read_head(self) -> bytes | None:
        """Return the next request's head; None when the client is gone or took too long."""
        limits = self._server._limits
        begun = bool(self._buffer) or not self.authorized
        deadline = time.monotonic() + (limits.head_s if begun else limits.idle_s)
        while True:
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

    def _send(self, response: Response, *, head_only: bool) -> None:
        headers = {**response.headers, "Content-Length": str(response.content_length)}
        if response.close:
            headers["Connection"] = "close"
        if response.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        first = f"HTTP/1.1 {response.status} {REASONS[response.status]}"
        head = memoryview(wire.format_head(first, headers))
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
        with content.answering():
            self.span = (at, response.end)
            wire.send_views(self.sock, [head, before], batch=True, more=True)
            try:
                while at < response.end:
                    n = self._send_some(content, at, response.end)
                    if not n:
                        wire.wait_writable(self.sock, self._server._limits.stall_s)
                    at += n
                    self.span = (at, response.end)
            except Withdrawn as err:
                raise ConnectionAbortedError("the state was withdrawn in the middle of an answer") from err
            finally:
                self.span = (0, 0)

    def _send_some(self, content: Content, start: int, end: int) -> int:
        """Send as much as the way allows; return how many bytes that was."""
        slot, tls = content.slot, isinstance(self.sock, ssl.SSLSocket)
        if slot is not None and not tls:
            self._hold(slot)
            return wire.send_file(self.sock, slot.fd, start, end)
        sent = 0
        with content.reading(self.cut) as views:
            if content.on_cpu and not tls:
                return wire.send_some(self.sock, views(start, min(end, start + PIECE), self._reader))
            for view in views(start, end, self._reader):
                for low in range(0, len(view), PIECE):
                    piece = view[low : low + PIECE]
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


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _after_fork() -> None:
    for server in list(_servers):
        server.drop_after_fork()


os.register_at_fork(after_in_child=_after_fork)
