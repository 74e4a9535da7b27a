"""Carry out, in etcd, what the machine wants to be true there.

One thread does the writing, so that a slow etcd holds up neither the loop nor the lease. Of each kind only
the newest wish is kept: the machine repeats what has not come true. Every write is a transaction that
holds only in the state it was meant for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ftkit.core import events as ev
from ftkit.core.model import Abort, JobConfig, Record
from ftkit.errors import EtcdError, EtcdNoSpace, EtcdUnavailable, JobMismatch, NameInUse
from ftkit.keeper.admission import Admitted, restore_config, wait_for_name
from ftkit.keeper.etcd import KV, Compare, Delete, DeletePrefix, Etcd, Get, LeaseLost, Op, Put
from ftkit.keeper.keys import JobKeys, decode, encode, timeline_kept
from ftkit.keeper.lease import LeaseKeeper

log = logging.getLogger(__name__)

PROOF_TTL_S = 3600
_TRIES = 10
_MOST_COMPARES = 100
_LARGE = 700_000
"""Bytes of an epoch beyond which its copy does not fit into the same request of at most 1.5 MB."""

EtcdEffect = ev.Hold | ev.Withdraw | ev.Depart | ev.PutAbort | ev.PutEpoch | ev.AckControl


class RestoreConfig(NamedTuple):
    """Put the job's config back if it is gone."""

    config: JobConfig


_SLOTS: dict[type, str] = {
    ev.Hold: "keys",
    ev.Withdraw: "keys",
    ev.Depart: "keys",
    ev.PutAbort: "abort",
    ev.PutEpoch: "epoch",
    RestoreConfig: "config",
}


class _Own(NamedTuple):
    """Our member key as it stands in etcd."""

    lease: int
    revision: int
    record: Record


