"""Find the sockets that one gloo device or one store serves, cut them, and hide them from forked children.

gloo and torch's store drive their sockets with an epoll instance each, and Linux lists what an epoll
instance watches, with inode numbers, in `/proc/self/fdinfo`. That names exactly the sockets of one group,
whatever other threads open and close meanwhile. A descriptor number is never trusted alone: it is
duplicated first, and the duplicate's inode decides. Knows nothing of ranks, epochs or torch.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import logging
import os
import platform
import select
import socket
import stat
import termios
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, Protocol

log = logging.getLogger(__name__)

_FD = "/proc/self/fd"
_TASK = "/proc/self/task"
_SOCKET = "socket:["
_EPOLL_CTL_MOD = 3


class Descriptor(NamedTuple):
    """An open file: the number is where to find it, the inode says that it is still the same one."""

    fd: int
    inode: int


@lru_cache(maxsize=1)
def supported() -> bool:
    """Say whether this system lists the targets of an epoll instance (Linux does, gVisor does not)."""
    if not os.path.isdir(_FD) or not hasattr(select, "epoll"):
        return False
    one, other = socket.socketpair()
    with one, other, select.epoll() as poller:
        poller.register(one)
        inode = os.fstat(one.fileno()).st_ino
        return targets(poller.fileno()) == [Descriptor(one.fileno(), inode)]


def socket_inodes() -> set[int]:
    """Return the inodes of all sockets that this process has open."""
    return {d.inode for d in open_sockets()}


def open_sockets() -> list[Descriptor]:
    """Return all sockets that this process has open."""
    found = []
    for name in os.listdir(_FD):
        link = _link(name)
        if link.startswith(_SOCKET):
            found.append(Descriptor(int(name), int(link[len(_SOCKET) : -1])))
    return found


def pollers() -> list[int]:
    """Return the numbers of all epoll instances that this process has open."""
    return [int(name) for name in os.listdir(_FD) if _link(name) == "anon_inode:[eventpoll]"]


def targets(poller: int) -> list[Descriptor]:
    """Return what an epoll instance watches; empty when there is no such instance (any more)."""
    return [descriptor for descriptor, _ in _watched(poller)]


def _watched(poller: int) -> list[tuple[Descriptor, int]]:
    """Return what an epoll instance watches, and the number that its owner has put with each."""
    found = []
    for line in _read(f"/proc/self/fdinfo/{poller}").splitlines():
        if not line.startswith("tfd:"):
            continue
        words = line.split()
        inode = next((int(w[4:], 16) for w in words if w.startswith("ino:")), None)
        if inode is not None:
            data = int(words[words.index("data:") + 1], 16)
            found.append((Descriptor(int(words[1]), inode), data))
    return found


def borrow(descriptor: Descriptor) -> socket.socket | None:
    """Return a socket object on a duplicate of the descriptor, or None when it is gone or not a socket."""
    try:
        copy = os.dup(descriptor.fd)
    except OSError:
        return None
    status = os.fstat(copy)
    if status.st_ino != descriptor.inode or not stat.S_ISSOCK(status.st_mode):
        os.close(copy)
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def is_socket(descriptor: Descriptor) -> bool:
    """Say whether this is a socket that is still open."""
    sock = borrow(descriptor)
    if sock is None:
        return False
    sock.close()
    return True


def is_listening(descriptor: Descriptor) -> bool:
    """Say whether this is a socket that accepts connections."""
    sock = borrow(descriptor)
    if sock is None:
        return False
    with sock:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def cut(descriptor: Descriptor) -> bool:
    """Shut a connection down in both directions; say whether there was one.

    A socket that accepts connections is left alone: gloo ends the process when its listener fails.
    """
    sock = borrow(descriptor)
    if sock is None:
        return False
    with sock:
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        with suppress(OSError):  # not connected yet, or no longer
            sock.shutdown(socket.SHUT_RDWR)
    return True


def close_on_exec(descriptors: Iterable[Descriptor]) -> None:
    """Keep these descriptors out of the programs that this process starts.

    Such a program would hold the connections open after our death, and the peers would not see it.
    """
    for descriptor in descriptors:
        with suppress(OSError):
            if os.fstat(descriptor.fd).st_ino == descriptor.inode:
                os.set_inheritable(descriptor.fd, False)


def unread(descriptor: Descriptor) -> int:
    """Return how many bytes have been received that nobody has read; -1 when it is gone or not a socket."""
    sock = borrow(descriptor)
    if sock is None:
        return -1
    with sock:
        size = array.array("i", [0])
        fcntl.ioctl(sock, termios.FIONREAD, size)
        return size[0]


def threads() -> set[int]:
    """Return the ids of this process's threads, those that Python does not know as well."""
    return {int(name) for name in os.listdir(_TASK)}


