"""Read single values of settings: numbers, names, addresses, endpoints.

A reader takes text (a variable, a flag) or a Python value (an argument) and returns the settled value, or
raises `ValueError` with what is wrong. Nothing here knows which setting it reads.
"""

from __future__ import annotations

import difflib
import ipaddress
import logging
import math
import os
import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

Reader = Callable[[object], object]

DEFAULT_PORT = 2379
EMBEDDED = "embedded"
WILDCARDS = ("0.0.0.0", "::")
MAX_NAME = 100
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
OFF = ("off", "none", "never")


def read_text(raw: object) -> str:
    """Read text of printable characters."""
    if not isinstance(raw, str):
        raise ValueError(f"must be text, not {type(raw).__name__}")
    if not raw:
        raise ValueError("must not be empty")
    if not raw.isprintable():
        raise ValueError("must not contain control characters")
    return raw


def read_secret(raw: object) -> str:
    """Read a secret that can stand in a line of HTTP: printable ASCII, no space at either end."""
    text = read_text(raw)
    if not text.isascii() or text != text.strip():
        raise ValueError("must be printable ASCII without space at either end")
    return text


def read_name(raw: object) -> str:
    """Read a name that can be part of a key: no slash, no whitespace, not too long."""
    text = read_text(raw)
    if "/" in text or any(c.isspace() for c in text):
        raise ValueError("must contain neither a slash nor whitespace")
    if len(text) > MAX_NAME:
        raise ValueError(f"must have at most {MAX_NAME} characters, has {len(text)}")
    return text


def read_file(raw: object) -> str:
    """Read the path of a file that this process may read."""
    path = os.fspath(raw) if isinstance(raw, os.PathLike) else read_text(raw)
    try:
        with open(path, "rb"):
            return str(path)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None


def read_host(raw: object) -> str:
    """Read a host name or an address, without port; brackets around IPv6 are dropped."""
    text = read_name(raw).removeprefix("[").removesuffix("]")
    if ":" in text:
        _ip(text)
    return text


def read_bool(raw: object) -> bool:
    """Read a truth value: 0, 1, true or false."""
    if isinstance(raw, bool):
        return raw
    known = {"1": True, "true": True, "0": False, "false": False}
    try:
        return known[str(raw).lower()]
    except KeyError:
        raise ValueError("must be one of 0, 1, true, false") from None


def read_level(raw: object) -> str:
    """Read the name of a log level."""
    level = read_text(raw).upper()
    if level not in LEVELS:
        raise ValueError(f"must be one of {', '.join(LEVELS)}")
    return level


def whole(least: int, most: int | None = None) -> Reader:
    """Return a reader of whole numbers between two limits, both included."""

    def read(raw: object) -> int:
        number = _number(raw, "a whole number")
        if number != int(number):
            raise ValueError("must be a whole number")
        if number < least or (most is not None and number > most):
            raise ValueError(
                f"must be at least {least}" + (f" and at most {most}" if most is not None else "")
            )
        return int(number)

    return read


def seconds(above: float | None = None) -> Callable[[object], float]:
    """Return a reader of times in seconds; not negative, and greater than `above` where it is given."""

    def read(raw: object) -> float:
        number = raw.total_seconds() if isinstance(raw, timedelta) else _number(raw, "a number of seconds")
        if number < 0 or (above is not None and number <= above):
            raise ValueError("must not be negative" if above is None else f"must be greater than {above:g}")
        return number

    return read


def optional_seconds(above: float | None = None) -> Reader:
    """Return a reader of times in seconds that may be `off` (None)."""
    read_number = seconds(above)

    def read(raw: object) -> float | None:
        return None if isinstance(raw, str) and raw.lower() in OFF else read_number(raw)

    return read


