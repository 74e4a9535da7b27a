"""Between processes of one user on one machine: hand over memory instead of sending what is in it.

The source also listens on an abstract Unix socket, and speaks the same HTTP there. Asked for a range, it
answers not with the bytes but with where they are: in a memfd, whose descriptor comes along, or in its own
memory, which the joiner then reads (`process_vm_readv`). Either way each byte is copied once, by the joiner,
into its place. The memory stays as it is until the joiner says that it is done, by an empty line, or the
connection ends. Decides on which side of which socket who may ask for that; knows no versions and no chunks.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import hashlib
import hmac
import json
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import numpy as np

from transport import wire
from transport.link import SLICE_S, Garbled, Link, Lost, Reply

MEMORY: Final = "x-memory"
"""Header of a request: in which ways memory can be handed over. Of an answer: in which way it is."""
FILE: Final = "fd"
PROCESS: Final = "vm"
DONE: Final = b"\r\n"
MAX_PLACE: Final = 1 << 20
_IOV: Final = 1024
_PROBE: Final = np.frombuffer(bytearray(os.urandom(16)), np.uint8)
"""Read by a joiner to make sure that it reads the memory of the process that it talks to."""


def name_of(token: str, address: str) -> str:
    """Return the name of the Unix socket of the source at an address, which only token holders know."""
    return "transport-" + hmac.new(token.encode(), address.encode(), hashlib.sha256).hexdigest()[:40]


def listen(name: str) -> socket.socket | None:
    """Return a socket that listens under a name; None where that cannot be."""
    if sys.platform != "linux":
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind("\0" + name)
        sock.listen(64)
        sock.setblocking(False)
    except OSError:
        sock.close()
        return None
    return sock


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def is_own(sock: socket.socket) -> bool:
    """Say whether the other end of a Unix socket belongs to the user of this process."""
    return peer(sock)[1] == os.geteuid()


def place_in_file(start: int, end: int) -> bytes:
    """Describe a range of a memfd."""
    return json.dumps({"at": start, "length": end - start}).encode()


def place_in_process(views: Iterable[memoryview]) -> bytes | None:
    """Describe some memory of this process; None if that takes too many words."""
    pieces = [[np.frombuffer(view, np.uint8).ctypes.data, len(view)] for view in views]
    place = {"pieces": pieces, "probe": [_PROBE.ctypes.data, _PROBE.tobytes().hex()]}
    raw = json.dumps(place).encode()
    return raw if len(raw) <= MAX_PLACE else None


def send_with(sock: socket.socket, raw: bytes, fd: int) -> None:
    """Send bytes together with a descriptor."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    sent = sock.sendmsg([raw], rights)
    wire.send_views(sock, [memoryview(raw)[sent:]], batch=True)


class _Place(Protocol):
    left: int

    def read(self, views: Sequence[memoryview]) -> int:
        """Copy the next bytes into the views; return how many."""

    def close(self) -> None:
        """Let go of it."""


class _FilePlace:
    """A range of a memfd. Reading is faster than mapping it, which takes a fault per few pages."""

    def __init__(self, fd: int, place: dict[str, int]) -> None:
        self._fd, self._at, self.left = fd, place["at"], place["length"]

    def read(self, views: Sequence[memoryview]) -> int:
        n = os.preadv(self._fd, _first(views, self.left), self._at)
        self._at += n
        self.left -= n
        return n

    def close(self) -> None:
        os.close(self._fd)


class _ProcessPlace:
    """Some memory of another process."""

    def __init__(self, pid: int, pieces: list[list[int]]) -> None:
        self._pid = pid
        self._pieces = [(address, nbytes) for address, nbytes in pieces if nbytes]
        self._index = self._offset = 0
        self.left = sum(nbytes for _, nbytes in self._pieces)

    def read(self, views: Sequence[memoryview]) -> int:
        views = _first(views, self.left)
        wanted = sum(map(len, views))
        remote: list[tuple[int, int]] = []
        index, offset = self._index, self._offset
        while wanted > 0 and len(remote) < _IOV:
            address, nbytes = self._pieces[index]
            remote.append((address + offset, min(nbytes - offset, wanted)))
            wanted -= remote[-1][1]
            index, offset = index + 1, 0
        n = read_process(self._pid, views, remote)
        self._advance(n)
        return n

    def _advance(self, n: int) -> None:
        self.left -= n
        while n:
            step = min(n, self._pieces[self._index][1] - self._offset)
            self._offset += step
            n -= step
            if self._offset == self._pieces[self._index][1]:
                self._index, self._offset = self._index + 1, 0

    def close(self) -> None:
        pass


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _process_vm_readv() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return None
    vectors = ctypes.POINTER(_Vector)
    function.argtypes = [ctypes.c_int, vectors, ctypes.c_ulong, vectors, ctypes.c_ulong, ctypes.c_ulong]
    function.restype = ctypes.c_ssize_t
    return function


_readv: Final = _process_vm_readv()


