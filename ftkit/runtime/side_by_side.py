"""Do one piece of work beside another, on a thread of its own.

It knows nothing of either.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from transport.crew import Crew, Task


class SideBySide:
    """Run `work` beside the body of a `with` statement, whose end waits for it and raises what it raised."""

    def __init__(self, crew: Crew, work: Callable[[], None], cancel: Callable[[], None]) -> None:
        """When `work` fails, `cancel` is called, to end the body."""
        self._crew = crew
        self._work = work
        self._cancel = cancel
        self._error: BaseException | None = None
        self._task: Task | None = None

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # handed to the training thread
            self._error = error
            self._cancel()

    def __enter__(self) -> None:
        """Begin."""
        self._task = self._crew.start(self._run, "ftkit-side")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the other; an error of the body goes first."""
        assert self._task is not None, "as it was entered"
        self._task.wait()
        if kind is None and self._error is not None:
            raise self._error


class Background:
    """One piece of work at a time that nobody waits for until its result is needed."""

    def __init__(self, crew: Crew) -> None:
        """Nothing is under way."""
        self._crew = crew
        self._task: Task | None = None
        self._error: Exception | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin; the last piece must have been finished."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # handed to whoever finishes
                self._error = error

        self._error = None
        self._task = self._crew.start(run, "ftkit-background")

    def finish(self) -> Exception | None:
        """Wait for the end of what is under way; return its error, each time it is asked."""
        if self._task is not None:
            self._task.wait()
            self._task = None
        return self._error
