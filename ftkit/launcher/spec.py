"""Say what is launched: the command line and the environment of each rank.

Pure: it reads no environment and starts nothing; the caller hands the environment in.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ftkit.config_values import read_name
from ftkit.errors import ConfigError
from ftkit.launcher.restart import RestartPolicy

RUN_MARK = "FTKIT_LAUNCH_RUN"
"""Variable that marks every process of one launch, so that none can be left behind unseen."""

_OTHER_GROUP = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("FTKIT_GROUP_RANK", "FTKIT_GROUP_WORLD_SIZE", "FTKIT_MASTER_ADDR", "FTKIT_MASTER_PORT"),
)
"""Variables that would describe the group of a surrounding torchrun or scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """N replica groups of `nproc` ranks each that all run `argv`."""

    argv: tuple[str, ...]
    num_groups: int
    nproc: int = 1
    prefix: str = "trainer"
    first_index: int = 0
    min_replicas: int | None = None
    """Every rank gets it as FTKIT_MIN_REPLICAS; None: leave it to the settings."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Settings that every rank gets, such as FTKIT_ETCD."""
    devices_per_group: int = 0
    """GPUs of each group, as CUDA_VISIBLE_DEVICES; 0: leave it as it is."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    grace_s: float = 30.0
    sibling_grace_s: float = 5.0
    log_dir: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        if not self.argv:
            raise ConfigError(
                "nothing to launch: give the training script after --, e.g. -- train.py --lr 0.1"
            )
        for name, value in (("--groups", self.num_groups), ("--nproc-per-group", self.nproc)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.grace_s < 0 or self.sibling_grace_s < 0:
            raise ConfigError(f"the grace period must not be negative, got {self.grace_s:g} s")
        if self.min_replicas is not None and self.min_replicas < 1:
            raise ConfigError(f"--min-replicas must be at least 1, got {self.min_replicas}")
        try:
            read_name(self.prefix)
        except ValueError as error:
            raise ConfigError(f"--prefix {self.prefix!r} {error}") from None
        if self.first_index < 0 or self.devices_per_group < 0:
            raise ConfigError("--first-index and --devices-per-group must not be negative")

    def replica_ids(self) -> list[str]:
        """Return the names of the groups in order."""
        return [f"{self.prefix}-{self.first_index + i}" for i in range(self.num_groups)]


def command_line(command: Sequence[str], module: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the argv for what the user wrote: a .py file, `-m module`, or any other command."""
    if module and command:
        raise ConfigError(f"give either -m {module[0]} or a command, not both")
    words = ["-m", *module] if module else list(command)
    if not words:
        return ()
    if words[0] == "-m":
        if len(words) < 2:
            raise ConfigError("-m needs the name of a module, e.g. -m my_project.train")
        return (sys.executable, *words)
    if words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise ConfigError(f"there is no file {words[0]} (looked in {Path.cwd()})")
        return (sys.executable, *words)
    if shutil.which(words[0]) is None:
        raise ConfigError(f"{words[0]} is neither a .py file nor a command that can be run")
    return tuple(words)


def rank_environment(
    spec: LaunchSpec, base: Mapping[str, str], *, index: int, rank: int, port: int, run: str
) -> dict[str, str]:
    """Return the environment of one rank; `port` is where its group's ranks meet."""
    env = {**base, **spec.env, "FTKIT_REPLICA_ID": spec.replica_ids()[index], RUN_MARK: run}
    if spec.min_replicas is not None:
        env["FTKIT_MIN_REPLICAS"] = str(spec.min_replicas)
    for name in _OTHER_GROUP:
        env.pop(name, None)
    if spec.nproc > 1:
        env |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(spec.nproc),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(spec.nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    # Without it each process starts a thread per core, and N groups on one machine fight over them.
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("PYTHONUNBUFFERED", "1")
    if spec.devices_per_group:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(_devices(spec, base, index))
    return env


def _devices(spec: LaunchSpec, base: Mapping[str, str], index: int) -> list[str]:
    """Return the GPUs of one group, out of those that launch itself may see."""
    first, count = index * spec.devices_per_group, spec.devices_per_group
    visible = base.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(d) for d in range(first, first + count)]
    devices = [d.strip() for d in visible.split(",") if d.strip()]
    if len(devices) < spec.num_groups * count:
        raise ConfigError(
            f"{spec.num_groups} groups with --devices-per-group {count} need {spec.num_groups * count} GPUs, "
            f"CUDA_VISIBLE_DEVICES={visible} has {len(devices)}"
        )
    return devices[first : first + count]
