"""A small trainer for the tests: prints one JSON line per step and per event, does what its arguments say."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import ftkit


def say(**row: object) -> None:
    os.write(1, json.dumps(row).encode() + b"\n")


def digest(*tensors: torch.Tensor) -> str:
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--period-ms", type=float, default=10)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--until", default="", help="end when this file exists")
    parser.add_argument("--fail-at", type=int, default=-1, help="raise in the update of this step, once")
    parser.add_argument("--report-at", type=int, default=-1, help="report an error in this step, once")
    parser.add_argument("--report-always", action="store_true")
    parser.add_argument("--hold-gil-at", type=int, default=-1)
    parser.add_argument("--hold-gil-s", type=float, default=0)
    parser.add_argument("--seed", type=int, default=-1)
    parser.add_argument("--plain", action="store_true", help="no DDP: average with allreduce")
    parser.add_argument("--batch-norm", action="store_true", help="with buffers that differ by replica")
    parser.add_argument("--shared-state", action="store_true", help="callbacks use a collective of the group")
    parser.add_argument("--lag-ms", type=float, default=0, help="of rank 0, in whose steps all ranks meet")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(
        os.getpid() if args.seed < 0 else args.seed
    )  # init_sync must make all start from the same state
    middle = [torch.nn.BatchNorm1d(args.width)] if args.batch_norm else []
    model = torch.nn.Sequential(torch.nn.Linear(8, args.width), *middle, torch.nn.Linear(args.width, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    doomed: list[int] = []
    signal.signal(signal.SIGUSR2, lambda *_: doomed.append(1))
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1e6))

    def die(grad: torch.Tensor) -> None:
        if doomed:
            say(killed_at=time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

    model[0].bias.register_hook(die)

    def meet() -> None:
        """All ranks of the group must come here together."""
        if args.shared_state:
            ranks = torch.ones(1)
            dist.all_reduce(ranks)
            assert ranks.item() == dist.get_world_size()

    def save() -> dict:
        meet()
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(state: dict) -> None:
        meet()
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = ftkit.Manager(load_state_dict=load, state_dict=save)
    if args.shared_state or args.lag_ms:
        dist.init_process_group("gloo")
    manager.on_event(lambda e: say(event=e.kind, at=e.monotonic, epoch=e.epoch, step=e.step, detail=e.detail))
    net = model if args.plain else ftkit.DistributedDataParallel(manager, model)
    if args.plain:
        manager.declare_model(model)
    optimizer = ftkit.Optimizer(manager, inner)
    once = {"fail": args.fail_at, "report": args.report_at, "gil": args.hold_gil_at}
    while manager.current_step() < args.steps and not (args.until and os.path.exists(args.until)):
        before = manager.current_step()
        if args.lag_ms and dist.get_rank() == 0:
            time.sleep(args.lag_ms / 1e3)
        optimizer.zero_grad()
        step, buffers = manager.current_step(), digest(*model.buffers())
        x = torch.rand(
            4, 8, generator=torch.Generator().manual_seed(step * 100 + manager.participating_rank())
        )
        if 0 <= once["gil"] <= step:
            once["gil"] = -1
            ctypes.PyDLL(None).usleep(int(args.hold_gil_s * 1e6))  # PyDLL keeps the GIL
        time.sleep(args.period_ms / 1e3)
        loss = net(x).square().mean()
        loss.backward()
        if args.lag_ms:
            dist.all_reduce(torch.ones(1))
        if args.plain:
            for p in model.parameters():
                manager.allreduce(p.grad).wait()
        if args.report_always or 0 <= once["report"] <= step:
            once["report"] = -1
            manager.report_error(RuntimeError("the user's own error"))
        if 0 <= once["fail"] <= step:
            once["fail"] = -1
            real, inner.step = inner.step, lambda *a, **k: 1 / 0
            try:
                optimizer.step()
            except Exception as error:
                say(update_failed=type(error).__name__)
            inner.step = real
        else:
            optimizer.step()
        state = [v for s in inner.state.values() for v in s.values() if torch.is_tensor(v)]
        say(
            t=time.monotonic(),
            ok=manager.current_step() > before,
            step=manager.current_step(),
            epoch=manager.epoch,
            version=str(manager.version),
            n=manager.num_participants(),
            hash=digest(*model.parameters(), *state),
            buffers=buffers,
        )
    say(
        done=True,
        step=manager.current_step(),
        hash=digest(*model.parameters()),
        batches=manager.batches_committed(),
    )
    manager.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except ftkit.FtkitError as error:
        say(error=type(error).__name__, message=str(error))
        sys.exit(3)
