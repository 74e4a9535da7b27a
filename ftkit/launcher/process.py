"""Start, watch and end the operating system's side of a launch: one process per rank, and the guardian.

It decides nothing. Each rank leads a session of its own, so that a Ctrl-C in the terminal reaches launch
alone, and dies with launch (PR_SET_PDEATHSIG). When a rank has ended, the rest of its session is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from ftkit.launcher import guardian
from ftkit.launcher.spec import RUN_MARK

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> Callable[[], None] | None:
    """Return what a child runs before its program so that it ends when this process does.

    The kernel watches the thread that started the child: start children from a thread that lives on.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here: a forked child should load nothing
    parent = os.getpid()

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died in between: the signal would never come
            os._exit(1)

    return before_exec


def reap_adopted(own: Container[int]) -> None:
    """Collect ended processes that this one has inherited as the first process of a container.

    Keepers outlive their trainer; whose parent is gone falls to process 1, and stays a zombie unless it is
    waited for.
    """
    if os.getpid() != 1:
        return
    with contextlib.suppress(OSError):
        children = Path("/proc/self/task/1/children").read_text().split()
        for pid in (int(c) for c in children):
            if pid not in own:
                os.waitpid(pid, os.WNOHANG)


class RankProcess:
    """One rank: its process, and the read end of its output."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        try:
            self._process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self.output = reader
        self.code: int | None = None

    @property
    def pid(self) -> int:
        """The process id, which is its session's id too."""
        return self._process.pid

    def terminate(self) -> None:
        """Ask the rank to end.

        Only the rank itself is asked: its data loader's workers must live until it has finished its step.
        """
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
                os.kill(self.pid, signal.SIGCONT)  # a stopped process would not hear of it

    def kill(self) -> None:
        """End the rank and all of its session."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the exit code once the rank has ended (negative: the signal), else None."""
        if self.code is None:
            # Looked at before it is reaped: until then its id cannot belong to anybody else, so that the
            # rest of its session can be killed by that id.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self.kill()
                self.code = self._process.wait()
        return self.code

    def wait(self) -> None:
        """Wait for the end of a rank that has been killed."""
        if self.code is None:
            self.code = self._process.wait()

    def read(self) -> bytes | None:
        """Return output that is waiting, b"" at its end, None when there is none now."""
        try:
            return os.read(self.output, 65536)
        except BlockingIOError:
            return None
        except OSError:
            return b""


class Guardian:
    """The side process that ends the run's processes should this one be killed."""

    def __init__(self, run: str, env: Mapping[str, str]) -> None:
        self._run = run
        self._env = {k: v for k, v in env.items() if k != RUN_MARK}  # it is set in a launch inside a launch
        self._told: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def __enter__(self) -> Guardian:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Clean up here, then end the guardian."""
        self.sweep()
        self.dismiss()

    @property
    def run(self) -> str:
        """The mark that every process of the run carries in its environment."""
        return self._run

    @property
    def own(self) -> set[int]:
        """The pids that this process waits for itself: the guardian, and those it was told of."""
        told = {int(line.partition(" ")[2]) for line in self._told if not line.startswith("dir ")}
        return told if self._process is None else {*told, self._process.pid}

    def tell(self, line: str) -> None:
        """Make `session <pid>`, `pid <pid>` or `dir <path>` known to the guardian."""
        self._told.append(line)
        self._write(line)

    def check(self) -> None:
        """Start another guardian when this one has been killed."""
        if self._process is not None and self._process.poll() is not None:
            self._close()
            self._start()
            for line in self._told:
                self._write(line)

    def sweep(self) -> int:
        """Let the run's last processes (keepers) end by themselves, kill the rest; return how many."""
        if sys.platform != "linux":
            return 0
        return guardian.sweep(self._mark(), guardian.KEEPER_GRACE_S)

    def dismiss(self) -> None:
        """End the guardian: this process has cleaned up itself."""
        self._write("bye")
        self._close()

    def _mark(self) -> bytes:
        return os.fsencode(f"{RUN_MARK}={self._run}")

    def _start(self) -> None:
        if sys.platform != "linux":
            return
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, os.fsdecode(self._mark())],
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _write(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
