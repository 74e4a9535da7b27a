"""Draw the pace of a run: committed steps per second over time, beside the fault-free pace, with its faults.

Pure: as text for a terminal, and as an SVG picture that needs nothing to be looked at but a browser.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ftkit.chaos.result import Result

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH, HEIGHT, EDGE = 960, 240, 40


def paces(commits: Sequence[float], seconds: float, num: int) -> list[float]:
    """Return the steps per second in each of `num` equal parts of the run."""
    part = seconds / num if num else 0.0
    counts = [0] * num
    for at in commits:
        if part > 0 and 0 <= at < seconds:
            counts[min(num - 1, int(at / part))] += 1
    return [count / part for count in counts] if part > 0 else []


def as_text(result: Result, width: int = 72) -> str:
    """Return one line of blocks, full height for the fault-free pace, and one that marks the faults."""
    num = max(1, min(width, int(result.seconds)))
    top = result.fault_free_steps_per_s or 1.0
    bars = "".join(
        BLOCKS[min(8, round(8 * min(1.0, pace / top)))] for pace in paces(result.commits, result.seconds, num)
    )
    marks = [" "] * num
    for strike in result.strikes:
        marks[max(0, min(num - 1, int((strike.at - result.begun) / result.seconds * num)))] = "^"
    unit = result.seconds / num
    return f"steps/s, full height {top:.1f}, {unit:.1f} s a column, ^ a fault:\n  {bars}\n  {''.join(marks)}"


def as_svg(result: Result) -> str:
    """Return a picture: the pace as an area, the fault-free pace as a line, each fault with its name."""
    num = max(1, min(WIDTH - 2 * EDGE, int(result.seconds)))
    values = paces(result.commits, result.seconds, num)
    top = 1.15 * max([result.fault_free_steps_per_s, *values, 1e-9])

    def x(seconds: float) -> float:
        return EDGE + (WIDTH - 2 * EDGE) * seconds / max(result.seconds, 1e-9)

    def y(pace: float) -> float:
        return HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * pace / top

    part = result.seconds / num
    points = " ".join(f"{x((i + 0.5) * part):.1f},{y(v):.1f}" for i, v in enumerate(values))
    base, level = y(0.0), y(result.fault_free_steps_per_s)
    goal = f"fault-free: {result.fault_free_steps_per_s:.1f} steps/s"
    left, right = f"{x(0):.1f},{base:.1f}", f"{x(result.seconds):.1f},{base:.1f}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<polygon points="{left} {points} {right}" fill="#9ec5e8"/>',
        f'<line x1="{EDGE}" x2="{WIDTH - EDGE}" y1="{level:.1f}" y2="{level:.1f}" stroke="#333" '
        'stroke-dasharray="4 3"/>',
        f'<text x="{EDGE}" y="{level - 4:.1f}">{goal}</text>',
    ]
    for strike in result.strikes:
        at = x(strike.at - result.begun)
        lines.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{EDGE}" y2="{base:.1f}" stroke="#c33" opacity="0.5">'
            f"<title>{escape(strike.text)}: {strike.longest_pause_s:.2f} s</title></line>"
        )
    title = f"seed {result.seed}: goodput {100 * result.goodput:.1f} %, {len(result.strikes)} faults"
    end = f"{result.seconds:.0f} s"
    lines += [
        f'<text x="{EDGE}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{EDGE}" y="{HEIGHT - 20}">0</text>',
        f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 20}" text-anchor="end">{end}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
