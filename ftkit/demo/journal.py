"""Read what the trainers of the demo write: JSON lines, one file per rank, appended while we read.

A trainer may be killed in the middle of a line: what cannot be read is left out. Unknown fields and types of
lines are ignored. It knows the lines of `scripts/train_lm.py` and nothing of what they mean together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias, cast

import msgspec


class _Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What all lines say; `monotonic` is the clock that all processes of this machine share."""

    monotonic: float
    replica: str
    pid: int
    rank: int = 0
    """Inside of the replica group."""


class Start(_Line, frozen=True, kw_only=True, tag="start"):
    """A trainer has been started and is about to join the job."""

    training: int
    """Samples in the training set."""
    seed: int


class Draw(_Line, frozen=True, kw_only=True, tag="draw"):
    """A replica begins a step with these samples."""

    epoch: int
    step: int
    samples: tuple[int, ...]


class Step(_Line, frozen=True, kw_only=True, tag="step"):
    """The end of an attempt at a step, committed or not; `members` are those whose gradients are in it."""

    epoch: int
    step: int
    committed: bool
    members: tuple[str, ...]
    loss: float


class Event(_Line, frozen=True, kw_only=True, tag="event"):
    """An event of the manager's timeline."""

    kind: str
    epoch: int
    step: int
    why: str = ""
    bytes: int = 0
    seconds: float = 0.0


class Hash(_Line, frozen=True, kw_only=True, tag="hash"):
    """The digest of a replica's parameters and optimizer state at a version."""

    version: str
    sha256: str


class Eval(_Line, frozen=True, kw_only=True, tag="eval"):
    """The loss on held-out text."""

    step: int
    loss: float


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """How far the job has come in the stream of samples."""

    position: int = 0
    holes: tuple[tuple[int, int], ...] = ()
    """Before `position`, and not trained on yet."""


class End(_Line, frozen=True, kw_only=True, tag="end"):
    """The last line of a trainer that ended in order."""

    step: int
    version: str
    sha256: str
    data: Place = Place()


Line: TypeAlias = Start | Draw | Step | Event | Hash | Eval | End

_decode = msgspec.json.Decoder(Line).decode


def parse(text: bytes) -> Line | None:
    """Read one line; None when it is cut off or of another kind."""
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:  # Python's json writes a loss that is NaN, although that is no JSON
        return cast(Line, msgspec.convert(json.loads(text), Line))
    except (msgspec.ValidationError, ValueError):
        return None


class Tail:
    """Follows all files of a folder that end in `.jsonl`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[Line]:
        """Return the lines that are new, in the order of their times."""
        lines: list[Line] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            lines += [line for text in whole.splitlines() if (line := parse(text)) is not None]
        return sorted(lines, key=lambda line: line.monotonic)
