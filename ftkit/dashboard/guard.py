"""Decide whom the dashboard answers: only requests that name this machine, and none made by other web sites.

Pure. A web site can point a name of its own at 127.0.0.1 and then read what answers there as if it were
itself (DNS rebinding); the name in the Host header gives it away. An address cannot be pointed anywhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from ftkit.errors import ConfigError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8275


def parse_listen(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, HOST, PORT or [IPv6]:PORT."""
    host, port = DEFAULT_HOST, str(DEFAULT_PORT)
    if text.isdecimal():
        port = text
    elif is_address(text.strip("[]")):
        host = text.strip("[]")
    else:
        name, colon, rest = text.rpartition(":")
        host, port = (name.removeprefix("[").removesuffix("]"), rest) if colon else (text, port)
    if not host:
        raise ConfigError(f"--listen {text}: write 0.0.0.0{text} if all addresses of this machine are meant")
    if not (port.isdecimal() and port.isascii() and int(port) < 65536):
        raise ConfigError(f"--listen takes HOST:PORT, for example 127.0.0.1:{DEFAULT_PORT}; got {text}")
    return host, int(port)


def is_address(host: str) -> bool:
    """Say whether this is an IP address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach it."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def host_of(header: str) -> str | None:
    """Return the host that a Host header names, None when it is malformed."""
    name, bracket, rest = header.partition("]")
    if bracket:
        host, port = name.removeprefix("["), rest.removeprefix(":")
        if not name.startswith("[") or (rest and not rest.startswith(":")) or not is_address(host):
            return None
    else:
        host, _, port = header.partition(":")
    if port and not (port.isdecimal() and port.isascii()):
        return None
    return host.lower().removesuffix(".") or None


class Guard:
    """Knows the names under which the dashboard may be asked."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset({"localhost", *(n.lower().removesuffix(".") for n in names if n)})

    def refusal(self, hosts: list[str], fetch_site: str, *, is_page: bool) -> str | None:
        """Say why a request is refused, or None; `hosts` are its Host headers.

        Following a link to the page is fine (`is_page`), reading its data from elsewhere is not.
        """
        if len(hosts) != 1:
            return "one Host header is needed"
        host = host_of(hosts[0].strip())
        if host is None or not (is_address(host) or host in self.names):
            return "this name is not one of the dashboard's; start it with --allow-host NAME to add one"
        if fetch_site in ("cross-site", "same-site") and not is_page:
            return "only the dashboard's own page may read this"
        return None
