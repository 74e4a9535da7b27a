"""What the tests of the command share: a running command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

DEADLINE_S = 30.0


def eventually(condition: Callable[[], object], what: str, within_s: float = DEADLINE_S) -> None:
    """Wait until the condition holds, or fail and say what did not happen."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Say whether a process exists and has not ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Running:
    """A running `ftkit` whose output is collected as it comes."""

    def __init__(self, words: Sequence[str], cwd: Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ftkit.cli.main", *words],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._threads = [
            threading.Thread(target=self._collect, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _collect(stream: object, lines: list[str]) -> None:
        with stream:  # type: ignore[attr-defined]
            lines.extend(line.rstrip("\n") for line in iter(stream.readline, ""))  # type: ignore[attr-defined]

    def says(self, text: str, within_s: float = DEADLINE_S) -> None:
        """Wait for a line that contains the text."""
        eventually(
            lambda: any(text in line for line in [*self.out, *self.err]),
            f"{text!r} in {self.out + self.err}",
            within_s,
        )

    def wait(self, within_s: float = DEADLINE_S) -> int:
        """Wait for the end and return the exit code."""
        code = self.process.wait(within_s)
        for thread in self._threads:
            thread.join(within_s)
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command alone."""
        self.process.send_signal(number)

    @property
    def text(self) -> str:
        """All output so far."""
        return "\n".join([*self.out, *self.err])


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts `ftkit`, in a scratch folder and without the caller's settings."""
    started: list[Running] = []

    def begin(*words: object, env: dict[str, str] | None = None) -> Running:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("FTKIT_", "ETCDCTL_"))}
        running = Running([str(w) for w in words], tmp_path, {**clean, "COLUMNS": "100", **(env or {})})
        started.append(running)
        return running

    yield begin
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
        running.wait()
