"""Break a job that somebody else runs: find its processes on this machine, and strike by a plan.

The members' records in etcd say who they are: host and pid. What is on another host, or cannot be proven to
be the member, is left alone. Nothing is started again here; that is the job's launcher's affair.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ftkit.chaos.faults import Fault
from ftkit.chaos.kinds import TABLE
from ftkit.chaos.processes import keepers_of, variables_of
from ftkit.chaos.strikes import Victim
from ftkit.core.model import Epoch, Record
from ftkit.errors import ConfigError, EtcdError
from ftkit.keeper.etcd import Etcd
from ftkit.keeper.keys import JobKeys, Stats

LOOK_S = 0.1
STEADY_S = 1.0
"""An epoch that has all members and stood for so long is no recovery any more."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A live member as etcd tells of it, and what that means here."""

    replica_id: str
    incarnation: str
    host: str
    pid: int
    lease: int
    why_not: str = ""
    """Why its processes are left alone; empty when they are on this machine, and proven to be the member."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The job at one moment."""

    members: tuple[Member, ...]
    epoch: Epoch | None
    committed_in: dict[str, int] = {}
    """The epoch of the last commit of each incarnation, as its statistics tell, some seconds late."""

    @property
    def training(self) -> set[str]:
        """The live members that are in the epoch."""
        if self.epoch is None:
            return set()
        return {m.replica_id for m in self.members if self.epoch.names(m.replica_id, m.incarnation)}

    @property
    def holding(self) -> set[str]:
        """The members of the epoch that hold the state for sure: they had it, or have committed since."""
        if self.epoch is None:
            return set()
        newest = max(seat.version for seat in self.epoch.seats)
        return {
            seat.replica_id
            for seat in self.epoch.seats
            if seat.replica_id in self.training
            and (seat.version == newest or self.committed_in.get(seat.incarnation) == self.epoch.id)
        }

    @property
    def settled(self) -> bool:
        """Whether the epoch consists of exactly the live members."""
        seats = () if self.epoch is None else self.epoch.seats
        return bool(seats) and len(seats) == len(self.members) == len(self.training)


def look(etcd: Etcd, job: str) -> View:
    """Read who is in the job.

    Raises:
        EtcdError: etcd does not answer.
    """
    keys = JobKeys(job)
    members = []
    for found in etcd.list(keys.members)[0]:
        with contextlib.suppress(msgspec.DecodeError):
            record = msgspec.json.decode(found.value, type=Record)
            members.append(
                Member(
                    replica_id=record.replica_id,
                    incarnation=record.incarnation,
                    host=record.host,
                    pid=record.pid,
                    lease=found.lease,
                    why_not=why_not(record, job),
                )
            )
    stored, epoch = etcd.get(keys.epoch), None
    if stored is not None:
        with contextlib.suppress(msgspec.DecodeError):
            epoch = msgspec.json.decode(stored.value, type=Epoch)
    committed_in = {}
    for found in etcd.list(keys.stats)[0]:
        with contextlib.suppress(msgspec.DecodeError):
            stats = msgspec.json.decode(found.value, type=Stats)
            committed_in[stats.incarnation] = stats.epoch
    return View(members=tuple(members), epoch=epoch, committed_in=committed_in)


def why_not(record: Record, job: str) -> str:
    """Say why a member's processes must be left alone; empty when they are here, and proven to be its own."""
    here = socket.gethostname()
    if record.host != here:
        return f"it is on {record.host}, not on {here}"
    if not Path(f"/proc/{record.pid}").is_dir():
        return f"there is no process {record.pid} here (is it in another container?)"
    variables = variables_of(record.pid)
    for name, value in (("FTKIT_REPLICA_ID", record.replica_id), ("FTKIT_JOB", job)):
        if variables.get(name, value) != value:
            return f"process {record.pid} has {name}={variables[name]}"
    if variables.get("FTKIT_REPLICA_ID") is None and not keepers_of(record.pid):
        return f"process {record.pid} has neither FTKIT_REPLICA_ID nor a keeper"
    return ""


