"""What a member's machine hears (events) and what it wants done (effects).

Pure data. An effect states what should be true outside; the machine repeats it until an event shows
that it is, so a lost write costs a tick and not a deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from ftkit.core.model import Abort, Departed, Epoch, Record, Ticket, Version

Section = Literal["members", "tickets", "epoch", "abort", "departed", "control"]
"""A part of the prefix. `epoch` and `abort` are single keys: their one name is the empty string."""

Value: TypeAlias = object
"""A decoded value: Record, Ticket, Epoch, Abort, Departed, or Control, as the section says."""


class Listed(msgspec.Struct, frozen=True):
    """A section was read whole; what it does not hold is gone. `revision` is that of each key."""

    section: Section
    items: Mapping[str, Value]
    revisions: Mapping[str, int] = {}


class Changed(msgspec.Struct, frozen=True):
    """A watch showed one key put (value) or deleted (None)."""

    section: Section
    name: str
    value: Value | None
    revision: int = 0


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of the group are connected.

    `running` is set when a new keeper takes over from a dead one: the last epoch that the ranks were
    offered, even if they have left it (a `Want` or a `Goodbye` then follows at once).
    """

    record: Record
    running: Epoch | None = None


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks stand at a step boundary, have aborted their groups and ask for the next epoch."""

    version: Version
    failed: str = ""
    """Why the epoch that they left is over; empty when all its members left it at the same boundary."""
    leaving: bool = False
    together: bool = False
    """All members of the epoch that was left have said farewell: each holds this version, and asks too."""
    shrink_only: bool = False
    unreached: tuple[str, ...] = ()
    """Members whose machines a rank could not reach when the last epoch came to nothing."""
    offered: int | None = None
    """The newest epoch that the ranks had been offered when they asked; None when they do not say.

    A wish that crosses an offer on its way to the keeper is void: the ranks will find the offer. Ranks that
    have thrown an offer away count it here, and give a reason in `failed`.
    """


class Died(msgspec.Struct, frozen=True):
    """The group is dead: a rank's connection closed without a goodbye, or it was declared hung."""

    how: str
    version: Version = Version(0, 0)


class Goodbye(msgspec.Struct, frozen=True):
    """The ranks have left in order and are about to end.

    `planned`: all members know, since the last vote said so; the epoch's end needs no announcement.
    """

    how: str = "left"
    version: Version = Version(0, 0)
    planned: bool = False


class Frozen(msgspec.Struct, frozen=True):
    """A rank's process has been stopped (SIGSTOP, debugger) for `freeze_grace`, or goes on again."""

    on: bool


class LeaseLost(msgspec.Struct, frozen=True):
    """The lease is gone, and the keys with it; a new one will be granted."""


class Held(msgspec.Struct, frozen=True):
    """The member key, and this ticket if any, were written under the current lease."""

    ticket: Ticket | None


class Vanished(msgspec.Struct, frozen=True):
    """The `Depart` transaction went through, or the `Withdraw` one did."""

    departed: bool


class ProposalFailed(msgspec.Struct, frozen=True):
    """The epoch key had changed since; the watch will show how."""


class Silence(msgspec.Struct, frozen=True):
    """etcd has not been heard for a while, or is heard again: what was seen before may be old news.

    Sent before any other event once the last word from etcd (a keep-alive that was answered) is older than
    a lease's life, also after the process itself stood still. Nobody is given up on such knowledge (I3).
    """

    on: bool


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event: TypeAlias = (
    Listed
    | Changed
    | Ready
    | Want
    | Died
    | Goodbye
    | Frozen
    | LeaseLost
    | Held
    | Vanished
    | ProposalFailed
    | Silence
    | Tick
)


class Hold(msgspec.Struct, frozen=True):
    """To etcd: the member key and the ticket (if any) shall exist under my lease. Answer: `Held`.

    A late copy of an older `Hold` must not undo a newer one: guard it with the revisions of both keys.
    """

    record: Record
    ticket: Ticket | None
    occasion: int = 0
    """Of two that are equal, the second only asks whether the first is done."""


class Withdraw(msgspec.Struct, frozen=True):
    """To etcd: delete the member key and the ticket, keep the lease. Answer: `Vanished(False)`."""


class Depart(msgspec.Struct, frozen=True):
    """To etcd: in one transaction delete the member key and ticket, put the proof, and put `abort` if given.

    Then revoke the lease and answer `Vanished(True)`.
    """

    departed: Departed
    abort: Abort | None


class PutAbort(msgspec.Struct, frozen=True):
    """To etcd: put `abort` unless one for this or a later epoch stands there."""

    abort: Abort


class PutEpoch(msgspec.Struct, frozen=True):
    """To etcd: if `epoch` has the mod revision `revision` (0: absent), put it, and a copy in the timeline.

    `absent`: and if none of these member keys exists (those whom the epoch replaces without proof of death).
    Answer `ProposalFailed` when it was not so. The put itself is shown by the watch.
    """

    epoch: Epoch
    revision: int
    absent: tuple[str, ...] = ()


class WatchTickets(msgspec.Struct, frozen=True):
    """To etcd: watch `tickets/` and `departed/` (proposers only), or stop watching them."""

    on: bool


class AckControl(msgspec.Struct, frozen=True):
    """To etcd: delete the operator's request, it is under way."""

    what: str


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """To the ranks: configure the process groups for this epoch; the records of its live members."""

    epoch: Epoch
    records: Mapping[str, Record]


class AbortWork(msgspec.Struct, frozen=True):
    """To the ranks: this epoch is over, abort the work in flight."""

    epoch: int
    why: str
    left_out: bool = False
    """The others have gone on without this group: what it has in flight cannot be salvaged."""


class Reconfigure(msgspec.Struct, frozen=True):
    """To the ranks: wish for a new epoch in the next vote."""

    epoch: int
    why: str


class Suspects(msgspec.Struct, frozen=True):
    """To the ranks: these members' keys vanished without proof of death (empty: all are back)."""

    epoch: int
    names: tuple[str, ...]


class Waiting(msgspec.Struct, frozen=True):
    """To the ranks: why there is no next epoch yet."""

    reason: str


class Leave(msgspec.Struct, frozen=True):
    """To the ranks: an operator asks this group to leave, at the next boundary (`drain`) or now (`evict`)."""

    what: str


Effect: TypeAlias = (
    Hold
    | Withdraw
    | Depart
    | PutAbort
    | PutEpoch
    | WatchTickets
    | AckControl
    | Offer
    | AbortWork
    | Reconfigure
    | Suspects
    | Waiting
    | Leave
)
