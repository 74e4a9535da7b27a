"""Decide what a request is answered with.

Knows no sockets: a request goes in, a response comes out, whose body is a range of live memory or a few
bytes. All routes are under `/v1/<version>/`, the version percent-encoded:

    manifest[?hashes=0|1]    the description of the state, see `manifest.py`
    hashes?first=a&last=b    checksums of chunks a up to b, 16 bytes each
    state.safetensors        the whole state as a file
    data                     its data section alone: the same bytes at the same offsets at all sources
    rows?at=...              boxes of its tensors, see `rows.py`; `&digest=1`: the checksum of what these hold
    send?...                 have its bytes sent over a process group, see `pg.py`
    have?known=n             which chunks a joiner has verified, one bit each, once they are more than n
    part                     the data section of a joiner; ask only for bytes of chunks that it has

`?wait=s` on any of them waits up to `s` seconds for a state to be published.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

import xxhash

from transport import rows
from transport.passing import SUM
from transport.publication import Board, Publication
from transport.readers import Content
from transport.share import Share
from transport.staging import HostReader
from transport.visits import FETCH
from transport.wire import BadHead, parse_head

MAX_WAIT_S: Final = 30.0
MAX_HASHES: Final = 4096
CHECKSUM: Final = "x-checksum-xxh3-128"
"""Header of a response: checksum of its body, where no chunk's checksum covers it."""

