"""Find a trainer's processes on this machine, and signal them without ever hitting another one.

A pid is only a number: it may have gone to somebody else. Each signal goes through a pidfd, whose process has
been looked at after that was opened.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from ftkit.keeper.processes import parent_of


def children_of(pid: int) -> list[int]:
    """Return the children of a process, whichever of its threads started them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def is_keeper(pid: int) -> bool:
    """Say whether a process is a keeper."""
    with contextlib.suppress(OSError):
        return b"ftkit.keeper" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


def keepers_of(pid: int) -> list[int]:
    """Return the keepers that a trainer has started and that live."""
    return [child for child in children_of(pid) if is_keeper(child)]


def ranks_of(pid: int) -> list[int]:
    """Return the ranks of a trainer's replica group on this machine, in their order.

    They are the children of one launcher that run under one name, as their environment tells.
    """
    name, parent = variables_of(pid).get("FTKIT_REPLICA_ID"), parent_of(pid)
    if not name or not parent or parent == 1:
        return [pid]
    ranks = {p: int(variables_of(p).get("RANK", "0")) for p in children_of(parent) if is_trainer(p, name)}
    return sorted({pid, *ranks}, key=lambda p: ranks.get(p, 0))


def variables_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty when it may not be read."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(v.partition("=")[::2] for v in text.split("\0") if "=" in v)
    return {}


def is_trainer(pid: int, replica_id: str) -> bool:
    """Say whether a process runs under this name, as its environment tells."""
    return variables_of(pid).get("FTKIT_REPLICA_ID") == replica_id


class Process:
    """One process, whatever its pid is used for later."""

    def __init__(self, pid: int) -> None:
        """Raise ProcessLookupError when there is none."""
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)


def find(pid: int, is_meant: Callable[[], bool]) -> Process | None:
    """Return a process if it is the one that is meant, which is asked when its pid cannot change any more."""
    try:
        process = Process(pid)
    except OSError:
        return None
    if is_meant():
        return process
    process.close()
    return None
