"""The outcome of a run of faults, and how it is told. Pure."""

from __future__ import annotations

import msgspec

from ftkit.chaos.faults import Fault
from ftkit.chaos.gauges import Growth
from ftkit.chaos.oracle import Verdict, as_text


class Strike(msgspec.Struct, kw_only=True):
    """A fault that was carried out and what it cost."""

    fault: Fault
    at: float
    text: str
    longest_pause_s: float = 0.0
    """Of all processes but its victim."""


class Result(msgspec.Struct, kw_only=True):
    """The outcome of a run."""

    ok: bool
    seed: int
    trouble: str
    goodput: float
    steps: int
    fault_free_steps_per_s: float
    seconds: float
    num_skipped: int
    begun: float
    """When the faults began; the clock of `strikes`."""
    strikes: list[Strike]
    commits: list[float]
    """When each step of the surviving lineage was committed, seconds after `begun`."""
    growth: list[Growth]
    etcd_bytes: list[int]
    """Size of etcd's database before the first fault and after the last."""
    leaks: list[str] = []
    """What did not stay flat."""
    verdict: Verdict
    folder: str


def report(result: Result) -> str:
    """Put a result into words."""
    lines = [f"  {s.longest_pause_s:6.2f} s  {s.text}" for s in result.strikes]
    lines = ["longest pause of the others after each fault:", *lines, as_text(result.verdict)]
    if result.growth:
        most = {k: max(getattr(g, k) for g in result.growth) for k in ("descriptors", "threads", "rss_kib")}
        lines.append(
            f"most growth of one of {len(result.growth)} processes that lived on: {most['descriptors']} "
            f"descriptors, {most['threads']} threads, {most['rss_kib']} KiB"
        )
    sizes = " and then ".join(f"{size // 1024} KiB" for size in result.etcd_bytes)
    lines.append(f"database of etcd: {sizes}")
    lines += [f"  FAILED  {leak}" for leak in result.leaks]
    if result.num_skipped:
        lines.append(f"{result.num_skipped} faults of the plan were not reached in time")
    pace = (
        f"{result.steps} steps in {result.seconds:g} s, {result.fault_free_steps_per_s:.1f} a second before"
    )
    lines.append(f"goodput {100 * result.goodput:.1f} %: {pace}")
    if result.trouble:
        lines.append(f"TROUBLE: {result.trouble}")
    lines.append(f"{'ok' if result.ok else 'FAILED'}; seed {result.seed}; logs are in {result.folder}")
    return "\n".join(lines)
