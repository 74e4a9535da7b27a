"""Give each replica its part of an endless stream of samples, each sample once whatever happens.

The place in the stream is replicated state and moves on commit only (`cursor`); a step that was not
committed is given the same samples again, split among those who are members then. The split itself is
pure arithmetic (`stream`), loading ahead is `prefetch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from ftkit.algorithms.cursor import Cursor
from ftkit.algorithms.prefetch import MapDataset, Prefetcher
from ftkit.algorithms.protocols import DataManager
from ftkit.algorithms.stream import Stream
from ftkit.errors import ConfigError, FtkitError

__all__ = ["DataLoader", "DistributedSampler"]


class _Source:
    """What sampler and loader have in common: a stream, a cursor, and questions about both."""

    _stream: Stream
    _cursor: Cursor

    @property
    def indices(self) -> list[int]:
        """The dataset indices that this rank trains on in the current step, for logs.

        After the vote and until the next batch is drawn, those of the step just voted on. Empty for a
        rank that found no sample left in the last batch.
        """
        return [i for draw in self._cursor.draws for i in self._stream.indices(draw.mine)]

    @property
    def num_trained(self) -> int:
        """How many samples the job has trained on, in committed steps of all replicas together."""
        return self._cursor.place.num_trained

    @property
    def epoch(self) -> int:
        """The data epoch (pass over the dataset) of the next new sample, counted from 0."""
        return self._cursor.place.position // self._stream.length

    @property
    def finished(self) -> bool:
        """Whether all epochs have been committed."""
        return self._cursor.finished

    @property
    def loss_scale(self) -> float:
        """Multiply the mean loss of the current batch with this when the ranks of a group split it.

        It is 1.0 but in the short batch at the end of the last epoch, where the ranks of a group may have
        different numbers of samples although their gradients are averaged with equal weights.
        """
        return self._cursor.draws[-1].loss_scale if self._cursor.draws else 1.0

    def state_dict(self) -> dict[str, object]:
        """Return the place in the stream, for a checkpoint."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: object) -> None:
        """Go to the place in the stream that a checkpoint says."""
        self._cursor.load_state_dict(state)


class DistributedSampler(_Source):
    """A `batch_sampler` for torch's DataLoader that gives each sample to one replica, once.

    It starts the step, since who takes which samples is known only then, and so it cannot be read ahead:
    use it with `num_workers=0`. `ftkit.algorithms.data.DataLoader` does the same with workers.

    Args:
        manager: the manager of this replica.
        dataset: the dataset or its length.
        batch_size: samples per replica and step (per rank with `group_world_size`).
        shuffle: use a new random order in each data epoch.
        seed: of the shuffling; must be the same on all replicas.
        epochs: passes over the dataset; None never ends.
        accumulate: batches drawn per step, for gradient accumulation.
        group_rank: with `group_world_size`: this rank's place, when the ranks of a group split its batch.
        group_world_size: how many ranks of a replica group split its batch.
        name: tells several samplers of one job apart.
    """

    def __init__(
        self,
        manager: DataManager,
        dataset: MapDataset | int,
        *,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        accumulate: int = 1,
        group_rank: int = 0,
        group_world_size: int = 1,
        name: str = "data",
    ) -> None:
        if accumulate < 1:
            raise ConfigError(f"accumulate must be at least 1, not {accumulate}")
        length = dataset if isinstance(dataset, int) else len(dataset)
        self._accumulate = accumulate
        self._stream = Stream(length, shuffle=shuffle, seed=seed, epochs=epochs)
        self._cursor = Cursor(
            manager,
            self._stream,
            batch_size=batch_size,
            group_rank=group_rank,
            group_world_size=group_world_size,
            name=name,
        )

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's dataset indices, one batch after the other, until the epochs are committed."""
        self._cursor.rewind()
        while (draw := self._cursor.draw()) is not None:
            if len(self._cursor.draws) > self._accumulate:
                raise FtkitError(
                    f"batch {len(self._cursor.draws)} was drawn in a step that has accumulate="
                    f"{self._accumulate}: either a DataLoader with workers reads this sampler ahead (use "
                    "ftkit's DataLoader), or the loop left out the optimizer's step (set accumulate)"
                )
            yield self._stream.indices(draw.loaded)


class DataLoader(_Source):
    """Iterate over this replica's batches, loaded ahead by worker processes.

    Each iteration starts the step and yields the batch for it. As long as the step is not committed, the
    same samples are yielded again, split anew if membership has changed; several batches may be drawn in
    one step (gradient accumulation). The iteration ends when the epochs are committed.

    A new `iter()` draws again what was drawn and not voted on.

    Args:
        manager: the manager of this replica.
        dataset: has `__len__` and `__getitem__` (and optionally torch's `__getitems__`).
        batch_size: samples per replica and step (per rank with `group_world_size`).
        shuffle: use a new random order in each data epoch.
        seed: of the shuffling; must be the same on all replicas.
        epochs: passes over the dataset; None never ends.
        num_workers: processes that load ahead; 0 loads in this one.
        prefetch_factor: batches that each worker loads ahead.
        collate_fn: makes a batch of a list of samples.
        pin_memory: put batches into page-locked memory.
        timeout: seconds to wait for a worker; 0 waits without end.
        worker_init_fn: called with the worker's number when it starts.
        multiprocessing_context: how workers are started, as in torch.
        group_rank: with `group_world_size`: this rank's place, when the ranks of a group split its batch.
        group_world_size: how many ranks of a replica group split its batch.
        name: tells several loaders of one job apart.
    """

    def __init__(
        self,
        manager: DataManager,
        dataset: MapDataset,
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        collate_fn: Callable[[list[Any]], object] = default_collate,
        pin_memory: bool = False,
        timeout: float = 0.0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: object = None,
        group_rank: int = 0,
        group_world_size: int = 1,
        name: str = "data",
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise ConfigError(
                "an IterableDataset has no indices, so its samples cannot be dealt out exactly once; "
                "give a dataset with __len__ and __getitem__"
            )
        self._stream = Stream(len(dataset), shuffle=shuffle, seed=seed, epochs=epochs)
        self._cursor = Cursor(
            manager,
            self._stream,
            batch_size=batch_size,
            group_rank=group_rank,
            group_world_size=group_world_size,
            name=name,
        )
        self._prefetcher = Prefetcher(
            dataset,
            self._stream,
            collate=collate_fn,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
        )

    def __iter__(self) -> Iterator[Any]:
        """Start (or go on) at the committed place in the stream."""
        self._cursor.rewind()
        return self

    def __next__(self) -> Any:
        """Start the step and return this rank's batch for it."""
        draw = self._cursor.draw()
        if draw is None:
            self.close()
            raise StopIteration
        return self._prefetcher.get(draw)

    def close(self) -> None:
        """Stop the worker processes; iterating again starts new ones."""
        self._prefetcher.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
