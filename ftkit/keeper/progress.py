"""The shared memory in which ranks note where they are, and from which their keeper reads it.

A file of fixed slots, one per rank; written with a single `struct.pack_into` (about a microsecond), so that
each phase of each step may be noted. Times are CLOCK_MONOTONIC, which all processes of a machine share.
A rank holds a robust mutex in its slot, by which the keeper feels that the process ends.
Nothing is decided here.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import logging
import mmap
import os
import struct
import tempfile
import time
from pathlib import Path

import msgspec

from ftkit.core.model import Version
from ftkit.errors import KeeperError
from ftkit.keeper.robust import SIZE, RobustMutex

log = logging.getLogger(__name__)

_PREFIX = "ftkit-progress-"
_YOUNG_S = 60.0
"""A file so young may be about to be used."""
_SLOT = 192
_MARK = struct.Struct("<QqqiidQ")
"""Sequence, epoch, step, phase, pending, time of the last change of phase, sequence again."""
_NOTE_AT = 64
_NOTE = struct.Struct("<QddqqqQ")
"""Sequence, compute s, wait s, bytes healed, committed, failed, sequence again."""
_MUTEX_AT = _SLOT - SIZE


class Phase(enum.IntEnum):
    """What a training thread is doing."""

    STARTING = 0
    WAITING = 1
    """For an epoch."""
    CONFIGURING = 2
    HEALING = 3
    COMPUTE = 4
    VOTING = 5
    LEAVING = 6


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's slot as it was read."""

    mark: int = 0
    """Counts the marks; 0: the rank has not written yet."""
    version: Version = Version(0, 0)
    phase: Phase = Phase.STARTING
    pending: int = 0
    """Collectives that wait for peers."""
    since: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    bytes_healed: int = 0
    committed: int = 0
    failed: int = 0


def progress_path(name: str) -> str:
    """Return where the progress file of this name lies: in memory, if the machine has /dev/shm."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return str(Path(folder) / f"{_PREFIX}{name}")


class _Slots:
    """The mapped file."""

    def __init__(self, path: str) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise KeeperError(f"the progress file {path} cannot be opened: {error.strerror}") from None
        self._descriptor = descriptor
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # says that the file is in use, as long as we live
        self.memory = mmap.mmap(descriptor, 0)

    def mutex(self, rank: int) -> RobustMutex:
        """Return the mutex that this rank holds as long as it lives, in a mapping that `close` leaves."""
        return RobustMutex(mmap.mmap(self._descriptor, 0), rank * _SLOT + _MUTEX_AT)

    def _close(self) -> None:
        self.memory.close()
        os.close(self._descriptor)


class ProgressWriter(_Slots):
    """A rank's side; not thread-safe, except that a torn slot is read again."""

    def __init__(self, path: str, rank: int) -> None:
        super().__init__(path)
        self._at = rank * _SLOT
        if self._at + _SLOT > len(self.memory):
            raise KeeperError(f"the progress file {path} has no slot for rank {rank}")
        self._marks = _MARK.unpack_from(self.memory, self._at)[0]
        self._notes = _NOTE.unpack_from(self.memory, self._at + _NOTE_AT)[0]
        self._since = time.monotonic()
        try:
            self.mutex(rank).hold()
        except (OSError, AttributeError) as error:
            log.info("the end of this process will be noticed by its pidfd only: %s", error)

    def mark(self, *, epoch: int, step: int, phase: Phase, pending: int = 0, touch: bool = True) -> None:
        """Note where the rank is; without `touch`, the time of the last change of phase stays."""
        if touch:
            self._since = time.monotonic()
        self._marks = n = self._marks + 1
        _MARK.pack_into(self.memory, self._at, n, epoch, step, phase, pending, self._since, n)

    def note(
        self, *, compute_s: float, wait_s: float, bytes_healed: int, committed: int, failed: int = 0
    ) -> None:
        """Note the totals since the start of the process."""
        self._notes = n = self._notes + 1
        at = self._at + _NOTE_AT
        _NOTE.pack_into(self.memory, at, n, compute_s, wait_s, bytes_healed, committed, failed, n)

    def close(self) -> None:
        """Unmap the file."""
        self._close()


class ProgressReader(_Slots):
    """The keeper's side; creates the file, or finds the one of a keeper that died."""

    def __init__(self, path: str, num_ranks: int) -> None:
        self._path = path
        size = -(-num_ranks * _SLOT // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            with contextlib.suppress(FileExistsError), open(path, "x+b", opener=_private) as file:
                # Reserved for good: a rank that wrote into a full /dev/shm would be ended by SIGBUS.
                os.posix_fallocate(file.fileno(), 0, size)
                _make_mutexes(mmap.mmap(file.fileno(), 0), num_ranks)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise KeeperError(f"the progress file {path} cannot be made: {error.strerror}") from None
        super().__init__(path)
        _remove_stale(Path(path))

    def read(self, rank: int) -> Progress:
        """Return a rank's slot."""
        at = rank * _SLOT
        for _ in range(100):
            first, epoch, step, phase, pending, since, last = _MARK.unpack_from(self.memory, at)
            if first == last:
                break
        for _ in range(100):
            note = _NOTE.unpack_from(self.memory, at + _NOTE_AT)
            if note[0] == note[-1]:
                break
        _, compute_s, wait_s, healed, committed, failed, _ = note
        return Progress(
            mark=first,
            version=Version(epoch, step),
            phase=Phase(phase),
            pending=pending,
            since=since,
            compute_s=compute_s,
            wait_s=wait_s,
            bytes_healed=healed,
            committed=committed,
            failed=failed,
        )

    def close(self, *, delete: bool = False) -> None:
        """Unmap the file, and delete it if nobody will come back to it."""
        self._close()
        if delete:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def _make_mutexes(memory: mmap.mmap, num_ranks: int) -> None:
    try:
        for rank in range(num_ranks):
            RobustMutex(memory, rank * _SLOT + _MUTEX_AT).make()
    except (OSError, AttributeError) as error:
        log.info("the ends of processes will be noticed by their pidfds only: %s", error)


def _remove_stale(own: Path) -> None:
    """Delete what keepers left behind that were killed together with their trainers."""
    for path in own.parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path == own or time.time() - path.stat().st_mtime < _YOUNG_S:
                continue
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
