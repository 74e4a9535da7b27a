"""The HTTP transport: a server for the state that this process publishes, and fetches from others.

Wires `server.py`, `publication.py` and `fetch.py` together; decides only defaults.
"""

from __future__ import annotations

import secrets
import ssl
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from transport.api import Progress
from transport.connection import Limits
from transport.crew import Crew
from transport.encoded import Encoded, encode
from transport.errors import TransportAborted, TransportError
from transport.fetch import Ahead, Fetch
from transport.files import open_file
from transport.link import Link
from transport.manifest import DEFAULT_CHUNK, MAX_CHUNK, MIN_CHUNK
from transport.near import NearLink, name_of
from transport.publication import Board, Publication, Sender
from transport.server import Server
from transport.session import Settings
from transport.sharded import ShardedFetch
from transport.share import Share
from transport.slots import Slots
from transport.staging import wait_for_device

_WILDCARDS = ("", "0.0.0.0", "::")
_WARM_UP = "warm-up"


class HTTPTransport:
    """Serve and fetch states over HTTP/1.1; see `api.Transport` for the methods.

    Parameters
    ----------
    token: the secret that all members share; it goes with every request. A callable is asked each time, for a
        secret that is known only later: until then (empty) every request is refused.
    bind, port: where to listen; port 0 takes a free one.
    advertise: the host name or `host:port` by which others reach this process, if it is not `bind`.
    streams: connections of one fetch, spread over its sources (at least one to each); to a source on this
        machine no more than there are cores.
    chunk_bytes: bytes per checksum.
    stall_s: silence after which a source's extent is given to others.
    min_rate: bytes per second; of a source that sends fewer, the log warns. 0 for never.
    linger_s: how long after `withdraw` the rest of the state goes on being served, from a copy, to those who
        are fetching it; 0 for not at all, and no copy.
    same_host: hand memory over to, and take it from, processes of this user on this machine, instead of
        sending its bytes through the network stack; see `near.py`. Not with TLS.
    drain_s: without `linger_s`, how long `withdraw` lets answers in flight go on before it cuts them off.
    server_ssl, client_ssl: contexts for TLS; with `server_ssl` the address begins with `https`.
    """

    def __init__(
        self,
        *,
        token: str | Callable[[], str],
        bind: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        streams: int = 4,
        chunk_bytes: int = DEFAULT_CHUNK,
        stall_s: float = 3.0,
        min_rate: float = 0.0,
        linger_s: float = 30.0,
        drain_s: float = 0.5,
        same_host: bool = True,
        server_ssl: ssl.SSLContext | None = None,
        client_ssl: ssl.SSLContext | None = None,
        limits: Limits | None = None,
    ) -> None:
        if isinstance(token, str):
            _check_token(token)
        if not MIN_CHUNK <= chunk_bytes <= MAX_CHUNK:
            raise ValueError(f"chunk_bytes must be between {MIN_CHUNK} and {MAX_CHUNK}, not {chunk_bytes}")
        if streams < 1 or stall_s <= 0 or drain_s < 0 or linger_s < 0:
            raise ValueError("streams and stall_s must be positive, drain_s and linger_s not negative")
        if advertise is None and bind in _WILDCARDS:
            raise ValueError(
                f"when bound to {bind!r}, say with `advertise` by which host name others reach it"
            )
        self._token: Callable[[], str] = (lambda: token) if isinstance(token, str) else token
        self._chunk_bytes, self._drain_s, self._linger_s = chunk_bytes, drain_s, linger_s
        self._streams, self._stall_s, self._client_ssl = streams, stall_s, client_ssl
        self._min_rate = min_rate
        self._same_host = same_host
        self._board = Board()
        self._slots = Slots()
        self.sender: Sender | None = None
        """What sends publications by another way, for those who ask for it."""
        self._lock = threading.Lock()
        self._fetches: set[Fetch | ShardedFetch] = set()
        self._unwanted = ""
        """The version that was aborted last, which may not have begun to arrive."""
        self._closed = False
        self._server_ssl = server_ssl
        self._crew = Crew()
        self._server = Server(
            self._board,
            self._token,
            bind=bind,
            port=port,
            limits=limits or Limits(),
            tls=server_ssl,
            crew=self._crew,
        )
        scheme = "http" if server_ssl is None else "https"
        self._address = f"{scheme}://{_netloc(advertise or bind, self._server.port)}"

    @property
    def address(self) -> str:
        """Return the URL under which others find this transport as a source."""
        return self._address

    def publish(self, version: str, state: object, *, snapshot: bool = False) -> None:
        """Serve the memory of the state's live tensors, without a copy, until `withdraw`.

        With `snapshot` a copy is made first, in memory that is used again for later ones; then the tensors
        may change at once.
        """
        self._check_open()
        self.withdraw()
        self._put(encode(state, version=version, chunk_bytes=self._chunk_bytes), snapshot=snapshot)

    def publish_file(self, version: str, path: str | Path) -> None:
        """Serve the tensors of a safetensors file from its pages until `withdraw`.

        The file must not change meanwhile. `state.safetensors` is then this very file, byte for byte.
        """
        self._check_open()
        self.withdraw()
        self._put(open_file(path, version=version, chunk_bytes=self._chunk_bytes))

    def _put(self, encoded: Encoded, *, snapshot: bool = False) -> None:
        for device in encoded.devices:
            wait_for_device(device)  # what is queued on them belongs to the state
        slot = None
        if snapshot:
            slot = self._slots.take(encoded.size)
            slot.fill([(0, encoded.views(0, encoded.size))])
        self._meet_neighbours()
        self._board.put(Publication(encoded, self.sender, slot))

    def withdraw(self) -> None:
        """Stop serving; return once nobody reads the live memory any more. Idempotent.

        Nobody waits for a slow joiner: what is still owed to one is copied, and served from there.
        """
        before = self._board.retire()
        if before is not None:
            keep = self._linger_s > 0 and not self._closed
            if before.withdraw(self._drain_s, keep=keep):
                self._board.linger(before, self._linger_s)
            else:
                self._board.forget(before)
        self._share(None)

    def _share(self, share: Share | None) -> None:
        """Serve what a fetch has verified, instead of what the one before has."""
        if share is not None:
            self._meet_neighbours()
        before = self._board.shares.put(share)
        if before is not None:
            before.withdraw(self._drain_s)

    def warm_up(self) -> None:
        """Fetch a few numbers from itself, while nothing is published: a first fetch takes some 3 ms longer.

        Raises:
            TransportError: that did not work within a second.
        """
        layer = {"weight": torch.ones(2, 3, device="cpu"), "bias": torch.ones(2, device="cpu")}
        state = {"model": layer, "rates": [0.1, None], "steps": 1}
        self.publish(_WARM_UP, state)
        try:
            self._run(
                Fetch([self.address], _WARM_UP, state, self._settings(None), deadline_s=1.0, quiet=True)
            )
        finally:
            self.withdraw()

    def fetch(
        self,
        sources: Sequence[str],
        version: str,
        into: object,
        *,
        deadline_s: float,
        progress: Callable[[Progress], None] | None = None,
        joiners: Sequence[str] = (),
        reuse: bool = False,
    ) -> object:
        """Receive a state in place into the tensors of `into` and return the whole state.

        A source that has published nothing yet is waited for; one that serves another version is not.
        With `joiners`, what has been received is served to them until `withdraw`, unless an error is raised.
        """
        return self.fetch_with(
            None,
            sources,
            version,
            into,
            deadline_s=deadline_s,
            progress=progress,
            joiners=joiners,
            reuse=reuse,
        )

    def fetch_shards(
        self,
        shards: Sequence[Sequence[str]],
        version: str,
        into: object,
        *,
        deadline_s: float,
        progress: Callable[[Progress], None] | None = None,
    ) -> object:
        """Receive the part of a sharded state that `into` holds, wherever it lies.

        `shards` are the sources of each shard, one list for each rank of a source's group. DTensors (FSDP2)
        may be distributed in another way here than there, or not at all: only the bytes that are needed here
        are fetched, straight into their place where they are one run of it. DTensors must exist in `into`.
        """
        fetch = ShardedFetch(
            shards,
            version,
            into,
            self._settings(progress),
            deadline_s=deadline_s,
            progress=progress,
            prefer=zlib.crc32(self._address.encode()),  # ranks have different ones
        )
        return self._run(fetch)

    def fetch_with(
        self,
        ahead: Ahead | None,
        sources: Sequence[str],
        version: str,
        into: object,
        *,
        deadline_s: float,
        progress: Callable[[Progress], None] | None = None,
        joiners: Sequence[str] = (),
        reuse: bool = False,
    ) -> object:
        """Fetch, with another way for the bytes that is tried before HTTP."""
        fetch = Fetch(
            sources,
            version,
            into,
            self._settings(progress),
            deadline_s=deadline_s,
            progress=progress,
            ahead=ahead,
            joiners=joiners,
            reuse=reuse,
            own=self._address,
            serve=self._share,
        )
        try:
            return self._run(fetch)
        except BaseException:
            if joiners:
                self._share(None)
            raise

    def _settings(self, progress: Callable[[Progress], None] | None) -> Settings:
        _check_token(self._token())
        return Settings(
            make_link=partial(self._make_link, secrets.token_hex(8)),
            crew=self._crew,
            streams=self._streams,
            stall_s=self._stall_s,
            min_rate=self._min_rate,
            report_chunks=progress is not None,
        )

    def _run(self, fetch: Fetch | ShardedFetch) -> object:
        """Run a fetch, so that `abort` can find it."""
        with self._lock:
            if self._closed:
                raise TransportError("this transport is closed")
            if fetch.version == self._unwanted:
                raise _aborted(fetch.version)
            self._fetches.add(fetch)
        try:
            return fetch.run()
        finally:
            with self._lock:
                self._fetches.discard(fetch)

    def abort(self, version: str = "") -> None:
        """Make a fetch in flight in another thread fail at once with `TransportAborted`.

        With `version`, only one of that version; should it begin later, it fails then.
        """
        with self._lock:
            self._unwanted = version
            fetches = [fetch for fetch in self._fetches if version in ("", fetch.version)]
        for fetch in fetches:
            fetch.abort(_aborted(fetch.version))

    def close(self) -> None:
        """Withdraw, abort and free all sockets and threads. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.abort()
        self.withdraw()
        self._board.close()
        self._server.close()
        self._crew.close()
        self._slots.close()

    def __enter__(self) -> HTTPTransport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_link(self, fetch: str, address: str, check: Callable[[], None]) -> Link:
        kind = NearLink if self._same_host else Link
        return kind(
            address, self._token(), tls=self._client_ssl, stall_s=self._stall_s, check=check, fetch=fetch
        )

    def _meet_neighbours(self) -> None:
        """Be found by processes on this machine, under a name that follows from the token as it is now."""
        if self._same_host and self._server_ssl is None and (token := self._token()):
            self._server.listen_near(name_of(token, self._address))

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("this transport is closed")


def _aborted(version: str) -> TransportAborted:
    return TransportAborted(f"the fetch of version {version!r} was aborted")


def _check_token(token: str) -> None:
    if not token or not token.isascii() or not token.isprintable() or token != token.strip():
        raise ValueError("the token must be printable ASCII and must not be empty")


def _netloc(host: str, port: int) -> str:
    host = host.rpartition("://")[2].rstrip("/")
    if host.startswith("[") or host.count(":") == 1:
        return host if host.rpartition("]")[2].count(":") else f"{host}:{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
