"""`ftkit status`, `watch`, `drain`, `evict` against a real etcd, and what all commands have in common."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from ftkit.core.model import Epoch, JobConfig, Record, Seat, Ticket, Version
from ftkit.keeper.embedded import EtcdServer
from ftkit.keeper.etcd import Etcd, EtcdSettings
from tests.cli.conftest import Start, eventually

Put = Callable[[str, object], None]


@pytest.fixture
def etcd(etcd_url: str) -> Iterator[Etcd]:
    with Etcd(EtcdSettings(endpoints=(etcd_url,))) as client:
        yield client


@pytest.fixture
def put(etcd: Etcd, job: str) -> Put:
    return lambda key, value: void(etcd.put(f"/ftkit/{job}/{key}", msgspec.json.encode(value)))


@pytest.fixture
def where(etcd_url: str, job: str) -> tuple[str, ...]:
    return ("--etcd", etcd_url, "--job", job)


def void(_: object) -> None:
    """Drop a value."""


def record(name: str) -> Record:
    return Record(replica_id=name, incarnation="i", host="h", pid=7)


def test_status_shows_the_job(start: Start, put: Put, where: tuple[str, ...]) -> None:
    put("config", JobConfig(min_replicas=1))
    put("members/t0", record("t0"))
    put("epoch", Epoch(id=3, seats=(Seat("t0", "i", Version(2, 40)),), time=time.time()))
    put("timeline/0000000003", Epoch(id=3, seats=()))
    put("stats/t0", {"step": 44, "steps_per_s": 2.0, "compute_s": 0.4, "wait_s": 0.1})
    run = start("status", *where)
    assert run.wait() == 0
    assert "training, epoch 3" in run.out[0]
    assert any(line.split()[:3] == ["0", "t0", "44"] for line in run.out)
    run = start("status", "--json", *where)
    assert run.wait() == 0
    told = json.loads(run.out[0])
    assert (told["state"], told["epoch"], told["step"], told["members"][0]["host"]) == (
        "training",
        3,
        44,
        "h",
    )


def test_status_says_why_there_is_no_quorum(start: Start, put: Put, where: tuple[str, ...]) -> None:
    put("config", JobConfig(min_replicas=3))
    put("members/t0", record("t0"))
    put("tickets/t0", Ticket(replica_id="t0", incarnation="i", epoch=1))
    run = start("status", *where)
    assert run.wait() == 0
    assert "1 of at least 3 replica groups are ready" in run.text


def test_status_can_be_watched(start: Start, put: Put, where: tuple[str, ...]) -> None:
    run = start("status", "--watch", "0.1", "--json", *where)
    run.says('"state":"empty"')
    put("members/t0", record("t0"))
    run.says('"replica_id":"t0"')


def test_watch_tells_what_happens(
    start: Start, put: Put, etcd: Etcd, job: str, where: tuple[str, ...]
) -> None:
    put("members/t0", record("t0"))
    run = start("watch", "--json", *where)
    run.says('"event":"joined"')
    put("epoch", Epoch(id=1, seats=(Seat("t0", "i", Version(0, 0)),)))
    run.says('"event":"epoch"')
    etcd.delete(f"/ftkit/{job}/members/t0")
    run.says('"event":"vanished"')
    assert [json.loads(line)["event"] for line in run.out] == ["joined", "epoch", "vanished"]


def test_watch_outlives_an_etcd_that_goes_away(start: Start, own_etcd: EtcdServer) -> None:
    run = start("watch", "--etcd", own_etcd.url)
    with Etcd(EtcdSettings(endpoints=(own_etcd.url,))) as etcd:
        etcd.put("/ftkit/default/members/t0", msgspec.json.encode(record("t0")))
        run.says("t0 is live")
        own_etcd.stop()
        run.says("trying again")
        own_etcd.start()
        run.says("etcd answers again")
        etcd.put("/ftkit/default/members/t1", msgspec.json.encode(record("t1")))
        run.says("t1 is live")
    assert sum("t0 is live" in line for line in run.out) == 1
    assert not run.err


def test_watch_ends_when_asked_to(start: Start, where: tuple[str, ...]) -> None:
    assert start("watch", "--for", "0.2", *where).wait() == 0


@pytest.mark.parametrize("what", ["drain", "evict"])
def test_a_request_waits_for_the_keepers_acknowledgement(
    start: Start, put: Put, etcd: Etcd, job: str, where: tuple[str, ...], what: str
) -> None:
    put("members/t0", record("t0"))
    run = start(what, "t0", *where)
    key = f"/ftkit/{job}/control/{what}/t0"
    eventually(lambda: etcd.get(key), "the request")
    found = etcd.get(key)
    assert found is not None
    assert json.loads(found.value)["what"] == what
    assert run.process.poll() is None
    etcd.delete(key)
    assert run.wait() == 0
    assert f"t0 has taken note: {what}" in run.text


def test_with_wait_it_waits_until_the_group_is_gone(
    start: Start, put: Put, etcd: Etcd, job: str, where: tuple[str, ...]
) -> None:
    put("members/t0", record("t0"))
    run = start("drain", "t0", "--wait", "--json", *where)
    eventually(lambda: etcd.get(f"/ftkit/{job}/control/drain/t0"), "the request")
    etcd.delete(f"/ftkit/{job}/control/drain/t0")
    etcd.delete(f"/ftkit/{job}/members/t0")
    assert run.wait() == 0
    assert json.loads(run.out[0])["outcome"] == "left"


def test_an_unknown_replica_is_refused_with_the_names_there_are(
    start: Start, put: Put, etcd: Etcd, job: str, where: tuple[str, ...]
) -> None:
    """A request left lying for a name that does not exist would hit the first group that takes it."""
    put("members/t0", record("t0"))
    run = start("drain", "t9", *where)
    assert run.wait() == 1
    assert "no live replica group t9; live are: t0" in run.text
    assert etcd.get(f"/ftkit/{job}/control/drain/t9") is None


def test_a_request_that_nobody_heeds_is_withdrawn(
    start: Start, put: Put, etcd: Etcd, job: str, where: tuple[str, ...]
) -> None:
    put("members/t0", record("t0"))
    run = start("evict", "t0", "--timeout", "0.3", *where)
    assert run.wait() == 1
    assert "did not take note of evict within 0.3 s. The request is withdrawn" in run.text
    assert etcd.get(f"/ftkit/{job}/control/evict/t0") is None


def test_without_etcd_a_command_says_so_in_one_line(start: Start) -> None:
    runs = [start(*c, "--etcd", "http://127.0.0.1:1") for c in (("status",), ("watch",), ("drain", "t0"))]
    for run in runs:
        assert run.wait() == 1
        assert len(run.err) == 1
        assert "no etcd server at http://127.0.0.1:1 can be reached" in run.err[0]
        assert "ftkit doctor" in run.err[0]


def test_a_wrong_setting_is_one_line_and_code_2(start: Start) -> None:
    run = start("status", "--etcd", "http://h:1", env={"FTKIT_LEASE_TTL": "soon"})
    assert run.wait() == 2
    assert len(run.err) == 1
    assert "FTKIT_LEASE_TTL=soon" in run.err[0]
    run = start("status", "--etcd", "embedded")
    assert run.wait() == 2
    run = start("status", "--etcd", "http://h:1", env={"FTKIT_LEASE_TTL": "soon", "FTKIT_DEBUG": "1"})
    assert run.wait() == 1
    assert "Traceback" in run.text


def test_help_teaches_with_examples(start: Start) -> None:
    for command in ("launch", "status", "watch", "drain", "evict", "doctor"):
        run = start(command, "--help")
        assert run.wait() == 0
        assert "examples:" in run.text, command
    assert start().wait() == 0
    assert start("no-such-command").wait() == 2


def test_status_imports_no_torch_and_no_other_command() -> None:
    """It is asked for in a hurry: importing torch would take seconds."""
    code = """
import sys
from ftkit.cli.main import main
main(["status", "--etcd", "http://127.0.0.1:1"])
heavy = ("torch", "numpy", "ftkit.cli.launch", "ftkit.cli.doctor", "ftkit.launcher")
print("heavy:", [m for m in heavy if m in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "heavy: []" in out
