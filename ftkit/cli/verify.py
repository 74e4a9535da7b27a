"""Check from the logs of all trainers that nothing was lost.

Reads the JSON lines that `scripts/train_lm.py --log-jsonl DIR` writes, one file per rank, and decides:
is there one state per version; do committed steps rise by one and epochs only rise; did nobody commit in an
epoch that was superseded; was each sample used once per pass over the data; did no survivor end with an
error; was no wait too long. What a log does not tell (hashes, samples) is shown as not checked.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from ftkit.chaos.oracle import as_text, judge_folder
from ftkit.errors import ConfigError

EXAMPLES = """\
examples:
  train with a log that tells everything, then check it:
    ftkit launch --groups 3 -- scripts/train_lm.py --log-jsonl logs --log-samples --hash-every 1 --steps 500
    ftkit verify logs
  nobody may have waited longer than 5 s, and everything must have been checked:
    ftkit verify logs --max-pause 5 --strict

exit code: 0 when no promise was broken, 1 when one was, or when no step was committed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `ftkit verify`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the trainers' *.jsonl files are")
    parser.add_argument(
        "--max-pause", type=float, metavar="S", help="longest time between two commits (default: any)"
    )
    parser.add_argument(
        "--min-replicas", type=int, default=1, metavar="N", help="fewest members of a commit (default: 1)"
    )
    parser.add_argument("--strict", action="store_true", help="fail when a check had nothing to look at")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Judge and report."""
    if not args.folder.is_dir():
        raise ConfigError(f"{args.folder} is no folder; it should hold the *.jsonl files of the trainers")
    verdict = judge_folder(
        args.folder, max_pause_s=args.max_pause, min_replicas=args.min_replicas, strict=args.strict
    )
    print(msgspec.json.encode(verdict).decode() if args.json else as_text(verdict))
    return 0 if verdict.ok else 1
