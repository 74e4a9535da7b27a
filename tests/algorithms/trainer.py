"""A training script that says what it has drawn and what was committed; run by test_whole."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

import ftkit


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--etcd", "--job", "--replica-id", "--hurry"):
        parser.add_argument(name)
    parser.add_argument("--length", type=int)
    parser.add_argument("--workers", type=int)
    args = parser.parse_args()

    def say(**row: object) -> None:
        print(json.dumps(row), flush=True)

    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def save() -> object:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: object) -> None:
        assert isinstance(state, dict)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    with ftkit.Manager(
        state_dict=save,
        load_state_dict=load,
        min_replicas=2,
        etcd=args.etcd,
        job=args.job,
        replica_id=args.replica_id,
    ) as manager:
        net = ftkit.DistributedDataParallel(manager, model, bucket_cap_mb=0.0001)
        schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda n: 1 / (1 + n))
        optimizer = ftkit.Optimizer(manager, inner, [schedule])
        data = [torch.full((4,), i / args.length) for i in range(args.length)]
        with ftkit.DataLoader(manager, data, 2, epochs=2, num_workers=args.workers) as loader:
            for x in loader:
                optimizer.zero_grad()
                say(drawn=loader.indices)
                net(x).square().mean().backward()
                if not Path(args.hurry).exists():
                    time.sleep(0.02 if manager.current_step() < 20 else 0.3)  # a model that takes its time
                optimizer.step()
                if optimizer.committed:
                    say(committed=loader.indices, step=manager.current_step(), members=len(manager.members()))
            say(
                finished=loader.num_trained,
                step=manager.current_step(),
                rounds=schedule.last_epoch,
                bits=[p.detach().double().sum().item().hex() for p in model.parameters()],
            )


if __name__ == "__main__":
    main()
