"""Serve the page and the feed over HTTP, to a bounded number of clients, however slow or rude.

`/` is the page, `/events` the stream of snapshots that it reads, `/state.json` the newest one. It only
answers GET and HEAD, and keeps no state of its clients.
"""

from __future__ import annotations

import contextlib
import http.server
import logging
import socket
import socketserver
import threading
import time
from http import HTTPStatus
from types import TracebackType
from typing import Any

from ftkit.dashboard.feed import Feed
from ftkit.dashboard.guard import Guard, is_address
from ftkit.dashboard.page import Page, load_page
from ftkit.errors import ConfigError

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
MAX_STREAMS = 48
"""Fewer, so that there is always room to load the page and read the state."""
REQUEST_S = 5.0
"""A client that has not sent its request by then, or not taken a piece of the answer, is cut off."""
HEARTBEAT_S = 10.0
FIRST_S = 5.0
"""How long `/state.json` waits for the job to be read at all."""

_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """The dashboard's HTTP server; a context manager that serves from a thread of its own."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False  # two dashboards on one port would answer in turn
    request_queue_size = 64

    def __init__(self, host: str, port: int, feed: Feed, names: tuple[str, ...] = ()) -> None:
        self.feed = feed
        self.page: Page = load_page()
        self.guard = Guard((*names, *(() if is_address(host) else (host,))))
        self.streams = threading.BoundedSemaphore(MAX_STREAMS)
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._unread: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family = found[0][0]
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error.strerror or error}); choose another with --listen"
            ) from None
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.2}, name="dashboard server", daemon=True
        )

    def server_bind(self) -> None:
        """Bind, without the look-up of the machine's full name, which can take long and is not needed."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self.server_close()

    # -- connections -------------------------------------------------------------------------------

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread, or send it away when there are too many."""
        if not self._slots.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.settimeout(0)
                request.send(_BUSY)
            self.shutdown_request(request)
            return
        with self._lock:
            self._unread[request] = time.monotonic() + REQUEST_S
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._release(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._release(request)

    def _release(self, request: socket.socket) -> None:
        self.has_asked(request)
        self._slots.release()

    def has_asked(self, request: socket.socket) -> None:
        """Note that the client has sent its request."""
        with self._lock:
            self._unread.pop(request, None)

    def service_actions(self) -> None:
        """Cut off those who send their request too slowly, one byte at a time perhaps."""
        now = time.monotonic()
        with self._lock:
            for request in [r for r, deadline in self._unread.items() if now >= deadline]:
                del self._unread[request]
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may go away in the middle of anything."""
        log.debug("a connection of %s ended with an error", client_address, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request of a connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "ftkit", ""
    timeout = REQUEST_S
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = "text/plain; charset=utf-8"

    def do_GET(self) -> None:
        """Answer a request."""
        self.server.has_asked(self.connection)
        self.close_connection = True
        path = self.path.partition("?")[0]
        refusal = self.server.guard.refusal(
            self.headers.get_all("Host", []), self.headers.get("Sec-Fetch-Site", ""), is_page=path == "/"
        )
        if refusal is not None:
            self.send_error(HTTPStatus.FORBIDDEN, refusal)
        elif path == "/":
            self._send(self.server.page.document, "text/html; charset=utf-8")
        elif path == "/state.json":
            self._send_state()
        elif path == "/events":
            self._send_events()
        else:
            self.send_error(HTTPStatus.NOT_FOUND, "there is /, /events and /state.json")

    do_HEAD = do_GET  # noqa: N815

    def _refuse(self) -> None:
        self.close_connection = True
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED, "the dashboard only shows things")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse  # noqa: N815

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_state(self) -> None:
        update = self.server.feed.wait_newer(0, FIRST_S)
        if update is None:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the job has not been read from etcd yet")
        else:
            self._send(update.data, "application/json")

    def _send_events(self) -> None:
        if not self.server.streams.acquire(blocking=False):
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "too many viewers")
            return
        try:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("X-Accel-Buffering", "no")  # else a proxy may hold the stream back
            self.end_headers()
            if self.command != "HEAD":
                self._stream()
        finally:
            self.server.streams.release()

    def _stream(self) -> None:
        """Send each update, or the newest of those that came while the client was busy with the last."""
        self.wfile.write(b"retry: 2000\n\n")
        feed, number = self.server.feed, 0
        while not feed.closed:
            update = feed.wait_newer(number, HEARTBEAT_S)
            if update is None:
                self.wfile.write(b"event: alive\ndata:\n\n")
            else:
                number = update.number
                self.wfile.write(b"data: " + update.data + b"\n\n")

    def end_headers(self) -> None:
        """Add to every answer what keeps browsers from doing anything else with it."""
        self.send_header("Content-Security-Policy", self.server.page.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        if self.close_connection:
            self.send_header("Connection", "close")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log requests only when asked to."""
        log.debug("%s: " + format, self.client_address[0], *args)
