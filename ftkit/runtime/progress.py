"""Note where the training thread is, in a shared memory that the keeper reads.

One `struct.pack_into` per note: cheap enough for every phase of every step.
"""

from __future__ import annotations

import time

from ftkit.core.model import Version
from ftkit.keeper.progress import Phase, ProgressWriter


class Progress:
    """A rank's progress; silent until `open`, and on a host without the keeper."""

    def __init__(self) -> None:
        """Start silent."""
        self._writer: ProgressWriter | None = None
        self._phase = Phase.STARTING
        self._version = Version(0, 0)
        self._since = time.monotonic()
        self._compute_s = self._wait_s = 0.0
        self._healed = self._committed = self._failed = 0

    def open(self, path: str, rank: int) -> None:
        """Write to the keeper's file from now on."""
        self._writer = ProgressWriter(path, rank) if path else None

    def mark(self, phase: Phase, pending: int = 0) -> None:
        """Enter a phase."""
        now = time.monotonic()
        if self._phase == Phase.COMPUTE:
            self._compute_s += now - self._since
        else:
            self._wait_s += now - self._since
        self._phase, self._since = phase, now
        self._write(pending, touch=True)

    def pending(self, num: int) -> None:
        """Note how many collectives wait for peers."""
        self._write(num, touch=False)

    def committed(self, version: Version) -> None:
        """A step was committed."""
        self._version = version
        self._committed += 1
        self.mark(Phase.COMPUTE)
        if self._writer is not None:
            self._writer.note(
                compute_s=self._compute_s,
                wait_s=self._wait_s,
                bytes_healed=self._healed,
                committed=self._committed,
                failed=self._failed,
            )

    def failed(self) -> None:
        """A step was not committed."""
        self._failed += 1

    def healed(self, num_bytes: int) -> None:
        """State was received."""
        self._healed += num_bytes

    def close(self) -> None:
        """Stop writing."""
        self._writer = None

    def _write(self, pending: int, *, touch: bool) -> None:
        if self._writer is not None:
            self._writer.mark(
                epoch=self._version.epoch,
                step=self._version.step,
                phase=self._phase,
                pending=pending,
                touch=touch,
            )
