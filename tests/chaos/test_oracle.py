"""The oracle: each promise, with a log that breaks it and must be caught."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ftkit.chaos.log import parse, read
from ftkit.chaos.oracle import Verdict, as_text, judge, judge_folder
from ftkit.cli.main import main
from tests.chaos.job import Files, Row, attempt, end, find, healthy, log_of, row, written


def broken(verdict: Verdict) -> dict[str, list[str]]:
    """Return the violations by the name of the check."""
    return {o.name: [f"{v.where}: {v.text}" for v in o.violations] for o in verdict.outcomes if o.violations}


def step_of(replica: str, number: int, epoch: int) -> Callable[[Row], bool]:
    def wanted(r: Row) -> bool:
        return (r["type"], r["replica"], r.get("step"), r.get("epoch")) == ("step", replica, number, epoch)

    return wanted


def drawn(replica: str, number: int) -> Callable[[Row], bool]:
    return lambda r: (r["type"], r["replica"], r.get("step")) == ("draw", replica, number)


def test_a_job_that_lost_a_member_and_healed_it_keeps_all_promises() -> None:
    verdict = judge(log_of(healthy()), strict=True, max_pause_s=2.0)
    assert verdict.ok, as_text(verdict)
    assert (verdict.steps, verdict.processes, verdict.replicas) == (4, 3, ("a", "b"))
    assert as_text(verdict).endswith("no violation; 4 steps, 2 replica groups, 3 processes")


def other_bits(files: Files) -> None:
    find(files, lambda r: r["type"] == "hash" and r["replica"] == "b" and r["version"] == "1-2")["sha256"] = (
        "x"
    )


def other_bits_at_the_end(files: Files) -> None:
    find(files, lambda r: r["type"] == "end" and r["replica"] == "b")["sha256"] = "x"


def a_step_skipped(files: Files) -> None:
    rows = files["a.0.jsonl"]
    rows[:] = [r for r in rows if r.get("step") != 2 and r.get("version") != "1-2"]


def a_step_repeated(files: Files) -> None:
    rows = files["a.0.jsonl"]
    at = rows.index(find(files, step_of("a", 2, 1)))
    rows.insert(at + 1, dict(rows[at]))


def a_heal_forgotten(files: Files) -> None:
    """b goes on as if it had the state of step 1, and nobody is at step 2."""
    find(files, lambda r: r.get("kind") == "healed")["step"] = 1


def a_version_of_another_step(files: Files) -> None:
    find(files, step_of("a", 2, 1))["version"] = "1-3"


def a_hole_in_the_lineage(files: Files) -> None:
    for rows in files.values():
        rows[:] = [r for r in rows if not (r.get("step") == 2 or r.get("version") == "1-2")]


def an_epoch_that_falls(files: Files) -> None:
    find(files, drawn("a", 4))["epoch"] = 1


def a_successor_in_the_same_epoch(files: Files) -> None:
    for r in files["b.0.jsonl"]:
        if r["pid"] == 3 and r.get("epoch") == 3:
            r["epoch"] = 1
            if "version" in r:
                r["version"] = "1-4"


def two_lists_of_members(files: Files) -> None:
    find(files, step_of("b", 2, 1))["members"] = ["b", "c"]


def a_commit_of_a_stranger(files: Files) -> None:
    for name in ("a", "b"):
        find(files, step_of(name, 2, 1))["members"] = ["a"]


def split_brain(files: Files) -> None:
    """b was cut off, not killed, and goes on in epoch 1 while a commits in epoch 2."""
    rows = files["b.0.jsonl"]
    at = next(i for i, r in enumerate(rows) if r["pid"] == 3)
    for number in (3, 4):
        rows[at:at] = attempt("b", 3.4 + number / 10, 1, number, "ab", [], pid=2)


def a_sample_twice(files: Files) -> None:
    find(files, drawn("a", 4))["samples"] = [0, 11]


def a_sample_lost(files: Files) -> None:
    find(files, drawn("a", 4))["samples"] = [11]


def nothing_drawn(files: Files) -> None:
    rows = files["b.0.jsonl"]
    rows.remove(find(files, drawn("b", 2)))


def an_error_at_the_end(files: Files) -> None:
    find(files, lambda r: r["type"] == "end" and r["replica"] == "b")["error"] = "StepFailed('b: gave up')"


def a_death_that_nobody_ordered(files: Files) -> None:
    files["chaos.jsonl"] = [{"type": "fault", "kind": "SIGCONT", "pid": 7}, {"type": "over"}]


def a_long_wait(files: Files) -> None:
    for r in files["a.0.jsonl"]:
        if float(str(r["monotonic"])) >= 4.0:
            r["monotonic"] = float(str(r["monotonic"])) + 9


def a_lonely_commit(files: Files) -> None:
    """Wanted are two members at least; a commits step 3 alone."""


SEEDED = [
    (other_bits, "one state per version", "version 1-2 names 2 states"),
    (other_bits_at_the_end, "one state per version", "version 3-4 names 2 states"),
    (a_step_skipped, "committed steps rise by one", "a.0.jsonl:7: a (pid 1) commits step 3 after 1"),
    (a_step_repeated, "committed steps rise by one", "commits step 2 after 2"),
    (a_heal_forgotten, "committed steps rise by one", "commits step 4 after 1"),
    (a_version_of_another_step, "committed steps rise by one", "leads to version 1-3"),
    (a_hole_in_the_lineage, "committed steps rise by one", "nobody committed a step between 1 and 3"),
    (an_epoch_that_falls, "epochs only rise", "a (pid 1) is in epoch 1 after 2"),
    (a_successor_in_the_same_epoch, "epochs only rise", "so did its predecessor (b.0.jsonl:6)"),
    (two_lists_of_members, "one list of members per epoch", "epoch 1 has members b, c; a, b at a.0.jsonl:3"),
    (a_commit_of_a_stranger, "one list of members per epoch", "without being a member"),
    (split_brain, "nobody commits in a superseded epoch", "step 4 is committed in epoch 1, although epoch 2"),
    (a_sample_twice, "each sample once per data epoch", "uses sample 0 for the 2. time, first a.0.jsonl:2"),
    (a_sample_lost, "each sample once per data epoch", "used 13 samples, its place says 14"),
    (nothing_drawn, "each sample once per data epoch", "b drew nothing for step 2"),
    (an_error_at_the_end, "survivors never end with an error", "ended with StepFailed('b: gave up')"),
    (a_death_that_nobody_ordered, "survivors never end with an error", "b (pid 2) has ended without a word"),
    (a_long_wait, "waits are bounded", "a waited 9.5 s"),
    (a_lonely_commit, "at least 2 members", "step 3 is committed by 1 members"),
]


@pytest.mark.parametrize(("spoil", "check", "words"), SEEDED, ids=lambda x: getattr(x, "__name__", None))
def test_a_broken_promise_is_caught(spoil: Callable[[Files], None], check: str, words: str) -> None:
    """A check that never fires is worth nothing."""
    files = healthy()
    spoil(files)
    needed = 2 if spoil is a_lonely_commit else 1
    verdict = judge(log_of(files), max_pause_s=5.0, min_replicas=needed)
    assert not verdict.ok
    found = broken(verdict)
    assert check in found, as_text(verdict)
    assert any(words in text for text in found[check]), found


def test_a_rank_may_end_with_the_one_that_was_killed_beside_it_but_not_before() -> None:
    """A group of several ranks lives and dies together."""
    files = healthy()
    beside = [
        row("start", 0.0, "b", 9, rank=1),
        {**end("b", 3.3, "1-2", 8, pid=9), "rank": 1, "error": "alone"},
    ]
    files["b.1.jsonl"] = beside
    check = "survivors never end with an error"
    assert check not in broken(judge(log_of(files)))
    beside[1]["monotonic"] = 3.1
    assert "b/1 (pid 9) ended with alone" in str(broken(judge(log_of(files)))[check])


def test_a_newcomer_may_be_turned_away_by_a_full_etcd_and_a_member_may_not() -> None:
    files = healthy()
    full = "EtcdNoSpace('etcd is full')"
    newcomer = [row("start", 3.2, "c", 9), {**end("c", 3.3, "0-0", 0, pid=9), "error": full}]
    files["c.0.jsonl"] = newcomer
    check = "survivors never end with an error"
    assert check not in broken(judge(log_of(files)))
    newcomer[1]["error"] = "StepFailed('gave up')"
    assert "c (pid 9) ended with StepFailed" in str(broken(judge(log_of(files)))[check])
    newcomer[1]["error"] = full
    newcomer.insert(1, {**row("event", 3.25, "c", 9), "kind": "epoch", "epoch": 3, "step": 0})
    assert "c (pid 9) ended with EtcdNoSpace" in str(broken(judge(log_of(files)))[check])


def test_every_check_has_a_seeded_bug() -> None:
    names = {o.name for o in judge(log_of(healthy()), min_replicas=2).outcomes}
    assert names == {check for _, check, _ in SEEDED} | {"the log is whole"}


def test_a_commit_in_doubt_is_no_split_brain() -> None:
    """b read the vote on step 3 and died with it; a never heard of it and repeats the step."""
    files = healthy()
    rows = files["b.0.jsonl"]
    at = next(i for i, r in enumerate(rows) if r["pid"] == 3)
    rows[at:at] = attempt("b", 3.1, 1, 3, "ab", [10, 11], pid=2)[1:]
    verdict = judge(log_of(files), strict=True)
    assert verdict.ok, as_text(verdict)


def test_a_step_that_is_settled_or_healed_may_be_passed_over() -> None:
    """The vote on step 3 reached b alone; a still had the gradients and applied them itself."""
    files = healthy()
    rows = files["a.0.jsonl"]
    rows[:] = [r for r in rows if r.get("epoch") != 2 and r.get("version") != "2-3"]
    at = rows.index(find(files, drawn("a", 4)))
    rows.insert(at, row("event", 3.6, "a", 1, kind="settled", epoch=3, step=3))
    rows = files["b.0.jsonl"]
    at = next(i for i, r in enumerate(rows) if r["pid"] == 3)
    rows[at:at] = attempt("b", 3.1, 1, 3, "ab", [10, 11], pid=2)[1:]
    find(files, drawn("a", 4))["samples"] = [14, 15]
    for last in (r for rows in files.values() for r in rows if r["type"] == "end"):
        last["data"] = {"position": 16, "holes": []}
    verdict = judge(log_of(files), strict=True)
    assert verdict.ok, as_text(verdict)


def test_another_pass_over_the_data_may_use_each_sample_again() -> None:
    rows: list[Row] = [row("start", 0.0, "a", 1, training=4)]
    for number in range(1, 5):
        rows += attempt("a", number, 1, number, "a", [(2 * number) % 4, (2 * number + 1) % 4], pid=1)
    place = {"position": 8, "holes": []}
    rows.append(row("end", 9.0, "a", 1, version="1-4", sha256="", data=place, error=""))
    verdict = judge(log_of({"a.0.jsonl": rows}))
    assert not broken(verdict), as_text(verdict)
    find({"a": rows}, drawn("a", 4))["samples"] = [2, 3]
    assert "after 2 whole passes 2 uses are missing and 2 too many" in as_text(
        judge(log_of({"a.0.jsonl": rows}))
    )


def test_what_the_log_does_not_tell_is_not_called_proven() -> None:
    files = healthy()
    for rows in files.values():
        rows[:] = [r for r in rows if r["type"] not in ("hash", "draw", "end")]
    files["chaos.jsonl"] = []
    text = as_text(judge(log_of(files)))
    assert "not checked, no version has hashes of two replicas" in text
    assert "not checked, no samples are logged" in text
    assert judge(log_of(files)).ok
    assert not judge(log_of(files), strict=True).ok


def test_an_empty_folder_proves_nothing(tmp_path: Path) -> None:
    verdict = judge_folder(tmp_path)
    assert not verdict.ok
    assert "nothing was proven" in as_text(verdict)


def test_the_time_that_a_process_was_stopped_is_none_of_its_waits() -> None:
    files = healthy()
    a_long_wait(files)
    stop = {"type": "fault", "replica": "a", "pid": 1}
    files["chaos.jsonl"] += [
        {**stop, "kind": "SIGSTOP", "monotonic": 4.0},
        {**stop, "kind": "SIGCONT", "monotonic": 12.5},
    ]
    assert not broken(judge(log_of(files), max_pause_s=5.0))


def test_a_line_torn_by_a_death_is_forgiven_and_any_other_is_not() -> None:
    good = json.dumps(row("start", 0.0, "a", 1)).encode()
    step = json.dumps(row("step", 0.0, "a", 1)).encode()
    assert [c.torn for c in parse("f", [good, b'{"type": "st', b"", good])[1]] == [True]
    assert [c.torn for c in parse("f", [good, b'{"type": "st'])[1]] == [True]
    assert [c.torn for c in parse("f", [good, b'{"type": "st', step])[1]] == [False]
    assert [c.torn for c in parse("f", [good, b"\xff\xfe", b"{", good])[1]] == [False, False]
    assert parse("f", [b'{"type": "hash", "version": "new"}'])[1]
    nan = json.dumps(row("step", 0.0, "a", 1, loss=float("nan"))).encode()
    assert b"NaN" in nan
    assert not parse("f", [nan, nan])[1], "a training that is spoilt is no log that is"


def test_the_command_reports_and_says_no_with_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = healthy()
    for name, text in written(files).items():
        (tmp_path / name).write_bytes(text)
    assert main(["verify", str(tmp_path), "--strict", "--max-pause", "2"]) == 0
    assert "no violation" in capsys.readouterr().out
    split_brain(files)
    (tmp_path / "b.0.jsonl").write_bytes(written(files)["b.0.jsonl"])
    assert main(["verify", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["num_violations"] > 0
    assert {o["name"] for o in told["outcomes"] if o["violations"]} >= {
        "nobody commits in a superseded epoch"
    }
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert read(tmp_path).files == ("a.0.jsonl", "b.0.jsonl", "chaos.jsonl")
