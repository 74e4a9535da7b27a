"""One connection to etcd that survives its servers: targets, failover, credentials, errors.

Wraps the client of the package `etcd3`. It decides which server to try next and what a gRPC error means;
it does not know what the requests are about. Thread-safe. This module, `etcd.py` and `watch.py` are the
only ones that see etcd3 or grpc.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import tenacity

from ftkit.errors import ConfigError, EtcdAuthError, EtcdError, EtcdNoSpace, EtcdUnavailable
from ftkit.keeper.compat import load_etcd3
from ftkit.keeper.settings import Endpoint, EtcdSettings

etcd3 = load_etcd3()
rpc = etcd3.etcdrpc

import grpc as grpc  # noqa: E402 - only after etcd3, whose import may have to be prepared

log = logging.getLogger(__name__)

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.min_reconnect_backoff_ms", 500),  # also the time that a silent server has to say hello
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 6000),  # etcd scolds clients that ping more often than every 5 s
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),  # newer releases wait for this one, a minute by default
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", -1),  # the listing of a large job exceeds the default of 4 MB
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a rebuilt channel must not inherit the broken connection
    ("grpc.enable_http_proxy", 0),  # a proxy meant for downloads must not catch connections to etcd
]

_ATTEMPT_S = 1.5
"""With several servers, how long one may take before the next one is tried."""

_STALE_TOKEN = ("invalid auth token", "revision of auth store is old", "user name is empty")
"""What etcd says when the token has run out, or when authentication was switched on meanwhile."""


_NO_AUTH = "none"
"""Stands for a token where etcd has authentication switched off."""


class LeaseLost(EtcdError):
    """The lease that a key should be bound to has run out or was revoked."""


class Compacted(EtcdError):
    """The revision asked for is no longer, or not yet, in etcd's history."""


class _StaleToken(EtcdAuthError):
    """The token has run out; another one may be had."""


class Unsent(EtcdUnavailable):
    """No server could be reached, so the request has certainly not been carried out."""


def translate(error: grpc.RpcError, where: str) -> EtcdError:
    """Return our error for one of gRPC; the message says what to do about it."""
    code = error.code()
    text = (error.details() or "").removeprefix("etcdserver: ")
    if any(phrase in text for phrase in _STALE_TOKEN):
        if "user name is empty" in text:
            return _StaleToken(f"etcd at {where} wants to know who asks: set FTKIT_ETCD_USER=user:password")
        return _StaleToken(f"etcd at {where} refused the token ({text}); check user and password")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "space exceeded" in text:
        return EtcdNoSpace(
            f"etcd at {where}: the database is full (NOSPACE alarm); compact it "
            "(`etcdctl compact <revision>`), defragment it (`etcdctl defrag`), "
            "then clear the alarm (`etcdctl alarm disarm`)"
        )
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
        return EtcdAuthError(f"etcd at {where} denies access ({text}); grant the user readwrite on /ftkit/")
    if "authentication failed" in text:
        return EtcdAuthError(f"etcd at {where} refused user and password ({text})")
    if code is grpc.StatusCode.NOT_FOUND and "lease" in text:
        return LeaseLost(f"etcd at {where}: {text}")
    if code is grpc.StatusCode.OUT_OF_RANGE:
        return Compacted(f"etcd at {where}: {text}")
    if code is grpc.StatusCode.UNAVAILABLE and (
        "failed to connect" in text or "name resolution" in text.lower()
    ):
        if "CERTIFICATE_VERIFY_FAILED" in text or "Peer name" in text:
            return EtcdAuthError(
                f"the certificate of etcd at {where} is not trusted ({text}); check the CA file"
            )
        return Unsent(f"no etcd server at {where} can be reached ({text})")
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
        return EtcdError(f"etcd at {where} refused the request: {text}")
    return EtcdUnavailable(f"etcd at {where} did not answer ({code.name}: {text})")


