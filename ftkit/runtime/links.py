"""The process groups of one epoch: gradients, votes, and the votes inside a replica group.

They are configured together, aborted together, and live exactly as long as the epoch.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping

import torch
from torch.distributed import ReduceOp, Work

from ftkit.config import Settings
from ftkit.core.model import Record
from ftkit.core.plan import Plan
from ftkit.errors import Aborted
from ftkit.groups.base import ProcessGroup
from ftkit.groups.gloo import ProcessGroupGloo

_SOURCE = re.compile(r"\[/[^\]]*\.(cc|cpp|h):\d+\] ")
WILDCARDS = ("", "0.0.0.0", "::")


class Links:
    """All process groups of a rank."""

    def __init__(self, settings: Settings, data: ProcessGroup) -> None:
        """Hold `data` for the gradients, and gloo groups of its own for the votes."""
        self._settings = settings
        self.data = data
        host = "" if settings.bind in WILDCARDS else settings.bind
        self.control = ProcessGroupGloo(timeout_s=settings.collective_timeout, hostname=host)
        self.inner: ProcessGroup | None = None
        if settings.group_world_size > 1:
            self.inner = ProcessGroupGloo(timeout_s=settings.collective_timeout, hostname=host)
        self._lock = threading.Lock()
        self._aborted: str | None = "not configured yet"
        self._vote: tuple[Work, float] | None = None

    def _groups(self) -> list[ProcessGroup]:
        groups = [self.control, self.data]
        return groups if self.inner is None else [*groups, self.inner]

    def begin(self) -> None:
        """Allow the next `configure`; an `abort` from here on also stops one that is on its way."""
        with self._lock:
            self._aborted = None

    def configure(self, plan: Plan, records: Mapping[str, Record], replica_id: str) -> None:
        """Meet the members of an epoch.

        Raises:
            Aborted: `abort` was called meanwhile.
            GroupError: the rendezvous failed or took longer than `rendezvous_timeout`.
        """
        settings = self._settings
        rank, timeout = settings.group_rank, settings.rendezvous_timeout
        store = records[plan.store].rendezvous
        for name, group in (("control", self.control), ("data", self.data)):
            self._check()
            prefix = f"{settings.job}/{plan.epoch}/{rank}/{name}"
            group.configure(store, prefix, plan.replica_rank, plan.num_replicas, timeout_s=timeout)
        if self.inner is not None:
            self._check()
            store = records[replica_id].rendezvous
            prefix = f"{settings.job}/{plan.epoch}/inner"
            self.inner.configure(store, prefix, rank, settings.group_world_size, timeout_s=timeout)
        self._check()

    def _check(self) -> None:
        if self._aborted is not None:
            raise Aborted(self._aborted)

    def abort(self, why: str) -> None:
        """End all work in flight; returns when nothing can write into a tensor any more. Any thread."""
        with self._lock:
            self._aborted = self._aborted or why
        for group in self._groups():
            group.abort(why)

    def voting_since(self) -> float | None:
        """Say since when a vote waits for its peers (monotonic clock), or None; for the watchdog."""
        vote = self._vote
        return None if vote is None or vote[0].is_completed() else vote[1]

    def close(self) -> None:
        """Give everything back."""
        for group in self._groups():
            group.close()

    def agree(self, ballot: torch.Tensor, *, inside: bool = False, timeout_s: float | None = None) -> None:
        """Reduce a small integer tensor with MAX over the members (or the group's ranks), in place.

        Raises:
            GroupError: it failed, or took longer than `timeout_s` (default: the collective timeout).
        """
        group = self.inner if inside else self.control
        assert group is not None, "one rank agrees with itself"
        if group.configured and group.size == 1:
            return
        work = group.allreduce(ballot, ReduceOp.MAX, timeout_s=timeout_s)
        self._vote = (work, time.monotonic())
        try:
            work.wait()
        finally:
            self._vote = None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without what torch adds: source lines, advice, C++ stacks."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    text = _SOURCE.sub("", lines[0]).partition(" This is typically caused by")[0]
    return text.strip()[:300] or type(error).__name__
