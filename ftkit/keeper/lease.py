"""Keep the member's lease alive, in a thread that does nothing else.

Nothing slow that the keeper has to do (a frozen etcd, a large listing) may cost the lease. A lost lease is
replaced; what keys were bound to it is the caller's business.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from ftkit.errors import EtcdError
from ftkit.keeper.etcd import Etcd

log = logging.getLogger(__name__)


class LeaseKeeper:
    """Holds one lease; `id` is 0 while there is none.

    `on_new` is called, on the lease's thread, after each grant: what was bound to an earlier lease is gone
    or soon will be.
    """

    def __init__(
        self,
        etcd: Etcd,
        ttl_s: int,
        on_new: Callable[[int], None],
        on_trouble: Callable[[Exception], None],
        *,
        period_s: float | None = None,
    ) -> None:
        self.id = 0
        self.heard = 0.0
        """Monotonic time at which the last request that etcd granted was sent; 0: there was none."""
        self._etcd = etcd
        self._ttl_s = ttl_s
        self._period_s = ttl_s / 3 if period_s is None else min(period_s, ttl_s / 3)
        self._on_new = on_new
        self._on_trouble = on_trouble
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._suspected = 0
        self._thread = threading.Thread(target=self._run, name="keeper lease", daemon=True)

    def start(self) -> None:
        """Ask for the lease and keep it from now on."""
        self._thread.start()

    def suspect(self, lease: int) -> None:
        """Say that etcd no longer knows a lease; it is looked after at once."""
        if lease == self.id:
            self._suspected = lease
            self._wake.set()

    def close(self, *, revoke: bool, timeout_s: float = 2.0) -> None:
        """Stop; with `revoke`, give the lease back at once, so that its keys vanish."""
        self._closed.set()
        self._wake.set()
        if revoke and self.id:
            with contextlib.suppress(EtcdError):
                self._etcd.revoke(self.id, timeout_s=timeout_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                self._look_after()
            except EtcdError as error:
                log.debug("the lease is in danger: %s", error)
                self._on_trouble(error)
            except Exception as error:
                log.exception("the lease's thread ends")
                self._on_trouble(error)
                return
            # After a failure that took long, the next attempt follows at once.
            self._wake.wait(max(0.2, self._period_s - (time.monotonic() - began)))
            self._wake.clear()

    def _look_after(self) -> None:
        sent = time.monotonic()
        well = self.id != 0 and self._suspected != self.id
        if well and self._etcd.keep_alive(self.id, timeout_s=self._patience()):
            self.heard = sent
            return
        if self._closed.is_set():
            return
        lost, self.id = self.id, 0
        if lost:
            log.warning("the lease was lost; asking for another")
        sent = time.monotonic()
        self.id = self._etcd.grant(self._ttl_s)
        self.heard = sent
        if self._closed.is_set():
            self._etcd.revoke(self.id)
            return
        self._on_new(self.id)

    def _patience(self) -> float:
        return max(1.0, self._period_s)
