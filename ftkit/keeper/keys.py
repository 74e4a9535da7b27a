"""Where a job's values lie in etcd, and how they are written there.

Pure. The one place that knows key names; whoever reads the job from outside (`ftkit status`, the dashboard)
uses it too.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from ftkit.core.events import Section
from ftkit.core.model import Abort, Control, Departed, Epoch, JobConfig, Record, Ticket

log = logging.getLogger(__name__)

TIMELINE_KEPT = 1000
TIMELINE_BYTES = 64 * 1024 * 1024
"""Room for the timeline in etcd, whose database has 2 GB by default; large epochs are kept less long."""
_FEWEST_KEPT = 10

_DECODERS: dict[Section, msgspec.json.Decoder[Any]] = {
    "members": msgspec.json.Decoder(Record),
    "tickets": msgspec.json.Decoder(Ticket),
    "epoch": msgspec.json.Decoder(Epoch),
    "abort": msgspec.json.Decoder(Abort),
    "departed": msgspec.json.Decoder(Departed),
    "control": msgspec.json.Decoder(Control),
}
_CONFIG = msgspec.json.Decoder(JobConfig)
_ENCODER = msgspec.json.Encoder()


class Stats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`stats/<replica_id>`: how a replica group is doing."""

    replica_id: str
    incarnation: str = ""
    time: float = 0.0
    """Wall clock, seconds since 1970."""
    epoch: int = 0
    """Of the last committed step, with `step` the version."""
    step: int = 0
    phase: str = ""
    steps_per_s: float = 0.0
    """Over the time since the last publication."""
    compute_s: float = 0.0
    """Per committed step since the last publication, as `wait_s`."""
    wait_s: float = 0.0
    bytes_healed: int = 0
    committed: int = 0
    failed: int = 0
    etcd_age_s: float = 0.0


class JobKeys:
    """The keys of one job."""

    def __init__(self, job: str) -> None:
        self.prefix = f"/ftkit/{job}/"
        self.config = self.prefix + "config"
        self.epoch = self.prefix + "epoch"
        self.abort = self.prefix + "abort"
        self.members = self.prefix + "members/"
        self.tickets = self.prefix + "tickets/"
        self.departed = self.prefix + "departed/"
        self.control = self.prefix + "control/"
        self.timeline = self.prefix + "timeline/"
        self.stats = self.prefix + "stats/"

    def member_of(self, replica_id: str) -> str:
        """Return the key of a member's record."""
        return self.members + replica_id

    def ticket_of(self, replica_id: str) -> str:
        """Return the key of a member's ticket."""
        return self.tickets + replica_id

    def departed_of(self, replica_id: str) -> str:
        """Return the key of the proof of a member's death."""
        return self.departed + replica_id

    def control_of(self, what: str, replica_id: str) -> str:
        """Return the key of an operator's request."""
        return f"{self.control}{what}/{replica_id}"

    def stats_of(self, replica_id: str) -> str:
        """Return the key of a member's figures."""
        return self.stats + replica_id

    def timeline_of(self, epoch: int) -> str:
        """Return the key of the copy of an epoch; sorted as text they are sorted as numbers."""
        return f"{self.timeline}{epoch:010d}"

    def locate(self, key: str) -> tuple[Section, str] | None:
        """Return the section and the name within it of a key, or None for one that is not watched."""
        rest = key.removeprefix(self.prefix)
        if rest in ("epoch", "abort"):
            return rest, ""  # type: ignore[return-value]
        section, _, name = rest.partition("/")
        if section in ("members", "tickets", "departed", "control") and name:
            return section, name  # type: ignore[return-value]
        return None


def timeline_kept(epoch_bytes: int) -> int:
    """Return how many epochs of this size the timeline keeps."""
    return max(_FEWEST_KEPT, min(TIMELINE_KEPT, TIMELINE_BYTES // max(1, epoch_bytes)))


def encode(value: object) -> bytes:
    """Write a value as it is stored."""
    return _ENCODER.encode(value)


def decode(section: Section, key: str, value: bytes) -> Any:
    """Read a stored value; None, with a warning, when somebody has written nonsense there."""
    try:
        return _DECODERS[section].decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("the value of %s cannot be read and is ignored: %s", key, error)
        return None


def decode_config(key: str, value: bytes) -> JobConfig | None:
    """Read the job's config; None, with a warning, when it cannot be read."""
    try:
        return _CONFIG.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("the value of %s cannot be read and is ignored: %s", key, error)
        return None


STATS: msgspec.json.Decoder[Stats] = msgspec.json.Decoder(Stats)
