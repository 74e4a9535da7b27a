"""A thread that looks around while the training thread waits: suspects, the fence, and pending collectives.

It only ever ends work in flight; all that follows happens on the training thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ftkit.runtime.inbox import Inbox
from ftkit.runtime.progress import Progress
from ftkit.runtime.step import Step

CALM_S = 0.05
ALERT_S = 0.02


class Watchdog:
    """Watch one rank's step."""

    def __init__(self, step: Step, inbox: Inbox, progress: Progress, *, suspect_grace: float) -> None:
        """Start the thread."""
        self._step = step
        self._inbox = inbox
        self._progress = progress
        self._suspect_grace = suspect_grace
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftkit-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(ALERT_S if self._inbox.suspects else CALM_S):
            self._note_pending()
            self._check(self._stalled_suspect)
            self._check(self._step.membership.fence)

    def _check(self, reason: Callable[[], str | None]) -> None:
        why = reason()
        if why is not None and self._step.membership.error is None:
            self._step.abort(0, why)

    def _note_pending(self) -> None:
        """Waiting for peers is no hang: the keeper's progress watch must know."""
        self._progress.pending(self._step.num_pending())

    def _stalled_suspect(self) -> str | None:
        """I7: a lease that ran out proves nothing as long as the collectives move."""
        suspects = self._inbox.suspects
        if not suspects or time.monotonic() - self._inbox.suspects_since < self._suspect_grace:
            return None
        if self._step.stalled_s() < self._suspect_grace:
            return None
        return f"the lease of {', '.join(suspects)} ran out and the collective makes no progress"
