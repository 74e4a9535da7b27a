"""Decide which samples of an endless stream a replica takes in a step.

Pure: no manager, no I/O, no clock. A position counts samples from the start of training; the data epoch
(one pass over the dataset) is `position // length`. A global batch is a run of consecutive positions and
may span data epochs, so batches are full up to the very end, whatever the number of replicas does.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import torch

from ftkit.errors import ConfigError

__all__ = ["Draw", "Stream", "mixed"]

_KEPT_PERMUTATIONS = 2
"""A global batch usually touches one data epoch, at its border two."""


def mixed(*numbers: int) -> int:
    """Return a seed made of several numbers: with a sum, (1, 0) would repeat what (0, 1) has given."""
    packed = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "big") >> 1


def _bound(count: int, shares: int, i: int) -> int:
    """Return where share `i` begins when `count` samples are split as evenly as possible."""
    each, rest = divmod(count, shares)
    return i * each + min(i, rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One global batch and this rank's part of it.

    `shares` is the number of ranks that split the batch, `share` this rank's place among them and
    `ranks` how many of them belong to one replica group (1 unless the group splits its batch).
    """

    start: int
    batch_size: int
    shares: int
    share: int
    ranks: int = 1
    total: int | None = None
    """Where the stream ends; None: never."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.ranks < 1 or not 0 <= self.share < self.shares:
            raise ValueError(f"share {self.share} of {self.shares}, batch size {self.batch_size}")
        if self.start < 0 or (self.total is not None and self.start >= self.total):
            raise ValueError(f"position {self.start} lies outside a stream of {self.total} samples")

    @property
    def stop(self) -> int:
        """The position behind the global batch."""
        stop = self.start + self.batch_size * self.shares
        return stop if self.total is None else min(stop, self.total)

    @property
    def short(self) -> bool:
        """Whether this is the stream's last batch and too small for all (equal on all ranks)."""
        return self.stop - self.start < self.batch_size * self.shares

    @property
    def positions(self) -> range:
        """The positions that this rank takes; empty when the last batch has none left for it."""
        count = self.stop - self.start
        return range(
            self.start + _bound(count, self.shares, self.share),
            self.start + _bound(count, self.shares, self.share + 1),
        )

    @property
    def loaded(self) -> range:
        """The positions to load: `positions`, or one stand-in sample of no weight."""
        return self.positions or range(self.start, self.start + 1)

    @property
    def weight(self) -> int:
        """How many samples the ranks of this replica group take together."""
        count, first = self.stop - self.start, self.share - self.share % self.ranks
        return _bound(count, self.shares, first + self.ranks) - _bound(count, self.shares, first)

    @property
    def loss_scale(self) -> float:
        """What makes an equal-weight mean over the group's ranks a mean over its samples.

        1.0 but in a short batch of a group that splits its batch.
        """
        return len(self.positions) * self.ranks / self.weight if self.weight and self.ranks > 1 else 1.0

    def following(self) -> Draw | None:
        """Return the next draw if membership stays as it is; None at the end of the stream."""
        if self.total is not None and self.stop >= self.total:
            return None
        return Draw(
            start=self.stop,
            batch_size=self.batch_size,
            shares=self.shares,
            share=self.share,
            ranks=self.ranks,
            total=self.total,
        )


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

    def indices(self, positions: range) -> list[int]:
        """Return the dataset indices at consecutive positions."""
        found: list[int] = []
        at = positions.start
        while at < positions.stop:
            epoch, offset = divmod(at, self.length)
            end = min(self.length, offset + positions.stop - at)
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
