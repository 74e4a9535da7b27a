"""Votes over plain sockets: every member reads the same answer, and a failure reaches all at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ftkit.errors import Aborted, GroupError
from ftkit.groups import ballots
from ftkit.groups.ballots import BallotBox
from ftkit.groups.store import RendezvousStore, split_address

Make = Callable[..., list[BallotBox]]


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    with RendezvousStore() as store:
        yield store


@pytest.fixture
def make() -> Iterator[Callable[..., list[BallotBox]]]:
    """Make boxes that are closed when the test ends."""
    made: list[BallotBox] = []

    def boxes(size: int, timeout_s: float = 10) -> list[BallotBox]:
        new = [BallotBox(timeout_s=timeout_s) for _ in range(size)]
        made.extend(new)
        return new

    yield boxes
    for box in made:
        box.close()


def on_all(size: int, fn: Callable[[int], object]) -> list[object]:
    with ThreadPoolExecutor(size) as pool:
        return [f.result(30) for f in [pool.submit(fn, rank) for rank in range(size)]]


def form(store: RendezvousStore, boxes: list[BallotBox], prefix: str) -> None:
    size = len(boxes)
    on_all(size, lambda r: boxes[r].configure(store.address, prefix, r, size, timeout_s=10))


@pytest.mark.parametrize("size", [1, 2, 3, 40])
def test_all_members_read_the_same_answer(store: RendezvousStore, make: Make, size: int) -> None:
    """Also when the tree has more than one level."""
    boxes = make(size, 10)
    for epoch in range(2):
        form(store, boxes, f"e{epoch}")
        for _ in range(3):
            answers = on_all(size, lambda r: boxes[r].highest([r, -r, 7]))
            assert answers == [[size - 1, 0, 7]] * size
        totals = on_all(size, lambda r: boxes[r].total(0.1 * r))
        assert len(set(totals)) == 1
        assert totals[0] == pytest.approx(0.1 * size * (size - 1) / 2)
    for box in boxes:
        box.close()
    assert store.num_keys() <= 1


def test_abort_frees_a_vote_and_all_the_others(store: RendezvousStore, make: Make) -> None:
    """Whoever leaves closes its connections: nobody needs to be told by anyone else."""
    boxes = make(4, 30)
    form(store, boxes, "a")

    def vote(rank: int) -> object:
        if rank == 3:  # never votes
            while boxes[0].waiting_since() is None:
                time.sleep(0.001)
            begun = time.monotonic()
            boxes[3].abort("enough")
            return begun
        with pytest.raises(GroupError):
            boxes[rank].highest([1])
        return time.monotonic()

    *ends, begun = on_all(4, vote)
    assert max(float(str(e)) for e in ends) - float(str(begun)) < 0.5
    with pytest.raises(Aborted, match="enough"):
        boxes[3].highest([1])
    form(store, boxes[:3], "b")
    assert on_all(3, lambda r: boxes[r].highest([r])) == [[2]] * 3


def test_who_has_the_answer_and_is_stuck_elsewhere_waits_for_nobody(
    store: RendezvousStore, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a signal handler, which runs when the call that waited has returned: the keeper must know."""
    boxes = make(2)
    form(store, boxes, "stuck")
    stuck, go_on = threading.Event(), threading.Event()
    original = ballots._receive

    def receive_and_hang(sock: socket.socket, nbytes: int) -> bytes:
        data = original(sock, nbytes)
        if threading.current_thread() is voter:
            stuck.set()
            go_on.wait(10)
        return data

    monkeypatch.setattr(ballots, "_receive", receive_and_hang)
    answers: list[list[int]] = []
    voter = threading.Thread(target=lambda: answers.append(boxes[1].highest([2])))
    voter.start()
    while boxes[1].waiting_since() is None:
        assert not stuck.is_set()
    assert boxes[0].highest([5]) == [5]
    assert stuck.wait(10)
    assert boxes[1].waiting_since() is None
    go_on.set()
    voter.join()
    assert answers == [[5]]


def test_a_late_vote_is_an_error_after_the_time_given(store: RendezvousStore, make: Make) -> None:
    boxes = make(3, 30)
    form(store, boxes, "t")
    begun = time.monotonic()
    with pytest.raises(GroupError, match="did not vote"):
        boxes[0].highest([1], timeout_s=0.2)
    assert 0.1 < time.monotonic() - begun < 5


