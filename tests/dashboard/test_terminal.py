"""The live view in a terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from ftkit.core.model import Policy
from ftkit.dashboard.board import Board
from ftkit.dashboard.terminal import screen, sparkline
from tests.dashboard.test_board import Key, Scene, past, record, running


def drawn(scene: Scene, height: int = 40, width: int = 120) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=False)
    console.print(screen(scene.look(), time.time(), height))
    return out.getvalue().splitlines()


def test_it_shows_members_reason_and_events() -> None:
    scene = Scene()
    scene.list({**running("t0", "t1"), "members/[bold]t9": record("[bold]t9")}, history=(past(6, "t0"),))
    scene.put("stats/t0", {"step": 60, "epoch": 7, "steps_per_s": 2.5, "incarnation": "i"})
    scene.put("members/t1", None)
    text = "\n".join(drawn(scene))
    for part in (
        "job j",
        "epoch 7",
        "suspect",
        "2.50",
        "h:7",
        "has lost t1",
        "[bold]t9",
        "t1 is no longer live",
    ):
        assert part in text


@pytest.mark.parametrize("height", [12, 24, 50])
def test_it_fits_into_the_terminal(height: int) -> None:
    """What does not fit would push the top, with the state, out of sight."""
    scene = Scene()
    names = [f"t{i:02d}" for i in range(60)]
    scene.list(running(*names), history=tuple(past(i, *names) for i in range(1, 7)))
    lines = drawn(scene, height)
    assert len(lines) <= height
    assert any("more" in line for line in lines)


def test_an_epoch_of_a_strange_time_is_shown() -> None:
    board = Board("j", Policy())
    board.listed([Key("/ftkit/j/epoch", b'{"id": 1, "seats": [], "time": 1e300}')], (), 1.0)
    Console(file=io.StringIO(), width=80).print(screen(board.snapshot(1.0, 1.0), 1.0, 30))


def test_small_bars() -> None:
    assert sparkline([0.0, 1.0, 2.0]) == "▁▅█"
    assert sparkline([0.0]) == "▁"
    assert sparkline([]) == ""
