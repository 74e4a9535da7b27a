"""What happens on the way between one replica group and etcd: a proxy per server, one weather for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ftkit.chaos.proxy import CLEAR, Proxy, Weather


class Network:
    """The proxies of one replica group."""

    def __init__(self, urls: Sequence[str], *, seed: int = 0) -> None:
        """Listen at once; the seed decides which bits are flipped."""
        self._proxies = [Proxy(url, seed=seed) for url in urls]

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
