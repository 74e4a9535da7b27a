"""What the watches have shown, since when, and how far it can be believed."""

from __future__ import annotations

from ftkit.core import events as ev
from ftkit.core.model import FRESH, Epoch, Record, Seat, Ticket, Version
from ftkit.core.quorum import obituary
from ftkit.core.seen import RETRY_S, Repeater, Seen


def record(name: str, incarnation: str) -> Record:
    return Record(replica_id=name, incarnation=incarnation)


def put(name: str, incarnation: str, revision: int) -> ev.Changed:
    return ev.Changed("members", name, record(name, incarnation), revision)


def gone(name: str, revision: int) -> ev.Changed:
    return ev.Changed("members", name, None, revision)


def epoch(id: int, revision: int, **incarnations: str) -> ev.Changed:
    seats = tuple(Seat(r, i, FRESH) for r, i in sorted(incarnations.items()))
    return ev.Changed("epoch", "", Epoch(id=id, seats=seats), revision)


def seen(*events: ev.Listed | ev.Changed) -> Seen:
    """Absorb events, one each second."""
    made = Seen()
    for now, event in enumerate(events):
        made.absorb(event, float(now))
    return made


def test_a_listing_replaces_all_that_was_known() -> None:
    made = seen(put("a", "a1", 1), ev.Listed("members", {"b": record("b", "b1")}, {"b": 2}))
    assert set(made.members) == {"b"}
    assert made.listed == {"members"}


def test_an_absence_counts_from_the_first_sight_of_it() -> None:
    made = seen(put("a", "a1", 1), epoch(1, 2, a="a1"), gone("a", 3), put("b", "b1", 4))
    assert made.gone_since == {"a": 2.0}


def test_an_absence_counts_from_the_epoch_that_names_the_member_at_the_earliest() -> None:
    """It may have been gone before, been started again, and joined unseen: the watches lag."""
    made = seen(put("a", "a1", 1), epoch(1, 2, a="a1"), gone("a", 3), epoch(2, 9, a="a2"))
    assert made.gone_since == {"a": 3.0}


def test_an_absence_counts_anew_after_a_listing() -> None:
    """A member may have been back, at work, in the gap between two watches (I3)."""
    made = seen(put("a", "a1", 1), epoch(1, 2, a="a1"), gone("a", 3), ev.Listed("members", {}))
    assert made.gone_since == {"a": 3.0}


def test_clocks_restart_after_a_silence() -> None:
    made = seen(epoch(1, 2, a="a1"), put("b", "b1", 3))
    made.absorb(ev.Changed("tickets", "b", Ticket(replica_id="b", incarnation="b1", epoch=2)), 4.0)
    made.restart_clocks(50.0)
    assert made.gone_since == {"a": 50.0}
    assert made.tickets_seen == {"b": 50.0}


def test_a_ticket_counts_while_it_stands() -> None:
    made = seen(put("b", "b1", 1))
    ticket = Ticket(replica_id="b", incarnation="b1", epoch=2, version=Version(1, 5))
    made.absorb(ev.Changed("tickets", "b", ticket, 2), 7.0)
    assert made.tickets_seen == {"b": 7.0}
    made.absorb(epoch(2, 3, b="b1"), 8.0)
    assert made.tickets_seen == {}


def test_a_record_older_than_the_epoch_is_no_proof_that_its_member_was_replaced() -> None:
    """The epoch names a2; that the members' watch still shows a1 means that it is late."""
    made = seen(put("a", "a1", 1), epoch(2, 9, a="a2"))
    assert obituary(made.view(), Seat("a", "a2", FRESH)) is None
    made.absorb(put("a", "a2", 8), 3.0)
    assert obituary(made.view(), Seat("a", "a2", FRESH)) is None


def test_a_record_newer_than_the_epoch_is_proof() -> None:
    made = seen(epoch(2, 5, a="a1"), put("a", "a2", 6))
    assert obituary(made.view(), Seat("a", "a1", FRESH)) == "was started again"


def test_an_incarnation_that_was_seen_to_be_followed_is_past_whatever_the_revisions() -> None:
    """The proposer did not know yet, and named the one that is gone."""
    made = seen(put("a", "a1", 1), put("a", "a2", 2), epoch(2, 5, a="a1"))
    assert obituary(made.view(), Seat("a", "a1", FRESH)) == "was started again"
    made = seen(put("a", "a1", 1), gone("a", 2), put("a", "a2", 3), epoch(2, 5, a="a1"))
    assert obituary(made.view(), Seat("a", "a1", FRESH)) == "was started again"


def test_an_effect_is_repeated_until_it_changes_or_is_cleared() -> None:
    repeat = Repeater()
    assert repeat.due("hold", "x", 0.0)
    assert not repeat.due("hold", "x", RETRY_S / 2)
    assert repeat.due("hold", "x", RETRY_S)
    assert repeat.due("hold", "y", RETRY_S)
    repeat.clear("hold")
    assert repeat.due("hold", "y", RETRY_S)
    assert not repeat.due("hold", "y", 99.0, again=None)
