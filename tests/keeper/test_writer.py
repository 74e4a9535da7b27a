"""The thread that writes to etcd, and what it spares an etcd that is late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ftkit.core import events as ev
from ftkit.core.model import Record, Ticket
from ftkit.keeper.etcd import Etcd, EtcdSettings
from ftkit.keeper.keys import JobKeys
from ftkit.keeper.lease import LeaseKeeper
from ftkit.keeper.writer import Writer
from tests.keeper.conftest import wait_until

RECORD = Record(replica_id="a", incarnation="1")


class LateEtcd(Etcd):
    """Begins a transaction when it is let, and then carries it out for real."""

    def __init__(self, settings: EtcdSettings) -> None:
        super().__init__(settings)
        self.begun = threading.Semaphore(0)
        self.let = threading.Semaphore(0)

    def txn(self, *arguments: Any, **more: Any) -> Any:
        self.begun.release()
        assert self.let.acquire(timeout=15)
        return super().txn(*arguments, **more)


class Scene:
    """A writer that has begun to put the member's keys."""

    def __init__(self, etcd: LateEtcd, job: str) -> None:
        self.etcd, self.keys = etcd, JobKeys(job)
        self.told: list[ev.Event] = []
        self.lease = LeaseKeeper(etcd, 10, lambda _: None, self.fail, period_s=3.0)
        self.writer = Writer(
            etcd,
            self.keys,
            "a",
            "1",
            self.lease,
            post=self.told.append,
            on_trouble=self.fail,
            on_refused=self.fail,
            on_waiting=lambda _: None,
            readmit=lambda: pytest.fail("nothing to be let in for"),
        )
        self.lease.start()
        wait_until(lambda: self.lease.id)
        self.writer.start()
        self.writer.submit(self.wish(1))
        assert etcd.begun.acquire(timeout=15)

    def fail(self, error: Exception) -> None:
        raise error

    def wish(self, epoch: int, occasion: int = 0) -> ev.Hold:
        return ev.Hold(RECORD, Ticket(replica_id="a", incarnation="1", epoch=epoch), occasion)

    def revision(self) -> int:
        kv = self.etcd.get(self.keys.ticket_of("a"))
        return 0 if kv is None else kv.mod_revision


@pytest.fixture
def scene(etcd_url: str, job: str) -> Iterator[Scene]:
    etcd = LateEtcd(EtcdSettings(endpoints=(etcd_url,)))
    scene = Scene(etcd, job)
    yield scene
    scene.writer.close()
    etcd.let.release()
    scene.lease.close(revoke=True)
    etcd.close()


def test_a_wish_that_is_repeated_while_it_is_carried_out_is_done_once(scene: Scene):
    """A thousand members that have to wait for etcd must not give it twice as much to do."""
    scene.writer.submit(scene.wish(1))
    scene.writer.submit(scene.wish(1))
    scene.etcd.let.release(10)
    wait_until(lambda: scene.told)
    scene.writer.submit(scene.wish(2))  # what comes after it is not lost
    wait_until(lambda: len(scene.told) == 2)
    assert [t.ticket.epoch for t in scene.told if isinstance(t, ev.Held) and t.ticket] == [1, 2]


@pytest.mark.parametrize("then", [(1, 1), (2, 0)], ids=["another occasion", "another ticket"])
def test_a_wish_that_only_looks_like_the_last_is_carried_out(scene: Scene, then: tuple[int, int]):
    """The keys may have vanished since the first was done; only the machine can know."""
    scene.writer.submit(scene.wish(*then))
    scene.etcd.let.release()
    wait_until(lambda: scene.told)
    first = scene.revision()
    assert scene.etcd.begun.acquire(timeout=15)
    scene.etcd.let.release()
    wait_until(lambda: len(scene.told) == 2)
    assert scene.revision() > first > 0
