"""Host the store at which the members of an epoch meet.

Each rendezvous has a room, named by its prefix. The store tells all members when the last one has come,
keeps what they publish, tells those that are left when one breaks off, and forgets the room when the last
has gone. It is not torch's TCPStore, because that one looks up the name of every caller in the DNS: with a
slow or absent DNS server each connection costs seconds. Knows nothing of torch, gloo or etcd.

A message is a length (4 bytes, big endian) and a msgpack list, whose first item says what it is. From a
member: `join prefix rank size proof`, `set key value`, `get key`, `missing`, `done`. To it: `nonce bytes`,
`all`, `value key value`, `missing ranks`, `lost rank`, `refused why`.

Only who knows the store's key may join. It is part of the address, which members read in etcd; what travels
is a proof of knowing it (HMAC-SHA256 over the store's nonce). Strangers are few at a time and have little
time; what they send is bounded before it is read, and costs them their connection.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ftkit.errors import ConfigError
from ftkit.groups import sockets

log = logging.getLogger(__name__)

LENGTH = struct.Struct("!I")
MAX_MESSAGE = 1 << 20
MAX_FIRST_MESSAGE = 1 << 10
MAX_STRANGERS = 64
"""Callers that have not joined; when more come, the one that has been there longest goes."""
JOIN_S = 10.0
"""A caller that has not joined by then goes."""
MOST_RANKS = 1 << 20
BAD_MESSAGE = (OSError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
"""What reading from a caller may raise: it costs that caller the connection."""
_WILDCARDS = ("", "0.0.0.0", "::")
_KEY_BYTES = 16


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`, with or without a key; raise ConfigError when it is neither."""
    address = without_key(address)
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is no store address; it should read host:port")
    return host, int(port)


def without_key(address: str) -> str:
    """Return an address without the store's key: for messages, which others may read."""
    return address.partition("#")[0]


def prove(address: str, nonce: bytes, prefix: str, rank: int, size: int) -> bytes:
    """Return the proof that one knows the key in a store's address."""
    key = address.partition("#")[2]
    text = f"ftkit store 1|{nonce.hex()}|{rank}|{size}|{prefix}"
    return hmac.digest(key.encode(), text.encode(), "sha256")


