"""The member's machine, one conversation at a time; the simulation lets many of them talk."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ftkit.core import events as ev
from ftkit.core.machine import PROPOSE_STAGGER_S, RECORD_GRACE_S
from ftkit.core.model import FRESH, Abort, Control, Departed, Record, Ticket, Version
from ftkit.core.seen import RETRY_S
from tests.core.talk import POLICY, Talk, epoch, none_of, only, record, ticket


def test_a_member_holds_its_key_and_asks_until_it_is_told_that_both_stand() -> None:
    """A lost write costs a tick, not a deadlock."""
    talk = Talk()
    hold = only(talk.hear(ev.Want(version=Version(3, 9))), ev.Hold)
    assert hold.ticket == ticket("a", 4, Version(3, 9))
    assert none_of(talk.tick(RETRY_S / 2), ev.Hold)
    assert only(talk.tick(RETRY_S), ev.Hold) == hold
    talk.hear(ev.Held(hold.ticket))
    assert none_of(talk.tick(9.0), ev.Hold)


def test_an_epoch_that_names_the_member_is_offered_once_with_the_records_of_all() -> None:
    talk = Talk(others="b")
    talk.hear(ev.Want(version=FRESH))
    talk.hold()
    offer = only(talk.change("epoch", "", epoch(1, "ab")), ev.Offer)
    assert set(offer.records) == {"a", "b"}
    assert none_of(talk.tick(1.0), ev.Offer)
    assert talk.machine.running == offer.epoch


def test_a_member_at_work_writes_nothing() -> None:
    """etcd's load does not depend on the step rate."""
    talk = Talk()
    talk.run_in(1, "abc")
    assert [talk.tick(1.0) for _ in range(5)] == [[]] * 5


def test_one_left_out_asks_for_the_next_epoch_at_once() -> None:
    talk = Talk(others="b")
    talk.hear(ev.Want(version=FRESH))
    talk.hold()
    effects = talk.change("epoch", "", epoch(5, "b"))
    assert none_of(effects, ev.Offer)
    assert only(effects, ev.Hold).ticket == ticket("a", 6)


def test_an_epoch_on_a_stale_view_is_declined_and_ended_for_all() -> None:
    """Its plan would name this member as up to date with a state that it does not have."""
    talk = Talk(others="b")
    talk.hear(ev.Want(version=Version(2, 7)))
    talk.hold()
    effects = talk.change("epoch", "", epoch(3, "ab"))
    assert none_of(effects, ev.Offer)
    assert only(effects, ev.PutAbort).abort.epoch == 3
    ticket_ = only(effects, ev.Hold).ticket
    assert ticket_ is not None
    assert ticket_.epoch == 4


def test_an_unknown_member_of_a_new_epoch_is_given_a_moment_to_appear() -> None:
    """The watch of the member keys may lag behind that of the epoch."""
    talk = Talk()
    talk.hear(ev.Want(version=FRESH))
    talk.hold()
    assert none_of(talk.change("epoch", "", epoch(1, "ab")), ev.Offer, ev.PutAbort)
    assert only(talk.change("members", "b", record("b"), after=0.5), ev.Offer)
    late = Talk()
    late.hear(ev.Want(version=FRESH))
    late.hold()
    late.change("epoch", "", epoch(1, "ab"))
    assert only(late.tick(RECORD_GRACE_S), ev.PutAbort).abort.why == "b is gone"


def test_leaving_in_error_ends_the_epoch_for_all_until_it_is_seen_to_have_ended() -> None:
    talk = Talk()
    talk.run_in(1, "ab")
    effects = talk.hear(ev.Want(version=FRESH, failed="no answer", offered=1))
    abort = only(effects, ev.PutAbort).abort
    assert (abort.epoch, abort.by, abort.why) == (1, "a", "no answer")
    assert only(talk.tick(RETRY_S), ev.PutAbort).abort == abort
    talk.change("abort", "", Abort(epoch=1, by="b"))
    assert none_of(talk.tick(RETRY_S), ev.PutAbort)


def test_leaving_at_a_voted_boundary_is_no_error() -> None:
    talk = Talk()
    talk.run_in(1, "ab")
    assert none_of(talk.hear(ev.Want(version=Version(1, 4), offered=1)), ev.PutAbort)


def test_a_wish_that_crossed_an_offer_is_void() -> None:
    """The ranks will find the offer; machine and ranks would be in different epochs otherwise."""
    talk = Talk()
    talk.run_in(4, "ab")
    assert talk.hear(ev.Want(version=FRESH, offered=2)) == []
    assert talk.machine.running is not None
    talk.hear(ev.Want(version=FRESH, offered=4, failed="threw it away"))
    assert talk.machine.running is None


