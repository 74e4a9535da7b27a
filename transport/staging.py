"""Move bytes between a device and host memory that sockets can read and write.

Both ways through a few pinned buffers, in the background: one is sent or received while others are copied,
so that the memory this takes does not grow with the state. Knows tensors as flat uint8 memory only. One
reader per thread, one ring per fetch; nothing here runs for CPU tensors.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import torch

from transport.tensors import memory_view

PIECE: Final = 8 << 20
RING: Final = 16
"""Buffers of a ring: for each of a fetch's streams one to receive into, and a few that are being copied."""
PATIENCE_S: Final = 0.1
"""For a buffer of the ring, when all are held by chunks whose rest, or whose checksum, has not come yet."""


def host_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return host memory to copy to or from a device; pinned where that makes the copy faster."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")


def wait_for_device(device: torch.device) -> None:
    """Return once the work queued so far on the caller's stream of this device is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


class HostReader:
    """Reads device memory in pieces through two host buffers: one is filled while the other is in use."""

    def __init__(self, piece: int = PIECE) -> None:
        self._piece = piece
        self._buffers: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def read(self, memory: torch.Tensor, low: int, high: int) -> Iterator[memoryview]:
        """Yield bytes `low` to `high`; a piece is valid until the next one is asked for."""
        if memory.device.type != "cuda":
            for start in range(low, high, self._piece):
                yield memory_view(memory[start : min(high, start + self._piece)].cpu())
            return
        device = memory.device
        if device not in self._buffers:
            self._buffers[device] = (host_buffer(self._piece, device), host_buffer(self._piece, device))
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # beside the trainer's own stream
        buffers, stream = self._buffers[device], self._streams[device]
        starts = list(range(low, high, self._piece))
        events: list[torch.cuda.Event] = []

        def copy(i: int) -> None:
            end = min(high, starts[i] + self._piece)
            with torch.cuda.stream(stream):
                buffers[i % 2][: end - starts[i]].copy_(memory[starts[i] : end], non_blocking=True)
                events.append(stream.record_event())

        if starts:
            copy(0)
        for i, start in enumerate(starts):
            events[i].synchronize()
            if i + 1 < len(starts):
                copy(i + 1)
            yield memory_view(buffers[i % 2])[: min(high, start + self._piece) - start]


Copy = tuple[torch.Tensor, torch.Tensor]
"""Memory to write to, and what is to be there."""


class Copies(Protocol):
    """Copies in the background, in the order in which it is told to."""

    def begin(self, pairs: Sequence[Copy]) -> Callable[[], object]:
        """Begin to copy; return what waits for the end of it, and raises if it failed."""

    def close(self) -> None:
        """Return once nothing is being copied any more."""


class CudaCopies:
    """Copies on a stream of its own for each device, beside the trainer's."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for device in devices:
            self._streams[device] = stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # The memory may be new, and what it was used for before not be done.
            stream.wait_stream(torch.cuda.current_stream(device))

    def begin(self, pairs: Sequence[Copy]) -> Callable[[], object]:
        """Queue the copies, and an event behind them."""
        used = {to.device for to, _ in pairs}
        for to, source in pairs:
            with torch.cuda.stream(self._streams[to.device]):
                to.copy_(source, non_blocking=True)
        events = [self._streams[device].record_event() for device in used]
        return lambda: [event.synchronize() for event in events]

    def close(self) -> None:
        """Wait for the streams."""
        for stream in self._streams.values():
            stream.synchronize()


class ThreadCopies:
    """Copies in a thread: for devices that are not CUDA's."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "transport-copy")

    def begin(self, pairs: Sequence[Copy]) -> Callable[[], object]:
        """Queue the copies."""
        return self._thread.submit(self._copy, pairs).result

    def _copy(self, pairs: Sequence[Copy]) -> None:
        for to, source in pairs:
            to.copy_(source)
        for device in {to.device for to, _ in pairs}:
            wait_for_device(device)

    def close(self) -> None:
        """Let the thread end once it has copied everything."""
        self._thread.shutdown()


def copies_to(devices: Iterable[torch.device]) -> Copies:
    """Return what copies to these devices best."""
    devices = set(devices)
    if all(device.type == "cuda" for device in devices):
        return CudaCopies(devices)
    return ThreadCopies()


class Ring:
    """The host buffers through which the chunks of one fetch get to a device; any thread may call.

    A chunk has a buffer from its first byte until it is verified and copied. When all are in use, the copy
    that began first is waited for. If nothing is being copied, chunks wait for the rest of their bytes or for
    their checksums, which may depend on the very stream that asks: it gets another buffer after a moment.
    """

    def __init__(
        self, nbytes: int, devices: Iterable[torch.device], copies: Copies, *, limit: int = RING
    ) -> None:
        self._nbytes, self._copies, self._limit = nbytes, copies, limit
        self._device = min(devices, key=lambda device: device.type != "cuda")
        self._changed = threading.Condition()
        self._held: dict[int, torch.Tensor] = {}
        self._free: list[torch.Tensor] = []
        self._leaving: deque[tuple[Callable[[], object], torch.Tensor]] = deque()
        self.num_buffers = 0

    def buffer(self, chunk: int) -> torch.Tensor:
        """Return the buffer of a chunk, which is its own until `leave`."""
        while True:
            with self._changed:
                if self._is_full and chunk not in self._held:
                    self._changed.wait_for(lambda: self._free or self._leaving, PATIENCE_S)
                if chunk in self._held:
                    return self._held[chunk]
                if not self._leaving or not self._is_full:
                    buffer = self._held[chunk] = self._free.pop() if self._free else self._new()
                    return buffer
                first = self._leaving[0]
            self._reclaim(first)

    @property
    def _is_full(self) -> bool:
        return not self._free and self.num_buffers >= self._limit

    def _new(self) -> torch.Tensor:
        self.num_buffers += 1
        return host_buffer(self._nbytes, self._device)

    def leave(self, chunk: int, places: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Begin to copy a chunk to its places, each from a position in its buffer, and let go of that."""
        with self._changed:
            buffer = self._held.pop(chunk)
        done = self._copies.begin([(memory, buffer[at : at + memory.numel()]) for memory, at in places])
        with self._changed:
            self._leaving.append((done, buffer))
            self._changed.notify_all()

    def flush(self) -> None:
        """Return once all that has left is in its place."""
        while True:
            with self._changed:
                if not self._leaving:
                    return
                first = self._leaving[0]
            self._reclaim(first)

    def _reclaim(self, first: tuple[Callable[[], object], torch.Tensor]) -> None:
        """Wait for the copy that began first; several threads may do so for one."""
        first[0]()
        with self._changed:
            if self._leaving and self._leaving[0] is first:
                self._free.append(self._leaving.popleft()[1])
                self._changed.notify_all()

    def close(self) -> None:
        """Return once nothing is written to the places any more, whatever came of it."""
        self._copies.close()
