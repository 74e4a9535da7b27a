"""One side of `ftkit bench transfer`, in a process of its own: it holds a state, and sends or receives it.

Commands come as JSON lines on standard input, and each is answered with one. Knows every method; who takes
turns with whom, and the figures, stand in `ftkit.bench.transfer`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import torch
import torch.distributed as dist
import xxhash
from torch._C._distributed_c10d import TCPStore

from transport import DistributedTransport, HTTPTransport

NUM_TENSORS: Final = 64
LIMIT_S: Final = 300.0
PIECE: Final = 1 << 30
State = dict[str, torch.Tensor]


class Method(Protocol):
    """A way to move the state."""

    def open(self, state: State, version: str) -> str:
        """Offer the state, at the source; return what the receiver must know."""

    def receive(self, address: str, state: State, version: str) -> None:
        """Receive it, at the receiver, into these tensors."""

    def close(self) -> None:
        """End the offer."""


def memories(state: State) -> list[memoryview]:
    """Return the memory of all tensors."""
    return [tensor.view(torch.uint8).numpy().data for tensor in state.values()]


def in_threads(work: Callable[[int], None], count: int) -> list[threading.Thread]:
    """Start as many threads."""
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    return threads


class Raw:
    """Plain `sendall` to `recv_into` over some connections, each with its share of the tensors."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []

    def open(self, state: State, version: str) -> str:
        """Send to each that connects."""
        views = memories(state)
        self._listener = listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(LIMIT_S)

        def serve(_: int) -> None:
            sock, _ = listener.accept()
            with sock:
                share = sock.recv(1)[0]
                for view in views[share :: self._streams]:
                    sock.sendall(view)

        self._threads = in_threads(serve, self._streams)
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def receive(self, address: str, state: State, version: str) -> None:
        """Receive one tensor after the other."""
        host, _, port = address.rpartition(":")
        views = memories(state)
        whole: list[int] = []

        def take(share: int) -> None:
            with socket.create_connection((host, int(port)), LIMIT_S) as sock:
                sock.sendall(bytes([share]))
                for view in views[share :: self._streams]:
                    while view:
                        n = sock.recv_into(view)
                        if n == 0:
                            return
                        view = view[n:]
            whole.append(share)

        for thread in in_threads(take, self._streams):
            thread.join()
        if len(whole) != self._streams:
            raise RuntimeError("a connection ended early")

    def close(self) -> None:
        """Wait for the senders."""
        for thread in self._threads:
            thread.join(LIMIT_S)
        if self._listener is not None:
            self._listener.close()


