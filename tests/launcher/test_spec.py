"""What is launched: command lines and environments."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ftkit.errors import ConfigError
from ftkit.launcher.spec import LaunchSpec, command_line, rank_environment


def environment(spec: LaunchSpec, base: dict[str, str], index: int = 0, rank: int = 0) -> dict[str, str]:
    return rank_environment(spec, base, index=index, rank=rank, port=4711, run="r")


def test_a_python_file_runs_in_this_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert command_line([str(script), "--lr", "1"]) == (sys.executable, str(script), "--lr", "1")


def test_a_module_runs_in_this_interpreter() -> None:
    assert command_line(["-m", "my.train", "x"]) == (sys.executable, "-m", "my.train", "x")
    assert command_line([], ["my.train", "x"]) == (sys.executable, "-m", "my.train", "x")


def test_anything_else_is_a_command() -> None:
    assert command_line(["sh", "-c", "true"]) == ("sh", "-c", "true")


@pytest.mark.parametrize("words", [["no_such_file.py"], ["no-such-command"], ["-m"]])
def test_what_cannot_run_is_refused_before_anything_starts(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        command_line(words)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_groups": 0},
        {"num_groups": -1},
        {"nproc": 0},
        {"min_replicas": 0},
        {"argv": ()},
        {"prefix": "a/b"},
        {"grace_s": -1.0},
    ],
)
def test_a_senseless_spec_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        LaunchSpec(**{"argv": ("true",), "num_groups": 1, **wrong})  # type: ignore[arg-type]


def test_one_rank_sees_no_foreign_torchrun() -> None:
    """Launched inside a Slurm step or torchrun, it would otherwise wait for ranks that never come."""
    base = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "far", "FTKIT_GROUP_RANK": "3", "HOME": "/h"}
    env = environment(LaunchSpec(argv=("true",), num_groups=1), base)
    assert "RANK" not in env
    assert "FTKIT_GROUP_RANK" not in env
    assert env["HOME"] == "/h"


def test_several_ranks_get_torchruns_variables() -> None:
    env = environment(LaunchSpec(argv=("true",), num_groups=2, nproc=4), {}, index=1, rank=2)
    assert env["FTKIT_REPLICA_ID"] == "trainer-1"
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("2", "4", "2")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "4711")


def test_threads_are_limited_only_where_the_user_said_nothing() -> None:
    spec = LaunchSpec(argv=("true",), num_groups=1)
    assert environment(spec, {})["OMP_NUM_THREADS"] == "1"
    assert environment(spec, {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"


def test_groups_share_the_gpus_out() -> None:
    spec = LaunchSpec(argv=("true",), num_groups=2, devices_per_group=2)
    assert environment(spec, {}, index=1)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment(spec, {"CUDA_VISIBLE_DEVICES": "7,5,3,1"}, index=1)["CUDA_VISIBLE_DEVICES"] == "3,1"
    with pytest.raises(ConfigError, match="need 4 GPUs"):
        environment(spec, {"CUDA_VISIBLE_DEVICES": "7"})


def test_groups_of_a_second_machine_get_their_own_names() -> None:
    spec = LaunchSpec(argv=("true",), num_groups=2, first_index=2, prefix="eu")
    assert spec.replica_ids() == ["eu-2", "eu-3"]
