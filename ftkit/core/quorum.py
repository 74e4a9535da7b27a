"""Decide whether the members that hold a ticket may form the next epoch.

Pure: no clock, no I/O, no threads. The caller says what it saw, since when, and what time it is. A
"no" carries its reason, and the time at which time alone may turn it into a "yes".
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Mapping, Set

import msgspec

from ftkit.core.model import BROKEN, FRESH, Departed, Epoch, Policy, Record, Seat, Ticket

NUM_PROPOSERS = 3

MAX_ABSENT = 100
"""How many members' absence one transaction checks; etcd allows 128 comparisons by default."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What a keeper has seen of its job's keys."""

    members: Mapping[str, Record] = {}
    tickets: Mapping[str, Ticket] = {}
    departed: Mapping[str, Departed] = {}
    epoch: Epoch | None = None
    tickets_seen: Mapping[str, float] = {}
    """Since when each ticket has been standing, by the caller's own clock."""
    gone_since: Mapping[str, float] = {}
    """Since when each member of `epoch` that is not live has been missing, by the caller's own clock."""
    behind: Set[str] = frozenset()
    """Members of whom `members` may show an incarnation that is older than the one `epoch` names."""


class Propose(msgspec.Struct, frozen=True, kw_only=True):
    """The next epoch may be formed, of these seats."""

    id: int
    seats: tuple[Seat, ...]
    reason: str
    absent: tuple[str, ...] = ()
    """Members who are given up for having been gone too long: it only holds while they are."""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """No epoch may be formed yet; `until` is when to look again even if nothing changes."""

    reason: str
    until: float | None = None
    between: tuple[Seat, Seat] | None = None
    """One who asks for the next epoch, and one who has yet to stop: see `still_waits`."""


def epoch_id(view: View) -> int:
    """Return the id of the current epoch, 0 when there is none."""
    return 0 if view.epoch is None else view.epoch.id


def is_live(view: View, seat: Seat) -> bool:
    """Say whether this very incarnation holds its member key."""
    record = view.members.get(seat.replica_id)
    return record is not None and record.incarnation == seat.incarnation


def standing_ticket(view: View, replica_id: str) -> Ticket | None:
    """Return a live member's ticket for an epoch after the current one, if it holds one."""
    ticket, record = view.tickets.get(replica_id), view.members.get(replica_id)
    if ticket is None or record is None or ticket.incarnation != record.incarnation:
        return None
    return ticket if ticket.epoch > epoch_id(view) else None


def obituary(view: View, seat: Seat) -> str | None:
    """Say how a member of the current epoch is known to have ended, or None when it is not proven."""
    departed = view.departed.get(seat.replica_id)
    if departed is not None and departed.incarnation == seat.incarnation:
        return departed.how or "ended"
    record = view.members.get(seat.replica_id)
    if record is not None and record.incarnation != seat.incarnation and seat.replica_id not in view.behind:
        return "was started again"
    return None


def proposers(view: View) -> tuple[str, ...]:
    """Name the members that may propose the next epoch, in the order in which they try."""
    seats = () if view.epoch is None else view.epoch.seats
    alive = (s.replica_id for s in seats if is_live(view, s))
    first = tuple(itertools.islice(alive, NUM_PROPOSERS))
    return first or tuple(heapq.nsmallest(NUM_PROPOSERS, view.members))