class Memcpy:
    """Copies memory that the receiver itself holds: what no way over a socket can beat."""

    def __init__(self) -> None:
        self._piece: torch.Tensor | None = None

    def open(self, state: State, version: str) -> str:
        """Do nothing."""
        return ""

    def receive(self, address: str, state: State, version: str) -> None:
        """Copy tensor by tensor from a piece of memory larger than the caches."""
        size = sum(t.numel() for t in state.values())
        if self._piece is None:
            self._piece = torch.ones(min(size, PIECE // 4))
        at = 0
        for tensor in state.values():
            for start in range(0, tensor.numel(), self._piece.numel()):
                part = tensor[start : start + self._piece.numel()]
                at = 0 if at + part.numel() > self._piece.numel() else at
                part.copy_(self._piece[at : at + part.numel()])
                at += part.numel()

    def close(self) -> None:
        """Do nothing: the piece, made in the round that warms up, is used again."""


class Http:
    """Our transport over HTTP: in place, every chunk verified."""

    _transports: ClassVar[dict[bool, HTTPTransport]] = {}

    def __init__(self, *, same_host: bool = False, snapshot: bool = False) -> None:
        """`same_host` takes over memory, not bytes; a `snapshot` is copied first, and sent from there."""
        self._same_host, self._snapshot = same_host, snapshot

    @classmethod
    def _shared(cls, same_host: bool) -> HTTPTransport:
        """Return the one of a kind, so that all snapshots are made in the same memory."""
        if same_host not in cls._transports:
            cls._transports[same_host] = HTTPTransport(token="bench", same_host=same_host)
        return cls._transports[same_host]

    def open(self, state: State, version: str) -> str:
        """Publish; what way the bytes take is for the receiver to choose."""
        self._shared(True).publish(version, state, snapshot=self._snapshot)
        return self._shared(True).address

    def receive(self, address: str, state: State, version: str) -> None:
        """Fetch."""
        self._shared(self._same_host).fetch([address], version, state, deadline_s=LIMIT_S)

    def close(self) -> None:
        """Withdraw."""
        self._shared(True).withdraw()


class Gloo:
    """Our transport over a gloo group of the two sides: in place, every chunk verified."""

    def __init__(self, devices: int) -> None:
        """With several devices, as by `GLOO_SOCKET_IFNAME=eth0,eth0`, the group has as many connections."""
        self._devices = devices
        self._transport = DistributedTransport(HTTPTransport(token="bench"), timeout_s=LIMIT_S)
        self._store: TCPStore | None = None
        self._joining: list[threading.Thread] = []

    def _join(self, rank: int) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=LIMIT_S)
        options._devices = [gloo.create_device(hostname="127.0.0.1") for _ in range(self._devices)]
        self._transport.configure(gloo(self._store, rank, 2, options), "bench")

    def open(self, state: State, version: str) -> str:
        """Publish; in the first round, which does not count, wait for the other side in a thread."""
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._joining = in_threads(lambda _: self._join(0), 1)
        self._transport.publish(version, state)
        return f"{self._store.port} {self._transport.address}"

    def receive(self, address: str, state: State, version: str) -> None:
        """Fetch."""
        port, _, source = address.partition(" ")
        if self._store is None:
            self._store = TCPStore("127.0.0.1", int(port), is_master=False)
            self._join(1)
        self._transport.fetch([source], version, state, deadline_s=LIMIT_S)

    def close(self) -> None:
        """Withdraw."""
        for thread in self._joining:
            thread.join(LIMIT_S)
        self._transport.withdraw()


class Torchft:
    """torchft's transport over HTTP, and the copy into the model that its caller makes."""

    def __init__(self, chunks: int) -> None:
        # Not a requirement: its stubs are only there where it is.
        theirs = importlib.import_module("torchft.checkpointing.http_transport")

        self._limit = timedelta(seconds=LIMIT_S)
        self._transport: Any = theirs.HTTPTransport(timeout=self._limit, num_chunks=chunks)

    def open(self, state: State, version: str) -> str:
        """Allow the checkpoint."""
        self._transport.send_checkpoint(
            dst_ranks=[1], step=int(version), state_dict=state, timeout=self._limit
        )
        return str(self._transport.metadata())

    def receive(self, address: str, state: State, version: str) -> None:
        """Receive a copy, then copy it."""
        received = self._transport.recv_checkpoint(
            src_rank=0, metadata=address, step=int(version), timeout=self._limit
        )
        for name, tensor in state.items():
            tensor.copy_(received[name])

    def close(self) -> None:
        """Disallow the checkpoint."""
        self._transport.disallow_checkpoint()


METHODS: Final[dict[str, Callable[[], Method]]] = {
    "raw1": lambda: Raw(1),
    "raw2": lambda: Raw(2),
    "memcpy": Memcpy,
    "http": Http,
    "http_snapshot": lambda: Http(snapshot=True),
    "same_host": lambda: Http(same_host=True),
    "same_host_snapshot": lambda: Http(same_host=True, snapshot=True),
    "gloo": lambda: Gloo(2),
    "gloo_one_device": lambda: Gloo(1),
    "torchft_http": lambda: Torchft(0),
    "torchft_http_4_chunks": lambda: Torchft(4),
}


def memory(field: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found is not None else 0


class Meter:
    """CPU time and peak memory from its construction on."""

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._before: int | None = memory("VmRSS")
        except OSError:
            self._before = None  # not allowed here
        self._cpu = self._now()
        self._started = time.perf_counter()

    @staticmethod
    def _now() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    def read(self) -> dict[str, object]:
        """Return what was used since."""
        seconds, cpu = time.perf_counter() - self._started, self._now() - self._cpu
        extra = None if self._before is None else max(0, memory("VmHWM") - self._before)
        return {"seconds": seconds, "cpu_s": cpu, "extra_bytes": extra}


def free_unused() -> None:
    """Give memory back that nobody uses: a joiner receives once in its life, so none is left from before."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def digest(state: State) -> str:
    """Return the checksum of all tensors."""
    hasher = xxhash.xxh3_128()
    for view in memories(state):
        hasher.update(view)
    return hasher.hexdigest()


def main() -> None:
    """Do what standard input says until it ends."""
    size = int(sys.argv[1]) << 20
    source = sys.argv[2] == "source"
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    block = torch.rand(size // NUM_TENSORS // 4, generator=generator)
    state = {f"layers.{i}.weight": block + i if source else block * 0 for i in range(NUM_TENSORS)}
    methods: dict[str, Method] = {}
    meter: Meter | None = None
    for line in sys.stdin:
        order = json.loads(line)
        what, name, version = order["do"], order.get("method", ""), order.get("version", "")
        answer: dict[str, object] = {}
        try:
            if what == "digest":
                answer["digest"] = digest(state)
            elif what == "open":
                method = methods.get(name) or methods.setdefault(name, METHODS[name]())
                meter = Meter()
                address = method.open(state, version)
                answer = {**meter.read(), "address": address}
            elif what == "receive":
                method = methods.get(name) or methods.setdefault(name, METHODS[name]())
                for tensor in state.values():
                    tensor.zero_()
                free_unused()
                meter = Meter()
                method.receive(order["address"], state, version)
                answer = meter.read()
            elif what == "close":
                methods[name].close()
                assert meter is not None
                answer = meter.read()
        except Exception as error:  # the other process says it
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
