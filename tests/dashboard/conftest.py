"""What the tests of the dashboard share: a job's keys in a real etcd."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from ftkit.core.model import Epoch, JobConfig, Record, Seat, Version
from ftkit.keeper.etcd import Etcd, EtcdSettings

DEADLINE_S = 30.0

Put = Callable[[str, object], None]


def eventually(condition: Callable[[], object], what: str, within_s: float = DEADLINE_S) -> None:
    """Wait until the condition holds, or fail and say what did not happen."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)


@pytest.fixture
def etcd(etcd_url: str) -> Iterator[Etcd]:
    with Etcd(EtcdSettings(endpoints=(etcd_url,))) as client:
        yield client


@pytest.fixture
def put(etcd: Etcd, job: str) -> Put:
    def write(key: str, value: object) -> None:
        etcd.put(f"/ftkit/{job}/{key}", msgspec.json.encode(value))

    return write


@pytest.fixture
def training(put: Put) -> None:
    """A job that trains with t0 and t1 in epoch 3."""
    put("config", JobConfig(min_replicas=2, token="s3cret"))
    for name in ("t0", "t1"):
        put(f"members/{name}", Record(replica_id=name, incarnation="i", host="h", pid=7))
    for number in (1, 2, 3):
        epoch = Epoch(
            id=number,
            seats=(Seat("t0", "i", Version(2, 40)), Seat("t1", "i", Version(2, 40))),
            time=time.time() - 60 + number,
            reason=f"reason {number}",
        )
        put(f"timeline/{number:010d}", epoch)
    put("epoch", epoch)
