"""A small job's log, written by hand, that the tests spoil in one place each."""

from __future__ import annotations

import json
from collections.abc import Callable

from ftkit.chaos.log import Log, collect, parse

Row = dict[str, object]
Files = dict[str, list[Row]]


def row(type: str, at: float, replica: str, pid: int, **more: object) -> Row:
    return {"type": type, "monotonic": at, "replica": replica, "rank": 0, "pid": pid, **more}


def attempt(
    replica: str,
    at: float,
    epoch: int,
    step: int,
    members: str,
    samples: list[int],
    *,
    pid: int,
    committed: bool = True,
) -> list[Row]:
    """The lines of one attempt at a step; `members` are letters."""
    more: Row = {"epoch": epoch, "step": step}
    version = f"{epoch}-{step}" if committed else f"{epoch}-{step - 1}"
    rows = [
        row("draw", at, replica, pid, **more, samples=samples),
        row(
            "step",
            at + 0.1,
            replica,
            pid,
            **more,
            committed=committed,
            members=list(members),
            version=version,
        ),
    ]
    if committed:
        rows.append(row("hash", at + 0.1, replica, pid, version=version, sha256=f"state {version}"))
    return rows


def event(replica: str, at: float, kind: str, epoch: int, step: int, *, pid: int) -> Row:
    return row("event", at, replica, pid, kind=kind, epoch=epoch, step=step)


def end(replica: str, at: float, version: str, position: int, *, pid: int) -> Row:
    place = {"position": position, "holes": []}
    return row("end", at, replica, pid, version=version, sha256=f"state {version}", data=place, error="")


def healthy() -> Files:
    """Epoch 1: a and b; b is killed in step 3; epoch 2: a alone repeats it; epoch 3: b is back and healed."""
    a: list[Row] = [row("start", 0.0, "a", 1, training=100)]
    b: list[Row] = [row("start", 0.0, "b", 2, training=100)]
    for step in (1, 2):
        at = 4 * (step - 1)
        a += attempt("a", step, 1, step, "ab", [at, at + 1], pid=1)
        b += attempt("b", step, 1, step, "ab", [at + 2, at + 3], pid=2)
    a += attempt("a", 3.0, 1, 3, "ab", [8, 9], pid=1, committed=False)
    b += attempt("b", 3.0, 1, 3, "ab", [10, 11], pid=2, committed=False)[:1]
    a += attempt("a", 3.5, 2, 3, "a", [8, 9], pid=1)
    b += [row("start", 3.6, "b", 3, training=100), event("b", 3.7, "healed", 3, 3, pid=3)]
    a += attempt("a", 4.0, 3, 4, "ab", [10, 11], pid=1)
    b += attempt("b", 4.0, 3, 4, "ab", [12, 13], pid=3)
    a.append(end("a", 5.0, "3-4", 14, pid=1))
    b.append(end("b", 5.0, "3-4", 14, pid=3))
    chaos: list[Row] = [
        {"type": "fault", "monotonic": 3.2, "kind": "SIGKILL", "replica": "b", "pid": 2},
        {"type": "over", "monotonic": 6.0},
    ]
    return {"a.0.jsonl": a, "b.0.jsonl": b, "chaos.jsonl": chaos}


def written(files: Files) -> dict[str, bytes]:
    return {name: b"".join(json.dumps(r).encode() + b"\n" for r in rows) for name, rows in files.items()}


def log_of(files: Files) -> Log:
    entries, cuts = [], []
    for name, text in sorted(written(files).items()):
        more, broken = parse(name, text.splitlines())
        entries += more
        cuts += broken
    return collect(entries, cuts, sorted(files))


def find(files: Files, wanted: Callable[[Row], bool]) -> Row:
    """Return the first line that is wanted, to be spoiled."""
    return next(r for rows in files.values() for r in rows if wanted(r))
