"""Remember what the watches have shown, since when, and what has been asked for.

Pure: the machine's memory, without its decisions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from ftkit.core import events as ev
from ftkit.core.model import Abort, Control, Departed, Epoch, Record, Seat, Ticket
from ftkit.core.quorum import View

RETRY_S = 0.5
"""An effect that no event has confirmed is repeated after this time, and again after twice as much each."""

MOST_RETRY_S = 2.0


@dataclass
class Seen:
    """The job's keys as the watches have shown them, and since when."""

    members: dict[str, Record] = field(default_factory=dict)
    tickets: dict[str, Ticket] = field(default_factory=dict)
    departed: dict[str, Departed] = field(default_factory=dict)
    control: dict[str, Control] = field(default_factory=dict)
    epoch: Epoch | None = None
    epoch_revision: int = 0
    abort: Abort | None = None
    listed: set[str] = field(default_factory=set)
    tickets_seen: dict[str, float] = field(default_factory=dict)
    gone_since: dict[str, float] = field(default_factory=dict)
    _revisions: dict[str, int] = field(default_factory=dict)
    """Of each member key, when it was last written."""
    _last: dict[str, str] = field(default_factory=dict)
    """Of each member that was ever seen, the last incarnation; of a live one, its own."""
    _past: set[tuple[str, str]] = field(default_factory=set)
    """Incarnations that another one has followed."""
    _seats: dict[str, Seat] = field(default_factory=dict)
    """Of the current epoch, by replica id."""
    _behind: set[str] = field(default_factory=set)

    def absorb(self, event: ev.Listed | ev.Changed, now: float) -> None:
        """Take a listing or a change over; a change of one member costs the same in a job of any size."""
        if isinstance(event, ev.Listed):
            self._absorb_listing(event)
            self._look_at_all(now)
        elif event.section == "epoch":
            self._set_epoch(cast("Epoch | None", event.value), event.revision)
            self._look_at_all(now)
        elif event.section == "abort":
            self.abort = cast("Abort | None", event.value)
        else:
            self._absorb_change(event)
            self._look_at(event.name, now)

    def _absorb_change(self, event: ev.Changed) -> None:
        if event.value is None:
            self._table(event.section).pop(event.name, None)
            return
        self._table(event.section)[event.name] = event.value
        if event.section == "members":
            self._note(event.name, cast("Record", event.value), event.revision)

    def _absorb_listing(self, event: ev.Listed) -> None:
        self.listed.add(event.section)
        if event.section == "epoch":
            self._set_epoch(cast("Epoch | None", event.items.get("")), event.revisions.get("", 0))
        elif event.section == "abort":
            self.abort = cast("Abort | None", event.items.get(""))
        else:
            table = self._table(event.section)
            table.clear()
            table.update(event.items)
        if event.section == "members":
            self.gone_since.clear()  # who is gone now may have been here meanwhile
            for name, record in self.members.items():
                self._note(name, record, event.revisions.get(name, 0))

    def _set_epoch(self, epoch: Epoch | None, revision: int) -> None:
        if self.epoch is None or epoch is None or epoch.id != self.epoch.id:
            self.gone_since.clear()  # it counts from the epoch's own beginning, at the earliest
        self.epoch = epoch
        self.epoch_revision = 0 if epoch is None else revision
        self._seats = {} if epoch is None else {s.replica_id: s for s in epoch.seats}

    def _note(self, name: str, record: Record, revision: int) -> None:
        self._revisions[name] = revision
        last = self._last.get(name, record.incarnation)
        if last != record.incarnation:
            self._past.add((name, last))
        self._past.discard((name, record.incarnation))
        self._last[name] = record.incarnation

    def _table(self, section: str) -> dict[str, object]:
        return cast("dict[str, object]", getattr(self, section))

    def _look_at_all(self, now: float) -> None:
        last = self._last
        missing = sorted(self._seats.keys() - self.members.keys())
        replaced = [name for name, seat in self._seats.items() if last.get(name) != seat.incarnation]
        noted = (self.tickets, self.gone_since, self.tickets_seen, self._behind)
        for name in dict.fromkeys(itertools.chain(missing, replaced, *noted)):
            self._look_at(name, now)

    def _look_at(self, name: str, now: float) -> None:
        """Note since when a ticket stands and a seat of the epoch is empty."""
        ticket, seat, record = self.tickets.get(name), self._seats.get(name), self.members.get(name)
        epoch = 0 if self.epoch is None else self.epoch.id
        stands = (
            ticket is not None
            and record is not None
            and ticket.incarnation == record.incarnation
            and ticket.epoch > epoch
        )
        _date(self.tickets_seen, name, stands, now)
        empty = seat is not None and (record is None or record.incarnation != seat.incarnation)
        _date(self.gone_since, name, empty, now)
        (self._behind.add if empty and self._is_behind(name) else self._behind.discard)(name)

    def _is_behind(self, name: str) -> bool:
        """Say whether the member key shows another incarnation than the epoch, which may be older.

        The watches lag independently: the epoch may name an incarnation of which we have yet to hear.
        """
        return (
            name in self.members
            and (name, self._seats[name].incarnation) not in self._past
            and self._revisions.get(name, 0) <= self.epoch_revision
        )

    def presume(self, tickets: Iterable[Ticket], now: float) -> None:
        """Take tickets for written that are about to be, if tickets are looked at here at all."""
        if "tickets" in self.listed:
            for ticket in tickets:
                self.tickets[ticket.replica_id] = ticket
                self._look_at(ticket.replica_id, now)

    def forget_tickets(self) -> None:
        """The tickets are no longer watched."""
        self.listed.discard("tickets")
        self.tickets.clear()
        self.tickets_seen.clear()

    def restart_clocks(self, now: float) -> None:
        """What was seen may have been otherwise in between: all waiting begins anew."""
        self.tickets_seen.clear()
        self.gone_since.clear()
        self._look_at_all(now)

    def seat(self, replica_id: str) -> Seat | None:
        """Return a member's seat in the current epoch."""
        return self._seats.get(replica_id)

    def is_current(self, epoch: Epoch) -> bool:
        """Say whether the epoch, or one with the same members, is the current one."""
        return epoch is self.epoch or (self.epoch is not None and epoch.seats == self.epoch.seats)

    def named(self, epoch: Epoch) -> list[Seat]:
        """Return the seats of an epoch that tickets or proofs of death name, in order; mostly few."""
        names = self.tickets.keys() | self.departed.keys()
        if not self.is_current(epoch):
            return [seat for seat in epoch.seats if seat.replica_id in names]
        return [self._seats[name] for name in sorted(names & self._seats.keys())]

    def records(self, epoch: Epoch) -> dict[str, Record]:
        """Return the records of an epoch's members, all of whom are live."""
        members = self.members
        if len(members) == len(epoch.seats):
            return dict(members)
        return {seat.replica_id: members[seat.replica_id] for seat in epoch.seats}

    def in_doubt(self, epoch: Epoch) -> list[Seat]:
        """Return the seats of an epoch that may be empty, or whose members may be proven dead; in order.

        For the current epoch they are few; of another, all are.
        """
        if not self.is_current(epoch):
            return list(epoch.seats)
        proven = self.departed.keys() & self._seats.keys()
        return [self._seats[name] for name in sorted({*self.gone_since, *proven})]

    def view(self) -> View:
        """Snapshot for the pure functions; shares the tables, does not copy them."""
        return View(
            members=self.members,
            tickets=self.tickets,
            departed=self.departed,
            epoch=self.epoch,
            tickets_seen=self.tickets_seen,
            gone_since=self.gone_since,
            behind=self._behind,
        )


def _date(times: dict[str, float], name: str, holds: bool, now: float) -> None:
    """Note since when something holds, or that it does not."""
    if holds:
        times.setdefault(name, now)
    else:
        times.pop(name, None)


class Repeater:
    """Emit an effect when it is new, and again for as long as it is still wanted.

    After RETRY_S first, then less and less often: what is late because etcd has too much to do must not
    give it more.
    """

    def __init__(self) -> None:
        """Start with nothing emitted."""
        self._last: dict[str, tuple[object, float, float]] = {}
        """Of each slot what was emitted, when, and after which time it may be again."""

    def due(self, slot: str, effect: object, now: float, *, once: bool = False) -> bool:
        """Say whether `effect` is to be emitted now; with `once`, only if it is new."""
        rest = RETRY_S
        last = self._last.get(slot)
        if last is not None and last[0] == effect:
            if once or now < last[1] + last[2]:
                return False
            rest = min(2 * last[2], MOST_RETRY_S)
        self._last[slot] = (effect, now, rest)
        return True

    def clear(self, slot: str) -> None:
        """Forget what was emitted, so that the next one goes out at once."""
        self._last.pop(slot, None)
