"""What is to happen inside of a trainer: a file per replica group, taken by the trainer that carries it out.

The file outlives its reader: an order for a newcomer waits for the next process of that name. Without torch.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

PHASES = ("forward", "backward", "vote", "update", "updated", "want", "meeting", "heal")
"""Where a trainer can be told to fail: `update` is the optimizer's step after the vote, `updated` its end;
`want` begins when a ticket is asked for, `meeting` when an epoch is published, `heal` when a state is served
or received."""

ACTS = ("kill", "stop", "raise", "hold-gil", "nan", "flip-bit", "corrupt")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One act, in the next phase of that name."""

    number: int
    act: str
    phase: str
    after_s: float = 0.0
    """Kill so long after the phase has begun, seconds."""
    lasting: float = 0.0
    """How long the GIL is held, seconds."""
    bit: int = 0
    """Which bit of a float32 is flipped."""

    def __post_init__(self) -> None:
        """Refuse what no trainer could carry out."""
        if self.act not in ACTS or self.phase not in PHASES:
            raise ValueError(f"no order to {self.act!r} in {self.phase!r}")


class Orders:
    """The folder through which orders go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, replica: str) -> Path:
        return self._folder / f"{replica}.order"

    def give(self, replica: str, order: Order) -> None:
        """Tell the trainer of a replica group what to do; an order that still waits is replaced."""
        path = self._path(replica)
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(order))
        new.replace(path)

    def read(self, replica: str) -> Order | None:
        """Return the order that waits for a replica group."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(self._path(replica).read_bytes(), type=Order)
        return None

    def take(self, replica: str) -> bool:
        """Take the order away; False when another process was faster."""
        try:
            os.unlink(self._path(replica))
        except FileNotFoundError:
            return False
        return True

    def waiting(self) -> set[str]:
        """Return the replica groups whose order has not been carried out yet."""
        return {path.stem for path in self._folder.glob("*.order")}
