"""Carry out the faults that strike the processes of one replica group, and take them back.

The caller says which process is meant and writes down what is done; each signal is noted before it is sent.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from ftkit.chaos.faults import Fault
from ftkit.chaos.orders import Order
from ftkit.chaos.processes import Process, find, keepers_of, ranks_of

Undo = Callable[[], None]
Note = Callable[[signal.Signals, int], None]
"""Told of each signal and its process before it is sent: who dies of it cannot be found without its cause."""

SIGNALS = {
    "kill": (signal.SIGKILL, "one"),
    "lose-machine": (signal.SIGKILL, "keeper, all"),
    "blink": (signal.SIGSTOP, "keeper, all"),
    "freeze": (signal.SIGSTOP, "keeper, all"),
    "freeze-trainer": (signal.SIGSTOP, "one"),
    "expire-lease": (signal.SIGSTOP, "keeper"),
    "drain": (signal.SIGTERM, "one"),
    "kill-keeper": (signal.SIGKILL, "keeper"),
}
"""What a kind of fault sends, and to whom: the keeper first, who of a lost machine can tell nothing.

Of several ranks one is struck, or all."""


class Victim:
    """The processes of one replica group on this machine."""

    def __init__(self, name: str, pid: int, note: Note, is_meant: Callable[[], bool]) -> None:
        """`pid` is its trainer's, of group rank 0; `is_meant` proves that this is still the one."""
        self.name = name
        self._note = note
        trainer = find(pid, is_meant)
        self._trainers: list[Process] = []
        self._keepers: list[Process] = []
        if trainer is not None:
            # While we hold the trainer, its children and its siblings are its own.
            others = [rank for rank in ranks_of(pid) if rank != pid]
            self._trainers = [trainer, *_found(others, lambda: ranks_of(pid))]
            self._keepers = _found(keepers_of(pid), lambda: keepers_of(pid))

    def strike(self, kind: str, chance: float = 0.0) -> Undo | None:
        """Send what the kind says; return what takes it back, None when that cannot be.

        `chance`, below 1, chooses the rank where one of several is struck."""
        number, whom = SIGNALS[kind]
        struck: list[Process] = []
        if "keeper" in whom:
            struck += self._keepers
        if "all" in whom:
            struck += self._trainers
        elif "one" in whom and self._trainers:
            struck.append(self._trainers[min(int(chance * len(self._trainers)), len(self._trainers) - 1)])
        self._signal(number, struck)
        if number == signal.SIGSTOP:
            return lambda: self._end(signal.SIGCONT, struck)
        self._end(None, ())
        return None

    def _signal(self, number: signal.Signals, processes: Sequence[Process]) -> None:
        for process in processes:
            self._note(number, process.pid)
            process.signal(number)

    def _end(self, number: signal.Signals | None, processes: Sequence[Process]) -> None:
        if number is not None:
            self._signal(number, processes)
        for process in (*self._keepers, *self._trainers):
            process.close()
        self._keepers, self._trainers = [], []


def _found(pids: Sequence[int], among: Callable[[], list[int]]) -> list[Process]:
    """Return the processes that are still among those meant when their pids cannot change any more."""
    found = [find(pid, lambda pid=pid: pid in among()) for pid in pids]  # type: ignore[misc]
    return [process for process in found if process is not None]


ACTS = {"raise-in-update": "raise"}
AFTER_S = {"forward": 0.004, "backward": 0.004, "vote": 0.001, "update": 0.002, "meeting": 0.01, "heal": 0.01}
"""About how long a phase of a small model lasts: a kill strikes within it."""


def order_for(fault: Fault, phase: str, number: int) -> Order:
    """Return the order that carries a fault out inside of a trainer; what is left to chance comes from it."""
    act = ACTS.get(fault.kind, "kill" if fault.kind.startswith("kill-") else fault.kind)
    return Order(
        number=number,
        act=act,
        phase=phase,
        after_s=fault.chance * AFTER_S.get(phase, 0.0),
        lasting=fault.lasting,
        # Of a float32's fraction: the training goes on, with another result.
        bit=int(fault.chance * 22),
    )
