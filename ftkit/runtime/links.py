"""What connects the members of one epoch: the gradients' process group, the votes, the votes inside a group.

They are configured together, aborted together, and live exactly as long as the epoch. Only what the ranks of
one group decide among themselves outlives it: they begin and end each step together, whatever becomes of it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping

import torch
from torch.distributed import Work

from ftkit.config import Settings
from ftkit.core.model import Record
from ftkit.core.plan import Plan
from ftkit.errors import Aborted
from ftkit.groups.ballots import BallotBox
from ftkit.groups.base import ProcessGroup
from ftkit.runtime.side_by_side import Background
from transport.crew import Crew

_SOURCE = re.compile(r"\[/[^\]]*\.(cc|cpp|h):\d+\] ")
WILDCARDS = ("", "0.0.0.0", "::")


class Links:
    """All that connects a rank with its peers in one epoch."""

    def __init__(self, settings: Settings, data: ProcessGroup) -> None:
        """Hold `data` for the gradients, and ballot boxes for the votes."""
        self._settings = settings
        host = "" if settings.bind in WILDCARDS else settings.bind
        self.data = data
        self.votes = BallotBox(timeout_s=settings.collective_timeout, hostname=host)
        self.inner: BallotBox | None = None
        if settings.group_world_size > 1:
            self.inner = BallotBox(timeout_s=settings.collective_timeout, hostname=host)
        self.siblings: BallotBox | None = None
        """The other ranks of this group, from `meet_siblings` to the end."""
        self.crew = Crew()
        """Threads for what is done beside the training thread."""
        self._forming = Background(self.crew)
        self._form: Callable[[], None] = self._check
        self._lock = threading.Lock()
        self._aborted: str | None = "not configured yet"

    def _parts(self) -> list[ProcessGroup | BallotBox]:
        parts: list[ProcessGroup | BallotBox] = [self.votes, self.data]
        return parts if self.inner is None else [*parts, self.inner]

    def meet_siblings(self, store: str) -> None:
        """Meet the other ranks of this group at their store (host:port), once and for all.

        Raises:
            GroupError: they did not come within `timeout`.
        """
        settings = self._settings
        if self.inner is None or self.siblings is not None:
            return
        host = "" if settings.bind in WILDCARDS else settings.bind
        self.siblings = BallotBox(timeout_s=settings.quorum_timeout, hostname=host)
        place = (settings.group_rank, settings.group_world_size)
        self.siblings.configure(store, f"{settings.job}/siblings", *place, timeout_s=settings.timeout)

    def begin(self) -> None:
        """Allow the next `configure`; an `abort` from here on also stops one that is on its way."""
        with self._lock:
            self._aborted = None

    def configure(self, plan: Plan, records: Mapping[str, Record], replica_id: str) -> None:
        """Meet the members of an epoch for their votes; `form` then forms the gradients' group.

        Raises:
            Aborted: `abort` was called meanwhile.
            GroupError: the rendezvous failed or took longer than `rendezvous_timeout`.
        """
        settings = self._settings
        rank, timeout = settings.group_rank, settings.rendezvous_timeout
        store = records[plan.store].rendezvous
        prefix = f"{settings.job}/{plan.epoch}/{rank}"
        place = (plan.replica_rank, plan.num_replicas)
        self._check()
        self._forming.finish()
        self._form = lambda: self.data.configure(store, f"{prefix}/data", *place, timeout_s=timeout)
        self.votes.configure(store, f"{prefix}/votes", *place, timeout_s=timeout)
        if self.inner is not None:
            self._check()
            own = records[replica_id].rendezvous
            inside = f"{settings.job}/{plan.epoch}/inside"
            self.inner.configure(own, inside, rank, settings.group_world_size, timeout_s=timeout)
        self._check()

    def form(self) -> None:
        """Begin to form the gradients' group in the background: the first gradient will wait for it."""
        self._forming.start(self._form)

    def reduce(self, tensor: torch.Tensor) -> Work:
        """Start to sum a tensor over the members, in place; waits for the group if that is still forming.

        Raises:
            GroupError: the group could not be formed, or was aborted.
        """
        error = self._forming.finish()
        if error is not None:
            raise error
        return self.data.allreduce(tensor)

    def _check(self) -> None:
        if self._aborted is not None:
            raise Aborted(self._aborted)

    def abort(self, why: str) -> None:
        """End all work in flight; returns when nothing can write into a tensor any more. Any thread."""
        with self._lock:
            self._aborted = self._aborted or why
        for part in self._parts():
            part.abort(why)

    def voting_since(self) -> float | None:
        """Say since when a vote waits for its peers (monotonic clock), or None; for the watchdog."""
        boxes = [self.votes] if self.inner is None else [self.votes, self.inner]
        return next((since for box in boxes if (since := box.waiting_since()) is not None), None)

    def close(self) -> None:
        """Give everything back."""
        for part in self._parts():
            part.close()
        if self.siblings is not None:
            self.siblings.close()
        self._forming.finish()
        self.crew.close()

    def agree(self, values: list[int], *, inside: bool = False, timeout_s: float | None = None) -> list[int]:
        """Return the greatest of all members' values (or of the group's ranks'), place by place.

        Raises:
            GroupError: it failed, or took longer than `timeout_s` (default: the collective timeout).
        """
        box = self.inner if inside else self.votes
        assert box is not None, "one rank agrees with itself"
        return box.highest(values, timeout_s=timeout_s)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without what torch adds: source lines, advice, C++ stacks."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    text = _SOURCE.sub("", lines[0]).partition(" This is typically caused by")[0]
    return text.strip()[:300] or type(error).__name__
