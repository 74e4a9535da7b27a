"""Start the processes of a benchmark, read the JSON lines that they print, and end them.

It knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ftkit.config import child_environment
from ftkit.errors import FtkitError

Row = dict[str, object]


class Worker:
    """One process of a benchmark; its rows are read from a file, so that it never waits for a reader."""

    def __init__(
        self, module: str, arguments: Sequence[str], log: Path, settings: Mapping[str, object]
    ) -> None:
        """Start `python -m module arguments`."""
        self.log = log
        self.started = time.monotonic()
        self._rows: list[Row] = []
        self._read = 0
        environment = {**child_environment(**settings), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as out, log.with_suffix(".err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env=environment,
            )

    def rows(self) -> list[Row]:
        """Return the complete rows so far; only the new ones are read."""
        with self.log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._read += len(new)
        self._rows += [json.loads(line) for line in new.splitlines() if line.startswith(b"{")]
        return self._rows

    def complaint(self) -> str:
        """Return the end of what the process wrote to its standard error."""
        lines = self.log.with_suffix(".err").read_text(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else "nothing on its standard error"

    def end(self) -> None:
        """End the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def ending(workers: list[Worker]) -> Iterator[list[Worker]]:
    """End all workers that are in the list when the context ends."""
    try:
        yield workers
    finally:
        for worker in workers:
            worker.end()


def wait_for(
    condition: Callable[[], bool], timeout_s: float, what: str, alive: Sequence[Worker] = ()
) -> None:
    """Wait until a condition holds.

    Raises:
        FtkitError: it did not within `timeout_s`, or one of `alive` has ended.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        for worker in alive:
            if worker.process.poll() is not None:
                raise FtkitError(
                    f"while waiting for {what} a worker ended with code {worker.process.returncode}: "
                    f"{worker.complaint()}"
                )
        if time.monotonic() > deadline:
            raise FtkitError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.03)


def all_ended_well(workers: Sequence[Worker]) -> bool:
    """Say whether all workers have ended.

    Raises:
        FtkitError: one of them with an error.
    """
    codes = [w.process.poll() for w in workers]
    for worker, code in zip(workers, codes, strict=True):
        if code is not None and code != 0:
            raise FtkitError(f"a worker ended with code {code}: {worker.complaint()}")
    return all(code == 0 for code in codes)


def say(row: Row) -> None:
    """Print one row, for the process that measures."""
    os.write(1, json.dumps(row).encode() + b"\n")


def etcd_requests(url: str) -> dict[str, int]:
    """Count the requests that an etcd has handled, by method; streams are not requests."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    counts: dict[str, int] = {}
    for line in text.splitlines():
        if (
            line.startswith("grpc_server_handled_total{")
            and 'grpc_type="unary"' in line
            and not line.endswith(" 0")
        ):
            method = line.split('grpc_method="')[1].split('"')[0]
            counts[method] = counts.get(method, 0) + int(float(line.rsplit(" ", 1)[1]))
    return counts


def median(values: Sequence[float]) -> float:
    """Return the median, rounded for print."""
    return round(statistics.median(values), 4)


def spread(values: Sequence[float]) -> list[float]:
    """Return [median, least, greatest]."""
    return [median(values), round(min(values), 4), round(max(values), 4)]
