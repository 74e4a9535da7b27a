"""Run one schedule: a job, its faults, then peace, and the question whether all is well again.

outcome = run(draw_schedule(seed=7))
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from simulation.checks import Checks
from simulation.faults import KINDS, Fault, draw, relief, strike
from simulation.replica import Job, Replica
from simulation.world import Violation, World, tell

from ftkit.core.machine import Member
from ftkit.core.model import Policy

TTL_S = 1.0
PEACE_S = 60.0
"""I6: so long after the last fault everybody must be at work again."""
STEPS_IN_PEACE = 3
EPOCHS_PER_CAUSE = 6
MOST_BETWEEN_COMMITS_S = 1.0

POLICY = Policy(
    join_timeout=4.0,
    gather_window=0.1,
    takeover_after=7.0,
    outage_grace=3.0,
    freeze_grace=0.4,
    leave_grace=0.25,
)


@dataclass(frozen=True)
class Schedule:
    """All that a run depends on."""

    seed: object
    num_replicas: int = 3
    min_replicas: int = 1
    max_replicas: int = 0
    window: float = 12.0
    faults: tuple[Fault, ...] = ()
    expect: str = ""
    """`outage` or `wipe`: that alone goes wrong, and more is expected than in general."""


@dataclass
class Outcome:
    """What came of a run."""

    schedule: Schedule
    violation: str = ""
    invariant: str = ""
    num_commits: int = 0
    num_epochs: int = 0
    num_events: int = 0
    seconds: float = 0.0
    checks: Checks | None = None
    story: list[tuple[float, str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.schedule}", tell(self.story), self.violation or "all is well"]
        return "\n".join(lines)


WITHOUT_WIPE = [k for k in KINDS if k != "wipe"]


def draw_schedule(seed: int, *, kinds: list[str] | None = None, most: int = 6) -> Schedule:
    """Draw a schedule."""
    rng = random.Random(f"schedule {seed}")
    num = rng.choice((1, 2, 2, 3, 3, 3, 4, 5))
    return Schedule(
        seed=seed,
        num_replicas=num,
        min_replicas=rng.choice((1, 1, 1, min(2, num))),
        max_replicas=rng.choice((0, 0, 0, max(2, num - 1))),
        faults=tuple(draw(rng, window=9.0, most=most, kinds=kinds or WITHOUT_WIPE)),
    )


def run(
    schedule: Schedule,
    *,
    member_class: type[Member] = Member,
    keep_story: bool = False,
    watch: Callable[[Job], None] | None = None,
) -> Outcome:
    """Run a schedule to its end or to the first violation."""
    world = World(seed=schedule.seed, keep_story=keep_story)
    policy = POLICY
    if schedule.min_replicas != 1 or schedule.max_replicas:
        changes = {"min_replicas": schedule.min_replicas, "max_replicas": schedule.max_replicas}
        policy = Policy(**{**{f: getattr(POLICY, f) for f in POLICY.__struct_fields__}, **changes})
    job = Job(world, policy, TTL_S, member_class)
    job.checks.forgiving = any(f.what == "wipe" for f in schedule.faults)
    outcome = Outcome(schedule)
    try:
        _play(job, schedule)
        if watch is not None:
            watch(job)
    except Violation as violation:
        outcome.violation, outcome.invariant = str(violation), violation.invariant
        if schedule.expect == "wipe":
            outcome.invariant = "I8"
    except Exception as error:
        outcome.violation = f"error: {error!r}\n{traceback.format_exc()}"
        outcome.invariant = "error"
    outcome.num_commits = len(job.checks.states) - 1
    outcome.num_epochs, outcome.num_events = job.checks.num_epochs, world.num_events
    outcome.seconds, outcome.story, outcome.checks = world.now, world.story, job.checks
    return outcome


def _play(job: Job, schedule: Schedule) -> None:
    world = job.world
    for i in range(schedule.num_replicas):
        job.replicas[f"r{i}"] = replica = Replica(job, f"r{i}")
        world.after(world.rng.choice((0.0, 0.05, 0.4)) * world.rng.random(), replica.start)
    for fault in schedule.faults:
        world.after(fault.at, strike, job, fault)
    world.run(schedule.window)
    relief(job)
    begun = world.now
    world.run(begun + PEACE_S, lambda: world.num_events % 16 == 0 and _all_is_well(job, begun))
    if not _all_is_well(job, begun):
        raise Violation("I6", f"{PEACE_S:g} s after the last fault: {_complain(job)}")
    _bound_epochs(job, schedule)
    if schedule.expect == "outage":
        _no_step_lost(job)
    elif schedule.expect == "wipe":
        _nothing_forgotten(job)


def _no_step_lost(job: Job) -> None:
    """I7: an outage shorter than `outage_grace` costs nothing; nor does the loss of all leases at once."""
    checks = job.checks
    assert checks.first_fault is not None, "there was a fault"
    if checks.failures:
        when, name, why = checks.failures[0]
        raise Violation("I7", f"at {when:.3f} {name} lost its step: {why}")
    if checks.num_epochs > checks.first_fault[0]:
        raise Violation("I7", f"{checks.num_epochs - checks.first_fault[0]} new epochs after an outage")
    if checks.longest_gap > MOST_BETWEEN_COMMITS_S:
        raise Violation("I7", f"no commit for {checks.longest_gap:.2f} s")


def _nothing_forgotten(job: Job) -> None:
    """I8: who was at work when etcd lost its data goes on from there, newcomers or not."""
    checks = job.checks
    assert checks.first_fault is not None, "there was a fault"
    num_epochs, steps = checks.first_fault
    for trainer in job.trainers():
        if trainer.lineage.version.step < steps.get(trainer.incarnation, 0):
            raise Violation("I8", f"{trainer.name} went back to {trainer.lineage.version}")
    if checks.num_epochs > num_epochs + 10:
        raise Violation("I8", f"{checks.num_epochs - num_epochs} epochs written after a wipe")


def _all_is_well(job: Job, since: float) -> bool:
    """I6: all live members, as far as there is room, commit together again."""
    replicas = [r for r in job.replicas.values() if r.wanted]
    if not replicas:
        return True
    trainers = [r.trainer for r in replicas]
    if any(t is None or not t.alive for t in trainers):
        return False
    at_work = [t for t in trainers if t is not None and t.want is None and t.goodbye is None]
    room = job.policy.max_replicas or len(trainers)
    if len(at_work) < min(room, len(trainers)):
        return len(trainers) < job.policy.min_replicas
    if len({(t.entered.id, t.entered.seats) for t in at_work if t.entered is not None}) != 1:
        return False
    lived = job.checks.lived.get((at_work[0].entered.id, at_work[0].entered.seats))  # type: ignore[union-attr]
    return lived is not None and sum(when > since for when in lived.commits.values()) >= STEPS_IN_PEACE


def _complain(job: Job) -> str:
    parts = []
    for replica in job.replicas.values():
        trainer = replica.trainer
        if trainer is None or not trainer.alive:
            parts.append(f"{replica.name} is {'off' if not replica.wanted else 'dead'}")
        else:
            epoch = 0 if trainer.entered is None else trainer.entered.id
            parts.append(f"{replica.name} {trainer.phase} at {trainer.lineage.version} in {epoch}")
    return "; ".join(parts) + f"; {job.checks.num_epochs} epochs"


def _bound_epochs(job: Job, schedule: Schedule) -> None:
    """No livelock: each fault may cost some epochs, not an avalanche of them."""
    causes = len(schedule.faults) + schedule.num_replicas + job.luck.hits
    if job.checks.num_epochs > EPOCHS_PER_CAUSE * causes:
        raise Violation("I6", f"livelock: {job.checks.num_epochs} epochs for {causes} causes")


def draw_any(seed: int) -> Schedule:
    """Draw a schedule of any kind: in every eighth etcd may lose its data, every eighth is special."""
    if seed % 16 == 3:
        return draw_outage(seed)
    if seed % 16 == 11:
        return draw_wipe(seed)
    if seed % 16 == 5:
        return draw_takeover(seed)
    return draw_schedule(seed, kinds=list(KINDS) if seed % 8 == 7 else None)


def draw_outage(seed: int) -> Schedule:
    """Draw a schedule in which only etcd is away, for a while that must cost nothing."""
    rng = random.Random(f"outage {seed}")
    most = POLICY.outage_grace - TTL_S - 0.1
    faults = [
        Fault(4.0 + 6.0 * i, rng.choice(("etcd down", "etcd frozen")), 0, rng.uniform(0.1, most))
        for i in range(rng.randint(1, 2))
    ]
    num = rng.choice((1, 2, 3, 4, 5))
    return Schedule(seed=seed, num_replicas=num, window=14.0, faults=tuple(faults), expect="outage")


def draw_wipe(seed: int) -> Schedule:
    """Draw a schedule in which etcd loses its data, and newcomers may be faster than the members."""
    rng = random.Random(f"wipe {seed}")
    away = rng.uniform(0.0, 1.5)
    faults = [Fault(4.0, "wipe", 0, away)]
    for _ in range(rng.randint(0, 2)):
        faults.append(Fault(4.0 + away + rng.uniform(-0.5, 0.5), "join"))
    num = rng.choice((1, 2, 3, 4))
    slow = range(num) if rng.random() < 0.5 else [rng.randrange(5)]
    faults += [Fault(3.9, "slow watches", i, 0.5 + away) for i in slow]
    return Schedule(seed=seed, num_replicas=num, window=14.0, faults=tuple(sorted(faults)), expect="wipe")


def draw_takeover(seed: int) -> Schedule:
    """Draw a schedule in which all members of an epoch are away, perhaps for long enough to be replaced.

    A newcomer waits for its chance; it may itself lose sight of etcd while they come back.
    """
    rng = random.Random(f"takeover {seed}")
    at = rng.uniform(2.0, 3.0)
    away = rng.choice((2.0, 4.0, 14.0)) * rng.uniform(0.8, 1.1)
    num = rng.choice((1, 1, 2))
    ways = ["cut", "isolate", "suspend machine", "lose machine"]
    faults = [Fault(at + rng.uniform(0.0, 0.3), rng.choice(ways), i, away) for i in range(num)]
    faults += [Fault(at + rng.uniform(0.3, 2.0), "join") for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.7:
        ways = ["cut", "suspend machine"]
        faults.append(Fault(at + rng.uniform(1.0, 2.5), rng.choice(ways), num, rng.uniform(5.0, 14.0)))
    for _ in range(rng.randint(0, 2)):
        kinds = ["slow watches", "slow members", "late writes", "kill keeper", "crash"]
        faults.append(Fault(at + rng.uniform(0.0, 14.0), rng.choice(kinds), rng.randrange(4), 6.0))
    return Schedule(
        seed=seed,
        num_replicas=num,
        max_replicas=rng.choice((0, 0, num)),
        window=22.0,
        faults=tuple(sorted(faults)),
    )
