"""Decide which samples of an endless stream a replica takes in a step.

Pure: no manager, no I/O, no clock. A position counts samples from the start of training; the data epoch
(one pass over the dataset) is `position // length`. A global batch is a run of consecutive positions and
may span data epochs, so batches are full up to the very end, whatever the number of replicas does.

A step may be committed by fewer replicas than began it. The samples of those who are missing are holes
in what has been trained on; they are handed out first in the steps that follow.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ftkit.errors import ConfigError

__all__ = ["Draw", "Place", "Span", "Stream", "mixed"]

Span = tuple[int, int]
"""Positions from the first number up to, not including, the second."""

_KEPT_PERMUTATIONS = 2
"""A global batch usually touches one data epoch, at its border two."""


def mixed(*numbers: int) -> int:
    """Return a seed made of several numbers: with a sum, (1, 0) would repeat what (0, 1) has given."""
    packed = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "big") >> 1


def _count(spans: Iterable[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _cut(spans: Iterable[Span], first: int, last: int) -> tuple[Span, ...]:
    """Return what lies between two offsets into the spans, as if they were one run."""
    found, offset = [], 0
    for start, stop in spans:
        low, high = max(start, start + first - offset), min(stop, start + last - offset)
        if low < high:
            found.append((low, high))
        offset += stop - start
    return tuple(found)


def _bound(count: int, shares: int, i: int) -> int:
    """Return where share `i` begins when `count` samples are split as evenly as possible."""
    each, rest = divmod(count, shares)
    return i * each + min(i, rest)


@dataclass(frozen=True, slots=True)
class Place:
    """How far a job has come: all positions before `position` are done, but for the holes."""

    position: int = 0
    holes: tuple[Span, ...] = ()
    """In order, apart from each other, and before `position`."""

    @property
    def num_trained(self) -> int:
        """How many samples have been trained on."""
        return self.position - _count(self.holes)

    def ended(self, total: int | None) -> bool:
        """Say whether nothing is left of a stream of `total` samples (None: endless)."""
        return not self.holes and total is not None and self.position >= total

    def take(self, count: int, total: int | None) -> tuple[tuple[Span, ...], Place]:
        """Return the next `count` positions, or what is left of them, and the place behind them."""
        from_holes = _cut(self.holes, 0, count)
        holes = _cut(self.holes, count, _count(self.holes))
        stop = self.position + count - _count(from_holes)
        if total is not None:
            stop = max(self.position, min(stop, total))
        fresh = ((self.position, stop),) if stop > self.position else ()
        return from_holes + fresh, Place(stop, holes)

    def without(self, spans: Iterable[Span]) -> Place:
        """Return this place with some of what lies behind it not done after all."""
        holes: list[Span] = []
        for start, stop in sorted((*self.holes, *spans)):
            if holes and holes[-1][1] == start:
                holes[-1] = (holes[-1][0], stop)
            else:
                holes.append((start, stop))
        return Place(self.position, tuple(holes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One global batch and this rank's part of it.

    `shares` is the number of ranks that split the batch, `share` this rank's place among them and
    `ranks` how many of them belong to one replica group (1 unless the group splits its batch).
    """

    batch: tuple[Span, ...]
    after: Place
    """Where the stream goes on."""
    batch_size: int
    shares: int
    share: int
    ranks: int = 1
    total: int | None = None
    """Where the stream ends; None: never."""

    @classmethod
    def at(
        cls,
        place: Place,
        *,
        batch_size: int,
        shares: int,
        share: int,
        ranks: int = 1,
        total: int | None = None,
    ) -> Draw:
        """Draw the batch that comes next at a place; the stream must not have ended there."""
        if batch_size < 1 or ranks < 1 or shares % ranks or not 0 <= share < shares:
            raise ValueError(f"share {share} of {shares}, {ranks} per group, batch size {batch_size}")
        batch, after = place.take(batch_size * shares, total)
        if not batch:
            raise ValueError(f"nothing is left of a stream of {total} samples at {place}")
        return cls(
            batch=batch,
            after=after,
            batch_size=batch_size,
            shares=shares,
            share=share,
            ranks=ranks,
            total=total,
        )

    @property
    def short(self) -> bool:
        """Whether this is the stream's last batch and too small for all (equal on all ranks)."""
        return _count(self.batch) < self.batch_size * self.shares

    @property
    def mine(self) -> tuple[Span, ...]:
        """The positions that this rank takes; empty when the last batch has none left for it."""
        return self._shares(self.share, self.share + 1)

    @property
    def loaded(self) -> tuple[Span, ...]:
        """The positions to load: `mine`, or one stand-in sample of no weight."""
        first = self.batch[0][0]
        return self.mine or ((first, first + 1),)

    def of_replica(self, replica: int) -> tuple[Span, ...]:
        """Return the positions that a replica group takes with all its ranks."""
        return self._shares(replica * self.ranks, (replica + 1) * self.ranks)

    @property
    def weight(self) -> int:
        """How many samples the ranks of this replica group take together."""
        return _count(self.of_replica(self.share // self.ranks))

    @property
    def num_mine(self) -> int:
        """How many samples this rank takes."""
        return _count(self.mine)

    @property
    def loss_scale(self) -> float:
        """What makes an equal-weight mean over the group's ranks a mean over its samples.

        1.0 but in a short batch of a group that splits its batch.
        """
        return self.num_mine * self.ranks / self.weight if self.weight and self.ranks > 1 else 1.0

    def following(self) -> Draw | None:
        """Return the next draw if all goes well and membership stays; None at the end of the stream."""
        if self.after.ended(self.total):
            return None
        return Draw.at(
            self.after,
            batch_size=self.batch_size,
            shares=self.shares,
            share=self.share,
            ranks=self.ranks,
            total=self.total,
        )

    def _shares(self, first: int, last: int) -> tuple[Span, ...]:
        count = _count(self.batch)
        return _cut(self.batch, _bound(count, self.shares, first), _bound(count, self.shares, last))


class Stream:
    """The order in which samples are read: equal on every replica for equal arguments.

    `length` is the dataset's, `epochs` how many passes are made (None: without end).
    """

    def __init__(
        self, length: int, *, shuffle: bool = True, seed: int = 0, epochs: int | None = None
    ) -> None:
        if length < 1:
            raise ConfigError("the dataset is empty: there is no sample to train on")
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs must be at least 1 or None for an endless stream, not {epochs}")
        self.length = length
        self.shuffle = shuffle
        self.seed = seed
        self.total = None if epochs is None else epochs * length
        self._permutations: OrderedDict[int, torch.Tensor] = OrderedDict()

    def indices(self, spans: Iterable[Span]) -> list[int]:
        """Return the dataset indices at these positions, in order."""
        found: list[int] = []
        for at, stop in spans:
            while at < stop:
                epoch, offset = divmod(at, self.length)
                end = min(self.length, offset + stop - at)
                if self.shuffle:
                    found += self._permutation(epoch)[offset:end].tolist()
                else:
                    found += range(offset, end)
                at += end - offset
        return found

    def _permutation(self, epoch: int) -> torch.Tensor:
        known = self._permutations.get(epoch)
        if known is None:
            generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
            known = torch.randperm(self.length, generator=generator)
            self._permutations[epoch] = known
            while len(self._permutations) > _KEPT_PERMUTATIONS:
                self._permutations.popitem(last=False)
        else:
            self._permutations.move_to_end(epoch)
        return known
