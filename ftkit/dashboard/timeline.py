"""Turn listings and changes of a job's keys into moments: what happened, in the words of the job.

Pure. After a gap in the watch the new listing is compared with what was known, so that nothing that still
shows is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ftkit.core.model import Abort, Control, Departed, Epoch, Record, Ticket
from ftkit.dashboard.job import decode
from ftkit.dashboard.text import count
from ftkit.keeper.keys import JobKeys


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened."""

    event: str
    """`epoch`, `joined`, `vanished`, `departed`, `abort`, `ticket`, `request` or `acknowledged`."""
    text: str
    replica_id: str = ""
    epoch: int = 0
    time: float | None = None
    """When it happened, where its key says so; None: just now, or unknown when `earlier`."""
    earlier: bool = False
    """It happened before the watch began."""


class Timeline:
    """What is known of a job's keys, and the moments that each change of them means."""

    def __init__(self, job: str, *, tickets: bool = False) -> None:
        self._prefix = JobKeys(job).prefix
        self._tickets = tickets
        self._known: dict[str, bytes] = {}
        self._records: dict[str, Record] = {}
        self._last: Epoch | None = None
        self._listed = False

    def listed(self, keys: Mapping[str, bytes], *, num_history: int = 10) -> list[Moment]:
        """Take a listing; the first one yields the last epochs and who is there now."""
        first, self._listed = not self._listed, True
        moments: list[Moment] = []
        history = sorted(k for k in keys if k.startswith(f"{self._prefix}timeline/"))
        if first:
            skipped = history[: max(0, len(history) - num_history)]
            self._known.update((key, keys[key]) for key in skipped)
        for key in sorted(set(self._known) - set(keys), key=self._order):
            moments += self.changed(key, None)
        for key in sorted(keys, key=self._order):
            if self._known.get(key) != keys[key]:
                moments += self.changed(key, keys[key])
        if first:  # who is live is so now, all else has happened before
            moments = [
                m if m.event == "joined" else msgspec.structs.replace(m, earlier=True) for m in moments
            ]
        return moments

    def changed(self, key: str, value: bytes | None) -> list[Moment]:
        """Take one change; a value of None means that the key is gone."""
        if value is None:
            self._known.pop(key, None)
        else:
            self._known[key] = value
        section, _, name = key.removeprefix(self._prefix).partition("/")
        if section in ("timeline", "epoch"):
            return [] if value is None else self._epoch(value)
        if section == "members":
            return self._member(name, value)
        if section == "departed":
            return [] if value is None else _departed(value)
        if section == "abort":
            return [] if value is None else _abort(value)
        if section == "control":
            return _control(name, value)
        if section == "tickets" and self._tickets:
            return [] if value is None else _ticket(value)
        return []

    def _order(self, key: str) -> tuple[int, str]:
        """Order the keys of one listing as a story: history, those who are there, the rest."""
        order = ("timeline", "epoch", "departed", "members", "tickets", "control", "abort")
        section = key.removeprefix(self._prefix).partition("/")[0]
        return (order.index(section) if section in order else len(order)), key

    def _epoch(self, value: bytes) -> list[Moment]:
        epoch = decode(value, Epoch)
        if (
            isinstance(epoch, str) or epoch == self._last
        ):  # `epoch` and its copy under `timeline` are one event
            return []
        self._last = epoch
        names = _some([s.replica_id for s in epoch.seats])
        highest = max((s.version for s in epoch.seats), default=None)
        behind = [s.replica_id for s in epoch.seats if s.version != highest]
        text = f"epoch {epoch.id}: {count(len(epoch.seats), 'replica group')} ({names})"
        text += f", {epoch.reason}" if epoch.reason else ""
        if highest is not None:
            text += f", version {highest}"
        if behind:
            text += f", {_some(behind)} must heal"
        return [Moment(event="epoch", text=text, epoch=epoch.id, time=epoch.time or None)]

    def _member(self, name: str, value: bytes | None) -> list[Moment]:
        before = self._records.pop(name, None)
        record = None if value is None else decode(value, Record)
        if isinstance(record, str):
            return [
                Moment(
                    event="joined", replica_id=name, text=f"{name}: a record that cannot be read: {record}"
                )
            ]
        if record is None:
            return [Moment(event="vanished", replica_id=name, text=f"{name} is no longer live")]
        self._records[name] = record
        if before is not None and before.incarnation == record.incarnation:
            return []
        again = " again" if before is not None else ""
        return [
            Moment(
                event="joined", replica_id=name, text=f"{name} is live{again} on {record.host}:{record.pid}"
            )
        ]


def _departed(value: bytes) -> list[Moment]:
    departed = decode(value, Departed)
    if isinstance(departed, str):
        return []
    where = f" on {departed.host}" if departed.host else ""
    text = f"{departed.replica_id} ended{where}: {departed.how or 'unknown'}, version {departed.version}"
    return [Moment(event="departed", replica_id=departed.replica_id, text=text)]


def _abort(value: bytes) -> list[Moment]:
    abort = decode(value, Abort)
    if isinstance(abort, str):
        return []
    text = f"epoch {abort.epoch} aborted by {abort.by or 'unknown'}: {abort.why or 'no reason given'}"
    return [Moment(event="abort", replica_id=abort.by, epoch=abort.epoch, text=text)]


def _control(name: str, value: bytes | None) -> list[Moment]:
    what, _, replica_id = name.partition("/")
    if value is None:
        return [
            Moment(event="acknowledged", replica_id=replica_id, text=f"{what} of {replica_id} acknowledged")
        ]
    control = decode(value, Control)
    by = "" if isinstance(control, str) or not control.by else f" by {control.by}"
    return [Moment(event="request", replica_id=replica_id, text=f"{what} of {replica_id} asked for{by}")]


def _ticket(value: bytes) -> list[Moment]:
    ticket = decode(value, Ticket)
    if isinstance(ticket, str):
        return []
    what = "wants to leave" if ticket.leaving else f"asks for epoch {ticket.epoch}"
    text = f"{ticket.replica_id} {what}, version {ticket.version}"
    return [Moment(event="ticket", replica_id=ticket.replica_id, epoch=ticket.epoch, text=text)]


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")
