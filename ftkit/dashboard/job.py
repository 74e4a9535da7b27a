"""Read a job's keys into values, whatever state they are in.

`parse` is pure. A value that cannot be read is reported and otherwise left out: a dashboard that fails on
one broken key is of no use just when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import msgspec

from ftkit.core.model import Abort, Control, Departed, Epoch, JobConfig, Record, Ticket
from ftkit.keeper.keys import JobKeys

if TYPE_CHECKING:
    from ftkit.keeper.etcd import Etcd

T = TypeVar("T")


class KeyValue(Protocol):
    """A key of etcd with its value."""

    @property
    def key(self) -> str:
        """The whole key."""

    @property
    def value(self) -> bytes:
        """The value, JSON."""


@dataclass(slots=True)
class Job:
    """All that etcd knows of a job, except its history."""

    name: str
    config: JobConfig | None = None
    members: dict[str, Record] = field(default_factory=dict)
    tickets: dict[str, Ticket] = field(default_factory=dict)
    departed: dict[str, Departed] = field(default_factory=dict)
    control: dict[str, Control] = field(default_factory=dict)
    """By `what/replica_id`."""
    stats: dict[str, dict[str, object]] = field(default_factory=dict)
    epoch: Epoch | None = None
    abort: Abort | None = None
    broken: list[str] = field(default_factory=list)
    """Keys that could not be read, each with the reason."""

    @property
    def empty(self) -> bool:
        """Whether etcd knows nothing of this job."""
        return (
            self.config is None and self.epoch is None and not (self.members or self.tickets or self.departed)
        )


Place = Callable[[Job, str, object], None]

_SECTIONS: dict[str, tuple[type, Place]] = {
    "config": (JobConfig, lambda job, _, v: setattr(job, "config", v)),
    "epoch": (Epoch, lambda job, _, v: setattr(job, "epoch", v)),
    "abort": (Abort, lambda job, _, v: setattr(job, "abort", v)),
    "members": (Record, lambda job, name, v: job.members.__setitem__(name, cast("Record", v))),
    "tickets": (Ticket, lambda job, name, v: job.tickets.__setitem__(name, cast("Ticket", v))),
    "departed": (Departed, lambda job, name, v: job.departed.__setitem__(name, cast("Departed", v))),
    "control": (Control, lambda job, name, v: job.control.__setitem__(name, cast("Control", v))),
    "stats": (dict, lambda job, name, v: job.stats.__setitem__(name, cast("dict[str, object]", v))),
}


def decode(value: bytes, kind: type[T]) -> T | str:
    """Return the decoded value, or why it cannot be decoded."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return str(error)


def parse(name: str, keys: Iterable[KeyValue]) -> Job:
    """Sort a listing of the job's keys into values."""
    job, prefix = Job(name), JobKeys(name).prefix
    for key in keys:
        section, _, rest = key.key.removeprefix(prefix).partition("/")
        if section not in _SECTIONS:
            continue
        kind, place = _SECTIONS[section]
        value = decode(key.value, kind)
        if isinstance(value, str):
            job.broken.append(f"{section}{'/' if rest else ''}{rest}: {value}")
        else:
            place(job, rest, value)
    return job


def read(etcd: Etcd, name: str) -> Job:
    """Read the job's keys, but not the past epochs behind them, which may be many."""
    keys = JobKeys(name)
    found, _ = etcd.range(keys.prefix, keys.timeline)
    return parse(name, found)
