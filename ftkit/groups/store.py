"""Host the store at which the members of an epoch meet, and talk to the one that another member hosts.

The server is torch's TCPStore on a socket of our own, so that it listens where it was told to and nowhere
else. The client side never trusts the host to answer: it may be dead, frozen or cut off, and torch's
client waits for ever in some of these cases. `StoreLink.cut` ends every such wait from another thread.
Knows nothing of process groups.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from ftkit.errors import ConfigError, GroupError
from ftkit.groups import sockets
from ftkit.groups.sockets import Descriptor

log = logging.getLogger(__name__)

_WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
_kept: list[object] = []


def leak(thing: object) -> None:
    """Never free this object, not even when the interpreter ends.

    In a forked child the destructors of torch's objects would wait for threads that do not exist there.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    _kept.append(thing)


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`; raise ConfigError when it is neither."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is no store address; it should read host:port")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Write `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class RendezvousStore:
    """Host a store in this process for as long as it lives, listening on `bind` only.

    `advertise` is the host that the others use; by default `bind` itself, or this machine's name when
    `bind` is a wildcard. Keys that a rendezvous leaves behind are deleted by its last member.
    """

    def __init__(self, bind: str = "127.0.0.1", advertise: str | None = None) -> None:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((bind, 0))
            listener.listen(512)
        except OSError as error:
            listener.close()
            raise ConfigError(f"the rendezvous store cannot listen on {bind!r}: {error}") from error
        port = int(listener.getsockname()[1])
        inode = os.fstat(listener.fileno()).st_ino
        fd = listener.detach()
        self._store: TCPStore | None = TCPStore(
            _WILDCARDS.get(bind, bind),
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=fd,
            timeout=timedelta(seconds=30),
            use_libuv=True,
        )
        self._listener = Descriptor(fd, inode)
        self._port = port
        self._poller = _poller_of(self._listener)
        host = advertise or (socket.gethostname() if bind in _WILDCARDS else bind)
        self.address = join_address(host, port)
        sockets.hidden.add(self)

    def close(self) -> None:
        """Stop serving; members that are in the middle of a rendezvous here get an error."""
        self._store = None

    def num_keys(self) -> int:
        """Return how many keys the store holds, its own one included."""
        return 0 if self._store is None else self._store.num_keys()

    def __enter__(self) -> RendezvousStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def hidden_fds(self) -> list[int]:
        """Return the descriptors that a forked child must let go of."""
        if self._store is None:
            return []
        # The server's own client is a connection to this port as well; the poller has the other ends.
        ours = sockets.targets(self._poller) if self._poller >= 0 else [self._listener]
        fds = [d.fd for d in ours if sockets.is_socket(d)]
        for d in sockets.open_sockets():
            end = sockets.remote_end(d)
            if end is not None and end[1] == self._port and d.fd not in fds:
                fds.append(d.fd)
        return fds + ([self._poller] if self._poller >= 0 else [])

    def forget_in_child(self) -> None:
        """Forget the server, which lives in the parent only."""
        if self._store is None:
            return
        leak(self._store)
        self._store = None


def _poller_of(listener: Descriptor) -> int:
    """Return the epoll instance that watches this socket, -1 if there is none to be seen."""
    if not sockets.supported():
        return -1
    # torch's server thread registers its socket a moment after the constructor has returned.
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        for poller in sockets.pollers():
            if listener in sockets.targets(poller):
                return poller
        time.sleep(0.0005)
    return -1


_connecting: dict[tuple[str, int], threading.Lock] = {}
_connecting_guard = threading.Lock()


class StoreLink:
    """One connection to a store, every wait on which can be ended from another thread.

    Connections to one address are made one after the other, so that a new socket to it is known to be ours.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.local_host = ""
        """The address of this machine that the store sees: the one to listen on for the peers."""
        self.client: TCPStore | None = None
        self._end: tuple[str, int] | None = None
        self._before: set[int] | None = None
        self._descriptor: Descriptor | None = None
        self._is_cut = False

    def connect(self, deadline: float) -> TCPStore:
        """Connect until `deadline` (monotonic); raise GroupError if nobody listens there."""
        self.local_host, self._end = self._probe(deadline)
        with _connecting_guard:
            lock = _connecting.setdefault(self._end, threading.Lock())
        while not lock.acquire(timeout=0.01):
            if self._is_cut or time.monotonic() > deadline:
                raise GroupError(f"the store at {self.address} does not answer")
        try:
            self._before = sockets.socket_inodes() if sockets.supported() else set()
            if self._is_cut:
                raise GroupError(f"the connection to the store at {self.address} was given up")
            self.client = TCPStore(
                self._end[0],
                self._end[1],
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=max(0.05, deadline - time.monotonic())),
            )
            self._descriptor = next(iter(self._new_sockets()), None)
        finally:
            self._before = None
            lock.release()
        if self._descriptor is not None:
            sockets.close_on_exec([self._descriptor])
        return self.client

    def cut(self) -> None:
        """End every wait on this connection, now and later; from any thread."""
        self._is_cut = True
        for descriptor in self._sockets():
            sockets.cut(descriptor)

    def fds(self) -> list[int]:
        """Return the descriptors that a forked child must let go of."""
        return [d.fd for d in self._sockets()]

    def _sockets(self) -> list[Descriptor]:
        if self._descriptor is not None:
            return [self._descriptor]
        return self._new_sockets()

    def _new_sockets(self) -> list[Descriptor]:
        before, end = self._before, self._end
        if before is None or end is None or not sockets.supported():
            return []
        new = [d for d in sockets.open_sockets() if d.inode not in before]
        return [d for d in new if sockets.remote_end(d) == end]

    def _probe(self, deadline: float) -> tuple[str, tuple[str, int]]:
        """Open a connection of our own first: it can be given up, and says at once if nobody listens."""
        host, port = split_address(self.address)
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise GroupError(f"the store's host {host!r} is unknown: {error}") from error
        problem: Exception | str = "no address"
        for family, kind, proto, _, address in infos:
            with socket.socket(family, kind, proto) as sock:
                try:
                    _connect(sock, address, deadline, lambda: self._is_cut)
                    return str(sock.getsockname()[0]), (str(address[0]), port)
                except OSError as error:
                    problem = error
        raise GroupError(f"the store at {self.address} cannot be reached ({problem}); its host may be dead")


def _connect(
    sock: socket.socket, address: tuple[object, ...], deadline: float, given_up: Callable[[], bool]
) -> None:
    sock.setblocking(False)
    code = sock.connect_ex(address)
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    while code in (errno.EINPROGRESS, errno.EALREADY):
        left = deadline - time.monotonic()
        if left <= 0 or given_up():
            raise TimeoutError(errno.ETIMEDOUT, "no answer in time")
        if poll.poll(min(left, 0.02) * 1000):
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            break
    if code != 0:
        raise OSError(code, os.strerror(code))


def delete_keys(store: TCPStore, prefix: str) -> None:
    """Delete all keys under a prefix, where this torch can list them; a lost store is no error."""
    if not hasattr(store, "list_keys"):
        return
    with suppress(RuntimeError):
        for key in store.list_keys():
            if key.startswith(prefix):
                store.delete_key(key)
