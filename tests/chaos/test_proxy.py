"""The proxy: each kind of weather does what it says, to connections that exist and to new ones."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ftkit.chaos.network import Network
from ftkit.chaos.proxy import Proxy, Weather
from ftkit.errors import EtcdUnavailable
from ftkit.keeper.embedded import EtcdServer
from ftkit.keeper.etcd import Etcd, EtcdSettings


class Echo:
    """A server that sends back what it gets."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.sockets: list[socket.socket] = []
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.sockets.append(self.listener.accept()[0])
                self.threads.append(threading.Thread(target=self.answer, args=(self.sockets[-1],)))
                self.threads[-1].start()

    def answer(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := sock.recv(65536):
                sock.sendall(data)
            sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in (self.listener, *self.sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        for sock in (self.listener, *self.sockets):
            sock.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with contextlib.closing(Echo()) as echo, Proxy(echo.address, seed=3) as made:
        yield made


@contextlib.contextmanager
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection((proxy.host, proxy.port), timeout=20) as sock:
        yield sock


def get(sock: socket.socket, size: int) -> bytes:
    """Read so many bytes, or what comes before the end of the connection."""
    data = b""
    while len(data) < size and (more := sock.recv(65536)):
        data += more
    return data


def test_nothing_is_held_back_until_the_other_side_acknowledges(proxy: Proxy) -> None:
    """Of two small answers in a row the second would come 40 ms late, which no weather says."""
    with client(proxy) as sock:
        sock.sendall(b"hello")
        assert get(sock, 5) == b"hello"
        sockets = [writer.get_extra_info("socket") for writer in proxy._writers]
        assert len(sockets) == 2, "towards the client and towards the target"
        assert all(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in sockets)


def test_a_clear_sky_passes_everything_on(proxy: Proxy) -> None:
    sent = bytes(range(256)) * 4096
    with client(proxy) as one, client(proxy) as two:
        sender = threading.Thread(target=one.sendall, args=(sent,))
        sender.start()
        two.sendall(b"hello")
        assert get(two, 5) == b"hello"
        assert get(one, len(sent)) == sent
        sender.join()
        one.shutdown(socket.SHUT_WR)
        assert one.recv(1) == b""
    assert proxy.num_connections == 2
    assert proxy.num_bytes == 2 * (len(sent) + 5)


def test_a_delay_holds_for_both_ways_and_does_not_add_up_over_what_is_sent_at_once(proxy: Proxy) -> None:
    with client(proxy) as sock:
        proxy.set(Weather(delay_s=0.2))
        begun = time.monotonic()
        for _ in range(40):
            sock.sendall(b"x")
            time.sleep(0.01)  # pieces that come one by one
        assert get(sock, 40) == b"x" * 40
        assert 0.4 <= time.monotonic() - begun < 10.0, "added up it would be 16 s"


def test_a_throttle_limits_the_rate(proxy: Proxy) -> None:
    with client(proxy) as sock:
        proxy.set(Weather(bytes_per_s=20_000.0))
        begun = time.monotonic()
        sock.sendall(b"x" * 10_000)
        assert len(get(sock, 10_000)) == 10_000
        assert time.monotonic() - begun >= 0.45


def test_silence_keeps_connections_open_and_what_was_sent(proxy: Proxy) -> None:
    with client(proxy) as old:
        old.sendall(b"1")
        assert get(old, 1) == b"1"
        proxy.set(Weather(silent=True))
        with client(proxy) as new:
            for sock in (old, new):
                sock.sendall(b"2")
                sock.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    sock.recv(1)
            proxy.clear()
            for sock in (old, new):
                sock.settimeout(20)
                assert get(sock, 1) == b"2"


def test_connections_are_reset_and_new_ones_taken(proxy: Proxy) -> None:
    with client(proxy) as sock:
        sock.sendall(b"1")
        assert get(sock, 1) == b"1"
        assert proxy.reset() == 1
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    with client(proxy) as sock:
        sock.sendall(b"1")
        assert get(sock, 1) == b"1"


def test_an_answer_is_cut_off_at_the_byte_that_was_asked_for(proxy: Proxy) -> None:
    with client(proxy) as sock:
        proxy.set(Weather(truncate_after=700))
        sock.sendall(b"x" * 1000)
        assert get(sock, 1000) == b"x" * 700
        assert sock.recv(1) == b""
    with client(proxy) as sock:
        proxy.set(Weather(reset_after=0))
        sock.sendall(b"x")
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


def test_one_bit_of_one_byte_is_flipped_per_connection_and_change(proxy: Proxy) -> None:
    sent = b"\0" * 1000
    with client(proxy) as sock:
        for at in (0, 512, 999):
            proxy.set(Weather(flip_after=at))
            sock.sendall(sent)
            got = get(sock, 1000)
            assert [i for i, byte in enumerate(got) if byte] == [at]
            assert got[at].bit_count() == 1


def test_a_proxy_whose_target_is_away_ends_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with Proxy(f"127.0.0.1:{port}") as proxy, client(proxy) as sock, contextlib.suppress(ConnectionError):
        assert sock.recv(1) == b""
    with pytest.raises(ValueError, match="host:port"):
        Proxy("nowhere")


@pytest.mark.parametrize("kind", ["net-delay", "net-throttle", "net-reset", "net-truncate", "net-silent"])
def test_the_way_to_etcd_is_broken_and_repaired(etcd_server: EtcdServer, job: str, kind: str) -> None:
    network = Network([etcd_server.url])
    with contextlib.closing(network), Etcd(EtcdSettings(endpoints=network.urls, timeout_s=1.0)) as etcd:
        etcd.put(f"/test/{job}", b"x" * 800)
        undo = network.strike(kind, 0.5, 0.4)
        if kind in ("net-truncate", "net-silent"):
            with pytest.raises(EtcdUnavailable):
                etcd.get(f"/test/{job}")
        else:
            begun = time.monotonic()
            assert etcd.get(f"/test/{job}") is not None
            slow = {"net-delay": 0.2, "net-throttle": 0.3}.get(kind, 0.0)
            assert time.monotonic() - begun >= slow
        if undo is not None:
            undo()
        found = etcd.get(f"/test/{job}")
        assert found is not None
        assert len(found.value) == 800
