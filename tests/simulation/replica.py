"""A replica group's machine and launcher, and the job that they all belong to."""

from __future__ import annotations

import itertools

from simulation.checks import Checks
from simulation.fake_etcd import FakeEtcd
from simulation.group import Group, Luck
from simulation.keeper import Keeper
from simulation.trainer import START_STATE, Trainer
from simulation.world import World

from ftkit.core import events as ev
from ftkit.core.machine import Member
from ftkit.core.model import FRESH, Epoch, Policy, Version

FREEZE_GRACE_S = 0.4


class Job:
    """All that is shared: etcd, the network between members, the process groups, the checks."""

    def __init__(self, world: World, policy: Policy, ttl: float, member_class: type[Member] = Member) -> None:
        """Begin without members."""
        self.world, self.policy, self.member_class = world, policy, member_class
        self.etcd = FakeEtcd(world, ttl)
        self.replicas: dict[str, Replica] = {}
        self.islands: dict[str, int] = {}
        self.luck = Luck()
        self.kill_sources = 0
        self.checks = Checks(self)
        self.etcd.on_put = self.checks.put
        self._groups: dict[tuple[object, ...], Group] = {}

    def add(self, name: str) -> Replica:
        """Start a new replica group."""
        replica = self.replicas[name] = Replica(self, name)
        replica.start()
        return replica

    def group(self, epoch: Epoch) -> Group:
        """Return the process groups of an epoch; two epochs of one number would have two."""
        return self._groups.setdefault((epoch.id, epoch.seats), Group(self.world, epoch, self.luck))

    def can_talk(self, a: Trainer, b: Trainer) -> bool:
        """Whether two members can reach each other."""
        return self.islands_meet(a.name, b.name)

    def islands_meet(self, a: str, b: str) -> bool:
        """Whether the machines of two members can reach each other."""
        return self.islands.get(a, 0) == self.islands.get(b, 0)

    def trainers(self) -> list[Trainer]:
        """Return the live trainers."""
        return [r.trainer for r in self.replicas.values() if r.trainer is not None and r.trainer.alive]

    def on_heal(self, healing: Trainer) -> None:
        """A heal has begun; a fault may be waiting for this moment."""
        plan = healing.plan
        if self.kill_sources > 0 and plan is not None:
            self.kill_sources -= 1
            victim = self.world.rng.choice([*plan.sources, healing.name])
            self.world.after(self.world.between(0.0, 0.1), self.replicas[victim].crash)


