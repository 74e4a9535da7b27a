"""The dashboard over real HTTP: what it sends, to whom, and what it does with the slow and the many."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import socket
import time
from collections.abc import Iterator

import pytest

from ftkit.core.model import Abort, Policy
from ftkit.dashboard import server as module
from ftkit.dashboard.feed import Feed
from ftkit.dashboard.page import load_page
from ftkit.dashboard.server import Server
from ftkit.errors import ConfigError
from ftkit.keeper.etcd import Etcd
from tests.dashboard.conftest import Put, eventually


@pytest.fixture
def server(training: None, etcd: Etcd, job: str) -> Iterator[Server]:
    with Feed(etcd, job, Policy()) as feed, Server("127.0.0.1", 0, feed, ("board.example.org",)) as running:
        yield running


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def raw(server: Server, request: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=20)
    connection.sendall(request)
    return connection


EVENTS = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"


def snapshots(stream: socket.socket) -> Iterator[dict]:
    with stream.makefile("rb") as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))["board"]


def test_the_page_is_whole_and_loads_nothing(server: Server) -> None:
    status, headers, body = ask(server, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    text = body.decode()
    assert "/* page." not in text, "a part was not filled in"
    assert not re.findall(r"""(?:src|href)=["'](?!data:,)""", text)
    links = set(re.findall(r"https?://[^\"'`\s]+", text))
    assert links == {"http://www.w3.org/2000/svg"}, "the name of the SVG elements, not an address"


def test_only_the_pages_own_script_may_run(server: Server) -> None:
    """A name that turned into markup would still do nothing."""
    _, headers, body = ask(server, "/")
    policy = headers["Content-Security-Policy"]
    [script] = re.findall(r"<script>(.*?)</script>", body.decode(), flags=re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_script_writes_text_and_never_markup() -> None:
    text = load_page().document.decode()
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "DOMParser",
        "srcdoc",
    ):
        assert way not in text


def test_the_state_can_be_read_by_programs(server: Server) -> None:
    status, headers, body = ask(server, "/state.json")
    assert (status, headers["Content-Type"], headers["Cache-Control"]) == (
        200,
        "application/json",
        "no-store",
    )
    board = json.loads(body)["board"]
    assert (board["state"], [r["replica_id"] for r in board["rows"]]) == ("training", ["t0", "t1"])
    assert b"s3cret" not in body


def test_the_stream_brings_what_changes(server: Server, put: Put) -> None:
    with raw(server, EVENTS) as stream:
        boards = snapshots(stream)
        assert next(boards)["state"] == "training"
        put("abort", Abort(epoch=3, by="t0", why="<b>\r\n\r\ndata: {}"))
        told = next(b for b in boards if b["state"] != "training")
        assert "<b>\\x0d\\x0a\\x0d\\x0adata: {}" in told["reason"]


def test_a_foreign_name_or_site_gets_nothing(server: Server) -> None:
    for path in ("/", "/state.json", "/events", "/other"):
        assert ask(server, path, Host="evil.example.net")[0] == 403
    assert ask(server, "/state.json", Host="board.example.org:80")[0] == 200
    assert ask(server, "/state.json", Sec_Fetch_Site="cross-site")[0] == 403
    assert "Access-Control-Allow-Origin" not in ask(server, "/state.json", Origin="http://localhost:1")[1]


def test_it_only_shows(server: Server) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, "/", method)[0] == 405
    assert ask(server, "/../../etc/passwd")[0] == 404
    status, headers, body = ask(server, "/", "HEAD")
    assert (status, int(headers["Content-Length"]) > 1000, body) == (200, True, b"")
    assert ask(server, "/events", "HEAD")[0] == 200


@pytest.mark.parametrize(
    "request_", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_nonsense_is_an_error_and_no_harm(server: Server, request_: bytes) -> None:
    with raw(server, request_) as connection:
        answer = connection.makefile("rb").read()
    assert b"<" not in answer.partition(b"\r\n\r\n")[2], "what was sent must not come back as markup"
    assert ask(server, "/state.json")[0] == 200


def test_there_is_a_limit_and_room_again_after_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.1)
    streams = [raw(server, EVENTS) for _ in range(module.MAX_STREAMS)]
    for stream in streams:
        assert stream.recv(12) == b"HTTP/1.1 200"
    assert ask(server, "/events")[0] == 503
    assert ask(server, "/")[0] == 200, "the page still loads"
    idle = [raw(server, b"") for _ in range(module.MAX_CONNECTIONS - module.MAX_STREAMS)]
    eventually(lambda: ask(server, "/")[0] == 503, "all connections are taken")
    for connection in [*streams, *idle]:
        connection.close()
    eventually(lambda: ask(server, "/")[0] == 200, "there is room again")
    eventually(lambda: ask(server, "/events", "HEAD")[0] == 200, "there is room for streams again")


def test_who_never_finishes_asking_is_cut_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte now and then would otherwise keep a connection for ever."""
    monkeypatch.setattr(module, "REQUEST_S", 0.5)
    with raw(server, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ") as connection:
        connection.settimeout(0.05)
        deadline = time.monotonic() + 15

        def ended() -> bool:
            try:
                connection.sendall(b"x")
                return connection.recv(100) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        while not ended():
            assert time.monotonic() < deadline, "it was left connected"


def test_a_port_that_is_taken_is_an_error_that_helps(server: Server) -> None:
    with pytest.raises(ConfigError, match="--listen"):
        Server("127.0.0.1", server.server_port, server.feed)