REASONS: Final = {
    200: "OK", 206: "Partial Content", 304: "Not Modified", 400: "Bad Request", 401: "Unauthorized",
    404: "Not Found", 405: "Method Not Allowed", 412: "Precondition Failed",
    416: "Range Not Satisfiable", 431: "Request Header Fields Too Large", 503: "Service Unavailable",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of a request that matter here."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]

    @property
    def keep_alive(self) -> bool:
        """Say whether the client may send another request on this connection."""
        return self.headers.get("connection", "").lower() != "close"


@dataclass(slots=True)
class Response:
    """What to answer: `body`, and after it bytes `start` to `end` of the content, if there is one."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    content: Content | None = None
    start: int = 0
    end: int = 0
    close: bool = False
    summed: bool = False
    """The checksums of what is sent will be asked for next."""
    asked: Publication | None = None
    """Of which publication something was asked for."""

    @property
    def content_length(self) -> int:
        """Return the number of bytes in the body."""
        return len(self.body) + self.end - self.start


def parse_request(raw: bytes) -> Request:
    """Read the head of a request; raise `BadHead` for anything that this server does not accept."""
    first, headers = parse_head(raw)
    parts = first.split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0") or not parts[1].startswith("/"):
        raise BadHead("malformed request line")
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise BadHead("a request must not have a body")
    if parts[2] == "HTTP/1.0":
        headers["connection"] = "close"
    try:
        url = urlsplit(parts[1])
        query = {k: v[-1] for k, v in parse_qs(url.query, max_num_fields=16).items()}
    except ValueError as error:
        raise BadHead("malformed path or query") from error
    return Request(parts[0], url.path, query, headers)


def authorized(request: Request, token: str) -> bool:
    """Compare the token of a request with ours, in constant time."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if not token:
        return False  # not known yet
    # Digests, so that not even the length of the token can be measured.
    ours = hashlib.sha256(token.encode()).digest()
    theirs = hashlib.sha256(given.strip().encode("latin-1", "replace")).digest()
    return hmac.compare_digest(ours, theirs) and scheme.lower() == "bearer"


def error(status: int, message: str, *, close: bool = False, **extra: str | None) -> Response:
    """Return a response that says in JSON what is wrong."""
    body = json.dumps({"error": message, **extra}).encode()
    return Response(status, {"Content-Type": "application/json"}, body, close=close)


def respond(request: Request, token: str, board: Board, reader: HostReader) -> Response:
    """Answer a request. May raise `Withdrawn`."""
    if not authorized(request, token):
        return error(401, "the token is missing or wrong", close=True)
    if request.method not in ("GET", "HEAD"):
        response = error(405, "only GET and HEAD are allowed", close=True)
        response.headers["Allow"] = "GET, HEAD"
        return response
    parts = request.path.split("/")
    if len(parts) != 4 or parts[:2] != ["", "v1"]:
        return error(404, "no such path; try /v1/<version>/manifest")
    version, what = unquote(parts[2]), parts[3]
    if what in _SHARE_ROUTES:
        share = board.shares.wait(version, _wait_s(request))
        if share is None:
            return error(404, "no share of this version is served")
        return _SHARE_ROUTES[what](request, share)
    route = _ROUTES.get(what)
    if route is None:
        return error(404, "no such path; try /v1/<version>/manifest")
    publication = board.wait(_wait_s(request), version, request.headers.get(FETCH, ""))
    if publication is None:
        return error(404, "nothing is published", latest=None)
    if publication.version != version:
        return error(412, "another version is published", latest=publication.version)
    response = route(request, publication, reader)
    response.asked = publication
    return response


def _wait_s(request: Request) -> float:
    try:
        wait_s = float(request.query.get("wait", "0"))
    except ValueError:
        return 0.0
    return min(wait_s, MAX_WAIT_S) if wait_s > 0 else 0.0


def _manifest(request: Request, publication: Publication, reader: HostReader) -> Response:
    asked = request.query.get("hashes", "1")
    with publication.reading(lambda: None) as views:
        raw = publication.manifest(views, reader, hashes={"0": False, "1": True}.get(asked))
    headers = {"Content-Type": "application/json", CHECKSUM: xxhash.xxh3_128_hexdigest(raw)}
    return Response(200, headers, raw)


def _hashes(request: Request, publication: Publication, reader: HostReader) -> Response:
    total = publication.encoded.manifest.num_chunks
    try:
        first, last = int(request.query.get("first", "0")), int(request.query.get("last", str(total)))
    except ValueError:
        return error(400, "first and last must be numbers")
    if not 0 <= first <= last <= total or last - first > MAX_HASHES:
        return error(400, f"ask for at most {MAX_HASHES} of the chunks 0 to {total}")
    with publication.reading(lambda: None) as views:
        raw = publication.hashes(first, last, views, reader)
    headers = {"Content-Type": "application/octet-stream", CHECKSUM: xxhash.xxh3_128_hexdigest(raw)}
    return Response(200, headers, raw)


def _send(request: Request, publication: Publication, reader: HostReader) -> Response:
    if publication.sender is None:
        return error(400, "this source sends over no process group")
    try:
        answer = publication.sender.send(publication, request.query)
    except ValueError as why:
        return error(400, str(why))
    return Response(200, {"Content-Type": "application/json"}, answer.encode())


def _data(request: Request, publication: Publication, reader: HostReader) -> Response:
    encoded = publication.encoded
    return _ranged(request, publication, encoded.manifest.etag, encoded.size, publication.version)


def _rows(request: Request, publication: Publication, reader: HostReader) -> Response:
    manifest = publication.encoded.manifest
    if not _lists(request.headers.get("if-match", "*"), manifest.etag):
        response = error(412, "the content differs from the one expected", latest=publication.version)
        response.headers["ETag"] = f'"{manifest.etag}"'
        return response
    try:
        items = rows.parse(request.query.get("at", ""), manifest.size)
    except ValueError as why:
        return error(400, str(why))
    if not all(publication.has(item.offset, item.end) for item in items):
        return error(404, "some of these bytes are served no more", latest=None)
    with publication.reading(lambda: None) as views:
        raw = rows.gather(items, views, reader)
    headers = {"Content-Type": "application/octet-stream"}
    if request.query.get("digest") == "1":
        digest = xxhash.xxh3_128_digest(raw)
        return Response(200, {**headers, CHECKSUM: xxhash.xxh3_128_hexdigest(digest)}, digest)
    return Response(200, headers, raw)


def _file(request: Request, publication: Publication, reader: HostReader) -> Response:
    encoded = publication.encoded
    size = encoded.size
    return _ranged(request, publication, encoded.file_etag, size, publication.version, encoded.header)


def _have(request: Request, share: Share) -> Response:
    try:
        known = int(request.query.get("known", "-1"))
    except ValueError:
        return error(400, "known must be a number")
    raw = share.have(known, _wait_s(request))
    headers = {
        "Content-Type": "application/octet-stream",
        CHECKSUM: xxhash.xxh3_128_hexdigest(raw),
        "ETag": f'"{share.etag}"',
    }
    return Response(200, headers, raw)


def _part(request: Request, share: Share) -> Response:
    response = _ranged(request, share, share.etag, share.size, share.version)
    wanted = parse_range(request.headers.get("range", ""), share.size)
    if response.status == 206 and wanted and share.has(*wanted):
        return response
    return response if response.status == 412 else error(416, "ask for bytes of chunks that are here")


_SHARE_ROUTES: Final[dict[str, Callable[[Request, Share], Response]]] = {"have": _have, "part": _part}
_ROUTES: Final[dict[str, Callable[[Request, Publication, HostReader], Response]]] = {
    "manifest": _manifest,
    "hashes": _hashes,
    "data": _data,
    "rows": _rows,
    "send": _send,
    "state.safetensors": _file,
}


def _ranged(
    request: Request,
    content: Content,
    etag: str,
    data_size: int,
    version: str,
    header: bytes = b"",
) -> Response:
    """Answer with a range of header and content, or all of it, under the conditions of RFC 9110."""
    size = len(header) + data_size
    headers = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    given = request.headers
    if "if-match" in given and not _lists(given["if-match"], etag):
        response = error(412, "the content differs from the one expected", latest=version)
        response.headers["ETag"] = headers["ETag"]
        return response
    if "if-none-match" in given and _lists(given["if-none-match"].replace("W/", ""), etag):
        return Response(304, headers)
    start, end, status = 0, size, 200
    spec = given.get("range")
    if (
        spec is not None
        and request.method == "GET"
        and given.get("if-range", headers["ETag"]) == headers["ETag"]
    ):
        wanted = parse_range(spec, size)
        if wanted is not None and not wanted:
            response = error(416, f"there are {size} bytes")
            response.headers["Content-Range"] = f"bytes */{size}"
            return response
        if wanted is not None:
            start, end = wanted
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return Response(
        status,
        headers,
        header[start:end],
        content,
        max(0, start - len(header)),
        max(0, end - len(header)),
        summed=given.get(SUM) == "1",
    )


def _lists(condition: str, etag: str) -> bool:
    return condition.strip() == "*" or f'"{etag}"' in (tag.strip() for tag in condition.split(","))


def parse_range(spec: str, size: int) -> tuple[int, int] | tuple[()] | None:
    """Return start and end of a single range, () if it lies outside, None if it is to be ignored."""
    unit, _, span = spec.partition("=")
    first, dash, last = span.strip().partition("-")
    if unit.strip().lower() != "bytes" or not dash or "," in span or len(span) > 40:
        return None
    first, last = first.strip(), last.strip()
    if any(text and not (text.isascii() and text.isdecimal()) for text in (first, last)):
        return None
    if not first:
        if not last:
            return None
        count = min(int(last), size)
        return (size - count, size) if count else ()
    start = int(first)
    end = size if not last else int(last) + 1
    if end <= start and last:
        return None
    return (start, min(end, size)) if start < size else ()
