"""Follow a job live: epochs, arrivals, departures, aborts and requests, one line each.

It begins with the last epochs of the job's history and the groups that are there now.
"""

from __future__ import annotations

import argparse
import functools
import logging
import queue
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from ftkit.cli.connect import add_connection, add_json, open_etcd, settle
from ftkit.dashboard.timeline import Moment, Timeline
from ftkit.errors import ConfigError

if TYPE_CHECKING:
    from ftkit.keeper.etcd import KV
    from ftkit.keeper.watch import WatchEvent

Inbox: TypeAlias = "queue.SimpleQueue[list[Moment] | Exception]"

EXAMPLES = """\
examples:
  ftkit watch --job llm-7
  ftkit watch --history 100 --tickets
  ftkit watch --json | jq 'select(.event == "departed")'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `ftkit watch`."""
    add_json(parser)
    parser.add_argument(
        "--history", type=int, default=10, metavar="N", help="past epochs to begin with (default: 10)"
    )
    parser.add_argument("--tickets", action="store_true", help="show also who asks for a new epoch")
    parser.add_argument("--for", dest="for_s", type=float, metavar="S", help="end after S seconds")
    add_connection(parser)


def run(args: argparse.Namespace) -> int:
    """Print what happens until Ctrl-C, or for the time given."""
    from ftkit.keeper.etcd import prefix_end
    from ftkit.keeper.watch import Watch

    if args.history < 0:
        raise ConfigError(f"--history must not be negative, got {args.history}")
    settings = settle(args)
    prefix = settings.prefix
    timeline = Timeline(settings.job, tickets=args.tickets)
    inbox: Inbox = queue.SimpleQueue()

    def listing(keys: Sequence[KV], _revision: int) -> None:
        found = {kv.key: kv.value for kv in keys}
        inbox.put(timeline.listed(found, num_history=args.history))

    def changes(events: Sequence[WatchEvent], _revision: int) -> None:
        inbox.put([moment for e in events for moment in timeline.changed(e.key, e.value)])

    # Interruptions are told below, once each, and not by the library as well.
    logging.getLogger("ftkit.keeper").addHandler(logging.NullHandler())
    with open_etcd(settings) as etcd:
        etcd.get(prefix)  # an etcd that refuses us ends the command; one that goes away later does not
        word = functools.partial(inbox.put, [])  # tells that etcd is there, also when nothing has changed
        with Watch(etcd, prefix, prefix_end(prefix), listing, changes, word, inbox.put):
            _print_until(inbox, args)
    return 0


def _print_until(inbox: Inbox, args: argparse.Namespace) -> None:
    """Print the moments as they come, and once per interruption that etcd is away."""
    end = None if args.for_s is None else time.monotonic() + args.for_s
    away = False
    while True:
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            return
        try:
            news = inbox.get(timeout=left)
        except queue.Empty:
            return
        if isinstance(news, Exception):
            if not away:
                _print(Moment(event="trouble", text=f"etcd: {news}; trying again"), args.json)
            away = True
            continue
        if away:
            _print(Moment(event="recovered", text="etcd answers again"), args.json)
        away = False
        for moment in news:
            _print(moment, args.json)


def _print(moment: Moment, as_json: bool) -> None:
    unknown = moment.time is None and moment.earlier
    now = time.time() if moment.time is None else moment.time
    if as_json:
        stamped = moment if unknown else msgspec.structs.replace(moment, time=now)
        print(msgspec.json.encode(stamped).decode(), flush=True)
        return
    clock = "%m-%d %H:%M:%S" if time.time() - now > 12 * 3600 else "%H:%M:%S"
    stamp = "earlier " if unknown else time.strftime(clock, time.localtime(now))
    print(f"{stamp}  {moment.text}", flush=True)
