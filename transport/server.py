"""Accept connections, one thread for each, as many as may be.

Decides who is let in: one that has not shown the token yet is the first to go when all places are taken.
What happens on a connection is decided in `connection.py`.
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

from transport import near
from transport.connection import Connection, Limits, Service
from transport.crew import Crew
from transport.publication import Board

log = logging.getLogger(__name__)


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
        crew: Crew,
    ) -> None:
        self._limits, self._crew = limits, crew
        self._service = Service(board=board, token=token, limits=limits, tls=tls, ended=self._forget)
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._closed = False
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((bind, port))
            self._listener.listen(512)
            self._listener.setblocking(False)
            self._near: socket.socket | None = None
            self._near_name = ""
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
            connection.stop()
        deadline = time.monotonic() + 10
        for connection in connections:
            if connection.task is not None:
                connection.task.wait(max(0.0, deadline - time.monotonic()))
        for sock in (self._listener, self._near, self._wake, self._waker):
            if sock is not None:
                sock.close()

    def listen_near(self, name: str) -> None:
        """Listen for processes of this user on this machine as well, under this name and no other."""
        with self._lock:
            if self._closed or name == self._near_name:
                return
            before, self._near, self._near_name = self._near, near.listen(name), name
        self._waker.send(b"x")
        if before is not None:
            before.close()

    def _accept(self) -> None:
        while not self._closed:
            own, poll = self._near, select.poll()
            listeners = [self._listener] if own is None else [self._listener, own]
            for sock in (*listeners, self._wake):
                with contextlib.suppress(ValueError):  # closed, and replaced, a moment ago
                    poll.register(sock, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            if self._closed:
                return
            if self._wake.fileno() in ready:
                self._wake.recv(4096)
            for listener in listeners:
                if listener.fileno() in ready:
                    self._accept_one(listener)

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as err:
            # Out of descriptors or memory: others must end before more can begin.
            log.warning("cannot accept a connection: %s", err)
            time.sleep(0.05)
            return
        is_near = listener is not self._listener
        if is_near and not near.is_own(sock):
            log.warning("refused a connection of another user of this machine")
            sock.close()
            return
        self._admit(sock, is_near=is_near)

    def _admit(self, sock: socket.socket, *, is_near: bool) -> None:
        connection = Connection(self._service, sock, is_near=is_near)
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
            connection.task = self._crew.start(connection.run, "transport-serve")
        except RuntimeError as err:
            log.warning("cannot start a thread for a connection: %s", err)
            self._forget(connection)
            sock.close()

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)

    def drop_after_fork(self) -> None:
        """Close this child's copies of the descriptors, so that the parent's death still closes them."""
        for listener in (self._listener, self._near):
            if listener is not None:
                with contextlib.suppress(OSError):
                    listener.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.sock.close()


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _after_fork() -> None:
    for server in list(_servers):
        server.drop_after_fork()


os.register_at_fork(after_in_child=_after_fork)
