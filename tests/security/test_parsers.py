"""Whatever is sent to a parser, it answers or refuses; `scripts/fuzz.py` tries harder and longer."""

from __future__ import annotations

import json
import logging
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.security.targets import TARGETS

LENGTH = struct.Struct("!I")

things: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["hello", "want", "goodbye", "join", "set", "get", "missing", "done", "a", "a1", "b"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = (
    *("type", "rank", "pid", "host", "transport", "version", "running", "id", "seats", "epoch", "port"),
    *("incarnation", "replica_id", "mac", "nonce", "blocks", "tensors", "size", "chunk", "what", "why"),
)
records = st.dictionaries(st.sampled_from(FIELDS), things, max_size=8)
json_texts = (things | records).map(lambda x: json.dumps(x).encode())
packed = st.lists(things, max_size=6).map(lambda x: msgspec.msgpack.encode(x))
framed = st.lists(st.binary(max_size=64) | json_texts | packed, max_size=4).map(
    lambda bodies: b"".join(LENGTH.pack(len(b)) + b for b in bodies)
)
heads = st.builds(
    lambda method, path, headers: b"\r\n".join([b" ".join([method, path, b"HTTP/1.1"]), *headers]),
    st.sampled_from([b"GET", b"HEAD", b"POST", b""]),
    st.binary(max_size=20).map(lambda p: b"/" + p) | st.sampled_from([b"//[", b"/?a=1&b", b"/v1/v/manifest"]),
    st.lists(st.binary(max_size=30) | st.sampled_from([b"Range: bytes=-1", b"Host: [::1"]), max_size=3),
)
noise = (
    st.binary(max_size=200)
    | json_texts
    | packed
    | framed
    | heads
    | st.sampled_from(
        [
            b"[" * 900,
            b'{"a":' * 500,
            LENGTH.pack(900) + b"\x91" * 900,
            b"\xff" * 16,
            b'{"nonce":"\\ud800","mac":""}',
        ]
    )
)


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_that_is_sent_breaks_a_parser(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    @given(noise)
    @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def attack(data: bytes) -> None:
        TARGETS[name](data)

    attack()
