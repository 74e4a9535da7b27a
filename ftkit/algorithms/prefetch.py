"""Load batches ahead of their step in torch's worker processes.

What the next steps will ask for is a guess: that membership stays as it is and every step commits. A
batch is handed out only when it is exactly the one asked for; after a wrong guess those in flight are
dropped and the right ones ordered. It knows neither manager nor cursor.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils import data as torch_data

from ftkit.algorithms.stream import Draw, Stream, mixed

__all__ = ["MapDataset", "Prefetcher"]

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class MapDataset(Protocol):
    """A dataset with a length and samples that are read by index."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> object:
        """Return one sample."""


class _Batches(torch_data.Dataset[object]):
    """Turn a list of indices into a collated batch, in whichever process the loader runs it."""

    def __init__(self, dataset: MapDataset, collate: Callable[[list[Any]], object]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __getitem__(self, indices: list[int]) -> object:
        if not indices:
            return None  # ordered beyond the end of the stream, only to keep the workers' queue going
        fetch_many = getattr(self._dataset, "__getitems__", None)
        samples = fetch_many(indices) if callable(fetch_many) else [self._dataset[i] for i in indices]
        return self._collate(samples)


class _WorkerInit:
    """Tie a worker's life to its trainer's, then run the user's own initialisation.

    A forked worker inherits the trainer's sockets. If it outlived a killed trainer, even for the seconds
    that torch's own watchdog takes, peers and keeper would see those connections as alive.
    """

    def __init__(self, user_init: Callable[[int], object] | None) -> None:
        self._user_init = user_init
        self._trainer = os.getpid()
        # The signal comes when the *thread* that forked ends; only the main thread lasts as long as the
        # process for certain.
        self._tie = sys.platform == "linux" and threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        if self._tie and os.getppid() == self._trainer:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != self._trainer:
                os._exit(1)  # the trainer died before the signal was ordered
        if self._user_init is not None:
            self._user_init(worker)


def _as_is(batch: object) -> object:
    return batch


class _Orders:
    """The endless list of what the workers shall load, with a note of what was ordered."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.ordered: deque[Draw | None] = deque()
        self.upcoming: Draw | None = None

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        draw = self.upcoming
        self.ordered.append(draw)
        if draw is None:
            return []
        self.upcoming = draw.following()
        return self._stream.indices(draw.loaded)


class Prefetcher:
    """Hand out the batch of any draw; fast if it follows the one before.

    With `num_workers=0` batches are loaded when they are asked for, in this process.
    """

    def __init__(
        self,
        dataset: MapDataset,
        stream: Stream,
        *,
        collate: Callable[[list[Any]], object],
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        timeout: float = 0.0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: object = None,
    ) -> None:
        self._batches = _Batches(dataset, collate)
        self._stream = stream
        self._orders = _Orders(stream)
        self._running: Iterator[object] | None = None
        # torch seeds the workers from this; the global generator would be moved on by each such seed.
        self._generator = torch.Generator()
        self._loader: torch_data.DataLoader[object] | None = None
        if num_workers or pin_memory:
            self._loader = torch_data.DataLoader(
                self._batches,
                batch_size=None,
                sampler=self._orders,
                num_workers=num_workers,
                prefetch_factor=prefetch_factor if num_workers else None,
                collate_fn=_as_is,
                pin_memory=pin_memory,
                timeout=timeout,
                worker_init_fn=_WorkerInit(worker_init_fn) if num_workers else None,
                multiprocessing_context=multiprocessing_context if num_workers else None,
                generator=self._generator,
            )

    def get(self, draw: Draw) -> object:
        """Return the batch of a draw; an exception of the dataset is raised here."""
        if self._loader is None:
            return self._batches[self._stream.indices(draw.loaded)]
        orders = self._orders
        if self._running is None:
            orders.ordered.clear()
            orders.upcoming = draw
            self._generator.manual_seed(mixed(self._stream.seed, draw.loaded[0][0], draw.share))
            self._running = iter(self._loader)
            stale = 0
        elif orders.ordered and orders.ordered[0] == draw:
            stale = 0
        else:
            stale = len(orders.ordered)
            orders.upcoming = draw
        for _ in range(stale):
            self._drop_one()
        # torch orders one more batch on each of these calls, so the right ones are on their way by now.
        try:
            return self._take(self._running)
        except BaseException:
            self.close()  # a worker may be dead; those of the next attempt are new
            raise

    def close(self) -> None:
        """Stop the workers; the next `get` starts them anew."""
        self._running = None
        self._orders.ordered.clear()

    def _drop_one(self) -> None:
        assert self._running is not None
        try:
            self._take(self._running)
        except Exception as e:
            # Nobody has asked for this batch. A worker that has died is reported by the next one.
            logger.debug("a batch loaded ahead and dropped had failed: %s", e)

    def _take(self, running: Iterator[object]) -> object:
        try:
            return next(running)
        finally:
            if self._orders.ordered:
                self._orders.ordered.popleft()
