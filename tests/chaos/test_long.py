"""The long form of the suite: `make chaos`, or `pytest -m long`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftkit.chaos.kinds import ALL, DEFAULT, OF_THREE, PARTITIONS, TAKES_TWO
from ftkit.chaos.netns import missing
from tests.chaos.test_chaos_script import chaos

LONG_S = 3600.0
pytestmark = [pytest.mark.long, pytest.mark.timeout(LONG_S + 60)]

KILLS = [kind for kind in ALL if kind.startswith("kill-") and kind != "kill-keeper"] + [
    "kill",
    "lose-machine",
]


def run(folder: Path, *words: object) -> dict:
    """Run the script; return what it has told."""
    done = chaos(
        *words, "--calm", 5, "--turmoil", 0, "--patience", 300, "--out", folder, "--json", timeout_s=LONG_S
    )
    assert done.stdout, done.stderr[-3000:]
    told: dict = json.loads(done.stdout)
    return told


def check(told: dict, num: int) -> None:
    """All that was planned has struck, and no promise was broken."""
    broken = [v for o in told["verdict"]["outcomes"] for v in o["violations"]]
    assert told["ok"], (told["trouble"], broken[:10], told["folder"])
    assert len(told["strikes"]) == num
    assert all(o["checked"] for o in told["verdict"]["outcomes"])


@pytest.mark.parametrize("groups", [2, 3, 5])
def test_each_fault_alone(tmp_path: Path, groups: int) -> None:
    """With two groups, what takes out two of them is left out: somebody must keep the state."""
    kinds = [kind for kind in (*DEFAULT, "nan") if groups > 2 or kind not in TAKES_TWO]
    words = ("--groups", groups, "--count", len(kinds), "--every", 2, "--faults", ",".join(kinds))
    told = run(tmp_path, *words, "--seed", groups, "--max-pause", 60)
    check(told, len(kinds))
    assert sorted(s["fault"]["kind"] for s in told["strikes"]) == sorted(kinds)


def test_a_hundred_kills_at_random_moments(tmp_path: Path) -> None:
    words = ("--count", 100, "--every", 2, "--faults", ",".join(KILLS))
    check(run(tmp_path, *words, "--max-pause", 60), 100)


def test_three_etcd_servers_lose_one_the_leader_and_the_majority(tmp_path: Path) -> None:
    """They ask for a password, too, and forget who has proven it."""
    kinds = (*OF_THREE, "etcd-expire-token", "etcd-full", "etcd-freeze", "revoke-all", "net-silent", "kill")
    words = ("--count", 2 * len(kinds), "--every", 2, "--etcd-servers", 3, "--etcd-auth")
    check(run(tmp_path, *words, "--faults", ",".join(kinds), "--max-pause", 60), 2 * len(kinds))


def test_partitions_between_machines(tmp_path: Path) -> None:
    why_not = missing()
    if why_not:
        pytest.skip(why_not)
    words = ("--groups", 4, "--count", 2 * len(PARTITIONS), "--every", 2, "--faults", ",".join(PARTITIONS))
    check(run(tmp_path, *words, "--max-pause", 60), 2 * len(PARTITIONS))


def test_groups_of_two_ranks(tmp_path: Path) -> None:
    """One rank of a group is struck, or all; a group lives and dies whole."""
    kinds = [*KILLS, "raise", "raise-in-update", "freeze", "freeze-trainer", "blink", "drain", "kill-keeper"]
    words = ("--nproc-per-group", 2, "--count", len(kinds), "--every", 2, "--faults", ",".join(kinds))
    check(run(tmp_path, *words, "--max-pause", 60), len(kinds))


def test_weights_that_differ_are_found(tmp_path: Path) -> None:
    """A bit that flips in one member's memory raises no error anywhere; the oracle must see it."""
    told = run(tmp_path, "--groups", 2, "--count", 1, "--every", 1, "--faults", "corrupt")
    assert not told["ok"]
    wrong = [o["name"] for o in told["verdict"]["outcomes"] if o["violations"]]
    assert "one state per version" in wrong
