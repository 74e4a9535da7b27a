"""Move bytes between a device and host memory that sockets can read and write.

Knows tensors as flat uint8 memory only. One reader per thread; nothing here runs for CPU tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from transport.tensors import memory_view

PIECE: Final = 8 << 20


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
