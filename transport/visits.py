"""Who is fetching a published state, and which of its chunks are still owed to them.

Decides what must be kept when the state is withdrawn in the middle. A fetch names itself in each request,
and says which chunks it has; a client that does neither is owed the rest of the answer that it is getting.
"""

from __future__ import annotations

import base64
import binascii
import threading
import time
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

FETCH: Final = "x-fetch"
"""Header of a request: the name of the fetch that it belongs to."""
HAVE: Final = "x-have"
"""Header of a request: which chunks that fetch has, one bit each, in base64."""
MAX_LISTED: Final = 1 << 16
"""Chunks of a state whose fetch says which it has; the header would become too long for more."""
MAX_FETCHES: Final = 1024
"""Remembered, also after their connections have ended."""

Mask = npt.NDArray[np.bool_]
"""One flag per chunk."""


class Visitor(Protocol):
    """One connection."""

    @property
    def span(self) -> tuple[int, int]:
        """Return which bytes of the data section are still to be sent on it."""

    def gone(self) -> bool:
        """Say whether the other side has closed it."""

    def cut(self) -> None:
        """End it."""


class Visits:
    """The connections to one published state. All methods may be called from any thread."""

    def __init__(self, num_chunks: int, chunk: int) -> None:
        self._num_chunks, self._chunk = num_chunks, chunk
        self._lock = threading.Lock()
        self._visitors: dict[Visitor, str] = {}
        self._missing: dict[str, Mask | None] = {}
        self._last = time.monotonic()

    def see(self, visitor: Visitor, fetch: str, have: str) -> None:
        """Note a request on a connection: of which fetch it is, if of any, and what that has."""
        missing = None if not have else _parse(have, self._num_chunks)
        with self._lock:
            self._visitors[visitor] = fetch
            if len(self._missing) >= MAX_FETCHES:
                here = set(self._visitors.values())
                self._missing = {name: m for name, m in self._missing.items() if name in here}
            if fetch and (missing is not None or fetch not in self._missing):
                self._missing[fetch] = missing

    def leave(self, visitor: Visitor) -> None:
        """Note that a connection has ended."""
        with self._lock:
            self._visitors.pop(visitor, None)
            self._last = time.monotonic()

    def owed(self) -> Mask:
        """Return which chunks are still to be sent to somebody."""
        result = np.zeros(self._num_chunks, np.bool_)
        with self._lock:
            for visitor in self._here():
                fetch = self._visitors[visitor]
                if fetch:
                    missing = self._missing[fetch]
                    result |= True if missing is None else missing
                start, end = visitor.span
                if start < end:
                    result[start // self._chunk : -(-end // self._chunk)] = True
        return result

    def knows(self, fetch: str) -> bool:
        """Say whether a fetch has been here."""
        with self._lock:
            return bool(fetch) and fetch in self._missing

    @property
    def empty_s(self) -> float:
        """Return for how long nobody has been connected."""
        with self._lock:
            now = time.monotonic()
            if self._here():
                self._last = now
            return now - self._last

    def cut(self) -> None:
        """End all connections."""
        with self._lock:
            visitors = list(self._visitors)
        for visitor in visitors:
            visitor.cut()

    def _here(self) -> list[Visitor]:
        return [visitor for visitor in self._visitors if not visitor.gone()]


def dump(have: Mask) -> str:
    """Return which chunks a fetch has as the value of a header."""
    return base64.b64encode(np.packbits(have).tobytes()).decode()


def _parse(have: str, num_chunks: int) -> Mask | None:
    """Return which chunks are missing; None when that is not to be understood."""
    try:
        raw = base64.b64decode(have, validate=True)
    except (binascii.Error, ValueError):
        return None
    if len(raw) != -(-num_chunks // 8):
        return None
    return ~np.unpackbits(np.frombuffer(raw, np.uint8), count=num_chunks).astype(np.bool_)
