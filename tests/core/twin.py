"""`decide` once more, as dumb as possible: every seat is put into a box, then each rule looks into the boxes.

Slow, without reasons, and written from the design alone; the tests compare it with the real one.
"""

from __future__ import annotations

from ftkit.core.model import FRESH, Policy, Seat, Ticket
from ftkit.core.quorum import View

Answer = tuple[str, object, object]
"""("propose", id, seats with who must be absent) or ("wait", until, None)."""


def box(view: View, seat: Seat) -> str:
    """Say in which state a member of the current epoch is."""
    record = view.members.get(seat.replica_id)
    departed = view.departed.get(seat.replica_id)
    if record is not None and record.incarnation == seat.incarnation:
        ticket = asks(view, seat.replica_id)
        if ticket is None:
            return "dead" if departed is not None and departed.incarnation == seat.incarnation else "works"
        return "leaves" if ticket.leaving else "asks"
    if departed is not None and departed.incarnation == seat.incarnation:
        return "dead"
    if record is not None and seat.replica_id not in view.behind:
        return "dead"
    return "missing"


def asks(view: View, name: str) -> Ticket | None:
    """Return the ticket of a live member for an epoch to come."""
    now = 0 if view.epoch is None else view.epoch.id
    for other, ticket in view.tickets.items():
        for holder, record in view.members.items():
            if other == holder == name and ticket.incarnation == record.incarnation and ticket.epoch > now:
                return ticket
    return None


def twin(view: View, policy: Policy, now: float) -> Answer:
    """Apply the rules one after the other."""
    seats = [] if view.epoch is None else list(view.epoch.seats)
    boxes = {s.replica_id: box(view, s) for s in seats}
    live = {
        s.replica_id
        for s in seats
        if s.replica_id in view.members and view.members[s.replica_id].incarnation == s.incarnation
    }
    tickets = {r: t for r in view.members if (t := asks(view, r)) is not None and not t.leaving}
    if not tickets:
        return "wait", None, None
    old = [s.replica_id for s in seats if boxes[s.replica_id] == "asks"]
    first = min([view.tickets_seen.get(r, now) for r in old], default=now)

    at_work = [r for r in live if asks(view, r) is None]
    if old and at_work and now < first + policy.join_timeout:
        return "wait", first + policy.join_timeout, None

    new = sorted(r for r in tickets if r not in old)
    if len(old) >= policy.min_replicas:
        if any(tickets[r].shrink_only for r in old):
            new = []
        if view.epoch is not None and view.epoch.restored:
            same = [tickets[r].version for r in old if tickets[r].version.step > 0]
            new = [r for r in new if tickets[r].version not in same]
    queue = old + new
    room = policy.max_replicas if policy.max_replicas else len(queue)
    newest = max([tickets[r].version for r in queue], default=FRESH)
    if not any(tickets[r].version == newest for r in queue[:room]):
        queue = [r for r in queue if tickets[r].version == newest] + [
            r for r in queue if tickets[r].version != newest
        ]
    chosen = sorted(queue[:room])
    if len(chosen) < policy.min_replicas or newest < FRESH:
        return "wait", None, None

    absent: list[str] = []
    if not old or max(tickets[r].version for r in old) < max(s.version for s in seats):
        doubtful = [s.replica_id for s in seats if boxes[s.replica_id] in ("works", "missing")]
        since = []
        for r in doubtful:
            if r in live:
                if not old:
                    return "wait", None, None
                since.append(first)
            else:
                since.append(view.gone_since.get(r, now))
        if since and now < max(since) + policy.takeover_after:
            return "wait", max(since) + policy.takeover_after, None
        absent = [r for r in doubtful if r not in view.members]
    if not old and not (policy.max_replicas and len(chosen) >= policy.max_replicas):
        order = sorted(view.tickets_seen.get(r, now) for r in chosen)
        enough = order[max(policy.min_replicas, 1) - 1]
        if now < enough + policy.gather_window:
            return "wait", enough + policy.gather_window, None
    known = [0 if view.epoch is None else view.epoch.id]
    for ticket in tickets.values():
        known += [ticket.version.epoch, ticket.epoch - 1]
    seating = tuple(Seat(r, tickets[r].incarnation, tickets[r].version) for r in chosen)
    return "propose", max(known) + 1, (seating, tuple(absent))
