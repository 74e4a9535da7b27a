"""A TCP proxy that treats what the source sends as badly as a test wants."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

Mangle = Callable[["Proxy", int, bytes], "bytes | None"]
"""Given the proxy, the number of bytes sent before on this connection, and the next ones: what to send on;
None to close the connection."""


class Proxy:
    """Forwards connections to a source, and its answers through `mangle`."""

    def __init__(self, target: str, mangle: Mangle) -> None:
        url = urlsplit(target)
        assert url.hostname is not None
        assert url.port is not None
        self._target, self._mangle = (url.hostname, url.port), mangle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.stop = threading.Event()
        self.bytes_sent = 0
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        self.stop.set()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in self._sockets:
            sock.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self.stop.is_set():
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:  # it is dead
                    client.close()
                    continue
                self._sockets += [client, server]
                self._start(self._pump, client, server, None)
                self._start(self._pump, server, client, self._mangle)

    def _pump(self, source: socket.socket, sink: socket.socket, mangle: Mangle | None) -> None:
        before = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                out: bytes | None = data
                if mangle is not None:
                    out = mangle(self, before, data)
                    before += len(data)
                if out is None:
                    break
                sink.sendall(out)
                if mangle is not None:
                    self.bytes_sent += len(out)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
