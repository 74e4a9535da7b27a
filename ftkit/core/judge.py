"""Judge an epoch by what was seen: may it begin for this member, is it over, who would like to join?

Pure questions about `Seen`; what follows from the answers is the machine's business.
"""

from __future__ import annotations

from ftkit.core import events as ev
from ftkit.core.model import Epoch, Policy, Seat
from ftkit.core.quorum import obituary
from ftkit.core.seen import Seen


def objection(seen: Seen, replica_id: str, want: ev.Want, epoch: Epoch, *, frozen: bool) -> str | None:
    """Say why the current epoch, which names this member, is over before it has begun, or None."""
    seat = seen.seat(replica_id)
    if want.leaving:
        return "it is leaving"
    if frozen:
        return "it is frozen"
    if seat is None or seat.version != want.version:
        return "the epoch rests on a stale view of its version"
    if seen.abort is not None and seen.abort.epoch == epoch.id:
        return seen.abort.why or "the epoch was aborted"
    view = seen.view()
    dead = [s.replica_id for s in seen.in_doubt(epoch) if obituary(view, s) is not None]
    return f"{dead[0]} is dead" if dead else None


def end_of(seen: Seen, replica_id: str, running: Epoch) -> str | None:
    """Say why the running epoch is over, or None. For a newer one that names it, a member is about to ask."""
    if seen.epoch is not None and seen.epoch.id > running.id and not is_called(seen, replica_id, running):
        return f"superseded by epoch {seen.epoch.id}"
    if seen.abort is not None and seen.abort.epoch == running.id:
        return seen.abort.why or f"aborted by {seen.abort.by}"
    view = seen.view()
    for seat in seen.in_doubt(running):
        how = None if seat.replica_id == replica_id else obituary(view, seat)
        if how is not None and not _left_as_planned(seen, seat):
            return f"{seat.replica_id} is gone: {how}"
    return None


def is_called(seen: Seen, replica_id: str, running: Epoch) -> bool:
    """Say whether the others, who left the running epoch together with this member, were faster to go on."""
    if seen.epoch is None or seen.epoch.id <= running.id or seen.epoch.restored:
        return False
    before, seat = running.seat(replica_id), seen.seat(replica_id)
    if before is None or seat is None or seat.incarnation != before.incarnation:
        return False
    return seat.version > before.version


def _left_as_planned(seen: Seen, seat: Seat) -> bool:
    departed = seen.departed.get(seat.replica_id)
    return departed is not None and departed.incarnation == seat.incarnation and departed.planned


def those_who_left(seen: Seen, replica_id: str, running: Epoch) -> list[str]:
    """Name the others who have left the running epoch without an error: by goodbye, or for the next one."""
    if seen.epoch is not None and is_called(seen, replica_id, running):
        return [seen.epoch.proposer]
    left = []
    for seat in seen.named(running):
        ticket = seen.tickets.get(seat.replica_id)
        asks = ticket is not None and ticket.epoch > running.id and ticket.incarnation == seat.incarnation
        if seat.replica_id != replica_id and (asks or _left_as_planned(seen, seat)):
            left.append(seat.replica_id)
    return left


def outsiders(seen: Seen, running: Epoch, policy: Policy) -> dict[str, float]:
    """Name those outside the epoch who hold a ticket and would be admitted, and since when they ask.

    Who cannot reach a member would not be admitted.
    """
    if policy.max_replicas and len(running.seats) >= policy.max_replicas:
        return {}
    if not seen.tickets_seen:
        return {}
    inside = {(s.replica_id, s.incarnation) for s in running.seats}
    return {
        r: since
        for r, since in seen.tickets_seen.items()
        if not seen.tickets[r].leaving
        and (r, seen.tickets[r].incarnation) not in inside
        and not any(running.seat(name) for name in seen.tickets[r].unreached)
    }
