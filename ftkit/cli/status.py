"""Show how a job is doing: who is in, which epoch and step, who heals from whom.

When nobody trains it says why, with the reason that the replica groups themselves wait for.
"""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from ftkit.cli.connect import add_connection, add_json, open_etcd, settle
from ftkit.dashboard.job import read
from ftkit.dashboard.report import Dater, report
from ftkit.dashboard.text import render
from ftkit.errors import ConfigError, EtcdUnavailable

EXAMPLES = """\
examples:
  ftkit status --job llm-7
  ftkit status --watch                 again every 2 s, until Ctrl-C
  ftkit status --json | jq .state      training, forming, waiting or empty
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `ftkit status`."""
    add_json(parser)
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=2.0,
        metavar="S",
        help="show it again every S seconds (default: 2); with --json, one line each time",
    )
    add_connection(parser)


def run(args: argparse.Namespace) -> int:
    """Print the status once, or again and again."""
    if args.watch is not None and args.watch <= 0:
        raise ConfigError(f"--watch must be greater than 0 seconds, got {args.watch:g}")
    settings = settle(args)
    dater = Dater()

    def once() -> str:
        job = read(etcd, settings.job)
        found = report(job, settings.policy(), now=time.monotonic(), wall=time.time(), dater=dater)
        return msgspec.json.encode(found).decode() if args.json else render(found)

    with open_etcd(settings) as etcd:
        if args.watch is None:
            print(once())
            return 0
        clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() and not args.json else ""
        while True:
            try:
                text = once()
            except EtcdUnavailable as error:  # it may come back, and then one wants to see it
                text = msgspec.json.encode({"error": str(error)}).decode() if args.json else f"{error}"
            print(f"{clear}{text}", flush=True)
            time.sleep(args.watch)