def test_members_that_vote_on_different_things_get_an_error(store: RendezvousStore, make: Make) -> None:
    """One has ended its training while the other votes: that must not pass for an answer."""
    boxes = make(2, 10)
    form(store, boxes, "d")

    def vote(rank: int) -> object:
        with pytest.raises(GroupError):
            boxes[rank].highest([1] * (rank + 1))
        return None

    on_all(2, vote)


def test_abort_ends_a_configure_in_which_a_peer_never_comes(store: RendezvousStore, make: Make) -> None:
    (box,) = make(1, 30)
    threading.Timer(0.2, box.abort, ("no more",)).start()
    begun = time.monotonic()
    with pytest.raises(Aborted, match="no more"):
        box.configure(store.address, "never", 0, 2, timeout_s=30)
    assert time.monotonic() - begun < 2
    with pytest.raises(GroupError, match="did not come"):
        box.configure(store.address, "never again", 0, 2, timeout_s=0.3)


def test_a_stranger_takes_nobodys_place(store: RendezvousStore, make: Make) -> None:
    """Garbage on the listening port is thrown out, and the member that comes later is let in."""
    boxes = make(2, 10)

    def root() -> None:
        boxes[0].configure(store.address, "s", 0, 2, timeout_s=20)

    thread = threading.Thread(target=root)
    thread.start()
    while not boxes[0]._opening:
        time.sleep(0.001)
    _, port = split_address(f"x:{boxes[0]._opening[0].getsockname()[1]}")
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n" * 3, os.urandom(20)):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(garbage)
    boxes[1].configure(store.address, "s", 1, 2, timeout_s=20)
    thread.join()
    assert on_all(2, lambda r: boxes[r].highest([r])) == [[1], [1]]


def test_strangers_that_say_nothing_hold_up_nobody(store: RendezvousStore, make: Make) -> None:
    """Read one after the other, each would cost the members the time that it is given."""
    boxes = make(2, 10)
    thread = threading.Thread(target=lambda: boxes[0].configure(store.address, "s", 0, 2, timeout_s=20))
    thread.start()
    while not boxes[0]._opening:
        time.sleep(0.001)
    address = boxes[0]._opening[0].getsockname()
    strangers = [socket.create_connection(address) for _ in range(200)]
    for stranger in strangers[::2]:
        stranger.sendall(b"half a greet")
    boxes[1].configure(store.address, "s", 1, 2, timeout_s=20)
    thread.join()
    assert on_all(2, lambda r: boxes[r].highest([r])) == [[1], [1]]
    for stranger in strangers:
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):  # what it said was not read to the end
            assert stranger.recv(1) == b""
        stranger.close()


def test_sockets_stay_flat_over_many_epochs(store: RendezvousStore, make: Make) -> None:
    boxes = make(3, 10)
    form(store, boxes, "first")
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for epoch in range(300):
        form(store, boxes, f"e{epoch}")
        if epoch % 2:
            for box in boxes:
                box.abort("next")
    assert len(os.listdir("/proc/self/fd")) <= before[0] + 2
    assert threading.active_count() <= before[1] + 1


PEER = """
import sys, os, time
from ftkit.groups.ballots import BallotBox
box = BallotBox(timeout_s=60)
box.configure(sys.argv[1], "p", 1, 2, timeout_s=20)
box.highest([1])
if os.fork() == 0:
    time.sleep(60)  # a DataLoader worker that outlives its parent
    os._exit(0)
print("ready", flush=True)
time.sleep(60)
"""


def test_the_death_of_a_peer_is_known_at_once_although_its_child_lives(
    store: RendezvousStore, make: Make
) -> None:
    """A forked child holds no end of the connections."""
    with subprocess.Popen(
        [sys.executable, "-c", PEER, store.address], stdout=subprocess.PIPE, start_new_session=True
    ) as peer:
        try:
            (box,) = make(1, 60)
            box.configure(store.address, "p", 0, 2, timeout_s=20)
            box.highest([0])
            assert peer.stdout is not None
            assert peer.stdout.readline() == b"ready\n"
            peer.kill()
            begun = time.monotonic()
            with pytest.raises(GroupError):
                box.highest([0])
            assert time.monotonic() - begun < 2
        finally:
            os.killpg(peer.pid, signal.SIGKILL)
