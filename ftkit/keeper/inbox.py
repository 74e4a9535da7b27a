"""What reaches the keeper's loop, beside the machine's own events."""

from __future__ import annotations

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


Item: TypeAlias = (
    ev.Event | FromRank | Sighting | Trouble | RefusedBy | Waits | LetIn | ConfigSeen | Fresh | ParentDied
)
