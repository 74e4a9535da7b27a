"""The keeper's side of the ranks' connections: read what they say, write to them without ever waiting.

Each connection has a thread that reads and one that writes; both only pass on.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ftkit.errors import KeeperError
from ftkit.keeper import messages as msg
from ftkit.keeper.wire import Connection, Listener, WireError

log = logging.getLogger(__name__)

_FROM_RANK: msgspec.json.Decoder[msg.ToKeeper] = msgspec.json.Decoder(msg.ToKeeper)
_FIRST_WORD_S = 60.0
_PORT_S = 10.0


class Session:
    """One rank's connection."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self.rank = rank
        self._connection = connection
        self._out: queue.SimpleQueue[msg.ToRank | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"keeper to rank {rank}", daemon=True)
        self._writer.start()

    def tell(self, message: msg.ToRank) -> None:
        """Send a message soon; never waits."""
        self._out.put(message)

    def close(self, timeout_s: float) -> None:
        """Send what was told, then close the connection."""
        self._out.put(None)
        if timeout_s > 0:
            self._writer.join(timeout_s)
        self._connection.close()

    def _write(self) -> None:
        while (message := self._out.get()) is not None:
            try:
                self._connection.send(message)
            except WireError as error:
                # The reader notices the closed connection as well and reports it.
                log.info("rank %d cannot be told anything: %s", self.rank, error)
                return


class Joined(NamedTuple):
    """A rank has said hello."""

    session: Session
    hello: msg.Hello


class Said(NamedTuple):
    """A rank has said something."""

    session: Session
    message: msg.WantEpoch | msg.GoodbyeKeeper


class Lost(NamedTuple):
    """A rank's connection is closed."""

    session: Session
    why: str


FromRank = Joined | Said | Lost


class Ranks:
    """Accept the ranks' connections and post what comes from them."""

    def __init__(self, host: str, port: int, secret: str, post: Callable[[FromRank], None]) -> None:
        self._post = post
        deadline = time.monotonic() + (_PORT_S if port else 0.0)
        while True:
            try:
                self._listener = Listener(secret, self._serve, host=host, port=port)
                break
            except OSError as error:
                # The port of the last keeper may be in use as somebody's own end of a connection.
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    where = f"{host}:{port}"
                    raise KeeperError(f"the keeper cannot listen on {where}: {error.strerror}") from None
            time.sleep(0.1)
        self.port = self._listener.port

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        try:
            hello = connection.recv(_FROM_RANK, deadline=time.monotonic() + _FIRST_WORD_S)
        except WireError as error:
            log.info("a connection ended before its hello: %s", error)
            connection.close()
            return
        if not isinstance(hello, msg.Hello):
            log.warning("a rank began with %s instead of hello", type(hello).__name__)
            connection.close()
            return
        session = Session(connection, hello.rank)
        self._post(Joined(session, hello))
        try:
            while True:
                message = connection.recv(_FROM_RANK)
                if isinstance(message, msg.Hello):
                    raise WireError("a second hello")
                self._post(Said(session, message))
        except WireError as error:
            self._post(Lost(session, str(error)))
        session.close(0.0)
