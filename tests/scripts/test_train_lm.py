"""The training script that users copy, run as they would run it: alone, in groups, killed, resumed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftkit.demo.checks import samples_once, steps_in_a_row
from ftkit.demo.journal import Tail
from ftkit.demo.story import Story
from ftkit.keeper.ports import is_free
from tests.cli.conftest import Running, eventually

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_lm.py"
SMALL = ("--width", 32, "--layers", 1, "--context", 32, "--batch-size", 4, "--eval-every", 0, "--hash")
LONG_S = 90.0


def clean_environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FTKIT_", "ETCDCTL_"))}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


@pytest.fixture
def launch(tmp_path: Path, etcd_url: str, job: str) -> Iterator[object]:
    """Return a function that runs the script under `ftkit launch`."""
    started: list[Running] = []

    def begin(*arguments: object, groups: int = 2, ranks: int = 1, min_replicas: int = 1) -> Running:
        words = ["launch", "--groups", groups, "--nproc-per-group", ranks, "--etcd", etcd_url, "--job", job]
        words += ["--min-replicas", min_replicas, "--restart-delay", 0.1, "--", SCRIPT, *SMALL, *arguments]
        running = Running([str(w) for w in words], tmp_path, clean_environment(FTKIT_TIMEOUT="20"))
        started.append(running)
        return running

    yield begin
    for running in started:
        if running.process.poll() is None:
            running.signal(signal.SIGTERM)
            running.signal(signal.SIGTERM)
        running.wait(LONG_S)


def hashes(running: Running) -> list[tuple[str, str]]:
    """Return (version, sha256) of each rank's end."""
    return re.findall(r"version (\d+-\d+) sha256 ([0-9a-f]{64})", "\n".join(running.out))


def test_two_groups_end_with_the_same_bits_and_use_each_sample_once(launch, tmp_path: Path) -> None:
    log = ("--log-jsonl", tmp_path / "log", "--log-samples")
    running = launch("--steps", 12, *log, min_replicas=2)
    assert running.wait(LONG_S) == 0, running.text
    found = hashes(running)
    assert len(found) == 2
    assert len(set(found)) == 1
    assert found[0][0].endswith("-12")
    story = Story(Tail(tmp_path / "log").poll())
    for check in (samples_once(story), steps_in_a_row(story)):
        assert check.ok, check
    assert {len(s.members) for s in story.lineage()} == {2}


def test_a_killed_group_comes_back_and_holds_the_same_bits(launch, tmp_path: Path) -> None:
    log = ("--log-jsonl", tmp_path / "log", "--log-samples", "--step-time", 0.05)
    running = launch("--steps", 100_000, *log)
    tail, story = Tail(tmp_path / "log"), Story()
    names = ("trainer-0", "trainer-1")

    def look(after_epoch: int) -> bool:
        for line in tail.poll():
            story.absorb(line)
        return story.together(names, after_epoch)

    eventually(lambda: look(0), "both train", LONG_S)
    newest, victim = story.newest(), story.pid("trainer-1")
    assert newest is not None
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: look(newest.epoch), "both train again", LONG_S)
    assert story.pid("trainer-1") != victim
    running.signal(signal.SIGTERM)
    assert running.wait(LONG_S) == 0, running.text
    look(0)
    [(version, sha256), *rest] = hashes(running)
    assert rest == [(version, sha256)]
    for check in (samples_once(story), steps_in_a_row(story)):
        assert check.ok, check


def test_ranks_of_a_group_split_the_batch_and_stay_equal(launch, tmp_path: Path) -> None:
    """Each of the two groups has two ranks, which average among themselves too: all four are equal."""
    log = ("--log-jsonl", tmp_path / "log", "--log-samples")
    running = launch("--steps", 6, *log, ranks=2, min_replicas=2)
    assert running.wait(LONG_S) == 0, running.text
    found = hashes(running)
    assert len(found) == 4
    assert len(set(found)) == 1
    files = sorted((tmp_path / "log").glob("*.jsonl"))
    assert [f.name for f in files] == [f"trainer-{g}.{r}.jsonl" for g in (0, 1) for r in (0, 1)]
    drawn = re.findall(r'"samples": \[([^\]]+)\]', "".join(f.read_text() for f in files))
    samples = [int(n) for text in drawn for n in text.split(",")]
    assert len(samples) == len(set(samples)) == 6 * 4 * 4


def alone(folder: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, (*SMALL, *arguments))],
        cwd=folder,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )


def test_alone_it_starts_an_etcd_and_says_so(tmp_path: Path, job: str) -> None:
    done = alone(tmp_path, "--steps", 3, FTKIT_JOB=job)
    assert done.returncode == 0, done.stderr
    if "embedded" not in done.stdout and not is_free(2379):
        pytest.skip("this machine has an etcd at the usual address, and the script rightly takes it")
    assert "starting one (embedded)" in done.stdout
    assert "version 1-3 sha256 " in done.stdout


def test_a_run_resumed_from_a_checkpoint_ends_like_one_that_was_not_interrupted(
    tmp_path: Path, etcd_url: str, job: str
) -> None:
    """Weights, optimizer, schedule and the place in the data all go on where they were."""
    same = ("--decay-steps", 8)

    def run(name: str, steps: int, *more: object) -> str:
        done = alone(tmp_path, "--steps", steps, *same, *more, FTKIT_ETCD=etcd_url, FTKIT_JOB=f"{job}-{name}")
        assert done.returncode == 0, done.stderr
        return done.stdout

    folder = ("--checkpoint", tmp_path / "ckpt")
    run("first", 4, *folder)
    resumed = run("second", 8, *folder)
    assert "resumed at step 4" in resumed
    whole = run("whole", 8)
    sha = re.compile(r"-8 sha256 (\w+)")
    [first], [second] = sha.findall(resumed), sha.findall(whole)
    assert first == second
    assert not list((tmp_path / "ckpt").glob("*.tmp"))


def test_epochs_end_the_training_when_the_text_has_been_read(tmp_path: Path, etcd_url: str, job: str) -> None:
    """The last batch is a short one; nothing of the text is left out."""
    short = ("--text-bytes", 10_000, "--batch-size", 64, "--epochs", 2)
    done = alone(
        tmp_path, *short, "--log-samples", "--log-jsonl", tmp_path, FTKIT_ETCD=etcd_url, FTKIT_JOB=job
    )
    assert done.returncode == 0, done.stderr
    story = Story(Tail(tmp_path).poll())
    pieces = (10_000 - 1) // 32 - 64
    assert [e.data.position for e in story.ends] == [2 * pieces]
    assert len(story.lineage()) == -(-2 * pieces // 64)
    assert samples_once(story).ok


def test_a_wrong_setting_is_one_line_and_exit_2(tmp_path: Path) -> None:
    """`ftkit launch` does not start a group again that ends with 2."""
    begun = time.monotonic()
    done = alone(tmp_path, "--min-replicas", 0, FTKIT_ETCD="http://127.0.0.1:1")
    assert done.returncode == 2
    assert "min_replicas" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - begun < LONG_S