def read_process(pid: int, into: Sequence[memoryview], pieces: Sequence[tuple[int, int]]) -> int:
    """Copy pieces (address, length) of another process's memory into views; return how many bytes."""
    if _readv is None:
        raise OSError("this system has no process_vm_readv")
    local = _vectors([(np.frombuffer(view, np.uint8).ctypes.data, len(view)) for view in into])
    remote = _vectors(pieces)
    n = _readv(pid, local, len(local), remote, len(remote), 0)
    if n < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return n


def _vectors(pieces: Sequence[tuple[int, int]]) -> ctypes.Array[_Vector]:
    return (_Vector * len(pieces))(*(_Vector(*piece) for piece in pieces))


def _first(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return the first views, with so many bytes in all at most."""
    result = []
    for view in views[:_IOV]:
        if nbytes > 0:
            result.append(view[:nbytes])
            nbytes -= len(result[-1])
    return result


class NearLink(Link):
    """A link that asks for memory if the source is a process of this user on this machine, else as any."""

    def __init__(self, address: str, token: str, **settings: object) -> None:
        super().__init__(address, token, **settings)  # type: ignore[arg-type]  # the very same
        self._name = name_of(token, address)
        self._pid: int | None = None
        """Of the source, while this is connected to it by a Unix socket."""
        self._ways = [FILE, PROCESS] if _readv is not None else [FILE]
        self._probed = self._retried = False
        self._place: _Place | None = None
        self._fds: list[int] = []

    def open(self) -> None:
        """Connect, by Unix socket if there is one of that name."""
        if self._tls is None and self._meet():
            return
        super().open()

    def _meet(self) -> bool:
        if sys.platform != "linux":
            return False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect("\0" + self._name)
            if not is_own(sock):
                raise PermissionError("another user's")
            sock.setblocking(True)
            wire.set_recv_timeout(sock, SLICE_S)
            wire.set_send_timeout(sock, self._stall_s)
        except OSError:
            sock.close()
            return False
        self._sock, self._pid = sock, peer(sock)[0]
        if self._cut:
            self.close()
            raise Lost("the connection was cut here")
        return True

    def request(self, method: str, path: str, headers: dict[str, str], *, patience_s: float = 0.0) -> Reply:
        """Send a request; what is to be read may then come from memory."""
        if self._sock is None:
            self.open()
        elif self._pid is None and self._tls is None and "Range" in headers and not self._retried:
            # A source listens here once it has published, maybe since the request before this one.
            self._retried, far = True, self._sock
            if self._meet():
                far.close()
        if self._pid is None or method != "GET" or "Range" not in headers:
            return super().request(method, path, headers, patience_s=patience_s)
        asking = headers | {MEMORY: ",".join(self._ways)}
        reply = super().request(method, path, asking, patience_s=patience_s)
        way = reply.headers.get(MEMORY)
        if way is None:
            return reply
        self._drop_place()
        try:
            place = json.loads(self.read_body(reply, MAX_PLACE))
            if way == PROCESS:
                if not self._may_read(*place["probe"]):
                    # Not allowed to, or a process of another namespace: have the bytes sent.
                    self._ways = [FILE]
                    self._send_done()
                    return self.request(method, path, headers, patience_s=patience_s)
                self._place = _ProcessPlace(self._pid, place["pieces"])
            else:
                self._place = _FilePlace(self._fds.pop(), place)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise Garbled(f"it does not say where its memory is: {error}") from error
        return Reply(reply.status, reply.headers, self._place.left)

    def _may_read(self, address: int, expected: str) -> bool:
        if not self._probed:
            found = bytearray(16)
            with contextlib.suppress(OSError):
                read_process(self._pid or 0, [memoryview(found)], [(address, 16)])
            self._probed = found.hex() == expected
        return self._probed

    def read_into(self, views: Sequence[memoryview]) -> int:
        """Receive into the views, in order; return how many bytes came (at least one)."""
        place, sock = self._place, self._sock
        if place is None or sock is None:
            return super().read_into(views)
        try:
            n = place.read(views)
        except OSError as error:
            raise Lost(f"its memory cannot be read: {error}") from error
        if n == 0 or wire.is_gone(sock):
            # It may have changed the memory since it closed the connection, but not before.
            raise Lost("it took back its memory in the middle of an answer")
        if place.left == 0:
            self._drop_place()
            self._send_done()
        return n

    def _send_done(self) -> None:
        assert self._sock is not None
        try:
            self._sock.sendall(DONE)
        except OSError as error:
            raise Lost(f"the connection broke: {error}") from error

    def _receive(self, sock: socket.socket, views: Sequence[memoryview], *, whole: bool) -> int:
        if whole or self._pid is None:
            return super()._receive(sock, views, whole=whole)
        size = socket.CMSG_SPACE(struct.calcsize("i"))
        n, messages, _, _ = sock.recvmsg_into(views[:1], size, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in messages:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds += array.array("i", data)
        return n

    def _drop_place(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.close()

    def close(self) -> None:
        """End the connection, if there is one; the link can be used again."""
        super().close()
        self._drop_place()
        self._pid, self._probed = None, False
        while self._fds:
            os.close(self._fds.pop())
