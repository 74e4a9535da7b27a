"""Carry out the faults that strike the processes of one replica group, and take them back.

The caller says which process is meant and writes down what is done; each signal is noted before it is sent.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from ftkit.chaos.faults import Fault
from ftkit.chaos.orders import Order
from ftkit.chaos.processes import is_keeper, is_trainer, keepers_of, send

Undo = Callable[[], None]
Note = Callable[[signal.Signals, int], None]
"""Told of each signal and its process before it is sent: who dies of it cannot be found without its cause."""

SIGNALS = {
    "kill": (signal.SIGKILL, "trainer"),
    "lose-machine": (signal.SIGKILL, "keeper first"),
    "blink": (signal.SIGSTOP, "keeper first"),
    "freeze": (signal.SIGSTOP, "keeper first"),
    "freeze-trainer": (signal.SIGSTOP, "trainer"),
    "expire-lease": (signal.SIGSTOP, "keeper"),
    "drain": (signal.SIGTERM, "trainer"),
    "kill-keeper": (signal.SIGKILL, "keeper"),
}
"""What a kind of fault sends, and to whom."""


class Victim:
    """The processes of one replica group on this machine."""

    def __init__(
        self, name: str, pids: Sequence[int], note: Note, is_meant: Callable[[int], bool] | None = None
    ) -> None:
        """`pids` are its trainers, one per rank; `is_meant` proves that a pid is still one of them."""
        self.name = name
        self.pids = tuple(pids)
        self.keepers = tuple(k for pid in pids for k in keepers_of(pid))
        self._note = note
        self._is_meant = is_meant or (lambda pid: is_trainer(pid, name))

    def strike(self, kind: str) -> Undo | None:
        """Send what the kind says; return what takes it back, None when that cannot be."""
        number, whom = SIGNALS[kind]
        # A lost machine: the keeper must not live to see its trainer die.
        keepers = self.keepers if "keeper" in whom else ()
        trainers = self.pids if whom != "keeper" else ()
        self._signal(number, keepers, is_keeper)
        self._signal(number, trainers, self._is_meant)
        if number != signal.SIGSTOP:
            return None

        def undo() -> None:
            self._signal(signal.SIGCONT, keepers, is_keeper)
            self._signal(signal.SIGCONT, trainers, self._is_meant)

        return undo

    def _signal(self, number: signal.Signals, pids: Sequence[int], is_meant: Callable[[int], bool]) -> None:
        for pid in pids:
            if is_meant(pid):
                self._note(number, pid)
                send(pid, number, is_meant)


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
