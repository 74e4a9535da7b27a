"""The bytes of HTTP/1.1 heads, and blocking sockets with time limits kept by the kernel.

Knows neither routes nor states. Sockets stay blocking, with `SO_RCVTIMEO` and `SO_SNDTIMEO`: one system
call then moves a whole extent between the socket and the tensors' memory, without a copy in between.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

MAX_HEAD: Final = 16 << 10
IOV: Final = 512
_BATCH_BYTES: Final = 8 << 20
_HOT_BYTES: Final = 1 << 20
"""What is looked at and then sent while it is still in a core's cache."""
LOCAL_BUFFER: Final = 512 << 10
_RDHUP: Final = getattr(select, "POLLRDHUP", 0x2000)
TIMED_OUT: Final = (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class BadHead(ValueError):
    """The head of a request or response is malformed or too long."""


class Stalled(Exception):
    """The peer neither took nor sent a byte for too long."""


def parse_head(raw: bytes) -> tuple[str, dict[str, str]]:
    """Split a head (without the empty line) into its first line and its headers, names in lower case."""
    try:
        lines = raw.decode("latin-1").split("\r\n")
    except UnicodeDecodeError as error:  # latin-1 decodes everything
        raise BadHead(str(error)) from error
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or name in headers:
            raise BadHead(f"malformed or repeated header {name[:60]!r}")
        headers[name] = value.strip()
    return lines[0], headers


def format_head(first: str, headers: dict[str, str]) -> bytes:
    """Return a head with the empty line that ends it."""
    return "\r\n".join([first, *(f"{k}: {v}" for k, v in headers.items()), "", ""]).encode("latin-1")


def set_options(sock: socket.socket) -> None:
    """Send small messages at once, and notice a peer whose machine has vanished."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def is_local(sock: socket.socket) -> bool:
    """Say whether the peer is on this machine."""
    return sock.family == socket.AF_UNIX or sock.getpeername()[0] == sock.getsockname()[0]


def set_local_options(sock: socket.socket) -> None:
    """Do what is good for a sender whose peer is on this machine."""
    # Little enough for the caches of the processor; between machines it would be too little.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            # There is nothing to be congested, and the simplest rule has no pacing and no timers.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _timeval(seconds: float) -> bytes:
    micros = max(1, int(seconds * 1e6))
    return struct.pack("@ll", micros // 1_000_000, micros % 1_000_000)


def set_recv_timeout(sock: socket.socket, seconds: float) -> None:
    """Let each receive wait at most this long in all; it returns what has arrived by then."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))


def set_send_timeout(sock: socket.socket, seconds: float) -> None:
    """Let each send wait at most this long in all; it returns how much it could send."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))


def cut(sock: socket.socket) -> None:
    """End a connection now; a thread that is sending or receiving on it wakes up with an error or EOF."""
    with contextlib.suppress(OSError):
        # Past any TLS layer, which is not to be used by two threads at once.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def send_views(sock: socket.socket, views: Iterable[memoryview], *, batch: bool, more: bool = False) -> None:
    """Send all views in order; with `batch`, several per system call (they must all stay valid).

    With `more`, other bytes follow soon, which are to travel together with these.

    Raises `Stalled` when the peer takes nothing for as long as the send timeout.
    """
    if isinstance(sock, ssl.SSLSocket):
        for view in views:
            for start in range(0, len(view), 1 << 20):
                try:
                    sock.sendall(view[start : start + (1 << 20)])
                except TIMED_OUT as error:
                    raise Stalled from error
        return
    for group in _groups(views, _BATCH_BYTES) if batch else ([view] for view in views):
        _send_group(sock, group, socket.MSG_MORE if more else 0)


def send_for(
    sock: socket.socket, views: Iterable[memoryview], limit_s: float, show: Callable[[int, memoryview], None]
) -> int:
    """Send for about so long; return how many bytes that was.

    One send may take as long as the send timeout, which should be short, too. `show` is given each piece
    just before it is sent, and how many bytes come before it.
    """
    deadline = time.monotonic() + limit_s
    sent = 0
    for group in _groups(views, _HOT_BYTES):
        size = 0
        for view in group:
            show(sent + size, view)
            size += len(view)
        try:
            n = sock.sendmsg(group)
        except TIMED_OUT:
            n = 0
        sent += n
        if n < size or time.monotonic() >= deadline:
            break
    return sent


def wait_writable(sock: socket.socket, timeout_s: float) -> None:
    """Wait until a socket takes bytes again; raise `Stalled` after `timeout_s`."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not poll.poll(timeout_s * 1000):
        raise Stalled


def send_file(sock: socket.socket, fd: int, start: int, end: int) -> int:
    """Send bytes `start` to `end` of a file, without a copy; return how many were sent."""
    try:
        return os.sendfile(sock.fileno(), fd, start, end - start)
    except TIMED_OUT as error:
        raise Stalled from error


def is_gone(sock: socket.socket) -> bool:
    """Say whether the peer has closed a connection."""
    poll = select.poll()
    poll.register(sock, _RDHUP)
    try:
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True


def _groups(views: Iterable[memoryview], limit: int) -> Iterator[list[memoryview]]:
    """Yield the views in groups of at most so many bytes; those that are longer in parts."""
    group: list[memoryview] = []
    size = 0
    for view in views:
        at = 0
        while at < len(view):
            piece = view[at : at + limit - size]
            group.append(piece)
            at += len(piece)
            size += len(piece)
            if len(group) == IOV or size == limit:
                yield group
                group, size = [], 0
    if group:
        yield group


def _send_group(sock: socket.socket, group: list[memoryview], flags: int) -> None:
    left = sum(map(len, group))
    while left:
        try:
            sent = sock.sendmsg(group, [], flags)
        except TIMED_OUT as error:
            raise Stalled from error
        left -= sent
        if left:
            group = advance(group, sent)


def advance(views: Sequence[memoryview], n: int) -> list[memoryview]:
    """Return the views without their first `n` bytes."""
    for index, view in enumerate(views):
        if n < len(view):
            return [view[n:], *views[index + 1 :]]
        n -= len(view)
    return []


def recv_views(sock: socket.socket, views: Sequence[memoryview]) -> int:
    """Receive into the views, all of them if the bytes come in time; return how many came, 0 at EOF.

    Raises one of `TIMED_OUT` when none came within the receive timeout.
    """
    if isinstance(sock, ssl.SSLSocket):
        return sock.recv_into(views[0])
    if len(views) == 1:
        return sock.recv_into(views[0], len(views[0]), socket.MSG_WAITALL)
    return sock.recvmsg_into(views[:IOV], 0, socket.MSG_WAITALL)[0]