class Link:
    """A channel to etcd, replaced by one that tries the servers in another order when one goes silent."""

    def __init__(self, settings: EtcdSettings) -> None:
        self.settings = settings
        self.where = ", ".join(str(e) for e in settings.parsed())
        self.heard = 0.0
        """Monotonic time of the last answer of any server; 0: never."""
        self._lock = threading.Lock()
        self._client: Any = None
        self._token = ""
        self._turn = 0
        self._silences = 0
        self._closed = False

    def close(self) -> None:
        """Close the channel; calls in flight end with an error."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()

    # -- calls -------------------------------------------------------------------------------------

    def call(
        self, method: Callable[[Any], Any], request: Any, *, repeatable: bool, timeout_s: float | None = None
    ) -> Any:
        """Send one request and return the response.

        `method` picks the stub's method from the client. What may have been carried out already is
        repeated only if `repeatable`; what certainly was not is always.
        """
        deadline = time.monotonic() + (self.settings.timeout_s if timeout_s is None else timeout_s)
        return self.attempts(lambda: self._once(method, request, deadline, repeatable), deadline, repeatable)

    def attempts(self, once: Callable[[], Any], deadline: float, repeatable: bool) -> Any:
        """Run `once`, again after failures that allow it, until the deadline."""
        try:
            return once()
        except EtcdUnavailable as error:
            if not (repeatable or isinstance(error, Unsent)) or self._closed:
                raise
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(EtcdUnavailable if repeatable else Unsent),
            wait=tenacity.wait_random_exponential(multiplier=0.02, max=0.5),
            stop=lambda _: self._closed or time.monotonic() >= deadline,
            reraise=True,
        )(once)

    def _once(self, method: Callable[[Any], Any], request: Any, deadline: float, repeatable: bool) -> Any:
        """Send one request to whichever server the channel is connected to."""
        for renewed in (False, True):
            client, metadata = self.client()
            left = max(0.05, deadline - time.monotonic())
            if repeatable and len(self.settings.endpoints) > 1:
                left = min(left, _ATTEMPT_S)
            try:
                response = method(client)(request, timeout=left, metadata=metadata)
            except grpc.RpcError as raw:
                error = self.failed(client, raw)
                if isinstance(error, _StaleToken) and self.settings.user and not renewed:
                    # Refused before anything was done, so that repeating is safe even for a transaction.
                    self._drop_token(metadata)
                    continue
                raise error from None
            except ValueError:
                # grpc's way to say that another thread has closed this channel meanwhile.
                raise Unsent(f"the connection to etcd at {self.where} was replaced") from None
            self.answered()
            return response
        raise AssertionError("unreachable")

    def answered(self) -> None:
        """Note that a server has answered."""
        self.heard = time.monotonic()
        self._silences = 0

    def failed(self, client: Any, raw: grpc.RpcError) -> EtcdError:
        """Translate an error; go on to the next server when this one is silent or gone."""
        error = translate(raw, self.where)
        code = raw.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._silences += 1
            # One server may just be slow; if there are others, they are worth a try at once.
            if len(self.settings.endpoints) > 1 or self._silences >= 3:
                self.replace(client)
        elif code is grpc.StatusCode.UNAVAILABLE and len(self.settings.endpoints) > 1:
            # Also the answer of a member that has lost its leader: another may have one.
            self.replace(client)
        # A refusal is no word from the cluster (I3): a server that is cut off refuses a token, too.
        return error

    # -- the channel -------------------------------------------------------------------------------

    def client(self) -> tuple[Any, tuple[tuple[str, str], ...]]:
        """Return the etcd3 client and the metadata that goes with each request; connect if needed."""
        with self._lock:
            if self._closed:
                raise EtcdUnavailable(f"the connection to etcd at {self.where} is closed")
            if self._client is None:
                self._client = self._connect()
                self._token = ""
            client, token = self._client, self._token
        if self.settings.user and not token:
            token = self._authenticate(client)
        # A member that is cut off from its leader then ends our watches instead of keeping them silent.
        metadata: tuple[tuple[str, str], ...] = (("hasleader", "true"),)
        return client, (metadata if token in ("", _NO_AUTH) else (*metadata, ("token", token)))

    def replace(self, client: Any) -> None:
        """Close this client's channel, if it is the present one; the next call tries other servers first."""
        with self._lock:
            if self._client is not client:
                return
            self._client = None
            self._turn += 1
            self._silences = 0
        log.info("etcd: trying another server of %s", self.where)
        client.close()

    def _connect(self) -> Any:
        """Build the etcd3 client for the endpoints in their present order."""
        host, port = _target(self.settings, self._turn)
        paths: dict[str, str] = {}
        if self.settings.tls:
            paths["ca_cert"] = self.settings.ca_cert or _system_ca()
            if self.settings.cert:
                paths["cert_cert"], paths["cert_key"] = self.settings.cert, self.settings.key
        try:
            return etcd3.Etcd3Client(host=host, port=port, grpc_options=_OPTIONS, **paths)
        except OSError as error:
            raise ConfigError(f"a certificate for etcd cannot be read: {error}") from None

    def _authenticate(self, client: Any) -> str:
        """Fetch a token for user and password."""
        request = rpc.AuthenticateRequest(name=self.settings.user, password=self.settings.password)
        try:
            token = str(
                rpc.AuthStub(client.channel).Authenticate(request, timeout=self.settings.timeout_s).token
            )
        except grpc.RpcError as raw:
            if "authentication is not enabled" in (raw.details() or ""):
                log.warning(
                    "etcd at %s has authentication switched off; user and password are not used", self.where
                )
                token = _NO_AUTH
            else:
                raise self.failed(client, raw) from None
        except ValueError:
            raise Unsent(f"the connection to etcd at {self.where} was replaced") from None
        with self._lock:
            if self._client is client:
                self._token = token
        return token

    def _drop_token(self, metadata: tuple[tuple[str, str], ...]) -> None:
        """Forget the token that was just refused, unless another thread has renewed it already."""
        with self._lock:
            if self._token == dict(metadata).get("token", _NO_AUTH):
                self._token = ""


def _system_ca() -> str:
    """Return the path of the system's certificate authorities."""
    paths = ssl.get_default_verify_paths()
    if not paths.cafile:
        raise ConfigError("etcd is to be reached by https, but no CA file is given and the system has none")
    return paths.cafile


def _target(settings: EtcdSettings, turn: int) -> tuple[str, int]:
    """Return the gRPC target as etcd3 wants it: everything up to the last colon, and the last port.

    Without TLS several servers are one target, within which gRPC fails over in milliseconds. With TLS
    each server is a target of its own, since its certificate is checked against its own name.
    """
    endpoints = settings.parsed()
    turn %= len(endpoints)
    endpoints = endpoints[turn:] + endpoints[:turn]
    first = endpoints[0]
    if len(endpoints) > 1 and not settings.tls:
        resolved = list(_resolve(endpoints))
        if resolved:
            addresses = ",".join(f"{ip}:{port}" for ip, port in resolved)
            return f"ipv4:{addresses.rpartition(':')[0]}", resolved[-1][1]
    return first.address.rpartition(":")[0], first.port


def _resolve(endpoints: list[Endpoint]) -> Iterator[tuple[str, int]]:
    """Yield the IPv4 addresses of those endpoints whose names can be resolved."""
    for endpoint in endpoints:
        try:
            infos = socket.getaddrinfo(endpoint.host, endpoint.port, socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            log.warning("etcd endpoint %s cannot be resolved to IPv4: %s", endpoint, error)
            continue
        yield str(infos[0][4][0]), endpoint.port
