"""Real members in real processes: they are killed, frozen and held up, and the others must go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import Work

from ftkit.errors import ConfigError, GroupError
from ftkit.groups.gloo import ProcessGroupGloo
from ftkit.groups.link import StoreLink
from ftkit.groups.store import RendezvousStore

PROMPT_S = 1.0
"""At once, as far as a busy machine lets one measure it; no test may wait for a timeout of 20 s or more."""

Peers = Callable[[int], list[Any]]
_names = iter(range(10**6))


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    with RendezvousStore() as store:
        yield store


def wait_until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait until a condition holds; fail when it does not within the time."""
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "the condition never came true"
        threading.Event().wait(0.005)


def form(members: list[Any], store: str, name: str = "data") -> None:
    """Form a group of these peers."""
    prefix = f"epoch/{next(_names)}"
    answers = [
        peer.tell("configure", name=name, store=store, prefix=prefix, rank=rank, size=len(members))
        for rank, peer in enumerate(members)
    ]
    for answer in answers:
        assert answer().error == ""


def totals(members: list[Any], name: str = "data", **arguments: Any) -> list[float]:
    """Return what an all-reduce of ones gives on each peer."""
    answers = [peer.tell("sum", name=name, **arguments) for peer in members]
    return [answer().value for answer in answers]


def test_a_timeout_may_be_given_as_torch_and_torchft_do() -> None:
    """A script that moves over keeps its line; none at all means a minute."""
    for given, seconds in (
        ({}, 60.0),
        ({"timeout": timedelta(seconds=30)}, 30.0),
        ({"timeout": 2.5}, 2.5),
        ({"timeout_s": 4}, 4.0),
    ):
        with ProcessGroupGloo(**given) as group:
            assert group.timeout_s == seconds
    with pytest.raises(ConfigError, match="not both"):
        ProcessGroupGloo(timeout=1, timeout_s=1)
    with pytest.raises(ConfigError, match="positive"):
        ProcessGroupGloo(timeout=timedelta(0))


def test_a_group_of_one_needs_no_peer(peers: Peers, store: RendezvousStore) -> None:
    (alone,) = peers(1)
    form([alone], store.address)
    assert totals([alone]) == [1.0]
    assert store.num_keys() <= 1


@pytest.mark.parametrize("size", [2, 3])
def test_members_form_a_group_and_reduce(peers: Peers, store: RendezvousStore, size: int) -> None:
    members = peers(size)
    form(members, store.address)
    assert totals(members) == [size] * size


def test_gloos_thread_interrupts_nobody(peers: Peers, store: RendezvousStore) -> None:
    """It would spin for what those hold whom it has interrupted, until the scheduler's next tick."""
    form(members := peers(2), store.address)
    loops = []
    for comm in Path(f"/proc/{members[0].pid}/task").glob("*/comm"):
        with suppress(OSError):  # that thread has ended
            loops += [int(comm.parent.name)] if comm.read_text() == "gloo_tcp_loop\n" else []
    assert {os.sched_getscheduler(tid) for tid in loops} == {os.SCHED_BATCH}


def test_all_survivors_are_freed_when_one_is_killed(peers: Peers, store: RendezvousStore) -> None:
    """gloo itself frees only the neighbours in the ring; rank 2 of 4 is not one of rank 0."""
    members = peers(4)
    form(members, store.address)
    survivors = [members[0], members[1], members[3]]
    waits = []
    for peer in survivors:
        peer.ask("start", name="data", numel=100_000)
        waits.append(peer.tell("wait", name="data"))
    members[2].kill()
    aborts = [peer.tell("abort", name="data") for peer in survivors]
    assert all(abort().took_s < PROMPT_S for abort in aborts)
    answers = [wait(PROMPT_S) for wait in waits]
    assert {a.error for a in answers} <= {"Aborted", "GroupError"}
    form(survivors, store.address)
    assert totals(survivors) == [3.0] * 3


def test_a_frozen_peer_holds_nobody_up(peers: Peers, store: RendezvousStore) -> None:
    """The frozen peer's connections stay open: no error would come before the timeout."""
    members = peers(3)
    form(members, store.address)
    members[2].signal(signal.SIGSTOP)
    try:
        waits = []
        for peer in members[:2]:
            peer.ask("start", name="data")
            waits.append(peer.tell("wait", name="data"))
        for peer in members[:2]:
            assert peer.tell("abort", name="data", why="rank 2 is gone")().took_s < PROMPT_S
        for wait in waits:
            answer = wait(PROMPT_S)
            assert answer.error == "Aborted"
            assert answer.message == "rank 2 is gone"
        form(members[:2], store.address)
        assert totals(members[:2]) == [2.0, 2.0]
    finally:
        members[2].signal(signal.SIGCONT)
    form(members, store.address)
    assert totals(members) == [3.0] * 3


