"""Turn a report into text for a terminal; plain, without any library."""

from __future__ import annotations

from collections.abc import Sequence

from ftkit.dashboard.report import Member, Report


def duration(seconds: float) -> str:
    """Return a time in words: 0.4 s, 12 s, 3m 20s, 2h 5m, 4d 1h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for unit, smaller, size, small in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // small}{smaller}"
    return f"{whole} s"


def count(number: int, thing: str) -> str:
    """Return a number of things: 1 group, 2 groups."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def size(num_bytes: float) -> str:
    """Return a number of bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns; the last one is left as it is."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def render(report: Report) -> str:
    """Return the whole report as text."""
    head = f"job {report.job}: {report.state}"
    if report.epoch:
        age = "" if report.epoch_age_s is None else f" for {duration(report.epoch_age_s)}"
        why = f" ({report.epoch_reason})" if report.epoch_reason else ""
        head += f", epoch {report.epoch}{age}{why}"
    if report.step is not None:
        head += f", step {report.step}"
    lines = [head]
    if report.reason:
        lines.append(f"  {report.reason}")
    if report.members:
        num = sum(m.live for m in report.members)
        lines.append(
            f"  {count(num, 'replica group')} live, at least {report.min_replicas} must be in an epoch"
        )
        lines += ["", *table([_HEADER, *map(_row, report.members)])]
    for title, items in (
        ("departed lately", report.departed),
        ("requests not yet acknowledged", report.requests),
        ("keys that cannot be read", report.broken),
    ):
        if items:
            lines += ["", f"{title}:", *(f"  {item}" for item in items)]
    return "\n".join(lines)


_HEADER = ("rank", "replica", "step", "steps/s", "compute", "wait", "healed", "process", "note")


def _row(member: Member) -> tuple[str, ...]:
    note = member.note
    if member.heals_from:
        note = "; ".join(filter(None, (f"heals from {', '.join(member.heals_from)}", note)))
    return (
        "-" if member.rank is None else str(member.rank),
        member.replica_id,
        "-" if member.step is None else str(member.step),
        "-" if member.steps_per_s is None else f"{member.steps_per_s:.2f}",
        _milliseconds(member.compute_s),
        _milliseconds(member.wait_s),
        "-" if not member.bytes_healed else size(member.bytes_healed),
        f"{member.host}:{member.pid}" if member.live else "-",
        note or member.phase,
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
