"""Threads that wait for work, so that beginning a piece of work does not wait for a thread.

`Thread.start` returns once the thread runs: on busy processors after a millisecond, when everybody else has
had a turn. A thread that is there already is just woken. It knows nothing of the work.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final

MAX_IDLE: Final = 6
"""Threads that wait for the next piece of work; those above end with theirs."""
IDLE: Final = "idle"


class Task:
    """A piece of work that is under way or has ended."""

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self.name = name
        self._work: Callable[[], object] | None = work
        self._ended = threading.Event()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; say whether it has ended."""
        return self._ended.wait(timeout_s)

    def run(self) -> None:
        """Do it, here; an exception goes to `threading.excepthook`, as of any thread."""
        work, self._work = self._work, None
        assert work is not None, "done once"
        try:
            work()
        finally:
            del work  # what it refers to is free once it is said to have ended
            self._ended.set()


class Crew:
    """Begins pieces of work side by side, each on a daemon thread; a context manager."""

    def __init__(self) -> None:
        """Without a thread so far."""
        self._lock = threading.Lock()
        self._idle: list[_Hand] = []
        self._pid = os.getpid()
        self._closed = False

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, work: Callable[[], object], name: str) -> Task:
        """Begin a piece of work; `name` is that of its thread meanwhile.

        Raises:
            RuntimeError: there is no thread for it, and none can be started.
        """
        task = Task(work, name)
        with self._lock:
            if self._pid != os.getpid():  # a forked child: the threads are the parent's
                self._idle.clear()
                self._pid = os.getpid()
            hand = self._idle.pop() if self._idle else None
        if hand is None:
            hand = _Hand(self._back)
            hand.start()
        hand.tasks.put(task)
        return task

    def prepare(self, num: int) -> None:
        """See that so many threads are idle."""
        with self._lock:
            num -= len(self._idle)
        gate = threading.Event()
        tasks = [self.start(gate.wait, IDLE) for _ in range(num)]
        gate.set()
        for task in tasks:
            task.wait()

    def _back(self, hand: _Hand) -> bool:
        """Take a thread back that has ended its work; say whether it is to wait for more."""
        with self._lock:
            if self._closed or len(self._idle) >= MAX_IDLE:
                return False
            self._idle.append(hand)
            return True

    def close(self) -> None:
        """Let the idle threads end, and the others after their work."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for hand in idle:
            hand.tasks.put(None)
        for hand in idle:
            hand.join()


class _Hand(threading.Thread):
    """One thread of a crew."""

    def __init__(self, back: Callable[[_Hand], bool]) -> None:
        super().__init__(name=IDLE, daemon=True)
        self.tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._back = back

    def run(self) -> None:
        while (task := self.tasks.get()) is not None:
            self.name = task.name
            task.run()
            del task
            self.name = IDLE
            if not self._back(self):
                return