def test_a_waiting_recv_is_aborted(peers: Peers, store: RendezvousStore) -> None:
    members = peers(2)
    form(members, store.address)
    members[0].ask("start_recv", name="data", src=1)
    wait = members[0].tell("wait", name="data")
    assert members[0].tell("abort", name="data")().took_s < PROMPT_S
    assert wait(PROMPT_S).error == "Aborted"


def test_a_message_arrives(peers: Peers, store: RendezvousStore) -> None:
    members = peers(2)
    form(members, store.address)
    members[0].ask("start_recv", name="data", src=1)
    members[1].ask("send", name="data", dst=0, value=7)
    assert members[0].ask("wait", name="data") == 7.0


def test_an_aborted_collective_no_longer_writes(peers: Peers, store: RendezvousStore) -> None:
    """The tensor is the next step's gradient: a late write would corrupt it silently."""
    members = peers(2)
    form(members, store.address)
    for peer in members:
        peer.ask("start", name="data", numel=20_000_000)
    assert members[0].ask("scribbled_on_after_abort", name="data") is False
    members[1].ask("abort", name="data")


@pytest.mark.parametrize("pause_s", [0.0, 0.005, 0.01, 0.02, 0.03, 0.04])
def test_abort_ends_a_large_collective_at_any_moment(
    peers: Peers, store: RendezvousStore, pause_s: float
) -> None:
    """gloo does not tell an operation whose message is half received that its connection is gone."""
    members = peers(2)
    form(members, store.address)
    for peer in members:
        peer.ask("start", name="data", numel=10_000_000)
    waits = [peer.tell("wait", name="data") for peer in members]
    threading.Event().wait(pause_s)  # the moment itself, not a condition
    assert members[0].tell("abort", name="data")().took_s < PROMPT_S
    assert waits[0](PROMPT_S).error in {"Aborted", ""}
    assert members[1].tell("abort", name="data")().took_s < PROMPT_S
    assert waits[1](PROMPT_S).error in {"Aborted", "GroupError", ""}


def test_abort_ends_a_half_received_message(peers: Peers, store: RendezvousStore) -> None:
    """A heal by send and recv moves gigabytes; its source may freeze in the middle."""
    members = peers(2)
    form(members, store.address)
    members[0].ask("start_recv", name="data", src=1, numel=50_000_000)
    wait = members[0].tell("wait", name="data")
    members[1].tell("send", name="data", dst=0, value=7, numel=50_000_000)
    try:
        threading.Event().wait(0.05)  # somewhere in the middle: the message is 200 MB long
        members[1].signal(signal.SIGSTOP)
        assert members[0].tell("abort", name="data")().took_s < PROMPT_S
        assert wait(PROMPT_S).error == "Aborted"
    finally:
        members[1].kill()


def test_abort_ends_though_gloo_cannot_read_on(peers: Peers, store: RendezvousStore, tmp_path: Path) -> None:
    """One that fails in the middle of a neighbour's message leaves a connection that never closes."""
    members = peers(5)
    where = {"store": store.address, "size": len(members), "folder": str(tmp_path), "num": 40}
    answers = [peer.tell("break_off", name="data", rank=rank, **where) for rank, peer in enumerate(members)]
    for answer in answers:
        said = answer(90)
        assert said.error == "", said.message
        assert said.value < PROMPT_S


def test_a_race_with_what_ended_meanwhile_waits_for_nothing() -> None:
    """Who forgets the collectives that have ended must not wait for the next one, which is in flight."""

    class Ended(Work):
        def is_completed(self) -> bool:
            session.ended(self)  # as gloo's thread does, in this very moment
            return True

        def wait(self, timeout: timedelta | None = None) -> bool:
            return True

    class InFlight(Work):
        def is_completed(self) -> bool:
            return False

        def wait(self, timeout: timedelta | None = None) -> bool:
            raise AssertionError("waited for a collective in flight")

    with ProcessGroupGloo() as group, RendezvousStore() as store:
        group.configure(store.address, "alone", 0, 1, timeout_s=10)
        session = group._current()
        in_flight = InFlight()
        session.pending.extend([Ended(), in_flight])
        session.prune()
        assert list(session.pending) == [in_flight]
        session.pending.clear()


