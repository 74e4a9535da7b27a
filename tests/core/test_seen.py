"""What the watches have shown, since when, and how far it can be believed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ftkit.core import events as ev
from ftkit.core.model import FRESH, Departed, Epoch, Record, Seat, Ticket, Version
from ftkit.core.quorum import is_live, obituary, standing_ticket
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
    assert not repeat.due("hold", "y", 99.0, once=True)


def test_an_effect_that_stays_without_answer_is_repeated_less_and_less_often() -> None:
    """A thousand members that each write twice a second would keep an etcd that is late from catching up."""
    repeat = Repeater()
    times = [now / 10 for now in range(200) if repeat.due("hold", "x", now / 10)]
    assert times == [0.0, 0.5, 1.5, 3.5, 5.5, 7.5, 9.5, 11.5, 13.5, 15.5, 17.5, 19.5]
    repeat.clear("hold")
    assert repeat.due("hold", "x", 20.0)
    assert repeat.due("hold", "x", 20.0 + RETRY_S), "what is asked for anew is soon repeated"


NAMES = "abc"
INCARNATIONS = ("1", "2")


@st.composite
def news(draw: st.DrawFn) -> ev.Listed | ev.Changed:
    """Anything that a watch of three members may show."""
    section = draw(st.sampled_from(["members", "tickets", "departed", "epoch"]))
    values: dict[str, st.SearchStrategy[object]] = {
        "members": st.builds(record, st.just("x"), st.sampled_from(INCARNATIONS)),
        "departed": st.builds(Departed, replica_id=st.just("x"), incarnation=st.sampled_from(INCARNATIONS)),
        "tickets": st.builds(
            Ticket,
            replica_id=st.just("x"),
            incarnation=st.sampled_from(INCARNATIONS),
            epoch=st.integers(1, 3),
        ),
        "epoch": st.builds(
            lambda id, seats: Epoch(id=id, seats=tuple(Seat(r, i, FRESH) for r, i in sorted(seats.items()))),
            st.integers(1, 3),
            st.dictionaries(st.sampled_from(NAMES), st.sampled_from(INCARNATIONS)),
        ),
    }
    names = st.just("") if section == "epoch" else st.sampled_from(NAMES)
    if draw(st.integers(0, 4)):
        value = draw(st.none() | values[section])
        return ev.Changed(section, draw(names), value, draw(st.integers(1, 9)))  # type: ignore[arg-type]
    items = draw(st.dictionaries(names, values[section]))
    return ev.Listed(section, items, {r: draw(st.integers(1, 9)) for r in items})  # type: ignore[arg-type]


@given(st.lists(news(), max_size=25))
@settings(max_examples=300, deadline=None)
def test_what_is_kept_up_change_by_change_is_what_a_look_at_all_finds(script: list) -> None:
    """A change costs the same in a job of any size, since only the member that it concerns is looked at."""
    made = Seen()
    since: dict[tuple[str, str], float] = {}
    for now, event in enumerate(script):
        before = 0 if made.epoch is None else made.epoch.id
        made.absorb(event, float(now))
        view = made.view()
        seats = () if made.epoch is None else made.epoch.seats
        new_epoch = made.epoch is None or made.epoch.id != before
        if new_epoch or (isinstance(event, ev.Listed) and event.section == "members"):
            since = {key: at for key, at in since.items() if key[0] != "empty"}
        holds = {("stands", r) for r in made.tickets if standing_ticket(view, r) is not None}
        holds |= {("empty", s.replica_id) for s in seats if not is_live(view, s)}
        since = {key: since.get(key, float(now)) for key in holds}
        assert made.tickets_seen == {r: at for (what, r), at in since.items() if what == "stands"}
        assert made.gone_since == {r: at for (what, r), at in since.items() if what == "empty"}
        ended = [s for s in seats if obituary(view, s) is not None]
        if made.epoch is not None:
            doubted = made.in_doubt(made.epoch)
            assert [s for s in doubted if obituary(view, s) is not None] == ended
            assert set(made.gone_since) <= {s.replica_id for s in doubted}
