"""Replicas as threads of one process that average over real gloo groups.

Membership is what the test says; the collectives, their futures and their salvage are ftkit's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from ftkit.groups.gloo import ProcessGroupGloo
from ftkit.groups.store import RendezvousStore
from ftkit.runtime.collectives import Collective, Collectives

T = TypeVar("T")

TIMEOUT_S = 30.0
DEADLINE_S = 80.0


class GlooManager:
    """One replica's averaging, without etcd and votes."""

    def __init__(self, store: RendezvousStore, rank: int, size: int) -> None:
        self.rank = rank
        self._store = store
        self._size = size
        self._pg = ProcessGroupGloo(timeout_s=TIMEOUT_S)
        self.errors: list[Exception] = []
        self.sent: list[int] = []
        self.divided_by: list[int] = []
        self.collectives = Collectives(self._launch, self.errors.append)
        self.models: list[torch.nn.Module] = []
        self.starts = 0
        self.form("first", rank, size)

    def form(self, prefix: str, rank: int, size: int) -> None:
        self._size = size
        self._pg.configure(self._store.address, prefix, rank, size, timeout_s=DEADLINE_S)

    def close(self) -> None:
        self._pg.close()

    def abort(self) -> None:
        self.collectives.pause()
        self._pg.abort()

    def declare_model(self, module: torch.nn.Module, name: str = "") -> None:
        self.models.append(module)

    def start_step(self) -> None:
        self.starts += 1

    def begin(self) -> None:
        """A new step."""
        self.sent, self.divided_by = [], []
        self.collectives.begin()

    def _launch(self, call: Collective) -> torch.distributed.Work | None:
        self.sent.append(call.tensor.numel())
        self.divided_by.append(call.divided_by)
        if call.average:
            call.tensor.mul_(call.divided_by / self._size)
        return self._pg.allreduce(call.tensor) if self._size > 1 else None

    def num_contributors(self) -> int:
        return self._size

    def allreduce(self, tensor: torch.Tensor, *, average: bool = True) -> Collective:
        return self.collectives.reduce(Collective(self.collectives, tensor, average=average))

    def reduce_bucket(
        self,
        buffer: torch.Tensor,
        restore: Callable[[], None] | None,
        last: bool,
        *,
        divided_by: int = 1,
    ) -> torch.futures.Future[torch.Tensor]:
        call = Collective(
            self.collectives,
            buffer,
            average=True,
            restore=restore,
            held=True,
            last=last,
            divided_by=divided_by,
        )
        return self.collectives.reduce(call).get_future()


@contextmanager
def replicas(size: int) -> Iterator[Callable[[Callable[[GlooManager], T]], list[T]]]:
    """Give a function that runs another one on each replica, in parallel, and returns all results."""
    with RendezvousStore() as store:
        managers: list[GlooManager | None] = [None] * size

        def on_all(fn: Callable[[GlooManager], T]) -> list[T]:
            results: list[T | None] = [None] * size
            failures: list[BaseException] = []

            def run(rank: int) -> None:
                try:
                    manager = managers[rank] or GlooManager(store, rank, size)
                    managers[rank] = manager
                    results[rank] = fn(manager)
                except BaseException as e:
                    failures.append(e)
                    for other in managers:
                        if other is not None:
                            other.collectives.fail()

            threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(size)]
            for t in threads:
                t.start()
            deadline = time.monotonic() + DEADLINE_S
            for t in threads:
                t.join(max(0.0, deadline - time.monotonic()))
            if failures:
                raise failures[0]
            assert not any(t.is_alive() for t in threads), "a replica hangs"
            return results  # type: ignore[return-value]

        try:
            yield on_all
        finally:
            for m in managers:
                if m is not None:
                    m.close()
