"""Read the JSON lines of trainers, each with its place, and sort them into lives.

A life is one process of one rank, from its `start` line on. Lines of unknown types and unknown fields are
ignored; what cannot be read is told apart: a line cut off by the end of its writer is no corruption. It knows
the lines of `scripts/train_lm.py` and of `scripts/chaos.py`, and judges nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from ftkit.core.model import Version


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """How far the job has come in the stream of samples."""

    position: int = 0
    holes: tuple[tuple[int, int], ...] = ()

    @property
    def num_trained(self) -> int:
        """How many samples have been trained on."""
        return self.position - self.num_left_out

    @property
    def num_left_out(self) -> int:
        """How many samples before `position` are still to be trained on."""
        return sum(stop - start for start, stop in self.holes)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The union of what the lines say; which fields count follows from `type`."""

    type: str
    monotonic: float = 0.0
    replica: str = ""
    rank: int = 0
    pid: int = 0
    epoch: int = 0
    step: int = 0
    committed: bool = False
    members: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()
    version: str = ""
    sha256: str = ""
    kind: str = ""
    training: int = 0
    seed: int = 0
    error: str = ""
    data: Place | None = None


class Entry(NamedTuple):
    """A line and where it stands."""

    file: str
    number: int
    line: Line

    @property
    def where(self) -> str:
        """file:line."""
        return f"{self.file}:{self.number}"


class Cut(NamedTuple):
    """A line that cannot be read."""

    file: str
    number: int
    text: str
    torn: bool
    """Its writer has ended in the middle of it: the end of the file or a new start follows."""


@dataclass(slots=True)
class Life:
    """One process of one rank of a replica group."""

    file: str
    replica: str
    rank: int
    pid: int
    entries: list[Entry] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Who it is, for a report."""
        rank = f"/{self.rank}" if self.rank else ""
        return f"{self.replica}{rank} (pid {self.pid})"

    @property
    def commits(self) -> list[Entry]:
        """The steps that it saw committed, in their order."""
        return [e for e in self.entries if e.line.type == "step" and e.line.committed]

    @property
    def end(self) -> Entry | None:
        """Its last word, if it came to one."""
        return next((e for e in reversed(self.entries) if e.line.type == "end"), None)


@dataclass(frozen=True, slots=True)
class Log:
    """All that a folder tells."""

    lives: tuple[Life, ...]
    faults: tuple[Entry, ...] = ()
    """What was done to the job (`fault` lines), in the order of time."""
    over: bool = False
    """Whoever ran the job says that it has ended: nobody runs any more."""
    cuts: tuple[Cut, ...] = ()
    num_lines: int = 0
    files: tuple[str, ...] = ()

    def entries(self, *types: str) -> Iterator[Entry]:
        """Return the trainers' lines of some types, life by life."""
        for life in self.lives:
            yield from (e for e in life.entries if e.line.type in types)


def version_of(entry: Entry) -> Version:
    """Return the version that a committed step, a hash or an end names."""
    line = entry.line
    if not line.version:
        return Version(line.epoch, line.step)
    return parse_version(line.version)


def parse_version(text: str) -> Version:
    """Read `epoch-step`; a broken state's epoch is negative."""
    epoch, _, step = text.rpartition("-")
    return Version(int(epoch), int(step))


_decode = msgspec.json.Decoder(Line).decode


def decode(text: bytes) -> Line:
    """Read a line; also one with a loss that is NaN, which Python's json writes although it is no JSON."""
    try:
        return _decode(text)
    except msgspec.DecodeError:
        return msgspec.convert(json.loads(text), Line)


def parse(file: str, lines: Iterable[bytes]) -> tuple[list[Entry], list[Cut]]:
    """Read the lines of one file; empty ones are nothing."""
    entries: list[Entry] = []
    cuts: list[Cut] = []
    suspects: list[Cut] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decode(text)
            if line.version:
                parse_version(line.version)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
            suspects.append(Cut(file, number, text[:80].decode(errors="replace"), torn=True))
            continue
        if suspects:
            # A successor starts on a line of its own; with any other line behind it the writer lived on.
            torn = len(suspects) == 1 and line.type == "start"
            cuts += [c._replace(torn=torn) for c in suspects]
            suspects = []
        entries.append(Entry(file, number, line))
    return entries, cuts + [c._replace(torn=len(suspects) == 1) for c in suspects]


def collect(entries: Iterable[Entry], cuts: Iterable[Cut] = (), files: Iterable[str] = ()) -> Log:
    """Sort lines, file by file and in their order, into lives."""
    lives: list[Life] = []
    current: dict[tuple[str, int, int], Life] = {}
    faults: list[Entry] = []
    over, count = False, 0
    for entry in entries:
        line, count = entry.line, count + 1
        if line.type == "fault":
            faults.append(entry)
        elif line.type == "over":
            over = True
        elif line.replica:
            key = (entry.file, line.rank, line.pid)
            if line.type == "start" or key not in current:
                current[key] = Life(entry.file, line.replica, line.rank, line.pid)
                lives.append(current[key])
            current[key].entries.append(entry)
    faults.sort(key=lambda e: e.line.monotonic)
    return Log(tuple(lives), tuple(faults), over, tuple(cuts), count, tuple(files))


def read(folder: Path) -> Log:
    """Read all `*.jsonl` files of a folder."""
    entries: list[Entry] = []
    cuts: list[Cut] = []
    paths = sorted(folder.glob("*.jsonl"))
    for path in paths:
        with path.open("rb") as file:
            more, broken = parse(path.name, file)
        entries += more
        cuts += broken
    return collect(entries, cuts, (p.name for p in paths))
