"""The six rules of epoch formation, one by one, and against a dumb twin."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from twin import twin

from ftkit.core.model import BROKEN, FRESH, Departed, Epoch, Policy, Record, Seat, Ticket, Version
from ftkit.core.quorum import Propose, View, Wait, decide, obituary, proposers, still_waits

POLICY = Policy(join_timeout=10.0, gather_window=1.0, takeover_after=30.0)
V = Version


def record(name: str, incarnation: str = "1") -> Record:
    return Record(replica_id=name, incarnation=incarnation)


def ticket(name: str, epoch: int, version: Version = FRESH, incarnation: str = "1", **more: Any) -> Ticket:
    return Ticket(replica_id=name, incarnation=incarnation, epoch=epoch, version=version, **more)


def epoch(id: int, seats: dict[str, Version], **more: Any) -> Epoch:
    return Epoch(id=id, seats=tuple(Seat(r, "1", v) for r, v in seats.items()), **more)


def view(live: str, tickets: list[Ticket], current: Epoch | None = None, **more: Any) -> View:
    """Build a view in which the letters of `live` hold member keys, and tickets stand since 0."""
    table = {t.replica_id: t for t in tickets}
    more.setdefault("tickets_seen", dict.fromkeys(table, 0.0))
    return View(members={r: record(r) for r in live}, tickets=table, epoch=current, **more)


def names(decision: Propose | Wait) -> str:
    """Return the letters of the members proposed; fail when none are."""
    assert isinstance(decision, Propose), decision
    return "".join(s.replica_id for s in decision.seats)


def reason(decision: Propose | Wait) -> str:
    assert isinstance(decision, Wait), decision
    return decision.reason


def test_the_first_epoch_waits_for_min_replicas_and_then_for_those_who_start_together() -> None:
    policy = Policy(min_replicas=2, gather_window=1.0)
    one = view("a", [ticket("a", 1)])
    assert "1 of at least 2" in reason(decide(one, policy, 0.0))
    two = view("ab", [ticket("a", 1), ticket("b", 1)], tickets_seen={"a": 0.0, "b": 5.0})
    assert decide(two, policy, 5.5) == Wait(reason="gathering replica groups for 1 s", until=6.0)
    assert names(decide(two, policy, 6.0)) == "ab"


def test_rule_1_only_live_members_with_a_ticket_for_the_next_epoch_are_candidates() -> None:
    current = epoch(7, {"a": V(6, 9), "b": V(6, 9)})
    stale = view("ab", [ticket("a", 8, V(7, 9)), ticket("b", 7, V(6, 9))], current)
    assert "waiting for b of epoch 7 to stop" in reason(decide(stale, POLICY, 1.0))
    other = view("a", [ticket("a", 8, V(7, 9)), ticket("b", 8, V(7, 9))], current)
    assert names(decide(other, POLICY, 1.0)) == "a"
    restarted = view("a", [ticket("a", 8, V(7, 9), incarnation="0")], current)
    assert "no member asks" in reason(decide(restarted, POLICY, 1.0))


def test_rule_2_a_live_member_is_waited_for_but_not_for_ever() -> None:
    """A keeper may live while its trainer hangs."""
    current = epoch(7, {"a": V(6, 9), "b": V(6, 9)})
    seen = view("ab", [ticket("a", 8, V(7, 9))], current)
    decision = decide(seen, POLICY, 3.0)
    assert reason(decision) == "waiting for b of epoch 7 to stop, 3.0 s of 10 s"
    assert isinstance(decision, Wait)
    assert decision.until == 10.0
    assert names(decide(seen, POLICY, 10.0)) == "a"


def test_rule_2_nobody_waits_for_one_who_leaves() -> None:
    current = epoch(7, {"a": V(6, 9), "b": V(6, 9)})
    seen = view("ab", [ticket("a", 8, V(7, 9)), ticket("b", 8, V(7, 9), leaving=True)], current)
    assert names(decide(seen, POLICY, 0.0)) == "a"


def test_rule_3_too_few_form_no_epoch() -> None:
    current = epoch(7, {"a": V(6, 9), "b": V(6, 9)})
    seen = view("a", [ticket("a", 8, V(7, 9))], current)
    assert "1 of at least 2" in reason(decide(seen, Policy(min_replicas=2), 99.0))


def test_rule_4_strangers_wait_until_a_vanished_member_must_have_fenced_itself() -> None:
    """I3: without proof of death it may still be committing."""
    current = epoch(7, {"a": V(6, 9)})
    seen = view("b", [ticket("b", 8)], current, gone_since={"a": 100.0})
    decision = decide(seen, POLICY, 110.0)
    assert isinstance(decision, Wait)
    assert decision.until == 130.0
    taken = decide(seen, POLICY, 130.0)
    assert names(taken) == "b"
    assert isinstance(taken, Propose)
    assert taken.absent == ("a",)


def test_rule_4_proof_of_death_saves_the_wait() -> None:
    current = epoch(7, {"a": V(6, 9)})
    dead = {"a": Departed(replica_id="a", incarnation="1", how="SIGKILL")}
    assert names(decide(view("b", [ticket("b", 8)], current, departed=dead), POLICY, 5.0)) == "b"


def test_rule_4_a_new_incarnation_is_proof_unless_it_is_old_news() -> None:
    """The watch of the member keys may lag behind that of the epoch that names a newer incarnation."""
    current = epoch(7, {"a": V(6, 9)})
    members = {"a": record("a", "2"), "b": record("b")}
    asked = {"b": ticket("b", 8)}
    seen = View(members=members, tickets=asked, epoch=current, tickets_seen={"b": 0.0})
    assert names(decide(seen, POLICY, 5.0)) == "b"
    behind = View(members=members, tickets=asked, epoch=current, behind={"a"})
    assert "disappeared without proof" in reason(decide(behind, POLICY, 5.0))


def test_rule_4_strangers_never_replace_members_that_are_alive() -> None:
    current = epoch(7, {"a": V(6, 9)})
    decision = decide(view("ab", [ticket("b", 8)], current), POLICY, 1e6)
    assert decision == Wait(reason="epoch 7 is held by a, who did not ask for a new one")


def test_rule_4_one_who_has_not_healed_yet_waits_for_those_who_have_the_state() -> None:
    """I1: otherwise a short partition in the middle of a heal throws the whole training away."""
    current = epoch(8, {"a": V(7, 100), "b": FRESH})
    seen = view("b", [ticket("b", 9, BROKEN)], current, gone_since={"a": 50.0})
    assert "no live member has a whole state" in reason(decide(seen, POLICY, 60.0))
    seen = view("bc", [ticket("b", 9, BROKEN), ticket("c", 9)], current, gone_since={"a": 50.0})
    assert "only a had the state of epoch 8" in reason(decide(seen, POLICY, 60.0))
    assert names(decide(seen, POLICY, 80.0)) == "bc"


def test_rule_4_a_newcomer_with_the_state_that_the_epoch_began_with_does_not_stand_in_for_it() -> None:
    """I1: a went on from step 100 while c, restored from a checkpoint, is still there."""
    current = epoch(8, {"a": V(7, 100), "b": FRESH})
    tickets = [ticket("b", 9, BROKEN), ticket("c", 9, V(7, 100))]
    seen = view("bc", tickets, current, gone_since={"a": 50.0})
    assert "only a had the state of epoch 8" in reason(decide(seen, POLICY, 60.0))


def test_rule_5_shrink_only_leaves_newcomers_out_if_enough_members_remain() -> None:
    current = epoch(7, {"a": V(6, 9), "b": V(6, 9)})
    tickets = [ticket("a", 8, V(7, 9), shrink_only=True), ticket("c", 8)]
    assert names(decide(view("ac", tickets, current), POLICY, 0.0)) == "a"
    assert names(decide(view("ac", tickets, current), Policy(min_replicas=2), 0.0)) == "ac"


def test_rule_5_a_newcomer_that_asks_to_shrink_does_not_keep_itself_out() -> None:
    """It asked when it was a member, and was left out of the epoch that followed."""
    current = epoch(7, {"a": V(6, 9)})
    tickets = [ticket("a", 8, V(7, 9)), ticket("c", 8, V(6, 9), shrink_only=True)]
    assert names(decide(view("ac", tickets, current), POLICY, 0.0)) == "ac"


def test_rule_6_the_new_number_is_above_all_that_candidates_have_lived_or_heard_of() -> None:
    """A job restored from a checkpoint into an empty etcd must not fall behind its own past."""
    decision = decide(view("ab", [ticket("a", 1, V(41, 9)), ticket("b", 50)]), POLICY, 9.0)
    assert isinstance(decision, Propose)
    assert decision.id == 50


def test_spares_are_left_out_but_never_all_who_have_the_newest_state() -> None:
    current = epoch(7, {"a": V(6, 9), "b": V(6, 9)})
    policy = Policy(max_replicas=2, join_timeout=0.0)
    tickets = [ticket("a", 8, V(7, 9)), ticket("b", 8, V(7, 9)), ticket("c", 8, V(6, 9))]
    assert names(decide(view("abc", tickets, current), policy, 0.0)) == "ab"
    tickets = [ticket("a", 8, BROKEN), ticket("b", 8, V(6, 9)), ticket("c", 8, V(7, 10))]
    assert names(decide(view("abc", tickets, current), policy, 0.0)) == "ac"


def test_after_a_clash_of_numbers_an_equal_version_of_strangers_is_not_trusted() -> None:
    """I8: a wiped etcd let an unrelated job count up to the same epoch and step."""
    current = epoch(2, {"a": V(1, 5)}, restored=True)
    tickets = [ticket("a", 3, V(1, 5)), ticket("n", 3, V(1, 5))]
    assert names(decide(view("an", tickets, current), POLICY, 0.0)) == "a"
    tickets = [ticket("a", 3, V(1, 5)), ticket("n", 3, V(1, 4))]
    assert names(decide(view("an", tickets, current), POLICY, 0.0)) == "an"


def test_proposers_are_the_first_live_members_of_the_epoch_or_else_the_lowest_names() -> None:
    current = epoch(7, dict.fromkeys("bcdef", V(6, 9)))
    assert proposers(view("acdef", [], current)) == ("c", "d", "e")
    assert proposers(view("hgaz", [], current)) == ("a", "g", "h")
    assert proposers(view("", [], current)) == ()


def test_an_obituary_needs_this_very_incarnation() -> None:
    seat = Seat("a", "1", FRESH)
    other = {"a": Departed(replica_id="a", incarnation="0", how="exit 1")}
    assert obituary(view("a", [], departed=other), seat) is None
    assert obituary(View(members={"a": record("a", "2")}), seat) == "was started again"


versions = st.sampled_from([BROKEN, FRESH, V(1, 3), V(2, 3), V(2, 4)])
flags = st.sampled_from([False, False, False, True])
tokens = st.sampled_from("111122")


@st.composite
def views(draw: st.DrawFn) -> View:
    """Draw views that need not make sense: the functions must agree on all."""
    some = st.lists(st.sampled_from("abcd"), unique=True)
    live, asking, seated = draw(some), draw(some), draw(some)
    tickets = {
        r: Ticket(
            replica_id=r,
            incarnation=draw(tokens),
            epoch=draw(st.integers(1, 5)),
            version=draw(versions),
            leaving=draw(flags),
            shrink_only=draw(flags),
        )
        for r in asking
    }
    seats = tuple(Seat(r, draw(tokens), draw(versions)) for r in sorted(seated))
    times = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 40).map(float))
    return View(
        members={r: record(r, draw(tokens)) for r in live},
        tickets=tickets,
        departed={r: Departed(replica_id=r, incarnation=draw(tokens)) for r in draw(some)},
        epoch=Epoch(id=draw(st.integers(1, 4)), seats=seats, restored=draw(flags)) if seats else None,
        tickets_seen=draw(times),
        gone_since=draw(times),
        behind=frozenset(draw(some)),
    )


policies = st.builds(
    Policy,
    min_replicas=st.integers(1, 3),
    max_replicas=st.sampled_from([0, 0, 1, 2, 3]),
    join_timeout=st.just(10.0),
    gather_window=st.just(1.0),
    takeover_after=st.just(30.0),
)


@given(views(), policies, st.integers(0, 80).map(float))
@settings(max_examples=1500, deadline=None)
def test_the_dumb_twin_decides_the_same(seen: View, policy: Policy, now: float) -> None:
    """Two ways to say one thing; where they differ, one of them is wrong."""
    decision = decide(seen, policy, now)
    if isinstance(decision, Propose):
        assert twin(seen, policy, now) == ("propose", decision.id, (decision.seats, decision.absent))
    else:
        assert twin(seen, policy, now) == ("wait", decision.until, None)
        assert decision.reason


@given(views(), policies, st.integers(0, 80).map(float))
@settings(max_examples=500, deadline=None)
def test_a_wait_that_names_a_time_is_over_by_then(seen: View, policy: Policy, now: float) -> None:
    """Otherwise the machine would wake up for nothing, again and again."""
    dated = {**dict.fromkeys("abcd", 0.0), **seen.tickets_seen, **seen.gone_since}
    seen = msgspec.structs.replace(seen, tickets_seen=dated, gone_since=dated)
    for _ in range(4):
        decision = decide(seen, policy, now)
        if isinstance(decision, Propose) or decision.until is None:
            return
        assert decision.until > now
        now = decision.until
    raise AssertionError(f"still waiting: {decision}")


@given(views(), views(), policies, st.integers(0, 40).map(float), st.integers(0, 12).map(float))
@settings(max_examples=1500, deadline=None)
def test_what_still_waits_would_be_decided_so(
    before: View, after: View, policy: Policy, now: float, more: float
) -> None:
    """Whatever else has changed meanwhile: the short way must not hold up an epoch that could be."""
    # As in the machine: the epoch is the same, and no ticket has stood for longer than it had before.
    dates = {r: max(t, before.tickets_seen.get(r, now)) for r, t in after.tickets_seen.items()}
    asking = dict.fromkeys(after.tickets, now + more) | dates
    after = msgspec.structs.replace(after, epoch=before.epoch, tickets_seen=asking)
    decision = decide(before, policy, now)
    if isinstance(decision, Wait) and still_waits(after, decision, now + more):
        assert isinstance(decide(after, policy, now + more), Wait)


def test_many_who_stop_one_after_the_other_are_looked_at_two_by_two() -> None:
    current = epoch(7, dict.fromkeys("abcd", V(6, 9)))
    first = view("abcd", [ticket("a", 8)], current)
    wait = decide(first, POLICY, 1.0)
    assert isinstance(wait, Wait)
    assert still_waits(view("abcd", [ticket("a", 8), ticket("b", 8)], current), wait, 2.0)
    assert not still_waits(first, wait, 10.0)  # it has taken too long
    assert not still_waits(view("abc", [ticket("a", 8)], current), wait, 2.0)  # whom it waited for is gone
    assert not still_waits(view("bcd", [ticket("b", 8)], current), wait, 2.0)  # who asked is gone
    everybody = view("abcd", [ticket(r, 8) for r in "abcd"], current)
    assert not still_waits(everybody, wait, 2.0)
    assert names(decide(everybody, POLICY, 2.0)) == "abcd"


@given(views(), policies, st.integers(0, 80).map(float))
@settings(max_examples=500, deadline=None)
def test_a_proposal_is_sane(seen: View, policy: Policy, now: float) -> None:
    """Sorted, live, enough, not too many, numbered above all before, and with a whole state."""
    decision = decide(seen, policy, now)
    if isinstance(decision, Wait):
        return
    ids = [s.replica_id for s in decision.seats]
    assert ids == sorted(set(ids))
    assert len(ids) >= policy.min_replicas
    assert not policy.max_replicas or len(ids) <= policy.max_replicas
    assert all(seen.members[s.replica_id].incarnation == s.incarnation for s in decision.seats)
    assert all(decision.id >= seen.tickets[r].epoch > seen.tickets[r].version.epoch - 6 for r in ids)
    assert seen.epoch is None or decision.id > seen.epoch.id
    assert max(s.version for s in decision.seats) >= FRESH


def parted(versions: dict[str, Version], apart: dict[str, str], **policy: Any) -> Propose | Wait:
    """Let all members of epoch 7 ask for the next; `apart` says whom each of them cannot reach."""
    current = epoch(7, dict.fromkeys(versions, V(6, 9)))
    tickets = [ticket(r, 8, v, unreached=tuple(apart.get(r, ""))) for r, v in versions.items()]
    return decide(view("".join(versions), tickets, current), Policy(**policy), 0.0)


def test_those_who_cannot_reach_each_other_are_not_put_together_again() -> None:
    """I6: one machine without a network must not keep all others from training."""
    equal = dict.fromkeys("abcd", V(6, 9))
    assert names(parted(equal, {"c": "abd", "a": "c", "b": "c", "d": "c"})) == "abd"
    assert names(parted(equal, {"a": "bcd"})) == "bcd", "it is the only one to say so"
    assert names(parted(equal, {"a": "cd", "b": "cd", "c": "ab", "d": "ab"})) == "ab"
    assert names(parted(equal, {"a": "x"})) == "abcd", "whoever is not there parts nobody"


def test_the_newest_state_is_not_left_out_for_a_network() -> None:
    """I1: what one member alone has committed is worth more than the greater number."""
    ahead = {"a": V(6, 9), "b": V(6, 9), "c": V(7, 10)}
    assert names(parted(ahead, {"c": "ab"})) == "c"
    assert names(parted(ahead, {"c": "a"})) == "bc"


def test_when_too_few_would_remain_all_meet_again() -> None:
    assert names(parted(dict.fromkeys("abc", V(6, 9)), {"a": "bc", "b": "ac"}, min_replicas=2)) == "abc"


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(0, 2), min_size=1),
    st.dictionaries(st.sampled_from("abcde"), st.sets(st.sampled_from("abcde"))),
    st.integers(1, 3),
)
@settings(deadline=None)
def test_all_meet_or_all_who_meet_can_reach_each_other(
    steps: dict[str, int], apart: dict[str, set[str]], least: int
) -> None:
    versions = {r: V(6, step) for r, step in steps.items()}
    current = epoch(7, dict.fromkeys(steps, V(6, 0)))
    tickets = [ticket(r, 8, v, unreached=tuple(sorted(apart.get(r, ())))) for r, v in versions.items()]
    decision = decide(view("".join(steps), tickets, current), Policy(min_replicas=least), 0.0)
    if len(steps) < least:
        assert isinstance(decision, Wait)
        return
    chosen = names(decision)
    assert len(chosen) >= least
    assert max(versions.values()) in {versions[r] for r in chosen}
    if set(chosen) != set(steps):
        assert not any(b in apart.get(a, ()) for a in chosen for b in chosen if a != b)
