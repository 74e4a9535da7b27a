"""Find every port on which a process listens, and treat it as a stranger would."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

LISTEN = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """Return the addresses on which a process accepts TCP connections."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
            inodes |= {found[1]} if found else set()
    addresses = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN and words[9] in inodes:
                host, _, port = words[1].partition(":")
                raw = b"".join(struct.pack("=I", int(host[i : i + 8], 16)) for i in range(0, len(host), 8))
                addresses.add((socket.inet_ntop(family, raw), int(port, 16)))
    return addresses


def noises(seed: int) -> Iterable[bytes]:
    """Yield what port scanners, mistaken clients and attackers send."""
    rng = random.Random(seed)
    yield b""
    yield b"\r\n\r\n"
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"GET //[ HTTP/1.1\r\n\r\n"
    yield b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200)
    yield struct.pack("!I", 2**32 - 1) + rng.randbytes(100)
    yield struct.pack("!I", 900) + b"\x91" * 900
    yield struct.pack("!I", 900) + b"[" * 900
    yield struct.pack("<Q", 2**63) + rng.randbytes(64)
    yield rng.randbytes(1 << 20)
    for _ in range(10):
        yield rng.randbytes(rng.randrange(1, 300))


def harass(address: tuple[str, int], seed: int) -> list[socket.socket]:
    """Send all kinds of noise to a port; return connections that are left open, silent or in mid-word."""
    left = []
    for number, noise in enumerate(noises(seed)):
        with contextlib.suppress(OSError):  # it hangs up, as it should, or is closed by now
            sock = socket.create_connection(address, timeout=2.0)
            left.append(sock)
            sock.settimeout(0.05)
            sock.sendall(noise)
            if number % 3:
                sock.recv(1 << 16)
                left.remove(sock)
                sock.close()
    return left