def join_address(host: str, port: int) -> str:
    """Write `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def pack(*message: Any) -> bytes:
    """Write one message."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def notice_dead_hosts(sock: socket.socket) -> None:
    """Send at once, and find out within a minute when the machine at the other end is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass(eq=False, slots=True)
class _Caller:
    sock: socket.socket
    nonce: bytes
    until: float
    """Monotonic time by which it must have joined."""
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    room: _Room | None = None
    rank: int = -1
    is_done: bool = False
    wanted: set[str] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Room:
    prefix: str
    size: int
    members: dict[int, _Caller] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    is_complete: bool = False
    lost: int | None = None


class RendezvousStore:
    """Host a store in this process for as long as it lives, listening on `bind` only.

    `advertise` is the host that the others use; by default `bind` itself, or this machine's name when
    `bind` is a wildcard. `address` is what they are told, `host:port#key`: a secret of the job's members.
    """

    def __init__(self, bind: str = "127.0.0.1", advertise: str | None = None) -> None:
        self._listener = socket.socket(socket.AF_INET6 if ":" in bind else socket.AF_INET)
        try:
            self._listener.bind((bind, 0))
            self._listener.listen(512)
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"the rendezvous store cannot listen on {bind!r}: {error}") from error
        self._listener.setblocking(False)
        host = advertise or (socket.gethostname() if bind in _WILDCARDS else bind)
        where = join_address(host, int(self._listener.getsockname()[1]))
        self.address = f"{where}#{secrets.token_hex(_KEY_BYTES)}"
        self._rooms: dict[str, _Room] = {}
        self._callers: set[_Caller] = set()
        self._strangers: dict[_Caller, None] = {}
        """Callers that have not joined, the oldest first."""
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="ftkit-rendezvous-store", daemon=True)
        self._thread.start()
        sockets.hidden.add(self)

    def close(self) -> None:
        """Stop serving; members that are in the middle of a rendezvous here get an error."""
        if self._is_closed:
            return
        self._is_closed = True
        self._waker.send(b"x")
        self._thread.join(5.0)

    def num_keys(self) -> int:
        """Return how many values the store holds."""
        return sum(len(room.values) for room in list(self._rooms.values()))

    def __enter__(self) -> RendezvousStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def hidden_fds(self) -> list[int]:
        """Return the descriptors that a forked child must let go of."""
        if self._is_closed:
            return []
        served = [self._listener, self._waker, self._woken, *(c.sock for c in list(self._callers))]
        fds = [sock.fileno() for sock in served]
        with suppress(AttributeError):  # the child shares the epoll instance: it must not change it
            fds.append(self._selector.fileno())
        return [fd for fd in fds if fd >= 0]

    def forget_in_child(self) -> None:
        """Forget the server, which lives in the parent only."""
        self._is_closed = True

    # -- the one thread that touches what follows ----------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                for key, events in self._selector.select(JOIN_S if self._strangers else None):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._callers:
                        self._attend(key.data, events)
                self._dismiss_the_slow()
        except Exception:
            log.exception("the rendezvous store at %s broke down", without_key(self.address))
        finally:
            for caller in list(self._callers):
                caller.sock.close()
            for sock in (self._listener, self._waker, self._woken):
                sock.close()
            self._selector.close()
            self._rooms.clear()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # gone again; or out of descriptors, then it would be tried again without a pause
            time.sleep(0.01)
            return
        sock.setblocking(False)
        with suppress(OSError):  # gone already, as reading will show
            notice_dead_hosts(sock)
        caller = _Caller(sock, secrets.token_bytes(16), time.monotonic() + JOIN_S)
        self._callers.add(caller)
        self._selector.register(sock, selectors.EVENT_READ, caller)
        if len(self._strangers) >= MAX_STRANGERS:
            self._hang_up(next(iter(self._strangers)))
        self._strangers[caller] = None
        self._say(caller, "nonce", caller.nonce)

    def _dismiss_the_slow(self) -> None:
        now = time.monotonic()
        while self._strangers and next(iter(self._strangers)).until <= now:
            self._hang_up(next(iter(self._strangers)))

    def _attend(self, caller: _Caller, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(caller)
            if events & selectors.EVENT_READ:
                data = caller.sock.recv(1 << 16)
                if not data:
                    self._hang_up(caller)
                    return
                caller.inbox += data
                self._read(caller)
        except BlockingIOError:
            pass
        except BAD_MESSAGE as error:
            log.debug("the rendezvous store hangs up on rank %d: %r", caller.rank, error)
            self._hang_up(caller)

    def _read(self, caller: _Caller) -> None:
        inbox = caller.inbox
        while len(inbox) >= LENGTH.size and caller in self._callers:
            (length,) = LENGTH.unpack_from(inbox)
            if length > (MAX_FIRST_MESSAGE if caller.room is None else MAX_MESSAGE):
                raise ValueError(f"a message of {length} bytes")
            end = LENGTH.size + length
            if len(inbox) < end:
                return
            message = msgspec.msgpack.decode(bytes(inbox[LENGTH.size : end]), type=list)
            del inbox[:end]
            self._handle(caller, message)

    def _handle(self, caller: _Caller, message: list[Any]) -> None:
        kind, room = message[0], caller.room
        if kind == "join":
            prefix, rank, size, proof = msgspec.convert(message[1:], tuple[str, int, int, bytes])
            if not hmac.compare_digest(proof, prove(self.address, caller.nonce, prefix, rank, size)):
                raise ValueError("it does not know the store's key")
            self._join(caller, prefix, rank, size)
        elif room is None:
            raise ValueError(f"{kind!r} before a room was joined")
        elif kind == "set":
            key, value = msgspec.convert(message[1:], tuple[str, bytes])
            room.values[key] = value
            for member in list(room.members.values()):
                if key in member.wanted:
                    member.wanted.discard(key)
                    self._say(member, "value", key, value)
        elif kind == "get":
            (key,) = msgspec.convert(message[1:], tuple[str])
            if key in room.values:
                self._say(caller, "value", key, room.values[key])
            else:
                caller.wanted.add(key)
        elif kind == "missing":
            self._say(caller, "missing", [r for r in range(room.size) if r not in room.members])
        elif kind == "done":
            caller.is_done = True
        else:
            raise ValueError(f"an unknown message {kind!r}")

    def _join(self, caller: _Caller, prefix: str, rank: int, size: int) -> None:
        if caller.room is not None or not 0 <= rank < size <= MOST_RANKS:
            raise ValueError(f"rank {rank} of {size} cannot join")
        room = self._rooms.setdefault(prefix, _Room(prefix, size))
        if room.size != size:
            self._say(caller, "refused", f"rank {rank} expects {size} ranks, but another expects {room.size}")
            return
        if rank in room.members:
            self._say(caller, "refused", f"there is a rank {rank} here already")
            return
        caller.room, caller.rank = room, rank
        self._strangers.pop(caller, None)
        room.members[rank] = caller
        if room.lost is not None:
            self._say(caller, "lost", room.lost)
        elif len(room.members) == size:
            room.is_complete = True
            for member in list(room.members.values()):
                self._say(member, "all")

    def _hang_up(self, caller: _Caller) -> None:
        if caller not in self._callers:
            return
        self._callers.discard(caller)
        self._strangers.pop(caller, None)
        self._selector.unregister(caller.sock)
        caller.sock.close()
        room = caller.room
        if room is None:
            return
        if not room.is_complete:  # it may come again
            del room.members[caller.rank]
        elif not caller.is_done and room.lost is None:
            room.lost = caller.rank
            for member in list(room.members.values()):
                if member in self._callers:
                    self._say(member, "lost", caller.rank)
        if not any(member in self._callers for member in room.members.values()):
            self._rooms.pop(room.prefix, None)

    def _say(self, caller: _Caller, *message: Any) -> None:
        caller.outbox += pack(*message)
        self._flush(caller)

    def _flush(self, caller: _Caller) -> None:
        try:
            while caller.outbox:
                del caller.outbox[: caller.sock.send(caller.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            caller.outbox.clear()  # its end will be read in a moment
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.outbox else 0)
        if caller in self._callers:
            self._selector.modify(caller.sock, events, caller)