def test_a_planned_change_fails_nobodys_last_collective(peers: Peers, store: RendezvousStore) -> None:
    """All read in one vote that they will change; the fastest must not cut off those still reading it."""
    members = peers(3)
    answers = [
        peer.tell("changes", name="data", num=15, store=store.address, rank=rank, size=3)
        for rank, peer in enumerate(members)
    ]
    for answer in answers:
        said = answer()
        assert said.error == "", said.message
    for peer in members:
        peer.ask("abort", name="data")


def test_foreign_sockets_are_left_alone(peers: Peers, store: RendezvousStore) -> None:
    """The process has other connections, opened and closed by other threads in the same moments."""
    members = peers(2)
    answers = [
        peer.tell("churn", name="data", store=store.address, rank=rank, size=2)
        for rank, peer in enumerate(members)
    ]
    for answer in answers:
        said = answer()
        assert said.error == "", said.message
        assert said.value == 0


def test_collectives_after_an_abort_fail_at_once(peers: Peers, store: RendezvousStore) -> None:
    members = peers(2)
    form(members, store.address)
    members[0].ask("abort", name="data")
    answer = members[0].tell("sum", name="data")()
    assert answer.error == "Aborted"
    assert answer.took_s < PROMPT_S
    assert members[0].ask("error", name="data") == "Aborted"
    members[1].ask("abort", name="data")


