"""Talk to one member's machine: tell it what happens, and hear what it wants done."""

from __future__ import annotations

from typing import Any, TypeVar

from ftkit.core import events as ev
from ftkit.core.machine import Member
from ftkit.core.model import FRESH, Epoch, Policy, Record, Seat, Ticket, Version

POLICY = Policy(gather_window=1.0, join_timeout=10.0, takeover_after=30.0, outage_grace=20.0)
E = TypeVar("E")


def record(name: str) -> Record:
    return Record(replica_id=name, incarnation=f"{name}1", host=f"host-{name}")


def ticket(name: str, epoch: int, version: Version = FRESH) -> Ticket:
    return Ticket(replica_id=name, incarnation=f"{name}1", epoch=epoch, version=version)


def epoch(id: int, names: str, version: Version = FRESH, **more: Any) -> Epoch:
    return Epoch(id=id, seats=tuple(Seat(r, f"{r}1", version) for r in sorted(names)), **more)


class Talk:
    """A machine and a clock; `hear` returns the effects of an event."""

    def __init__(self, name: str = "a", others: str = "", current: Epoch | None = None) -> None:
        self.now = 100.0
        self.machine = Member(name, f"{name}1", POLICY)
        self.revision = 10
        self.hear(ev.Ready(record=record(name)))
        members = {r: record(r) for r in others + name}
        self.hear(ev.Listed("members", members, dict.fromkeys(members, 5)))
        found = {} if current is None else {"": current}
        self.hear(ev.Listed("epoch", found, dict.fromkeys(found, 7)))
        for section in ("abort", "control", "departed", "tickets"):
            self.hear(ev.Listed(section, {}))  # type: ignore[arg-type]

    def hear(self, event: ev.Event, after: float = 0.0) -> list[ev.Effect]:
        self.now += after
        return self.machine.handle(event, self.now)

    def change(self, section: str, name: str, value: object, after: float = 0.0) -> list[ev.Effect]:
        self.revision += 1
        return self.hear(ev.Changed(section, name, value, self.revision), after)  # type: ignore[arg-type]

    def tick(self, after: float = 0.0) -> list[ev.Effect]:
        return self.hear(ev.Tick(), after)

    def hold(self) -> None:
        """Let the keys be held as they should be."""
        self.hear(ev.Held(self.machine.ticket))

    def run_in(self, id: int, names: str) -> ev.Offer:
        """Bring the member into an epoch."""
        self.hear(ev.Want(version=FRESH))
        self.hold()
        for other in names:
            if other != self.machine.replica_id:
                self.change("members", other, record(other))
        return only(self.change("epoch", "", epoch(id, names)), ev.Offer)


def only(effects: list[ev.Effect], kind: type[E]) -> E:
    found = [e for e in effects if isinstance(e, kind)]
    assert len(found) == 1, effects
    return found[0]


def none_of(effects: list[ev.Effect], *kinds: type) -> bool:
    return not any(isinstance(e, kinds) for e in effects)
