"""Ask one source one thing, and read its refusals.

Knows the routes of a source and what their answers mean; not what is done about them.
"""

from __future__ import annotations

import json
from typing import Final
from urllib.parse import quote

import xxhash

from transport.errors import TokenRefused, VersionMismatch
from transport.link import Garbled, Link, Lost, Reply
from transport.routes import CHECKSUM

SMALL_BODY: Final = 1 << 20


class NotPublished(Exception):
    """The source has nothing published at the moment."""


class OtherLayout(VersionMismatch):
    """The source serves the right version, but its bytes lie elsewhere than at the reference."""


def ask(
    link: Link,
    version: str,
    what: str,
    headers: dict[str, str] | None = None,
    *,
    method: str = "GET",
    wait_s: float = 0.0,
) -> Reply:
    """Send a request; return the head of the answer if it is a good one, else raise what it means."""
    path = f"/v1/{quote(version, safe='')}/{what}"
    reply = link.request(method, path, headers or {}, patience_s=wait_s)
    if reply.status in (200, 206):
        return reply
    detail = link.read_body(reply, SMALL_BODY)
    if reply.status in (401, 403):
        raise TokenRefused("it refused the token")
    if reply.status == 404:
        raise NotPublished
    if reply.status == 412 and "etag" in reply.headers:
        raise OtherLayout("its state has another layout than that of the other sources")
    if reply.status == 412:
        raise VersionMismatch(f"it serves {_other(detail)}")
    if reply.status == 503:
        raise Lost("it is busy")
    raise Garbled(f"it answered with status {reply.status}")


def checked_body(link: Link, reply: Reply, limit: int) -> bytes:
    """Return a body that carries its own checksum."""
    raw = link.read_body(reply, limit)
    if xxhash.xxh3_128_hexdigest(raw) != reply.headers.get(CHECKSUM):
        raise Garbled("its answer was damaged on the way")
    return raw


def _other(detail: bytes) -> str:
    try:
        latest = json.loads(detail)["latest"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another version"
    return f"version {str(latest)[:200]!r}"
