"""On one machine memory is handed over, to whom it may be, and everybody else gets bytes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from transport import HTTPTransport, Progress, TokenRefused, near, wire
from transport.link import Link

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract Unix sockets")

Make = Callable[..., HTTPTransport]
MB = 1 << 20
ROOT = Path(__file__).parent.parent.parent


def make_state(megabytes: int = 9) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(megabytes)
    state = {
        f"p{i}": torch.randint(0, 256, ((megabytes << 18) + i,), dtype=torch.uint8, generator=generator)
        for i in range(4)
    }
    return state | {"empty": torch.empty(0)}


def zeros(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


@pytest.fixture
def make_near(make_transport: Make) -> Make:
    def make(**settings: Any) -> HTTPTransport:
        return make_transport(**{"same_host": True, "chunk_bytes": MB, **settings})

    return make


@pytest.fixture
def no_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Link) -> None:
        raise AssertionError("connected by TCP")

    monkeypatch.setattr(Link, "open", refuse)


def sent_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note how many bytes of states go through a socket."""
    sent: list[int] = []
    for name in ("send_for", "send_file"):
        before = getattr(wire, name)

        def count(*args: Any, before: Callable[..., int] = before) -> int:
            sent.append(before(*args))
            return sent[-1]

        monkeypatch.setattr(wire, name, count)
    return sent


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.usefixtures("no_tcp")
@pytest.mark.parametrize("snapshot", [False, True])
def test_memory_is_read_where_it_is(
    make_near: Make, assert_same: Any, monkeypatch: pytest.MonkeyPatch, snapshot: bool
) -> None:
    sent = sent_bytes(monkeypatch)
    state = make_state()
    into = zeros(state)
    source, joiner = make_near(), make_near()
    source.publish("v", state, snapshot=snapshot)
    places = {name: tensor.data_ptr() for name, tensor in into.items()}
    joiner.fetch([source.address], "v", into, deadline_s=10)
    assert_same(into, state)
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == places
    assert not sum(sent)


@pytest.mark.usefixtures("no_tcp")
def test_of_another_process_too(make_near: Make) -> None:
    command = [sys.executable, "-m", "tests.transport.source_process", "5", "4"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        result: Any = make_near().fetch([address], "v", {}, deadline_s=10)
        process.communicate("")
    generator = torch.Generator().manual_seed(5)
    right = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=generator)
    assert torch.equal(result["p0"], right)


@pytest.mark.usefixtures("no_tcp")
def test_many_small_tensors_take_many_pieces(make_near: Make, assert_same: Any) -> None:
    state = {f"p{i}": torch.full((i % 37,), float(i)) for i in range(3000)}
    source = make_near()
    source.publish("v", state)
    assert_same(make_near().fetch([source.address], "v", zeros(state), deadline_s=10), state)


@pytest.mark.usefixtures("no_tcp")
def test_bytes_come_through_the_socket_where_memory_may_not_be_read(
    make_near: Make, assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under Yama, or in two containers that share nothing but the network."""

    def forbid(*args: object) -> int:
        raise PermissionError

    monkeypatch.setattr(near, "read_process", forbid)
    sent, state, source = sent_bytes(monkeypatch), make_state(), make_near()
    source.publish("v", state)
    assert_same(make_near().fetch([source.address], "v", zeros(state), deadline_s=10), state)
    assert sum(sent) == sum(tensor.nbytes for tensor in state.values())


def test_another_machine_and_another_token_go_by_tcp(make_near: Make, make_transport: Make) -> None:
    """Names of Unix sockets end at the machine; who has another token does not even find it."""
    state = make_state()
    far, source = make_transport(), make_near()
    for each in (far, source):
        each.publish("v", state)
    result: Any = make_near().fetch([far.address], "v", {}, deadline_s=10)
    assert torch.equal(result["p1"], state["p1"])
    with pytest.raises(TokenRefused):
        make_near(token="another").fetch([source.address], "v", {}, deadline_s=10)


def test_a_joiner_that_came_first_finds_its_neighbour_as_well(
    make_near: Make, assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens on the Unix socket before something is published."""
    sent, state, source, joiner = sent_bytes(monkeypatch), make_state(), make_near(), make_near()
    asked = threading.Event()
    wait = source._board.wait

    def announce(*args: Any) -> Any:
        asked.set()
        return wait(*args)

    monkeypatch.setattr(source._board, "wait", announce)
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(joiner.fetch([source.address], "v", {}, deadline_s=20))
    )
    thread.start()
    assert asked.wait(10)
    source.publish("v", state)
    thread.join()
    assert_same(results, [state])
    assert not sum(sent)


