"""Decide which faults strike whom and when: a pure function of a seed, so that a bad night can be replayed.

It knows neither processes nor clocks; `job` and `live` carry a plan out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from ftkit.chaos.kinds import ALL, DEFAULT, FREEZES, GROUP_FAULTS, SHORT, STARTS_AGAIN, TAKES_TWO
from ftkit.errors import ConfigError


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a plan."""

    at: float
    """Seconds since the faults began; the runner may have to wait longer."""
    kind: str
    victim: int = -1
    """Number of the replica group; -1: etcd, or all groups."""
    lasting: float = 0.0
    """Seconds until the fault is taken back (SIGCONT, etcd's new start, the network's repair)."""
    chance: float = 0.0
    """From 0 to 1, what else is left to the seed: the bit, the moment inside a phase, which etcd server."""
    calm: bool = True
    """Wait until all replica groups train together; otherwise strike in the middle of a recovery."""

    def __str__(self) -> str:
        whom = "" if self.victim < 0 else f" group {self.victim}"
        lasting = f" for {self.lasting:.1f} s" if self.lasting else ""
        return f"{self.kind}{whom}{lasting}"


def plan(
    seed: int,
    *,
    seconds: float = 60.0,
    groups: int = 3,
    every_s: float = 5.0,
    lease_ttl: float = 2.0,
    kinds: Sequence[str] = DEFAULT,
    turmoil: float = 0.25,
) -> list[Fault]:
    """Return the faults of a run, in the order of time; equal arguments give equal plans.

    Each kind comes once before any comes again. `every_s` is the mean time between two faults, `turmoil` the
    share of faults that do not wait until the job has got over the last one.

    Raises:
        ConfigError: an unknown kind, or numbers that make no plan.
    """
    unknown = sorted(set(kinds) - set(ALL))
    if unknown or not kinds:
        raise ConfigError(f"unknown kinds of faults: {unknown or 'none given'}; there are {', '.join(ALL)}")
    if groups < 1 or every_s <= 0 or seconds < 0 or lease_ttl <= 0 or not 0 <= turmoil <= 1:
        raise ConfigError(
            f"no plan for groups={groups}, seconds={seconds:g}, every_s={every_s:g}, "
            f"lease_ttl={lease_ttl:g}, turmoil={turmoil:g}"
        )
    if groups <= 2:
        kinds = [k for k in kinds if k not in TAKES_TWO]
        if not kinds:
            raise ConfigError(f"{', '.join(TAKES_TWO)} take out two groups: give --groups 3")
    rng = random.Random(seed)
    faults: list[Fault] = []
    deck: list[str] = []
    at = rng.uniform(0.2, 1.0) * every_s
    while at < seconds:
        if not deck:
            deck = list(dict.fromkeys(kinds))
            rng.shuffle(deck)
        kind = deck.pop()
        # All are drawn for each fault, so that one of them does not shift all that follow.
        victim, length, unrest, gap = rng.randrange(groups), rng.random(), rng.random(), rng.uniform(0.4, 1.6)
        chance = rng.random()
        faults.append(
            Fault(
                at=round(at, 6),
                kind=kind,
                victim=victim if kind in GROUP_FAULTS else -1,
                lasting=round(_lasting(kind, length, lease_ttl), 6),
                chance=round(chance, 6),
                # A wiped etcd is refilled by members that run: some must, and half of them go on after a
                # partition. A source dies after another member.
                calm=unrest >= turmoil or kind in ("etcd-wipe", "part-halves", *TAKES_TWO),
            )
        )
        at += gap * every_s
    return faults


def _lasting(kind: str, length: float, lease_ttl: float) -> float:
    """Return how long a fault lasts; `length` is from 0 to 1."""
    if kind in SHORT:
        return lease_ttl * (0.1 + 0.6 * length)
    if kind in FREEZES:
        return lease_ttl * (1.5 + 1.5 * length)
    if kind in STARTS_AGAIN:
        return 0.1 + 2.0 * lease_ttl * length * length
    return 0.0
