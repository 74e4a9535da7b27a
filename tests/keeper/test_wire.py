"""The wire between ranks and keeper: what strangers send can harm nobody."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from ftkit.keeper.wire import MAX_FRAME, Connection, Listener, WireClosed, WireError, connect
from tests.keeper.conftest import wait_until

ANY = msgspec.json.Decoder(object)


class Echo:
    """A server that sends everything back."""

    def __init__(self, **limits) -> None:
        self.errors: queue.Queue[WireError] = queue.Queue()
        self.listener = Listener("secret", self.serve, **limits)
        self.port = self.listener.port

    def serve(self, connection: Connection) -> None:
        try:
            while True:
                connection.send(connection.recv(ANY))
        except WireError as error:
            connection.close()
            self.errors.put(error)

    def works(self) -> bool:
        connection = connect("127.0.0.1", self.port, "secret")
        connection.send({"a": [1, None, "ü"]})
        answer = connection.recv(ANY)
        connection.close()
        return answer == {"a": [1, None, "ü"]}


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo(greeting_s=1.0)
    yield echo
    echo.listener.close()


def raw(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.settimeout(5)
    return sock


def test_both_sides_talk_once_they_know_each_other(echo: Echo):
    assert echo.works()


def test_a_wrong_token_is_turned_away(echo: Echo):
    with pytest.raises(WireError, match="token"):
        connect("127.0.0.1", echo.port, "guess")
    assert echo.works()


def test_a_server_that_does_not_know_the_token_learns_nothing():
    """Who has taken the keeper's port must not be taken for it."""
    server = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        sock, _ = server.accept()
        hello = json.dumps({"ftkit": 1, "nonce": "0" * 64}).encode()
        sock.sendall(struct.pack("!I", len(hello)) + hello)
        proof = sock.recv(4096)[4:]
        # It sends the client's own proof back.
        sock.sendall(struct.pack("!I", len(proof)) + proof)
        sock.recv(1)
        sock.close()

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(WireError, match="does not know the token"):
        connect("127.0.0.1", server.getsockname()[1], "secret")
    thread.join()
    server.close()


def test_a_proof_cannot_be_used_twice(echo: Echo):
    first = raw(echo.port)
    first.recv(4096)
    first.close()
    proof = {"mac": "0" * 64, "nonce": "1" * 64}
    second = raw(echo.port)
    second.recv(4096)
    body = json.dumps(proof).encode()
    second.sendall(struct.pack("!I", len(body)) + body)
    assert second.recv(10) == b""
    second.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        struct.pack("!I", 2**32 - 1) + b"x" * 1000,
        struct.pack("!I", 5) + b"[[[[[",
        struct.pack("!I", 4) + b"null",
        struct.pack("!I", 0),
        struct.pack("!I", 400) + b"[" * 400,
        struct.pack("!I", 12) + b'{"mac": "\xff"}',
        struct.pack("!I", 20) + b'{"mac":"\xc3\xa4","x":1}',
    ],
)
def test_garbage_is_turned_away(echo: Echo, garbage: bytes):
    sock = raw(echo.port)
    with contextlib.suppress(OSError):
        sock.sendall(garbage)
        while sock.recv(4096):
            pass
    sock.close()
    assert echo.works()


def test_noise_of_all_kinds_harms_nobody(echo: Echo):
    chance = random.Random(7)
    for _ in range(30):
        with contextlib.suppress(OSError), raw(echo.port) as sock:
            sock.sendall(chance.randbytes(chance.randrange(200)))
    assert echo.works()


def test_a_silent_stranger_is_turned_away_in_time(echo: Echo):
    sock = raw(echo.port)
    sock.recv(4096)
    assert sock.recv(10) == b""
    sock.close()


def test_a_slow_stranger_is_too(echo: Echo):
    """The deadline is for the whole greeting, not for each byte."""
    sock = raw(echo.port)
    begun = time.monotonic()
    with contextlib.suppress(OSError):
        for byte in struct.pack("!I", 300) + b"x" * 300:
            sock.sendall(bytes([byte]))
            sock.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                if not sock.recv(4096):
                    break
    assert time.monotonic() - begun < 5.0
    sock.close()
    assert echo.works()


def test_a_crowd_of_strangers_does_not_keep_the_ranks_out():
    echo = Echo(greeting_s=0.5, max_strangers=4)
    crowd = [raw(echo.port) for _ in range(20)]
    wait_until(lambda: _try(echo), 10)
    for sock in crowd:
        sock.close()
    echo.listener.close()


def _try(echo: Echo) -> bool:
    try:
        return echo.works()
    except WireError:
        return False


def test_a_frame_that_is_too_long_ends_the_connection(echo: Echo):
    """Even a rank may go mad; the keeper must not fill the machine's memory for it."""
    connection = connect("127.0.0.1", echo.port, "secret")
    with pytest.raises(WireError, match="longer"):
        connection.send("x" * (MAX_FRAME + 1))
    connection._sock.sendall(struct.pack("!I", MAX_FRAME + 1))
    assert "announced" in str(echo.errors.get(timeout=5))
    connection.close()


def test_a_long_message_arrives(echo: Echo):
    """An epoch of ten thousand members has about a megabyte."""
    connection = connect("127.0.0.1", echo.port, "secret")
    text = "m" * 4_000_000
    connection.send(text)
    assert connection.recv(ANY) == text
    connection.close()


def test_closing_frees_the_one_who_waits(echo: Echo):
    connection = connect("127.0.0.1", echo.port, "secret")
    ended: queue.Queue[Exception] = queue.Queue()

    def wait() -> None:
        try:
            connection.recv(ANY)
        except WireError as error:
            ended.put(error)

    thread = threading.Thread(target=wait)
    thread.start()
    connection.close()
    assert isinstance(ended.get(timeout=5), WireClosed)
    thread.join()


def test_nobody_there_is_said_at_once():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(WireClosed, match=str(port)):
        connect("127.0.0.1", port, "secret")


def test_a_closed_listener_leaves_its_port(echo: Echo):
    """The next keeper takes the same port."""
    before = len(os.listdir("/proc/self/fd"))
    other = Echo()
    other.listener.close()
    again = Listener("secret", other.serve, port=other.port)
    again.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)
