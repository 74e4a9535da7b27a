"""Watch the parts of the job's prefix that a keeper needs, and turn what is seen into events.

One watch for every keeper, one more, of tickets, for proposers: a change of membership then costs O(N)
messages. It decides nothing; it knows since when its sight is troubled.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

from ftkit.core import events as ev
from ftkit.keeper.etcd import KV, Etcd, prefix_end
from ftkit.keeper.keys import JobKeys, decode
from ftkit.keeper.watch import Watch, WatchEvent

log = logging.getLogger(__name__)


class Sight:
    """All watches of one keeper. `close` ends them."""

    def __init__(
        self,
        etcd: Etcd,
        keys: JobKeys,
        replica_id: str,
        post: Callable[[ev.Event], None],
        *,
        on_config: Callable[[KV | None], None],
        on_trouble: Callable[[Exception], None],
    ) -> None:
        self._etcd = etcd
        self._keys = keys
        self._replica_id = replica_id
        self._post = post
        self._on_config = on_config
        self._on_trouble = on_trouble
        self._blind_since: dict[str, float] = {}
        self._watches: dict[str, Watch] = {}

    def open(self) -> None:
        """Start the watches that every keeper has."""
        # One range, from `abort` to `members/`: a death and its proof come in one message. What every keeper
        # has no use for (statistics, tickets, the timeline) lies behind it in the order of keys.
        sections: tuple[ev.Section, ...] = ("abort", "control", "departed", "epoch", "members")
        self._open("members", self._keys.abort, prefix_end(self._keys.members), sections)

    def watch_tickets(self, on: bool) -> None:
        """Start or end the watch that only proposers have."""
        if on and "tickets" not in self._watches:
            self._open("tickets", self._keys.tickets, prefix_end(self._keys.tickets), ("tickets",))
        elif not on:
            watch = self._watches.pop("tickets", None)
            if watch is not None:
                watch.close(wait=False)  # called on the loop's thread, which must not wait
            self._blind_since.pop("tickets", None)

    def refresh(self, on_fresh: Callable[[], None]) -> None:
        """Call `on_fresh`, from some thread, when all that is so by now has been posted."""
        waiting = set(self._watches)

        def one(name: str) -> None:
            waiting.discard(name)
            if not waiting:
                on_fresh()

        for name, watch in list(self._watches.items()):
            watch.refresh(functools.partial(one, name))

    def close(self) -> None:
        """End all watches; does not wait for them."""
        watches, self._watches = self._watches, {}
        for watch in watches.values():
            watch.close(wait=False)

    @property
    def blind_since(self) -> float | None:
        """Monotonic time since when some watch shows nothing, or None when all are well."""
        return min(self._blind_since.values(), default=None)

    def _open(self, name: str, start: str, end: str, sections: tuple[ev.Section, ...]) -> None:
        self._blind_since[name] = time.monotonic()

        def on_listing(kvs: list[KV], _revision: int) -> None:
            self._listed(kvs, sections)

        def on_trouble(error: Exception) -> None:
            # What was heard up to now counts; from now on this watch tells nothing.
            self._blind_since.setdefault(name, time.monotonic())
            self._on_trouble(error)

        def on_events(events: list[WatchEvent], _revision: int) -> None:
            if self._watches.get(name) is watch:
                self._changed(events)

        def on_word() -> None:
            self._blind_since.pop(name, None)

        watch = self._watches[name] = Watch(
            self._etcd, start, end, on_listing, on_events, on_word, on_trouble
        )

    def _listed(self, kvs: list[KV], sections: tuple[ev.Section, ...]) -> None:
        items: dict[ev.Section, dict[str, object]] = {s: {} for s in sections}
        revisions: dict[ev.Section, dict[str, int]] = {s: {} for s in sections}
        config: KV | None = None
        for kv in kvs:
            if kv.key == self._keys.config:
                config = kv
                continue
            place = self._keys.locate(kv.key)
            if place is None or not self._concerns_us(*place):
                continue
            value = decode(place[0], kv.key, kv.value)
            if value is not None:
                items[place[0]][place[1]] = value
                revisions[place[0]][place[1]] = kv.mod_revision
        if "abort" in sections:
            self._on_config(config)
        for section in sections:
            self._post(ev.Listed(section, items[section], revisions[section]))

    def _changed(self, events: list[WatchEvent]) -> None:
        for event in events:
            if event.key == self._keys.config:
                value = event.value
                kv = None
                if value is not None:
                    kv = KV(event.key, value, event.mod_revision, event.create_revision, event.lease)
                self._on_config(kv)
                continue
            place = self._keys.locate(event.key)
            if place is None or not self._concerns_us(*place):
                continue
            value_ = None if event.value is None else decode(place[0], event.key, event.value)
            self._post(ev.Changed(place[0], place[1], value_, event.mod_revision))

    def _concerns_us(self, section: ev.Section, name: str) -> bool:
        """Requests for others are theirs to obey."""
        return section != "control" or name.partition("/")[2] == self._replica_id
