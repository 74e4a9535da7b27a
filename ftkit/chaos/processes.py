"""Find a trainer's processes on this machine, and signal them without ever hitting another one.

A pid is only a number: it may have gone to somebody else. Each signal goes through a pidfd whose process has
been looked at after it was opened.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path


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


def variables_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty when it may not be read."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(v.partition("=")[::2] for v in text.split("\0") if "=" in v)
    return {}


def is_trainer(pid: int, replica_id: str) -> bool:
    """Say whether a process runs under this name, as its environment tells."""
    return variables_of(pid).get("FTKIT_REPLICA_ID") == replica_id


def send(pid: int, number: signal.Signals, is_meant: Callable[[int], bool]) -> bool:
    """Signal a process if it is the one that is meant; say whether it was sent."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if is_meant(pid):
                signal.pidfd_send_signal(descriptor, number)
                return True
        finally:
            os.close(descriptor)
    return False
