"""A keeper of the imagination: feeds what it hears to the real machine and carries out what it answers.

It is what the real keeper must be: one inbox, guarded writes, and a contact with etcd that counts only
while the lease holds the keys.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

from simulation.fake_etcd import FOR_ALL, FOR_PROPOSERS, Lease, Stream
from simulation.world import Pipe

from ftkit.core import events as ev
from ftkit.core.model import Abort

if TYPE_CHECKING:
    from simulation.replica import Replica
    from simulation.trainer import Trainer

BUSY = 0.2
"""How often the loop is busy when a change comes: those that follow are then absorbed together with it."""

SILENCE_S = 1.0
"""Without word from etcd for this long, what was seen is old news."""


class Keeper:
    """One keeper process; a restarted one is another object."""

    def __init__(self, replica: Replica, trainer: Trainer) -> None:
        """Start the process; it connects to etcd and waits for the ranks."""
        self.replica, self.trainer = replica, trainer
        self.world, self.etcd = replica.world, replica.etcd
        self.name = replica.name
        self.alive = True
        self.machine = replica.job.member_class(replica.name, trainer.incarnation, replica.job.policy)
        self.lease: Lease | None = None
        self._guard = 0
        self._inbox: deque[ev.Event] = deque()
        self._wake: float | None = None
        self._contact = -1e9
        self._lost_at: float | None = None
        self.to_ranks = Pipe(self.world)
        self._silent = False
        self._streams = [Stream(self.etcd, self, part, self.hear) for part in FOR_ALL]
        self._more: list[Stream] = []

    # -- etcd's side ------------------------------------------------------------------------------

    def linked(self) -> bool:
        """Whether etcd and this process can talk."""
        replica = self.replica
        return self.alive and not replica.machine_frozen and not replica.cut and self.etcd.up

    def contact(self) -> float:
        """Return when the lease that holds the keys was last known to be alive."""
        if self.linked() and self.lease is not None and f"members/{self.name}" in self.lease.keys:
            self._contact = self.world.now
        return self._contact

    def link_changed(self) -> None:
        """Note when etcd fell silent; when it speaks again, say so."""
        if not self.linked():
            if self._lost_at is None:
                self._lost_at = self.world.now
                if self.lease is not None and f"members/{self.name}" in self.lease.keys:
                    self._contact = self.world.now
            return
        if self._lost_at is not None:
            self._notice_silence()
            self._lost_at = None
            if self._silent:
                self._silent = False
                self._inbox.append(ev.Silence(False))
                self.work()

    def _notice_silence(self) -> None:
        lost = self._lost_at
        if lost is not None and not self._silent and self.world.now - lost > SILENCE_S:
            self._silent = True
            self._inbox.appendleft(ev.Silence(True))

    def lease_lost(self) -> None:
        """A keep-alive was answered with `no such lease`."""
        if self.lease is not None and not self.lease.alive:
            self.lease = None
            self.hear(ev.LeaseLost())

    def streams(self) -> list[Stream]:
        """The open watches."""
        return self._streams + self._more

    def stop(self) -> None:
        """End the process, in order or not."""
        self.contact()
        self.alive = False
        for stream in self.streams():
            stream.close()
        self.etcd.link_changed(self)

    # -- the loop ---------------------------------------------------------------------------------

    def hear(self, event: ev.Event) -> None:
        """Put an event into the inbox and work on it if the process runs, sometimes a moment later."""
        self._inbox.append(event)
        if isinstance(event, ev.Changed) and self.world.chance(BUSY):
            self.world.after(self.world.between(0.0, 0.01), self.work)
        else:
            self.work()

    def hear_rank(self, event: ev.Event) -> None:
        """Receive a message from the ranks, unless this process is dead."""
        if self.alive:
            self.hear(event)

    def work(self) -> None:
        """Feed the inbox to the machine."""
        while self.alive and self._inbox and not self.replica.machine_frozen:
            self._notice_silence()
            changes = list(itertools.takewhile(lambda event: isinstance(event, ev.Changed), self._inbox))
            if len(changes) > 1:
                for _ in changes:
                    self._inbox.popleft()
                self._have_done(self.machine.handle_all(changes, self.world.now))  # type: ignore[arg-type]
            else:
                self._have_done(self.machine.handle(self._inbox.popleft(), self.world.now))

    def thaw(self) -> None:
        """The machine goes on: an overdue timer fires first, on stale knowledge."""
        if not self.alive:
            return
        self._inbox.appendleft(ev.Tick())
        self._notice_silence()
        self.work()
        self.etcd.link_changed(self)
        if self.lease is not None and not self.lease.alive:
            self.etcd.tell_lost(self.lease)

    def _have_done(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            if self.alive:
                self._carry_out(effect)
        wake = self.machine.wake_at()
        if wake is not None and wake != self._wake:
            self._wake = wake
            self.world.after(max(wake - self.world.now, 0.001), self._ring, wake)

    def _ring(self, wake: float) -> None:
        if wake == self._wake:
            self._wake = None
            if not self.replica.machine_frozen:
                self.hear(ev.Tick())

    def _carry_out(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Hold):
            self._request(lambda g: self._hold(effect, g), self._held)
        elif isinstance(effect, ev.Withdraw):
            self._request(self._withdraw, self._withdrawn)
        elif isinstance(effect, ev.Depart):
            self._request(lambda g: self._depart(effect), self._gone)
        elif isinstance(effect, ev.PutAbort):
            self._request(lambda g: self._put_abort(effect.abort), lambda result: None)
        elif isinstance(effect, ev.PutEpoch):
            self._request(lambda g: self._put_epoch(effect), self._proposed)
        elif isinstance(effect, ev.AckControl):
            key = f"control/{effect.what}/{self.name}"
            self._request(lambda g: self.etcd.delete(key), lambda result: None)
        elif isinstance(effect, ev.WatchTickets):
            for stream in self._more:
                stream.close()
            parts = FOR_PROPOSERS if effect.on else ()
            self._more = [Stream(self.etcd, self, part, self.hear) for part in parts]
        else:
            self.to_ranks.send(self.trainer.hear, effect, self)

    # -- requests: what runs inside etcd, and what is done with the answer ------------------------

    def _request(self, operation, done) -> None:  # type: ignore[no-untyped-def]
        guard, lease = self._guard, self.lease
        if lease is not None and not lease.alive and self.linked():
            self.etcd.tell_lost(lease)
        self.etcd.request(self, lambda: operation((guard, lease)), done)

    def _own_revision(self) -> int:
        """The newest revision of the two keys: the guard against a late copy of an older write."""
        etcd = self.etcd
        return max(etcd.revision_of(f"members/{self.name}"), etcd.revision_of(f"tickets/{self.name}"))

    def _hold(self, effect: ev.Hold, mark: tuple[int, Lease | None]) -> object:
        etcd, record = self.etcd, effect.record
        guard, lease = mark
        holder = etcd.get(f"members/{self.name}")
        if holder is not None and holder.incarnation != record.incarnation:
            return "name in use"
        if self._own_revision() > guard:
            return self._own_revision()
        if lease is None:
            if not self.linked():
                return None
            lease = etcd.grant(self)
            self.lease = self.lease or lease  # its grant was answered before the keys were written under it
        if not lease.alive:
            return None
        if holder != record or etcd.kv[f"members/{self.name}"].lease is not lease:
            etcd.put(f"members/{self.name}", record, lease)
        if effect.ticket is not None:
            etcd.put(f"tickets/{self.name}", effect.ticket, lease)
        else:
            etcd.delete(f"tickets/{self.name}")
        return (lease, effect.ticket, self._own_revision())

    def _held(self, result: object) -> None:
        if result == "name in use":
            self.world.say(self.name, "keeper: the name is in use, this process ends")
            self.replica.end(self.trainer)
        elif isinstance(result, int):
            self._guard = max(self._guard, result)
        elif isinstance(result, tuple):
            lease, ticket, self._guard = result
            if lease.alive:
                self.lease = lease
                self.hear(ev.Held(ticket))

    def _withdraw(self, mark: tuple[int, Lease | None]) -> object:
        guard, lease = mark
        if self._own_revision() > guard or lease is None:
            return self._own_revision()
        for key in (f"members/{self.name}", f"tickets/{self.name}"):
            if key in lease.keys:
                self.etcd.delete(key)
        return "withdrawn"

    def _withdrawn(self, result: object) -> None:
        if isinstance(result, int):
            self._guard = max(self._guard, result)
        else:
            self.hear(ev.Vanished(False))

    def _depart(self, effect: ev.Depart) -> object:
        etcd, departed = self.etcd, effect.departed
        for key in (f"members/{self.name}", f"tickets/{self.name}"):
            held = etcd.get(key)
            if held is not None and held.incarnation == departed.incarnation:
                etcd.delete(key)
        etcd.put(f"departed/{self.name}", departed)
        if effect.abort is not None:
            self._put_abort(effect.abort)
        if self.lease is not None:
            etcd.revoke(self.lease)
        return "gone"

    def _gone(self, result: object) -> None:
        self.hear(ev.Vanished(True))
        self.stop()
        self.replica.left(self.trainer)

    def _put_abort(self, abort: Abort) -> None:
        stands = self.etcd.get("abort")
        if stands is None or stands.epoch < abort.epoch:  # type: ignore[attr-defined]
            self.etcd.put("abort", abort)

    def _put_epoch(self, effect: ev.PutEpoch) -> object:
        if self.etcd.revision_of("epoch") != effect.revision:
            return "changed"
        if any(self.etcd.get(f"members/{r}") is not None for r in effect.absent):
            return "changed"
        self.etcd.put("epoch", effect.epoch)
        return "put"

    def _proposed(self, result: object) -> None:
        if result == "changed":
            self.hear(ev.ProposalFailed())
