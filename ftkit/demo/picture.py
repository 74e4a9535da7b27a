"""Draw the loss over time with what happened marked on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftkit.demo.recovery import Recovery
from ftkit.demo.story import Story

_FAULTS = {"SIGKILL": "#c0392b", "SIGSTOP": "#8e44ad"}
_BACK = "#1e8449"
_LOSS = "#1f4e79"


def draw(story: Story, recoveries: list[Recovery], begun: float, path: Path) -> None:
    """Write a PNG: above the loss of each committed step, below how many replicas took part."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    points = [(at - begun, loss) for at, _, loss in story.losses()]
    times = [t for t, _ in points]
    above.plot(times, [loss for _, loss in points], color=_LOSS, lw=0.8, alpha=0.35)
    above.plot(times, _smooth([loss for _, loss in points]), color=_LOSS, lw=1.8, label="training")
    held_out = sorted((e.monotonic - begun, e.loss) for e in story.evals.values())
    if held_out:
        above.plot(*zip(*held_out, strict=True), "o", color="#d68910", ms=6, label="held-out text")
    above.set_ylabel("loss (nats per byte)")
    above.set_title("Loss of each committed step, and what happened meanwhile", loc="left")
    above.grid(alpha=0.25)
    above.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, borderaxespad=0.2)
    above.margins(x=0.02)

    counts = [len(s.members) for s in story.lineage()]
    below.step(times, counts, where="post", color=_LOSS, lw=1.6)
    below.fill_between(times, counts, step="post", color=_LOSS, alpha=0.15)
    below.set_ylim(0, max(counts, default=1) + 0.5)
    below.set_yticks(range(max(counts, default=1) + 1))
    below.set_ylabel("replicas")
    below.set_xlabel("seconds since all replicas trained together")
    below.grid(alpha=0.25)

    top = max((loss for _, loss in points), default=1.0)
    low = min((loss for _, loss in points), default=0.0)
    for recovery in recoveries:
        _mark(above, below, recovery, begun, top, low)
    figure.savefig(path)


def _mark(above: Any, below: Any, recovery: Recovery, begun: float, top: float, low: float) -> None:
    """Mark one fault: when it happened, how long the others stood, and when the victim was back."""
    fault = recovery.fault
    colour = _FAULTS[fault.kind]
    at = fault.at - begun
    pause = recovery.longest_pause_ms
    text = f"{fault.kind} {fault.victim}" + ("" if pause is None else f"\npause {pause:,.0f} ms")
    moments = [(at, colour, text, top)]
    if recovery.back is not None:
        zero = fault.at if fault.thawed_at is None else fault.thawed_at
        returned = zero + recovery.back.first_commit_ms / 1000 - begun
        moments.append(
            (
                returned,
                _BACK,
                f"{fault.victim} back\nhealed {recovery.back.healed_bytes / 1e6:.1f} MB",
                top - 0.2 * (top - low),
            )
        )
    for axes in (above, below):
        if recovery.first_commit_ms is not None:
            axes.axvspan(at, at + recovery.first_commit_ms / 1000, color=colour, alpha=0.18, lw=0)
        for when, line_colour, _, _ in moments:
            axes.axvline(when, color=line_colour, lw=1.2, ls="--")
    right = above.get_xlim()[1]
    for when, line_colour, label, height in moments:
        outward = when < 0.85 * right  # the text stands on the side where there is room for it
        above.annotate(
            label, (when, height), xytext=(5 if outward else -5, 0), textcoords="offset points",
            va="top", ha="left" if outward else "right", fontsize=9, color=line_colour,
        )  # fmt: skip


def _smooth(values: list[float], weight: float = 0.8) -> list[float]:
    """Return the running mean that forgets exponentially."""
    smooth: list[float] = []
    for value in values:
        smooth.append(value if not smooth else weight * smooth[-1] + (1 - weight) * value)
    return smooth
