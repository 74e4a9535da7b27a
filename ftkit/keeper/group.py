"""Gather what the ranks of one replica group say into what the group says.

Pure: no sockets, no clock. The group wants an epoch when all its ranks do; it says goodbye when all have,
or one that the others do not follow; it is dead when one of them is.
"""

from __future__ import annotations

from ftkit.core import events as ev
from ftkit.core.model import Epoch, Record
from ftkit.keeper import messages as msg


class Group:
    """What is known of the ranks; `events` that follow are returned, never posted."""

    def __init__(self, size: int, replica_id: str, incarnation: str) -> None:
        self.size = size
        self._replica_id = replica_id
        self._incarnation = incarnation
        self.hellos: dict[int, msg.Hello] = {}
        self.wants: dict[int, msg.WantEpoch] = {}
        self.goodbyes: dict[int, msg.GoodbyeKeeper] = {}
        self.deserted = False
        """A rank has gone without the others, who cannot commit a step any more."""
        self._handed_on: ev.Want | None = None
        self._offered = 0

    def joined(self, hello: msg.Hello) -> str | None:
        """Take a rank in; return why not, if it cannot be."""
        if not 0 <= hello.rank < self.size:
            return f"rank {hello.rank} is outside the group's {self.size} ranks (group_world_size)"
        if hello.rank in self.hellos:
            return f"rank {hello.rank} is connected already, from pid {self.hellos[hello.rank].pid}"
        self.hellos[hello.rank] = hello
        return None

    @property
    def complete(self) -> bool:
        """Say whether all ranks have said hello."""
        return len(self.hellos) == self.size

    def missing(self) -> list[int]:
        """Return the ranks that have not said hello."""
        return [r for r in range(self.size) if r not in self.hellos]

    def running(self) -> Epoch | None:
        """Return the newest epoch that a rank says it runs in."""
        epochs = [h.running for h in self.hellos.values() if h.running is not None]
        return max(epochs, key=lambda e: e.id, default=None)

    def record(self) -> Record:
        """Return the group's record."""
        first = self.hellos[0]
        return Record(
            replica_id=self._replica_id,
            incarnation=self._incarnation,
            host=first.host,
            pid=first.pid,
            rendezvous=first.rendezvous,
            transports=tuple(self.hellos[r].transport for r in range(self.size)),
            fingerprint=first.fingerprint,
            user_data=first.user_data,
        )

    def wants_epoch(self, rank: int, want: msg.WantEpoch) -> None:
        """Note a rank's wish, unless it crosses an offer that the rank is about to find."""
        running = self.running()
        newest = max(self._offered, 0 if running is None else running.id)
        if want.offered is None or want.offered >= newest:
            self.wants[rank] = want

    def take_want(self) -> ev.Want | None:
        """Return what the group wants, when all its ranks have asked and it is news."""
        if len(self.wants) < self.size or not self.complete:
            return None
        wants = [self.wants[r] for r in range(self.size)]
        merged = ev.Want(
            version=min(w.version for w in wants),
            failed=next((w.failed for w in wants if w.failed), ""),
            leaving=any(w.leaving for w in wants),
            together=all(w.together for w in wants),
            shrink_only=any(w.shrink_only for w in wants),
            unreached=tuple(sorted({name for w in wants for name in w.unreached})),
            offered=min((w.offered for w in wants if w.offered is not None), default=None),
        )
        if merged == self._handed_on:
            return None
        self._handed_on = merged
        return merged

    def offered(self, epoch: int) -> None:
        """An epoch was handed to all ranks: their wishes are fulfilled."""
        self._offered = epoch
        self.wants.clear()
        self._handed_on = None

    def goodbye(self) -> ev.Goodbye | None:
        """Return the group's goodbye, when all its ranks have said it, or it is deserted."""
        if not self.goodbyes or (len(self.goodbyes) < self.size and not self.deserted):
            return None
        said = [self.goodbyes[r] for r in sorted(self.goodbyes)]
        return ev.Goodbye(
            how=next((g.how for g in said if g.how != "left"), "left"),
            version=min(g.version for g in said),
            planned=all(g.planned for g in said) and not self.deserted,
        )

    def how_died(self, rank: int, how: str) -> str:
        """Word the death of a rank as the death of its group."""
        return how if self.size == 1 else f"rank {rank}: {how}"
