"""What a source serves: one state at a time, from publish to withdraw.

Decides when live memory may be read: only inside `Publication.reading`, and `withdraw` returns when no
such reader is left. Checksums are computed when the bytes are sent or when they are first asked for, so
that publishing takes no longer for a large state than for a small one. Knows no HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Final, Protocol

import msgspec
import numpy as np
import xxhash

from transport.encoded import Encoded
from transport.manifest import dump
from transport.passing import Passing
from transport.readers import Readers, Views, Withdrawn
from transport.share import ShareBoard
from transport.slots import MARGIN, Slot, available_memory
from transport.staging import HostReader
from transport.visits import Mask, Visits

log = logging.getLogger(__name__)

INLINE_HASHES: Final = 16 << 20
"""Up to this size of state its checksums travel with the manifest: computing them takes about 1 ms."""


RETURN_S: Final = 1.0
"""How long a fetch that is owed something may be without a connection."""


class Sender(Protocol):
    """Sends a publication's bytes by another way than the answer to a request."""

    def send(self, publication: Publication, query: Mapping[str, str]) -> str:
        """Begin to send what was asked for, and return an answer; ValueError says why it cannot be."""


class Publication:
    """One published state: its encoding, its checksums, and who is reading it.

    The bytes are those of the live tensors until there is a slot with a copy of them: from the beginning, or,
    of those that are still owed, since `withdraw`.
    """

    def __init__(self, encoded: Encoded, sender: Sender | None = None, slot: Slot | None = None) -> None:
        self.encoded = encoded
        self.sender = sender
        self.version = encoded.manifest.version
        self.slot = slot
        self.leaving = False
        """Somebody waits for the live memory."""
        manifest = encoded.manifest
        self.visits = Visits(manifest.num_chunks, manifest.chunk)
        self._kept: Mask | None = None
        self._readers = Readers(f"version {self.version}")
        self._hashes: list[bytes | None] = [None] * manifest.num_chunks
        self._manifests: dict[bool, bytes] = {}

    @property
    def on_cpu(self) -> bool:
        """Say whether all bytes are memory that a socket can send."""
        return self.slot is not None or self.encoded.on_cpu

    def passing(self, start: int, end: int) -> Passing:
        """Return what computes the checksums of bytes that are sent."""
        manifest = self.encoded.manifest
        return Passing(self._hashes, manifest.size, manifest.chunk, start, end)

    def answering(self) -> AbstractContextManager[None]:
        """Announce several readings, one after the other."""
        return contextlib.nullcontext() if self.slot is not None else self._readers.answering()

    @contextlib.contextmanager
    def reading(self, cut: Callable[[], None]) -> Iterator[Views]:
        """Keep the memory valid inside the block, which is given what yields ranges of it.

        `cut` is called from another thread to end it early.
        """
        slot = self.slot
        if slot is None:
            with self._readers.reading(cut):
                yield self.encoded.views
            return
        with slot.held():
            yield lambda start, end, reader: slot.views(start, end)

    def has(self, start: int, end: int) -> bool:
        """Say whether a range of bytes is still here."""
        if self._kept is None:
            return True
        chunk = self.encoded.manifest.chunk
        return bool(self._kept[start // chunk : -(-end // chunk)].all())

    def withdraw(self, grace_s: float, *, keep: bool) -> bool:
        """Return once nobody reads the live memory any more; with `keep`, say whether anything is still owed.

        What is owed is copied before, if there is memory for it, and goes on being served until `end`;
        otherwise those who read have `grace_s` to end before they are cut off.
        """
        owed = self.visits.owed() if keep else None
        kept = owed is not None and bool(owed.any())
        if kept and owed is not None and self.slot is None:
            try:
                kept = self._copy(owed)
            except (OSError, MemoryError) as error:
                log.warning("cannot keep what is owed of version %s: %s", self.version, error)
                kept = False
        self.leaving = True
        self._readers.close(grace_s, answers=not kept)
        return kept

    def _copy(self, owed: Mask) -> bool:
        """Copy the chunks that are owed."""
        manifest = self.encoded.manifest
        free, need = available_memory() - MARGIN, int(owed.sum()) * manifest.chunk
        if need > free:
            log.warning(
                "no memory to keep what is owed of version %s: it takes %d MiB, and %d are free",
                self.version,
                need >> 20,
                max(0, free) >> 20,
            )
            return False
        begun, reader = time.monotonic(), HostReader()
        slot = Slot(manifest.size)
        edges = np.flatnonzero(np.diff(owed, prepend=False, append=False)) * manifest.chunk
        runs = [(start, min(manifest.size, end)) for start, end in edges.reshape(-1, 2).tolist()]
        slot.fill((start, self.encoded.views(start, end, reader)) for start, end in runs)
        for chunk in np.flatnonzero(~owed).tolist():
            # Somebody may have the bytes, but not yet the checksum.
            self.hashes(chunk, chunk + 1, self.encoded.views, reader)
        self._kept, self.slot = owed, slot
        log.info(
            "kept %d MiB of version %s for those who are fetching it, in %.3f s",
            need >> 20,
            self.version,
            time.monotonic() - begun,
        )
        return True

    def end(self) -> None:
        """Serve nobody any more."""
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.release()

    def manifest(self, views: Views, reader: HostReader, *, hashes: bool | None) -> bytes:
        """Return the manifest as JSON; with None for `hashes`, it has them if the state is small."""
        manifest = self.encoded.manifest
        with_hashes = manifest.size <= INLINE_HASHES if hashes is None else hashes
        raw = self._manifests.get(with_hashes)
        if raw is None:
            if with_hashes:
                table = self.hashes(0, manifest.num_chunks, views, reader).hex()
                manifest = msgspec.structs.replace(manifest, hashes=table)
            raw = self._manifests[with_hashes] = dump(manifest)
        return raw

    def hashes(self, first: int, last: int, views: Views, reader: HostReader) -> bytes:
        """Return the checksums of chunks `first` up to but not including `last`, one after the other."""
        result = []
        for chunk in range(first, last):
            digest = self._hashes[chunk]
            if digest is None:
                if self.leaving and self.slot is None:
                    raise Withdrawn
                digest = self._hashes[chunk] = self._hash(chunk, views, reader)
            result.append(digest)
        return b"".join(result)

    def _hash(self, chunk: int, views: Views, reader: HostReader) -> bytes:
        manifest = self.encoded.manifest
        start = chunk * manifest.chunk
        digest = xxhash.xxh3_128()
        for view in views(start, min(manifest.size, start + manifest.chunk), reader):
            digest.update(view)
        return digest.digest()


class Board:
    """The place where the current publication hangs; requests look here, and may wait for one."""

    def __init__(self) -> None:
        self.shares = ShareBoard()
        """Beside it, what this process serves of the state that it is fetching itself."""
        self._changed = threading.Condition()
        self._current: Publication | None = None
        self._lingering: list[Publication] = []
        self._closed = False

    @property
    def current(self) -> Publication | None:
        """Return what is published now."""
        return self._current

    def put(self, publication: Publication) -> None:
        """Hang up a publication."""
        with self._changed:
            self._current = publication
            self._changed.notify_all()

    def wait(self, timeout_s: float, version: str = "", fetch: str = "") -> Publication | None:
        """Return the current publication; while there is none, wait for one at most `timeout_s`.

        A fetch that is still owed something of another version gets the one from before.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if self._current is None or self._current.version != version:
                for publication in self._lingering:
                    if publication.version == version and publication.visits.knows(fetch):
                        return publication
            while self._current is None and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._current

    def retire(self) -> Publication | None:
        """Take the current publication down; those who are fetching it still get it, until `forget`."""
        with self._changed:
            before, self._current = self._current, None
            if before is not None:
                self._lingering.append(before)
        return before

    def forget(self, publication: Publication) -> None:
        """Serve nothing of a retired publication any more."""
        with self._changed:
            self._lingering.remove(publication)
        publication.end()
        publication.visits.cut()

    def linger(self, publication: Publication, linger_s: float) -> None:
        """Forget a retired publication once nobody fetches it any more, or after `linger_s`; in a thread."""
        threading.Thread(
            target=self._see_off, args=(publication, linger_s), name="transport-linger", daemon=True
        ).start()

    def _see_off(self, publication: Publication, linger_s: float) -> None:
        deadline = time.monotonic() + linger_s
        with self._changed:
            while (left := deadline - time.monotonic()) > 0 and not self._closed:
                if publication.visits.empty_s > RETURN_S:
                    break
                self._changed.wait(min(left, RETURN_S / 4))
        self.forget(publication)

    def close(self) -> None:
        """Let all that wait return, and serve nothing that is owed any more."""
        self.shares.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
