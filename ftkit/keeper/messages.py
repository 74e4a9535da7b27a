"""What the ranks of a replica group and their keeper say to each other.

Framed JSON, tagged by type. The connection is authenticated before the first message. Neither torch nor
etcd3 is needed to read this.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ftkit.core.model import Epoch, Record, Version


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Rank to keeper, first: who I am. When all ranks have said it the group becomes a member."""

    rank: int
    pid: int
    host: str
    transport: str
    """Address of this rank's transport."""
    rendezvous: str = ""
    """host:port of the rendezvous store (rank 0 only)."""
    fingerprint: str = ""
    layout: tuple[str, ...] = ()
    """`name shape dtype` per tensor of the model (rank 0 only), so that a difference can be named."""
    user_data: dict[str, str] = {}
    running: Epoch | None = None
    """The epoch that the ranks run in, when they connect to a new keeper after the old one died."""


class WantEpoch(msgspec.Struct, frozen=True, kw_only=True, tag="want"):
    """Rank to keeper: I stand at a step boundary and need the next epoch.

    The keeper hands one `Want` to the machine when all ranks of the group have asked: with the lowest of
    their versions, the first `failed` that is not empty, and `leaving` if any says so.
    """

    version: Version
    failed: str = ""
    leaving: bool = False
    together: bool = False
    shrink_only: bool = False
    unreached: tuple[str, ...] = ()
    """Members whose machines this rank cannot reach; it asks again when that changes."""
    offered: int | None = None
    """The newest epoch that this rank had been offered when it asked; None: it does not say.

    A wish that crosses an offer on its way is void: the rank will find the offer. A rank that has thrown an
    offer away counts it here, and gives a reason in `failed`.
    """


class GoodbyeKeeper(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    """Rank to keeper: I end in order; my closing connection is no death.

    Acted on when all ranks have said it, or a moment after one has that does not leave as planned.
    """

    version: Version
    how: str = "left"
    planned: bool = False


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """Keeper to rank: the group is a member of the job."""

    job_token: str
    """Secret shared by the job's members; authenticates the transports."""
    progress_file: str = ""
    """Path of the shared memory in which the rank notes its progress; empty when on another host."""
    etcd_version: str = ""


class EpochOffer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """Keeper to rank: configure the process groups for this epoch."""

    epoch: Epoch
    records: dict[str, Record]


class AbortEpoch(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Keeper to rank: this epoch is over, abort the work in flight."""

    epoch: int
    why: str
    left_out: bool = False
    """The others have gone on without this group: what it has in flight cannot be salvaged."""


class WishReconfigure(msgspec.Struct, frozen=True, kw_only=True, tag="reconfigure"):
    """Keeper to rank: say in the next vote that a new epoch is wanted."""

    epoch: int
    why: str


class SuspectMembers(msgspec.Struct, frozen=True, kw_only=True, tag="suspects"):
    """Keeper to rank: these members' keys vanished without proof of death (empty: all are back)."""

    epoch: int
    names: tuple[str, ...]


class StillWaiting(msgspec.Struct, frozen=True, kw_only=True, tag="waiting"):
    """Keeper to rank: why there is no epoch yet."""

    reason: str


class PleaseLeave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """Keeper to rank: an operator wants this group to `drain` or to be `evict`ed."""

    what: str


class Contact(msgspec.Struct, frozen=True, kw_only=True, tag="contact"):
    """Keeper to rank, several times a second: how long ago etcd was last heard (I3's fence)."""

    age_s: float


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Keeper to rank: the group cannot take part; `error` is the name of a class in `ftkit.errors`."""

    error: str
    message: str


class Gone(msgspec.Struct, frozen=True, kw_only=True, tag="gone"):
    """Keeper to rank: the goodbye has been written to etcd; the keeper ends."""


ToKeeper: TypeAlias = Hello | WantEpoch | GoodbyeKeeper
ToRank: TypeAlias = (
    Welcome
    | EpochOffer
    | AbortEpoch
    | WishReconfigure
    | SuspectMembers
    | StillWaiting
    | PleaseLeave
    | Contact
    | Refused
    | Gone
)
