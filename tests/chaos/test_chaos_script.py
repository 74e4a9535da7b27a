"""The script that breaks a real job, in a short form; `make chaos` is the long one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "chaos.py"
LONG_S = 170.0


def chaos(*words: object) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FTKIT_", "ETCDCTL_"))}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)],
        env=kept,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )


@pytest.mark.timeout(180)  # torch is imported three times, on a machine that may be busy
def test_a_job_that_is_broken_on_purpose_loses_nothing(tmp_path: Path) -> None:
    """A real etcd, real trainers, a kill; everything that the oracle knows is checked."""
    words = ("--groups", 2, "--seconds", 5, "--calm", 1.5, "--every", 2, "--max-pause", 60)
    done = chaos(*words, "--faults", "kill,kill-keeper", "--turmoil", 0, "--out", tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ok"]
    assert told["trouble"] == ""
    assert told["strikes"], "at least one fault struck"
    assert told["steps"] > 0
    assert told["verdict"]["num_violations"] == 0
    assert all(o["checked"] for o in told["verdict"]["outcomes"])
    assert json.loads((tmp_path / "report.json").read_text()) == told
    again = chaos("--out", tmp_path)
    assert again.returncode == 2
    assert "another run" in again.stderr


def test_a_plan_can_be_looked_at_first() -> None:
    one, two = chaos("--plan", "--seed", 7), chaos("--plan", "--seed", 7)
    assert one.returncode == 0, one.stderr
    assert one.stdout == two.stdout
    assert " group " in one.stdout


def test_an_unknown_fault_is_one_line_and_exit_2() -> None:
    done = chaos("--faults", "earthquake")
    assert done.returncode == 2
    assert "earthquake" in done.stderr
    assert "Traceback" not in done.stderr
