"""Find a free port, for the ranks of a group to meet at or for a server.

It cannot reserve the port: another process may take it before the group's first rank does. To make that
unlikely it looks outside the range from which the kernel serves outgoing connections.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Container
from pathlib import Path

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def ephemeral_range() -> tuple[int, int]:
    """Return the first and last port that the kernel hands out by itself."""
    try:
        low, high = _RANGE_FILE.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Say whether one could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
        return True


def free_port(taken: Container[int] = (), rng: random.Random | None = None) -> int:
    """Return a port that is free now and not in `taken`."""
    rng = rng or random.Random()
    low, high = ephemeral_range()
    for _ in range(200):
        port = rng.randint(10_000, 65_000)
        if not low <= port <= high and port not in taken and is_free(port):
            return port
    while True:  # the kernel's range covers all: let it choose
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.bind(("127.0.0.1", 0))
            port = int(sock.getsockname()[1])
        if port not in taken:
            return port