def decide(view: View, policy: Policy, now: float) -> Propose | Wait:
    """Apply the six rules of epoch formation to what was seen.

    1 candidates hold a ticket, and can reach each other; 2 live members are waited for; 3 `min_replicas`;
    4 intersection with the current epoch; 5 `shrink_only`; 6 the new id is above every epoch that a candidate
    has been in.
    """
    tickets = {r: t for r in view.tickets if (t := standing_ticket(view, r)) is not None}
    leaving = {r for r, t in tickets.items() if t.leaving}
    candidates = {r: t for r, t in tickets.items() if r not in leaving}
    seats = () if view.epoch is None else view.epoch.seats
    staying = [s.replica_id for s in seats if is_live(view, s) and s.replica_id not in leaving]
    old = [r for r in staying if r in candidates]
    if not candidates:
        return Wait(reason="no member asks for a new epoch")

    begun = min((view.tickets_seen.get(r, now) for r in old), default=now)
    missing = [r for r in staying if r not in candidates]  # rule 2
    if missing and old and now < begun + policy.join_timeout:
        first = {s.replica_id: s for s in seats if s.replica_id in (old[0], missing[-1])}
        waited = f"{now - begun:.1f} s of {policy.join_timeout:g} s"
        return Wait(
            reason=f"waiting for {_names(missing)} of epoch {epoch_id(view)} to stop, {waited}",
            until=begun + policy.join_timeout,
            between=(first[old[0]], first[missing[-1]]),
        )

    chosen = _admit(view, candidates, old, policy)  # rule 5
    chosen = _within_reach(candidates, chosen, old, policy)
    if len(chosen) < policy.min_replicas:  # rule 3
        return Wait(reason=f"{len(chosen)} of at least {policy.min_replicas} replica groups are ready")
    best = max(candidates[r].version for r in chosen)
    if best < FRESH:
        return Wait(reason="no live member has a whole state; one that has must join")

    given_up = []
    newest = max((candidates[r].version for r in old), default=BROKEN)
    if not old or newest < max(s.version for s in seats):  # rule 4
        asking = set(old)
        given_up = [s for s in seats if s.replica_id not in asking and not _is_over_for(view, s)]
        wait = _wait_to_replace(view, given_up, policy, now, begun if old else None)
        if wait is not None:
            return wait
    if not old:
        wait = _wait_to_gather(view, chosen, policy, now)
        if wait is not None:
            return wait
    return _proposal(view, candidates, chosen, old, given_up)


def still_waits(view: View, wait: Wait, now: float) -> bool:
    """Say whether `decide` would certainly wait still (rule 2), given that the epoch is the same.

    The cost does not depend on the number of members, each of whom may be about to say that it has stopped.
    """
    if wait.between is None or wait.until is None or now >= wait.until:
        return False
    asking, working = wait.between
    ticket = standing_ticket(view, asking.replica_id)
    asks = ticket is not None and not ticket.leaving and is_live(view, asking)
    return asks and is_live(view, working) and standing_ticket(view, working.replica_id) is None


def _admit(view: View, candidates: Mapping[str, Ticket], old: list[str], policy: Policy) -> list[str]:
    """Choose the members of the next epoch: those of the current one first, spares are left out."""
    # Who wants no newcomers has a step to salvage; with too few members left there is nothing to salvage.
    shrink = len(old) >= policy.min_replicas and any(candidates[r].shrink_only for r in old)
    newcomers = [] if shrink else sorted(set(candidates) - set(old))
    if view.epoch is not None and view.epoch.restored and len(old) >= policy.min_replicas:
        # I8: in a wiped etcd an unrelated job may have counted up to the same version as ours.
        ours = {candidates[r].version for r in old if candidates[r].version.step > 0}
        newcomers = [r for r in newcomers if candidates[r].version not in ours]
    order = [*old, *newcomers]
    limit = policy.max_replicas or len(order)
    best = max((candidates[r].version for r in order), default=FRESH)
    if limit < len(order) and all(candidates[r].version < best for r in order[:limit]):
        # Somebody must bring the newest state.
        order.sort(key=lambda r: candidates[r].version < best)
    return sorted(order[:limit])


def _within_reach(
    candidates: Mapping[str, Ticket], chosen: list[str], old: list[str], policy: Policy
) -> list[str]:
    """Leave out as few members as may be, so that all others can reach each other (I6).

    Nobody is left out who alone has the newest state, nor when too few would remain: then there is nothing
    to gain, and all meet again.
    """
    apart: dict[str, set[str]] = {r: set() for r in chosen}
    for r in chosen:
        for other in candidates[r].unreached:
            if other in apart and other != r:
                apart[r].add(other)
                apart[other].add(r)
    if not any(apart.values()):
        return chosen
    best = max(candidates[r].version for r in chosen)
    members = set(old)
    for newest_first in (False, True):
        order = sorted(
            chosen,
            key=lambda r: (
                newest_first and candidates[r].version < best,
                len(apart[r]),
                r not in members,
                candidates[r].version < best,
                r,
            ),
        )
        kept: set[str] = set()
        for r in order:
            if not apart[r] & kept:
                kept.add(r)
        whole = any(candidates[r].version == best for r in kept)
        if whole and len(kept) >= policy.min_replicas and (kept & members or not members):
            return sorted(kept)
    return chosen