class Replica:
    """One replica id: its machine, and the launcher that starts its processes again."""

    def __init__(self, job: Job, name: str) -> None:
        """Begin switched off."""
        self.job, self.name = job, name
        self.world, self.etcd = job.world, job.etcd
        self.trainer: Trainer | None = None
        self.keeper: Keeper | None = None
        self.machine_frozen = False
        self.cut = False
        self.wanted = True
        self.checkpoint: tuple[Version, int] = (FRESH, START_STATE)
        self._incarnations = itertools.count(1)

    def start(self, *, from_checkpoint: bool = False) -> None:
        """Start the processes."""
        if not self.wanted or (self.trainer is not None and self.trainer.alive):
            return
        if self.machine_frozen:
            self.thaw_machine()
        version, state = self.checkpoint if from_checkpoint else (FRESH, START_STATE)
        incarnation = f"{self.name}{next(self._incarnations)}"
        self.world.say(self.name, "starts as %s at %s", incarnation, version)
        self.trainer = Trainer(self, incarnation, version, state)
        self.trainer.start()
        self._start_keeper()

    def _start_keeper(self) -> None:
        trainer = self.trainer
        if trainer is not None and trainer.alive:
            self.keeper = Keeper(self, trainer)
            trainer.connect(self.keeper)

    # -- ends -------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Kill the trainer; its keeper sees the connection close."""
        trainer, keeper = self.trainer, self.keeper
        if trainer is None or not trainer.alive:
            return
        self.world.say(self.name, "is killed")
        trainer.die(sockets_close=not self.machine_frozen)
        if keeper is not None and keeper.alive:
            keeper.hear(ev.Died("SIGKILL", trainer.lineage.version))
        self._restart_later()

    def lose(self) -> None:
        """Lose the machine: no proof of death, no closing sockets."""
        if self.trainer is None or not self.trainer.alive:
            return
        self.world.say(self.name, "loses its machine")
        self.trainer.die(sockets_close=False)
        if self.keeper is not None:
            self.keeper.stop()
        self._restart_later()

    def end(self, trainer: Trainer) -> None:
        """The processes end by themselves."""
        if trainer.alive:
            trainer.die(sockets_close=True)
            if self.keeper is not None:
                self.keeper.stop()
            self._restart_later()

    def left(self, trainer: Trainer) -> None:
        """The keeper has written the goodbye."""
        if trainer.alive and trainer.goodbye is not None:
            self.world.say(self.name, "has left")
            trainer.die(sockets_close=True)
            self.wanted = False

    def _restart_later(self) -> None:
        delay = self.world.between(0.2, 3.0)
        self.world.after(delay, self._restart, self.world.chance(0.3))

    def _restart(self, from_checkpoint: bool) -> None:
        if self.keeper is not None and self.keeper.alive:
            self.world.after(0.5, self._restart, from_checkpoint)  # the launcher waits for it
        else:
            self.start(from_checkpoint=from_checkpoint)

    def kill_keeper(self) -> None:
        """Kill the keeper; the trainer notices and starts another."""
        if self.keeper is None or not self.keeper.alive or self.trainer is None:
            return
        self.world.say(self.name, "keeper is killed")
        self.trainer.contact()
        self.keeper.stop()
        self.trainer.keeper = None
        self.world.after(self.world.between(0.1, 0.8), self._replace_keeper, self.trainer)

    def _replace_keeper(self, trainer: Trainer) -> None:
        if trainer is not self.trainer or not trainer.alive:
            return
        if not trainer.runs():
            self.world.after(0.3, self._replace_keeper, trainer)
            return
        self._start_keeper()

    # -- standing still ---------------------------------------------------------------------------

    def freeze_trainer(self, seconds: float) -> None:
        """SIGSTOP the trainer; its keeper notices after a while."""
        trainer = self.trainer
        if trainer is None or not trainer.runs():
            return
        self.world.say(self.name, "trainer is stopped for %.1f s", seconds)
        trainer.contact()
        trainer.frozen = True
        self.world.after(FREEZE_GRACE_S, self._notice_freeze, trainer, True)
        self.world.after(seconds, self._thaw_trainer, trainer)

    def _notice_freeze(self, trainer: Trainer, on: bool) -> None:
        if trainer.alive and trainer.frozen == on and self.keeper is not None and self.keeper.alive:
            self.keeper.hear(ev.Frozen(on))

    def _thaw_trainer(self, trainer: Trainer) -> None:
        if not trainer.alive or not trainer.frozen:
            return
        self.world.say(self.name, "trainer goes on")
        trainer.frozen = False
        self.world.after(self.world.between(0.0, 0.2), self._notice_freeze, trainer, False)
        if trainer.runs():
            trainer.thaw()

    def freeze_machine(self, seconds: float) -> None:
        """Suspend the whole machine."""
        if self.machine_frozen or self.trainer is None or not self.trainer.alive:
            return
        self.world.say(self.name, "machine is suspended for %.1f s", seconds)
        self.trainer.contact()
        self.machine_frozen = True
        if self.keeper is not None:
            self.etcd.link_changed(self.keeper)
        self.world.after(seconds, self.thaw_machine)

    def thaw_machine(self) -> None:
        """The machine goes on, unaware that time has passed."""
        if not self.machine_frozen:
            return
        self.world.say(self.name, "machine goes on")
        self.machine_frozen = False
        trainer, keeper = self.trainer, self.keeper
        first = self.world.chance(0.5)
        if first and trainer is not None and trainer.runs():
            trainer.thaw()
        if keeper is not None:
            keeper.thaw()
        if not first and trainer is not None and trainer.runs():
            trainer.thaw()

    # -- the network ------------------------------------------------------------------------------

    def set_cut(self, on: bool) -> None:
        """Cut this machine off from etcd, or connect it again."""
        if self.cut == on:
            return
        self.world.say(self.name, "is cut off from etcd" if on else "reaches etcd again")
        if self.trainer is not None:
            self.trainer.contact()
        self.cut = on
        if self.keeper is not None:
            self.etcd.link_changed(self.keeper)
