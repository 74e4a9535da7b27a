"""Decide when what the watches have shown is old news: after a silence of etcd, or a standstill of ours.

Pure. A silence begins when the last word from etcd is older than a lease lives; it ends when etcd is heard
again *and* all that changed meanwhile has been seen, since changes may still be on their way then.
"""

from __future__ import annotations

from ftkit.core import events as ev

REFRESH_S = 3.0
"""A refresh of the watches that has not ended by then is asked for again."""


class Hearing:
    """Begins as heard."""

    def __init__(self, lease_ttl_s: float) -> None:
        self._ttl_s = lease_ttl_s
        self._silent = False
        self._number = 0
        self._asked_at: float | None = None

    def notice(self, age_s: float | None, now: float) -> ev.Silence | int | None:
        """Take the age of the last word; return news for the machine, or the number of a refresh to begin."""
        if age_s is None:
            return None
        if age_s > self._ttl_s:
            self._asked_at = None  # a refresh that is under way does not count
            if self._silent:
                return None
            self._silent = True
            return ev.Silence(True)
        if not self._silent or (self._asked_at is not None and now <= self._asked_at + REFRESH_S):
            return None
        self._asked_at = now
        self._number += 1
        return self._number

    def refreshed(self, number: int) -> ev.Silence | None:
        """Take the end of a refresh; return what to tell the machine."""
        if not self._silent or self._asked_at is None or number != self._number:
            return None
        self._silent, self._asked_at = False, None
        return ev.Silence(False)
