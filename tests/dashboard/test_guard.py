"""Whom the dashboard answers."""

from __future__ import annotations

import pytest

from ftkit.dashboard.guard import DEFAULT_PORT, Guard, host_of, is_loopback, parse_listen
from ftkit.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("8000", ("127.0.0.1", 8000)),
        ("10.0.0.7", ("10.0.0.7", DEFAULT_PORT)),
        ("node-1:8000", ("node-1", 8000)),
        ("node-1", ("node-1", DEFAULT_PORT)),
        ("[::1]:8000", ("::1", 8000)),
        ("::1", ("::1", DEFAULT_PORT)),
    ],
)
def test_an_address_to_listen_on(text: str, meant: tuple[str, int]) -> None:
    assert parse_listen(text) == meant


@pytest.mark.parametrize(
    "text", [":8000", "host:port", "host:", "127.0.0.1:65536", "127.0.0.1:-1", "[::1]:x"]
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="--listen"):
        parse_listen(text)


def test_all_addresses_must_be_asked_for_by_name() -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:8000"):
        parse_listen(":8000")


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("localhost", "localhost"),
        ("LOCALHOST.:8275", "localhost"),
        ("[::1]:8275", "::1"),
        ("10.0.0.7:80", "10.0.0.7"),
        ("", None),
        ("a:b", None),
        ("[x]", None),
        ("x]:80", None),
        ("[::1]80", None),
    ],
)
def test_the_host_of_a_header(header: str, host: str | None) -> None:
    assert host_of(header) == host


def test_a_foreign_name_is_refused() -> None:
    """It is how a web site reads a local server: DNS rebinding."""
    guard = Guard(["Node-1.example.org"])
    ask = lambda *hosts: guard.refusal(list(hosts), "", is_page=True)  # noqa: E731
    assert all(ask(h) is None for h in ("localhost:1", "127.0.0.1:9", "[::1]:1", "node-1.EXAMPLE.org"))
    assert ask("evil.example.net:8275")
    assert ask("localhost.evil.example.net")
    assert ask("127.0.0.1.evil.example.net")
    assert ask()
    assert ask("localhost", "evil.example.net")


def test_another_site_may_link_to_the_page_but_not_read_the_data() -> None:
    guard = Guard([])
    assert guard.refusal(["localhost"], "cross-site", is_page=True) is None
    assert guard.refusal(["localhost"], "cross-site", is_page=False)
    assert guard.refusal(["localhost"], "same-origin", is_page=False) is None
    assert guard.refusal(["localhost"], "none", is_page=False) is None


def test_what_only_this_machine_reaches() -> None:
    assert [is_loopback(h) for h in ("localhost", "127.0.0.9", "::1", "0.0.0.0", "node-1")] == [
        True,
        True,
        True,
        False,
        False,
    ]
