"""What a source serves: one state at a time, from publish to withdraw.

Decides when live memory may be read: only inside `Publication.reading`, and `withdraw` returns when no
such reader is left. Checksums are computed when they are first asked for, so that publishing takes no
longer for a large state than for a small one. Knows no HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

import msgspec
import xxhash

from transport.encoded import Encoded
from transport.manifest import dump
from transport.readers import Withdrawn
from transport.share import ShareBoard
from transport.staging import HostReader

log = logging.getLogger(__name__)

INLINE_HASHES: Final = 16 << 20
"""Up to this size of state its checksums travel with the manifest: computing them takes about 1 ms."""

CUT_WAIT_S: Final = 10.0


class Sender(Protocol):
    """Sends a publication's bytes by another way than the answer to a request."""

    def send(self, publication: Publication, query: Mapping[str, str]) -> str:
        """Begin to send what was asked for, and return an answer; ValueError says why it cannot be."""


class Publication:
    """One published state: its encoding, its checksums, and who is reading it."""

    def __init__(self, encoded: Encoded, sender: Sender | None = None) -> None:
        self.encoded = encoded
        self.on_cpu = encoded.on_cpu
        self.sender = sender
        self.version = encoded.manifest.version
        self._changed = threading.Condition()
        self._readers: dict[int, Callable[[], None]] = {}
        self._next_reader = 0
        self._withdrawn = False
        self._hashes: list[bytes | None] = [None] * encoded.manifest.num_chunks
        self._manifests: dict[bool, bytes] = {}

    @contextlib.contextmanager
    def reading(self, cut: Callable[[], None]) -> Iterator[None]:
        """Keep the memory valid inside the block; `cut` is called from another thread to end it early."""
        with self._changed:
            if self._withdrawn:
                raise Withdrawn
            self._next_reader += 1
            reader = self._next_reader
            self._readers[reader] = cut
        try:
            yield
        finally:
            with self._changed:
                del self._readers[reader]
                self._changed.notify_all()

    def withdraw(self, grace_s: float) -> None:
        """Admit no reader any more; give those that there are `grace_s` to end, then cut them off."""
        with self._changed:
            self._withdrawn = True
            if self._changed.wait_for(lambda: not self._readers, grace_s):
                return
            late = list(self._readers.values())
        log.info("cutting off %d slow readers of version %s", len(late), self.version)
        for cut in late:
            cut()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._readers, CUT_WAIT_S):
                # Their connections are dead, so whatever they still read reaches nobody.
                log.error("%d readers of version %s did not end", len(self._readers), self.version)

    def manifest(self, *, hashes: bool | None, reader: HostReader) -> bytes:
        """Return the manifest as JSON; with None for `hashes`, it has them if the state is small."""
        manifest = self.encoded.manifest
        with_hashes = manifest.size <= INLINE_HASHES if hashes is None else hashes
        raw = self._manifests.get(with_hashes)
        if raw is None:
            if with_hashes:
                table = self.hashes(0, manifest.num_chunks, reader).hex()
                manifest = msgspec.structs.replace(manifest, hashes=table)
            raw = self._manifests[with_hashes] = dump(manifest)
        return raw

    def hashes(self, first: int, last: int, reader: HostReader) -> bytes:
        """Return the checksums of chunks `first` up to but not including `last`, one after the other."""
        result = []
        for chunk in range(first, last):
            digest = self._hashes[chunk]
            if digest is None:
                if self._withdrawn:
                    raise Withdrawn
                digest = self._hashes[chunk] = self._hash(chunk, reader)
            result.append(digest)
        return b"".join(result)

    def _hash(self, chunk: int, reader: HostReader) -> bytes:
        manifest = self.encoded.manifest
        start = chunk * manifest.chunk
        digest = xxhash.xxh3_128()
        for view in self.encoded.views(start, min(manifest.size, start + manifest.chunk), reader):
            digest.update(view)
        return digest.digest()


class Board:
    """The place where the current publication hangs; requests look here, and may wait for one."""

    def __init__(self) -> None:
        self.shares = ShareBoard()
        """Beside it, what this process serves of the state that it is fetching itself."""
        self._changed = threading.Condition()
        self._current: Publication | None = None
        self._closed = False

    @property
    def current(self) -> Publication | None:
        """Return what is published now."""
        return self._current

    def put(self, publication: Publication | None) -> Publication | None:
        """Hang up another publication, or none; return the one before."""
        with self._changed:
            before, self._current = self._current, publication
            self._changed.notify_all()
        return before

    def wait(self, timeout_s: float) -> Publication | None:
        """Return the current publication; while there is none, wait for one at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._current is None and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._current

    def close(self) -> None:
        """Let all that wait return."""
        self.shares.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
