"""The script that breaks a real job, in a short form; `make chaos` is the long one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftkit.keeper.embedded import find_etcd

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "chaos.py"
LONG_S = 170.0


def chaos(*words: object, timeout_s: float = LONG_S) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FTKIT_", "ETCDCTL_"))}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)],
        env=kept,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.timeout(180)  # torch is imported three times, on a machine that may be busy
def test_a_job_that_is_broken_on_purpose_loses_nothing(tmp_path: Path) -> None:
    """A real etcd, real trainers, a kill between vote and update, and what costs no new process."""
    kinds = ["kill-in-update", "flip-bit", "net-reset", "revoke-all", "kill-keeper", "etcd-compact"]
    words = ("--groups", 2, "--count", 6, "--calm", 1.5, "--every", 0.5, "--max-pause", 60)
    done = chaos(*words, "--faults", ",".join(kinds), "--turmoil", 0.3, "--out", tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ok"]
    assert told["trouble"] == ""
    assert sorted(s["fault"]["kind"] for s in told["strikes"]) == sorted(kinds)
    faults = [json.loads(line) for line in (tmp_path / "journal" / "chaos.jsonl").read_text().splitlines()]
    assert [f["phase"] for f in faults if f.get("phase")].count("update") == 1
    assert (tmp_path / "pace.svg").read_text().count("<title>") == 6
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
    assert "kill-in-vote" in chaos("--kinds").stdout


def test_partitions_are_left_out_with_a_reason_where_there_can_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("etcd", "etcdctl"):
        (tmp_path / name).symlink_to(find_etcd().with_name(name))
    monkeypatch.setenv("PATH", str(tmp_path))  # without iproute2
    done = chaos("--plan", "--seconds", 300)
    assert done.returncode == 0
    assert "part-" not in done.stdout
    assert "left out: part-halves needs network namespaces: there is no `ip`" in done.stderr
    refused = chaos("--faults", "part-data")
    assert refused.returncode == 2
    assert "part-data needs network namespaces" in refused.stderr


def test_an_unknown_fault_is_one_line_and_exit_2() -> None:
    done = chaos("--faults", "earthquake")
    assert done.returncode == 2
    assert "earthquake" in done.stderr
    assert "--etcd-servers 3" in chaos("--faults", "etcd-lose-leader").stderr
    assert "Traceback" not in done.stderr
