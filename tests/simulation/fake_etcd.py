"""An etcd of the imagination: revisions, transactions, leases, and watches that lag.

The watches of a keeper lag independently, so what one shows may be older than what another shows; inside
one the order is kept. A request may be lost, its answer may be lost, it may be
applied twice, or late. Nothing here knows what the values mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from simulation.world import World

from ftkit.core import events as ev

FOR_ALL = (("members",), ("epoch",), ("abort", "control"), ("departed",))
"""What every keeper watches: with one watch in truth, but here each part may be late on its own."""

FOR_PROPOSERS = (("tickets",),)
"""What only proposers watch, too."""


class Client(Protocol):
    """What etcd needs to know of a keeper."""

    def linked(self) -> bool:
        """Whether packets go both ways between the keeper and a serving etcd."""

    def link_changed(self) -> None:
        """The connection came or went."""

    def lease_lost(self) -> None:
        """The lease is gone, as the keeper has just found out."""


@dataclass(eq=False)
class Lease:
    """Keys that vanish together when nobody keeps them alive."""

    owner: Client
    alive: bool = True
    keys: set[str] = field(default_factory=set)
    round: int = 0
    """Grows with each keep-alive that matters; an expiry scheduled in an older round is void."""


@dataclass(eq=False)
class Item:
    """A key's value."""

    value: object
    revision: int
    lease: Lease | None


@dataclass
class Weather:
    """How badly requests fare; changed by faults for a while."""

    lost: float = 0.0
    unanswered: float = 0.0
    doubled: float = 0.0
    late: float = 0.0


def split(key: str) -> tuple[str, str]:
    """Return a key's section and name."""
    section, _, name = key.partition("/")
    return section, name


class FakeEtcd:
    """The server."""

    def __init__(self, world: World, ttl: float) -> None:
        """Begin empty and serving."""
        self.world, self.ttl = world, ttl
        self.revision = 0
        self.cluster = 1
        self.kv: dict[str, Item] = {}
        self.leases: list[Lease] = []
        self.streams: list[Stream] = []
        self.up = True
        self.weather = Weather()
        self.on_put: Callable[[str, object], None] = lambda key, value: None
        self.num_requests = 0

    # -- the store, called inside a request -------------------------------------------------------

    def get(self, key: str) -> object | None:
        """Return a key's value, or None."""
        item = self.kv.get(key)
        return None if item is None else item.value

    def revision_of(self, key: str) -> int:
        """Return a key's mod revision, 0 when it is absent."""
        item = self.kv.get(key)
        return 0 if item is None else item.revision

    def put(self, key: str, value: object, lease: Lease | None = None) -> None:
        """Write a key."""
        self.revision += 1
        old = self.kv.get(key)
        if old is not None and old.lease is not None:
            old.lease.keys.discard(key)
        self.kv[key] = Item(value, self.revision, lease)
        if lease is not None:
            lease.keys.add(key)
        self._show(key, value)
        self.on_put(key, value)

    def delete(self, key: str) -> None:
        """Delete a key if it is there."""
        item = self.kv.pop(key, None)
        if item is None:
            return
        if item.lease is not None:
            item.lease.keys.discard(key)
        self.revision += 1
        self._show(key, None)

    def _show(self, key: str, value: object | None) -> None:
        section, name = split(key)
        for stream in self.streams:
            if section in stream.sections:
                stream.show(ev.Changed(section, name, value, self.revision))  # type: ignore[arg-type]

    # -- requests ---------------------------------------------------------------------------------

    def request(
        self, client: Client, operation: Callable[[], object], done: Callable[[object], None]
    ) -> None:
        """Carry out an operation in the server, some time later, if luck will have it."""
        self.num_requests += 1
        world, weather = self.world, self.weather
        if not client.linked():
            if world.chance(0.1):  # it sits in a socket's buffer until the network is back
                world.after(world.between(0.2, 2.5), self._apply, client, operation, None)
            return
        delay = world.rng.expovariate(1 / 0.002)
        if world.chance(weather.late):
            delay += world.between(0.1, 2.0)
        if not world.chance(weather.lost):
            answer = None if world.chance(weather.unanswered) else done
            world.after(delay, self._apply, client, operation, answer)
        if world.chance(weather.doubled):
            world.after(delay + world.between(0.0, 2.0), self._apply, client, operation, None)

    def _apply(
        self, client: Client, operation: Callable[[], object], done: Callable[[object], None] | None
    ) -> None:
        if not self.up:
            return
        result = operation()
        if done is not None:
            self.world.after(self.world.rng.expovariate(1 / 0.002), self._answer, client, done, result)

    def _answer(self, client: Client, done: Callable[[object], None], result: object) -> None:
        if client.linked():
            done(result)

    # -- leases -----------------------------------------------------------------------------------

    def grant(self, owner: Client) -> Lease:
        """Grant a lease."""
        lease = Lease(owner)
        self.leases.append(lease)
        self.link_changed(owner)
        return lease

    def revoke(self, lease: Lease) -> None:
        """End a lease; its keys vanish."""
        lease.alive = False
        if lease in self.leases:
            self.leases.remove(lease)
        for key in sorted(lease.keys):
            self.delete(key)

    def link_changed(self, owner: Client) -> None:
        """A keeper's connection came or went: its keep-alives arrive from now on, or no longer."""
        owner.link_changed()
        for lease in [x for x in self.leases if x.owner is owner]:
            lease.round += 1
            if self.up and not owner.linked():
                self.world.after(self.ttl * self.world.between(0.66, 1.0), self._expire, lease, lease.round)
        if owner.linked():
            for stream in self.streams:
                if stream.owner is owner:
                    stream.resume()

    def _expire(self, lease: Lease, round: int) -> None:
        if lease.alive and lease.round == round and self.up:
            self.world.say("etcd", "lease of %s expires", getattr(lease.owner, "name", "?"))
            self.revoke(lease)
            self.tell_lost(lease)

    def tell_lost(self, lease: Lease) -> None:
        """Let the owner find out, if its connection stands; otherwise it will ask when it is back."""
        self.world.after(self.world.between(0.0, 0.2), self._tell_lost, lease)

    def _tell_lost(self, lease: Lease) -> None:
        if lease.owner.linked():
            lease.owner.lease_lost()

    # -- faults -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop serving."""
        self.up = False
        for lease in self.leases:
            lease.round += 1
        for owner in self._owners():
            owner.link_changed()

    def _owners(self) -> list[Client]:
        return list({id(s.owner): s.owner for s in self.streams}.values())

    def start(self, *, frozen_for: float = 0.0) -> None:
        """Serve again. A restarted etcd renews all leases; a thawed one finds them expired."""
        self.up = True
        for lease in list(self.leases):
            if frozen_for > self.ttl:
                self.revoke(lease)
                self.tell_lost(lease)
        for owner in self._owners() + [x.owner for x in self.leases if not x.owner.linked()]:
            self.link_changed(owner)

    def wipe(self) -> None:
        """Lose all data; the cluster is another one."""
        self.kv.clear()
        self.revision = self.world.rng.randrange(3)
        self.cluster += 1
        for lease in list(self.leases):
            lease.alive = False
            lease.keys.clear()
            self.tell_lost(lease)
        self.leases.clear()
        for stream in self.streams:
            stream.relist()


