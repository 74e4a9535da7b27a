"""Run a training script so that it can be told to fail in a chosen phase of a step.

    python -m ftkit.chaos.inside --orders DIR train.py --lr 0.1
    ftkit launch --groups 3 -- -m ftkit.chaos.inside --orders DIR train.py --lr 0.1

The script is run as it is. torch's own global hooks tell where forward, backward and the optimizer are, the
timeline and the marks that the trainer writes for its keeper tell the rest. Without an order (see `orders`)
nothing happens.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ftkit.chaos.orders import Order, Orders
from ftkit.config import Settings
from ftkit.keeper.progress import Phase
from ftkit.runtime.progress import Progress
from ftkit.runtime.telemetry import Timeline

logger = logging.getLogger(__name__)

LOOK_S = 0.02
MARKS = {Phase.VOTING: "vote", Phase.HEALING: "heal"}
EVENTS = {"want": "want", "epoch": "meeting"}


class Injected(RuntimeError):
    """The exception that an order asks for; no code should catch it by name."""


class Saboteur:
    """Carries out the orders for one trainer."""

    def __init__(self, orders: Orders, replica: str, journal: Path | None) -> None:
        """Look for orders from now on; each fault is noted in `journal`, for the oracle."""
        self._orders = orders
        self._replica = replica
        self._journal = journal
        self._order: Order | None = None
        self._done = 0
        self._hooked: set[int] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="chaos orders", daemon=True).start()

    def _look(self) -> None:
        while not self._closed.wait(LOOK_S):
            order = self._orders.read(self._replica)
            if order is not None and order.number > self._done:
                self._order = order

    def close(self) -> None:
        """Look for no more orders."""
        self._closed.set()

    def install(self) -> None:
        """Hook into torch and into the trainer's marks, for the rest of the process's life."""
        torch.nn.modules.module.register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._update)
        register_optimizer_step_post_hook(self._updated)
        self._after(Progress, "mark", MARKS)
        self._after(Timeline, "record", EVENTS)

    def _after(self, owner: type, name: str, phases: Mapping[Any, str]) -> None:
        """Enter a phase after each call of a method, if its first argument begins one."""
        method: Callable[..., None] = getattr(owner, name)

        def told(this: object, what: object, *args: object, **kwargs: object) -> None:
            method(this, what, *args, **kwargs)
            self.enter(phases.get(what, ""))

        setattr(owner, name, told)

    # -- where the training thread is ----------------------------------------------------------------

    def _forward(self, module: torch.nn.Module, _: object) -> None:
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in self._hooked and parameter.requires_grad:
                self._hooked.add(id(parameter))
                parameter.register_hook(self._backward)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled():
            self.enter("forward")

    def _backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Before the gradient is accumulated, and so before it is averaged."""
        order = self.enter("backward")
        if order is None or order.act not in ("nan", "flip-bit"):
            return None
        spoilt = gradient.clone(memory_format=torch.contiguous_format)
        if order.act == "nan":
            spoilt.view(-1)[0] = float("nan")
        else:
            flip(spoilt, order.bit)
        return spoilt

    def _update(self, *_: object) -> None:
        self.enter("update")

    def _updated(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        order = self.enter("updated")
        if order is not None and order.act == "corrupt":
            flip(optimizer.param_groups[0]["params"][0], order.bit)

    # -- what is done there --------------------------------------------------------------------------

    def enter(self, phase: str) -> Order | None:
        """Carry out the order for this phase, if there is one; return it.

        Raises:
            Injected: the order says so.
        """
        order = self._order
        if order is None or order.phase != phase:
            return None
        self._order, self._done = None, order.number
        if not self._orders.take(self._replica):
            return None
        if order.act == "kill":
            self._kill(order)
        else:
            self._note(order.act, phase)
        if order.act == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if order.act == "raise":
            raise Injected(f"told to fail in {phase}")
        if order.act == "hold-gil":
            ctypes.PyDLL(None).usleep(int(order.lasting * 1e6))  # PyDLL keeps the GIL
        return order

    def _kill(self, order: Order) -> None:
        def kill() -> None:
            time.sleep(order.after_s)
            self._note("SIGKILL", order.phase)
            os.kill(os.getpid(), signal.SIGKILL)

        if order.after_s > 0:
            threading.Thread(target=kill, name="chaos kill").start()
        else:
            kill()

    def _note(self, kind: str, phase: str) -> None:
        """Write the fault down before it strikes: who dies of it cannot be found without its cause."""
        logger.warning("told to fail: %s in %s", kind, phase)
        if self._journal is None:
            return
        line = {"type": "fault", "monotonic": time.monotonic(), "kind": kind, "phase": phase}
        text = json.dumps({**line, "replica": self._replica, "pid": os.getpid()}).encode()
        file = os.open(self._journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        with contextlib.closing(os.fdopen(file, "wb", buffering=0)) as journal:
            journal.write(text + b"\n")


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip one bit of a tensor's first element, in place; bit 0 is the lowest."""
    with torch.no_grad():
        data = tensor.detach().reshape(-1)[:1].view(torch.uint8)
        data[bit // 8 % data.numel()] ^= 1 << bit % 8


def arguments(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ftkit.chaos.inside",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--orders", type=Path, required=True, metavar="DIR", help="where orders come from")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="append a line per fault to it")
    parser.add_argument("script", help="the training script")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    return parser.parse_args(argv)


def main(argv: list[str]) -> dict[str, Any]:
    """Install the saboteur and run the script in this process; returns the script's globals."""
    args = arguments(argv)
    replica = Settings.resolve().replica_id
    Saboteur(Orders(args.orders), replica, args.journal).install()
    sys.argv = [args.script, *args.rest]
    sys.path[0] = str(Path(args.script).resolve().parent)
    return runpy.run_path(args.script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
