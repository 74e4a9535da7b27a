"""Watch the ranks' processes on the keeper's own machine: ended, stopped, hung.

A process's end is felt by a robust mutex that it holds (`robust.py`) and then proved by the kernel's flags of
its threads, before its memory is freed; or it is known by its pidfd, after that. Either holds even while
children that it forked hold its connection open. Stopped (SIGSTOP, debugger) and hung are looked for ten
times a second; times are summed up look by look, so that the keeper's own standstill counts for nobody.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ftkit.keeper.progress import Phase, Progress
from ftkit.keeper.robust import Owner, RobustMutex

log = logging.getLogger(__name__)

LOOK_S = 0.1
_MOST_S = 0.3
"""More time than this between two looks counts as this much."""
_PF_EXITING = 0x4
"""The kernel's flag of a thread that has begun to end, and will not run its program again."""
_PROOF_S = 0.2
"""For how long the proof of an end that was felt is looked for."""


class Exited(NamedTuple):
    """A rank's process has ended."""

    rank: int
    how: str


class Stopped(NamedTuple):
    """A rank's process has been stopped for `freeze_grace`, or goes on again."""

    rank: int
    on: bool


class Hung(NamedTuple):
    """A rank has computed for longer than `progress_timeout` without an end."""

    rank: int
    how: str


Sighting = Exited | Stopped | Hung


