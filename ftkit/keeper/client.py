"""The ranks' side of their keeper: start it, talk to it, bring it back when it dies.

Runs in the trainer, so it imports neither etcd3 nor grpc. Group rank 0 starts the keeper, and another one on
the same port with the same secret when it has died; all ranks then connect again and say where they are.
Training does not stop for that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

from ftkit import errors
from ftkit.config import Settings
from ftkit.core.model import Epoch
from ftkit.errors import FtkitError, KeeperError
from ftkit.keeper import messages as msg
from ftkit.keeper.post import Answer, Post
from ftkit.keeper.progress import progress_path
from ftkit.keeper.wire import MAX_FRAME, Connection, WireError, connect

log = logging.getLogger(__name__)

_START_S = 60.0
_SILENCE_S = 5.0
"""A keeper that says nothing for so long (it speaks twice a second) has stopped and is replaced."""
_SLICE_S = 0.5
_RETRY_S = 0.05
_MOST_STARTS = 5
_WINDOW_S = 60.0

_FROM_KEEPER: msgspec.json.Decoder[msg.ToRank] = msgspec.json.Decoder(msg.ToRank)


class KeeperAddress(msgspec.Struct, frozen=True):
    """Where a keeper listens, and the secret that it and its ranks share."""

    host: str
    port: int
    secret: str

    def __repr__(self) -> str:
        return f"KeeperAddress({self.host}:{self.port})"


_open_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child (a DataLoader worker) must not keep the dead trainer's connection open."""
    for connection in list(_open_connections):
        connection.abandon()


os.register_at_fork(after_in_child=_close_in_child)


