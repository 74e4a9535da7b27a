"""Machines of a job as network namespaces on this one, and networks between them that can be parted.

A parted network loses packets in silence, as a broken switch does: nobody is told, connections stay open.
It needs root's rights and iproute2; `missing` says what is not there. Everything lives in namespaces of its
own, this machine's interfaces and routes are not touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from types import TracebackType

from ftkit.errors import ConfigError

_CLONE_NEWNET = 0x40000000


def missing() -> str:
    """Say why there can be no namespaces here; empty when there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root's rights"
    name = f"ftkit-{uuid.uuid4().hex[:8]}"
    try:
        _ip("netns", "add", name)
        try:
            _ip("-n", name, "link", "add", "b0", "type", "bridge")
        finally:
            _ip("netns", "del", name)
    except ConfigError as error:
        return str(error)
    return ""


class Machines:
    """Namespaces that stand for machines; a context manager.

    Args:
        hosts: their names.
        networks: each machine has one interface in each of them; at most 250.
    """

    def __init__(self, hosts: Sequence[str], networks: Sequence[str] = ("net",)) -> None:
        self._hosts, self._networks = tuple(hosts), tuple(networks)
        self._run = uuid.uuid4().hex[:8]
        self._switches = f"ftkit-{self._run}-switches"
        self._sides: dict[str, int] = dict.fromkeys(networks, 0)
        """How many bridges each network has."""

    def __enter__(self) -> Machines:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build(self) -> None:
        _ip("netns", "add", self._switches)
        for host in self._hosts:
            _ip("netns", "add", self._namespace(host))
            _ip("-n", self._namespace(host), "link", "set", "lo", "up")
        for network in self._networks:
            for host in self._hosts:
                port, inside = self._port(host, network), f"e{self._networks.index(network)}"
                namespace = self._namespace(host)
                link = ("link", "add", port, "netns", self._switches, "type", "veth")
                _ip(*link, "peer", "name", inside, "netns", namespace)
                _ip("-n", namespace, "addr", "add", f"{self.address(host, network)}/24", "dev", inside)
                _ip("-n", namespace, "link", "set", inside, "up")
                _ip("-n", self._switches, "link", "set", port, "up")
            self.join(network)

    def close(self) -> None:
        """Delete all namespaces and their interfaces; processes in them are the caller's to end."""
        for name in (self._switches, *map(self._namespace, self._hosts)):
            with contextlib.suppress(ConfigError):
                _ip("netns", "del", name)

    def _namespace(self, host: str) -> str:
        return f"ftkit-{self._run}-{self._hosts.index(host)}"

    def _port(self, host: str, network: str) -> str:
        return f"v{self._networks.index(network)}h{self._hosts.index(host)}"

    def address(self, host: str, network: str | None = None) -> str:
        """Return a machine's address in a network (default: the first)."""
        number = 0 if network is None else self._networks.index(network)
        return f"10.{64 + number}.0.{self._hosts.index(host) + 1}"

    def command(self, host: str, *words: str) -> list[str]:
        """Return the command line that runs a program on a machine; its pid is the program's."""
        return ["ip", "netns", "exec", self._namespace(host), *words]

    def enter(self, host: str) -> None:
        """Move this thread, and all that it starts from now on, to a machine; there is no way back."""
        with open(f"/run/netns/{self._namespace(host)}", "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise ConfigError(f"cannot enter the namespace of {host}: {os.strerror(ctypes.get_errno())}")

    def part(self, *sides: Sequence[str], network: str | None = None) -> None:
        """Part a network into sides that cannot reach each other; who is not named is on the first."""
        network = self._networks[0] if network is None else network
        for number, side in enumerate(sides[1:], 1):
            for host in side:
                self._plug(host, network, number)
        elsewhere = {host for side in sides[1:] for host in side}
        for host in self._hosts:
            if host not in elsewhere:
                self._plug(host, network, 0)

    def join(self, network: str | None = None) -> None:
        """Make a network whole again."""
        self.part((), network=network)

    def _plug(self, host: str, network: str, side: int) -> None:
        """Plug a machine into the switch of a side."""
        number = self._networks.index(network)
        while self._sides[network] <= side:
            bridge = f"n{number}s{self._sides[network]}"
            _ip("-n", self._switches, "link", "add", bridge, "type", "bridge")
            _ip("-n", self._switches, "link", "set", bridge, "up")
            self._sides[network] += 1
        _ip("-n", self._switches, "link", "set", self._port(host, network), "master", f"n{number}s{side}")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise ConfigError(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}")
