#!/usr/bin/env python3
"""Train a small byte-level language model: a plain PyTorch loop, with the lines that ftkit adds marked.

    python scripts/train_lm.py                                          alone, with an etcd of its own
    ftkit launch --groups 3 -- scripts/train_lm.py                      three replica groups on this machine
    ftkit launch --groups 2 --nproc-per-group 2 -- scripts/train_lm.py  of two ranks each
    FTKIT_ETCD=http://10.0.0.1:2379 FTKIT_REPLICA_ID=a torchrun --nproc-per-node 2 scripts/train_lm.py

Kill one of several at any moment: the others repeat the step in flight and go on; started again, it receives
their weights. Model and text are in tiny_lm.py, which knows nothing of ftkit.
"""

import argparse
import hashlib
import json
import logging
import math
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_lm import LanguageModel, Windows, read_text
from torch import nn

import ftkit
from ftkit.errors import ConfigError, Left


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    examples = __doc__.split("\n\n")
    parser = argparse.ArgumentParser(
        description=examples[0], epilog=examples[1], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=2000, help="train until so many steps are committed (default: 2000)")
    add("--epochs", type=int, help="or until the text has been read so often (default: no limit)")
    add("--batch-size", type=int, default=16, help="samples per rank and step (default: 16)")
    add("--width", type=int, default=128, help="size of the hidden states (default: 128)")
    add("--layers", type=int, default=4, help="number of transformer blocks (default: 4)")
    add("--context", type=int, default=64, help="bytes that the model sees (default: 64)")
    add("--text-bytes", type=int, default=4_000_000, help="how much text to read (default: 4000000)")
    add("--lr", type=float, default=2e-3, help="peak learning rate (default: 2e-3)")
    add("--warmup", type=int, default=20, help="steps until the peak, then a cosine (default: 20)")
    add("--decay-steps", type=int, help="where the cosine ends (default: --steps)")
    add("--seed", type=int, default=0, help="of weights and shuffling; the same on all replicas (default: 0)")
    add("--min-replicas", type=int, help="fewest replica groups that may commit [FTKIT_MIN_REPLICAS]")
    add("--threads", type=int, default=1, help="of torch; groups on one machine share its cores (default: 1)")
    add("--checkpoint", type=Path, metavar="DIR", help="save there, and resume from there")
    add("--checkpoint-every", type=int, default=200, metavar="N", help="steps (default: 200)")
    add("--eval-every", type=int, default=100, metavar="N", help="steps, and last (default: 100; 0: never)")
    add("--log-jsonl", type=Path, metavar="DIR", help="append a JSON line per step and event to a file there")
    add("--log-samples", action="store_true", help="with the numbers of the samples that each step takes")
    add("--hash", action="store_true", help="print a SHA-256 of parameters and optimizer state at the end")
    add("--hash-every", type=int, default=0, metavar="N", help="and log one every N steps (default: never)")
    add("--step-time", type=float, default=0.0, metavar="S", help="let a step last at least this long")
    return parser.parse_args(argv)


class Journal:
    """A file of JSON lines that survives the loss of its writer: each line is one write."""

    def __init__(self, folder: Path | None, manager: ftkit.Manager, rank: int) -> None:
        self.file = -1
        self.head: dict[str, object] = {"replica": manager.replica_id, "rank": rank, "pid": os.getpid()}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{manager.replica_id}.{rank}.jsonl"
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(self.file, b"\n")  # a predecessor may have been killed in the middle of a line

    def write(self, type: str, **content: object) -> None:
        """Append a line; times are seconds of the clock that all processes of a machine share."""
        if self.file >= 0:
            line = {"type": type, "monotonic": time.monotonic(), **self.head, **content}
            os.write(self.file, json.dumps(line).encode() + b"\n")


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256 of all parameters and of the optimizer's state: equal on all replicas."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter.detach(), *(state[key] for key in sorted(state))):
            sha.update(tensor.flatten().view(torch.uint8).numpy())
    return sha.hexdigest()


def which_etcd() -> str | None:
    """Return `embedded` when no etcd is named and none answers at the usual address."""
    if any(os.environ.get(name, "").strip() for name in ("FTKIT_ETCD", "ETCDCTL_ENDPOINTS")):
        return None
    try:
        socket.create_connection(("127.0.0.1", 2379), timeout=1.0).close()
    except OSError:
        print("no etcd is named (FTKIT_ETCD) and none answers on this machine: starting one (embedded)")
        return "embedded"
    return None