def _is_over_for(view: View, seat: Seat) -> bool:
    """Say whether a member of the current epoch is known never to vote in it again."""
    return obituary(view, seat) is not None or _has_left(view, seat)


def _wait_to_replace(
    view: View, unproven: list[Seat], policy: Policy, now: float, begun: float | None
) -> Wait | None:
    """Rule 4: may these members of the current epoch be replaced, who are not known to be dead?

    They may still be at work in it (I3). Or, when some of its members are candidates since `begun`, but
    none with a state as new as the one that the epoch began with, they alone have the state that it has
    led to (I1); a newcomer may have the one that it began with, but not what was committed since.
    """
    alive = [s.replica_id for s in unproven if is_live(view, s)]
    if alive and begun is None:
        return Wait(
            reason=f"epoch {epoch_id(view)} is held by {_names(alive)}, who did not ask for a new one"
        )
    since = max((_missing_since(view, s, begun, now) for s in unproven), default=None)
    if since is None or now >= since + policy.takeover_after:
        return None
    until = since + policy.takeover_after
    names, wait = _names([s.replica_id for s in unproven]), f"taking over in {until - now:.1f} s"
    if begun is not None:
        return Wait(reason=f"only {names} had the state of epoch {epoch_id(view)}; {wait}", until=until)
    return Wait(
        reason=f"{names} of epoch {epoch_id(view)} disappeared without proof of death; {wait}", until=until
    )


def _missing_since(view: View, seat: Seat, begun: float | None, now: float) -> float:
    if begun is not None and is_live(view, seat):
        return begun
    return view.gone_since.get(seat.replica_id, now)


def _has_left(view: View, seat: Seat) -> bool:
    ticket = standing_ticket(view, seat.replica_id)
    return ticket is not None and ticket.leaving and ticket.incarnation == seat.incarnation


def _wait_to_gather(view: View, chosen: list[str], policy: Policy, now: float) -> Wait | None:
    """Give replica groups that start together the time to be in the first epoch together."""
    seen = sorted(view.tickets_seen.get(r, now) for r in chosen)
    until = seen[max(policy.min_replicas, 1) - 1] + policy.gather_window
    late = [r for r in view.members if r not in view.tickets]
    full = policy.max_replicas and len(chosen) >= policy.max_replicas
    if now >= until or full:
        return None
    more = f"; {_names(late)} may still ask" if late else ""
    return Wait(reason=f"gathering replica groups for {policy.gather_window:g} s{more}", until=until)


def _proposal(
    view: View,
    candidates: Mapping[str, Ticket],
    chosen: list[str],
    old: list[str],
    given_up: list[Seat],
) -> Propose:
    seats = tuple(Seat(r, candidates[r].incarnation, candidates[r].version) for r in chosen)
    # Rule 6. A ticket also tells the newest epoch that its holder has heard of.
    floor = max(max(t.version.epoch, t.epoch - 1) for t in candidates.values())
    before = set() if view.epoch is None else {s.replica_id for s in view.epoch.seats}
    joined = set(chosen) - set(old)
    lost = before - set(chosen)
    parts = [f"joined: {_names(joined)}"] if joined else []
    parts += [f"without: {_names(lost)}"] if lost else []
    reason = "; ".join(parts) or "same members again"
    absent = tuple(s.replica_id for s in given_up if s.replica_id not in view.members)[:MAX_ABSENT]
    return Propose(id=max(epoch_id(view), floor) + 1, seats=seats, reason=reason, absent=absent)


def _names(replica_ids: Collection[str]) -> str:
    """Join a few names, and say how many more there are."""
    shown = heapq.nsmallest(4, replica_ids)
    more = len(replica_ids) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