def test_the_end_of_the_running_epoch_is_told_once() -> None:
    for section, name, value, why in [
        ("abort", "", Abort(epoch=1, by="b", why="b fell"), "b fell"),
        ("epoch", "", epoch(2, "bc"), "superseded by epoch 2"),
        ("departed", "b", Departed(replica_id="b", incarnation="b1", how="SIGKILL"), "b is gone: SIGKILL"),
        ("members", "b", Record(replica_id="b", incarnation="b2"), "b is gone: was started again"),
    ]:
        talk = Talk()
        talk.run_in(1, "ab")
        end = only(talk.change(section, name, value), ev.AbortWork)
        assert (end.epoch, end.why) == (1, why)
        assert none_of(talk.tick(1.0), ev.AbortWork)


def test_news_of_other_epochs_and_incarnations_end_nothing() -> None:
    talk = Talk()
    talk.run_in(3, "ab")
    assert none_of(talk.change("abort", "", Abort(epoch=2)), ev.AbortWork)
    assert none_of(
        talk.change("departed", "b", Departed(replica_id="b", incarnation="b0", how="exit 1")), ev.AbortWork
    )


def test_a_key_that_vanishes_without_proof_makes_a_suspect_and_no_more() -> None:
    """I7: a frozen etcd loses every lease at the same moment."""
    talk = Talk()
    talk.run_in(1, "abc")
    effects = talk.change("members", "b", None)
    assert only(effects, ev.Suspects).names == ("b",)
    assert none_of(effects, ev.AbortWork)
    assert none_of(talk.tick(15.0), ev.AbortWork, ev.PutEpoch)
    assert only(talk.change("members", "b", record("b")), ev.Suspects).names == ()


def test_a_planned_goodbye_gives_the_others_time_to_reach_the_boundary() -> None:
    talk = Talk()
    talk.run_in(1, "ab")
    left = Departed(replica_id="b", incarnation="b1", how="drained", planned=True)
    talk.change("members", "b", None)
    assert none_of(talk.change("departed", "b", left), ev.AbortWork)
    assert "has left" in only(talk.tick(POLICY.leave_grace), ev.AbortWork).why


def test_a_lost_lease_is_made_good_without_the_old_ticket() -> None:
    """I8: in a wiped etcd, a ticket for the epoch that runs would look like one for the next."""
    talk = Talk()
    talk.run_in(1, "ab")
    assert only(talk.hear(ev.LeaseLost()), ev.Hold).ticket is None


def test_a_wiped_etcd_gets_the_epoch_back() -> None:
    talk = Talk()
    running = talk.run_in(3, "ab").epoch
    put = only(talk.hear(ev.Listed("epoch", {})), ev.PutEpoch)
    assert (put.epoch, put.revision) == (running, 0)
    put = only(talk.change("epoch", "", epoch(1, "n")), ev.PutEpoch)
    assert (put.epoch, put.revision) == (running, talk.revision)


def test_an_unrelated_epoch_of_the_same_number_is_gone_above() -> None:
    """I8: newcomers were faster in the wiped etcd; otherwise two jobs would run on side by side."""
    talk = Talk()
    running = talk.run_in(1, "ab").epoch
    put = only(talk.change("epoch", "", epoch(1, "n")), ev.PutEpoch)
    assert (put.epoch.id, put.epoch.seats, put.epoch.restored) == (2, running.seats, True)
    end = only(talk.change("epoch", "", put.epoch), ev.AbortWork)
    assert "superseded" in end.why
    assert not end.left_out


def test_a_member_that_the_others_went_on_without_is_told_so() -> None:
    """Waiting for an epoch in which to salvage its step would only take time."""
    talk = Talk()
    talk.run_in(1, "ab")
    assert only(talk.change("epoch", "", epoch(2, "b")), ev.AbortWork).left_out


def test_the_first_proposer_goes_at_once_and_the_third_a_little_later() -> None:
    for name, order in [("a", 0), ("b", 1), ("c", 2)]:
        talk = Talk(name, others="abc", current=epoch(4, "abc"))
        for other in "abc":
            talk.change("tickets", other, ticket(other, 5))
        early = talk.tick()
        assert none_of(early, ev.PutEpoch) or order == 0
        if order:
            assert only(talk.tick(PROPOSE_STAGGER_S * order), ev.PutEpoch).epoch.id == 5


