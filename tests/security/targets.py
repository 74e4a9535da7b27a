"""The parsers of what others send, each as a function of bytes that must not raise.

What a parser answers to nonsense with (an error that its caller expects) is caught here; anything else that
comes out would end a thread of a keeper or of a trainer. Run by hypothesis in the tests, for a short time
and with well-formed beginnings, and by atheris in `scripts/fuzz.py`, for as long as one likes.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ftkit.core import events as ev
from ftkit.core.machine import Member
from ftkit.core.model import FRESH, Policy, Record
from ftkit.dashboard import guard
from ftkit.dashboard.job import parse as parse_job
from ftkit.errors import ConfigError
from ftkit.groups.store import BAD_MESSAGE, RendezvousStore, _Caller, _Room
from ftkit.keeper.etcd import KV
from ftkit.keeper.keys import JobKeys, decode, decode_config
from ftkit.keeper.post import Answer
from ftkit.keeper.ranks import _FROM_RANK
from ftkit.keeper.wire import Connection, WireError, _greet_as_server
from transport.errors import TransportError
from transport.manifest import parse as parse_manifest
from transport.routes import parse_range, parse_request
from transport.wire import BadHead

Target = Callable[[bytes], None]
SOON_S = 5.0


@contextlib.contextmanager
def sent(data: bytes) -> Any:
    """Yield the receiving end of a TCP connection that brings these bytes, and then its end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    with sender, receiver:
        sender.sendall(data)
        sender.shutdown(socket.SHUT_WR)
        yield receiver


def greeting(data: bytes) -> None:
    """Greet a stranger at the keeper's port."""
    with sent(data) as sock, contextlib.suppress(WireError):
        _greet_as_server(Connection(sock), "token", time.monotonic() + SOON_S)
        raise AssertionError("a stranger proved that it knows the token")


def rank_messages(data: bytes) -> None:
    """Read what a rank says to its keeper."""
    with sent(data) as sock, contextlib.suppress(WireError):
        connection = Connection(sock)
        while True:
            connection.recv(_FROM_RANK, deadline=time.monotonic() + SOON_S)


@functools.lru_cache(maxsize=1)
def _store() -> RendezvousStore:
    return RendezvousStore()


def _store_reads(data: bytes, room: _Room | None) -> None:
    """Let the store read this from a caller whose socket stays silent, so that its own thread does not."""
    store = _store()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        caller = _Caller(ours, b"nonce", time.monotonic() + SOON_S, inbox=bytearray(data), room=room)
        if room is not None:
            caller.rank = 0
            room.members[0] = caller
        store._callers.add(caller)
        store._selector.register(ours, selectors.EVENT_READ, caller)
        with contextlib.suppress(*BAD_MESSAGE):
            store._read(caller)
        store._hang_up(caller)


def store_stranger(data: bytes) -> None:
    """Read what a stranger says to the rendezvous store."""
    _store_reads(data, None)
    assert not _store()._rooms, "a stranger got in"


def store_member(data: bytes) -> None:
    """Read what a member says to the rendezvous store."""
    _store_reads(data, _Room("room", 2))


def request_head(data: bytes) -> None:
    """Read the head of a request to the transport's server."""
    try:
        request = parse_request(data)
    except BadHead:
        return
    parse_range(request.headers.get("range", ""), 1000)


def manifest(data: bytes) -> None:
    """Read a manifest that a peer has sent."""
    with contextlib.suppress(TransportError):
        parse_manifest(data)


def dashboard_host(data: bytes) -> None:
    """Read the Host header of a request to the dashboard."""
    text = data.decode("latin-1")
    guard.Guard(("board",)).refusal([text], "", is_page=False)
    with contextlib.suppress(ConfigError):
        guard.parse_listen(text)


def etcd_value(data: bytes) -> None:
    """Read what somebody has written under the job's prefix, and have the machine react to it."""
    keys = JobKeys("job")
    machine = Member("a", "a1", Policy())
    machine.handle(ev.Ready(record=Record(replica_id="a", incarnation="a1")), 0.0)
    sections: tuple[ev.Section, ...] = ("members", "tickets", "departed", "control", "abort", "epoch")
    for section in sections:
        machine.handle(ev.Listed(section, {}), 0.0)
    machine.handle(ev.Want(version=FRESH), 1.0)
    decode_config(keys.config, data)
    for now, section in enumerate(sections):
        name = {"control": "drain/a", "abort": "", "epoch": ""}.get(section, "b")
        value = decode(section, keys.prefix, data)
        if value is not None:
            machine.handle_all([ev.Changed(section, name, value, now)], float(now))
            machine.handle(ev.Tick(), now + 100.0)
    places = ("config", "epoch", "abort", *(f"{s}/b" for s in ("members", "tickets", "departed", "stats")))
    parse_job("job", [KV(keys.prefix + place, data, 1, 1, 0) for place in places])


def keeper_answer(data: bytes) -> None:
    """Read the line with which a keeper answers its trainer."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        msgspec.json.decode(data, type=Answer)


TARGETS: dict[str, Target] = {
    fn.__name__: fn
    for fn in (
        greeting,
        rank_messages,
        store_stranger,
        store_member,
        request_head,
        manifest,
        dashboard_host,
        etcd_value,
        keeper_answer,
    )
}
