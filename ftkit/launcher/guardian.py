"""Outlive launch by a moment and end every process of its run: the guard against a killed launch.

Run as a script of the standard library alone, so that it costs little. Its argument is the run's mark. Its
standard input tells, line by line, `session <pid>` (a rank, which leads a session of its own), `pid <pid>`
(another process of the run, such as an embedded etcd), `dir <path>` (what is deleted) and `bye`. When the
input closes without `bye`, launch is dead. It knows nothing of replica groups: whatever carries the mark in
its environment is the run's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

KEEPER_GRACE_S = 3.0
"""How long side processes may take to end by themselves: keepers tell etcd of their trainer's death."""


def marked(mark: bytes) -> Iterator[int]:
    """Yield the pids of all other processes whose environment holds the mark."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:  # gone, or another user's
            continue
        if mark in environ.split(b"\0"):
            yield int(entry.name)


def sweep(mark: bytes, grace_s: float) -> int:
    """Let what carries the mark end by itself, then kill the rest; return how many were killed."""
    deadline = time.monotonic() + grace_s
    while any(True for _ in marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    killed = 0
    for _ in range(20):  # again: a process may have forked while we looked
        pids = list(marked(mark))
        killed += sum(kill(pid) for pid in pids)
        if not pids:
            break
        time.sleep(0.02)
    return killed


def kill(pid: int) -> bool:
    """Send SIGKILL; say whether there was anybody to send it to."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main() -> None:
    """Wait for the end of launch and clean up after it if it did not do so itself."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # those are for launch, which then says bye
    mark = os.fsencode(sys.argv[1])
    sessions: set[int] = set()
    others: set[int] = set()
    folders: list[str] = []
    for line in sys.stdin:
        word, _, value = line.rstrip("\n").partition(" ")
        if word == "bye":
            return
        if word == "dir":
            folders.append(value)
        elif value.isdigit():
            (sessions if word == "session" else others).add(int(value))
    # The ranks died with launch (PR_SET_PDEATHSIG); what they had started in their sessions did not.
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) in sessions:
                kill(pid)
    sweep(mark, KEEPER_GRACE_S)
    for pid in others:
        kill(pid)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