def test_a_proposal_is_compared_with_what_it_was_decided_on() -> None:
    talk = Talk("b", others="b", current=epoch(4, "a"))
    talk.hear(ev.Want(version=FRESH))
    talk.hold()
    assert none_of(talk.change("tickets", "b", ticket("b", 5)), ev.PutEpoch)
    put = only(talk.tick(POLICY.takeover_after), ev.PutEpoch)
    assert (put.revision, put.absent) == (7, ("a",))


def test_in_silence_nobody_is_given_up_and_afterwards_the_wait_begins_anew() -> None:
    """I3: who seems to be gone may have come back unseen."""
    talk = Talk("b", others="b", current=epoch(4, "a"))
    talk.hear(ev.Want(version=FRESH))
    talk.change("tickets", "b", ticket("b", 5))
    talk.hear(ev.Silence(True), after=20.0)
    assert none_of(talk.tick(20.0), ev.PutEpoch)
    assert none_of(talk.hear(ev.Silence(False)), ev.PutEpoch)
    assert none_of(talk.tick(POLICY.takeover_after - 1.0), ev.PutEpoch)
    assert only(talk.tick(1.0), ev.PutEpoch)


def test_an_outsider_is_asked_in_after_the_gather_window() -> None:
    talk = Talk()
    talk.run_in(1, "ab")
    talk.change("members", "n", record("n"))
    assert none_of(talk.change("tickets", "n", ticket("n", 2)), ev.Reconfigure)
    assert only(talk.tick(POLICY.gather_window), ev.Reconfigure).why == "joining: n"


def test_an_outsider_that_cannot_reach_a_member_is_not_asked_in_until_it_can() -> None:
    talk = Talk()
    talk.run_in(1, "ab")
    talk.change("members", "n", record("n"))
    lost = Ticket(replica_id="n", incarnation="n1", epoch=2, unreached=("b",))
    assert none_of(talk.change("tickets", "n", lost), ev.Reconfigure)
    assert none_of(talk.tick(POLICY.gather_window + 1.0), ev.Reconfigure)
    assert only(talk.change("tickets", "n", ticket("n", 2)), ev.Reconfigure).why == "joining: n"


def test_if_an_outsider_is_not_admitted_the_wish_is_repeated_less_and_less_often() -> None:
    """Otherwise there would be a new epoch at each step."""
    talk = Talk()
    talk.run_in(1, "ab")
    talk.change("members", "n", record("n"))
    waits = []
    for id in range(2, 7):
        talk.change("tickets", "n", ticket("n", id))
        begun = talk.now
        while none_of(talk.tick(0.5), ev.Reconfigure):
            assert talk.now < begun + 60.0
        waits.append(talk.now - begun)
        talk.hear(ev.Want(version=FRESH, offered=id - 1))
        talk.hold()
        only(talk.change("epoch", "", epoch(id, "ab")), ev.Offer)
    assert waits == sorted(waits)
    assert waits[-1] > 4 * waits[0]
    assert waits[-1] <= POLICY.join_timeout


def test_a_frozen_group_gives_its_keys_up_and_takes_them_again() -> None:
    """Its keeper lives, but nobody should wait for it."""
    talk = Talk()
    talk.run_in(1, "ab")
    effects = talk.hear(ev.Frozen(True))
    assert only(effects, ev.Withdraw)
    assert only(effects, ev.PutAbort).abort.why == "a is frozen"
    assert only(effects, ev.AbortWork)
    talk.hear(ev.Vanished(False))
    assert none_of(talk.tick(5.0), ev.Hold)
    assert only(talk.hear(ev.Frozen(False)), ev.Hold)


def test_a_death_is_proven_and_ends_the_epoch_in_one_transaction() -> None:
    talk = Talk()
    talk.run_in(1, "ab")
    depart = only(talk.hear(ev.Died("SIGKILL", Version(1, 5))), ev.Depart)
    assert depart.departed == Departed(
        replica_id="a", incarnation="a1", how="SIGKILL", host="host-a", version=Version(1, 5)
    )
    assert depart.abort is not None
    assert depart.abort.epoch == 1
    assert only(talk.tick(RETRY_S), ev.Depart) == depart
    assert talk.hear(ev.Vanished(True)) == []
    assert talk.tick(9.0) == []


def test_a_planned_goodbye_ends_nothing_for_the_others() -> None:
    talk = Talk()
    talk.run_in(1, "ab")
    depart = only(talk.hear(ev.Goodbye(planned=True)), ev.Depart)
    assert depart.abort is None
    assert depart.departed.planned


