"""Say what the demo has shown: as one value for machines, and as text for people.

Pure: it computes nothing that the recoveries and checks do not say.
"""

from __future__ import annotations

import msgspec

from ftkit.demo.checks import Check
from ftkit.demo.recovery import Recovery
from ftkit.demo.story import Story


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a demo."""

    ok: bool
    trouble: str
    """What did not happen in time; empty when all did."""
    replicas: tuple[str, ...]
    seed: int
    seconds: float
    steps: int
    usual_step_ms: float | None
    """Median time between two commits when nothing happens."""
    recoveries: tuple[Recovery, ...]
    checks: tuple[Check, ...]
    held_out: tuple[tuple[int, float], ...]
    """(step, loss) on held-out text."""
    ends: dict[str, str]
    """The version at which each replica left."""
    picture: str
    folder: str


def make_report(
    story: Story,
    recoveries: list[Recovery],
    checks: list[Check],
    *,
    trouble: str,
    replicas: tuple[str, ...],
    seed: int,
    seconds: float,
    picture: str,
    folder: str,
) -> Report:
    """Put it all together."""
    usual = story.usual_step_s()
    lineage = story.lineage()
    return Report(
        ok=not trouble and all(c.ok for c in checks),
        trouble=trouble,
        replicas=replicas,
        seed=seed,
        seconds=round(seconds, 1),
        steps=lineage[-1].step if lineage else 0,
        usual_step_ms=None if usual is None else round(1000 * usual, 1),
        recoveries=tuple(recoveries),
        checks=tuple(checks),
        held_out=tuple(sorted((e.step, round(e.loss, 4)) for e in story.evals.values())),
        ends={e.replica: e.version for e in story.ends},
        picture=picture,
        folder=folder,
    )


def as_text(report: Report) -> str:
    """Return the report as a person reads it."""
    lines = [f"{report.steps} steps in {report.seconds:.0f} s"]
    if report.usual_step_ms is not None:
        lines[0] += f", {report.usual_step_ms:.0f} ms each while nothing happens"
    for recovery in report.recoveries:
        lines += ["", *_recovery(recovery)]
    lines.append("")
    lines += [f"{'ok  ' if c.ok else 'FAIL'}  {c.name}: {c.detail}" for c in report.checks]
    if report.trouble:
        lines.append(f"FAIL  {report.trouble}")
    lines += ["", f"loss curve: {report.picture or 'none (matplotlib is not installed)'}"]
    lines.append(f"logs: {report.folder}")
    return "\n".join(lines)


def _recovery(r: Recovery) -> list[str]:
    fault = r.fault
    what = "killed" if fault.kind == "SIGKILL" else "frozen with its keeper"
    head = f"{fault.kind}: {fault.victim} was {what} in epoch {fault.epoch}; ms since then:"
    rows: list[tuple[str, float | None]] = [
        ("the first survivor gives up the epoch", r.detected_ms),
        ("nothing is in flight any more", r.aborted_ms),
        (f"epoch {r.epoch or '?'} is agreed on", r.epoch_ms),
        ("the process groups are configured", r.configured_ms),
        ("every survivor has committed a step", r.first_commit_ms),
    ]
    lines = [head, *_rows(rows)]
    lines.append(f"    {_pauses(r.pause_ms)} pause of the survivors, commit to commit; "
                 f"{r.repeated_steps} attempts at a step were repeated")  # fmt: skip
    if r.back is None:
        return [*lines, "  it did not come back"]
    since = "SIGCONT" if fault.thawed_at is not None else "the fault"
    lines.append(f"  back in epoch {r.back.epoch}; ms since {since}:")
    size = f"{r.back.healed_bytes / 1e6:.1f} MB"
    rows = [
        ("the new process is ready to join", r.back.started_ms),
        ("it begins to receive the live state", r.back.healing_ms),
        (f"it is healed ({size} in {1000 * r.back.heal_s:.0f} ms)", r.back.healed_ms),
        ("it has committed a step", r.back.first_commit_ms),
    ]
    return [*lines, *_rows(rows), f"    {_pauses(r.back.pause_ms)} pause of the others while it joined"]


def _rows(rows: list[tuple[str, float | None]]) -> list[str]:
    return [f"  {ms:9,.1f}  {text}" for text, ms in rows if ms is not None]


def _pauses(pauses: dict[str, float]) -> str:
    if not pauses:
        return "unknown"
    low, high = min(pauses.values()), max(pauses.values())
    return f"{high:,.0f} ms" if high - low < 1 else f"{low:,.0f} to {high:,.0f} ms"
