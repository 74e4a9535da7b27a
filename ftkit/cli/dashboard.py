"""Show a job live: in a browser, or with --terminal right here.

Who is a member and in which state, steps and times, the epoch and why it was formed, why there is no quorum,
and what has happened. It only reads etcd, by watching it, so any number of browsers may look.

There is no password: by default only this machine can reach it. From elsewhere, rather than listening on
all addresses, forward the port: ssh -L 8275:127.0.0.1:8275 HOST
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import signal
import sys

import msgspec

from ftkit.cli.connect import add_connection, add_json, open_etcd, settle
from ftkit.config import Settings
from ftkit.config import add_arguments as add_settings
from ftkit.dashboard.guard import DEFAULT_HOST, DEFAULT_PORT, is_loopback, parse_listen
from ftkit.errors import ConfigError

EXAMPLES = """\
examples:
  ftkit dashboard --job llm-7
  ftkit dashboard --terminal
  ftkit dashboard --listen 0.0.0.0:8275 --allow-host trainer-0.example.org
  ftkit dashboard --json                       print the address for a program
  curl -s http://127.0.0.1:8275/state.json     what the page shows, as JSON
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `ftkit dashboard`."""
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help=f"where to serve the page (default: {DEFAULT_HOST}:{DEFAULT_PORT}; port 0: any free one)",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name under which browsers may ask for the page, besides localhost, addresses and the "
        "name in --listen; may be given several times",
    )
    parser.add_argument("--terminal", action="store_true", help="show it in this terminal, serve nothing")
    add_json(parser)
    add_connection(parser)
    add_settings(parser, ("max_replicas",))


def run(args: argparse.Namespace) -> int:
    """Show the job until Ctrl-C or SIGTERM."""
    if args.terminal:
        _check_terminal(args)
    host, port = parse_listen(args.listen or f"{DEFAULT_HOST}:{DEFAULT_PORT}")
    settings = settle(args)
    # Interruptions of etcd are shown, and not told by the library as well.
    logging.getLogger("ftkit.keeper").addHandler(logging.NullHandler())
    signal.signal(signal.SIGTERM, _stop)
    try:
        if args.terminal:
            _show(settings)
        else:
            _serve(settings, host, port, args)
    except SystemExit:
        return 0
    return 0


def _stop(*_: object) -> None:
    raise SystemExit(0)


def _check_terminal(args: argparse.Namespace) -> None:
    if args.json or args.listen or args.allow_host:
        raise ConfigError("--terminal serves nothing: leave out --json, --listen and --allow-host")
    if not sys.stdout.isatty():
        raise ConfigError("--terminal needs a terminal; `ftkit status --watch` prints plain text anywhere")
    if importlib.util.find_spec("rich") is None:
        raise ConfigError("--terminal needs rich: pip install 'ftkit[dashboard]'")


def _show(settings: Settings) -> None:
    from rich.console import Console

    from ftkit.dashboard.feed import Feed
    from ftkit.dashboard.terminal import follow

    with open_etcd(settings) as etcd:
        etcd.get(
            settings.prefix
        )  # an etcd that refuses us ends the command; one that goes away later does not
        with Feed(etcd, settings.job, settings.policy()) as feed:
            follow(feed, Console())


def _serve(settings: Settings, host: str, port: int, args: argparse.Namespace) -> None:
    from ftkit.dashboard.feed import Feed
    from ftkit.dashboard.server import Server

    with open_etcd(settings) as etcd:
        etcd.get(settings.prefix)
        with Feed(etcd, settings.job, settings.policy()) as feed:
            try:
                server = Server(host, port, feed, tuple(args.allow_host))
            except ConfigError:
                if args.listen:
                    raise
                server = Server(host, 0, feed, tuple(args.allow_host))  # another dashboard has the usual port
            with server:
                _announce(settings.job, host, server.server_port, args)
                feed.wait_end(None)


def _announce(job: str, host: str, port: int, args: argparse.Namespace) -> None:
    everywhere = host in ("0.0.0.0", "::")
    shown = DEFAULT_HOST if everywhere else f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}/"
    if args.json:
        print(msgspec.json.encode({"url": url, "host": host, "port": port, "job": job}).decode(), flush=True)
    else:
        also = ", and on all other addresses of this machine" if everywhere else ""
        print(f"job {job}: {url}{also} (Ctrl-C ends it)", flush=True)
    if not is_loopback(host):
        print("ftkit: whoever can reach this address can look; there is no password", file=sys.stderr)
