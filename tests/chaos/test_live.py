"""A job that somebody else runs: only its own processes are struck, and what lasts is taken back."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ftkit.chaos.faults import Fault, plan
from ftkit.chaos.fixtures import LaunchedJob
from ftkit.chaos.live import Live, look, run
from ftkit.chaos.processes import keepers_of
from ftkit.cli.main import main
from ftkit.core.model import Epoch, Record, Seat, Version
from ftkit.errors import ConfigError
from ftkit.keeper.etcd import Etcd, EtcdSettings
from ftkit.keeper.keys import Stats
from ftkit.keeper.processes import process_state

TRAINER = Path(__file__).parents[1] / "runtime" / "trainer.py"


@pytest.fixture
def etcd(etcd_url: str) -> Iterator[Etcd]:
    with Etcd(EtcdSettings(endpoints=(etcd_url,))) as client:
        yield client


@pytest.fixture
def sleeper() -> Iterator[Callable[..., int]]:
    """Start processes that wait, with some variables; return their pids."""
    made: list[subprocess.Popen[bytes]] = []

    def start(**variables: str) -> int:
        made.append(subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"], **variables}))
        return made[-1].pid

    yield start
    for process in made:
        process.kill()
        process.wait()


def put(etcd: Etcd, job: str, name: str, pid: int, *, host: str = "", incarnation: str = "i") -> None:
    record = Record(replica_id=name, incarnation=incarnation, host=host or socket.gethostname(), pid=pid)
    etcd.put(f"/ftkit/{job}/members/{name}", msgspec.json.encode(record))


def test_who_cannot_be_proven_to_be_a_member_is_left_alone(
    etcd: Etcd, job: str, sleeper: Callable[..., int]
) -> None:
    put(etcd, job, "elsewhere", os.getpid(), host="another-host")
    put(etcd, job, "gone", 2**22 + 1)
    put(etcd, job, "nobody", sleeper())
    put(etcd, job, "other-name", sleeper(FTKIT_REPLICA_ID="trainer-7"))
    put(etcd, job, "other-job", sleeper(FTKIT_REPLICA_ID="other-job", FTKIT_JOB="production"))
    mine = sleeper(FTKIT_REPLICA_ID="mine", FTKIT_JOB=job)
    put(etcd, job, "mine", mine)
    reasons = {m.replica_id: m.why_not for m in look(etcd, job).members}
    assert {name: reason.split()[-1] for name, reason in reasons.items() if reason} == {
        "elsewhere": socket.gethostname(),
        "gone": "container?)",
        "nobody": "keeper",
        "other-name": "FTKIT_REPLICA_ID=trainer-7",
        "other-job": "FTKIT_JOB=production",
    }
    live = Live(etcd, job)
    faults = [Fault(at=0.0, kind="freeze-trainer", victim=i, lasting=600.0, calm=False) for i in range(6)]
    for fault in faults:
        assert not live.may_strike(fault, live.look()), "nobody else would go on training"
        live.strike(fault, live.look())
    for member in look(etcd, job).members:
        if member.replica_id not in ("elsewhere", "gone"):
            assert (process_state(member.pid) == "T") == (member.replica_id == "mine")
    live.undo_all()
    assert process_state(mine) != "T"
    with pytest.raises(ConfigError, match=r"chaos\.py"):
        live.strike(Fault(at=0.0, kind="etcd-wipe"), live.look())


def test_the_last_one_that_holds_the_state_is_spared(
    etcd: Etcd, job: str, sleeper: Callable[..., int]
) -> None:
    """A newcomer is in the epoch while it still heals; only its first commit says that it has the state."""
    for name in ("a", "b"):
        put(etcd, job, name, sleeper(FTKIT_REPLICA_ID=name), incarnation=name)
    seats = (Seat("a", "a", Version(3, 40)), Seat("b", "b", Version(0, 0)))
    etcd.put(f"/ftkit/{job}/epoch", msgspec.json.encode(Epoch(id=4, seats=seats)))
    live = Live(etcd, job)
    kills = [Fault(at=0.0, kind="kill", victim=i, calm=False) for i in range(2)]
    assert [live.may_strike(kill, live.look()) for kill in kills] == [False, True]
    for epoch, both in ((3, False), (4, True)):
        stats = Stats(replica_id="b", incarnation="b", epoch=epoch, step=41)
        etcd.put(f"/ftkit/{job}/stats/b", msgspec.json.encode(stats))
        assert live.may_strike(kills[0], live.look()) is both


def test_a_plan_can_be_looked_at_and_touches_nobody(
    etcd: Etcd, etcd_url: str, job: str, sleeper: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    pid = sleeper(FTKIT_REPLICA_ID="a")
    put(etcd, job, "a", pid)
    put(etcd, job, "b", pid, host="another-host")
    where = ["--etcd", etcd_url, "--job", job, "--seed", "7"]
    assert main(["chaos", *where, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [m["replica_id"] for m in told["members"] if not m["why_not"]] == ["a"]
    assert len(told["faults"]) == told["skipped"] > 0
    assert main(["chaos", *where, "--dry-run"]) == 0
    assert "b: another-host" in capsys.readouterr().out
    assert process_state(pid) == "S"
    assert main(["chaos", *where, "--faults", "etcd-kill"]) == 2
    assert "scripts/chaos.py" in capsys.readouterr().err
    assert main(["chaos", "--etcd", etcd_url, "--job", f"{job}-none"]) == 2
    assert "no member" in capsys.readouterr().err


@pytest.mark.timeout(240)
def test_a_users_job_is_broken_with_the_fixtures(
    chaos_job: Callable[..., LaunchedJob], tmp_path: Path
) -> None:
    """Some faults that need no new process, then a kill; who is frozen goes on, who is killed comes back."""
    job = chaos_job(TRAINER, "--period-ms", 20, groups=2, lease_ttl=2)
    names = ("trainer-0", "trainer-1")
    epoch = job.wait_training(*names)
    live, journal = job.live, tmp_path / "chaos.jsonl"
    live._journal = journal
    gentle = ["blink", "kill-keeper", "revoke-lease", "revoke-all"]
    faults = plan(5, seconds=40.0, every_s=0.5, kinds=gentle, turmoil=0.5)[: len(gentle)]
    done, skipped = run(live, faults, seconds=60.0, say=lambda _: None)
    assert (len(done), skipped) == (len(gentle), 0)
    assert not live.lasting()
    job.wait_training(*names)
    before = {m.replica_id: m.incarnation for m in live.look().members}
    assert job.strike("kill", "trainer-1").startswith("kill trainer-1")
    job.wait(
        lambda v: (
            v.settled
            and v.epoch.id > epoch
            and len(v.members) == 2
            and {m.replica_id: m.incarnation for m in v.members} != before
        ),
        "trainer-1 to come back",
    )
    after = {m.replica_id: m.incarnation for m in live.look().members}
    assert [name for name in names if after[name] != before[name]] == ["trainer-1"]
    kinds = {json.loads(line)["kind"] for line in journal.read_text().splitlines()}
    assert kinds == {"SIGSTOP", "SIGCONT", "SIGKILL", "revoke-lease", "revoke-all"}
    assert all(keepers_of(m.pid) for m in live.look().members)
