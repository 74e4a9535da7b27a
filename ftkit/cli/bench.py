"""The command `ftkit bench`: flags in, figures out; what is measured and how stands in `ftkit.bench`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from ftkit.errors import ConfigError

EXAMPLES = """\
examples:
  ftkit bench steady --groups 4                what a step costs more than with plain DDP
  ftkit bench steady --model medium            the same with 16.8 MB of gradients
  ftkit bench recovery                         kill one of three groups, again and again
  ftkit bench recovery --failure stop          freeze it instead
  ftkit bench recovery --failure backward      kill it inside its backward pass
  ftkit bench transfer --sizes 256,1024        how fast a state moves, beside a bare socket

All processes and an etcd are started on this machine. Quote medians, and ratios of one run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of all benchmarks."""
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    which = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    steady = which.add_parser("steady", help="time per step while nothing fails, against plain DDP")
    steady.add_argument("--groups", type=int, default=2, help="replica groups (default 2)")
    steady.add_argument(
        "--model", choices=("tiny", "medium"), default="tiny", help="medium: 16.8 MB of gradients"
    )
    steady.add_argument("--pairs", type=int, default=10, help="pairs of blocks, in turn (default 10)")
    steady.add_argument("--steps", type=int, default=None, help="steps of a block (default 100, medium 20)")
    recovery = which.add_parser("recovery", help="the survivors' pause when a group fails, and its return")
    recovery.add_argument("--groups", type=int, default=3, help="replica groups (default 3)")
    recovery.add_argument(
        "--failure",
        choices=("kill", "backward", "stop", "hang", "leave"),
        default="kill",
        help="SIGKILL at any moment; SIGKILL inside backward; SIGSTOP; a hang of the training thread alone "
        "(with the watchdog at 2 s); SIGTERM (default kill)",
    )
    recovery.add_argument(
        "--state-mib", type=float, default=1.0, help="state that a joiner fetches (default 1)"
    )
    recovery.add_argument("--trials", type=int, default=5, help="failures, one after the other (default 5)")
    recovery.add_argument("--period-ms", type=float, default=45.0, help="computation of a step (default 45)")
    recovery.add_argument("--lease-ttl", type=int, default=5, help="life of a lease in seconds (default 5)")
    recovery.add_argument("--seed", type=int, default=0, help="of the moments of failure")
    transfer = which.add_parser("transfer", help="how fast a state moves, and what that costs both sides")
    transfer.add_argument(
        "--sizes", type=_sizes, default=[256, 1024, 4096], metavar="MIB,...", help="default 256,1024,4096"
    )
    transfer.add_argument("--reps", type=int, default=3, help="rounds of all methods in turn (default 3)")
    for each in (steady, recovery, transfer):
        each.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _sizes(text: str) -> list[int]:
    """Read a list of sizes."""
    sizes = [int(word) for word in text.split(",")]
    if not all(1 <= size <= 1 << 20 for size in sizes):
        raise ValueError(text)
    return sizes


def run(args: argparse.Namespace) -> int:
    """Measure, and print the figures."""
    if args.benchmark == "transfer":
        return _transfer(args)
    if args.groups < 2:
        raise ConfigError(f"--groups {args.groups}: a benchmark needs at least 2 replica groups")
    if args.benchmark == "steady":
        from ftkit.bench import steady

        steps = args.steps or (20 if args.model == "medium" else 100)
        result = steady.measure(groups=args.groups, model=args.model, steps=steps, pairs=args.pairs)
    else:
        from ftkit.bench import recovery

        result = recovery.measure(
            groups=args.groups,
            failure=args.failure,
            state_mib=args.state_mib,
            trials=args.trials,
            period_ms=args.period_ms,
            lease_ttl=args.lease_ttl,
            seed=args.seed,
            progress=_progress(args),
        )
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            if key != "each":
                print(f"{key:26} {value}")
    return 0


def _progress(args: argparse.Namespace) -> Callable[[str], None]:
    return (lambda text: None) if args.json else (lambda text: print(text, file=sys.stderr))


def _transfer(args: argparse.Namespace) -> int:
    from ftkit.bench import transfer

    if args.reps < 1:
        raise ConfigError(f"--reps {args.reps}: at least 1")
    result = transfer.measure(sizes=args.sizes, reps=args.reps, progress=_progress(args))
    if args.json:
        print(json.dumps(result))
        return 0
    print(transfer.table(result))
    return 0
