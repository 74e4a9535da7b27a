"""Fuzz the parsers of what strangers, peers and etcd send, for as long as one likes; needs `atheris`.

pip install atheris
python scripts/fuzz.py --list
python scripts/fuzz.py store_stranger --seconds 600 --corpus corpus

The functions are those of tests/security/targets.py, which the tests try for a moment. A finding is printed
with the input that causes it; the exit code is then not 0. What is found belongs into the tests.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def main() -> int:
    """Parse the command line and hand over to atheris, which ends the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target", nargs="?", help="the parser to be fuzzed")
    parser.add_argument("--list", action="store_true", help="list the parsers and exit")
    parser.add_argument("--seconds", type=int, default=60, metavar="S", help="for how long (default: 60)")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="keep the inputs that lead somewhere new")
    args = parser.parse_args()
    try:
        import atheris
    except ImportError:
        print("fuzzing needs atheris: pip install atheris (CPython up to 3.12)", file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=["ftkit", "transport"]):
        from tests.security.targets import TARGETS
    if args.list or args.target not in TARGETS:
        print("\n".join(f"{name:16} {target.__doc__}" for name, target in TARGETS.items()))
        return 0 if args.list else 2
    logging.disable(logging.CRITICAL)
    words = [sys.argv[0], f"-max_total_time={args.seconds}", "-max_len=4096", "-timeout=20"]
    if args.corpus is not None:
        args.corpus.mkdir(parents=True, exist_ok=True)
        words.append(str(args.corpus))
    atheris.Setup(words, TARGETS[args.target])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
