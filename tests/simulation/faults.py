"""What goes wrong, and when: drawn from a seed, or written down by a test.

A fault is a name, a time, a replica index and a duration; the table at the end says what each name does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from simulation.replica import Job, Replica

from ftkit.core.model import Control


class Fault(NamedTuple):
    """One thing that goes wrong."""

    at: float
    what: str
    who: int = 0
    seconds: float = 1.0

    def __str__(self) -> str:
        return f"{self.at:.2f} s: {self.what} r{self.who} for {self.seconds:.2f} s"


def draw(rng: random.Random, *, window: float, most: int, kinds: list[str]) -> list[Fault]:
    """Draw some faults; a second one often follows closely on the first."""
    faults = []
    at = rng.uniform(0.0, window)
    for _ in range(rng.randint(1, most)):
        seconds = rng.choice((0.3, 1.0, 2.0, 4.0, 9.0)) * rng.uniform(0.7, 1.3)
        faults.append(Fault(at, rng.choice(kinds), rng.randrange(8), seconds))
        at = (at + rng.choice((0.05, 0.3, 1.0, 4.0)) * rng.random()) % window
        if rng.random() < 0.3:
            at = rng.uniform(0.0, window)
    return sorted(faults)


def strike(job: Job, fault: Fault) -> None:
    """Let a fault happen now."""
    replicas = [job.replicas[name] for name in sorted(job.replicas)]
    job.world.say("fault", "%s", fault)
    job.checks.mark_fault()
    KINDS[fault.what](job, replicas[fault.who % len(replicas)], fault.seconds)


def relief(job: Job) -> None:
    """End all that still goes wrong."""
    job.world.say("fault", "no more faults from here on")
    job.islands.clear()
    job.kill_sources = 0
    for bag in (job.luck, job.etcd.weather):
        for field in vars(bag):
            if field != "hits":
                setattr(bag, field, 0.0)
    if not job.etcd.up:
        job.etcd.start()
    for replica in job.replicas.values():
        replica.set_cut(False)
        replica.thaw_machine()
        if replica.trainer is not None and replica.trainer.frozen:
            replica._thaw_trainer(replica.trainer)
        if replica.keeper is not None:
            replica.keeper.to_ranks.slowest = 0.003
    for stream in job.etcd.streams:
        stream.lag = 0.004


def _for_a_while(bag: str, field: str, value: float) -> Callable[[Job, Replica, float], None]:
    def strike(job: Job, replica: Replica, seconds: float) -> None:
        target = job.luck if bag == "luck" else job.etcd.weather
        setattr(target, field, value)
        job.world.after(seconds, setattr, target, field, 0.0)

    return strike


def _cut(job: Job, replica: Replica, seconds: float) -> None:
    replica.set_cut(True)
    job.world.after(seconds, replica.set_cut, False)


def _island(job: Job, replica: Replica, seconds: float) -> None:
    """Part one member from the others; etcd is still reached."""
    job.islands[replica.name] = job.world.rng.randint(1, 2)
    job.world.after(seconds, job.islands.pop, replica.name, None)


def _isolate(job: Job, replica: Replica, seconds: float) -> None:
    _cut(job, replica, seconds)
    _island(job, replica, seconds)


def _isolate_most(job: Job, replica: Replica, seconds: float) -> None:
    for other in job.replicas.values():
        if other is not replica:
            _isolate(job, other, seconds)


def _outage(job: Job, replica: Replica, seconds: float, *, frozen: bool) -> None:
    if job.etcd.up:
        job.world.say("etcd", "stands still" if frozen else "is down")
        job.etcd.stop()
        job.world.after(seconds, _recover, job, seconds if frozen else 0.0)


def _recover(job: Job, frozen_for: float) -> None:
    if not job.etcd.up:
        job.world.say("etcd", "is back")
        job.etcd.start(frozen_for=frozen_for)


def _wipe(job: Job, replica: Replica, seconds: float) -> None:
    """Etcd goes down and comes back without its data."""
    if job.etcd.up:
        job.world.say("etcd", "is down")
        job.etcd.stop()
        job.world.after(min(seconds, 2.0), _come_back_empty, job)


def _come_back_empty(job: Job) -> None:
    if not job.etcd.up:
        job.world.say("etcd", "is back without its data")
        job.etcd.wipe()
        job.etcd.start()


def _slow_watch(job: Job, replica: Replica, seconds: float) -> None:
    if replica.keeper is not None and replica.keeper.alive:
        stream = job.world.rng.choice(replica.keeper.streams())
        stream.lag = 0.5
        job.world.after(seconds, setattr, stream, "lag", 0.004)


def _slow_members(job: Job, replica: Replica, seconds: float) -> None:
    """The watch of the member keys alone is slow: epochs name members that are not yet known."""
    if replica.keeper is not None and replica.keeper.alive:
        for stream in replica.keeper.streams():
            if stream.sections == ("members",):
                stream.lag = 1.0
                job.world.after(seconds, setattr, stream, "lag", 0.004)


def _slow_all(job: Job, replica: Replica, seconds: float) -> None:
    if replica.keeper is not None and replica.keeper.alive:
        for stream in replica.keeper.streams():
            stream.lag = 0.5
            job.world.after(seconds, setattr, stream, "lag", 0.004)


def _busy_keeper(job: Job, replica: Replica, seconds: float) -> None:
    """The keeper gets little of its processor: what it says reaches the ranks late."""
    if replica.keeper is not None and replica.keeper.alive:
        pipe = replica.keeper.to_ranks
        pipe.slowest = 0.5
        job.world.after(seconds, setattr, pipe, "slowest", 0.003)


def _break_watch(job: Job, replica: Replica, seconds: float) -> None:
    if replica.keeper is not None and replica.keeper.alive:
        job.world.rng.choice(replica.keeper.streams()).relist()


def _join(job: Job, replica: Replica, seconds: float) -> None:
    gone = [r for r in job.replicas.values() if not r.wanted]
    if gone:
        gone[0].wanted = True
        gone[0].start()
    elif len(job.replicas) < 6:
        job.add(f"r{len(job.replicas)}")


def _ask(what: str) -> Callable[[Job, Replica, float], None]:
    def strike(job: Job, replica: Replica, seconds: float) -> None:
        if job.etcd.up and sum(r.wanted for r in job.replicas.values()) > job.policy.min_replicas:
            job.etcd.put(f"control/{what}/{replica.name}", Control(what=what, replica_id=replica.name))

    return strike


def _kill_source(job: Job, replica: Replica, seconds: float) -> None:
    """See to it that somebody must heal, and crash a source or the healing member in the middle of that."""
    job.kill_sources += 1
    replica.crash()


def _crash_all(job: Job, replica: Replica, seconds: float) -> None:
    for other in list(job.replicas.values()):
        other.crash() if job.world.chance(0.7) else other.lose()


KINDS: dict[str, Callable[[Job, Replica, float], None]] = {
    "crash": lambda job, replica, seconds: replica.crash(),
    "lose machine": lambda job, replica, seconds: replica.lose(),
    "crash all": _crash_all,
    "kill keeper": lambda job, replica, seconds: replica.kill_keeper(),
    "stop trainer": lambda job, replica, seconds: replica.freeze_trainer(seconds),
    "suspend machine": lambda job, replica, seconds: replica.freeze_machine(seconds),
    "cut": _cut,
    "island": _island,
    "isolate": _isolate,
    "isolate most": _isolate_most,
    "etcd down": lambda job, replica, seconds: _outage(job, replica, seconds, frozen=False),
    "etcd frozen": lambda job, replica, seconds: _outage(job, replica, seconds, frozen=True),
    "wipe": _wipe,
    "slow watch": _slow_watch,
    "slow members": _slow_members,
    "slow watches": _slow_all,
    "break watch": _break_watch,
    "busy keeper": _busy_keeper,
    "lost writes": _for_a_while("weather", "lost", 0.4),
    "unanswered writes": _for_a_while("weather", "unanswered", 0.5),
    "doubled writes": _for_a_while("weather", "doubled", 0.5),
    "late writes": _for_a_while("weather", "late", 0.5),
    "split votes": _for_a_while("luck", "vote_split", 0.2),
    "bad collectives": _for_a_while("luck", "collective", 0.1),
    "bad rendezvous": _for_a_while("luck", "rendezvous", 0.3),
    "bad heals": _for_a_while("luck", "heal", 0.4),
    "bad updates": _for_a_while("luck", "update", 0.03),
    "join": _join,
    "drain": _ask("drain"),
    "evict": _ask("evict"),
    "kill source": _kill_source,
}
