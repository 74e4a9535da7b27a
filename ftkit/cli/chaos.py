"""Break a running job on purpose: kill, freeze, drain, revoke leases, by a plan that a seed decides.

Only the job's own processes on this machine are touched: what the members' records in etcd say is checked
against /proc before each signal. Something else, such as `ftkit launch`, has to start again what is killed.
Faults in the middle of a step, of etcd and of the network need a job that is started for it, as
scripts/chaos.py does.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.chaos.faults import plan
from ftkit.chaos.kinds import FROM_OUTSIDE, TABLE
from ftkit.cli.connect import add_connection, add_json, open_etcd, settle
from ftkit.config import add_arguments as add_settings
from ftkit.errors import ConfigError

if TYPE_CHECKING:
    from ftkit.chaos.live import View

EXAMPLES = """\
examples:
  look at who would be struck, with what and when; nothing is done:
    ftkit chaos --job llm-7 --dry-run --seed 7
  a minute of faults, written down so that `ftkit verify` knows who was killed on purpose:
    ftkit chaos --job llm-7 --seconds 60 --seed 7 --log logs
  only these kinds, every 10 seconds, and at least two members must always go on training:
    ftkit chaos --job llm-7 --faults kill,drain --every 10 --keep 2

exit code: 0 when all that there was time for was done, 1 when nothing could be done.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `ftkit chaos`."""
    add = parser.add_argument
    add("--seed", type=int, default=0, help="decides who, what and when (default: 0)")
    add("--seconds", type=float, default=60.0, metavar="S", help="for how long (default: 60)")
    add("--every", type=float, default=5.0, metavar="S", help="mean time between two faults (default: 5)")
    add("--faults", metavar="KIND,KIND", help=f"kinds of faults (default: all of: {', '.join(FROM_OUTSIDE)})")
    add("--keep", type=int, default=1, metavar="N", help="members that must go on training (default: 1)")
    add(
        "--turmoil",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="share of faults that strike in the middle of a recovery (default: 0.25)",
    )
    add("--log", type=Path, metavar="DIR", help="append the faults to chaos.jsonl there, for `ftkit verify`")
    add("--dry-run", action="store_true", help="show the members and the plan, and do nothing")
    add_json(parser)
    add_settings(parser, ("lease_ttl",))
    add_connection(parser)


def run(args: argparse.Namespace) -> int:
    """Find the job, plan, strike."""
    from ftkit.chaos import live  # imports grpc: only when it is needed

    if args.keep < 1:
        raise ConfigError(f"--keep must be at least 1: the state lives in the members, got {args.keep}")
    kinds = [k.strip() for k in args.faults.split(",")] if args.faults else list(FROM_OUTSIDE)
    for kind in kinds:
        if kind in TABLE and not TABLE[kind].from_outside:
            raise ConfigError(f"{kind} needs a job that is started for it: scripts/chaos.py --faults {kind}")
    settings = settle(args)
    with open_etcd(settings) as etcd:
        view = live.look(etcd, settings.job)
        mine = [m for m in view.members if not m.why_not]
        faults = plan(
            args.seed,
            seconds=args.seconds,
            groups=max(1, len(view.members)),
            every_s=args.every,
            lease_ttl=settings.lease_ttl,
            kinds=kinds,
            turmoil=args.turmoil,
        )
        if args.dry_run:
            lines = [f"{f.at:7.2f} s  {f}{'' if f.calm else ', in the middle of a recovery'}" for f in faults]
            tell(args.json, view, lines, len(faults))
            return 0
        if not mine:
            reasons = "; ".join(f"{m.replica_id}: {m.why_not}" for m in view.members) or "it has no member"
            raise ConfigError(f"there is nobody of job {settings.job} to strike here: {reasons}")
        if args.log is not None:
            args.log.mkdir(parents=True, exist_ok=True)
        journal = None if args.log is None else args.log / "chaos.jsonl"
        job = live.Live(etcd, settings.job, keep=args.keep, journal=journal)
        # Ended from outside, it still thaws whom it has frozen.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        done, skipped = live.run(job, faults, seconds=args.seconds, say=say)
        tell(args.json, live.look(etcd, settings.job), done, skipped)
    return 0 if done else 1


def say(text: str) -> None:
    """Tell of progress."""
    print(text, file=sys.stderr, flush=True)


def tell(as_json: bool, view: View, faults: list[str], skipped: int) -> None:
    """Print who is in the job, and the faults."""
    if as_json:
        members = [
            {"replica_id": m.replica_id, "host": m.host, "pid": m.pid, "why_not": m.why_not}
            for m in view.members
        ]
        print(json.dumps({"members": members, "faults": faults, "skipped": skipped}))
        return
    for member in view.members:
        state = f"left alone: {member.why_not}" if member.why_not else "may be struck"
        print(f"{member.replica_id}: {member.host}, pid {member.pid}; {state}")
    print("\n".join(faults) if faults else "no faults")
