"""Framed JSON over TCP between the ranks and their keeper, with mutual authentication.

A frame is a length of four bytes, big endian, and that many bytes of JSON. Before anything else both sides
prove, by HMAC-SHA256 over each other's fresh nonce, that they know the token; the token itself never
travels. Nothing a stranger sends can crash or hold up the server: sizes are bounded before reading, waits
have total deadlines, strangers are few at a time. What the messages mean is not known here.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ftkit.errors import KeeperError

log = logging.getLogger(__name__)

MAX_FRAME = 8 * 1024 * 1024
_MAX_GREETING = 512
_GREETING_S = 5.0
_SEND_S = 10.0
_LENGTH = struct.Struct("!I")

T = TypeVar("T")


class WireError(KeeperError):
    """The other side sent something malformed, or failed to prove that it knows the token."""


class WireClosed(WireError):
    """The connection is closed."""


class _Hello(msgspec.Struct, frozen=True):
    """The server's first frame."""

    ftkit: int
    nonce: str


class _Proof(msgspec.Struct, frozen=True):
    """Each side's proof; the client's carries its nonce."""

    mac: str
    nonce: str = ""


class Connection:
    """One connection; `send` may be called from any thread, `recv` from one at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._encoder = msgspec.json.Encoder()
        self._closed = False
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer on another machine that vanishes without a word is noticed after about 10 s.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        # A peer that does not read must not hold up the sender for ever.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_SEND_S), 0))

    @property
    def peer(self) -> str:
        """The other side's address, for messages."""
        try:
            host, port = self._sock.getpeername()[:2]
        except OSError:
            return "a closed connection"
        return f"{host}:{port}"

    def send(self, message: object) -> None:
        """Send one message."""
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME:
            raise WireError(f"a message of {len(body)} bytes is longer than the {MAX_FRAME} allowed")
        try:
            with self._sending:
                self._sock.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            # Part of the frame may be out, so that nothing sensible can follow it.
            self.close()
            raise WireClosed(f"sending to {self.peer} failed: {error}") from None

    def recv(
        self, decoder: msgspec.json.Decoder[T], *, limit: int = MAX_FRAME, deadline: float | None = None
    ) -> T:
        """Receive one message; raise WireClosed at the end of the stream.

        `deadline` is monotonic time and covers the whole frame.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if length > limit:
            self.close()
            raise WireError(f"a frame of {length} bytes is announced, {limit} are allowed; closing")
        body = self._read(length, deadline)
        try:
            return decoder.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            self.close()
            raise WireError(f"malformed message: {error}") from None

    def _read(self, length: int, deadline: float | None) -> bytes:
        # Grows with what arrives: an announced length alone allocates nothing.
        parts: list[bytes] = []
        while length > 0:
            try:
                if deadline is not None:
                    self._wait_readable(deadline)
                part = self._sock.recv(min(length, 256 * 1024))
            except (OSError, ValueError) as error:
                raise WireClosed(f"the connection broke: {error}") from None
            if not part:
                raise WireClosed("the other side closed the connection")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait until something, be it the end, can be received; say whether that is so."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(timeout_s * 1000))
        except (OSError, ValueError):
            return True  # it was closed meanwhile, as receiving will show

    def _wait_readable(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise WireError("the other side was silent for too long")

    def close(self) -> None:
        """Close the connection; a `recv` in another thread ends with WireClosed."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def abandon(self) -> None:
        """Let go of the socket without ending the connection: another process (our parent) uses it."""
        self._closed = True
        self._sock.close()

    @property
    def closed(self) -> bool:
        """Say whether this side has closed the connection."""
        return self._closed


_HELLO = msgspec.json.Decoder(_Hello)
_PROOF = msgspec.json.Decoder(_Proof)


def _mac(token: str, role: str, server_nonce: str, client_nonce: str) -> str:
    # The role keeps a proof from being sent back as one's own.
    text = f"ftkit keeper 1|{role}|{server_nonce}|{client_nonce}"
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest()


def _greet_as_server(connection: Connection, token: str, deadline: float) -> None:
    nonce = secrets.token_hex(32)
    connection.send(_Hello(1, nonce))
    proof = connection.recv(_PROOF, limit=_MAX_GREETING, deadline=deadline)
    expected = _mac(token, "client", nonce, proof.nonce)
    if len(proof.nonce) < 32 or not hmac.compare_digest(proof.mac.encode(), expected.encode()):
        raise WireError("the token is not ours")
    connection.send(_Proof(_mac(token, "server", nonce, proof.nonce)))


def connect(host: str, port: int, token: str, *, timeout_s: float = 10.0) -> Connection:
    """Connect to a keeper and return the connection once both sides have proved themselves."""
    deadline = time.monotonic() + timeout_s
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise WireClosed(f"the keeper at {host}:{port} cannot be reached: {error}") from None
    connection = Connection(sock)
    try:
        hello = connection.recv(_HELLO, limit=_MAX_GREETING, deadline=deadline)
        nonce = secrets.token_hex(32)
        connection.send(_Proof(_mac(token, "client", hello.nonce, nonce), nonce))
        try:
            proof = connection.recv(_PROOF, limit=_MAX_GREETING, deadline=deadline)
        except WireClosed:
            raise WireError("it closed the connection, which means that its token is another") from None
        expected = _mac(token, "server", hello.nonce, nonce)
        if not hmac.compare_digest(proof.mac.encode(), expected.encode()):
            raise WireError("it does not know the token")
    except WireError as error:
        connection.close()
        raise type(error)(f"the keeper at {host}:{port}: {error}") from None
    return connection


class Listener:
    """Accept connections; each that proves itself is handed to `on_connection`, in a thread of its own."""

    def __init__(
        self,
        token: str,
        on_connection: Callable[[Connection], None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_strangers: int = 32,
        greeting_s: float = _GREETING_S,
    ) -> None:
        self._token = token
        self._on_connection = on_connection
        self._strangers = threading.BoundedSemaphore(max_strangers)
        self._greeting_s = greeting_s
        self._sock = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
        self.port = int(self._sock.getsockname()[1])
        self._closed = False
        threading.Thread(target=self._accept, name="keeper accept", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections; those that exist stay."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._sock.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("accepting a connection failed: %s", error)
                    time.sleep(0.1)  # out of descriptors, most likely
                continue
            if not self._strangers.acquire(blocking=False):
                # Someone floods us. The ranks try again.
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="keeper connection", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        connection = None
        try:
            connection = Connection(sock)
            _greet_as_server(connection, self._token, time.monotonic() + self._greeting_s)
        except (WireError, OSError) as error:
            log.info("a connection was turned away: %s", error)
            if connection is None:
                sock.close()
            else:
                connection.close()
            return
        finally:
            self._strangers.release()
        self._on_connection(connection)
