"""Meet the peers of an epoch at a store, within a deadline, and give up at once when told to.

Decides when a rendezvous has failed and whom its error names. torch's calls may block for long inside, so
each try runs on a thread of its own, which ends as soon as its sockets are cut. What is built once all
have come is the caller's affair.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable

from ftkit.errors import GroupError
from ftkit.groups import sockets
from ftkit.groups.link import StoreLink
from ftkit.groups.session import Session
from ftkit.groups.sockets import leak

_FREE_LATER_S = 0.2
_lingering = threading.Lock()

_GIVE_UP_GRACE_S = 0.05
"""How long a rendezvous that is given up may take to end before it is left to end by itself."""


class Attempt:
    """One try to meet the peers and build a session, on a thread of its own so that it can be given up."""

    def __init__(
        self,
        build: Callable[[Attempt], Session],
        store: str,
        prefix: str,
        rank: int,
        size: int,
        timeout_s: float,
        leftovers: list[Session],
    ) -> None:
        self._build = build
        self._leftovers = leftovers
        self.prefix = prefix
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.link = StoreLink(store)
        self.phase = f"the store at {self.link.address} does not answer; its host is dead, frozen or cut off"
        self.given_up: str | None = None
        self.error: Exception | None = None
        self.cut_parts: Callable[[], None] = _nothing
        self.part_fds: Callable[[], list[int]] = list
        """`_build` says here how to cut, and how to find, what it has made so far."""
        self.settled = threading.Event()
        """Set when there is a session or an error, or the try is given up: `take` says which."""
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._is_taken = False
        self.thread = threading.Thread(target=self._run, name=f"ftkit-rendezvous-{prefix}", daemon=True)
        sockets.hidden.add(self)

    def give_up(self, why: str) -> None:
        """Make the try fail; return when it has ended, or soon anyway (no tensor is involved yet)."""
        if self.given_up is None:
            self.given_up = why
        if not self._cut_for(_GIVE_UP_GRACE_S, 0.001):
            # gloo connects again when it is cut while it connects; so go on cutting.
            threading.Thread(target=self._cut_for, args=(math.inf, 0.02), daemon=True).start()
        self.settled.set()

    def take(self) -> Session | None:
        """Return what was built, once; what is built later is thrown away by its builder."""
        with self._lock:
            session, self._session, self._is_taken = self._session, None, True
            # Its traceback refers to this attempt and to all that was built: a cycle would keep it alive.
            self.error = None
        return session

    def _cut_for(self, time_s: float, pause_s: float) -> bool:
        until = time.monotonic() + time_s
        while True:
            self.link.cut()
            self.cut_parts()
            if self._done.wait(pause_s):
                return True
            if time.monotonic() > until:
                return False

    def hidden_fds(self) -> list[int]:
        """Return the descriptors that a forked child must let go of."""
        return self.link.fds() + self.part_fds()

    def forget_in_child(self) -> None:
        """Never be freed in a forked child."""
        _live_attempts.discard(self)
        leak((self, self.cut_parts, self.part_fds))

    def left_s(self) -> float:
        """Return the time left, in seconds, never quite zero."""
        return max(0.001, self.deadline - time.monotonic())

    def meet(self) -> None:
        """Connect to the store and wait there until all peers have come."""
        link = self.link
        link.connect(self.deadline)
        link.join(self.prefix, self.rank, self.size)
        # What is kept back is for asking the store who is missing.
        if not link.wait_all(self.deadline - min(0.25, 0.1 * self.timeout_s)):
            missing = link.missing(self.deadline)
            if not missing:
                raise GroupError(self.phase)
            raise GroupError(
                f"rendezvous {self.prefix!r} at {link.address}: of {self.size} ranks these did not come"
                f" within {self.timeout_s:g} s: {', '.join(map(str, missing))}"
            )
        self.phase = f"all {self.size} ranks came to {link.address}, but one broke off while connecting"

    def _run(self) -> None:
        _live_attempts.add(self)
        try:
            session = self._build(self)
            self.link.finish()
            with self._lock:
                if self._is_taken:
                    self._leftovers.append(session)
                else:
                    self._session = session
            del session
        except Exception as error:
            with self._lock:
                if not self._is_taken:
                    self.error = error
        finally:
            self.link.close()  # without a `finish`: the others learn that we broke off
            self._done.set()
            self.settled.set()
        try:
            # The destructors of a torch group take some 10 ms, and hold the GIL: not just now, when the
            # training thread has work to do. But one at a time lingers: epochs in quick succession must not
            # pile up.
            if self._leftovers and _lingering.acquire(blocking=False):
                try:
                    time.sleep(_FREE_LATER_S)
                finally:
                    _lingering.release()
            while self._leftovers:
                session = self._leftovers.pop()
                session.drain(1.0)
                session.free()
                del session
        finally:
            # These closures refer to this attempt and to the device: a cycle would keep both alive.
            self.cut_parts, self.part_fds = _nothing, list
            _live_attempts.discard(self)


def _nothing() -> None:
    pass


_live_attempts: set[Attempt] = set()


@atexit.register
def _join_attempts() -> None:
    # A thread inside torch while the interpreter is torn down would crash it.
    for attempt in list(_live_attempts):
        attempt.thread.join(1.0)
