"""The server speaks HTTP that curl and safetensors understand, and keeps strangers from doing harm."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import xxhash
from safetensors import safe_open

from transport import HTTPTransport, Limits, encode
from transport.routes import parse_range

Make = Callable[..., HTTPTransport]
STATE = {"w": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bfloat16), "n": 3}
FILE = "/v1/v/state.safetensors"


def get(
    transport: HTTPTransport, path: str, method: str = "GET", token: str = "secret", **headers: str
) -> Any:
    url = urlsplit(transport.address)
    connection = HTTPConnection(url.hostname or "", url.port, timeout=10)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers={"Authorization": f"Bearer {token}", **named})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


@pytest.fixture
def source(make_transport: Make) -> HTTPTransport:
    transport = make_transport(chunk_bytes=1024)
    transport.publish("v", STATE)
    return transport


def test_the_file_is_the_encoded_state(source: HTTPTransport) -> None:
    status, headers, body = get(source, FILE)
    assert status == 200
    assert body == encode(STATE, version="v", chunk_bytes=1024).tobytes()
    assert headers["Content-Length"] == str(len(body))
    assert headers["Accept-Ranges"] == "bytes"


def test_curl_and_safetensors_can_read_a_live_state(source: HTTPTransport, tmp_path: Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("needs curl")
    path = tmp_path / "x.safetensors"
    command = [curl, "-sSf", "-H", "Authorization: Bearer secret", source.address + FILE]
    subprocess.run([*command, "-r", "0-999", "-o", path], check=True, timeout=20)
    subprocess.run([*command, "-C", "-", "-o", path], check=True, timeout=20)  # resumes with a Range
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("w"), STATE["w"])


def test_single_ranges_are_answered_as_rfc_9110_says(source: HTTPTransport) -> None:
    whole = get(source, FILE)[2]
    size = len(whole)
    for spec, start, end in [
        ("0-0", 0, 1),
        ("5-4200", 5, 4201),
        ("100-", 100, size),
        ("-7", size - 7, size),
        (f"{size - 1}-{size + 50}", size - 1, size),
        ("-999999999", 0, size),
    ]:
        status, headers, body = get(source, FILE, Range=f"bytes={spec}")
        assert (status, body) == (206, whole[start:end]), spec
        assert headers["Content-Range"] == f"bytes {start}-{end - 1}/{size}"
    for spec in (f"{size}-", "-0", "999999999-"):
        status, headers, _ = get(source, FILE, Range=f"bytes={spec}")
        assert (status, headers["Content-Range"]) == (416, f"bytes */{size}"), spec
    for spec in ("bytes=5-2", "bytes=a-b", "lines=1-2", "bytes=0-1,4-5", "bytes=-", "nonsense"):
        assert get(source, FILE, Range=spec)[0] == 200, spec


def test_a_range_of_an_empty_body_lies_outside() -> None:
    assert parse_range("bytes=0-", 0) == ()
    assert parse_range("bytes=-5", 0) == ()


def test_conditions_protect_a_reader_from_another_state(source: HTTPTransport) -> None:
    etag = get(source, FILE, "HEAD")[1]["ETag"]
    assert get(source, FILE, If_Match=etag)[0] == 200
    assert get(source, FILE, If_Match="*", Range="bytes=0-3")[0] == 206
    assert get(source, FILE, If_Match=f'"x", {etag}')[0] == 200
    assert get(source, FILE, If_Match='"other"')[0] == 412
    assert get(source, FILE, If_None_Match=etag)[0] == 304
    assert get(source, FILE, If_Range=etag, Range="bytes=0-3")[0] == 206
    assert get(source, FILE, If_Range='"other"', Range="bytes=0-3")[0] == 200


def test_head_gives_the_head_of_get(source: HTTPTransport) -> None:
    status, headers, body = get(source, FILE, "HEAD")
    assert (status, body) == (200, b"")
    assert headers == get(source, FILE)[1]


def test_the_manifest_has_a_checksum_for_each_chunk(source: HTTPTransport) -> None:
    manifest = json.loads(get(source, "/v1/v/manifest")[2])
    data = get(source, "/v1/v/data")[2]
    assert (manifest["size"], manifest["chunk"], manifest["version"]) == (len(data), 1024, "v")
    expected = "".join(xxhash.xxh3_128_hexdigest(data[i : i + 1024]) for i in range(0, len(data), 1024))
    assert manifest["hashes"] == expected
    assert get(source, "/v1/v/hashes?first=1&last=3")[2].hex() == expected[32:96]
    assert json.loads(get(source, "/v1/v/manifest?hashes=0")[2])["hashes"] is None
    for query in ("first=3&last=1", "first=-1", "last=9999", "first=x"):
        assert get(source, f"/v1/v/hashes?{query}")[0] == 400


@pytest.mark.parametrize(
    "path", [FILE, "/v1/v/manifest", "/v1/v/data", "/v1/v/hashes", "/", "/v1/v/what", "/v1/w/data"]
)
def test_every_path_asks_for_the_token_first(source: HTTPTransport, path: str) -> None:
    for token in ("", "secre", "secret2", "sécret"):
        status, headers, body = get(source, path, token=token)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert b"token" in body
    assert get(source, path, Authorization="Basic secret")[0] == 401


def test_another_version_is_412_and_none_is_404(source: HTTPTransport) -> None:
    status, _, body = get(source, "/v1/w/manifest")
    assert (status, json.loads(body)["latest"]) == (412, "v")
    source.withdraw()
    assert get(source, "/v1/v/manifest")[0] == 404
    assert get(source, "/nowhere")[0] == 404


def test_only_reading_is_allowed(source: HTTPTransport) -> None:
    assert get(source, FILE, "POST")[0] == 405
    assert get(source, FILE, "DELETE")[0] == 405
    assert get(source, FILE, Content_Length="5")[0] == 400
    assert get(source, FILE, Transfer_Encoding="chunked")[0] == 400


def raw(transport: HTTPTransport, data: bytes, timeout: float = 10.0) -> bytes:
    url = urlsplit(transport.address)
    with socket.create_connection((url.hostname, url.port), timeout) as sock:
        sock.sendall(data)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
        return answer


@pytest.mark.parametrize(
    "head",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"\r\n\r\n",
        b"GET / HTTP/1.1\r\na: 1\r\na: 2\r\n\r\n",
        b"GET http://x/ HTTP/1.1\r\n\r\n",
        b"GET //[ HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET /?" + b"&".join(b"a=%d" % i for i in range(50)) + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_malformed_heads_are_refused(source: HTTPTransport, head: bytes) -> None:
    assert raw(source, head).startswith(b"HTTP/1.1 400 ")


def test_an_endless_head_is_cut_short(source: HTTPTransport) -> None:
    answer = raw(source, b"GET / HTTP/1.1\r\nx: " + b"a" * 17_000)
    assert answer.startswith(b"HTTP/1.1 431 ")


def test_a_client_that_sends_its_head_byte_by_byte_is_dropped(make_transport: Make) -> None:
    """A slow-loris keeps each wait short; it is the whole head that has a time limit."""
    source = make_transport(limits=Limits(head_s=0.3))
    url = urlsplit(source.address)
    begun = time.monotonic()
    with socket.create_connection((url.hostname, url.port), 10) as sock:
        sock.settimeout(0.05)
        closed = False
        while not closed:
            assert time.monotonic() - begun < 5
            try:
                sock.send(b"x")
                closed = sock.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                closed = True
    assert time.monotonic() - begun < 2


def test_strangers_cannot_take_all_places(make_transport: Make) -> None:
    source = make_transport(limits=Limits(connections=4, head_s=30))
    source.publish("v", STATE)
    url = urlsplit(source.address)
    strangers = [socket.create_connection((url.hostname, url.port), 10) for _ in range(12)]
    try:
        result: Any = make_transport().fetch([source.address], "v", {}, deadline_s=10)
        assert torch.equal(result["w"], STATE["w"])
        assert len([c for c in source._server._connections if not c.evicted]) <= 4
    finally:
        for sock in strangers:
            sock.close()


def test_requests_on_one_connection_do_not_wait_for_each_other(source: HTTPTransport) -> None:
    """A lost TCP_NODELAY shows as 40 ms per request."""
    url = urlsplit(source.address)
    connection = HTTPConnection(url.hostname or "", url.port, timeout=10)
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        connection.request("GET", FILE, headers={"Authorization": "Bearer secret", "Range": "bytes=0-4999"})
        connection.getresponse().read()
        times.append(time.perf_counter() - begun)
    connection.close()
    assert sorted(times)[5] < 0.01


def test_close_returns_although_clients_are_connected(make_transport: Make) -> None:
    source = make_transport()
    url = urlsplit(source.address)
    with socket.create_connection((url.hostname, url.port), 10) as sock:
        begun = time.monotonic()
        source.close()
        assert time.monotonic() - begun < 2
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((url.hostname, url.port), 10)


def test_it_listens_only_where_it_was_told_to(make_transport: Make) -> None:
    source = make_transport(bind="127.0.0.2")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", urlsplit(source.address).port), 10)
