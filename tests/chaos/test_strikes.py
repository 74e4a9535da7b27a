"""Strikes at replica groups of several ranks: one of them, or all, and never a stranger."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ftkit.chaos.processes import ranks_of
from ftkit.chaos.strikes import Victim

LAUNCHER = """
import os, subprocess, sys
words = [sys.executable, "-c", "print('ready', flush=True); input()"]
started = [
    subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                     env={**os.environ, "FTKIT_REPLICA_ID": name, "RANK": rank})
    for name, rank in (("a", "1"), ("a", "0"), ("b", "0"))
]
for one in started:
    one.stdout.readline()
print(*(one.pid for one in started), flush=True)
input()
"""


@pytest.fixture
def launched() -> Iterator[list[int]]:
    """The pids of a's ranks 1 and 0, and of a stranger under the same launcher."""
    words = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        try:
            yield pids
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
            launcher.kill()


@pytest.mark.parametrize(
    ("kind", "chance", "struck"),
    [("kill", 0.2, [0]), ("kill", 0.9, [1]), ("drain", 0.5, [1]), ("freeze", 0.0, [0, 1])],
)
def test_one_rank_is_struck_or_all(launched: list[int], kind: str, chance: float, struck: list[int]) -> None:
    second, first, _ = launched
    ranks = [first, second]
    assert ranks_of(first) == ranks_of(second) == ranks
    told: list[int] = []
    victim = Victim("a", first, lambda _, pid: told.append(pid), lambda: True)
    undo = victim.strike(kind, chance)
    assert told == [ranks[number] for number in struck]
    if undo is not None:
        undo()