def test_a_new_keeper_goes_on_where_the_dead_one_stopped() -> None:
    talk = Talk()
    running = talk.run_in(3, "ab").epoch
    heir = Talk("a", others="b", current=running)
    effects = heir.hear(ev.Ready(record=record("a"), running=running))
    assert none_of(effects, ev.AbortWork, ev.Offer, ev.PutEpoch)
    ticket_ = only(heir.hear(ev.Want(version=FRESH, failed="x", offered=3)), ev.Hold).ticket
    assert ticket_ is not None
    assert ticket_.epoch == 4, "it must never ask for an epoch again that it has left"


def test_an_operators_request_is_told_once_and_acknowledged_until_it_is_gone() -> None:
    talk = Talk()
    talk.run_in(1, "ab")
    effects = talk.change("control", "drain/a", Control(what="drain", replica_id="a"))
    assert only(effects, ev.Leave).what == "drain"
    assert only(effects, ev.AckControl)
    effects = talk.tick(RETRY_S)
    assert none_of(effects, ev.Leave)
    assert only(effects, ev.AckControl)
    assert none_of(talk.change("control", "drain/a", None), ev.AckControl)


names = st.sampled_from("abc")
versions = st.sampled_from([FRESH, Version(1, 2), Version(2, 2)])
some_epochs = st.builds(
    lambda id, seats: epoch(id, "".join(sorted(seats)), FRESH), st.integers(1, 5), st.sets(names, min_size=1)
)
records = st.builds(lambda n, i: Record(replica_id=n, incarnation=f"{n}{i}"), names, st.integers(1, 2))
tickets = st.builds(lambda n, e, v: ticket(n, e, v), names, st.integers(1, 6), versions)
some_events: st.SearchStrategy[ev.Event] = st.one_of(
    records.map(lambda r: ev.Changed("members", r.replica_id, r, 5)),
    names.map(lambda n: ev.Changed("members", n, None, 6)),
    tickets.map(lambda t: ev.Changed("tickets", t.replica_id, t, 7)),
    some_epochs.map(lambda e: ev.Changed("epoch", "", e, e.id)),
    st.just(ev.Listed("epoch", {})),
    st.just(ev.Listed("members", {})),
    st.integers(1, 5).map(lambda i: ev.Changed("abort", "", Abort(epoch=i), 8)),
    names.map(lambda n: ev.Changed("departed", n, Departed(replica_id=n, incarnation=f"{n}1"), 9)),
    st.builds(ev.Want, version=versions, failed=st.sampled_from(["", "x"]), leaving=st.booleans()),
    st.builds(ev.Frozen, st.booleans()),
    st.builds(ev.Silence, st.booleans()),
    st.sampled_from([ev.Tick(), ev.LeaseLost(), ev.ProposalFailed(), ev.Vanished(False), ev.Held(None)]),
)


@given(st.lists(st.tuples(some_events, st.sampled_from([0.0, 0.1, 1.0, 40.0])), max_size=40))
@settings(max_examples=400, deadline=None)
def test_whatever_it_hears_a_member_keeps_its_promises(story: list[tuple[ev.Event, float]]) -> None:
    """It never goes back, never enters an epoch that it has left or that does not name it, never spins."""
    talk = Talk()
    promised = entered = 0
    for event, pause in story:
        effects = talk.hear(event, pause)
        wake = talk.machine.wake_at()
        assert wake is None or wake > talk.now
        for effect in effects:
            if isinstance(effect, ev.Hold) and effect.ticket is not None:
                assert effect.ticket.epoch > entered
                promised = max(promised, effect.ticket.epoch)
            elif isinstance(effect, ev.Offer):
                assert effect.epoch.id > entered
                assert effect.epoch.id >= promised
                assert effect.epoch.names("a", "a1")
                assert set(effect.records) == {s.replica_id for s in effect.epoch.seats}
                entered = effect.epoch.id
            elif isinstance(effect, ev.PutEpoch) and talk.machine.seen.epoch is not None:
                assert effect.epoch.id > talk.machine.seen.epoch.id


def test_changes_that_come_together_are_reacted_to_as_to_what_they_lead_to() -> None:
    """Hundreds come at once in a large job; what lay in between is history, as after a listing."""
    talk = Talk()
    talk.run_in(1, "abc")
    changes = [
        ev.Changed("members", "b", None, 20),
        ev.Changed("members", "b", record("b"), 21),
        ev.Changed("members", "c", None, 22),
    ]
    suspects = only(talk.machine.handle_all(changes, talk.now), ev.Suspects)
    assert suspects.names == ("c",)
    superseded = [ev.Changed("epoch", "", epoch(n, "ab"), 20 + n) for n in (2, 3)]
    assert only(talk.machine.handle_all(superseded, talk.now), ev.AbortWork).why == "superseded by epoch 3"