def main(argv: list[str] | None = None) -> None:
    """Train."""
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    pieces = Windows(read_text(args.text_bytes), args.context)
    held_out, training = torch.utils.data.random_split(
        pieces, [64, len(pieces) - 64], torch.Generator().manual_seed(0)
    )
    held_out_batch = torch.stack([pieces[i] for i in held_out.indices])
    model = LanguageModel(args.width, args.layers, args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    decay = max(args.decay_steps or args.steps, args.warmup + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / args.warmup)
            if step < args.warmup
            else 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - args.warmup) / (decay - args.warmup)))
        ),
    )

    def state_dict() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": steps.state_dict()}

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        steps.load_state_dict(state["optimizer"])

    # ftkit: the manager finds the other replica groups; what it is given here is what a newcomer receives.
    manager = ftkit.Manager(
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replicas=args.min_replicas,
        etcd=which_etcd(),
    )
    rank, ranks = manager.settings.group_rank, manager.settings.group_world_size
    replica = ftkit.DistributedDataParallel(manager, model)  # ftkit: averages gradients over the groups
    steps = ftkit.Optimizer(manager, optimizer, [schedule])  # ftkit: step() votes; the schedule follows
    loader = ftkit.DataLoader(  # ftkit: each sample once, whoever comes and goes
        manager, training, args.batch_size, seed=args.seed, epochs=args.epochs,
        group_rank=rank, group_world_size=ranks,
    )  # fmt: skip
    if ranks > 1:  # several ranks in this group: they average among themselves, as in any PyTorch script
        dist.init_process_group("gloo")
    journal = Journal(args.log_jsonl, manager, rank)
    manager.on_event(lambda e: journal.write("event", kind=e.kind, epoch=e.epoch, step=e.step, **e.detail))

    checkpoint = args.checkpoint and args.checkpoint / "latest.pt"
    if checkpoint and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        load_state_dict(saved)
        schedule.load_state_dict(saved["schedule"])
        loader.load_state_dict(saved["data"])
        manager.load_state_dict(saved["manager"])
        print(f"resumed at step {manager.current_step()} from {checkpoint}")

    def save() -> None:
        if not checkpoint or not manager.is_checkpoint_writer():  # ftkit: one of all ranks writes
            return
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        parts = {
            "schedule": schedule.state_dict(),
            "data": loader.state_dict(),
            "manager": manager.state_dict(),
        }
        torch.save({**state_dict(), **parts}, checkpoint.with_suffix(".tmp"))
        checkpoint.with_suffix(".tmp").replace(checkpoint)  # a reader finds the old one or the new one, whole

    def train_step(batch: torch.Tensor) -> float:
        """One step of training, as it would be without ftkit."""
        steps.zero_grad()
        loss = replica(batch)
        (loss * loader.loss_scale).backward()
        if ranks > 1:
            for gradient in (p.grad for p in model.parameters() if p.grad is not None):
                dist.all_reduce(gradient)
                gradient.div_(ranks)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        return loss.item()

    journal.write("start", training=len(training), seed=args.seed, context=args.context, ranks=ranks)
    begun = time.monotonic()
    try:
        for batch in loader if manager.current_step() < args.steps else ():
            if args.log_samples:
                journal.write(
                    "draw", epoch=manager.epoch, step=manager.current_step() + 1, samples=loader.indices
                )
            attempt = manager.current_step() + 1
            loss = train_step(batch)
            journal.write(
                "step", epoch=manager.epoch, step=attempt, committed=steps.committed,
                members=manager.members(), loss=loss, version=str(manager.version),
            )  # fmt: skip
            time.sleep(max(0.0, begun + args.step_time - time.monotonic()))
            begun = time.monotonic()
            if not steps.committed:  # ftkit: a member is gone; the same samples come again, to who is left
                continue
            if args.hash_every and attempt % args.hash_every == 0:
                journal.write("hash", version=str(manager.version), sha256=digest(model, optimizer))
            if args.eval_every and (attempt % args.eval_every == 0 or attempt >= args.steps):
                with torch.no_grad():
                    held_out_loss = model(held_out_batch).item()
                journal.write("eval", epoch=manager.epoch, step=attempt, loss=held_out_loss)
                print(f"step {attempt}: loss {loss:.3f}, held out {held_out_loss:.3f}")
            if attempt % args.checkpoint_every == 0:
                save()
            if attempt >= args.steps:
                break
        save()
    finally:  # also when asked to leave: `ftkit drain`, SIGTERM
        sha256, version = digest(model, optimizer), str(manager.version)
        cause = sys.exc_info()[1]
        journal.write(
            "end", step=manager.current_step(), version=version, sha256=sha256, data=loader.state_dict(),
            error="" if cause is None or isinstance(cause, Left) else repr(cause),
        )  # fmt: skip
        if args.hash:
            print(f"version {version} sha256 {sha256}")
        loader.close()
        manager.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        main()
    except ConfigError as error:
        print(f"train_lm: {error}", file=sys.stderr)
        sys.exit(2)  # `ftkit launch` does not start it again: it would end the same way
