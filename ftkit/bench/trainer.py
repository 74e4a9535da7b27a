"""One replica group that trains until it is ended, and says when each step was committed.

SIGUSR1 hangs its training thread for good while its other threads live on; SIGUSR2 kills it inside the next
backward pass; SIGTERM lets it leave in order.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch

import ftkit
from ftkit.bench.processes import say


def main() -> None:
    """Print one row per step: monotonic time, step, whether committed, number of members."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--period-ms", type=float)
    parser.add_argument("--state-mib", type=float)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    x = torch.rand(4, 64)
    extra = torch.ones(int(args.state_mib * 2**18))
    doomed: list[bool] = []

    def die(gradient: torch.Tensor) -> None:
        if doomed:
            say({"killed_at": time.monotonic()})
            os.kill(os.getpid(), signal.SIGKILL)

    model.bias.register_hook(die)  # type: ignore[no-untyped-call]
    manager = ftkit.Manager()
    net = ftkit.DistributedDataParallel(manager, model)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = ftkit.Optimizer(manager, inner)

    def load(state: object) -> None:
        assert isinstance(state, dict), "as saved"
        model.load_state_dict(state["model"])

    manager.register_state_dict_fn("model", load, lambda: {"model": model.state_dict(), "x": extra})
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1e6))
    signal.signal(signal.SIGUSR2, lambda *_: doomed.append(True))
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        loss = net(x).sum()
        time.sleep(args.period_ms / 1e3)  # the step's computation
        loss.backward()
        optimizer.step()
        say(
            {
                "t": time.monotonic(),
                "step": manager.current_step(),
                "ok": manager.current_step() > before,
                "n": manager.num_participants(),
                "epoch": manager.epoch,
            }
        )


if __name__ == "__main__":
    main()
