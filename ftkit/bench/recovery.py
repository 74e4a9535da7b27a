"""`ftkit bench recovery`: how long the survivors pause when one group fails, and how it comes back.

Pauses are measured from commit to commit, at the survivors, by their own clocks: the pause of a trial is the
longest stretch without a commit around the failure, the step's own computation included.
"""

from __future__ import annotations

import itertools
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ftkit.bench.processes import Row, Worker, ending, median, spread, wait_for
from ftkit.keeper.embedded import Embedded

SIGNALS = {
    "kill": signal.SIGKILL,
    "backward": signal.SIGUSR2,
    "stop": signal.SIGSTOP,
    "hang": signal.SIGUSR1,
    "leave": signal.SIGTERM,
}
START_LIMIT_S = 90.0


class Cluster:
    """The replica groups of a run."""

    def __init__(self, folder: Path, arguments: list[str], settings: dict[str, object]) -> None:
        """Nothing is started yet."""
        self._folder = folder
        self._arguments = arguments
        self._settings = settings
        self._count = 0
        self.all: list[Worker] = []

    def start(self, rank: int) -> Worker:
        """Start a replica group, for the first time or again."""
        self._count += 1
        log = self._folder / f"{rank}.{self._count}.jsonl"
        own = {**self._settings, "replica_id": f"trainer-{rank}"}
        worker = Worker("ftkit.bench.trainer", self._arguments, log, own)
        self.all.append(worker)
        return worker


def commits(worker: Worker, since: float = 0.0, members: int | None = None) -> list[float]:
    """Return when steps were committed."""
    return [
        float(str(r["t"]))
        for r in worker.rows()
        if r.get("ok") and float(str(r["t"])) > since and members in (None, r["n"])
    ]


def longest_gap(times: list[float], begin: float, end: float) -> float:
    """Return the longest stretch without a commit that overlaps [begin, end], in seconds."""
    pairs = itertools.pairwise(times)
    return max((b - a for a, b in pairs if b > begin and a < end), default=float("nan"))


def measure(
    *,
    groups: int,
    failure: str,
    state_mib: float,
    trials: int,
    period_ms: float,
    lease_ttl: int,
    seed: int,
    progress: Callable[[str], None],
) -> Row:
    """Run the trials, one failure after the other on one job; times in seconds and milliseconds."""
    dice = random.Random(seed)
    results: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ftkit-bench-") as folder, Embedded() as etcd:
        settings: dict[str, object] = {"etcd": etcd.endpoints[0], "job": "recovery", "lease_ttl": lease_ttl}
        if failure == "hang":
            settings["progress_timeout"] = 2.0
        arguments = ["--period-ms", str(period_ms), "--state-mib", str(state_mib)]
        cluster = Cluster(Path(folder), arguments, settings)
        with ending(cluster.all):
            running = {rank: cluster.start(rank) for rank in range(groups)}
            for trial in range(trials):
                result = _trial(cluster, running, trial % groups, failure, dice)
                results.append(result)
                progress(f"trial {trial + 1} of {trials}: {result}")
    return _summary(results, groups, failure, state_mib, period_ms, lease_ttl)


def _trial(
    cluster: Cluster, running: dict[int, Worker], victim: int, failure: str, dice: random.Random
) -> Row:
    groups = len(running)
    begun = time.monotonic()
    wait_for(
        lambda: all(len(commits(w, begun, groups)) >= 20 for w in running.values()),
        START_LIMIT_S,
        f"all {groups} groups to train together",
        list(running.values()),
    )
    time.sleep(dice.uniform(0.0, 0.1))  # so that the failure hits any part of the step
    survivors = {r: w for r, w in running.items() if r != victim}
    failed_at = time.monotonic()
    running[victim].process.send_signal(SIGNALS[failure])
    wait_for(
        lambda: all(len(commits(w, failed_at, groups - 1)) >= 3 for w in survivors.values()),
        START_LIMIT_S,
        "the survivors to commit",
        list(survivors.values()),
    )
    if failure == "backward":
        failed_at = next(float(str(r["killed_at"])) for r in running[victim].rows() if "killed_at" in r)
    first = {r: commits(w, failed_at, groups - 1)[0] for r, w in survivors.items()}
    result: Row = {
        "pause_s": [longest_gap(commits(w), failed_at, first[r]) for r, w in survivors.items()],
        "to_next_commit_s": [first[r] - failed_at for r in survivors],
        "failed_steps": max(_failed_steps(w, failed_at) for w in survivors.values()),
    }
    running[victim].end()
    again = running[victim] = cluster.start(victim)
    wait_for(
        lambda: (
            bool(commits(again, members=groups))
            and all(len(commits(w, again.started, groups)) >= 5 for w in survivors.values())
        ),
        START_LIMIT_S,
        "the group to come back",
        [again, *survivors.values()],
    )
    joined = commits(again)[0]
    result["rejoin_s"] = joined - again.started
    result["join_pause_s"] = max(
        longest_gap(commits(w), again.started, joined + 1.0) for w in survivors.values()
    )
    result["join_failed_steps"] = max(_failed_steps(w, again.started) for w in survivors.values())
    return result


def _failed_steps(worker: Worker, since: float) -> int:
    return sum(1 for r in worker.rows() if r.get("ok") is False and float(str(r["t"])) > since)


def _numbers(results: list[Row], key: str) -> list[float]:
    found = [r[key] for r in results]
    flat = [x for f in found for x in (f if isinstance(f, list) else [f])]
    return [float(str(x)) for x in flat]


def _summary(
    results: list[Row], groups: int, failure: str, state_mib: float, period_ms: float, lease_ttl: int
) -> Row:
    pauses = [1e3 * p for p in _numbers(results, "pause_s")]
    join = [1e3 * p for p in _numbers(results, "join_pause_s")]
    return {
        "bench": "recovery",
        "groups": groups,
        "failure": failure,
        "state_mib": state_mib,
        "period_ms": period_ms,
        "lease_ttl": lease_ttl,
        "trials": len(results),
        "pause_p50_ms": median(pauses),
        "pause_max_ms": round(max(pauses), 3),
        "to_next_commit_p50_ms": median([1e3 * p for p in _numbers(results, "to_next_commit_s")]),
        "failed_steps": int(sum(_numbers(results, "failed_steps"))),
        "rejoin_s": median(_numbers(results, "rejoin_s")),
        "rejoin_spread_s": spread(_numbers(results, "rejoin_s")),
        "join_pause_ms": median(join),
        "join_pause_max_ms": round(max(join), 3),
        "join_failed_steps": int(sum(_numbers(results, "join_failed_steps"))),
        "each": results,
    }