def test_two_groups_of_one_process_are_independent(peers: Peers, store: RendezvousStore) -> None:
    """A process has a data group and a control group; they are configured side by side."""
    members = peers(2)
    names = [f"pair-{next(_names)}" for _ in range(2)]
    threads = [threading.Thread(target=form, args=(members, store.address, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    members[0].ask("abort", name=names[0])
    assert totals(members, names[1]) == [2.0, 2.0]
    members[1].ask("abort", name=names[0])
    for peer in members:
        peer.ask("abort", name=names[1])


def test_the_error_names_the_peer_that_did_not_come(peers: Peers, store: RendezvousStore) -> None:
    (peer,) = peers(1)
    answer = peer.tell(
        "configure", name="data", store=store.address, prefix="nobody", rank=0, size=3, timeout_s=0.5
    )()
    assert answer.error == "GroupError"
    assert "did not come within 0.5 s: 1, 2" in answer.message
    assert answer.took_s < 0.5 + PROMPT_S


def test_abort_ends_the_wait_for_a_peer_that_never_comes(peers: Peers, store: RendezvousStore) -> None:
    (peer,) = peers(1)
    configuring = peer.tell("configure", name="data", store=store.address, prefix="x", rank=0, size=2)
    with pytest.raises(Exception):  # noqa: B017, PT011 - no answer yet: it waits, as it should
        configuring(0.2)
    assert peer.tell("abort", name="data")().took_s < PROMPT_S
    answer = configuring(PROMPT_S)
    assert answer.error == "Aborted"
    form([peer], store.address)
    assert totals([peer]) == [1.0]


def test_abort_ends_the_wait_for_a_peer_that_breaks_off_while_connecting(peers: Peers) -> None:
    """gloo then waits for the peer to call, and there is no connection yet that could be cut."""
    (peer,) = peers(1)
    with RendezvousStore() as store:
        threads = peer.ask("usage")["threads"]
        configuring = peer.tell("configure", name="late", store=store.address, prefix="x", rank=0, size=2)
        link = StoreLink(store.address)
        link.connect(time.monotonic() + 20)
        link.join("x", 1, 2)
        ours = link.get("0/0")
        assert b"\x7f\x00\x00\x01" in ours
        # A peer with a higher address is the one that calls: this one never will.
        link.set("0/1", ours.replace(b"\x7f\x00\x00\x01", b"\x7f\x00\x00\x02"))
        with pytest.raises(Exception):  # noqa: B017, PT011 - no answer yet: it waits, as it should
            configuring(0.2)
        assert peer.tell("abort", name="late")().took_s < PROMPT_S
        assert configuring(PROMPT_S).error == "Aborted"
        wait_until(lambda: peer.ask("usage")["threads"] <= threads)
        with pytest.raises(GroupError, match="rank 0 broke off"):
            link.get("never")
        link.close()


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_abort_ends_a_rendezvous_whose_host_is_gone(peers: Peers, how: signal.Signals) -> None:
    peer, host = peers(2)
    address = host.ask("host")
    configuring = peer.tell("configure", name="data", store=address, prefix="x", rank=0, size=2)
    with pytest.raises(Exception):  # noqa: B017, PT011 - no answer yet
        configuring(0.2)
    host.signal(how)
    assert peer.tell("abort", name="data")().took_s < PROMPT_S
    assert configuring(PROMPT_S).error in {"Aborted", "GroupError"}
    host.kill()


def test_a_rendezvous_at_a_frozen_host_ends_in_time(peers: Peers) -> None:
    """The kernel of a frozen host still accepts the connection, and torch would wait for ever."""
    peer, host = peers(2)
    address = host.ask("host")
    host.signal(signal.SIGSTOP)
    try:
        answer = peer.tell(
            "configure", name="data", store=address, prefix="x", rank=0, size=2, timeout_s=0.5
        )(5.0)
        assert answer.error == "GroupError"
        assert "does not answer" in answer.message
        assert answer.took_s < 0.5 + PROMPT_S
        configuring = peer.tell("configure", name="data", store=address, prefix="y", rank=0, size=2)
        with pytest.raises(Exception):  # noqa: B017, PT011 - no answer yet
            configuring(0.1)
        peer.ask("abort", name="data")
        assert configuring(PROMPT_S).error == "Aborted"
    finally:
        host.kill()


def test_a_dead_host_is_an_error_at_once(peers: Peers) -> None:
    (peer,) = peers(1)
    with RendezvousStore() as gone:
        address = gone.address
    answer = peer.tell("configure", name="data", store=address, prefix="x", rank=0, size=2)(10.0)
    assert answer.error == "GroupError"
    assert "cannot be reached" in answer.message
    assert answer.took_s < PROMPT_S


@pytest.mark.parametrize("leave", ["fork", "run_program"])
def test_a_dead_members_orphans_do_not_hide_its_death(
    peers: Peers, store: RendezvousStore, leave: str
) -> None:
    """DataLoader workers outlive a killed trainer, and they inherit its connections."""
    members = peers(2)
    form(members, store.address)
    orphan = members[1].ask(leave)
    try:
        members[0].ask("start", name="data")
        wait = members[0].tell("wait", name="data")
        start = time.monotonic()
        members[1].kill()
        answer = wait(PROMPT_S)
        assert answer.error == "GroupError"
        assert time.monotonic() - start < PROMPT_S
    finally:
        with suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)


def test_a_dead_hosts_orphans_do_not_keep_its_store_open(peers: Peers) -> None:
    """Else the others would connect to a store that nobody serves, and wait."""
    peer, host = peers(2)
    address = host.ask("host")
    orphan = host.ask("fork")
    try:
        host.kill()
        answer = peer.tell("configure", name="data", store=address, prefix="x", rank=0, size=2)(10.0)
        assert answer.error == "GroupError"
        assert "cannot be reached" in answer.message
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_forked_child_cannot_harm_its_parents_group(peers: Peers, store: RendezvousStore) -> None:
    """In a child torch's threads do not exist: freeing the group must neither hang nor cut the parent off."""
    members = peers(2)
    form(members, store.address)
    assert members[0].tell("fork_and_say", name="data")(10.0).value == ["GroupError", "False", "0"]
    assert totals(members) == [2.0, 2.0]


def test_many_epochs_leave_nothing_behind(peers: Peers) -> None:
    """Membership changes for weeks on end; a leak of one thread per epoch would end the job."""
    members = peers(2)
    address = members[0].ask("host")

    def run(first: int, num: int) -> None:
        answers = [
            peer.tell("epochs", store=address, rank=rank, size=2, first=first, num=num)
            for rank, peer in enumerate(members)
        ]
        for answer in answers:
            said = answer(100.0)
            assert said.error == "", said.message

    run(0, 30)
    before = [peer.ask("usage") for peer in members]
    run(30, 270)
    after = [peer.ask("usage") for peer in members]
    for was, now in zip(before, after, strict=True):
        assert now["fds"] <= was["fds"] + 12
        assert now["threads"] <= was["threads"] + 6
        assert now["rss"] <= was["rss"] + 12 * 2**20
    assert members[0].ask("num_keys") <= 10
