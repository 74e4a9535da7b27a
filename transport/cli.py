"""`python -m transport`: serve a safetensors file, fetch one from all who serve it.

Decides flags, words and exit codes only; see `files.py` and `download.py` for the work.
"""

from __future__ import annotations

import argparse
import getpass
import json
import logging
import os
import secrets
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

from transport.bar import Bar, megabytes
from transport.errors import TransportError

VARIABLE: Final = "TRANSPORT_TOKEN"

EXAMPLES: Final = """\
examples:
  python -m transport serve model.safetensors
  python -m transport serve model.safetensors --listen 10.0.0.5:4242 --token-file secret
  python -m transport fetch http://10.0.0.5:4242 http://10.0.0.6:4242 -o model.safetensors --token-file secret

The token is that of --token-file, else that of the variable TRANSPORT_TOKEN, else `serve` makes one.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with both commands."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m transport",
        description="Move safetensors files between processes: verified, from many sources at once.",
        epilog=EXAMPLES,
        formatter_class=raw,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve", help="serve a file until Ctrl-C", epilog=EXAMPLES, formatter_class=raw
    )
    serve.add_argument("file", type=Path, help="a safetensors file; it must not change meanwhile")
    serve.add_argument(
        "--listen", metavar="HOST:PORT", default="127.0.0.1:0", help="one address; port 0: a free one"
    )
    serve.add_argument("--advertise", metavar="HOST", help="the name by which others reach this machine")
    serve.add_argument("--version", metavar="NAME", help="what it is fetched as (default: the file's name)")
    fetch = commands.add_parser("fetch", help="fetch a file", epilog=EXAMPLES, formatter_class=raw)
    fetch.add_argument(
        "url", nargs="+", metavar="URL", help="a source; several share the work, and stand in for each other"
    )
    fetch.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="where to put it")
    fetch.add_argument("--version", metavar="NAME", help="what to fetch (default: what is served)")
    fetch.add_argument("--streams", type=int, default=4, help="connections in all (default 4)")
    fetch.add_argument(
        "--timeout", type=float, default=3600.0, metavar="S", help="longest time in all, in seconds"
    )
    for each in (serve, fetch):
        each.add_argument("--token-file", metavar="FILE", help="file that holds the token; -: standard input")
        each.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(format="transport: %(message)s", level=logging.WARNING)
    try:
        return _serve(args) if args.command == "serve" else _fetch(args)
    except _Usage as error:
        sys.stderr.write(f"transport: {error}\n")
        return 2
    except (TransportError, OSError) as error:
        sys.stderr.write(f"transport: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


class _Usage(Exception):
    """The flags make no sense."""


def _token(args: argparse.Namespace) -> str:
    """Return the token that was given, else an empty string."""
    if args.token_file is None:
        token = os.environ.get(VARIABLE, "")
    elif args.token_file == "-":
        token = sys.stdin.readline()
    else:
        token = Path(args.token_file).read_text(encoding="utf-8")
    token = token.strip()
    if args.token_file is not None and not token:
        raise _Usage(f"{args.token_file} holds no token")
    if not token.isascii() or (token and not token.isprintable()):
        raise _Usage("the token must be one line of printable ASCII")
    return token


def _serve(args: argparse.Namespace) -> int:
    from transport.http import HTTPTransport  # not above: torch takes a second, --help must not

    host, colon, port = args.listen.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise _Usage(f"--listen {args.listen}: give HOST:PORT, for instance 127.0.0.1:4242")
    advertise = args.advertise or (socket.gethostname() if host in ("0.0.0.0", "::") else None)
    given = _token(args)
    token = given or secrets.token_urlsafe(24)
    version = args.version or args.file.name
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with HTTPTransport(token=token, bind=host, port=int(port), advertise=advertise) as transport:
        transport.publish_file(version, args.file)
        size = args.file.stat().st_size
        if args.json:
            made = {} if given else {"token": token}
            row = {"url": transport.address, "version": version, "size": size, **made}
            sys.stdout.write(json.dumps(row) + "\n")
        else:
            sys.stdout.write(_invitation(args, transport.address, version, size, "" if given else token))
        sys.stdout.flush()
        ended.wait()
    return 0


def _invitation(args: argparse.Namespace, url: str, version: str, size: int, made: str) -> str:
    secret = f"--token-file {shlex.quote(args.token_file)}" if args.token_file not in (None, "-") else ""
    command = f"python -m transport fetch {url} -o {shlex.quote(args.file.name)} {secret}".rstrip()
    export = f"    export {VARIABLE}={shlex.quote(made)}\n" if made else ""
    return (
        f"Serving {args.file} ({megabytes(size)}) as {version!r} on {url}, until Ctrl-C. To fetch it:\n\n"
        f"{export}    {command}\n\n"
        f"or with any client that sends `Authorization: Bearer <token>`:\n\n"
        f"    {url}/v1/{quote(version, safe='')}/state.safetensors\n"
    )


def _fetch(args: argparse.Namespace) -> int:
    from transport.download import Downloader, split_url

    try:
        found = [split_url(url) for url in args.url]
    except ValueError as error:
        raise _Usage(error) from None
    if args.streams < 1 or not args.timeout > 0:
        raise _Usage("--streams and --timeout must be positive")
    named = {version for _, version in found if version is not None} | ({args.version} - {None})
    if len(named) > 1:
        raise _Usage(f"one version can be fetched at a time, not {' and '.join(sorted(named))}")
    token = _token(args)
    if not token and sys.stdin.isatty() and not args.json:
        token = getpass.getpass("token: ").strip()
    if not token:
        raise _Usage(f"no token: set {VARIABLE} or give --token-file")
    sources = [address for address, _ in found]
    downloader = Downloader(token=token, deadline_s=args.timeout, streams=args.streams)
    version = named.pop() if named else downloader.find_version(sources)
    if args.json:
        done = downloader.fetch(sources, version, args.output)
    else:
        with Bar(sys.stderr) as bar:
            done = downloader.fetch(sources, version, args.output, progress=bar)
    rate = done.size / max(done.seconds, 1e-9)
    if args.json:
        row = {
            "path": str(done.path),
            "version": version,
            "size": done.size,
            "seconds": round(done.seconds, 6),
            "gb_s": round(rate / 1e9, 3),
            "sources": done.sources,
        }
        sys.stdout.write(json.dumps(row) + "\n")
    else:
        shares = ", ".join(f"{address}: {megabytes(count)}" for address, count in done.sources.items())
        sys.stdout.write(
            f"{done.path}: {megabytes(done.size)} in {done.seconds:.2f} s, {rate / 1e9:.2f} GB/s, verified "
            f"({shares})\n"
        )
    return 0
