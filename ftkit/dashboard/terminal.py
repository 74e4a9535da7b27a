"""Show the feed live in a terminal, with rich (the extra `dashboard`)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ftkit.dashboard.board import Row, Snapshot, counted
from ftkit.dashboard.feed import Feed
from ftkit.dashboard.text import duration, size

_STATES = {
    "training": "bold green",
    "forming": "bold blue",
    "waiting": "bold yellow",
    "empty": "bold red",
    "in epoch": "green",
    "healing": "blue",
    "starting": "dim",
    "spare": "magenta",
    "leaving": "yellow",
    "suspect": "red",
    "gone": "red",
}
_BARS = "▁▂▃▄▅▆▇█"
_REFRESH_S = 1.0


def follow(feed: Feed, console: Console) -> None:
    """Show the job until the feed ends or the user does (Ctrl-C)."""
    number, snapshot = 0, None
    with Live(Text("reading the job from etcd …"), console=console, screen=True, auto_refresh=False) as live:
        while not feed.closed:
            update = feed.wait_newer(number, _REFRESH_S)
            if update is not None:
                number, snapshot = update.number, update.snapshot
            if snapshot is not None:
                live.update(screen(snapshot, time.time(), console.height), refresh=True)
    feed.wait_end(0)


def screen(snapshot: Snapshot, wall: float, height: int) -> RenderableType:
    """Return one picture of the job that fits into so many lines."""
    head = Text.assemble(
        "job ",
        (snapshot.job, "bold"),
        "  ",
        (snapshot.state, _STATES.get(snapshot.state, "")),
        f"  epoch {snapshot.epoch}" if snapshot.epoch else "",
        "" if snapshot.epoch_time is None else f" for {duration(max(0.0, wall - snapshot.epoch_time))}",
        f" ({snapshot.epoch_reason})" if snapshot.epoch_reason else "",
        "" if snapshot.step is None else f"  step {snapshot.step}",
    )
    parts: list[RenderableType] = [head]
    if snapshot.etcd_error:
        parts.append(Text(f"etcd: {snapshot.etcd_error}", style="bold red"))
    if snapshot.reason:
        parts.append(Text(snapshot.reason, style="yellow"))
    rates = [rate for _, rate in snapshot.rates]
    if rates:
        parts.append(Text.assemble("steps/s ", (sparkline(rates[-60:]), "blue"), f" {rates[-1]:.2f}"))
    parts.append(Text(f"{counted(snapshot.counts) or 'no members'}, at least {snapshot.min_replicas} needed"))
    parts.append(Text())
    notes = [
        *(f"request: {r}" for r in snapshot.requests),
        *(f"cannot be read: {b}" for b in snapshot.broken),
    ]
    room = max(4, height - len(parts) - 4)
    rows = snapshot.rows[: max(3, room - min(8, room // 3))]
    parts.append(_members(rows))
    hidden = snapshot.num_hidden + len(snapshot.rows) - len(rows)
    if hidden:
        parts.append(Text(f"and {hidden} more", style="dim"))
    parts += [Text(note, style="yellow", no_wrap=True) for note in notes[:3]]
    left = max(0, room - len(rows) - min(3, len(notes)) - (1 if hidden else 0))
    parts += [Text(), *_moments(snapshot, left)]
    return Group(*parts)


def sparkline(values: Sequence[float]) -> str:
    """Return values as a line of small bars."""
    top = max([*values, 0.0]) or 1.0
    return "".join(_BARS[min(7, int(8 * max(0.0, v) / top))] for v in values)


def _members(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in (
        "rank",
        "replica",
        "state",
        "step",
        "steps/s",
        "compute",
        "wait",
        "healed",
        "process",
        "note",
    ):
        right = name in ("rank", "step", "steps/s", "compute", "wait", "healed")
        table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> Iterable[Text]:
    texts = (
        "-" if row.rank is None else str(row.rank),
        row.replica_id,
        row.state,
        "-" if row.step is None else str(row.step),
        "-" if row.steps_per_s is None else f"{row.steps_per_s:.2f}",
        "-" if row.compute_s is None else f"{row.compute_s * 1000:.1f} ms",
        "-" if row.wait_s is None else f"{row.wait_s * 1000:.1f} ms",
        size(row.bytes_healed) if row.bytes_healed else "-",
        f"{row.host}:{row.pid}" if row.pid else "-",
        row.note or row.phase,
    )
    # Text, not markup: a name may contain square brackets.
    return (Text(text, style=_STATES.get(row.state, "") if text == row.state else "") for text in texts)


def _moments(snapshot: Snapshot, number: int) -> list[RenderableType]:
    chosen = snapshot.moments[-number:] if number else ()
    return [Text(f"{_clock(m.time)}  {m.text}", no_wrap=True, overflow="ellipsis") for m in chosen]


def _clock(when: float | None) -> str:
    try:
        return "earlier " if when is None else time.strftime("%H:%M:%S", time.localtime(when))
    except (OverflowError, OSError, ValueError):
        return "?       "
