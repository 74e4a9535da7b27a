"""The command with real training: launch, status, a kill, a drain, and an end in order."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Start, alive, eventually

TRAIN = """
import os, time, torch
from ftkit import DistributedDataParallel, Manager, Optimizer

torch.manual_seed(os.getpid())
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def save():
    return {"model": model.state_dict()}

def load(state):
    model.load_state_dict(state["model"])

with Manager(None, load, save) as manager:
    replica, steps = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    while True:
        steps.zero_grad()
        replica(torch.ones(3, 4)).square().mean().backward()
        steps.step()
        print("step", manager.current_step())
        time.sleep(0.02)
"""


@pytest.mark.timeout(240)  # torch is imported three times
def test_a_job_is_launched_watched_hurt_and_drained(
    start: Start, tmp_path: Path, etcd_url: str, job: str
) -> None:
    """Everything that an operator does on a bad day, once."""
    (tmp_path / "train.py").write_text(TRAIN)
    where = ("--etcd", etcd_url, "--job", job)
    run = start("launch", "--groups", 2, "--restart-delay", "0.1", *where, "--", "train.py")

    def status() -> dict[str, object]:
        look = start("status", "--json", *where)
        assert look.wait() == 0
        told: dict[str, object] = json.loads(look.out[0])
        return told

    def members() -> dict[str, int]:
        """Return the pids of those in the epoch when it trains."""
        told = status()
        rows = told["members"]
        assert isinstance(rows, list)
        return {m["replica_id"]: m["pid"] for m in rows} if told["state"] == "training" else {}

    run.says("[trainer-0] step 3", 90)
    run.says("[trainer-1] step 3", 90)
    before = members()
    assert set(before) == {"trainer-0", "trainer-1"}

    os.kill(before["trainer-1"], signal.SIGKILL)
    run.says("trainer-1: SIGKILL")
    eventually(
        lambda: (
            members().get("trainer-1", before["trainer-1"]) != before["trainer-1"] and len(members()) == 2
        ),
        "trainer-1 started again and training",
        90,
    )

    drain = start("drain", "trainer-0", "--wait", *where)
    assert drain.wait() == 0, drain.text
    run.says("trainer-0: finished", 60)
    eventually(lambda: set(members()) == {"trainer-1"}, "training without trainer-0")

    run.signal(signal.SIGTERM)
    assert run.wait() == 0, run.text
    assert not [pid for pid in before.values() if alive(pid)]
    told = status()
    assert told["state"] == "empty", "all have left in order"
