"""How to reach etcd: endpoints, certificates, credentials.

Pure values; nothing is read from the environment here and nothing is connected.
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from typing import NamedTuple

from ftkit.config import Settings
from ftkit.errors import ConfigError

DEFAULT_PORT = 2379


class Endpoint(NamedTuple):
    """One etcd server's client address."""

    scheme: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """`host:port`, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.address}"


def parse_endpoint(text: str) -> Endpoint:
    """Parse a URL such as `http://10.0.0.1:2379`; scheme and port may be left out, as etcdctl allows."""
    text = text.strip()
    url = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = url.port
    except ValueError as error:
        raise ConfigError(f"etcd endpoint {text!r}: {error}") from None
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"etcd endpoint {text!r} is not a URL like http://10.0.0.1:2379")
    if url.username is not None or url.path not in ("", "/") or url.query:
        raise ConfigError(
            "an etcd endpoint is only scheme, host and port; user and password are settings of their own"
        )
    return Endpoint(url.scheme, url.hostname, DEFAULT_PORT if port is None else port)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EtcdSettings:
    """Where etcd is and how to prove who we are."""

    endpoints: tuple[str, ...]
    """URLs; with several, the others are used when one fails."""
    ca_cert: str = ""
    """Path of the PEM file with the certificate authority; with https and without it, the system's."""
    cert: str = ""
    """Path of the client's certificate, for mutual TLS."""
    key: str = ""
    """Path of the client's private key."""
    user: str = ""
    password: str = dataclasses.field(default="", repr=False)
    timeout_s: float = 5.0
    """Total time allowed for one request, repeats included."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        parsed = self.parsed()
        if not parsed:
            raise ConfigError("no etcd endpoint given; set --etcd or FTKIT_ETCD, e.g. http://10.0.0.1:2379")
        if len({e.scheme for e in parsed}) > 1:
            raise ConfigError(f"etcd endpoints mix http and https: {', '.join(self.endpoints)}")
        if bool(self.cert) != bool(self.key):
            raise ConfigError("mutual TLS needs both the client's certificate and its key")
        if self.cert and not self.tls:
            raise ConfigError("a client certificate is given, but the etcd endpoints are not https")
        if bool(self.user) != bool(self.password):
            raise ConfigError("etcd's user and password must be given together")
        if self.timeout_s <= 0:
            raise ConfigError(f"etcd's timeout must be positive, not {self.timeout_s}")

    def parsed(self) -> list[Endpoint]:
        """Return the endpoints, parsed."""
        endpoints = [parse_endpoint(e) for e in self.endpoints]
        if self.ca_cert:
            # A bare `host:port` beside a certificate authority means TLS.
            bare = {e for e, text in zip(endpoints, self.endpoints, strict=True) if "://" not in text}
            endpoints = [e._replace(scheme="https") if e in bare else e for e in endpoints]
        return endpoints

    @property
    def tls(self) -> bool:
        """Say whether the connection is encrypted."""
        return self.parsed()[0].scheme == "https"


def etcd_settings(settings: Settings, *, timeout_s: float = 5.0) -> EtcdSettings:
    """Return the part of a process's settings that says how to reach etcd."""
    return EtcdSettings(
        endpoints=settings.etcd,
        ca_cert=settings.etcd_ca_cert or "",
        cert=settings.etcd_cert or "",
        key=settings.etcd_key or "",
        user=settings.etcd_username or "",
        password=settings.etcd_password or "",
        timeout_s=timeout_s,
    )