class Writer:
    """The thread that writes. `post` gets the machine's answers, `on_trouble` what went wrong.

    `on_refused` gets what must end the group: its name belongs to another process.
    """

    def __init__(
        self,
        etcd: Etcd,
        keys: JobKeys,
        replica_id: str,
        incarnation: str,
        lease: LeaseKeeper,
        *,
        post: Callable[[ev.Event], None],
        on_trouble: Callable[[Exception], None],
        on_refused: Callable[[Exception], None],
        on_waiting: Callable[[str], None],
        readmit: Callable[[], Admitted],
    ) -> None:
        self._etcd = etcd
        self._keys = keys
        self._replica_id = replica_id
        self._incarnation = incarnation
        self._lease = lease
        self._post = post
        self._on_trouble = on_trouble
        self._on_refused = on_refused
        self._on_waiting = on_waiting
        self._readmit = readmit
        self._changed = threading.Condition()
        self._wishes: dict[str, EtcdEffect | RestoreConfig] = {}
        self._closed = False
        self.config_revision: int | None = None
        """Set until the member key was first written: it may only be under the config that was checked."""
        self._own: _Own | None = None
        self._ticket_revision = 0
        self._abort_revision = 0
        self._proof_lease = 0
        self._used_lease = 0
        self._thread = threading.Thread(target=self._run, name="keeper writer", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def submit(self, wish: EtcdEffect | RestoreConfig) -> None:
        """Ask for something to be made true; replaces an older wish of its kind."""
        slot = _SLOTS.get(type(wish), repr(wish))
        with self._changed:
            self._wishes[slot] = wish
            self._changed.notify()

    def abort_seen(self, revision: int) -> None:
        """Note the revision of the `abort` key that a watch has shown; saves a read when it matters."""
        self._abort_revision = revision

    def close(self) -> None:
        """Write no more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    @property
    def closed(self) -> bool:
        """Say whether `close` was called."""
        return self._closed

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wishes or self._closed)
                if self._closed:
                    return
                slot = "keys" if "keys" in self._wishes else next(iter(self._wishes))
                wish = self._wishes.pop(slot)
            try:
                self._grant(wish)
                self._drop_repeated(slot, wish)
            except LeaseLost:
                self._lease.suspect(self._used_lease)
            except (NameInUse, JobMismatch) as error:
                self._on_refused(error)
            except EtcdError as error:
                self._on_trouble(error)
            except Exception as error:
                log.exception("writing to etcd ends")
                self._on_refused(error)
                return

    def _drop_repeated(self, slot: str, done: EtcdEffect | RestoreConfig) -> None:
        """An etcd that is late is not asked to do again what it has just done."""
        with self._changed:
            if isinstance(done, ev.Hold) and self._wishes.get(slot) == done:
                del self._wishes[slot]

    def _grant(self, wish: EtcdEffect | RestoreConfig) -> None:
        if isinstance(wish, ev.Hold):
            self._hold(wish)
        elif isinstance(wish, ev.Withdraw):
            self._withdraw()
        elif isinstance(wish, ev.Depart):
            self._depart(wish)
        elif isinstance(wish, ev.PutAbort):
            self._put_abort(wish.abort)
        elif isinstance(wish, ev.PutEpoch):
            self._put_epoch(wish)
        elif isinstance(wish, ev.AckControl):
            self._acknowledge(self._keys.control_of(wish.what, self._replica_id))
        else:
            restore_config(self._etcd, self._keys, wish.config)

    # -- our own keys ------------------------------------------------------------------------------

    def _hold(self, wish: ev.Hold) -> None:
        """Write our keys under the present lease, guarded by the revisions of both.

        So a late copy of an older wish, which a frozen server may still carry out, undoes nothing.
        """
        lease = self._used_lease = self._lease.id
        if not lease:
            return  # the wish comes back with the next lease
        member, ticket = self._keys.member_of(self._replica_id), self._keys.ticket_of(self._replica_id)
        for _ in range(_TRIES):
            own = self._own
            compare = [
                Compare(member, "mod", "=", 0 if own is None else own.revision),
                Compare(ticket, "mod", "=", self._ticket_revision),
            ]
            if self.config_revision is not None:
                compare.append(Compare(self._keys.config, "mod", "=", self.config_revision))
            then: list[Op] = [Delete(ticket)]
            if wish.ticket is not None:
                then = [Put(ticket, encode(wish.ticket), lease)]
            # The member key is written once if possible, since all members watch it.
            stays = own is not None and (own.lease, own.record) == (lease, wish.record)
            if not stays:
                then.append(Put(member, encode(wish.record), lease))
            answer = self._etcd.txn(compare, then, [Get(member), Get(ticket), Get(self._keys.config)])
            if answer.succeeded:
                self.config_revision = None
                self._ticket_revision = 0 if wish.ticket is None else answer.revision
                if not stays:
                    self._own = _Own(lease, answer.revision, wish.record)
                self._post(ev.Held(wish.ticket))
                return
            self._learn(*(response.kvs for response in answer.responses))
        raise EtcdUnavailable(f"the key {member} changed {_TRIES} times while it was being written")

    def _learn(self, members: tuple[KV, ...], tickets: tuple[KV, ...], configs: tuple[KV, ...]) -> None:
        """Take over what stands in etcd instead of what was expected there."""
        self._own = None
        self._ticket_revision = tickets[0].mod_revision if tickets else 0
        changed = [kv.mod_revision for kv in configs] != [self.config_revision]
        if self.config_revision is not None and changed:
            self.config_revision = self._readmit().mod_revision
        for kv in members:
            record = decode("members", kv.key, kv.value)
            if isinstance(record, Record) and record.incarnation == self._incarnation:
                self._own = _Own(kv.lease, kv.mod_revision, record)
            else:
                self._wait_for_name(kv)

    def _is_ours(self, kv: KV) -> bool:
        record = decode("members", kv.key, kv.value)
        return isinstance(record, Record) and record.incarnation == self._incarnation

    def _wait_for_name(self, kv: KV) -> None:
        record = decode("members", kv.key, kv.value)
        if not isinstance(record, Record):
            record = Record(replica_id=self._replica_id, incarnation="")
        wait_for_name(self._etcd, kv, record, self._on_waiting, lambda: self._closed)

    def _withdraw(self) -> None:
        own = self._own_revision()
        if own:
            member = self._keys.member_of(self._replica_id)
            gone = self._etcd.txn(
                [Compare(member, "mod", "=", own)],
                [Delete(member), Delete(self._keys.ticket_of(self._replica_id))],
            )
            if not gone.succeeded:
                self._own = None
                return
        self._own = None
        self._post(ev.Vanished(False))

    def _own_revision(self) -> int:
        """Return the revision of our member key, 0 when there is none of ours."""
        if self._own is not None:
            return self._own.revision
        kv = self._etcd.get(self._keys.member_of(self._replica_id))
        return kv.mod_revision if kv is not None and self._is_ours(kv) else 0

    # -- the end -----------------------------------------------------------------------------------

    def _depart(self, wish: ev.Depart) -> None:
        member = self._keys.member_of(self._replica_id)
        own = 0 if self._own is None else self._own.revision
        abort = wish.abort
        for _ in range(_TRIES):
            compare = [Compare(member, "mod", "=", own)]
            if abort is not None:
                compare.append(Compare(self._keys.abort, "mod", "=", self._abort_revision))
            try:
                answer = self._etcd.txn(
                    compare, self._last_words(wish, own, abort), [Get(member), Get(self._keys.abort)]
                )
            except LeaseLost:
                self._proof_lease = 0
                continue
            except EtcdNoSpace as error:
                # Deleting is allowed still: the others then see a member vanish, if without proof.
                log.warning("no proof of death can be written: %s", error)
                self._etcd.delete(member)
                self._post(ev.Vanished(True))
                return
            if answer.succeeded:
                self._post(ev.Vanished(True))
                return
            found, aborts = answer.responses[0].kvs, answer.responses[1].kvs
            if found and not self._is_ours(found[0]):
                log.info("%s has been replaced already; nothing to take leave of", self._replica_id)
                self._post(ev.Vanished(True))
                return
            own = found[0].mod_revision if found else 0
            if abort is not None and self._is_over(aborts, abort):
                abort = None
        raise EtcdUnavailable(f"the key {member} changed {_TRIES} times while it was being deleted")

    def _last_words(self, wish: ev.Depart, own: int, abort: Abort | None) -> list[Op]:
        if not self._proof_lease:
            self._proof_lease = self._etcd.grant(PROOF_TTL_S)
        proof = Put(self._keys.departed_of(self._replica_id), encode(wish.departed), self._proof_lease)
        words: list[Op] = [proof]
        if own:
            words += [
                Delete(self._keys.member_of(self._replica_id)),
                Delete(self._keys.ticket_of(self._replica_id)),
            ]
        if abort is not None:
            words.append(Put(self._keys.abort, encode(abort)))
        return words

    def _is_over(self, found: tuple[KV, ...], abort: Abort) -> bool:
        """Say whether the `abort` that stands there says the same or more; note its revision."""
        self._abort_revision = found[0].mod_revision if found else 0
        standing = decode("abort", found[0].key, found[0].value) if found else None
        return isinstance(standing, Abort) and standing.epoch >= abort.epoch

    def _acknowledge(self, key: str) -> None:
        """Delete an operator's request, but not a newer one."""
        kv = self._etcd.get(key)
        if kv is not None:
            self._etcd.txn([Compare(key, "mod", "=", kv.mod_revision)], [Delete(key)])

    # -- what all share ----------------------------------------------------------------------------

    def _put_abort(self, abort: Abort) -> None:
        for _ in range(_TRIES):
            answer = self._etcd.txn(
                [Compare(self._keys.abort, "mod", "=", self._abort_revision)],
                [Put(self._keys.abort, encode(abort))],
                [Get(self._keys.abort)],
            )
            if answer.succeeded:
                self._abort_revision = answer.revision
                return
            if self._is_over(answer.responses[0].kvs, abort):
                return

    def _put_epoch(self, wish: ev.PutEpoch) -> None:
        epoch = wish.epoch if wish.epoch.time else msgspec.structs.replace(wish.epoch, time=time.time())
        value = encode(epoch)
        copy = Put(self._keys.timeline_of(epoch.id), value)
        gone = [self._keys.member_of(r) for r in wish.absent]
        if len(gone) > _MOST_COMPARES:  # etcd's default limit is 128; the rest is looked at just before
            here = {kv.key for kv in self._etcd.list(self._keys.members)[0]}
            if here & set(gone):
                self._post(ev.ProposalFailed())
                return
        answer = self._etcd.txn(
            [
                Compare(self._keys.epoch, "mod", "=", wish.revision),
                *(Compare(key, "mod", "=", 0) for key in gone[:_MOST_COMPARES]),
            ],
            [Put(self._keys.epoch, value), *([copy] if len(value) <= _LARGE else [])],
        )
        if not answer.succeeded:
            self._post(ev.ProposalFailed())
            return
        log.info("epoch %d proposed: %s", epoch.id, epoch.reason)
        if len(value) > _LARGE:
            self._etcd.txn([], [copy])
        kept = timeline_kept(len(value))
        if epoch.id > kept:
            oldest = self._keys.timeline_of(epoch.id - kept + 1)
            self._etcd.txn([], [DeletePrefix(self._keys.timeline, oldest)])
