"""Run the simulation over many seeds, or tell the story of one.

python scripts/simulate.py --seeds 1000 --start 0
python scripts/simulate.py --seed 17 --story
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from simulation.run import draw_any, run


def try_seed(seed: int) -> tuple[int, str, int, int]:
    """Run one seed; return its violation, if any, and how much was done."""
    outcome = run(draw_any(seed))
    return seed, outcome.violation, outcome.num_commits, outcome.num_epochs


def try_seeds(seeds: range, workers: int) -> Iterator[tuple[int, str, int, int]]:
    """Run many seeds, in several processes if asked for."""
    if workers <= 1:
        yield from map(try_seed, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(try_seed, seeds, chunksize=8)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this one seed only")
    parser.add_argument("--story", action="store_true", help="tell the story even if all is well")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--most", type=int, default=10, help="stop after so many failing seeds")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        outcome = run(draw_any(arguments.seed), keep_story=True)
        if arguments.story or outcome.violation:
            print(outcome)
        print(f"{outcome.num_commits} commits, {outcome.num_epochs} epochs, {outcome.seconds:.1f} s")
        return int(bool(outcome.violation))
    return soak(range(arguments.start, arguments.start + arguments.seeds), arguments.workers, arguments.most)


def soak(seeds: range, workers: int, most: int) -> int:
    """Run all seeds with some progress; tell the story of the first that fails."""
    begun, failed, commits, epochs = time.monotonic(), [], 0, 0
    for done, (seed, violation, num_commits, num_epochs) in enumerate(try_seeds(seeds, workers), 1):
        commits, epochs = commits + num_commits, epochs + num_epochs
        if violation:
            failed.append(seed)
            print(f"seed {seed}: {violation.splitlines()[0]}", flush=True)
            if len(failed) >= most:
                break
        if done % 500 == 0:
            rate = done / (time.monotonic() - begun)
            print(f"{done} seeds, {commits} commits, {epochs} epochs, {rate:.0f} seeds/s", flush=True)
    print(f"{len(failed)} of {done} seeds failed; {commits} commits in {epochs} epochs")
    if failed:
        print(run(draw_any(min(failed)), keep_story=True))
        print(f"again: python scripts/simulate.py --seed {min(failed)} --story")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
