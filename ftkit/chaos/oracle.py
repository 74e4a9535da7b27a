"""Run all checks over a log and put the outcome into words.

Pure but for reading the folder; what each check decides stands in `checks`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ftkit.chaos import checks
from ftkit.chaos.checks import Outcome
from ftkit.chaos.log import Log, read

SHOWN = 5
"""Violations of one check that a report shows."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of all checks."""

    ok: bool
    """Nothing was found, and something was looked at."""
    num_violations: int
    steps: int
    """Committed steps of the surviving lineage."""
    replicas: tuple[str, ...]
    processes: int
    faults: int
    outcomes: tuple[Outcome, ...]


def judge(
    log: Log, *, max_pause_s: float | None = None, min_replicas: int = 1, strict: bool = False
) -> Verdict:
    """Run all checks; with `strict` a check that had nothing to look at fails too."""
    outcomes = (
        checks.readable(log),
        checks.one_state_per_version(log),
        checks.steps_rise_by_one(log),
        checks.epochs_rise(log),
        checks.agreement(log),
        checks.no_superseded_commit(log),
        checks.enough_members(log, min_replicas),
        checks.samples_once(log),
        checks.survivors_stay(log),
        checks.waits_bounded(log, max_pause_s),
    )
    steps = len(checks.lineage(log))
    num = sum(len(o.violations) for o in outcomes)
    return Verdict(
        ok=num == 0 and steps > 0 and (not strict or all(o.checked for o in outcomes)),
        num_violations=num,
        steps=steps,
        replicas=tuple(sorted({life.replica for life in log.lives})),
        processes=len(log.lives),
        faults=len(log.faults),
        outcomes=outcomes,
    )


def judge_folder(
    folder: Path, *, max_pause_s: float | None = None, min_replicas: int = 1, strict: bool = False
) -> Verdict:
    """Read the lines of all trainers in a folder and judge them."""
    return judge(read(folder), max_pause_s=max_pause_s, min_replicas=min_replicas, strict=strict)


def as_text(verdict: Verdict) -> str:
    """Return a report for a person: what was checked, how much of it, and the first violations."""
    lines = []
    for o in verdict.outcomes:
        state = "FAILED" if o.violations else "ok" if o.checked else "-"
        lines.append(f"  {state:6}  {o.name}: {'' if o.checked else 'not checked, '}{o.looked_at}")
        lines += [f"            {v.where}: {v.text}" for v in o.violations[:SHOWN]]
        if len(o.violations) > SHOWN:
            lines.append(f"            and {len(o.violations) - SHOWN} more")
    if not verdict.steps:
        end = "there is no committed step: nothing was proven"
    elif verdict.num_violations:
        end = f"{verdict.num_violations} violations"
    else:
        end = "no violation" if verdict.ok else "no violation, but not all was checked (--strict)"
    who = f"{verdict.steps} steps, {len(verdict.replicas)} replica groups, {verdict.processes} processes"
    return "\n".join([*lines, f"{end}; {who}"])