def read_endpoints(raw: object) -> tuple[str, ...]:
    """Read a comma list of etcd's client URLs (the scheme may be missing), or `embedded`."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        raise ValueError("must be a comma list of URLs")
    texts = [part.strip() for part in parts if part.strip()]
    if not texts:
        raise ValueError("must name at least one URL")
    if EMBEDDED in texts:
        if len(texts) > 1:
            raise ValueError(f"must be either {EMBEDDED} or URLs, not both")
        return (EMBEDDED,)
    endpoints = tuple(dict.fromkeys(_endpoint(text) for text in texts))
    if len({text.partition("://")[0] for text in endpoints if "://" in text}) > 1:
        raise ValueError("must use http or https for all URLs, not both")
    return endpoints


def with_scheme(endpoints: Iterable[str], *, secure: bool) -> tuple[str, ...]:
    """Complete endpoints that were given without a scheme."""
    given = {text.partition("://")[0] for text in endpoints if "://" in text}
    scheme = given.pop() if given else "https" if secure else "http"
    return tuple(t if "://" in t or t == EMBEDDED else f"{scheme}://{t}" for t in endpoints)


def add_password(user: str | None, password: str | None) -> str | None:
    """Append the password that came in a variable of its own."""
    return f"{user}:{password}" if user is not None and ":" not in user and password else user


def write(value: object) -> str:
    """Write a settled value as the text of a variable."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, float):
        return repr(int(value) if value.is_integer() else value)
    return ",".join(value) if isinstance(value, (list, tuple)) else str(value)


def unknown(name: str, known: Iterable[str]) -> str:
    """Say that there is no such setting, and which one may be meant."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"{name}: there is no such setting" + (f"; did you mean {close[0]}?" if close else "")


def own_address(endpoints: Iterable[str]) -> str:
    """Return the address that a member should listen on: as near as etcd is, and no nearer.

    Loopback when all endpoints are; else the address of the interface that leads to the first endpoint that
    resolves. Connecting a UDP socket only asks the routing table: no packet is sent.
    """
    hosts = [(urlsplit(text).hostname or "", urlsplit(text).port or DEFAULT_PORT) for text in endpoints]
    if all(is_loopback(host) for host, _ in hosts):  # also when embedded
        return "127.0.0.1"
    for host, port in [*hosts, ("192.0.2.1", 9)]:  # the last (RFC 5737) stands for the default route
        address = _local_address(host, port)
        if address is not None and not is_loopback(address):
            return address
    logger.warning("no network interface leads to etcd (%s); listening on 127.0.0.1", ", ".join(endpoints))
    return "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Say whether a host name or address means this machine only; an empty one does."""
    if host in ("", "localhost") or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _local_address(host: str, port: int) -> str | None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, proto, _, target in found:
        try:
            with socket.socket(family, kind, proto) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def _number(raw: object, what: str) -> float:
    """Read a finite number; truth values are not numbers."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise ValueError(f"must be {what}")
    try:
        number = float(raw)
    except (ValueError, OverflowError):
        raise ValueError(f"must be {what}") from None
    if not math.isfinite(number):
        raise ValueError(f"must be {what}")
    return number


def _endpoint(text: str) -> str:
    """Check one endpoint and return it as [scheme://]host:port."""
    scheme, separator, _ = text.partition("://")
    try:
        url = urlsplit(text if separator else f"//{text}")
        host, port = url.hostname, url.port
    except ValueError as error:
        raise ValueError(f"{text!r} is not a URL: {error}") from None
    if separator and scheme.lower() not in ("http", "https"):
        raise ValueError(f"{text!r} must begin with http:// or https://")
    if not host or any(c.isspace() for c in text):
        raise ValueError(f"{text!r} is not of the form http://host:port")
    if url.username is not None:
        raise ValueError("must not contain a user or password; give them as etcd_user")
    if url.path not in ("", "/") or url.query or url.fragment:
        raise ValueError(f"{text!r} must end after the port")
    if port == 0:
        raise ValueError(f"{text!r} has port 0")
    name = f"[{host}]" if ":" in host else host
    return (
        f"{scheme.lower()}://{name}:{port or DEFAULT_PORT}" if separator else f"{name}:{port or DEFAULT_PORT}"
    )


def _ip(text: str) -> None:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise ValueError("must be a host name or an address, without a port") from None
