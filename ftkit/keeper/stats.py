"""Publish, every few seconds, how the replica group is doing: `stats/<replica_id>`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ftkit.errors import EtcdError
from ftkit.keeper.etcd import Etcd
from ftkit.keeper.keys import JobKeys, Stats, encode
from ftkit.keeper.progress import Progress

log = logging.getLogger(__name__)


def derive(
    replica_id: str, incarnation: str, before: Progress, after: Progress, passed_s: float, etcd_age_s: float
) -> Stats:
    """Compute the figures between two readings of a rank's progress."""
    steps = max(0, after.committed - before.committed)
    return Stats(
        replica_id=replica_id,
        incarnation=incarnation,
        time=time.time(),
        epoch=after.version.epoch,
        step=after.version.step,
        phase=after.phase.name.lower(),
        steps_per_s=steps / passed_s if passed_s > 0 else 0.0,
        compute_s=(after.compute_s - before.compute_s) / steps if steps else 0.0,
        wait_s=(after.wait_s - before.wait_s) / steps if steps else 0.0,
        bytes_healed=after.bytes_healed,
        committed=after.committed,
        failed=after.failed,
        etcd_age_s=etcd_age_s,
    )


class StatsPublisher:
    """The thread that publishes rank 0's figures under the member's lease."""

    def __init__(
        self,
        etcd: Etcd,
        keys: JobKeys,
        replica_id: str,
        incarnation: str,
        *,
        interval_s: float,
        lease: Callable[[], int],
        read: Callable[[], Progress | None],
        etcd_age: Callable[[], float | None],
    ) -> None:
        self._etcd = etcd
        self._key = keys.stats_of(replica_id)
        self._who = (replica_id, incarnation)
        self._interval_s = interval_s
        self._lease = lease
        self._read = read
        self._etcd_age = etcd_age
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper stats", daemon=True)

    def start(self) -> None:
        """Publish now and from now on."""
        self._thread.start()

    def close(self) -> None:
        """Publish no more."""
        self._closed.set()

    def _run(self) -> None:
        before, since = self._read() or Progress(), time.monotonic()
        while True:
            after, now = self._read(), time.monotonic()
            lease = self._lease()
            if after is not None and lease:
                stats = derive(*self._who, before, after, now - since, self._etcd_age() or 0.0)
                try:
                    self._etcd.put(self._key, encode(stats), lease)
                    before, since = after, now
                except EtcdError as error:
                    log.debug("the stats were not published: %s", error)
            if self._closed.wait(self._interval_s):
                return
