"""The keeper's one loop: hand what happens to the machine, have done what it answers.

The loop's thread alone owns the machine and the group. All others (watches, lease, writer, connections,
processes) post to its inbox; it decides, and lets others act, so that it never waits for anything slow.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence

import msgspec

from ftkit import errors
from ftkit.core import events as ev
from ftkit.core.machine import Member
from ftkit.core.model import FRESH
from ftkit.errors import EtcdError, EtcdNoSpace, FtkitError
from ftkit.keeper import messages as msg
from ftkit.keeper.admission import Admitted, own_config, same_secret
from ftkit.keeper.arms import Arms
from ftkit.keeper.etcd import Etcd
from ftkit.keeper.group import Group
from ftkit.keeper.hearing import Hearing
from ftkit.keeper.inbox import (
    Changes,
    ConfigSeen,
    Fresh,
    Inbox,
    Item,
    LetIn,
    ParentDied,
    RefusedBy,
    Trouble,
    Waits,
)
from ftkit.keeper.keys import decode_config
from ftkit.keeper.post import Post
from ftkit.keeper.processes import Exited, Hung, Stopped
from ftkit.keeper.ranks import Joined, Lost, Said, Session
from ftkit.keeper.writer import RestoreConfig

log = logging.getLogger(__name__)

CONTACT_S = 0.5
_LAST_LOOK_S = 0.15
"""How long the news of a closed connection waits for the exit status of its process."""
_FAREWELL_S = 2.0
_FOLLOW_S = 0.05
"""How long a rank that leaves unplanned waits for its siblings, who end at the same step if all is well."""


class Keeper:
    """One replica group's keeper; `run` returns when the group is over."""

    def __init__(self, post: Post, etcd: Etcd) -> None:
        settings = post.settings
        self._settings = settings
        self._takeover = post.takeover
        self._inbox = Inbox()
        self._arms = Arms(post, etcd, self._inbox.put)
        self._machine = Member(settings.replica_id, post.incarnation, settings.policy())
        self._group = Group(settings.group_world_size, settings.replica_id, post.incarnation)
        self._sessions: dict[int, Session] = {}
        self._lost: dict[int, tuple[float, str]] = {}
        """Ranks whose connection is closed: until when their exit status is waited for, and why."""
        self._stopped: set[int] = set()
        self._admitted: Admitted | None = None
        self._etcd_version = ""
        self._ready = self._welcomed = self._dead = self._done = self._crashed = self._parent_dead = False
        self._hearing = Hearing(settings.lease_ttl)
        self._give_up_at: float | None = None
        self._evict_at: float | None = None
        self._follow_by: float | None = None
        # A rank that died together with the last keeper never comes back.
        self._return_by = time.monotonic() + settings.timeout if post.takeover else None
        self._waiting = ""
        """Why the machine waits."""
        self._reason = "the keeper has just started"
        """What the ranks were last told."""
        self._trouble: tuple[str, float] = ("", 0.0)
        self.port = self._arms.ranks.port

    def post(self, item: Item) -> None:
        """Put something into the loop's inbox, from any thread."""
        self._inbox.put(item)

    def run(self) -> int:
        """Work until the group is over; return the process's exit code."""
        self._arms.start()
        contact_at = time.monotonic()
        while not self._done:
            wake = self._machine.wake_at() if self._ready or self._dead else None
            until = min(t for t in (contact_at, wake, *self._deadlines()) if t is not None)
            item = self._inbox.get(max(0.0, until - time.monotonic()))
            if item is not None:
                self._absorb(item)
            elif wake is not None and time.monotonic() >= wake:
                self._machine_hears(ev.Tick())
            now = time.monotonic()
            if now >= contact_at:
                contact_at = now + CONTACT_S
                self._contact()
            self._check_deadlines(now)
        self._end()
        return int(self._crashed)

    def _absorb(self, item: Item) -> None:
        if isinstance(item, Joined | Said | Lost):
            self._hear_rank(item)
        elif isinstance(item, Exited | Stopped | Hung):
            self._hear_process(item)
        elif isinstance(item, Trouble):
            self._hear_trouble(item.error)
        elif isinstance(item, RefusedBy):
            self._refuse(item.error)
        elif isinstance(item, Waits):
            self._tell_all(msg.StillWaiting(reason=item.reason))
        elif isinstance(item, LetIn):
            self._let_in(item)
        elif isinstance(item, ConfigSeen):
            self._compare_config(item)
        elif isinstance(item, Fresh):
            self._hear_again(item.number)
        elif isinstance(item, ParentDied):
            self._parent_dead = True
            self._end_if_orphaned()
        elif isinstance(item, Changes):
            self._hear_changes(item.changes)
        else:
            self._machine_hears(item)

    # -- the machine -------------------------------------------------------------------------------

    def _hear_changes(self, changes: Sequence[ev.Changed]) -> None:
        for change in changes:
            if change.section == "abort":
                self._arms.writer.abort_seen(0 if change.value is None else change.revision)
        self._notice_silence()
        self._have_all_done(self._machine.handle_all(changes, time.monotonic()))

    def _machine_hears(self, event: ev.Event) -> None:
        if isinstance(event, ev.Listed) and event.section == "abort":
            self._arms.writer.abort_seen(event.revisions.get("", 0))
        self._notice_silence()
        self._hand_to_machine(event)
        if isinstance(event, ev.Held) and not self._welcomed:
            self._welcomed = True
            self._arms.stats.start()
            self._welcome()
        elif isinstance(event, ev.Vanished) and event.departed:
            self._done = True

    def _hand_to_machine(self, event: ev.Event) -> None:
        self._have_all_done(self._machine.handle(event, time.monotonic()))

    def _have_all_done(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            self._have_done(effect)

    def _notice_silence(self) -> None:
        """Before anything else is believed: what was seen may be old news (I3), as after a standstill."""
        if not self._ready:
            return
        verdict = self._hearing.notice(self._arms.etcd_age(), time.monotonic())
        if isinstance(verdict, ev.Silence):
            self._hand_to_machine(verdict)
        elif verdict is not None:
            self._arms.sight.refresh(lambda: self._inbox.put(Fresh(verdict)))

    def _hear_again(self, number: int) -> None:
        self._notice_silence()
        verdict = self._hearing.refreshed(number)
        if verdict is not None:
            self._hand_to_machine(verdict)

    def _have_done(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.AbortWork):
            self._tell_all(msg.AbortEpoch(epoch=effect.epoch, why=effect.why, left_out=effect.left_out))
        elif isinstance(effect, ev.Offer):
            self._group.offered(effect.epoch.id)
            self._tell_all(msg.EpochOffer(epoch=effect.epoch, records=dict(effect.records)))
        elif isinstance(effect, ev.Reconfigure):
            self._tell_all(msg.WishReconfigure(epoch=effect.epoch, why=effect.why))
        elif isinstance(effect, ev.Suspects):
            self._tell_all(msg.SuspectMembers(epoch=effect.epoch, names=effect.names))
        elif isinstance(effect, ev.Waiting):
            self._waiting = effect.reason
            self._tell_all(msg.StillWaiting(reason=effect.reason))
        elif isinstance(effect, ev.Leave):
            self._tell_all(msg.PleaseLeave(what=effect.what))
            if effect.what == "evict" and self._evict_at is None:
                self._evict_at = time.monotonic() + self._settings.lease_ttl
        elif isinstance(effect, ev.WatchTickets):
            self._arms.sight.watch_tickets(effect.on)
        else:
            self._arms.writer.submit(effect)

    # -- the ranks ---------------------------------------------------------------------------------

    def _hear_rank(self, item: Joined | Said | Lost) -> None:
        session = item.session
        if isinstance(item, Joined):
            self._take_in(session, item.hello)
        elif self._sessions.get(session.rank) is not session:
            return  # one that was turned away
        elif isinstance(item, Lost):
            self._lose(session, item.why)
        elif isinstance(item.message, msg.WantEpoch):
            self._group.wants_epoch(session.rank, item.message)
            self._hand_on_want()
        else:
            self._group.goodbyes[session.rank] = item.message
            if not item.message.planned and self._follow_by is None:
                self._follow_by = time.monotonic() + _FOLLOW_S
            self._hand_on_goodbye()

    def _take_in(self, session: Session, hello: msg.Hello) -> None:
        why = self._group.joined(hello)
        if why is not None:
            log.warning("%s: %s", self._settings.replica_id, why)
            session.tell(msg.Refused(error="KeeperError", message=why))
            session.close(0.0)
            return
        self._sessions[hello.rank] = session
        if self._is_local(hello):
            self._arms.processes.add(hello.rank, hello.pid)
        if not self._group.complete:
            missing = ", ".join(str(r) for r in self._group.missing()[:8])
            self._tell_all(msg.StillWaiting(reason=f"waiting for rank {missing} of this replica group"))
            return
        self._return_by = None
        first = self._group.hellos[0]
        ours = own_config(
            self._settings.policy(),
            group_world_size=self._settings.group_world_size,
            token=self._settings.token,
            fingerprint=first.fingerprint,
            layout=first.layout,
        )
        self._arms.begin_admission(ours, patient=self._takeover)

    def _is_local(self, hello: msg.Hello) -> bool:
        return hello.rank == 0 or hello.host == socket.gethostname()

    def _let_in(self, item: LetIn) -> None:
        if self._dead:
            return
        self._admitted, self._etcd_version = item.admitted, item.etcd_version
        self._arms.writer.config_revision = item.admitted.mod_revision
        self._ready = True
        self._arms.sight.open()
        self._machine_hears(ev.Ready(record=self._group.record(), running=self._group.running()))
        self._hand_on_want()
        self._hand_on_goodbye()

    def _welcome(self) -> None:
        assert self._admitted is not None, "the group was let in"
        for rank, session in self._sessions.items():
            local = self._is_local(self._group.hellos[rank])
            session.tell(
                msg.Welcome(
                    job_token=self._admitted.token,
                    progress_file=self._arms.progress_file if local else "",
                    etcd_version=self._etcd_version,
                )
            )

    def _hand_on_want(self) -> None:
        want = self._group.take_want() if self._ready else None
        if want is not None:
            self._machine_hears(want)

    def _hand_on_goodbye(self) -> None:
        goodbye = self._group.goodbye()
        if goodbye is None or self._dead:
            return
        if self._ready or self._takeover:
            self._dead = True
            self._give_up_at = time.monotonic() + self._settings.takeover_after
            self._machine_hears(goodbye)
        else:
            self._done = True  # it never was a member

    def _end_with_deserter(self) -> None:
        """A rank has left, by an exception say: so do the others of its group, and all members hear it."""
        left = ", ".join(map(str, sorted(self._group.goodbyes)))
        if self._dead or len(self._group.goodbyes) == self._group.size:
            return
        log.warning("%s: rank %s has left, so the group leaves", self._settings.replica_id, left)
        self._group.deserted = True
        self._tell_all(msg.PleaseLeave(what=f"rank {left} of the group has left"))
        self._hand_on_goodbye()

    def _lose(self, session: Session, why: str) -> None:
        rank = session.rank
        del self._sessions[rank]
        if rank in self._group.goodbyes or self._dead:
            return
        if self._arms.processes.reports(rank):
            self._lost[rank] = (time.monotonic() + _LAST_LOOK_S, why)
        else:
            self._die(self._group.how_died(rank, "connection lost"), rank)

    # -- ends --------------------------------------------------------------------------------------

    def _hear_process(self, item: Exited | Stopped | Hung) -> None:
        if isinstance(item, Stopped):
            before = bool(self._stopped)
            (self._stopped.add if item.on else self._stopped.discard)(item.rank)
            if before != bool(self._stopped):
                log.warning(
                    "%s: rank %d %s",
                    self._settings.replica_id,
                    item.rank,
                    "stopped" if item.on else "goes on",
                )
                self._machine_hears(ev.Frozen(bool(self._stopped)))
            return
        if isinstance(item, Exited):
            self._stopped.discard(item.rank)
        if item.rank not in self._group.goodbyes:
            died = self._die(self._group.how_died(item.rank, item.how), item.rank)
            if died and isinstance(item, Hung):
                self._arms.processes.kill()
        self._end_if_orphaned()

    def _die(self, how: str, rank: int = 0) -> bool:
        """The group is dead: prove it to the others, tell the ranks that are left; say if that is news."""
        if self._dead or self._done:
            return False
        self._dead = True
        self._lost.clear()
        log.warning("%s is dead: %s", self._settings.replica_id, how)
        text = f"the replica group {self._settings.replica_id} is over: {how}"
        self._tell_all(msg.Refused(error="KeeperError", message=text))
        if not (self._ready or self._takeover):
            self._done = True  # it never was a member
            return True
        self._give_up_at = time.monotonic() + self._settings.takeover_after
        progress = self._arms.read_progress(rank)
        self._machine_hears(ev.Died(how=how, version=FRESH if progress is None else progress.version))
        return True

    def _refuse(self, error: Exception) -> None:
        """The group cannot take part; or one of the keeper's threads has failed, and another keeper must."""
        if not isinstance(error, FtkitError):
            log.error("the keeper ends: %r", error)
            self._done = self._crashed = True
            return
        name = next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
        log.warning("%s is refused: %s", self._settings.replica_id, error)
        self._tell_all(msg.Refused(error=name, message=str(error)))
        self._done = True

    def _end_if_orphaned(self) -> None:
        """Without rank 0, a group that is no member yet never becomes one."""
        if self._parent_dead and 0 not in self._sessions and not self._ready and not self._dead:
            self._die("rank 0 ended before it had connected")

    def _deadlines(self) -> list[float]:
        single = (self._give_up_at, self._evict_at, self._return_by, self._follow_by)
        return [t for t in single if t is not None] + [until for until, _ in self._lost.values()]

    def _check_deadlines(self, now: float) -> None:
        for rank, (until, why) in list(self._lost.items()):
            if now >= until:
                del self._lost[rank]
                log.info("rank %d: %s", rank, why)
                self._die(self._group.how_died(rank, "connection lost"), rank)
        if self._evict_at is not None and now >= self._evict_at:
            self._evict_at = None
            if self._die("evicted"):
                self._arms.processes.kill()
        if self._follow_by is not None and now >= self._follow_by:
            self._follow_by = None
            self._end_with_deserter()
        if self._return_by is not None and now >= self._return_by:
            self._return_by = None
            missing = self._group.missing()
            self._die(self._group.how_died(missing[0], "did not return to its new keeper"), missing[0])
        if self._give_up_at is not None and now >= self._give_up_at:
            log.error("%s: its end could not be told to etcd in time", self._settings.replica_id)
            self._done = True

    def _end(self) -> None:
        """Tell the ranks, release what is in etcd, end."""
        if not self._crashed and self._group.goodbye() is not None:
            self._tell_all(msg.Gone())
        for session in self._sessions.values():
            session.close(_FAREWELL_S)
        self._arms.close(revoke=not self._crashed)

    # -- etcd --------------------------------------------------------------------------------------

    def _hear_trouble(self, error: Exception) -> None:
        # A newcomer can do nothing about a full etcd; a member can live with it until somebody makes room.
        outside = self._group.complete and not (self._welcomed or self._takeover)
        if not isinstance(error, EtcdError) or (isinstance(error, EtcdNoSpace) and outside):
            self._refuse(error)
            return
        text, now = str(error), time.monotonic()
        if text == self._trouble[0] and now - self._trouble[1] < CONTACT_S:
            return
        level = logging.DEBUG if text == self._trouble[0] else logging.WARNING
        log.log(level, "%s: %s", self._settings.replica_id, text)
        self._trouble = (text, now)
        if self._group.wants or not self._welcomed:
            self._tell_all(msg.StillWaiting(reason=text))

    def _contact(self) -> None:
        self._notice_silence()
        age = self._arms.etcd_age()
        # Ranks take a keeper that says nothing for one that has stopped.
        word = msg.StillWaiting(reason=self._reason) if age is None else msg.Contact(age_s=age)
        for rank, session in self._sessions.items():
            if rank not in self._stopped:  # it reads nothing now
                session.tell(word)
        if self._trouble[0] and self._arms.etcd.heard > self._trouble[1] + CONTACT_S:
            self._trouble = ("", 0.0)
            if self._waiting and self._group.wants:
                self._tell_all(msg.StillWaiting(reason=self._waiting))

    def _compare_config(self, item: ConfigSeen) -> None:
        """I8: put the config back into a wiped etcd; if a newcomer was faster, take its secret over."""
        if self._admitted is None:
            return
        if item.kv is None:
            self._arms.writer.submit(RestoreConfig(self._admitted.config))
            return
        theirs = decode_config(item.kv.key, item.kv.value)
        ours = self._admitted.config
        if theirs is None or same_secret(ours, theirs) or self._settings.token or not theirs.token:
            return
        log.warning("the job's secret was made anew, as after a loss of etcd's data; taking it over")
        changed = msgspec.structs.replace(ours, token=theirs.token)
        self._admitted = Admitted(changed, item.kv.mod_revision, theirs.token)
        if self._welcomed:
            self._welcome()

    def _tell_all(self, message: msg.ToRank) -> None:
        if isinstance(message, msg.StillWaiting):
            self._reason = message.reason
        for session in self._sessions.values():
            session.tell(message)
