#!/usr/bin/env python3
"""Break a job on this machine from a seed, then prove from its logs that nothing was lost.

    python scripts/chaos.py --groups 3 --seconds 60 --seed 7    a minute of faults
    python scripts/chaos.py --plan --seed 7                     only show what would be done
    python scripts/chaos.py --faults kill,etcd-wipe --every 3   only these kinds
    python scripts/chaos.py --etcd-servers 3                    lose one, the leader, the majority
    python scripts/chaos.py --kinds                             what there is
    make soak MINUTES=30                                        a long night

Starts an etcd and replica groups that train with train_lm.py, each by an `ftkit launch` of its own, as on
machines of their own. After a calm time, whose speed is the measure, faults strike. At the end all groups
must train together again; then the logs are judged as by `ftkit verify`. Exit code 1: a promise was broken.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from ftkit.chaos import plot
from ftkit.chaos.faults import Fault, plan
from ftkit.chaos.job import Setup
from ftkit.chaos.kinds import ALL, DEFAULT, OF_THREE, PARTITIONS, TABLE
from ftkit.chaos.netns import missing
from ftkit.chaos.result import report
from ftkit.chaos.run import Bounds, play
from ftkit.chaos.servers import impossible
from ftkit.errors import ConfigError


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--groups", type=int, default=3, metavar="N", help="replica groups (default: 3)")
    add("--nproc-per-group", type=int, default=1, metavar="M", help="ranks of each group (default: 1)")
    add("--seconds", type=float, default=60.0, metavar="S", help="time in which faults strike (default: 60)")
    add("--count", type=int, metavar="N", help="end after so many faults, however long it takes")
    add("--seed", type=int, default=0, help="of the faults (default: 0)")
    add("--every", type=float, default=5.0, metavar="S", help="mean time between two faults (default: 5)")
    add("--faults", metavar="KIND,KIND", help="kinds of faults (default: all but a few; see --kinds)")
    add("--kinds", action="store_true", help="list the kinds of faults and exit")
    add(
        "--turmoil",
        type=float,
        default=0.25,
        help="share of faults that strike in the middle of a recovery (default: 0.25)",
    )
    add("--calm", type=float, metavar="S", help="fault-free time before (default: 5 to 30 s)")
    add("--min-replicas", type=int, default=1, help="fewest groups that may commit (default: 1)")
    add("--step-time", type=float, default=0.1, metavar="S", help="a step lasts this long (default: 0.1)")
    add("--lease-ttl", type=int, default=2, metavar="S", help="life of a lease (default: 2)")
    add("--etcd-servers", type=int, default=1, metavar="N", help="1 or 3 (default: 1)")
    add("--etcd-auth", action="store_true", help="etcd asks for a password, and forgets tokens after 2 s")
    add("--max-pause", type=float, default=30.0, metavar="S", help="longest pause allowed (default: 30)")
    add("--patience", type=float, default=90.0, metavar="S", help="longest recovery allowed (default: 90)")
    add("--min-goodput", type=float, default=0.0, metavar="G", help="fail below this share (default: 0)")
    add("--out", type=Path, metavar="DIR", help="where the logs go (default: a temporary folder)")
    add("--plan", action="store_true", help="print the plan and exit")
    add("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    return parser.parse_args(argv)


def wanted(args: argparse.Namespace) -> list[str]:
    """Return the kinds of faults; what the job's etcd cannot suffer is left out, or refused by name."""
    chosen = [k.strip() for k in args.faults.split(",")] if args.faults else []
    reasons = {k: impossible(k, num=args.etcd_servers, auth=args.etcd_auth) for k in ALL}
    if not chosen or set(chosen) & set(PARTITIONS):
        why_not = missing()
        reasons |= {k: f"{k} needs network namespaces: {why_not}" for k in PARTITIONS if why_not}
    for kind in chosen:
        if reasons.get(kind):
            raise ConfigError(reasons[kind])
    usual = {*DEFAULT, *OF_THREE, *PARTITIONS, "etcd-expire-token"}
    for kind in () if chosen else PARTITIONS:
        if reasons[kind]:
            print(f"left out: {reasons[kind]}", file=sys.stderr)
    return chosen or [k for k in ALL if k in usual and not reasons[k]]


def show(faults: list[Fault]) -> None:
    """Print a plan."""
    for fault in faults:
        print(f"{fault.at:7.2f} s  {fault}{'' if fault.calm else ', in the middle of a recovery'}")


def new_folder(out: Path | None) -> Path:
    """Return the folder of this run; the logs of another run would be taken for this one's."""
    folder = Path(tempfile.mkdtemp(prefix="ftkit-chaos-")) if out is None else out.resolve()
    journal = folder / "journal"
    if journal.is_dir() and any(journal.iterdir()):
        raise ConfigError(f"{folder} holds the logs of another run, which would be taken for this one's")
    return folder


def main(argv: list[str] | None = None) -> int:
    """Make the plan, carry it out, judge, report."""
    args = arguments(argv)
    if args.kinds:
        for name, kind in TABLE.items():
            print(f"{name:20} {kind.meaning}{'' if kind.default else ' (only when asked for)'}")
        return 0
    kinds = wanted(args)
    faults = plan(
        args.seed,
        seconds=args.seconds if args.count is None else 2 * args.every * (args.count + 1),
        groups=args.groups,
        every_s=args.every,
        lease_ttl=args.lease_ttl,
        kinds=kinds,
        turmoil=args.turmoil,
    )[: args.count]
    if args.plan:
        show(faults)
        return 0
    if args.groups <= args.min_replicas:
        raise ConfigError(f"--groups {args.groups} must be above --min-replicas {args.min_replicas}")
    setup = Setup(
        folder=new_folder(args.out),
        groups=args.groups,
        ranks=args.nproc_per_group,
        min_replicas=args.min_replicas,
        lease_ttl=args.lease_ttl,
        step_time_s=args.step_time,
        etcd_servers=args.etcd_servers,
        etcd_auth=args.etcd_auth,
        machines=bool(set(kinds) & set(PARTITIONS)),
    )
    bounds = Bounds(
        seconds=args.seconds if args.count is None else None,
        calm_s=args.calm or max(5.0, min(30.0, args.seconds / 5)),
        patience_s=args.patience,
        max_pause_s=args.max_pause,
        min_goodput=args.min_goodput,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside, it ends the job in order
    result = play(setup, bounds, faults, args.seed)
    encoded = msgspec.json.encode(result)
    (setup.folder / "report.json").write_bytes(msgspec.json.format(encoded))
    (setup.folder / "pace.svg").write_text(plot.as_svg(result), encoding="utf-8")
    print(encoded.decode() if args.json else f"{plot.as_text(result)}\n{report(result)}")
    return 0 if result.ok else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"chaos: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
