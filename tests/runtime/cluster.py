"""Replica groups as real processes, for the tests of the whole spine."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ftkit.chaos.orders import Orders
from ftkit.chaos.processes import keepers_of

TRAINER = Path(__file__).with_name("trainer.py")


class Group:
    """One process of one replica group."""

    def __init__(
        self,
        folder: Path,
        replica_id: str,
        env: dict[str, str],
        args: tuple[str, ...],
        wrap: Callable[..., list[str]] = lambda _, *words: [*words],
    ) -> None:
        self.replica_id = replica_id
        self.log = folder / f"{replica_id}-{time.monotonic_ns()}.jsonl"
        self.started = time.monotonic()
        self._rows: list[dict] = []
        self._read = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **env, "FTKIT_REPLICA_ID": replica_id}
        with self.log.open("wb") as out, self.log.with_suffix(".err").open("wb") as err:
            command = wrap(replica_id, sys.executable, *args)
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)

    def rows(self) -> list[dict]:
        """All complete lines so far; only the new ones are read."""
        with self.log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._read += len(new)
        self._rows += [json.loads(line) for line in new.splitlines()]
        return self._rows

    def steps(self, since: float = 0.0) -> list[dict]:
        return [r for r in self.rows() if "ok" in r and r["t"] > since]

    def commits(self, since: float = 0.0, n: int | None = None) -> list[dict]:
        return [r for r in self.steps(since) if r["ok"] and n in (None, r["n"])]

    def events(self, kind: str) -> list[dict]:
        return [r for r in self.rows() if r.get("event") == kind]

    def stderr(self) -> str:
        return self.log.with_suffix(".err").read_text()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> float:
        self.process.send_signal(number)
        return time.monotonic()

    def keeper_pid(self) -> int:
        keepers = keepers_of(self.process.pid)
        assert keepers, "no keeper among the children"
        return keepers[0]


class Cluster:
    """A job's groups; ends all that it started."""

    def __init__(self, folder: Path, etcd: str, job: str, **settings: object) -> None:
        self.folder = folder
        self.until = folder / "until"
        self.env = {"FTKIT_ETCD": etcd, "FTKIT_JOB": job}
        self.env |= {f"FTKIT_{k.upper()}": str(v) for k, v in settings.items()}
        self.groups: list[Group] = []
        self.orders = Orders(folder)
        """For trainers that are started with `inside=True`."""
        self.wrap: Callable[..., list[str]] = lambda _, *words: [*words]
        """Given a replica id and a command: the command that runs it elsewhere."""

    def start(self, name: str, *args: object, inside: bool = False, **settings: object) -> Group:
        env = {**self.env, **{f"FTKIT_{k.upper()}": str(v) for k, v in settings.items()}}
        arguments = (str(TRAINER), "--until", str(self.until), *map(str, args))
        if inside:
            arguments = ("-m", "ftkit.chaos.inside", "--orders", str(self.folder), *arguments)
        group = Group(self.folder, name, env, arguments, self.wrap)
        self.groups.append(group)
        return group

    def start_all(self, num: int, *args: object, inside: bool = False, **settings: object) -> list[Group]:
        groups = [self.start(f"trainer-{i}", *args, inside=inside, **settings) for i in range(num)]
        self.wait_together(groups)
        return groups

    def wait_together(self, groups: list[Group], commits: int = 5, since: float = 0.0) -> None:
        self.wait(
            lambda: all(len(g.commits(since, len(groups))) >= commits for g in groups),
            "all groups to commit together",
            groups,
        )

    def wait(
        self,
        condition: Callable[[], bool],
        what: str,
        alive: list[Group] | None = None,
        timeout: float = 60.0,
    ) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            for g in alive or []:
                assert g.alive, f"{g.replica_id} ended with {g.process.returncode}: {g.stderr()[-2000:]}"
            if time.monotonic() > deadline:
                tails = "\n".join(
                    f"{g.replica_id}: {g.rows()[-6:]}\n{g.stderr()[-1500:]}" for g in self.groups
                )
                raise AssertionError(f"waited {timeout} s in vain for {what}\n{tails}")
            time.sleep(0.03)

    def finish(self, groups: list[Group]) -> list[dict]:
        """Let all end now, and return their last words."""
        self.until.touch()
        return self.wait_end(groups)

    def wait_end(self, groups: list[Group]) -> list[dict]:
        """Wait until all have done their steps, and return their last words."""
        self.wait(lambda: not any(g.alive for g in groups), "all to end", timeout=90)
        for g in groups:
            assert g.process.returncode == 0, (g.replica_id, g.process.returncode, g.stderr()[-2000:])
        return [next(r for r in g.rows() if r.get("done")) for g in groups]

    def check_versions(self) -> None:
        """I1: one hash per version, over all processes that ever ran."""
        seen: dict[str, str] = {}
        for g in self.groups:
            for r in g.commits():
                if r["version"].startswith("-"):
                    continue
                assert seen.setdefault(r["version"], r["hash"]) == r["hash"], (g.replica_id, r)

    def end(self) -> None:
        for g in self.groups:
            if g.alive:
                g.process.send_signal(signal.SIGCONT)
                g.process.kill()
            g.process.wait()


def longest_gap(commits: list[dict], since: float, until: float) -> float:
    """Return the longest time between two commits around a stretch of time, in seconds."""
    times = [r["t"] for r in commits]
    return max(b - a for a, b in itertools.pairwise(times) if b > since and a < until)
