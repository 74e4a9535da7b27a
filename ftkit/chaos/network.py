"""What happens on the way between one replica group and etcd, and between the groups' machines.

On the way to etcd there is a proxy per server, one weather for all; machines are network namespaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ftkit.chaos.netns import Machines
from ftkit.chaos.proxy import CLEAR, Proxy, Weather


class Network:
    """The proxies of one replica group."""

    def __init__(self, urls: Sequence[str], *, seed: int = 0, host: str = "127.0.0.1") -> None:
        """Listen on `host` at once; the seed decides which bits are flipped."""
        self._proxies = [Proxy(url, seed=seed, host=host) for url in urls]

    @property
    def urls(self) -> tuple[str, ...]:
        """Where the group should look for etcd."""
        return tuple(proxy.url for proxy in self._proxies)

    def strike(self, kind: str, chance: float, lease_ttl: float) -> Callable[[], None] | None:
        """Do harm of a kind; return what takes it back, None when it is over at once."""
        if kind == "net-reset":
            for proxy in self._proxies:
                proxy.reset()
            return None
        weather = {
            "net-delay": Weather(delay_s=lease_ttl / 4),
            "net-throttle": Weather(bytes_per_s=2000.0),
            "net-silent": Weather(silent=True),
            "net-truncate": Weather(truncate_after=int(chance * 100)),
            "net-flip": Weather(flip_after=int(chance * 100)),
        }[kind]
        self._set(weather)
        return lambda: self._set(CLEAR)

    def _set(self, weather: Weather) -> None:
        for proxy in self._proxies:
            proxy.set(weather)

    def close(self) -> None:
        """End all proxies."""
        for proxy in self._proxies:
            proxy.close()


class Parts:
    """The partitions that hold between the machines of a job, several at once if need be."""

    NETWORKS = ("data", "etcd")
    HOME = "home"
    """The machine of etcd and of its proxies."""

    def __init__(self, machines: Machines, names: Sequence[str]) -> None:
        """`names` are the groups, each on a machine of that name."""
        self._machines, self._names = machines, tuple(names)
        self._holding: list[tuple[tuple[str, ...], frozenset[str]]] = []

    def strike(self, kind: str, name: str) -> Callable[[], None]:
        """Part the networks as the kind says; return what takes it back."""
        away = frozenset(self._names[(len(self._names) + 1) // 2 :] if kind == "part-halves" else [name])
        part = (self.NETWORKS[:1] if kind == "part-data" else self.NETWORKS, away)
        self._holding.append(part)
        self._apply()

        def take_back() -> None:
            self._holding.remove(part)
            self._apply()

        return take_back

    def _apply(self) -> None:
        """Machines are on one side of a network when all partitions leave them there."""
        for network in self.NETWORKS:
            holding = [away for networks, away in self._holding if network in networks]
            sides: dict[tuple[bool, ...], list[str]] = {}
            for host in (self.HOME, *self._names):
                sides.setdefault(tuple(host in away for away in holding), []).append(host)
            self._machines.part(*sides.values(), network=network)
