"""Members that leave an epoch together, as planned, go on without waiting for each other's tickets."""

from __future__ import annotations

from ftkit.core import events as ev
from ftkit.core.machine import TOGETHER_S
from ftkit.core.model import FRESH, Epoch, Seat, Version
from tests.core.talk import POLICY, Talk, none_of, only, record, ticket


def test_who_goes_on_together_waits_for_nobodys_ticket() -> None:
    """All have said farewell at one version: the epoch is written at once, the own ticket need not be."""
    talk = Talk()
    talk.run_in(1, "ab")
    talk.change("members", "c", record("c"))
    talk.change("tickets", "c", ticket("c", 2))
    effects = talk.hear(ev.Want(version=Version(1, 3), together=True))
    put = only(effects, ev.PutEpoch).epoch
    assert [(s.replica_id, s.version) for s in put.seats] == [
        ("a", Version(1, 3)),
        ("b", Version(1, 3)),
        ("c", FRESH),
    ]
    assert none_of(effects, ev.Hold)
    assert only(talk.change("epoch", "", put), ev.Offer).epoch == put


def test_a_ticket_is_written_after_all_when_no_epoch_comes() -> None:
    talk = Talk()
    talk.run_in(1, "ab")
    talk.change("members", "c", record("c"))
    talk.change("tickets", "c", ticket("c", 2))
    talk.hear(ev.Want(version=Version(1, 3), together=True))
    assert only(talk.tick(TOGETHER_S), ev.Hold).ticket is not None


def test_while_the_newcomer_has_not_been_seen_tickets_are_written_and_waited_for() -> None:
    """Else those who saw it, and those who did not, would change the epoch in vain and in turn."""
    talk = Talk()
    talk.run_in(1, "ab")
    effects = talk.hear(ev.Want(version=Version(1, 3), together=True))
    assert only(effects, ev.Hold).ticket is not None
    assert none_of(effects, ev.PutEpoch)


def test_an_epoch_that_comes_before_this_member_has_asked_is_no_end_of_the_running_one() -> None:
    """The others, with whom it has left the epoch, were faster by a moment."""
    talk = Talk("b")
    talk.run_in(1, "ab")
    faster = Epoch(id=2, seats=(Seat("a", "a1", Version(1, 3)), Seat("b", "b1", Version(1, 3))), proposer="a")
    assert none_of(talk.change("epoch", "", faster), ev.AbortWork)
    assert (
        only(talk.hear(ev.Want(version=Version(1, 3), together=True), after=0.01), ev.Offer).epoch == faster
    )


def test_an_epoch_that_rests_on_what_this_member_does_not_hold_is_not_taken() -> None:
    talk = Talk("b")
    talk.run_in(1, "ab")
    wrong = Epoch(id=2, seats=(Seat("a", "a1", Version(1, 3)), Seat("b", "b1", Version(1, 3))), proposer="a")
    talk.change("epoch", "", wrong)
    effects = talk.hear(ev.Want(version=Version(1, 2), failed="a step failed"), after=0.01)
    assert none_of(effects, ev.Offer)
    assert only(effects, ev.Hold).ticket.epoch == 3


def test_who_does_not_ask_for_the_epoch_that_names_it_is_told_to_stop() -> None:
    talk = Talk("b")
    talk.run_in(1, "ab")
    newer = Epoch(id=2, seats=(Seat("a", "a1", Version(1, 3)), Seat("b", "b1", Version(1, 3))), proposer="a")
    talk.change("epoch", "", newer)
    assert "a has left" in only(talk.tick(POLICY.leave_grace), ev.AbortWork).why
