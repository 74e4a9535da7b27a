"""A member's connection to the store of a rendezvous, every wait on which can be ended from another thread.

The store's host may be dead, frozen or cut off: each wait has a deadline, and `cut` ends it at once.
Knows the store's messages, and nothing of torch.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from contextlib import suppress
from typing import Any

import msgspec

from ftkit.errors import GroupError
from ftkit.groups.store import (
    LENGTH,
    MAX_MESSAGE,
    notice_dead_hosts,
    pack,
    prove,
    split_address,
    without_key,
)


class StoreLink:
    """One member's connection to a store, for one rendezvous."""

    def __init__(self, address: str) -> None:
        """`address` is the store's, with its key."""
        self.address = without_key(address)
        self._whole_address = address
        self.local_host = ""
        """The address of this machine that the store sees: the one to listen on for the peers."""
        self._sock: socket.socket | None = None
        self._is_cut = False
        self._inbox = bytearray()
        self._deadline = 0.0
        self._values: dict[str, bytes] = {}

    def connect(self, deadline: float) -> None:
        """Connect until `deadline` (monotonic), which bounds all later waits too.

        Raises GroupError if nobody listens there, or there is no answer.
        """
        self._deadline = deadline
        host, port = split_address(self.address)
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise GroupError(f"the store's host {host!r} is unknown: {error}") from error
        problem: OSError | None = None
        for family, kind, protocol, _, address in infos:
            self._sock = socket.socket(family, kind, protocol)
            try:
                self._dial(self._sock, address)
            except OSError as error:
                problem = error
                self._sock.close()
                continue
            self.local_host = str(self._sock.getsockname()[0])
            notice_dead_hosts(self._sock)
            return
        raise GroupError(f"the store at {self.address} cannot be reached ({problem}); its host may be dead")

    def join(self, prefix: str, rank: int, size: int) -> None:
        """Enter the room of this prefix, with the proof that one may.

        Raises GroupError when the store does not greet in time.
        """
        greeting = self._wait("nonce", self._deadline)
        if greeting is None or not isinstance(greeting[1], bytes):
            raise GroupError(f"the store at {self.address} does not answer; its host may be dead")
        proof = prove(self._whole_address, greeting[1], prefix, rank, size)
        self._send("join", prefix, rank, size, proof)

    def wait_all(self, deadline: float) -> bool:
        """Wait until all members are there; say whether they came before `deadline`."""
        return self._wait("all", deadline) is not None

    def missing(self, deadline: float) -> list[int]:
        """Ask which ranks have not come; empty when the store does not answer."""
        self._send("missing")
        answer = self._wait("missing", deadline)
        return [] if answer is None else [int(rank) for rank in answer[1]]

    def set(self, key: str, value: bytes) -> None:
        """Publish a value to the others in the room."""
        self._send("set", key, value)

    def get(self, key: str) -> bytes:
        """Wait until somebody has published this key; raise GroupError when a member breaks off."""
        if key not in self._values:
            self._send("get", key)
            while key not in self._values:
                answer = self._wait("value", self._deadline)
                if answer is None:
                    raise GroupError(f"{key!r} was not published in time at {self.address}")
                self._values[str(answer[1])] = bytes(answer[2])
        return self._values[key]

    def finish(self) -> None:
        """Say that this member has what it needs, and hang up."""
        if self._sock is not None:  # a group of one has no need of a store
            with suppress(GroupError):  # the group has formed: what becomes of the store is all the same
                self._send("done")
        self.close()

    def cut(self) -> None:
        """End every wait on this connection, now and later; from any thread."""
        self._is_cut = True
        sock = self._sock
        if sock is not None:
            with suppress(OSError):  # not connected yet, or closed
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up; only the thread that waits on the link may do this."""
        if self._sock is not None:
            self._sock.close()

    def fds(self) -> list[int]:
        """Return the descriptors that a forked child must let go of."""
        sock = self._sock
        return [] if sock is None or sock.fileno() < 0 else [sock.fileno()]

    def _dial(self, sock: socket.socket, address: Any) -> None:
        sock.setblocking(False)
        code = sock.connect_ex(address)
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        while code == errno.EINPROGRESS:
            left = self._deadline - time.monotonic()
            if left <= 0 or self._is_cut:
                code = errno.ETIMEDOUT
            elif poll.poll(min(left, 0.02) * 1000):
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                break
        if code != 0:
            raise OSError(code, os.strerror(code))

    def _send(self, *message: Any) -> None:
        assert self._sock is not None
        self._sock.settimeout(max(0.001, self._deadline - time.monotonic()))
        try:
            self._sock.sendall(pack(*message))
        except OSError as error:
            raise GroupError(f"the store at {self.address} is lost: {error}") from error

    def _wait(self, kind: str, deadline: float) -> list[Any] | None:
        """Return the next message of a kind, None at the deadline."""
        assert self._sock is not None
        while True:
            message = self._next()
            if message is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._receive(left)
            elif message[0] == kind:
                return message
            elif message[0] == "lost":
                raise GroupError(f"rank {message[1]} broke off during the rendezvous at {self.address}")
            elif message[0] == "refused":
                raise GroupError(f"the store at {self.address} refuses: {message[1]}")

    def _receive(self, timeout_s: float) -> None:
        assert self._sock is not None
        self._sock.settimeout(timeout_s)
        try:
            data = self._sock.recv(1 << 16)
        except TimeoutError:
            return
        except OSError as error:
            raise GroupError(f"the store at {self.address} is lost: {error}") from error
        if not data:
            raise GroupError(f"the store at {self.address} hung up; its host may be dead")
        self._inbox += data

    def _next(self) -> list[Any] | None:
        if len(self._inbox) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._inbox)
        if length > MAX_MESSAGE:
            raise GroupError(f"what answers at {self.address} is no rendezvous store")
        end = LENGTH.size + length
        if len(self._inbox) < end:
            return None
        try:
            message = msgspec.msgpack.decode(bytes(self._inbox[LENGTH.size : end]), type=list)
        except (msgspec.DecodeError, RecursionError) as error:
            raise GroupError(f"what answers at {self.address} is no rendezvous store: {error}") from error
        del self._inbox[:end]
        return message
