"""Machines in namespaces: they reach each other until their network is parted, and again when it is whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from ftkit.chaos.netns import Machines, missing
from ftkit.chaos.network import Parts

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
while True:
    with server.accept()[0] as one:
        one.sendall(b"hello")
"""
ASK = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])) as s:
        print(s.recv(10).decode())
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def machines() -> Iterator[Machines]:
    why_not = missing()
    if why_not:
        pytest.skip(why_not)
    with Machines((Parts.HOME, "a", "b", "c"), networks=Parts.NETWORKS) as made:
        yield made


def ask(machines: Machines, host: str, address: str, timeout_s: float) -> str:
    command = machines.command(host, sys.executable, "-c", ASK, address, str(timeout_s))
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_a_parted_network_loses_packets_in_silence(machines: Machines) -> None:
    servers = []
    try:
        for network in ("data", "etcd"):
            command = machines.command("a", sys.executable, "-c", ECHO, machines.address("a", network))
            servers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            out = servers[-1].stdout
            assert out is not None
            assert out.readline() == b"ready\n"
        data, etcd = machines.address("a", "data"), machines.address("a", "etcd")
        assert [ask(machines, h, data, 20) for h in ("b", "c")] == ["hello", "hello"]
        machines.part(("a", "c"), ("b",), network="data")
        assert ask(machines, "b", data, 0.3) == "TimeoutError", "no refusal, no reset"
        assert ask(machines, "c", data, 20) == "hello"
        assert ask(machines, "b", etcd, 20) == "hello", "the other network is whole"
        machines.join("data")
        assert ask(machines, "b", data, 20) == "hello"
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def test_partitions_may_overlap_and_end_in_any_order(machines: Machines) -> None:
    command = machines.command("a", sys.executable, "-c", ECHO, machines.address("a", "data"))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"

            def reaches() -> list[bool]:
                return [ask(machines, h, machines.address("a", "data"), 0.3) == "hello" for h in ("b", "c")]

            parts = Parts(machines, ("a", "b", "c"))
            assert reaches() == [True, True]
            alone = parts.strike("part-data", "b")
            halves = parts.strike("part-halves", "")
            assert reaches() == [False, False], "c is in the other half"
            alone()
            assert reaches() == [True, False]
            halves()
            assert reaches() == [True, True]
        finally:
            server.kill()
