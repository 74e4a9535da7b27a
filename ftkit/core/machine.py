"""A replica group's state machine: absorbs what its keeper hears, returns what should be made true.

Pure: no I/O, no threads, time is an argument. The same machine runs in the keeper and in the simulation.

A group is in one of four conditions:

    absent    not all ranks are connected, or the group was frozen: holds no keys
    running   in an epoch; its ranks train, nothing is written
    wanting   its ranks stand at a boundary: it holds a ticket until an epoch names it
    gone      the proof of death is written, or on its way
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ftkit.core import events as ev
from ftkit.core.judge import end_of, objection, outsiders, those_who_left
from ftkit.core.model import Abort, Departed, Epoch, Policy, Record, Ticket
from ftkit.core.quorum import Propose, View, Wait, decide, is_live, proposers, still_waits
from ftkit.core.seen import RETRY_S, Repeater, Seen

RECORD_GRACE_S = 1.0
"""How long a new epoch's members may be unknown here (their keys' watch lags) before it is declined."""

PROPOSE_STAGGER_S = 0.1
"""The second and third proposer wait this much longer each: the first usually does the work."""

TOGETHER_S = 0.1
"""How long those who go on together do without tickets: the epoch is there sooner, if all is well."""

ANSWER_S = 0.25
"""How long the reason for waiting may name members who have stopped meanwhile."""


class Member:
    """The machine of one replica group; see the module's docstring."""

    def __init__(self, replica_id: str, incarnation: str, policy: Policy) -> None:
        """Begin absent."""
        self.replica_id = replica_id
        self.incarnation = incarnation
        self.policy = policy
        self.seen = Seen()
        self.record: Record | None = None
        self.running: Epoch | None = None
        self.want: ev.Want | None = None
        self.ticket: Ticket | None = None
        self.last_epoch: Epoch | None = None
        self.departed: Departed | None = None
        self.gone = False
        self.frozen = False
        self.silent = False
        self._heard = 0
        self._held: tuple[bool, Ticket | None] = (False, None)
        self._occasion = 0
        self._abort: Abort | None = None
        self._ready_since: float | None = None
        self._answer: tuple[Epoch | None, Wait, float] | None = None
        """Of which epoch the last decision was to wait, and when."""
        self._out_since: float | None = None
        self._over = 0
        self._invited: set[str] = set()
        self._fruitless = 0
        self._patient_until = 0.0
        self._together_until = 0.0
        self._suspects: tuple[int, tuple[str, ...]] = (0, ())
        self._planned = False
        self._wake: float | None = None
        self._repeat = Repeater()

    # -- events ------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Absorb one event and return what should now be made true outside."""
        self._absorb(event, now)
        return self._react(now)

    def handle_all(self, events: Sequence[ev.Changed], now: float) -> list[ev.Effect]:
        """Absorb changes that have come together, and react to what they lead to, as after a listing.

        A reaction looks at all members, a change only at one: so many changes are cheap in a large job.
        """
        for event in events:
            self._absorb(event, now)
        return self._react(now)

    def _absorb(self, event: ev.Event, now: float) -> None:
        if isinstance(event, ev.Listed | ev.Changed):
            self.seen.absorb(event, now)
            self._notice_own_keys(event)
        elif isinstance(event, ev.Ready):
            self.record = event.record
            if event.running is not None:
                self.running = self.last_epoch = event.running
                self._heard = max(self._heard, event.running.id)
        elif isinstance(event, ev.Want):
            self._on_want(event, now)
        elif isinstance(event, ev.Died | ev.Goodbye):
            self._on_end(event)
        elif isinstance(event, ev.Frozen):
            self._on_frozen(event.on)
        elif isinstance(event, ev.LeaseLost):
            self._held = (False, None)
            self._hold_anew()
        elif isinstance(event, ev.Held):
            self._held = (True, event.ticket)
        elif isinstance(event, ev.Vanished):
            self._held = (False, None)
            self.gone = self.gone or event.departed
        elif isinstance(event, ev.ProposalFailed):
            self._repeat.clear("propose")
        elif isinstance(event, ev.Silence):
            self.silent = event.on
            self.seen.restart_clocks(now)

    def wake_at(self) -> float | None:
        """Return the time at which a `Tick` is needed even if nothing else happens."""
        return self._wake

    def _notice_own_keys(self, event: ev.Listed | ev.Changed) -> None:
        """A vanished member key (lease expired, etcd wiped) is put again, with the ticket."""
        if event.section != "members" or not self._held[0]:
            return
        own = self.seen.members.get(self.replica_id)
        deleted = isinstance(event, ev.Listed) or (event.name == self.replica_id and event.value is None)
        if deleted and (own is None or own.incarnation != self.incarnation):
            self._held = (False, None)
            self._hold_anew()

    def _on_want(self, want: ev.Want, now: float) -> None:
        left = self.running
        if left is not None and want.offered is not None and want.offered < left.id:
            return
        if left is not None and want.failed:
            self._leave_in_error(left.id, want.failed)
        self.running = None
        self.want = want
        self._renew_ticket()
        if left is not None and want.together:
            self._go_on_together(left, now)

    def _go_on_together(self, left: Epoch, now: float) -> None:
        """Wait for nobody's ticket: all members of the epoch that was left ask for the next, at one version.

        What is presumed of them is no risk: who holds another version declines the epoch.
        """
        assert self.want is not None, "they ask together"
        assert self.ticket is not None, "who asks has a ticket"
        epoch, seat = self.seen.epoch, self.seen.seat(self.replica_id)
        if epoch is not None and epoch.id > left.id:
            if seat is not None and (seat.incarnation, seat.version) == (self.incarnation, self.want.version):
                self.ticket = msgspec.structs.replace(self.ticket, epoch=epoch.id)  # one was faster
            return
        if not outsiders(self.seen, left, self.policy):
            return  # whoever it is for has yet to be seen here
        self._together_until = now + TOGETHER_S
        self.seen.presume(
            [
                Ticket(
                    replica_id=s.replica_id,
                    incarnation=s.incarnation,
                    epoch=self.ticket.epoch,
                    version=self.want.version,
                )
                for s in left.seats
            ],
            now,
        )

    def _renew_ticket(self) -> None:
        """Ask for an epoch above all that this member has heard of, and so tell the others of those."""
        assert self.want is not None, "a ticket needs a wish"
        seen = 0 if self.seen.epoch is None else self.seen.epoch.id
        self._heard = max(self._heard, seen, self.want.version.epoch)
        self.ticket = Ticket(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            epoch=self._heard + 1,
            version=self.want.version,
            leaving=self.want.leaving,
            shrink_only=self.want.shrink_only,
            unreached=self.want.unreached,
        )

    def _leave_in_error(self, epoch: int, why: str) -> None:
        if self._abort is None or self._abort.epoch < epoch:
            self._abort = Abort(epoch=epoch, by=self.replica_id, why=why)

    def _on_end(self, event: ev.Died | ev.Goodbye) -> None:
        if self.departed is None:
            self._planned = isinstance(event, ev.Goodbye) and event.planned
            host = "" if self.record is None else self.record.host
            self.departed = Departed(
                replica_id=self.replica_id,
                incarnation=self.incarnation,
                how=event.how,
                host=host,
                version=event.version,
                planned=self._planned,
            )

    def _on_frozen(self, on: bool) -> None:
        self.frozen = on
        if on and self.running is not None:
            self._leave_in_error(self.running.id, f"{self.replica_id} is frozen")
        self._hold_anew()

    # -- reactions ---------------------------------------------------------------------------------

    def _react(self, now: float) -> list[ev.Effect]:
        """Compare what is with what should be; each part adds its effects."""
        self._wake = None
        out: list[ev.Effect] = []
        if self.gone:
            return out
        if self.departed is not None:
            return self._depart(now, self.departed)
        if {"epoch", "members"} <= self.seen.listed:
            self._follow_epoch(now, out)
            if self.running is not None:
                self._watch_over(self.running, now, out)
            if not self._restore_epoch(now, out):
                self._propose(now, out)
        self._keep_keys(now, out)  # last, for the others may have renewed the ticket
        self._keep_abort(now, out)
        self._obey(now, out)
        return out

    def _sleep_until(self, when: float) -> None:
        self._wake = when if self._wake is None else min(self._wake, when)

    def _emit(self, out: list[ev.Effect], slot: str, effect: ev.Effect, now: float) -> None:
        """Emit an effect now if it is due, and come back to repeat it."""
        if self._repeat.due(slot, effect, now):
            out.append(effect)
        self._sleep_until(now + RETRY_S)

    def _tell(self, out: list[ev.Effect], slot: str, effect: ev.Effect, now: float) -> None:
        """Tell the ranks once; their connection loses nothing."""
        if self._repeat.due(slot, effect, now, once=True):
            out.append(effect)

    def _depart(self, now: float, departed: Departed) -> list[ev.Effect]:
        """Write the proof of death; unless the others know already, end the epoch in the same transaction."""
        out: list[ev.Effect] = []
        over = None if self._planned else self.running
        current = self.seen.epoch
        abort = None
        if over is not None and (current is None or current.id <= over.id):
            abort = Abort(epoch=over.id, by=self.replica_id, why=f"{self.replica_id}: {departed.how}")
        self._emit(out, "depart", ev.Depart(departed, abort), now)
        return out

    def _keep_keys(self, now: float, out: list[ev.Effect]) -> None:
        if self.record is None:
            return
        if self.frozen:
            if self._held[0]:
                self._emit(out, "hold", ev.Withdraw(), now)
            return
        if self._held[0] and now < self._together_until and self.want is not None and self.want.together:
            self._sleep_until(self._together_until)  # nobody waits for the ticket
            return
        # In an epoch the old ticket may stand, if it does: nothing is written. A key that is put again
        # stands without it, since in a wiped etcd (I8) it would look like one for the next epoch.
        if not self._held[0] or (self.ticket is not None and self._held[1] != self.ticket):
            self._emit(out, "hold", ev.Hold(self.record, self.ticket, self._occasion), now)

    def _follow_epoch(self, now: float, out: list[ev.Effect]) -> None:
        """Adopt an epoch that answers the ticket; decline one that cannot work for this member."""
        epoch = self.seen.epoch
        if epoch is None or self.want is None or self.ticket is None or epoch.id < self.ticket.epoch:
            return
        seat = self.seen.seat(self.replica_id)
        if seat is None or seat.incarnation != self.incarnation:
            self._ask_again()
            return
        why = objection(self.seen, self.replica_id, self.want, epoch, frozen=self.frozen)
        if why is not None:
            self._leave_in_error(epoch.id, f"{self.replica_id} declined: {why}")
            self._ask_again()
            return
        view = self.seen.view()
        unknown = [s.replica_id for s in self.seen.in_doubt(epoch) if not is_live(view, s)]
        if unknown:
            until = min(self.seen.gone_since.get(r, now) for r in unknown) + RECORD_GRACE_S
            if now < until:
                self._sleep_until(until)
            else:
                self._leave_in_error(epoch.id, f"{unknown[0]} is gone")
                self._ask_again()
            return
        self.running = self.last_epoch = epoch
        self.want = self.ticket = None
        self._heard = max(self._heard, epoch.id)
        self._out_since = None
        self._count_fruitless(epoch, now)
        out.append(ev.Offer(epoch=epoch, records=self.seen.records(epoch)))

    def _count_fruitless(self, epoch: Epoch, now: float) -> None:
        """Wish for a new epoch less and less often, if those for whom it was wished are not admitted.

        The proposer may not have heard of them yet, or its settings may differ from ours.
        """
        admitted = not self._invited or any(epoch.seat(r) is not None for r in self._invited)
        self._fruitless = 0 if admitted else self._fruitless + 1
        delay = self.policy.gather_window * 2.0 ** min(self._fruitless, 30) if self._fruitless else 0.0
        self._patient_until = now + min(delay, self.policy.join_timeout)
        self._invited.clear()

    def _hold_anew(self) -> None:
        """What was written, or is about to be, does not count any more."""
        self._occasion += 1
        self._repeat.clear("hold")

    def _ask_again(self) -> None:
        self._renew_ticket()
        self._hold_anew()

    def _restore_epoch(self, now: float, out: list[ev.Effect]) -> bool:
        """I8: when etcd has lost the epoch (it was wiped), put it back."""
        last, seen = self.last_epoch, self.seen.epoch
        if last is None or (seen is not None and seen.id > last.id):
            return False
        if seen is not None and seen.id == last.id:
            if seen.seats == last.seats:
                return False
            # Newcomers were faster, and their epoch happens to have our number: go on above it.
            last = msgspec.structs.replace(last, id=last.id + 1, restored=True)
        self._emit(out, "restore", ev.PutEpoch(last, self.seen.epoch_revision), now)
        return True

    def _watch_over(self, running: Epoch, now: float, out: list[ev.Effect]) -> None:
        """Find out whether the running epoch is over, should be replaced, or has a member in doubt."""
        if self._over >= running.id:
            return
        why = self._end_of(running, now)
        if why is not None:
            self._over = running.id
            newest = self.seen.epoch
            left_out = (
                newest is not None
                and newest.id > running.id
                and not newest.names(self.replica_id, self.incarnation)
            )
            out.append(ev.AbortWork(running.id, why, left_out=left_out))
            return
        if not self.seen.is_current(running):
            return  # I8: it is being put back
        view = self.seen.view()
        doubtful = [s for s in self.seen.in_doubt(running) if s.replica_id != self.replica_id]
        missing = tuple(s.replica_id for s in doubtful if not is_live(view, s))
        if missing != (self._suspects[1] if self._suspects[0] == running.id else ()):
            self._suspects = (running.id, missing)
            out.append(ev.Suspects(running.id, missing))
        joining = outsiders(self.seen, running, self.policy)
        if joining:
            ripe = max(min(joining.values()) + self.policy.gather_window, self._patient_until)
            if now >= ripe:
                self._invited |= joining.keys()
                why = f"joining: {', '.join(sorted(joining)[:4])}"
                self._tell(out, "reconfigure", ev.Reconfigure(running.id, why), now)
            else:
                self._sleep_until(ripe)

    def _end_of(self, running: Epoch, now: float) -> str | None:
        """Say why the running epoch is over, or None."""
        why = f"{self.replica_id} is frozen" if self.frozen else end_of(self.seen, self.replica_id, running)
        if why is not None:
            return why
        left = those_who_left(self.seen, self.replica_id, running)
        if not left:
            self._out_since = None
            return None
        # All members switch at one boundary, so this one is about to; it is given a moment to get there.
        self._out_since = now if self._out_since is None else self._out_since
        until = self._out_since + self.policy.leave_grace
        if now >= until:
            return f"{left[0]} has left the epoch"
        self._sleep_until(until)
        return None

    def _propose(self, now: float, out: list[ev.Effect]) -> None:
        view = self.seen.view()
        order = proposers(view)
        mine = self.replica_id in order and self.record is not None and not self.frozen
        self._tell(out, "watch_tickets", ev.WatchTickets(mine), now)
        if not mine or "tickets" not in self.seen.listed:
            if not mine:
                self.seen.forget_tickets()
                if self.want is not None:
                    reason = f"waiting for an epoch; {order[0] if order else 'nobody'} may propose it"
                    self._tell(out, "waiting", ev.Waiting(reason), now)
            return
        if self.silent:
            return  # I3: on old knowledge nobody is given up
        decision = self._decide(view, now)
        if isinstance(decision, Wait):
            self._ready_since = None
            if self.want is not None:
                self._tell(out, "waiting", ev.Waiting(decision.reason), now)
            if decision.until is not None:
                self._sleep_until(decision.until)
            return
        self._ready_since = now if self._ready_since is None else self._ready_since
        turn = self._ready_since + PROPOSE_STAGGER_S * order.index(self.replica_id)
        if now < turn:
            self._sleep_until(turn)
            return
        epoch = self._epoch(decision)
        self._emit(out, "propose", ev.PutEpoch(epoch, self.seen.epoch_revision, decision.absent), now)

    def _decide(self, view: View, now: float) -> Propose | Wait:
        """Decide; look at all members only if what has changed may change the answer."""
        if self._answer is not None:
            epoch, answer, given = self._answer
            if epoch is view.epoch and now < given + ANSWER_S and still_waits(view, answer, now):
                self._sleep_until(given + ANSWER_S)
                return answer
        decision = decide(view, self.policy, now)
        self._answer = (view.epoch, decision, now) if isinstance(decision, Wait) else None
        return decision

    def _epoch(self, decision: Propose) -> Epoch:
        return Epoch(id=decision.id, seats=decision.seats, proposer=self.replica_id, reason=decision.reason)

    def _keep_abort(self, now: float, out: list[ev.Effect]) -> None:
        """Free those that are still at work in the epoch that this member had to leave."""
        if self._abort is None:
            return
        seen = self.seen
        newer = seen.epoch is not None and seen.epoch.id > self._abort.epoch
        if newer or (seen.abort is not None and seen.abort.epoch >= self._abort.epoch):
            self._abort = None
            return
        self._emit(out, "abort", ev.PutAbort(self._abort), now)

    def _obey(self, now: float, out: list[ev.Effect]) -> None:
        for what in ("drain", "evict"):
            if f"{what}/{self.replica_id}" in self.seen.control:
                self._tell(out, f"leave {what}", ev.Leave(what), now)
                self._emit(out, f"ack {what}", ev.AckControl(what), now)
