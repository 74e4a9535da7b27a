"""Ports at which the ranks of a group meet."""

from __future__ import annotations

import random
import socket

from ftkit.keeper.ports import ephemeral_range, free_port, is_free


def test_a_port_in_use_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not is_free(server.getsockname()[1])


def test_ports_keep_clear_of_outgoing_connections_and_of_each_other() -> None:
    """The kernel could give a port of its own range to any connection before rank 0 listens on it."""
    low, high = ephemeral_range()
    taken: set[int] = set()
    for _ in range(50):
        port = free_port(taken, random.Random(7))
        assert port not in taken
        assert not low <= port <= high or (low <= 10_000 and high >= 65_000)
        taken.add(port)
