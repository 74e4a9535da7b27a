"""Each invariant's check catches a bug that is planted for it.

A simulation that finds nothing proves something only if it would have found something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from simulation import keeper, trainer
from simulation.faults import Fault
from simulation.run import Schedule, draw_any, draw_outage, draw_schedule, draw_takeover, draw_wipe, run

from ftkit.core import events as ev
from ftkit.core import machine, plan, quorum, seen, vote
from ftkit.core.machine import Member
from ftkit.core.model import BROKEN, Epoch, Policy, Version

MOST_SEEDS = 1500

Plant = Callable[[pytest.MonkeyPatch], None]


def forget_the_epoch_of_the_last_commit(patch: pytest.MonkeyPatch) -> None:
    """A version is named by the epoch that the member came from, not by the one it commits in."""

    def next_version(self: vote.Lineage) -> Version:
        return Version(max(self.version.epoch, 1), self.version.step + 1)

    patch.setattr(vote.Lineage, "next_version", next_version)


def propose_without_compare(patch: pytest.MonkeyPatch) -> None:
    """The epoch is put whatever stands there."""

    def put_epoch(self: keeper.Keeper, effect: ev.PutEpoch) -> object:
        self.etcd.put("epoch", effect.epoch)
        return "put"

    patch.setattr(keeper.Keeper, "_put_epoch", put_epoch)


def skip_rule_4(patch: pytest.MonkeyPatch) -> None:
    """Whoever is there forms an epoch, whatever became of the members of the last one."""
    patch.setattr(quorum, "_wait_to_replace", lambda *_: None)


def take_over_without_waiting_for_the_state(patch: pytest.MonkeyPatch) -> None:
    """One member of the epoch is enough to go on, even one that has just begun to heal."""
    wait = quorum._wait_to_replace

    def impatient(view: Any, unproven: Any, policy: Policy, now: float, begun: float | None) -> Any:
        return None if begun is not None else wait(view, unproven, policy, now, begun)

    patch.setattr(quorum, "_wait_to_replace", impatient)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A member that etcd has forgotten goes on."""
    patch.setattr(trainer.Trainer, "fenced", lambda self: False)


def trust_old_news(patch: pytest.MonkeyPatch) -> None:
    """Time goes on counting while etcd is silent, and nobody looks whether the missing are back."""

    handle, put = Member.handle, keeper.Keeper._put_epoch
    patch.setattr(
        Member,
        "handle",
        lambda self, e, now: handle(self, ev.Tick() if isinstance(e, ev.Silence) else e, now),
    )
    patch.setattr(
        keeper.Keeper, "_put_epoch", lambda self, e: put(self, msgspec.structs.replace(e, absent=()))
    )


def believe_an_older_record(patch: pytest.MonkeyPatch) -> None:
    """A member key that shows another incarnation is proof, even if it is older than the epoch."""
    patch.setattr(seen.Seen, "_is_behind", lambda self, name: False)


def compare_versions_by_step(patch: pytest.MonkeyPatch) -> None:
    """Two members at one step are taken to hold the same state."""
    original = plan.plan

    def by_step(epoch: Epoch, replica_id: str, *, init_sync: bool = True) -> plan.Plan:
        level = max(s.version.epoch for s in epoch.seats)
        seats = tuple(s._replace(version=Version(level, s.version.step)) for s in epoch.seats)
        best = max(s.version for s in epoch.seats if s.version.step == max(x.version.step for x in seats))
        made = original(msgspec.structs.replace(epoch, seats=seats), replica_id, init_sync=init_sync)
        return msgspec.structs.replace(made, version=best)

    patch.setattr(vote, "plan", by_step)


def half_healed_member_votes(patch: pytest.MonkeyPatch) -> None:
    """The beginning of a heal does not mark the state as broken."""
    patch.setattr(vote.Lineage, "begin_heal", lambda self: self.forget_undecided())


def broken_state_is_a_source(patch: pytest.MonkeyPatch) -> None:
    """An epoch is formed although nobody has a whole state."""
    patch.setattr(quorum, "FRESH", BROKEN)


def effects_are_not_repeated(patch: pytest.MonkeyPatch) -> None:
    """What is asked for once is taken to have happened."""

    def due(self: seen.Repeater, slot: str, effect: object, now: float, *, once: bool = False) -> bool:
        if self._last.get(slot, (None, 0.0, 0.0))[0] == effect:
            return False
        self._last[slot] = (effect, now, 0.0)
        return True

    patch.setattr(seen.Repeater, "due", due)


def tickets_are_not_renewed(patch: pytest.MonkeyPatch) -> None:
    """A member that an epoch leaves out waits for the next one without asking for it."""
    patch.setattr(Member, "_ask_again", lambda self: None)


def outsiders_are_asked_in_at_every_step(patch: pytest.MonkeyPatch) -> None:
    """A member over the limit of max_replicas makes the others form an epoch at each step."""
    original = machine.outsiders

    def tactless(seen_: seen.Seen, running: Epoch, policy: Policy) -> dict[str, float]:
        return original(seen_, running, msgspec.structs.replace(policy, max_replicas=0))

    patch.setattr(machine, "outsiders", tactless)
    patch.setattr(Member, "_count_fruitless", lambda self, epoch, now: None)


def wish_that_crosses_an_offer_counts(patch: pytest.MonkeyPatch) -> None:
    """Ranks that asked again run in the epoch that was on its way, their machine in the next."""
    original = Member._on_want
    patch.setattr(
        Member,
        "_on_want",
        lambda self, want, now: original(self, msgspec.structs.replace(want, offered=None), now),
    )


