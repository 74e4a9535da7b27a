"""Reduce a few numbers over the members of an epoch, over plain sockets: the vote that ends each step.

Decides nothing about the numbers. A vote over a process group wakes three threads on each side; here the
thread that votes sends and receives by itself, along a tree: rank r reports to (r - 1) // FAN_OUT. Whoever
fails closes all its connections, so that all members learn of it within a moment, whatever their place.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ftkit.errors import Aborted, GroupError
from ftkit.groups import sockets
from ftkit.groups.link import StoreLink
from ftkit.groups.store import join_address, notice_dead_hosts, split_address

FAN_OUT = 32
_HEAD = struct.Struct("<IHcx")
"""Of each message: the round, the number of values, and what they are (`q` or `d`)."""
_GREETING = struct.Struct("<16sI")
_SLICE_S = 0.02
_MOST_VALUES = 64
_MOST_CALLERS = 4 * FAN_OUT
"""Callers that have not said who they are; when more come, the one that has been there longest goes."""


class BallotBox:
    """The votes of one rank with its peers; like a process group, it is configured anew for each epoch.

    One thread configures and votes at a time; `abort` and `close` may be called from any.
    """

    def __init__(self, *, timeout_s: float, hostname: str = "") -> None:
        """`timeout_s` bounds one vote; `hostname` is where to listen, by default where the store is seen."""
        self.timeout_s = timeout_s
        self.rank = 0
        self.size = 0
        self._hostname = hostname
        self._lock = threading.Lock()
        self._parent: socket.socket | None = None
        self._children: list[tuple[int, socket.socket]] = []
        self._opening: list[socket.socket] = []
        self._link: StoreLink | None = None
        self._round = 0
        self._awaited: tuple[socket.socket, ...] = ()
        self._since = 0.0
        self._voter = 0
        """The thread that votes."""
        self._over: str | None = "the votes are not configured; call configure() first"
        self._aborted = False
        sockets.hidden.add(self)

    # -- meeting -------------------------------------------------------------------------------------

    def configure(self, store: str, prefix: str, rank: int, size: int, *, timeout_s: float) -> None:
        """Meet the `size` members at `store` (host:port) under `prefix`, which must be new.

        Raises GroupError within `timeout_s`; Aborted at once when `abort` is called meanwhile.
        """
        old = self._take()
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self.rank, self.size, self._round = rank, size, 0
            self._over, self._aborted = None, False
            self._link = StoreLink(store) if size > 1 else None
        try:
            if self._link is not None:
                self._meet(self._link, prefix, deadline)
        except (OSError, GroupError) as error:
            self._fail(f"the votes of rank {rank} of {size} could not be set up: {error}")
        finally:
            link, self._link = self._link, None
            if link is not None:
                link.close()
            for sock in old:  # only now, so that nobody's last vote is cut off
                sock.close()
        self._check()

    def _meet(self, link: StoreLink, prefix: str, deadline: float) -> None:
        link.connect(deadline)
        link.join(prefix, self.rank, self.size)
        first = self.rank * FAN_OUT + 1
        expected = set(range(first, min(first + FAN_OUT, self.size)))
        if expected:
            listener, nonce = self._listen(link)
            self._accept(listener, nonce, expected, deadline)
        if self.rank > 0:
            self._dial(link, deadline)
        link.finish()

    def _listen(self, link: StoreLink) -> tuple[socket.socket, bytes]:
        host = self._hostname or link.local_host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        self._opening.append(listener)
        listener.bind((host, 0))
        listener.listen(FAN_OUT)
        listener.setblocking(False)
        nonce = secrets.token_bytes(16)
        address = join_address(host, listener.getsockname()[1])
        link.set(f"ballots/{self.rank}", nonce + address.encode())
        return listener, nonce

    def _accept(self, listener: socket.socket, nonce: bytes, expected: set[int], deadline: float) -> None:
        """Let the children in, whichever comes first; strangers may be silent or slow, and hold up nobody."""
        callers: dict[int, tuple[socket.socket, bytearray]] = {}
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        try:
            while expected:
                self._check()
                if time.monotonic() > deadline:
                    raise GroupError(f"these ranks did not come: {', '.join(map(str, sorted(expected)))}")
                for fd, _ in poll.poll(_SLICE_S * 1000):
                    if fd == listener.fileno():
                        with suppress(OSError):  # gone again
                            caller, _ = listener.accept()
                            caller.setblocking(False)
                            callers[caller.fileno()] = (caller, bytearray())
                            poll.register(caller, select.POLLIN)
                        if len(callers) > _MOST_CALLERS:
                            oldest = next(iter(callers))
                            poll.unregister(oldest)
                            callers.pop(oldest)[0].close()
                    elif fd in callers and self._has_greeted(*callers[fd]):
                        poll.unregister(fd)
                        self._admit(*callers.pop(fd), nonce, expected)
        finally:
            for caller, _ in callers.values():
                caller.close()
        self._opening.remove(listener)
        listener.close()
        self._children.sort(key=lambda child: child[0])

    @staticmethod
    def _has_greeted(caller: socket.socket, greeting: bytearray) -> bool:
        """Read on; say whether the greeting is whole, or will never be."""
        try:
            data = caller.recv(_GREETING.size - len(greeting))
        except BlockingIOError:
            return False
        except OSError:
            return True
        greeting += data
        return not data or len(greeting) == _GREETING.size

    def _admit(self, caller: socket.socket, greeting: bytearray, nonce: bytes, expected: set[int]) -> None:
        if len(greeting) == _GREETING.size:
            given, rank = _GREETING.unpack(greeting)
            if hmac.compare_digest(given, nonce) and rank in expected:
                expected.remove(rank)
                self._keep(caller, rank)
                return
        caller.close()  # a stranger

    def _dial(self, link: StoreLink, deadline: float) -> None:
        published = link.get(f"ballots/{(self.rank - 1) // FAN_OUT}")
        host, port = split_address(published[16:].decode())
        sock = self._connect(host, port, deadline)
        sock.sendall(_GREETING.pack(published[:16], self.rank))
        self._keep(sock, None)

    def _connect(self, host: str, port: int, deadline: float) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        self._opening.append(sock)
        sock.setblocking(False)
        code = sock.connect_ex((host, port))
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        while code == errno.EINPROGRESS:
            self._check()
            if time.monotonic() > deadline:
                raise GroupError(f"the member at {host}:{port} does not answer")
            if poll.poll(_SLICE_S * 1000):
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code != 0:
            raise GroupError(f"the member at {host}:{port} cannot be reached: {os.strerror(code)}")
        self._opening.remove(sock)
        sock.setblocking(True)
        return sock

    def _keep(self, sock: socket.socket, child: int | None) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_dead_hosts(sock)
        _limit(sock, self.timeout_s)
        with self._lock:
            if child is None:
                self._parent = sock
            else:
                self._children.append((child, sock))
        self._check()

    # -- voting --------------------------------------------------------------------------------------

    def highest(self, values: Sequence[int], *, timeout_s: float | None = None) -> list[int]:
        """Return the greatest of all members' values, place by place; every member gets the same answer.

        Raises GroupError when it failed or took longer than `timeout_s` (default: the box's own); Aborted
        after `abort`.
        """
        merged = self._vote("q", values, max, timeout_s)
        return [int(v) for v in merged]

    def total(self, value: float, *, timeout_s: float | None = None) -> float:
        """Return the sum of all members' values, added in the order of their ranks; raises like `highest`."""
        return float(self._vote("d", [value], lambda a, b: a + b, timeout_s)[0])

    @property
    def configured(self) -> bool:
        """Whether votes can be cast."""
        return self._over is None

    def waiting_since(self) -> float | None:
        """Say since when a vote waits for its peers (monotonic clock); None when nothing is awaited.

        Nor is it when the thread that votes is somewhere else: in a signal handler, with the answer in hand.
        """
        awaited, since = self._awaited, self._since
        frame = sys._current_frames().get(self._voter) if awaited else None
        if frame is None or frame.f_code.co_filename != __file__:
            return None
        poll = select.poll()
        try:
            for sock in awaited:
                poll.register(sock, select.POLLIN)
            return None if poll.poll(0) else since
        except (OSError, ValueError):  # closed in this moment
            return None

    def _vote(
        self,
        code: str,
        values: Sequence[float],
        merge: Callable[[float, float], float],
        timeout_s: float | None,
    ) -> Sequence[float]:
        assert 0 < len(values) <= _MOST_VALUES, "a ballot has a few values"
        self._check()
        if self.size == 1:
            return values
        limit = self.timeout_s if timeout_s is None else timeout_s
        self._since, self._voter = time.monotonic(), threading.get_ident()
        try:
            return self._carry(code, values, merge, limit)
        except (OSError, GroupError) as error:
            why = "timed out" if isinstance(error, BlockingIOError | TimeoutError) else str(error)
            self._fail(f"a vote of rank {self.rank} of {self.size} failed: {why}")
            self._check()
            raise AssertionError from error  # _check has raised
        finally:
            self._awaited = ()

    def _carry(
        self, code: str, values: Sequence[float], merge: Callable[[float, float], float], limit: float
    ) -> Sequence[float]:
        self._round = number = (self._round + 1) & 0xFFFFFFFF
        head = _HEAD.pack(number, len(values), code.encode())
        body = struct.Struct(f"<{len(values)}{code}")
        if self._children:
            ballots = self._gather(head, body, limit)
            for rank, _ in self._children:
                values = list(map(merge, values, ballots[rank]))
        if self._parent is not None:
            self._parent.sendall(head + body.pack(*values))
            self._awaited = (self._parent,)
            values = self._read(self._parent, head, body, limit)
        answer = head + body.pack(*values)
        for _, sock in self._children:
            sock.sendall(answer)
        return values

    def _gather(self, head: bytes, body: struct.Struct, limit: float) -> dict[int, Sequence[float]]:
        """Read every child's ballot, whichever comes first; one that has died is noticed at once."""
        waiting = {sock.fileno(): (rank, sock) for rank, sock in self._children}
        if len(waiting) == 1:
            ((rank, sock),) = waiting.values()
            self._awaited = (sock,)
            return {rank: self._read(sock, head, body, limit)}
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        ballots: dict[int, Sequence[float]] = {}
        until = time.monotonic() + limit
        while waiting:
            self._awaited = tuple(sock for _, sock in waiting.values())
            ready = poll.poll(max(0.0, until - time.monotonic()) * 1000)
            if not ready:
                late = ", ".join(str(rank) for rank, _ in waiting.values())
                raise GroupError(f"rank {late} did not vote within {limit:g} s")
            for fd, _ in ready:
                rank, sock = waiting.pop(fd)
                poll.unregister(fd)
                ballots[rank] = self._read(sock, head, body, limit)
        return ballots

    def _read(self, sock: socket.socket, head: bytes, body: struct.Struct, limit: float) -> Sequence[float]:
        if limit != self.timeout_s:
            _limit(sock, limit)
        data = _receive(sock, len(head) + body.size)
        if limit != self.timeout_s:
            _limit(sock, self.timeout_s)
        if data[: len(head)] != head:
            raise GroupError("the members vote on different things")
        return body.unpack_from(data, len(head))

    # -- the end -------------------------------------------------------------------------------------

    def abort(self, why: str = "") -> None:
        """End a vote or a `configure` in flight at once; any thread, any time. Idempotent."""
        with self._lock:
            self._aborted = True
            self._over = self._over or why or "the votes were aborted"
        self._cut()

    def close(self) -> None:
        """Abort, and free the sockets."""
        self.abort("the votes are closed")
        for sock in self._take():
            sock.close()

    def hidden_fds(self) -> list[int]:
        """Return the descriptors that a forked child must let go of."""
        fds = [s.fileno() for s in self._all() if s.fileno() >= 0]
        return fds if self._link is None else fds + self._link.fds()

    def forget_in_child(self) -> None:
        """A forked child has no votes."""
        self._lock = threading.Lock()
        self._over, self._parent, self._children, self._opening = (
            "the votes belong to the parent",
            None,
            [],
            [],
        )

    def _all(self) -> list[socket.socket]:
        parent = [] if self._parent is None else [self._parent]
        return [*parent, *(sock for _, sock in self._children), *self._opening]

    def _take(self) -> list[socket.socket]:
        with self._lock:
            taken = self._all()
            self._parent, self._children, self._opening = None, [], []
            self._over = self._over or "the votes are being configured anew"
        return taken

    def _cut(self) -> None:
        link = self._link
        if link is not None:
            link.cut()
        for sock in self._all():
            with suppress(OSError):  # not connected any more
                sock.shutdown(socket.SHUT_RDWR)

    def _fail(self, why: str) -> None:
        with self._lock:
            self._over = self._over or why
        self._cut()

    def _check(self) -> None:
        if self._over is not None:
            raise Aborted(self._over) if self._aborted else GroupError(self._over)


def _limit(sock: socket.socket, seconds: float) -> None:
    """Bound each wait on a blocking socket, in the kernel: no system call per wait."""
    whole = int(seconds)
    limit = struct.pack("@ll", whole, max(1, int((seconds - whole) * 1e6)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _receive(sock: socket.socket, size: int) -> bytes:
    data = sock.recv(size, socket.MSG_WAITALL)
    while len(data) < size:
        more = sock.recv(size - len(data), socket.MSG_WAITALL) if data else b""
        if not more:
            raise GroupError("a member closed its connection")
        data += more
    return data
