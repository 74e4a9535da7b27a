"""Find the subcommand, import it alone, run it, and turn errors into one line and an exit code.

Importing all commands would import torch and grpc: `ftkit status` starts in a fraction of the time.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from ftkit.config import child_environment
from ftkit.errors import ConfigError, EtcdError, FtkitError

OVERVIEW = """\
Fault tolerant PyTorch training over etcd.

  ftkit demo                                    see it survive, on this machine
  ftkit launch --groups 2 -- train.py           run two replica groups, restart what fails
  ftkit status                                  who trains, in which epoch, and if not, why not
  ftkit doctor                                  check etcd, settings and this machine

`ftkit COMMAND --help` explains a command with examples.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of `ftkit --help`."""

    name: str
    module: str
    help: str


ENTRIES = (
    Entry("demo", "ftkit.cli.demo", "watch training survive failures on this machine"),
    Entry("launch", "ftkit.cli.launch", "run replica groups as local processes, restart those that fail"),
    Entry("status", "ftkit.cli.status", "show who is in, the epoch and step, and why there is no quorum"),
    Entry("watch", "ftkit.cli.watch", "follow epochs, arrivals, departures and aborts as they happen"),
    Entry("dashboard", "ftkit.cli.dashboard", "a live view of the job in the browser or the terminal"),
    Entry("drain", "ftkit.cli.drain", "ask a replica group to leave at its next step boundary"),
    Entry("evict", "ftkit.cli.evict", "throw a replica group out at once"),
    Entry("verify", "ftkit.cli.verify", "check from the logs of all trainers that nothing was lost"),
    Entry("chaos", "ftkit.cli.chaos", "kill, freeze and drain members of a running job, by a seed"),
    Entry("doctor", "ftkit.cli.doctor", "check etcd, the settings and this machine"),
    Entry("bench", "ftkit.cli.bench", "measure recovery and overhead"),
)


class Command(Protocol):
    """What the module of a subcommand offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit code."""


def available() -> tuple[Entry, ...]:
    """Return the commands whose module is installed."""
    return tuple(e for e in ENTRIES if importlib.util.find_spec(e.module) is not None)


def build_parser(chosen: str | None) -> tuple[argparse.ArgumentParser, Command | None]:
    """Return the parser with all commands listed, and the chosen one's flags and module loaded."""
    parser = argparse.ArgumentParser(
        prog="ftkit", description=OVERVIEW, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and log what is done")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    command: Command | None = None
    for entry in available():
        if entry.name != chosen:
            commands.add_parser(entry.name, help=entry.help, add_help=False)
            continue
        module = importlib.import_module(entry.module)
        command = cast("Command", module)
        own = commands.add_parser(
            entry.name,
            help=entry.help,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=getattr(module, "EXAMPLES", None),
            allow_abbrev=False,  # an abbreviation that works today would be ambiguous tomorrow
        )
        command.add_arguments(own)
    return parser, command


def find_command(argv: Sequence[str]) -> str | None:
    """Return the first word of argv that is no flag."""
    return next((word for word in argv if not word.startswith("-")), None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = bool(child_environment().get("FTKIT_DEBUG")) or words[:1] == ["--debug"]
    try:
        return _run(words, debug)
    except ConfigError as error:
        if debug:
            raise
        return _complain(error, 2)
    except FtkitError as error:
        if debug:
            raise
        return _complain(error, 1, " (`ftkit doctor` looks into it)" if isinstance(error, EtcdError) else "")
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `ftkit watch | head`
        # The interpreter flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(words: list[str], debug: bool) -> int:
    # What follows -- belongs to the launched program, however much it looks like our flags.
    own, rest = words, None
    if "--" in words:
        at = words.index("--")
        own, rest = words[:at], words[at + 1 :]
    parser, command = build_parser(find_command(own))
    args = parser.parse_args(own)
    if args.version:
        import importlib.metadata

        print(f"ftkit {importlib.metadata.version('ftkit')}")
        return 0
    if command is None:
        parser.print_help()
        return 2 if words else 0
    if debug:
        import logging

        logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    args.after_dashes = rest
    if rest is not None and not getattr(command, "TAKES_COMMAND", False):
        parser.error(f"{args.command} takes nothing after --")
    return command.run(args)


def _complain(error: FtkitError, code: int, hint: str = "") -> int:
    print(f"ftkit: {error}{hint}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
