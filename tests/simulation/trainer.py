"""A trainer of the imagination: all ranks of one replica group, at work step by step.

Uses the real lineage, vote and plan. Its model is a hash: each commit mixes in the members and the step,
so that two states are equal only if the whole history is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import msgspec
from simulation.group import Group
from simulation.world import Pipe, Violation

from ftkit.core import events as ev
from ftkit.core import vote
from ftkit.core.model import BROKEN, Epoch, Record, Version
from ftkit.core.plan import Plan

if TYPE_CHECKING:
    from simulation.keeper import Keeper
    from simulation.replica import Replica

COLLECTIVE_S, RENDEZVOUS_S, HEAL_S, SUSPECT_S, SALVAGE_S = 2.5, 1.5, 3.0, 0.3, 1.0
REPROBE_S = 1.0
"""How often a member that waits looks whether those whom it did not reach answer now."""
FAREWELL_S = 2.0
HOPELESS_S = 15.0
"""A trainer with a half-written state that nobody can heal ends after this long."""


class Trainer:
    """The ranks of one replica group, as one process; a restarted one is another object."""

    def __init__(self, replica: Replica, incarnation: str, version: Version, state: int) -> None:
        """Load the model (fresh, or a checkpoint) and stand at the first boundary."""
        self.replica, self.world, self.name = replica, replica.world, replica.name
        self.incarnation = incarnation
        self.record = Record(replica_id=self.name, incarnation=incarnation, host=f"host-{self.name}")
        self.lineage = vote.Lineage(version)
        self.state: int | None = state
        self.alive, self.frozen = True, False
        self.phase = "wanting"
        self.entered: Epoch | None = None
        self.met = True
        """Whether the members of the epoch entered last have met."""
        self.group: Group | None = None
        self.plan: Plan | None = None
        self.want: ev.Want | None = None
        self.goodbye: ev.Goodbye | None = None
        self.keeper: Keeper | None = None
        self.reconfigure = False
        self.salvages = False
        self._for_good = False
        """Whether the gradients of the running step are still there, to be reduced among fewer members."""
        self.leaving = ""
        self.suspects: tuple[str, ...] = ()
        self.num_commits = 0
        self._pending: int | None = None
        self._contact = -1e9
        self._task = 0
        self._to_keeper = Pipe(self.world)
        self._backlog: deque[Callable[[], None]] = deque()
        self._unread: deque[Callable[[], None]] = deque()

    # -- the process ------------------------------------------------------------------------------

    def runs(self) -> bool:
        """Whether instructions are executed."""
        return self.alive and not self.frozen and not self.replica.machine_frozen

    def later(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        """Go on after a while, unless the work at hand is over by then."""
        self.world.after(delay, self._go_on, self._task, call, args)

    def _go_on(self, task: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive or task != self._task:
            return
        if self.runs():
            call(*args)
        else:
            self._backlog.append(lambda: self._go_on(task, call, args))

    def new_task(self) -> None:
        """The work at hand is over: nothing that was scheduled for it happens any more."""
        self._task += 1

    def hear(self, effect: ev.Effect, keeper: Keeper) -> None:
        """Receive a message from the keeper, in order."""
        if not self.alive or keeper is not self.keeper:
            return
        if self.runs():
            self._on_message(effect)
        else:
            self._unread.append(lambda: self.hear(effect, keeper))

    def thaw(self) -> None:
        """What came in while the process stood still is now found, by one thread before the other."""
        found = [list(self._backlog), list(self._unread)]
        self._backlog.clear()
        self._unread.clear()
        if self.world.chance(0.5):
            found.reverse()
        for call in found[0] + found[1]:
            call()

    def contact(self) -> float:
        """Return when etcd was last known to hold this member's keys, as far as the ranks know."""
        if self.runs() and self.keeper is not None and self.keeper.alive:
            self._contact = max(self._contact, self.keeper.contact())
        return self._contact

    def fenced(self) -> bool:
        """I3: say whether this member may no longer commit."""
        return self.world.now - self.contact() > self.replica.job.policy.outage_grace

    def tell_keeper(self, event: ev.Event) -> None:
        """Send a message to the keeper, if there is one."""
        if self.keeper is not None:
            self._to_keeper.send(self.keeper.hear_rank, event)

    # -- messages ---------------------------------------------------------------------------------

    def connect(self, keeper: Keeper) -> None:
        """A keeper is there, the first or one in place of a dead one: tell it all it has to know."""
        self.keeper = keeper
        self._to_keeper = Pipe(self.world)
        keeper.hear(ev.Ready(record=self.record, running=self.entered))
        if self.goodbye is not None:
            keeper.hear(self.goodbye)
        elif self.want is not None:
            keeper.hear(self.want)

    def _on_message(self, effect: ev.Effect) -> None:
        running = 0 if self.entered is None or self.want is not None else self.entered.id
        if isinstance(effect, ev.Offer):
            self._on_offer(effect)
        elif isinstance(effect, ev.AbortWork) and effect.epoch == running:
            self.fail(f"told to abort: {effect.why}")
        elif isinstance(effect, ev.Reconfigure) and effect.epoch == running:
            self.reconfigure = True
        elif isinstance(effect, ev.Suspects) and effect.epoch == running:
            self.suspects = effect.names
            if effect.names and self.phase in ("configure", "healed", "grads", "vote"):
                self.later(SUSPECT_S, self._lose_patience, self.phase, "the collective stands still")
        elif isinstance(effect, ev.Leave):
            self.leaving = effect.what
            if effect.what == "evict" or self.want is not None:
                self._say_goodbye(effect.what, planned=False)
            else:
                self.reconfigure = True

    def _on_offer(self, offer: ev.Offer) -> None:
        epoch = offer.epoch
        if self.want is None or self.goodbye is not None:
            return
        if self.entered is not None and epoch.id <= self.entered.id:
            raise Violation("I3", f"{self.name} is offered epoch {epoch.id} after having left it")
        self.want = None
        self.entered = epoch
        self.met = False
        self.reconfigure, self.suspects = bool(self.leaving), ()
        self.new_task()
        self.plan = self.lineage.enter(epoch, self.name)
        self.replica.job.checks.enter(self, epoch, self.plan)
        self.group = self.replica.job.group(epoch)
        self._collect("configure", RENDEZVOUS_S)

    def _want(self, failed: str, *, salvage: bool = False, together: bool = False) -> None:
        self.new_task()
        self.phase = "wanting"
        self.salvages = salvage
        version = self.lineage.version
        offered = 0 if self.entered is None else self.entered.id
        self.want = ev.Want(
            version=version,
            failed=failed,
            together=together,
            shrink_only=salvage,
            offered=offered,
            unreached=self._unreached(),
        )
        self.world.say(self.name, "wants an epoch at %s%s", version, f" ({failed})" if failed else "")
        self.tell_keeper(self.want)
        if self.want.unreached:
            self.world.say(self.name, "does not reach %s", self.want.unreached)
            self.later(REPROBE_S, self._look_around)
        if version == BROKEN:
            self.later(HOPELESS_S, self._despair)
        if salvage:
            self.later(SALVAGE_S, self._want, "")

    def _unreached(self) -> tuple[str, ...]:
        """Name the members of the epoch that came to nothing whose machines do not answer."""
        if self.met or self.entered is None:
            return ()
        job = self.replica.job
        others = [job.replicas[s.replica_id] for s in self.entered.seats if s.replica_id != self.name]
        return tuple(r.name for r in others if not job.islands_meet(self.name, r.name) or r.machine_frozen)

    def _look_around(self) -> None:
        """While waiting for an epoch, find out whether those who did not answer do so now."""
        if self.want is None:
            return
        unreached = self._unreached()
        if unreached != self.want.unreached:
            self.want = msgspec.structs.replace(self.want, unreached=unreached)
            self.tell_keeper(self.want)
        if unreached:
            self.later(REPROBE_S, self._look_around)

    def _despair(self) -> None:
        self.world.say(self.name, "ends: nobody can heal it")
        self.replica.crash()

    def start(self) -> None:
        """Ask for the first epoch."""
        self._want("")

    # -- leaving ----------------------------------------------------------------------------------

    def _leave_group(self) -> None:
        if self.group is not None:
            self.group.leave(self)
            self.group = None

    def fail(self, why: str) -> None:
        """This epoch is over here: abort everything, ask for the next."""
        if self.phase == "vote":
            self.lineage.lose_vote()
        salvage = self.phase == "grads" and self.world.chance(0.5)
        self._leave_group()
        self.replica.job.checks.failed(self, why)
        if self.leaving:
            self._say_goodbye("left", planned=False)
        else:
            self._want(why or "failed", salvage=salvage)

    def _say_goodbye(self, how: str, *, planned: bool) -> None:
        self._leave_group()
        self.new_task()
        self.phase = "leaving"
        self.goodbye = ev.Goodbye(how=how, version=self.lineage.version, planned=planned)
        self.world.say(self.name, "says goodbye: %s%s", how, " as planned" if planned else "")
        if not planned and self.world.chance(0.3):  # first it only asks not to be waited for
            offered = 0 if self.entered is None else self.entered.id
            version = self.lineage.version
            self.tell_keeper(ev.Want(version=version, failed=how, leaving=True, offered=offered))
            self.later(0.5, self.tell_keeper, self.goodbye)
        else:
            self.tell_keeper(self.goodbye)

    def die(self, *, sockets_close: bool) -> None:
        """Stop executing for good."""
        self.alive = False
        self.new_task()
        if self.group is not None:
            self.group.leave(self, sockets_close=sockets_close)

    # -- the work ---------------------------------------------------------------------------------

    def _collect(self, kind: Hashable, deadline: float, ballot: list[int] | None = None) -> None:
        assert self.group is not None, "a collective needs a group"
        self.phase = str(kind[0]) if isinstance(kind, tuple) else str(kind)
        self.group.arrive(kind, self, ballot or [0])
        self.later(deadline, self._lose_patience, self.phase, "timed out")
        if self.suspects:
            self.later(SUSPECT_S, self._lose_patience, self.phase, "a member is suspect")

    def _lose_patience(self, phase: str, why: str) -> None:
        if self.phase == phase == "farewell":
            self._part(together=False)
        elif self.phase == phase and (why == "timed out" or self.suspects):
            self.fail(f"{phase}: {why}")

    def on_failure(self, kind: Hashable, why: str) -> None:
        """The collective failed here; the others may or may not know."""
        if self.phase != (kind[0] if isinstance(kind, tuple) else kind):
            return
        if self.phase == "farewell":
            self._part(together=False)
        elif self.phase == "grads" and self.world.chance(0.5):
            self._vote(ok=False)
        else:
            self.fail(f"{self.phase}: {why}")

    def on_result(self, kind: Hashable, result: list[int]) -> None:
        """The collective has completed; go on to what follows it."""
        phase = kind[0] if isinstance(kind, tuple) else kind
        if self.phase != phase:
            return
        self.new_task()
        if phase == "configure":
            self.met = True
            self._heal()
        elif phase == "healed":
            self._begin_step()
        elif phase == "grads":
            self._vote(ok=True)
        elif phase == "farewell":
            self._part(together=not result[0])
        else:
            self._on_verdict(result)

    def _heal(self) -> None:
        assert self.plan is not None, "healing follows a plan"
        if not self.plan.heals:
            self._collect("healed", HEAL_S + 1.0)
        elif self.lineage.undecided == self.plan.version:
            self.state = self._pending
            self.lineage.settle()
            self.world.say(self.name, "settles its undecided step, now at %s", self.lineage.version)
            self.replica.job.checks.settled(self)
            self._collect("healed", HEAL_S + 1.0)
        else:
            self.phase = "healing"
            self.lineage.begin_heal()
            self.state = None
            self.replica.job.on_heal(self)
            self.later(self.world.between(0.05, 0.6), self._end_heal)

    def _end_heal(self) -> None:
        assert self.plan is not None, "a heal follows a plan"
        assert self.group is not None, "a heal has sources"
        job = self.replica.job
        sources = [self.group.members[r] for r in self.plan.sources if r not in self.group.left]
        sources = [s for s in sources if s.runs() and job.can_talk(self, s)]
        if any(s.phase == "configure" for s in sources):  # it has nothing to serve yet
            self.later(0.05, self._end_heal)
            return
        sources = [s for s in sources if s.phase == "healed"]
        if self.world.chance(job.luck.heal):
            job.luck.hits += 1
            sources = []
        if not sources:
            self.fail("heal: no source is left")
            return
        job.checks.served(sources, self.plan)
        self.state = sources[0].state
        self.lineage.end_heal(self.plan.version)
        self.world.say(self.name, "healed to %s from %s", self.plan.version, [s.name for s in sources])
        self._collect("healed", HEAL_S)

    def _begin_step(self) -> None:
        assert self.plan is not None, "a step follows a plan"
        if self.salvages and not self.plan.healing:
            self.world.say(self.name, "salvages its step")
            self._collect(("grads", self.lineage.version.step), COLLECTIVE_S)
        else:
            self._compute()

    def _compute(self) -> None:
        self.salvages = False
        self.phase = "compute"
        self.later(self.world.between(0.08, 0.2), self._reduce)

    def _reduce(self) -> None:
        self.lineage.forget_undecided()  # this overwrites the gradients
        self._pending = None
        self._collect(("grads", self.lineage.version.step), COLLECTIVE_S)

    def _vote(self, *, ok: bool) -> None:
        assert self.entered is not None, "a vote needs an epoch"
        step = self.lineage.version.step
        ballot = self.lineage.votes(ok and not self.fenced())
        if ballot[0] == 0:
            self.replica.job.checks.voted_ok(self)
            self._pending = mix(self.state, self.entered, step)
        ballot[1] = int(self.reconfigure)
        self._collect(("vote", step), COLLECTIVE_S, ballot)

    def _on_verdict(self, reduced: list[int]) -> None:
        assert self.entered is not None, "a vote needs an epoch"
        if self.fenced():
            self.fail("no word from etcd for too long")
            return
        policy = self.replica.job.policy
        verdict = vote.tally(reduced, participants=len(self.entered.seats), min_replicas=policy.min_replicas)
        if not verdict.commit:
            self.lineage.reject()
            self.phase = "boundary"
            self.fail(verdict.why)
            return
        self.phase = "boundary"
        if self.world.chance(self.replica.job.luck.update):
            self.replica.job.luck.hits += 1
            self.lineage.fail_update()
            self.state = None
            self.fail("the optimizer raised")
            return
        before, self.state = self.state, self._pending
        version = self.lineage.version
        self.lineage.commit()
        self.num_commits += 1
        self.replica.job.checks.commit(self, self.entered, version, before)
        if not verdict.reconfigure:
            self._compute()
        else:
            self._for_good = bool(self.leaving)
            self._collect(("farewell", version.step), FAREWELL_S, [int(self._for_good)])

    def _part(self, *, together: bool) -> None:
        """Leave the epoch as planned; `together` if all have said farewell, and all will ask for the next."""
        if self._for_good:
            self._say_goodbye("left", planned=True)
        else:
            self._leave_group()
            self._want("", together=together)


def mix(state: int | None, epoch: Epoch, step: int) -> int:
    """Return the state after a step: the history, the members and the data it saw."""
    return hash((state, epoch.id, tuple(s.replica_id for s in epoch.seats), step))


START_STATE = 1
"""The state of a model that has just been built."""
