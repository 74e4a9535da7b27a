"""Run the demo's job through `ftkit launch`, and do harm to its trainers.

The launch is a process of its own that dies with this one; it leaves none of its own behind (see `launcher`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from ftkit.errors import ConfigError
from ftkit.keeper.processes import parent_of

END_S = 40.0
SCRIPT = "train_lm.py"


def find_script() -> Path:
    """Return the training script: next to the package in a clone, or where the package installs its data.

    Raises:
        ConfigError: it is in neither place.
    """
    clone = Path(__file__).resolve().parents[2] / "scripts" / SCRIPT
    installed = Path(sysconfig.get_path("data")) / "share" / "ftkit" / SCRIPT
    for path in (clone, installed):
        if path.is_file():
            return path
    raise ConfigError(
        f"the demo trains with {SCRIPT}, which is neither at {clone} nor at {installed}: "
        "run it from a clone of the repository, or name the script with --script"
    )


class Launch:
    """A running `ftkit launch`; a context manager that ends it.

    `before_exec` runs in the new process first: see `launcher.process.die_with_parent`. `wrap` is a command
    that runs the one that follows it, elsewhere.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        before_exec: Callable[[], None] | None = None,
        wrap: Sequence[str] = (),
    ) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*wrap, sys.executable, "-m", "ftkit.cli.main", "launch", *words],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends the launch in order
                preexec_fn=before_exec,
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it, by force in the end; its guardian then cleans up."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                break
            self._process.send_signal(number)  # launch takes a second SIGTERM for: at once
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S / 4)

    def ask_to_end(self) -> None:
        """Let all groups leave at a step boundary."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    @property
    def exit_code(self) -> int | None:
        """The exit code once it has ended."""
        return self._process.poll()

    def last_words(self, lines: int = 15) -> str:
        """Return the end of its output."""
        with contextlib.suppress(OSError):
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])
        return ""


def signal_trainer(pid: int, replica_id: str, number: signal.Signals, *, family: bool = False) -> None:
    """Send a signal to a trainer, and with `family` to its keeper too; nothing if the pid is not it."""
    mark = f"FTKIT_REPLICA_ID={replica_id}".encode()
    with contextlib.suppress(OSError):
        if mark not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return
        for one in (pid, *(descendants(pid) if family else ())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, number)


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    parents = {one: parent_of(one) for one in pids}
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]
