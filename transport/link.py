"""One connection to a source, seen from the joiner.

Knows HTTP heads and time limits; not what is fetched or why. Every wait ends when the peer is silent for
`stall_s`, when `check` (called several times a second) raises, or when another thread calls `cut`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from transport import wire
from transport.visits import FETCH

SLICE_S: Final = 0.2
"""Longest wait inside the kernel, between two looks at the clock and at `check`."""


class Lost(Exception):
    """The connection was refused, reset or closed in the middle."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class Garbled(Exception):
    """The peer's answer is not valid HTTP, or not an answer to the question."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The head of a response."""

    status: int
    headers: dict[str, str]
    length: int


class Link:
    """A connection that is opened on first use. Only `cut` may be called from another thread."""

    def __init__(
        self,
        address: str,
        token: str,
        *,
        tls: ssl.SSLContext | None,
        stall_s: float,
        check: Callable[[], None],
        fetch: str = "",
    ) -> None:
        """`fetch` names the fetch that the link belongs to, for the source."""
        url = urlsplit(address)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"the address of a source must look like http://host:port, not {address!r}")
        self._host, self._port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if url.scheme == "https" else None
        self._stall_s, self._check = stall_s, check
        self._headers = {"Host": url.netloc.rpartition("@")[2], "Authorization": f"Bearer {token}"}
        if fetch:
            self._headers[FETCH] = fetch
        self._sock: socket.socket | None = None
        self._cut = False
        self._ahead = b""  # bytes of a body that came with its head

    @property
    def is_open(self) -> bool:
        """Say whether there is a connection."""
        return self._sock is not None

    @property
    def is_local(self) -> bool:
        """Say whether the source is on this machine."""
        try:
            return self._sock is not None and wire.is_local(self._sock)
        except OSError:  # the connection has just ended
            return False

    def open(self) -> None:
        """Connect."""
        deadline = time.monotonic() + self._stall_s
        try:
            infos = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Lost(f"its name cannot be resolved: {error}") from error
        self._check()
        failure: Lost | None = None
        for family, kind, proto, _, target in infos:
            sock = socket.socket(family, kind, proto)
            self._sock = sock
            try:
                self._connect(sock, target, deadline)
                if self._tls is not None:
                    sock = self._shake_hands(sock, self._tls)
                wire.set_recv_timeout(sock, SLICE_S)
                wire.set_send_timeout(sock, self._stall_s)
                return
            except (Lost, OSError) as error:
                self.close()
                self._check()
                failure = error if isinstance(error, Lost) else Lost(f"cannot connect: {error}")
            except BaseException:
                self.close()
                raise
        raise failure or Lost("its name has no address")

    def _shake_hands(self, sock: socket.socket, tls: ssl.SSLContext) -> socket.socket:
        sock.settimeout(self._stall_s)
        secure = tls.wrap_socket(sock, server_hostname=self._host, do_handshake_on_connect=False)
        self._sock = secure  # before the handshake, so that it can be cut
        if self._cut:
            raise Lost("the connection was cut here")
        secure.do_handshake()
        secure.settimeout(None)
        return secure

    def _connect(self, sock: socket.socket, target: tuple[object, ...], deadline: float) -> None:
        wire.set_options(sock)
        sock.setblocking(False)
        code = sock.connect_ex(target)
        if code == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            while not poll.poll(SLICE_S * 1000):
                self._check()
                if time.monotonic() >= deadline:
                    raise wire.Stalled
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if self._cut:
            raise Lost("the connection was cut here")
        if code:
            raise Lost(f"cannot connect: {os.strerror(code)}", refused=code == errno.ECONNREFUSED)
        sock.setblocking(True)

    def request(self, method: str, path: str, headers: dict[str, str], *, patience_s: float = 0.0) -> Reply:
        """Send a request and return the head of the answer; `patience_s` is added to the stall time."""
        if self._sock is None:
            self.open()
        sock = self._sock
        assert sock is not None
        raw = memoryview(wire.format_head(f"{method} {path} HTTP/1.1", self._headers | headers))
        try:
            wire.send_views(sock, [raw], batch=True)
        except OSError as error:
            raise Lost(f"the connection broke: {error}") from error
        return self._read_head(method, self._stall_s + patience_s)

    def _read_head(self, method: str, stall_s: float) -> Reply:
        data = bytearray(self._ahead)
        piece = bytearray(4096)
        deadline = time.monotonic() + stall_s  # for the whole head: it is small
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > wire.MAX_HEAD:
                raise Garbled("the head of its answer is too long")
            n = self._recv([memoryview(piece)], deadline, whole=False)
            data += piece[:n]
            self._check()
            if time.monotonic() >= deadline and b"\r\n\r\n" not in data:
                raise wire.Stalled  # it trickles
        self._ahead = bytes(data[end + 4 :])
        try:
            first, headers = wire.parse_head(bytes(data[:end]))
            protocol, code, *_ = first.split(" ")
            length = int(headers.get("content-length", ""))
            status = int(code)
        except ValueError as error:
            raise Garbled(f"the head of its answer is malformed: {error}") from error
        if not protocol.startswith("HTTP/1.") or length < 0:
            raise Garbled("the head of its answer is malformed")
        return Reply(status, headers, 0 if method == "HEAD" else length)

    def read_body(self, reply: Reply, limit: int) -> bytes:
        """Return a whole body of at most `limit` bytes."""
        if reply.length > limit:
            raise Garbled(f"its answer has {reply.length} bytes, more than {limit}")
        body = bytearray(reply.length)
        view = memoryview(body)
        while view:
            view = view[self.read_into([view]) :]
            self._check()
        return bytes(body)

    def read_into(self, views: Sequence[memoryview]) -> int:
        """Receive into the views, in order; return how many bytes came (at least one).

        Returns early, with what has come, after `SLICE_S`. Raises `wire.Stalled` or `Lost`.
        """
        if self._ahead:
            taken = 0
            for view in views:
                n = min(len(view), len(self._ahead) - taken)
                view[:n] = self._ahead[taken : taken + n]
                taken += n
                if taken == len(self._ahead):
                    break
            self._ahead = self._ahead[taken:]
            return taken
        return self._recv(views, time.monotonic() + self._stall_s, whole=True)

    def _recv(self, views: Sequence[memoryview], deadline: float, *, whole: bool) -> int:
        sock = self._sock
        assert sock is not None
        while True:
            try:
                n = self._receive(sock, views, whole=whole)
            except wire.TIMED_OUT:
                self._check()
                if time.monotonic() >= deadline:
                    raise wire.Stalled from None
                continue
            except OSError as error:
                self._check()
                raise Lost(f"the connection broke: {error}") from error
            if n == 0:
                self._check()
                raise Lost("it closed the connection in the middle of an answer")
            return n

    def _receive(self, sock: socket.socket, views: Sequence[memoryview], *, whole: bool) -> int:
        return wire.recv_views(sock, views) if whole else sock.recv_into(views[0])

    def cut(self) -> None:
        """Wake up the thread that uses this link; it will see an error."""
        self._cut = True
        sock = self._sock
        if sock is not None:
            wire.cut(sock)

    def close(self) -> None:
        """End the connection, if there is one; the link can be used again."""
        sock, self._sock, self._ahead = self._sock, None, b""
        if sock is not None:
            wire.cut(sock)
            with contextlib.suppress(OSError):
                sock.close()
