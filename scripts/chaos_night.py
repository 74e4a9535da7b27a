#!/usr/bin/env python3
"""Run the long form of the suite, part after part, and say at the end how each went: `make chaos`.

    python scripts/chaos_night.py                   everything; half an hour on two cores
    python scripts/chaos_night.py --only seed       the parts whose names hold this word
    python scripts/chaos_night.py --list            what there is

All parts run even if one fails, so that one night tells everything. What follows `--` goes to chaos.py.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LONG = "tests/chaos/test_long.py"
SEEDS = 5
SEED_S = 90


def parts(more: list[str]) -> list[tuple[str, list[str]]]:
    """Return the names and the command lines of all parts."""
    pytest = [sys.executable, "-m", "pytest", "-m", "long", "-p", "no:cacheprovider"]
    chaos = [sys.executable, str(HERE / "chaos.py"), "--groups", "3", "--seconds", str(SEED_S)]
    found = [
        ("long tests of the parts", [*pytest, "-q", f"--ignore={LONG}"]),
        *(
            (f"each fault alone, {n} groups", [*pytest, "-q", f"{LONG}::test_each_fault_alone[{n}]"])
            for n in (2, 3, 5)
        ),
        ("kills, etcd of three, partitions, ranks", [*pytest, "-v", LONG, "-k", "not each_fault_alone"]),
    ]
    return found + [(f"seed {n}", [*chaos, "--seed", str(n), *more]) for n in range(1, SEEDS + 1)]


def main(argv: list[str] | None = None) -> int:
    """Run, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", default="", metavar="WORD", help="only parts with this in their names")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    parser.add_argument("more", nargs="*", metavar="ARG", help="for scripts/chaos.py")
    args = parser.parse_args(argv)
    chosen = [part for part in parts(args.more) if args.only in part[0]]
    if args.list or not chosen:
        print("\n".join(name for name, _ in parts(args.more)))
        return 0 if args.list else 2
    lines, failed = [], 0
    for number, (name, command) in enumerate(chosen, 1):
        print(f"=== {number} of {len(chosen)}: {name}", flush=True)
        begun = time.monotonic()
        code = subprocess.run(command, cwd=HERE.parent, check=False).returncode
        failed += code != 0
        lines.append(f"  {'ok' if code == 0 else 'FAILED':6}  {time.monotonic() - begun:6.0f} s  {name}")
    print("=== summary", *lines, sep="\n")
    print(f"{failed} of {len(chosen)} parts failed" if failed else f"all {len(chosen)} parts are ok")
    return int(failed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