class _Rank:
    """One watched process."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.descriptor = descriptor
        self.stopped_s = 0.0
        self.told_stopped = False
        self.last_since = -1.0
        self.same_s = 0.0
        self.told_hung = False
        self.told_end = False


class Processes:
    """The threads that look. `read` returns a rank's progress, `mutex` what it holds; None: there is none."""

    def __init__(
        self,
        post: Callable[[Sighting], None],
        *,
        freeze_grace: float,
        progress_timeout: float | None,
        read: Callable[[int], Progress | None],
        mutex: Callable[[int], RobustMutex | None] = lambda _: None,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._post = post
        self._freeze_grace = freeze_grace
        self._progress_timeout = progress_timeout
        self._read = read
        self._mutex = mutex
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._ranks: dict[int, _Rank] = {}
        self._reported: set[int] = set()
        self._poll = select.poll()
        self._closed = False
        threading.Thread(target=self._run, name="keeper processes", daemon=True).start()

    def add(self, rank: int, pid: int) -> bool:
        """Watch a rank from now on; say whether that is possible (it is on this machine, and alive)."""
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, AttributeError) as error:
            log.info("the process of rank %d (pid %d) cannot be watched: %s", rank, pid, error)
            return False
        watched = _Rank(pid, descriptor)
        with self._lock:
            self._reported.add(rank)
            self._ranks[rank] = watched
            self._poll.register(descriptor, select.POLLIN)
        mutex = self._mutex(rank)
        if mutex is not None:
            threading.Thread(
                target=self._feel, args=(rank, watched, mutex), name=f"keeper end of {rank}", daemon=True
            ).start()
        return True

    def reports(self, rank: int) -> bool:
        """Say whether the end of this rank's process is, or has been, noticed here."""
        with self._lock:
            return rank in self._reported

    def kill(self) -> None:
        """End all ranks' processes by force; safe against reused pids."""
        with self._lock:
            for watched in self._ranks.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(watched.descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Stop looking."""
        self._closed = True

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            log.exception("watching the ranks' processes ends")
            self._on_failure(error)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed:
            ended = {fd for fd, _ in self._poll.poll(LOOK_S * 1000)}
            now = time.monotonic()
            with self._lock:
                ranks = dict(self._ranks)
            for rank, watched in ranks.items():
                if watched.descriptor in ended:
                    self._forget(rank, watched)
            if now - last < LOOK_S * 0.9:
                continue
            passed, last = min(now - last, _MOST_S), now
            for rank, watched in ranks.items():
                if not (watched.descriptor in ended or watched.told_end):
                    self._look(rank, watched, passed)

    def _feel(self, rank: int, watched: _Rank, mutex: RobustMutex) -> None:
        """Wait for the end of the process by its mutex."""
        try:
            while not (self._closed or watched.told_end):
                owner = mutex.wait(LOOK_S * 5)
                if owner is Owner.ENDED and _proved(watched.pid):
                    self._tell_end(rank, watched)
                elif owner is not Owner.HOLDS:
                    time.sleep(LOOK_S)
        except (OSError, AttributeError) as error:
            log.info("the end of rank %d will be noticed by its pidfd only: %s", rank, error)

    def _tell_end(self, rank: int, watched: _Rank) -> None:
        how = exit_status(watched.pid)
        with self._lock:
            if watched.told_end:
                return
            watched.told_end = True
        self._post(Exited(rank, how))

    def _forget(self, rank: int, watched: _Rank) -> None:
        self._tell_end(rank, watched)
        with self._lock:
            del self._ranks[rank]
            self._poll.unregister(watched.descriptor)
            os.close(watched.descriptor)

    def _look(self, rank: int, watched: _Rank, passed: float) -> None:
        stopped = process_state(watched.pid) in ("T", "t")
        watched.stopped_s = watched.stopped_s + passed if stopped else 0.0
        if stopped and not watched.told_stopped and watched.stopped_s >= self._freeze_grace:
            watched.told_stopped = True
            self._post(Stopped(rank, True))
        elif not stopped and watched.told_stopped:
            watched.told_stopped = False
            self._post(Stopped(rank, False))
        if self._progress_timeout is not None and not stopped:
            self._look_for_progress(rank, watched, passed, self._progress_timeout)

    def _look_for_progress(self, rank: int, watched: _Rank, passed: float, limit: float) -> None:
        progress = self._read(rank)
        # In a vote too: if nobody is waited for, the training thread itself does not come back.
        working = progress is not None and progress.phase in (Phase.COMPUTE, Phase.VOTING)
        busy = working and progress is not None and progress.pending == 0
        if progress is None or not busy or progress.since != watched.last_since:
            watched.last_since = -1.0 if progress is None else progress.since
            watched.same_s = 0.0
            return
        watched.same_s += passed
        if watched.same_s >= limit and not watched.told_hung:
            watched.told_hung = True
            step = progress.version.step
            self._post(Hung(rank, f"hung after step {step} for {limit:g} s (progress_timeout)"))


def _proved(pid: int) -> bool:
    until, pause = time.monotonic() + _PROOF_S, 0.0005
    while not (ends := is_ending(pid)) and time.monotonic() < until:
        time.sleep(pause)
        pause *= 2
    return ends


def is_ending(pid: int) -> bool:
    """Say whether no thread of this process will ever run its program again."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return True
    stats = (_fields(thread / "stat") for thread in threads)
    return all(not stat or int(stat[6]) & _PF_EXITING for stat in stats)


def _stat(pid: int) -> list[str]:
    return _fields(Path(f"/proc/{pid}/stat"))


def _fields(path: Path) -> list[str]:
    """Return the fields of a `stat` from the third (the state) on; empty when it is gone."""
    try:
        text = path.read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def process_state(pid: int) -> str:
    """Return the state letter of a process; empty when it is gone."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def parent_of(pid: int) -> int | None:
    """Return the process that has started it, or adopted it; None when it is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def exit_status(pid: int) -> str:
    """Say how a process ended, or is ending, as far as its parent has left anything to read."""
    fields = _stat(pid)
    if len(fields) > 49 and (fields[0] in ("Z", "X") or int(fields[6]) & _PF_EXITING):
        status = int(fields[49])
        number = os.WTERMSIG(status)
        if number:
            with contextlib.suppress(ValueError):
                return signal.Signals(number).name
            return f"signal {number}"
        return f"exit {os.WEXITSTATUS(status)}"
    return "ended"
