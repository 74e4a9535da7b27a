"""Decide when memory that others read may change again: not before the last reader has let go of it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Final

log = logging.getLogger(__name__)

CUT_WAIT_S: Final = 10.0


class Withdrawn(Exception):
    """The state is not served any more."""


class Readers:
    """Those who read some memory at the moment. All methods may be called from any thread."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._changed = threading.Condition()
        self._cuts: dict[int, Callable[[], None]] = {}
        self._next = 0
        self._closed = False

    @contextlib.contextmanager
    def reading(self, cut: Callable[[], None]) -> Iterator[None]:
        """Keep the memory as it is inside the block; `cut` is called from another thread to end it early."""
        with self._changed:
            if self._closed:
                raise Withdrawn
            self._next += 1
            number = self._next
            self._cuts[number] = cut
        try:
            yield
        finally:
            with self._changed:
                del self._cuts[number]
                self._changed.notify_all()

    def close(self, grace_s: float) -> None:
        """Admit nobody any more; give those that there are `grace_s` to end, then cut them off."""
        with self._changed:
            self._closed = True
            if self._changed.wait_for(lambda: not self._cuts, grace_s):
                return
            late = list(self._cuts.values())
        log.info("cutting off %d slow readers of %s", len(late), self._what)
        for cut in late:
            cut()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._cuts, CUT_WAIT_S):
                # Their connections are dead, so whatever they still read reaches nobody.
                log.error("%d readers of %s did not end", len(self._cuts), self._what)
