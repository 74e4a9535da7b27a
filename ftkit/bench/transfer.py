"""`ftkit bench transfer`: how fast a state moves, beside a bare socket, and what it costs the two sides.

All methods take turns in one run, with the same two processes and tensors; ratios are those of medians.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from ftkit.bench.processes import Row
from ftkit.bench.transfer_bytes import measure_bytes
from ftkit.config import child_environment
from ftkit.errors import FtkitError

SNAPSHOTS = ("http_snapshot", "same_host_snapshot")
OURS = (
    *("raw1", "raw2", "memcpy", "http", "http_snapshot", "same_host", "same_host_snapshot"),
    *("gloo", "gloo_one_device"),
)
THEIRS = ("torchft_http", "torchft_http_4_chunks")
SLACK = 2 << 30
"""Memory for two processes with torch, and for what is not in place."""


class Side:
    """A process that holds the state; a context manager."""

    def __init__(self, size_mib: int, role: str) -> None:
        self._role = role
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ftkit.bench.transfer_side", str(size_mib), role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**child_environment(), "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def ask(self, what: str, **rest: str) -> Row:
        """Have it do something, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **rest}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise FtkitError(f"the {self._role} of the benchmark ended with code {self._process.wait(10)}")
        answer: Row = json.loads(line)
        if "error" in answer:
            raise FtkitError(f"{rest.get('method', what)} failed at the {self._role}: {answer['error']}")
        return answer

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


def available_memory() -> int:
    """Return how many bytes may still be used, by the machine's and this container's word."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = int(found[1]) << 10 if found is not None else 0
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        free = min(free, int(limit) - int(used))
    except (OSError, ValueError):
        pass  # no limit
    return free


def measure(*, sizes: Sequence[int], reps: int, progress: Callable[[str], None]) -> Row:
    """Move states of these sizes (MiB), each `reps` times by each method, after once to warm up."""
    results: list[Row] = []
    notes: list[str] = []
    methods = list(OURS)
    if importlib.util.find_spec("torchft") is None:
        notes.append("torchft is not installed")
    else:
        methods += THEIRS
    for size in sizes:
        need, free = 3 * (size << 20) + SLACK, available_memory()
        if need > free:
            notes.append(f"{size} MiB skipped: needs {need >> 20} MiB of memory, {free >> 20} are there")
            progress(notes[-1])
            continue
        results += _measure_size(size, methods, reps, notes, progress)
    progress("bytes that a source sends")
    return {
        "bench": "transfer",
        "cpus": len(os.sched_getaffinity(0)),
        "reps": reps,
        "results": results,
        "sent": measure_bytes(),
        "notes": notes,
    }


def _measure_size(
    size: int, methods: Sequence[str], reps: int, notes: list[str], progress: Callable[[str], None]
) -> list[Row]:
    rounds: dict[str, list[tuple[Row, Row]]] = {name: [] for name in methods}
    with Side(size, "source") as source, Side(size, "receiver") as receiver:
        right = source.ask("digest")["digest"]
        for turn in range(reps + 1):
            for name in [name for name in methods if name in rounds]:
                if name in THEIRS and available_memory() < (size << 20) + SLACK // 2:
                    notes.append(f"{name} of {size} MiB skipped: no memory for its copy")
                    del rounds[name]
                    continue
                try:
                    both = _move(source, receiver, name, str(turn))
                except FtkitError as error:
                    if name not in THEIRS:
                        raise
                    notes.append(f"{size} MiB: {error}")
                    del rounds[name]
                    continue
                if name != "memcpy" and receiver.ask("digest")["digest"] != right:
                    raise FtkitError(f"{name} delivered wrong bits")
                if turn:
                    rounds[name].append(both)
                    progress(f"{size} MiB, round {turn} of {reps}, {name}: {both[1]['seconds']:.3f} s")
    return [_figures(name, size, each, rounds["raw1"]) for name, each in rounds.items()]


def _move(source: Side, receiver: Side, name: str, version: str) -> tuple[Row, Row]:
    opened = source.ask("open", method=name, version=version)
    received = receiver.ask("receive", method=name, version=version, address=str(opened["address"]))
    return {**source.ask("close", method=name), "publish_s": opened["seconds"]}, received


def _median(rows: Sequence[Row], key: str) -> float | None:
    values = [float(str(row[key])) for row in rows if row[key] is not None]
    return statistics.median(values) if values else None


def _figures(name: str, size: int, rounds: list[tuple[Row, Row]], raw: list[tuple[Row, Row]]) -> Row:
    sent, received = [s for s, _ in rounds], [r for _, r in rounds]
    nbytes = size << 20
    seconds, raw_seconds = _median(received, "seconds"), _median([r for _, r in raw], "seconds")
    cpu, publishing = _median(sent, "cpu_s"), _median(sent, "publish_s")
    rates = [nbytes / float(str(r["seconds"])) / 1e9 for r in received]
    raw_cpu = statistics.median(float(str(s["cpu_s"])) + float(str(r["cpu_s"])) for s, r in raw)
    assert seconds is not None
    assert raw_seconds is not None
    assert cpu is not None
    assert publishing is not None

    def sizes(rows: list[Row]) -> float | None:
        extra = _median(rows, "extra_bytes")
        return None if extra is None else round(extra / nbytes, 4)

    at_source = sizes(sent)
    if at_source is not None and name in SNAPSHOTS:
        at_source += 1  # the copy's memory, which is kept from one round for the next

    return {
        "method": name,
        "size_mib": size,
        "gb_s": round(nbytes / seconds / 1e9, 3),
        "gb_s_min": round(min(rates), 3),
        "gb_s_max": round(max(rates), 3),
        "ratio_to_raw1": round(raw_seconds / seconds, 3),
        "publish_s": round(publishing, 4),
        "extra_memory_source": at_source,
        "extra_memory_receiver": sizes(received),
        "source_cpu_ratio": round(cpu / raw_cpu, 3) if raw_cpu else None,
    }


def table(result: Row) -> str:
    """Return the figures for people."""
    notes = result["notes"]
    assert isinstance(notes, list)
    return "\n".join([*_lines(result["results"]), "", *_lines(result["sent"]), *notes])


def _lines(rows: object) -> list[str]:
    assert isinstance(rows, list)
    heads = list(rows[0]) if rows else []
    cells = [heads, *([str(row[head]) for head in heads] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    return ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
