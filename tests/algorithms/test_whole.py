"""The pieces together, on real processes with a real etcd."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

LENGTH = 601
DEADLINE_S = 90.0


class Trainer:
    """A replica's process and what it has said."""

    def __init__(self, log: Path, arguments: list[str]) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("trainer.py")), *arguments], stdout=out
            )

    def rows(self, key: str) -> list[dict[str, Any]]:
        whole = [line for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [row for row in map(json.loads, whole) if key in row]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def test_each_sample_is_trained_on_once_though_a_replica_is_killed_and_comes_back(
    tmp_path: Path, etcd_url: str, job: str
) -> None:
    """Two data epochs over three replicas, one of which dies and heals; all end with the same bits."""
    hurry = tmp_path / "hurry"

    def start(rank: int, life: int) -> Trainer:
        names = {"etcd": etcd_url, "job": job, "replica-id": f"r{rank}", "hurry": str(hurry)}
        names |= {"length": str(LENGTH), "workers": "1"}
        arguments = [a for k, v in names.items() for a in (f"--{k}", v)]
        trainer = Trainer(tmp_path / f"{rank}.{life}", arguments)
        stack.callback(trainer.end)
        return trainer

    def trains_with_three(trainer: Trainer) -> bool:
        return any(row["members"] == 3 for row in trainer.rows("committed")[3:])

    with ExitStack() as stack:
        running = [start(rank, 0) for rank in range(3)]

        def back() -> bool:
            assert all(t.process.poll() is None for t in running), "a replica has failed"
            return trains_with_three(running[1])

        killed = running[1]
        wait_for(back, "three replicas")
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait()
        running[1] = start(1, 1)
        wait_for(back, "the killed replica to come back")
        hurry.touch()
        wait_for(lambda: all(t.process.poll() is not None for t in running), "the end of the data")
        assert [t.process.returncode for t in running] == [0, 0, 0]

    ends = [t.rows("finished")[0] for t in running]
    assert ends[0] == ends[1] == ends[2]
    assert ends[0]["finished"] == 2 * LENGTH
    assert ends[0]["rounds"] == ends[0]["step"]
    trained = Counter(i for t in (*running, killed) for row in t.rows("committed") for i in row["committed"])
    # What was killed between the vote and its report has trained on its last batch, and could not say so.
    missing = Counter(dict.fromkeys(range(LENGTH), 2))
    missing.subtract(trained)
    assert all(n >= 0 for n in missing.values()), "no sample twice in one data epoch"
    silent = Counter(killed.rows("drawn")[-1]["drawn"])
    assert +missing in (Counter(), silent)