def connect(source: HTTPTransport) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect("\0" + near.name_of("secret", source.address))
    return sock


def ask(sock: socket.socket, token: str = "secret", ways: str = "fd,vm") -> bytes:
    head = f"GET /v1/v/data HTTP/1.1\r\nAuthorization: Bearer {token}\r\nX-Memory: {ways}\r\n\r\n"
    sock.sendall(head.encode())
    answer = sock.recv(4096)
    while b"\r\n\r\n" not in answer or (b"x-memory" in answer and not answer.endswith(b"}")):
        answer += sock.recv(4096)
    return answer


def test_the_token_is_asked_for_there_as_well(make_near: Make) -> None:
    source = make_near()
    source.publish("v", make_state(1))
    with connect(source) as sock:
        assert ask(sock, token="wrong").startswith(b"HTTP/1.1 401")


def test_over_tcp_nobody_is_told_where_memory_is(make_near: Make) -> None:
    source = make_near()
    source.publish("v", {"w": torch.ones(3)})
    host, _, port = source.address.rpartition("/")[2].partition(":")
    with socket.create_connection((host, int(port)), 10) as sock:
        assert b"x-memory" not in ask(sock)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_is_not_let_in(make_near: Make) -> None:
    """Names of abstract sockets can be read by everybody on the machine."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("needs a Python that everybody may run")
    source = make_near()
    source.publish("v", {"w": torch.ones(3)})
    name = near.name_of("secret", source.address)
    code = (
        "import socket\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        f"s.connect('\\0{name}')\n"
        "try:\n"
        "    s.sendall(b'GET /v1/v/data HTTP/1.1\\r\\nAuthorization: Bearer secret\\r\\n\\r\\n')\n"
        "    print(s.recv(100))\n"
        "except (ConnectionResetError, BrokenPipeError):\n"
        "    print(b'')\n"
    )
    command = [python, "-c", code]
    for user, heard in ((0, "HTTP/1.1 200"), (65534, "b''")):
        done = subprocess.run(command, user=user, cwd="/", capture_output=True, text=True, timeout=20)
        assert heard in done.stdout, done.stderr


def test_withdraw_takes_memory_back_from_who_holds_it_too_long(make_near: Make) -> None:
    source, state = make_near(drain_s=0.2), make_state(1)
    source.publish("v", state)
    with connect(source) as sock:
        place = json.loads(ask(sock).partition(b"\r\n\r\n")[2])
        assert sum(nbytes for _, nbytes in place["pieces"]) == sum(t.nbytes for t in state.values())
        begun = time.monotonic()
        source.withdraw()
        assert 0.15 < time.monotonic() - begun < 5
        assert sock.recv(1) == b""


def test_memory_that_was_taken_back_in_the_middle_is_not_believed(
    make_near: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, state = make_near(), make_state()
    source.publish("v", state)
    read, lost = near.read_process, []

    def slow(*args: Any) -> int:
        n = read(*args)
        if n > 16 and not lost:
            lost.append(n)
            for connection in list(source._server._connections):
                connection.cut()
        return n

    monkeypatch.setattr(near, "read_process", slow)
    result: Any = make_near(streams=1).fetch([source.address], "v", {}, deadline_s=20)
    assert lost
    assert torch.equal(result["p3"], state["p3"])


def test_a_neighbour_gets_the_rest_although_training_goes_on(make_near: Make, assert_same: Any) -> None:
    state = make_state(64)
    right, into = {name: tensor.clone() for name, tensor in state.items()}, zeros(state)
    source, joiner = make_near(), make_near(streams=1)
    source.publish("v", state)
    withdrawn = False

    def progress(report: Progress) -> None:
        nonlocal withdrawn
        if not withdrawn:
            withdrawn = True
            source.withdraw()
            for tensor in state.values():
                tensor.zero_()

    joiner.fetch([source.address], "v", into, deadline_s=60, progress=progress)
    assert withdrawn
    assert_same(into, right)


@pytest.fixture
def flat_fds(make_near: Make) -> Iterator[None]:
    before = num_fds()
    yield
    deadline = time.monotonic() + 5
    while num_fds() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_fds() <= before


@pytest.mark.usefixtures("flat_fds")
def test_no_descriptor_is_left_open() -> None:
    state = make_state()
    for _ in range(5):
        with HTTPTransport(token="secret") as source, HTTPTransport(token="secret") as joiner:
            source.publish("v", state, snapshot=True)
            joiner.fetch([source.address], "v", {}, deadline_s=10)
