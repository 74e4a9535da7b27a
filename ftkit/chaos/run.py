"""Run a job, carry a plan of faults out on it, end it, and judge what its logs tell."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ftkit.chaos.checks import pauses
from ftkit.chaos.cost import longest_pauses
from ftkit.chaos.faults import Fault
from ftkit.chaos.gauges import leaks
from ftkit.chaos.job import LOOK_S, Job, Setup
from ftkit.chaos.log import read
from ftkit.chaos.oracle import judge
from ftkit.chaos.result import Result, Strike


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a run must keep to."""

    seconds: float | None
    """In which faults strike; None: until all have."""
    calm_s: float
    """Fault-free time before, whose speed is the measure."""
    patience_s: float
    """How long all groups may need until they train together; a restart imports torch on a busy machine."""
    max_pause_s: float
    min_goodput: float


def say(text: str) -> None:
    """Tell of progress."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def run_faults(job: Job, faults: Sequence[Fault], begun: float, bounds: Bounds) -> tuple[list[Strike], int]:
    """Carry the plan out, each fault at its time or as soon as it may; return what was done."""
    strikes: list[Strike] = []
    todo = list(faults)
    waiting_since: float | None = None
    while not job.trouble:
        now = job.look()
        if now - begun >= bounds.seconds if bounds.seconds is not None else not todo:
            break
        if todo and now - begun >= todo[0].at:
            waiting_since = waiting_since or now
            if job.ready_for(todo[0]):
                fault = todo.pop(0)
                say(f"{now - begun:6.1f} s  {fault}")
                strikes.append(Strike(fault=fault, at=time.monotonic(), text=str(fault)))
                job.strike(fault)
                waiting_since = None
            elif now - waiting_since > bounds.patience_s:
                job.trouble = f"the job did not recover within {bounds.patience_s:g} s before {todo[0]}"
        time.sleep(LOOK_S)
    return strikes, len(todo)


def play(setup: Setup, bounds: Bounds, faults: Sequence[Fault], seed: int) -> Result:
    """Run the job, break it, end it and judge it."""
    job = Job(setup)
    strikes: list[Strike] = []
    skipped, begun, until, rate = len(faults), 0.0, 0.0, 0.0
    etcd_bytes: list[int] = []
    try:
        job.start()
        say(f"{setup.groups} replica groups are starting; logs are in {setup.folder}")
        if not job.wait_together(2 * bounds.patience_s):
            job.trouble = job.trouble or "the groups did not come together at the start"
        calm_from = time.monotonic()
        while not job.trouble and job.look() < calm_from + bounds.calm_s:
            time.sleep(LOOK_S)
        begun = time.monotonic()
        rate = count_steps(job, calm_from, begun) / bounds.calm_s
        say(f"calm: {rate:.1f} steps/s; now up to {len(faults)} faults")
        if not job.trouble:
            etcd_bytes.append(job.etcd.db_bytes())
            strikes, skipped = run_faults(job, faults, begun, bounds)
        until = time.monotonic()
        job.undo_all()
        if not job.trouble and not job.wait_together(bounds.patience_s):
            job.trouble = f"not all groups trained together within {bounds.patience_s:g} s after the end"
        etcd_bytes.append(job.etcd.db_bytes())
    finally:
        job.end()
    log = read(job.journal)
    verdict = judge(log, max_pause_s=bounds.max_pause_s, min_replicas=setup.min_replicas, strict=True)
    times = [(x.at, "" if x.fault.victim < 0 else job.names[x.fault.victim]) for x in strikes]
    for strike, longest in zip(strikes, longest_pauses(pauses(log), times), strict=True):
        strike.longest_pause_s = round(longest, 3)
    growth = job.gauges.growth()
    leaking = leaks(growth, etcd_bytes)
    steps = count_steps(job, begun, until)
    expected = rate * (until - begun)
    goodput = round(steps / expected, 4) if expected else 0.0
    return Result(
        ok=verdict.ok and not job.trouble and not leaking and goodput >= bounds.min_goodput,
        seed=seed,
        trouble=job.trouble,
        goodput=goodput,
        steps=steps,
        fault_free_steps_per_s=round(rate, 3),
        seconds=round(until - begun, 1),
        num_skipped=skipped,
        begun=begun,
        strikes=strikes,
        commits=[round(s.monotonic - begun, 2) for s in job.story.lineage() if begun <= s.monotonic < until],
        growth=growth,
        etcd_bytes=etcd_bytes,
        leaks=leaking,
        verdict=verdict,
        folder=str(setup.folder),
    )


def count_steps(job: Job, since: float, until: float) -> int:
    """Count the committed steps that lived on."""
    return sum(since <= s.monotonic < until for s in job.story.lineage())
