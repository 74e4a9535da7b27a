"""Measure what must stay flat in a long run: descriptors, threads and memory of processes, etcd's data.

It reads /proc and judges nothing but growth; a process that is gone has no reading.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

_PAGE_KIB = 4


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a process."""

    at: float
    descriptors: int
    threads: int
    rss_kib: int


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """How much a process grew, from a first reading (after its start) to its last."""

    name: str
    pid: int
    seconds: float
    descriptors: int
    threads: int
    rss_kib: int


class Gauges:
    """The first and the last reading of each process."""

    def __init__(self, settle_s: float = 15.0) -> None:
        """Readings of a process's first `settle_s` seconds do not count: it still starts."""
        self._settle_s = settle_s
        self._known: dict[int, tuple[str, float]] = {}
        self._first: dict[int, Reading] = {}
        self._last: dict[int, Reading] = {}

    def look(self, name: str, pid: int, now: float) -> None:
        """Take a reading of a process."""
        _, since = self._known.setdefault(pid, (name, now))
        reading = read(pid, now)
        if reading is not None and now - since >= self._settle_s:
            self._first.setdefault(pid, reading)
            self._last[pid] = reading

    def growth(self, at_least_s: float = 30.0) -> list[Growth]:
        """Return the growth of all processes that were watched for so long."""
        found = []
        for pid, first in self._first.items():
            last = self._last[pid]
            if last.at - first.at >= at_least_s:
                found.append(
                    Growth(
                        name=self._known[pid][0],
                        pid=pid,
                        seconds=round(last.at - first.at, 1),
                        descriptors=last.descriptors - first.descriptors,
                        threads=last.threads - first.threads,
                        rss_kib=last.rss_kib - first.rss_kib,
                    )
                )
        return found


MOST = {"descriptors": 20, "threads": 10, "rss_kib": 64 * 1024}
"""How much a process may grow after its start; what is open for a recovery at the last reading counts too."""
MOST_ETCD_BYTES = 8_000_000
"""How much etcd's database may grow: epochs, statistics and their history until it is compacted."""


def leaks(growth: Sequence[Growth], etcd_bytes: Sequence[int]) -> list[str]:
    """Say what did not stay flat: a process, or etcd's database, whose sizes come in order of time."""
    found = [
        f"{g.name} (pid {g.pid}) has grown by {getattr(g, what)} {what} in {g.seconds:.0f} s"
        for g in growth
        for what, most in MOST.items()
        if getattr(g, what) > most
    ]
    if etcd_bytes and etcd_bytes[-1] - etcd_bytes[0] > MOST_ETCD_BYTES:
        found.append(f"etcd's database has grown from {etcd_bytes[0]} to {etcd_bytes[-1]} bytes")
    return found


def read(pid: int, now: float) -> Reading | None:
    """Look at a process; None when it is gone or not ours."""
    folder = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError, ValueError, IndexError):
        return Reading(
            at=now,
            descriptors=sum(1 for _ in (folder / "fd").iterdir()),
            threads=sum(1 for _ in (folder / "task").iterdir()),
            rss_kib=int((folder / "statm").read_text().split()[1]) * _PAGE_KIB,
        )
    return None
