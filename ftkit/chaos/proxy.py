"""A TCP proxy that treats what passes through it as badly as it is told to.

Put it in front of etcd, of a transport source, or of anything else that speaks TCP. One thread runs all
connections; what it does may be changed at any time and holds for connections that exist already.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

_T = TypeVar("_T")

_CHUNK = 1 << 16
_AHEAD = 32
"""Chunks that are read before the first of them is due."""


class Weather(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to what passes; an answer's bytes are counted per connection, from the last change on."""

    delay_s: float = 0.0
    """Each way takes so much longer, seconds."""
    bytes_per_s: float = 0.0
    """Each connection and direction carries no more than this; 0: as much as there is."""
    silent: bool = False
    """Nothing passes; connections stay open and new ones are taken."""
    reset_after: int | None = None
    """Reset the connection (RST) after so many bytes of the answer."""
    truncate_after: int | None = None
    """End the connection in order (FIN) after so many bytes of the answer."""
    flip_after: int | None = None
    """Flip one bit, which one is left to the seed, in the byte of the answer with this number."""


CLEAR = Weather()


class Proxy:
    """Forwards connections to one target; a context manager.

    Args:
        target: `host:port` or a URL with both.
        seed: decides which bits are flipped.
        host: the address to listen on; the port is any free one.
    """

    def __init__(self, target: str, *, seed: int = 0, host: str = "127.0.0.1") -> None:
        url = urlsplit(target if "://" in target else f"tcp://{target}")
        if url.hostname is None or url.port is None:
            raise ValueError(f"a proxy's target is host:port, not {target!r}")
        self._scheme, self._target = url.scheme, (url.hostname, url.port)
        self._rng = random.Random(seed)
        self._weather = CLEAR
        self._listener = socket.create_server((host, 0), backlog=128)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self.num_connections = 0
        """Connections taken so far."""
        self.num_bytes = 0
        """Bytes passed on so far, in both directions."""
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="chaos proxy", daemon=True)
        self._thread.start()
        ready.wait()

    @property
    def address(self) -> str:
        """`host:port` to connect to."""
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The target's URL with the proxy's address in it."""
        return f"{self._scheme}://{self.address}"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def set(self, weather: Weather) -> None:
        """Change what happens from now on; returns when it is so."""

        async def change() -> None:
            self._weather = weather
            self._changed.set()
            self._changed = asyncio.Event()

        self._do(change())

    def clear(self) -> None:
        """Let everything pass again."""
        self.set(CLEAR)

    def reset(self) -> int:
        """Reset all connections (RST) and return how many there were."""

        async def reset() -> int:
            for writer in self._writers:
                _abort(writer)
            return len(self._writers) // 2

        return self._do(reset())

    def close(self) -> None:
        """End all connections and the thread."""
        if self._thread.is_alive():
            self._do(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    # -- in the thread ---------------------------------------------------------------------------------

    def _do(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._listener))
        ready.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def _end(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio runs it as one"
        self._tasks.add(task)
        self.num_connections += 1
        _send_at_once(writer)
        writers = [writer]
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):  # cancelled: the proxy is closed
                far_reader, far_writer = await asyncio.open_connection(*self._target)
                writers.append(far_writer)
                self._writers.update(writers)
                await _first_done(
                    self._pass(reader, far_writer, answer=False),
                    self._pass(far_reader, writer, answer=True),
                )
        finally:
            self._tasks.discard(task)
            self._writers.difference_update(writers)
            for one in writers:
                one.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answer: bool
    ) -> None:
        """Carry one direction of a connection until either side ends it."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_AHEAD)

        async def read() -> None:
            while True:
                try:
                    data = await reader.read(_CHUNK)
                except ConnectionError:
                    data = b""
                await queue.put((self._loop.time(), data))
                if not data:
                    return

        reading = asyncio.ensure_future(read())
        try:
            passage = _Passage(self._rng, answer)
            while True:
                came, data = await queue.get()
                weather = await self._wait_passable(came)
                if not data:
                    return
                data, end = passage.treat(data, weather)
                await self._write(writer, data, weather)
                if end is not None:
                    end(writer)
                    return
        except ConnectionError:
            return
        finally:
            reading.cancel()

    async def _wait_passable(self, came: float) -> Weather:
        """Wait until what came at that time may pass, and return the weather then."""
        while True:
            weather = self._weather
            left = came + weather.delay_s - self._loop.time()
            if not weather.silent and left <= 0:
                return weather
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if weather.silent else left)

    async def _write(self, writer: asyncio.StreamWriter, data: bytes, weather: Weather) -> None:
        rate = weather.bytes_per_s
        piece = len(data) if not rate else max(1, int(rate / 20))
        for start in range(0, len(data), max(1, piece)):
            part = data[start : start + piece]
            writer.write(part)
            await writer.drain()
            self.num_bytes += len(part)
            if rate:
                await asyncio.sleep(len(part) / rate)
                if self._weather is not weather:
                    rate = self._weather.bytes_per_s


class _Passage:
    """What has been done to one direction of a connection."""

    def __init__(self, rng: random.Random, answer: bool) -> None:
        self._rng, self._answer = rng, answer
        self._weather = CLEAR
        self._before = 0

    def treat(
        self, data: bytes, weather: Weather
    ) -> tuple[bytes, Callable[[asyncio.StreamWriter], None] | None]:
        """Return what to send on, and how to end the connection after it, if it is to end."""
        if not self._answer:
            return data, None
        if weather is not self._weather:
            self._weather, self._before = weather, 0
        before, after = self._before, self._before + len(data)
        self._before = after
        at = weather.flip_after
        if at is not None and before <= at < after:
            changed = bytearray(data)
            changed[at - before] ^= 1 << self._rng.randrange(8)
            data = bytes(changed)
        for limit, end in ((weather.reset_after, _abort), (weather.truncate_after, _finish)):
            if limit is not None and after > limit:
                return data[: max(0, limit - before)], end
        return data, None


def _send_at_once(writer: asyncio.StreamWriter) -> None:
    """Hold nothing back until the last piece is acknowledged: that alone costs up to 40 ms.

    asyncio sees to it for sockets whose protocol is named, which that of an accepted one is not.
    """
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with RST."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _finish(writer: asyncio.StreamWriter) -> None:
    """Close with FIN, after what has been written."""
    writer.close()


async def _first_done(*work: Awaitable[None]) -> None:
    """Run all until one of them ends, then end the others."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
