"""Fetch the part of a sharded state that this rank holds, out of shards that are cut in another way.

Each shard is a fetch of its own, from all sources that hold it; they begin together once the manifests of all
are known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from transport.api import Progress
from transport.errors import TransportAborted, TransportTimeout
from transport.fetch import Fetch
from transport.manifest import Manifest
from transport.reshard import Resharding, Selection
from transport.session import Settings


class ShardedFetch:
    """One fetch from several shards; `run` is called once, `abort` may be called from any other thread."""

    def __init__(
        self,
        shards: Sequence[Sequence[str]],
        version: str,
        into: object,
        settings: Settings,
        *,
        deadline_s: float,
        progress: Callable[[Progress], None] | None,
        prefer: int,
    ) -> None:
        if not shards:
            raise ValueError("a fetch needs at least one shard")
        self.version = version
        self._into, self._progress, self._prefer = into, progress, prefer
        self._deadline = time.monotonic() + deadline_s
        self._lock = threading.Lock()
        self._manifests: list[Manifest | None] = [None] * len(shards)
        self._resharding: Resharding | None = None
        self._selections: list[tuple[Selection, Selection]] = []
        self._errors: list[BaseException] = []
        self._reports: dict[int, Progress] = {}
        streams = max(1, settings.streams // len(shards))
        # Of each shard, one for the large parts and one for the small ones.
        self._fetches = [
            Fetch(
                sources,
                version,
                None,
                replace(settings, streams=streams),
                deadline_s=deadline_s,
                progress=self._reporter(2 * shard + small),
                select=self._selector(shard, small),
            )
            for shard, sources in enumerate(shards)
            for small in (False, True)
        ]
        self._together = threading.Barrier(len(self._fetches), self._plan)

    def run(self) -> object:
        """Fetch the state and return it."""
        threads = [
            threading.Thread(target=self._run, args=(fetch,), name="transport-shard", daemon=True)
            for fetch in self._fetches
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise next((e for e in self._errors if not isinstance(e, _Another)), self._errors[0])
        assert self._resharding is not None
        return self._resharding.result()

    def abort(self, error: BaseException) -> None:
        """Make `run` raise this error at once."""
        with self._lock:
            self._errors.append(error)
        self._end()

    def _end(self) -> None:
        self._together.abort()
        for fetch in self._fetches:
            fetch.abort(_Another(f"another shard of version {self.version!r} could not be fetched"))

    def _run(self, fetch: Fetch) -> None:
        try:
            fetch.run()
        except BaseException as error:
            with self._lock:
                self._errors.append(error)
            self._end()

    def _plan(self) -> None:
        """Select what is needed, now that all manifests are here."""
        manifests = [manifest for manifest in self._manifests if manifest is not None]
        self._resharding = Resharding(manifests, self._into, prefer=self._prefer)
        self._selections = self._resharding.selections

    def _selector(self, shard: int, small: bool) -> Callable[[Manifest], Selection]:
        def select(manifest: Manifest) -> Selection:
            with self._lock:
                first = self._manifests[shard] = self._manifests[shard] or manifest
            if first.etag != manifest.etag:
                raise _Another(f"the sources of shard {shard} have different layouts")
            try:
                self._together.wait(max(0.0, self._deadline - time.monotonic()))
            except threading.BrokenBarrierError as error:
                if time.monotonic() >= self._deadline:
                    raise TransportTimeout(
                        f"not all shards of version {self.version!r} were there in time"
                    ) from error
                raise _Another(f"another shard of version {self.version!r} could not be fetched") from error
            return self._selections[shard][small]

        return select

    def _reporter(self, number: int) -> Callable[[Progress], None] | None:
        progress = self._progress
        if progress is None:
            return None

        def report(one: Progress) -> None:
            with self._lock:
                self._reports[number] = one
                if len(self._reports) == len(self._fetches):
                    progress(_sum(self._reports.values()))

        return report


class _Another(TransportAborted):
    """This fetch ends because of another one, whose error tells more."""


def _sum(reports: Collection[Progress]) -> Progress:
    """Return how far several fetches have come together."""
    last = max(reports, key=lambda report: report.elapsed_s)
    return replace(
        last,
        bytes_done=sum(report.bytes_done for report in reports),
        bytes_total=sum(report.bytes_total for report in reports),
        bytes_kept=sum(report.bytes_kept for report in reports),
        num_sources=sum(report.num_sources for report in reports),
        rate=sum(report.rate for report in reports),
        sources=tuple(source for report in reports for source in report.sources),
    )
