"""One replica of the steady-state benchmark: plain DDP and ftkit in turn, in one process, step by step."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import ftkit
from ftkit.bench.processes import etcd_requests, say


def build(size: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a model and its input: a few kB, or 16.8 MB of float32 parameters."""
    torch.manual_seed(0)
    if size == "tiny":
        return torch.nn.Linear(8, 8), torch.rand(4, 8)
    layers = [m for _ in range(4) for m in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers), torch.rand(8, 1024)


def stepper(net: torch.nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    """Return a function that does one step and returns its seconds."""

    def step() -> float:
        begun = time.perf_counter()
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
        return time.perf_counter() - begun

    return step


def main() -> None:
    """Print one row per pair of blocks, and one with the requests that etcd got."""
    parser = argparse.ArgumentParser()
    for name in ("--rank", "--groups", "--steps", "--pairs", "--port"):
        parser.add_argument(name, type=int)
    parser.add_argument("--model")
    parser.add_argument("--etcd-url")
    args = parser.parse_args()
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{args.port}"
    dist.init_process_group("gloo", init_method=where, rank=args.rank, world_size=args.groups)

    plain_model, x = build(args.model)
    plain_net = torch.nn.parallel.DistributedDataParallel(plain_model)
    plain = stepper(plain_net, x, torch.optim.SGD(plain_model.parameters(), lr=1e-3))

    model, _ = build(args.model)
    manager = ftkit.Manager()
    net = ftkit.DistributedDataParallel(manager, model)
    kit = stepper(net, x, ftkit.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=1e-3)))

    while manager.current_step() < 20 or manager.num_participants() < args.groups:
        kit()
    for _ in range(20):
        plain()
    first = etcd_requests(args.etcd_url) if args.rank == 0 else {}
    begun_step = manager.current_step()
    for _ in range(args.pairs):
        ddp_ms = [plain() * 1e3 for _ in range(args.steps)]
        kit_ms = [kit() * 1e3 for _ in range(args.steps)]
        say({"ddp_p50": statistics.median(ddp_ms), "step_p50": statistics.median(kit_ms)})
    if args.rank == 0:
        last = etcd_requests(args.etcd_url)
        requests = {k: n - first.get(k, 0) for k, n in last.items() if n > first.get(k, 0)}
        say({"requests": requests, "steps": manager.current_step() - begun_step, "epoch": manager.epoch})
    dist.barrier()
    manager.shutdown()
    os._exit(0)  # nothing is left to flush; the default group's teardown may wait for its peers


if __name__ == "__main__":
    main()