class KeeperClient:
    """One rank's connection to its keeper. `send` may be called from any thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        rank: int,
        incarnation: str,
        hello: Callable[[], msg.Hello],
        on_message: Callable[[msg.ToRank], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        self._settings = settings
        self._rank = rank
        self._incarnation = incarnation
        self._hello = hello
        self._on_message = on_message
        self._on_lost = on_lost
        self._address: KeeperAddress | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starts: list[float] = []
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._want: msg.WantEpoch | None = None
        """The wish that no offer has answered yet."""
        self._goodbye: msg.GoodbyeKeeper | None = None
        self._offered: Epoch | None = None
        self._closed = threading.Event()
        self._final = False
        """Whether the keeper has said that the group is over, so that its end is none of our business."""
        self._reader: threading.Thread | None = None

    # -- used by the trainer -----------------------------------------------------------------------

    def start(self) -> KeeperAddress:
        """Start the keeper's process (rank 0 only) and return its address.

        Raises:
            FtkitError: the keeper's own error, e.g. ConfigError for an unreadable certificate.
        """
        secret = uuid.uuid4().hex + uuid.uuid4().hex
        port = self._spawn(secret, 0, takeover=False)
        alone = self._settings.group_world_size == 1
        host = "127.0.0.1" if alone else self._settings.advertise
        self._address = KeeperAddress(host, port, secret)
        return self._address

    def connect(self, address: KeeperAddress) -> None:
        """Connect to the keeper, say hello, and hand on what it says from now on."""
        self._address = address
        self._greet(self._dial(time.monotonic() + self._settings.timeout))
        self._reader = threading.Thread(target=self._run, name="ftkit-keeper", daemon=True)
        self._reader.start()

    def send(self, message: msg.ToKeeper) -> None:
        """Send a message; while the keeper is being brought back it waits for it."""
        with self._lock:
            if isinstance(message, msg.WantEpoch):
                self._want = message
            elif isinstance(message, msg.GoodbyeKeeper):
                self._goodbye = message
            connection = self._connection
        if connection is not None:
            # When this fails the reader notices, too; what matters is sent again after it has reconnected.
            with contextlib.suppress(WireError):
                connection.send(message)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the connection; without a goodbye before, that is this rank's death."""
        self._closed.set()
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        reader = self._reader
        if reader is not None and reader is not threading.current_thread():
            reader.join(timeout_s)
        process = self._process
        if process is None:
            return
        if reader is None:
            process.kill()  # nobody has ever spoken to it: there is nothing that it would have to tell etcd
            with contextlib.suppress(OSError):
                os.unlink(progress_path(self._incarnation))
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            # It still has something to tell etcd, which is away; let it.
            log.warning("the keeper (pid %d) goes on until etcd has heard of our end", process.pid)
            _outliving.append(process)

    # -- the reader's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                connection = self._connection
                why = "it was not connected" if connection is None else self._read(connection)
                if self._closed.is_set() or self._final:
                    return
                log.warning("the keeper of %s is lost (%s); bringing it back", self._settings.replica_id, why)
                self._bring_back()
        except Exception as error:
            if not self._closed.is_set():
                log.warning("the keeper of %s is lost for good: %s", self._settings.replica_id, error)
                self._on_lost(error)

    def _read(self, connection: Connection) -> str:
        """Hand on what the keeper says until the connection ends; say why it did."""
        silence_s = max(_SILENCE_S, self._settings.lease_ttl + 1.0)
        silent_s = 0.0
        while True:
            if not connection.wait_readable(_SLICE_S):
                # Counted in slices: if this process itself stood still, the keeper was not silent.
                silent_s += _SLICE_S
                if silent_s >= silence_s:
                    connection.close()
                    return f"it has said nothing for {silence_s:g} s"
                continue
            silent_s = 0.0
            try:
                message = connection.recv(_FROM_KEEPER, deadline=time.monotonic() + silence_s)
            except WireError as error:
                connection.close()
                return str(error)
            if isinstance(message, msg.EpochOffer):
                with self._lock:
                    self._want = None
                    self._offered = message.epoch
            elif isinstance(message, msg.Refused | msg.Gone):
                self._final = True
            self._on_message(message)

    def _bring_back(self) -> None:
        """Have a keeper again, within `timeout`."""
        assert self._address is not None, "there was a keeper"
        deadline = time.monotonic() + self._settings.timeout
        with self._lock:
            self._connection = None
        if self._rank == 0:
            self._end_process()
            self._spawn(self._address.secret, self._address.port, takeover=True)
            if self._closed.is_set():
                self._end_process()  # nobody will ever speak to it
                return
        self._greet(self._dial(deadline))

    def _dial(self, deadline: float) -> Connection:
        assert self._address is not None, "started, or told by rank 0"
        address = self._address
        while True:
            left = deadline - time.monotonic()
            try:
                return connect(address.host, address.port, address.secret, timeout_s=max(0.1, min(left, 5.0)))
            except WireError:
                if left <= 0 or self._closed.is_set():
                    raise
            self._closed.wait(_RETRY_S)

    def _greet(self, connection: Connection) -> None:
        _open_connections.add(connection)
        hello = self._hello()
        if self._offered is not None:
            # Also an epoch that was just left, or not entered yet: the machine must know that it was offered.
            hello = msgspec.structs.replace(hello, running=self._offered)
        if sum(map(len, hello.layout)) > MAX_FRAME // 2:
            hello = msgspec.structs.replace(hello, layout=())  # the fingerprint tells still, if not where
        connection.send(hello)
        with self._lock:
            self._connection = connection
            unanswered: list[msg.ToKeeper] = [m for m in (self._want, self._goodbye) if m is not None]
        for message in unanswered:
            connection.send(message)

    # -- the keeper's process ----------------------------------------------------------------------

    def _spawn(self, secret: str, port: int, *, takeover: bool) -> int:
        """Start a keeper and return its port."""
        now = time.monotonic()
        self._starts = [t for t in self._starts if now - t < _WINDOW_S]
        if len(self._starts) >= _MOST_STARTS:
            raise KeeperError(f"the keeper has ended {len(self._starts)} times within {_WINDOW_S:.0f} s")
        self._starts.append(now)
        post = Post(
            settings=_absolute(self._settings),
            incarnation=self._incarnation,
            secret=secret,
            port=port,
            progress_file=progress_path(self._incarnation),
            parent=os.getpid(),
            takeover=takeover,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "ftkit.keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(
                errors.__file__
            ).parent.parent,  # finds ftkit as we did; holds no directory of the user's
            start_new_session=True,
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin as stdin, process.stdout as stdout:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(msgspec.json.encode(post) + b"\n")
                stdin.flush()
            ready, _, _ = select.select([stdout], [], [], _START_S)
            line = stdout.readline() if ready else b""
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except msgspec.DecodeError:
            self._end_process()
            how = "did not answer" if not ready else f"ended with code {process.returncode}"
            raise KeeperError(f"the keeper {how} at its start; its output above says more") from None
        if answer.error:
            self._end_process()
            kind = getattr(errors, answer.kind, KeeperError)
            raise kind(answer.error) if issubclass(kind, FtkitError) else KeeperError(answer.error)
        return answer.port

    def _end_process(self) -> None:
        """See that the last keeper is gone; one that was only stopped would come back to a place taken."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


_outliving: list[subprocess.Popen[bytes]] = []
"""Keepers that live longer than their client; kept, so that nobody complains of a lost child."""


def _absolute(settings: Settings) -> Settings:
    """The keeper runs in another directory."""
    paths = {
        name: os.path.abspath(path)
        for name in ("etcd_ca_cert", "etcd_cert", "etcd_key")
        if (path := getattr(settings, name)) is not None
    }
    return dataclasses.replace(settings, **paths)