def suspects_are_taken_for_dead(patch: pytest.MonkeyPatch) -> None:
    """A member key that vanishes ends the epoch, proof or no proof."""
    original = machine.end_of

    def hasty(seen_: seen.Seen, replica_id: str, running: Epoch) -> str | None:
        gone = [s.replica_id for s in running.seats if s.replica_id not in seen_.members]
        return original(seen_, replica_id, running) or (f"{gone[0]} vanished" if gone else None)

    patch.setattr(machine, "end_of", hasty)


def wiped_epoch_is_not_put_back(patch: pytest.MonkeyPatch) -> None:
    """Who runs in an epoch that etcd has forgotten does not remind it."""
    patch.setattr(Member, "_restore_epoch", lambda self, now, out: False)


def unrelated_epoch_is_taken_for_ours(patch: pytest.MonkeyPatch) -> None:
    """In a wiped etcd, an epoch of newcomers that happens to have our number is believed to be ours."""
    original = Member._restore_epoch

    def restore(self: Member, now: float, out: list[ev.Effect]) -> bool:
        epoch, last = self.seen.epoch, self.last_epoch
        return not (epoch is not None and last is not None and epoch.id == last.id) and original(
            self, now, out
        )

    patch.setattr(Member, "_restore_epoch", restore)


def several(draw: Callable[..., Schedule], **more: Any) -> Callable[[], Iterable[Schedule]]:
    """Draw schedules of one kind."""
    return lambda: (draw(seed, **more) for seed in range(MOST_SEEDS))


def scripted(*faults: Fault, **more: Any) -> Callable[[], Iterable[Schedule]]:
    """Repeat one story with other luck."""
    return lambda: (Schedule(seed=seed, faults=faults, window=22.0, **more) for seed in range(MOST_SEEDS))


RETURN = scripted(
    Fault(3.0, "cut", 0, 3.0),
    Fault(3.2, "join"),
    Fault(4.5, "suspend machine", 1, 10.0),
    Fault(14.0, "slow watches", 0, 6.0),
    num_replicas=1,
)
"""A member is gone, a newcomer waits to replace it and is suspended; meanwhile the member comes back."""

REPLACED = scripted(
    Fault(1.0, "join"),
    Fault(3.0, "slow members", 1, 6.0),
    Fault(3.1, "lose machine", 0),
    *(Fault(4.0 + 0.2 * i, "slow watches", 0, 3.0) for i in range(10)),
    num_replicas=1,
    max_replicas=1,
)
"""A member is started again and forms an epoch, while a spare has yet to hear that it was gone."""

CROSSING = scripted(
    Fault(3.0, "isolate", 1, 6.0),
    Fault(3.05, "late writes", 0, 8.0),
    Fault(3.1, "busy keeper", 0, 8.0),
    num_replicas=2,
)
"""A member is lost; the other's ranks ask once more while the next epoch is on its way to them."""

CLASH = scripted(
    Fault(3.8, "slow watches", 0, 2.5),
    Fault(4.0, "wipe", 0, 0.2),
    Fault(4.1, "join"),
    num_replicas=1,
    expect="wipe",
)
"""Etcd loses epoch 1, and a newcomer that knows nothing of it forms an epoch 1 of its own."""

ANY = several(draw_any)
TAKEOVERS = several(draw_takeover)
HEALS = several(draw_schedule, kinds=["kill source", "bad heals", "crash", "join"])
WRITES = several(draw_schedule, kinds=["lost writes", "unanswered writes", "crash", "join"])
LOST = several(draw_schedule, kinds=["suspend machine", "isolate", "isolate most", "bad heals"], most=12)
SPLITS = several(draw_schedule, kinds=["split votes", "island", "suspend machine", "isolate", "crash"])

BUGS: list[tuple[Plant, str, Callable[[], Iterable[Schedule]]]] = [
    (forget_the_epoch_of_the_last_commit, "I1", SPLITS),
    (take_over_without_waiting_for_the_state, "I1", LOST),
    (propose_without_compare, "I2", ANY),
    (skip_rule_4, "I3", TAKEOVERS),
    (no_fence, "I3", TAKEOVERS),
    (trust_old_news, "I3", RETURN),
    (believe_an_older_record, "I3", REPLACED),
    (compare_versions_by_step, "I4", SPLITS),
    (half_healed_member_votes, "I5", HEALS),
    (broken_state_is_a_source, "I5", HEALS),
    (effects_are_not_repeated, "I6", WRITES),
    (tickets_are_not_renewed, "I6", ANY),
    (outsiders_are_asked_in_at_every_step, "I6", ANY),
    (wish_that_crosses_an_offer_counts, "I6", CROSSING),
    (suspects_are_taken_for_dead, "I7", several(draw_outage)),
    (wiped_epoch_is_not_put_back, "I8", several(draw_wipe)),
    (unrelated_epoch_is_taken_for_ours, "I8", CLASH),
]


@pytest.mark.parametrize(
    ("plant", "invariant", "schedules"), BUGS, ids=[f"{b[1]}-{b[0].__name__}" for b in BUGS]
)
def test_the_check_of_each_invariant_catches_its_bug(
    plant: Plant,
    invariant: str,
    schedules: Callable[[], Iterable[Schedule]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bug may break other invariants on the way; what counts is that this one is seen to break."""
    plant(monkeypatch)
    seen_ = set()
    for schedule in schedules():
        outcome = run(schedule, member_class=machine.Member)
        seen_.add(outcome.invariant)
        assert outcome.invariant != "error", outcome.violation
        if outcome.invariant == invariant:
            return
    pytest.fail(f"no violation of {invariant} in {MOST_SEEDS} schedules, only of {sorted(seen_)}")
