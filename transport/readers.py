"""Decide when memory that others read may change again: not before the last reader has let go of it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Protocol

from transport.staging import HostReader

if TYPE_CHECKING:
    from transport.passing import Passing
    from transport.slots import Slot

log = logging.getLogger(__name__)

CUT_WAIT_S: Final = 10.0


Views = Callable[[int, int, HostReader], Iterator[memoryview]]
"""Yields the memory of bytes from one to another, in order."""


class Content(Protocol):
    """Bytes that are served: a data section, whole or in part."""

    @property
    def on_cpu(self) -> bool:
        """Say whether they are memory that a socket can send."""

    @property
    def slot(self) -> Slot | None:
        """Return the slot that they are sent from, if they are in one."""

    @property
    def leaving(self) -> bool:
        """Say whether somebody waits for the memory."""

    def has(self, start: int, end: int) -> bool:
        """Say whether a range of bytes is there."""

    def passing(self, start: int, end: int) -> Passing | None:
        """Return what computes checksums of bytes that are sent, if there are any to compute."""

    def answering(self) -> AbstractContextManager[None]:
        """Announce several readings, one after the other."""

    def reading(self, cut: Callable[[], None]) -> AbstractContextManager[Views]:
        """Keep the memory valid inside the block; `cut` is called from another thread to end it early."""


class Withdrawn(Exception):
    """The state is not served any more."""


class Readers:
    """Those who read some memory at the moment. All methods may be called from any thread."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._changed = threading.Condition()
        self._cuts: dict[int, Callable[[], None]] = {}
        self._next = 0
        self._answers = 0
        self._leaving = False
        self._closed = False

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Announce several readings, one after the other; to be waited for, unless that takes too long."""
        with self._changed:
            if self._leaving:
                raise Withdrawn
            self._answers += 1
        try:
            yield
        finally:
            with self._changed:
                self._answers -= 1
                self._changed.notify_all()

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

    def close(self, grace_s: float, *, answers: bool = True) -> None:
        """Admit nobody any more; give those that there are `grace_s` to end, then cut them off.

        Without `answers`, only those are waited for who read at the moment.
        """
        with self._changed:
            self._leaving = True
            if not answers:
                self._closed = True
            self._changed.wait_for(lambda: not self._cuts and not (answers and self._answers), grace_s)
            self._closed = True
            late = list(self._cuts.values())
        if not late:
            return
        log.info("cutting off %d slow readers of %s", len(late), self._what)
        for cut in late:
            cut()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._cuts, CUT_WAIT_S):
                # Their connections are dead, so whatever they still read reaches nobody.
                log.error("%d readers of %s did not end", len(self._cuts), self._what)