class Stream:
    """One watch of one keeper: a listing, then each change in order, always a little late."""

    def __init__(
        self, etcd: FakeEtcd, owner: Client, sections: tuple[str, ...], sink: Callable[[ev.Event], None]
    ) -> None:
        """Register with the server and ask for a listing."""
        self.etcd, self.owner, self.sections, self.sink = etcd, owner, sections, sink
        self.lag = 0.004
        self._queue: deque[tuple[float, ev.Event]] = deque()
        self._due = 0.0
        self._open = False
        self._closed = False
        self._generation = 0
        etcd.streams.append(self)
        self.relist()

    def close(self) -> None:
        """Stop watching."""
        self._closed = True
        self._generation += 1
        self._queue.clear()
        if self in self.etcd.streams:
            self.etcd.streams.remove(self)

    def relist(self) -> None:
        """The watch broke and its place is lost: list anew, watch from there."""
        self._queue.clear()
        self._open = False
        self._generation += 1
        self._list_soon()

    def _list_soon(self) -> None:
        self.etcd.world.after(self._some_lag(), self._list, self._generation)

    def _list(self, generation: int) -> None:
        if generation != self._generation:
            return
        if not self.owner.linked():
            return  # `resume` asks again
        self._open = True
        kv = self.etcd.kv
        for section in self.sections:
            found = {split(k)[1]: item for k, item in kv.items() if split(k)[0] == section}
            items = {name: item.value for name, item in found.items()}
            revisions = {name: item.revision for name, item in found.items()}
            self.show(ev.Listed(section, items, revisions))  # type: ignore[arg-type]

    def show(self, event: ev.Event) -> None:
        """Queue an event behind those before it."""
        if not self._open:
            return
        world = self.etcd.world
        self._due = max(self._due, world.now + self._some_lag())
        self._queue.append((self._due, event))
        world.after(self._due - world.now, self._pump, self._generation)

    def _some_lag(self) -> float:
        return self.etcd.world.rng.expovariate(1 / self.lag)

    def resume(self) -> None:
        """The connection is back: go on where it broke."""
        if not self._open:
            self._generation += 1
            self._list_soon()
        elif self._queue:
            self.etcd.world.after(self._some_lag(), self._pump, self._generation)

    def _pump(self, generation: int) -> None:
        while generation == self._generation and self._queue and self._queue[0][0] <= self.etcd.world.now:
            if not self.owner.linked():
                return
            _, event = self._queue.popleft()
            self.sink(event)
