"""Show the demo while it runs: a live table in a terminal, plain lines elsewhere.

It shows what the story and the director say and decides nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import deque
from typing import Any, Protocol, TextIO

from ftkit.demo.director import Director
from ftkit.demo.journal import End, Event, Line, Start, Step
from ftkit.demo.story import Story

_SHOWN_NOTES = 10
_PLAIN_EVERY_S = 3.0


class View(Protocol):
    """Where progress is shown."""

    def note(self, text: str, now: float) -> None:
        """Tell of something that happened."""

    def update(self, story: Story, director: Director, now: float) -> None:
        """Show how things stand."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def open_view(out: TextIO, replicas: tuple[str, ...], now: float) -> View:
    """Return the live table for a terminal when rich is installed, plain lines otherwise."""
    if out.isatty() and importlib.util.find_spec("rich") is not None:
        return LiveView(out, replicas, now)
    return PlainView(out, replicas, now)


class Narrator:
    """Turns lines of the journals into notes, each thing told once."""

    def __init__(self) -> None:
        self._epoch = 0
        self._started: set[str] = set()

    def tell(self, line: Line) -> str | None:
        """Return what a line means to the viewer, if anything."""
        if isinstance(line, Start):
            word = "is back with" if line.replica in self._started else "starts with"
            self._started.add(line.replica)
            return f"{line.replica} {word} pid {line.pid} and joins"
        if isinstance(line, Event) and line.kind == "healed":
            return f"{line.replica} received {line.bytes / 1e6:.1f} MB of live state in {line.seconds:.2f} s"
        if isinstance(line, Step) and line.committed and line.epoch > self._epoch:
            self._epoch = line.epoch
            return f"epoch {line.epoch} commits step {line.step}: {', '.join(line.members)}"
        if isinstance(line, End):
            return f"{line.replica} left at version {line.version}"
        return None


def state_of(story: Story, director: Director, replica: str) -> str:
    """Say in a word or two what a replica is doing."""
    steps, events = story.steps.get(replica, []), story.events.get(replica, [])
    fault = director.faults[-1] if director.faults else None
    if fault is not None and fault.victim == replica and director.phase in ("hit", "frozen", "back"):
        if fault.kind == "SIGSTOP" and fault.thawed_at is None:
            return "frozen"
        start = next((s for s in reversed(story.starts) if s.replica == replica), None)
        if fault.kind == "SIGKILL" and (start is None or start.monotonic < fault.at):
            return "killed, restarting"
        return "coming back"
    if any(e.replica == replica and e.pid == story.pid(replica) for e in story.ends):
        return "left"
    if not steps:
        return "starting" if story.pid(replica) is None else "joining"
    if events and events[-1].kind != "commit" and events[-1].monotonic > steps[-1].monotonic:
        return "regrouping"
    return "training"


class PlainView:
    """A line for each event, and one now and then for the progress."""

    def __init__(self, out: TextIO, replicas: tuple[str, ...], now: float) -> None:
        self._out = out
        self._replicas = replicas
        self._zero = now
        self._last = now

    def _write(self, text: str, now: float) -> None:
        print(f"{now - self._zero:6.1f} s  {text}", file=self._out, flush=True)

    def note(self, text: str, now: float) -> None:
        """Write the event."""
        self._write(text, now)

    def update(self, story: Story, director: Director, now: float) -> None:
        """Write the progress, not too often."""
        newest = story.newest()
        if newest is None or now - self._last < _PLAIN_EVERY_S:
            return
        self._last = now
        rate = max(story.rate(r, now) for r in self._replicas)
        states = ", ".join(f"{r} {state_of(story, director, r)}" for r in self._replicas)
        self._write(f"step {newest.step}, loss {newest.loss:.2f}, {rate:.1f} steps/s: {states}", now)

    def close(self) -> None:
        """Nothing is left to close."""


class LiveView:
    """A table that is drawn anew, with the last events below it."""

    def __init__(self, out: TextIO, replicas: tuple[str, ...], now: float) -> None:
        from rich.console import Console
        from rich.live import Live

        self._replicas = replicas
        self._zero = now
        self._notes: deque[str] = deque(maxlen=_SHOWN_NOTES)
        self._live = Live(console=Console(file=out), refresh_per_second=8, transient=False)
        self._live.start()

    def note(self, text: str, now: float) -> None:
        """Add the event to those shown."""
        self._notes.append(f"{now - self._zero:6.1f} s  {text}")

    def update(self, story: Story, director: Director, now: float) -> None:
        """Draw."""
        from rich.console import Group
        from rich.text import Text

        self._live.update(
            Group(self._table(story, director, now), Text(""), *(Text(note) for note in self._notes))
        )

    def _table(self, story: Story, director: Director, now: float) -> Any:
        from rich.table import Table
        from rich.text import Text

        colours = {"training": "green", "frozen": "magenta", "killed, restarting": "red", "left": "dim"}
        table = Table(title="ftkit demo", title_justify="left", expand=False)
        for name in ("replica group", "state", "pid"):
            table.add_column(name, min_width=10)
        for name in ("epoch", "step", "loss", "steps/s"):
            table.add_column(name, justify="right", min_width=7)
        for replica in self._replicas:
            state, last = state_of(story, director, replica), story.last_commit(replica)
            table.add_row(
                replica,
                Text(state, style=colours.get(state, "yellow")),
                str(story.pid(replica) or ""),
                *(("", "", "") if last is None else (str(last.epoch), str(last.step), f"{last.loss:.3f}")),
                f"{story.rate(replica, now):.1f}",
            )
        return table

    def close(self) -> None:
        """Leave the last picture on the terminal."""
        self._live.stop()


def stream_for(as_json: bool) -> TextIO:
    """Return where progress goes: standard output belongs to the JSON object when one is asked for."""
    return sys.stderr if as_json else sys.stdout
