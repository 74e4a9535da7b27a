"""What reaches the keeper's loop, beside the machine's own events, and in which portions."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from ftkit.core import events as ev
from ftkit.keeper.admission import Admitted
from ftkit.keeper.etcd import KV
from ftkit.keeper.processes import Sighting
from ftkit.keeper.ranks import FromRank


class Trouble(NamedTuple):
    """etcd could not be used, for now."""

    error: Exception


class RefusedBy(NamedTuple):
    """The group cannot take part (any more)."""

    error: Exception


class Waits(NamedTuple):
    """What the group is being held up by."""

    reason: str


class LetIn(NamedTuple):
    """The group's settings and model are those of the job."""

    admitted: Admitted
    etcd_version: str


class ConfigSeen(NamedTuple):
    """The job's config, as a watch has shown it."""

    kv: KV | None


class Fresh(NamedTuple):
    """All that was so in etcd when this was asked for has been posted."""

    number: int


class ParentDied(NamedTuple):
    """The process that started this keeper has ended."""


class Changes(NamedTuple):
    """Changes that came in a row, at least one."""

    changes: Sequence[ev.Changed]


Item: TypeAlias = (
    ev.Event
    | Changes
    | FromRank
    | Sighting
    | Trouble
    | RefusedBy
    | Waits
    | LetIn
    | ConfigSeen
    | Fresh
    | ParentDied
)


class Inbox:
    """Filled from any thread, emptied by one. All changes that wait in a row come out as one item."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._next: Item | None = None

    def put(self, item: Item) -> None:
        """Put something in; never waits."""
        self._items.put(item)

    def get(self, timeout_s: float) -> Item | None:
        """Return what comes next, or None when nothing does in time."""
        item, self._next = self._next, None
        if item is None:
            try:
                item = self._items.get(timeout=timeout_s)
            except queue.Empty:
                return None
        return self._with_those_behind(item) if isinstance(item, ev.Changed) else item

    def _with_those_behind(self, first: ev.Changed) -> Changes:
        changes = [first]
        while True:
            try:
                item = self._items.get_nowait()
            except queue.Empty:
                return Changes(changes)
            if not isinstance(item, ev.Changed):
                self._next = item
                return Changes(changes)
            changes.append(item)