class Live:
    """A running job and what is being done to it.

    Args:
        etcd: a connection to its etcd.
        job: its name.
        keep: never strike when fewer members than this, that hold the state, would go on training.
        journal: append a line per fault to this file, for `ftkit verify`.
    """

    def __init__(self, etcd: Etcd, job: str, *, keep: int = 1, journal: Path | None = None) -> None:
        self._etcd, self._job, self._keep = etcd, job, keep
        self._journal = journal
        self._undo: list[tuple[float, str, Callable[[], object]]] = []
        self._settled: tuple[int, float] = (0, 0.0)

    def look(self) -> View:
        """Read who is in the job, and take back what is due."""
        now = time.monotonic()
        for due in [u for u in self._undo if u[0] <= now]:
            self._undo.remove(due)
            due[2]()
        view = look(self._etcd, self._job)
        epoch = view.epoch.id if view.epoch is not None and view.settled else 0
        if epoch != self._settled[0]:
            self._settled = (epoch, now)
        return view

    def steady(self) -> bool:
        """Say whether all live members have been in one epoch for a moment, and nothing lasts any more."""
        epoch, since = self._settled
        return epoch > 0 and time.monotonic() - since >= STEADY_S and not self._undo

    def candidates(self, view: View) -> list[Member]:
        """Return the members that may be struck, in the order of their names."""
        return sorted((m for m in view.members if not m.why_not), key=lambda m: m.replica_id)

    def may_strike(self, fault: Fault, view: View) -> bool:
        """Say whether the fault may strike now: enough members that hold the state must go on."""
        if fault.calm and not self.steady():
            return False
        victims = self.candidates(view)
        if not victims or (fault.victim < 0 and self._undo):
            return False
        victim = victims[fault.victim % len(victims)].replica_id
        if any(name == victim for _, name, _ in self._undo):
            return False
        out = {name for _, name, _ in self._undo}
        left = view.holding - {victim} - out
        return not TABLE[fault.kind].takes_out or len(left) >= max(1, self._keep)

    def strike(self, fault: Fault, view: View) -> str:
        """Carry a fault out and return what was done, in words.

        Raises:
            ConfigError: the kind is none that can be done to a job from outside.
        """
        kind = fault.kind
        if not TABLE[kind].from_outside:
            raise ConfigError(f"{kind} can only be done to a job that scripts/chaos.py has started")
        candidates = self.candidates(view)
        chosen = candidates if fault.victim < 0 else [candidates[fault.victim % len(candidates)]]
        if kind in ("revoke-lease", "revoke-all"):
            for member in chosen:
                self._note(kind, member.pid, member.replica_id)
                self._etcd.revoke(member.lease)
            return f"{kind} of {', '.join(m.replica_id for m in chosen)}"
        member = chosen[0]
        undo = self._victim(member).strike(kind, fault.chance)
        if undo is not None:
            self._undo.append((time.monotonic() + fault.lasting, member.replica_id, undo))
        lasting = f" for {fault.lasting:.1f} s" if fault.lasting else ""
        return f"{kind} {member.replica_id} (pid {member.pid}){lasting}"

    def _victim(self, member: Member) -> Victim:
        record = Record(
            replica_id=member.replica_id, incarnation=member.incarnation, host=member.host, pid=member.pid
        )

        def note(number: signal.Signals, pid: int) -> None:
            self._note(number.name, pid, member.replica_id)

        return Victim(member.replica_id, member.pid, note, lambda: not why_not(record, self._job))

    def _note(self, kind: str, pid: int, replica: str) -> None:
        if self._journal is None:
            return
        line = {"type": "fault", "monotonic": time.monotonic(), "kind": kind}
        text = json.dumps({**line, "pid": pid, "replica": replica}).encode()
        file = os.open(self._journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, text + b"\n")
        finally:
            os.close(file)

    def lasting(self) -> bool:
        """Say whether something is still to be taken back."""
        return bool(self._undo)

    def undo_all(self) -> None:
        """Take back all that still lasts: nobody may stay frozen."""
        undo, self._undo = self._undo, []
        for _, _, fn in undo:
            fn()


def run(
    live: Live, faults: Sequence[Fault], *, seconds: float, say: Callable[[str], None]
) -> tuple[list[str], int]:
    """Carry a plan out on a running job; return what was done, and how many faults there was no time for.

    What lasts is taken back at the end, also after an error or Ctrl-C.
    """
    done: list[str] = []
    todo = list(faults)
    begun = time.monotonic()
    try:
        while todo and (passed := time.monotonic() - begun) < seconds:
            try:
                view = live.look()
                if passed >= todo[0].at and live.may_strike(todo[0], view):
                    done.append(live.strike(todo.pop(0), view))
                    say(f"{passed:6.1f} s  {done[-1]}")
            except EtcdError as error:
                say(f"{passed:6.1f} s  {error}")
            time.sleep(LOOK_S)
        while live.lasting() and time.monotonic() - begun < seconds:
            with contextlib.suppress(EtcdError):
                live.look()
            time.sleep(LOOK_S)
    finally:
        live.undo_all()
    return done, len(todo)
