"""`ftkit demo` itself, short: real processes, a real SIGKILL, a real SIGSTOP, and its own checks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Running, alive, eventually

LONG_S = 110.0
Demo = Callable[..., Running]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    """Return a function that starts `ftkit demo` without the caller's settings."""
    started: list[Running] = []

    def begin(*words: object) -> Running:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("FTKIT_", "ETCDCTL_"))}
        running = Running(["demo", *map(str, words)], tmp_path, clean)
        started.append(running)
        return running

    yield begin
    for running in started:
        if running.process.poll() is None:
            running.signal(signal.SIGTERM)
        running.wait()


def processes_of(folder: Path) -> list[int]:
    """Return the processes whose command line names the folder: trainers and launches of this demo."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return [pid for pid in found if alive(pid)]


def test_the_demo_kills_and_freezes_and_all_that_it_claims_holds(demo: Demo, tmp_path: Path) -> None:
    """The promise of the whole project on one page; each figure is there and none is absurd."""
    out = tmp_path / "out"
    run: Running = demo("--json", "--seconds", 4, "--seed", 1, "--out", out)
    code = run.wait(LONG_S)
    assert len(run.out) == 1, "nothing but the object on standard output"
    report = json.loads(run.out[0])
    assert code == 0, f"{report['trouble']}\n{report['checks']}\n{run.text}"
    assert report["ok"]
    assert all(c["ok"] for c in report["checks"])
    assert len(report["checks"]) == 5

    kill, stop = report["recoveries"]
    assert (kill["fault"]["kind"], stop["fault"]["kind"]) == ("SIGKILL", "SIGSTOP")
    for recovery in (kill, stop):
        assert len(recovery["survivors"]) == 2
        assert 0 < recovery["detected_ms"] <= recovery["epoch_ms"] <= recovery["first_commit_ms"]
        assert set(recovery["pause_ms"]) == set(recovery["survivors"])
        assert recovery["back"]["healed_bytes"] > 1_000_000
    assert stop["fault"]["thawed_at"] > stop["fault"]["at"]

    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "report.json").read_text()) == report
    assert len(list((out / "logs").glob("trainer-*.log"))) == 3
    assert processes_of(out) == []


@pytest.mark.parametrize(
    ("words", "reason"), [(("--groups", 1), "somebody has to survive"), (("--seconds", 0), "above 0")]
)
def test_a_demo_that_could_show_nothing_is_refused(
    demo: Demo, words: tuple[object, ...], reason: str
) -> None:
    run: Running = demo(*words)
    assert run.wait() == 2
    assert reason in run.text


def test_an_interrupt_leaves_nothing_behind(demo: Demo, tmp_path: Path) -> None:
    """A demo is watched by a person who may have seen enough at any time."""
    out = tmp_path / "out"
    run: Running = demo("--out", out)
    journals = out / "journal"
    eventually(lambda: list(journals.glob("*.jsonl")), "a trainer joins", LONG_S)
    run.signal(signal.SIGINT)
    assert run.wait(LONG_S) == 130
    assert processes_of(out) == []


def test_a_launch_that_fails_is_told_with_its_last_words(demo: Demo, tmp_path: Path) -> None:
    """Whoever tries this first has the most that can be wrong; a bare exit code would not help."""
    script = tmp_path / "train_lm.py"
    script.write_text("raise SystemExit('no such thing as a free launch')\n")
    broken = demo("--json", "--script", script, "--out", tmp_path / "out")
    assert broken.wait(LONG_S) == 1
    report = json.loads(broken.out[0])
    assert not report["ok"]
    assert "free launch" in report["trouble"]