def thread_name(thread: int) -> str:
    """Return a thread's name; empty when it has ended."""
    return _read(f"{_TASK}/{thread}/comm").strip()


def ran_s(thread: int) -> float:
    """Return the seconds of CPU that a thread has used; 0 when it has ended."""
    precise = _read(f"{_TASK}/{thread}/schedstat").split()
    if precise:
        return int(precise[0]) / 1e9
    fields = _read(f"{_TASK}/{thread}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def hush(poller: int, descriptor: Descriptor) -> None:
    """Let an epoll instance tell of this descriptor once more, and then never again unless told to.

    What the instance keeps with the descriptor (its owner's pointer) stays as it is.
    """
    for watched, data in _watched(poller):
        if watched == descriptor:
            event = _EpollEvent(select.EPOLLONESHOT, data)
            ctypes.CDLL(None).epoll_ctl(poller, _EPOLL_CTL_MOD, descriptor.fd, ctypes.byref(event))


class _EpollEvent(ctypes.Structure):
    if platform.machine() in ("x86_64", "AMD64"):  # only there without a gap, for the sake of 32 bit programs
        _pack_ = 1
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def threads_sleep(name: str) -> bool:
    """Say whether this process has threads of this name, and all of them sleep."""
    states = []
    for thread in threads():
        head, _, tail = _read(f"{_TASK}/{thread}/stat").rpartition(")")
        if head.partition("(")[2] == name:
            states.append(tail[1:2])
    return bool(states) and all(state == "S" for state in states)


def leak(thing: object) -> None:
    """Never free this object, not even when the interpreter ends.

    In a forked child the destructors of torch's objects would wait for threads that do not exist there.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:  # ended meanwhile
        return ""


def _link(name: str) -> str:
    try:
        return os.readlink(f"{_FD}/{name}")
    except OSError:  # closed meanwhile
        return ""


class Hideable(Protocol):
    """What owns connections that forked children must let go of."""

    def hidden_fds(self) -> list[int]:
        """Return the descriptors; called in the child, where any lock may be held for ever."""

    def forget_in_child(self) -> None:
        """Forget, in the child, all that they belong to."""


class Hidden:
    """The owners of connections that forked children must let go of.

    DataLoader workers are such children: one that outlives us would keep our connections open. Closing does
    not suffice, as torch's objects in the child still hold the numbers; each becomes `/dev/null`.
    """

    def __init__(self) -> None:
        self._owners: dict[int, weakref.ref[Hideable]] = {}
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_child)

    def add(self, owner: Hideable) -> None:
        """From now on, and while the owner lives, children let go of its descriptors when they are born."""
        key = id(owner)
        self._owners[key] = weakref.ref(owner, lambda _: self._owners.pop(key, None) and None)

    def _in_child(self) -> None:
        # Only the thread that forked is left, and any lock may be held by one that is not: take none.
        references, self._owners = list(self._owners.values()), {}
        # All are held until each has forgotten: one must not free another here.
        owners = [owner for owner in (reference() for reference in references) if owner is not None]
        null = -1
        for owner in owners:
            try:
                for fd in owner.hidden_fds():
                    if null < 0:
                        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                    os.dup2(null, fd, inheritable=False)
                owner.forget_in_child()
                self.add(owner)  # it may be used in the child, and the child may fork
            except Exception:  # a child without its parent's groups must still be able to run
                log.exception("a forked child could not let go of its parent's connections")
        if null >= 0:
            os.close(null)


hidden = Hidden()
"""The one registry of this process."""
