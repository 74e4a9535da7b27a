"""Decide which faults strike whom and when: a pure function of a seed, so that a bad night can be replayed.

It knows neither processes nor clocks; `scripts/chaos.py` carries a plan out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from ftkit.errors import ConfigError

TRAINER_FAULTS = (
    "kill",
    "lose-machine",
    "blink",
    "freeze",
    "freeze-trainer",
    "drain",
    "kill-keeper",
    "revoke-lease",
)
"""Faults that strike one replica group."""

ETCD_FAULTS = ("etcd-kill", "etcd-restart", "etcd-freeze", "etcd-wipe", "etcd-compact")
"""Faults that strike etcd."""

KINDS = TRAINER_FAULTS + ETCD_FAULTS

MEANING = {
    "kill": "SIGKILL to the trainer",
    "lose-machine": "SIGKILL to the keeper and the trainer: nobody is left to tell of the death",
    "blink": "SIGSTOP to trainer and keeper for less than the lease's life",
    "freeze": "SIGSTOP to trainer and keeper for longer than the lease's life",
    "freeze-trainer": "SIGSTOP to the trainer alone, for longer than the lease's life",
    "drain": "SIGTERM to the trainer: it leaves at a step boundary, and another one starts in its place",
    "kill-keeper": "SIGKILL to the keeper; training goes on",
    "revoke-lease": "revoke the member's lease: its keys vanish although it lives",
    "etcd-kill": "SIGKILL to etcd, started again with its data",
    "etcd-restart": "SIGTERM to etcd, started again with its data",
    "etcd-freeze": "SIGSTOP to etcd for longer than a lease's life: all leases are lost at once",
    "etcd-wipe": "SIGKILL to etcd, its data deleted, started again",
    "etcd-compact": "compact etcd's history up to the present: watches must begin anew",
}
"""What each kind of fault does."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a plan."""

    at: float
    """Seconds since the faults began; the runner may have to wait longer."""
    kind: str
    victim: int = -1
    """Number of the replica group; -1: etcd."""
    lasting: float = 0.0
    """Seconds until the fault is taken back (SIGCONT, etcd's new start)."""
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
    kinds: Sequence[str] = KINDS,
    turmoil: float = 0.25,
) -> list[Fault]:
    """Return the faults of a run, in the order of time; equal arguments give equal plans.

    Each kind comes once before any comes again. `every_s` is the mean time between two faults, `turmoil` the
    share of faults that do not wait until the job has got over the last one.

    Raises:
        ConfigError: an unknown kind, or numbers that make no plan.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or not kinds:
        raise ConfigError(f"unknown kinds of faults: {unknown or 'none given'}; there are {', '.join(KINDS)}")
    if groups < 1 or every_s <= 0 or seconds < 0 or lease_ttl <= 0 or not 0 <= turmoil <= 1:
        raise ConfigError(
            f"no plan for groups={groups}, seconds={seconds:g}, every_s={every_s:g}, "
            f"lease_ttl={lease_ttl:g}, turmoil={turmoil:g}"
        )
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
        faults.append(
            Fault(
                at=round(at, 6),
                kind=kind,
                victim=victim if kind in TRAINER_FAULTS else -1,
                lasting=round(_lasting(kind, length, lease_ttl), 6),
                # A wiped etcd is refilled by members that run: some must.
                calm=unrest >= turmoil or kind == "etcd-wipe",
            )
        )
        at += gap * every_s
    return faults


def _lasting(kind: str, length: float, lease_ttl: float) -> float:
    """Return how long a fault lasts; `length` is from 0 to 1."""
    if kind == "blink":
        return lease_ttl * (0.1 + 0.6 * length)
    if kind in ("freeze", "freeze-trainer", "etcd-freeze"):
        return lease_ttl * (1.5 + 1.5 * length)
    if kind in ("etcd-kill", "etcd-restart", "etcd-wipe"):
        return 0.1 + 2.0 * lease_ttl * length * length
    return 0.0
