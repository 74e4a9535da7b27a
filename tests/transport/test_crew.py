"""Threads that wait for work: they are used again, never lost, and gone in the end."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from transport.crew import IDLE, MAX_IDLE, Crew


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew() as crew:
        yield crew


def idle() -> int:
    return sum(thread.name == IDLE for thread in threading.enumerate())


def test_a_thread_that_has_ended_its_work_takes_the_next(crew: Crew) -> None:
    crew.prepare(1)
    seen: set[int] = set()
    for _ in range(20):
        crew.prepare(1)
        assert crew.start(lambda: seen.add(threading.get_ident()), "work").wait(5.0)
    assert len(seen) <= 2, "one that is about to be idle may just be missed"


def test_work_is_done_side_by_side_however_much_there_is(crew: Crew) -> None:
    num = 3 * MAX_IDLE
    together = threading.Barrier(num)
    tasks = [crew.start(lambda: _meet(together), "work") for _ in range(num)]
    assert all(task.wait(5.0) for task in tasks)


def _meet(together: threading.Barrier) -> None:
    together.wait(5.0)


def test_no_more_threads_wait_than_may(crew: Crew) -> None:
    before = threading.active_count()
    together = threading.Barrier(3 * MAX_IDLE)
    for _ in range(3 * MAX_IDLE):
        crew.start(lambda: _meet(together), "work")
    deadline = threading.Event()
    for _ in range(500):
        if threading.active_count() <= before + MAX_IDLE:
            return
        deadline.wait(0.01)
    pytest.fail(f"{threading.active_count() - before} threads are left")


def test_a_thread_is_named_after_its_work(crew: Crew) -> None:
    names: list[str] = []
    crew.start(lambda: names.append(threading.current_thread().name), "transport-fetch").wait(5.0)
    assert names == ["transport-fetch"]


def test_work_that_fails_has_ended_and_is_told(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for it must not wait for ever."""
    told: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))
    assert crew.start(lambda: [][0], "work").wait(5.0)
    assert crew.start(lambda: None, "work").wait(5.0)
    for thread in [thread for thread in threading.enumerate() if thread.name == "work"]:
        thread.join(5.0)
    assert told == [IndexError]


def test_close_leaves_no_idle_thread_and_waits_for_no_work() -> None:
    before, begun, gate = idle(), threading.Event(), threading.Event()
    with Crew() as crew:
        crew.prepare(3)
        task = crew.start(lambda: _wait(begun, gate), "work")
        assert begun.wait(5.0)
    for thread in [thread for thread in threading.enumerate() if thread.name == IDLE]:
        thread.join(5.0)  # one that was about to be idle
    assert idle() == before
    assert not task.wait(0.0)
    gate.set()
    assert task.wait(5.0)


def _wait(begun: threading.Event, gate: threading.Event) -> None:
    begun.set()
    gate.wait(5.0)


def test_a_forked_child_begins_anew(crew: Crew) -> None:
    """The threads that are idle here are not there; what is given to one of them would never be done."""
    crew.prepare(2)
    child = os.fork()
    if child == 0:
        os._exit(0 if crew.start(lambda: None, "work").wait(5.0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
