"""Real replica groups without tensors: rank processes, their keepers, and an etcd."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftkit.keeper.embedded import EtcdCluster, EtcdServer, find_etcd
from ftkit.keeper.etcd import Etcd, EtcdSettings
from ftkit.keeper.keys import JobKeys
from ftkit.keeper.link import rpc

SCRIPT = Path(__file__).parent / "rank_process.py"


def wait_until(condition: Callable[[], Any], timeout_s: float = 15.0, what: str = "") -> Any:
    """Poll until the condition holds and return its value."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.01)


class Rank:
    """One rank's process."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup = setup
        self.seen: list[dict[str, Any]] = []
        self.t0 = 0.0
        self._news: queue.Queue[dict[str, Any]] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "FTKIT_TEST_JOB": setup["settings"]["job"]},
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        self._write(setup)

    def _write(self, line: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line).encode() + b"\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self.process.stdout:
                self._news.put(json.loads(line))

    def do(self, *command: Any) -> None:
        self._write(command)

    def wait(self, kind: str, timeout_s: float = 15.0, **like: Any) -> dict[str, Any]:
        """Return the next report of a kind (and with these values), skipping others."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                report = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {kind} within {timeout_s} s; seen: {self.seen[-8:]}") from None
            self.seen.append(report)
            value = report["value"]
            if report["kind"] == kind and all(value.get(k) == v for k, v in like.items()):
                return report

    def epoch(self, timeout_s: float = 15.0) -> dict[str, Any]:
        return self.wait("EpochOffer", timeout_s)["value"]["epoch"]

    def keeper_pid(self) -> int:
        self.do("keeper")
        return int(self.wait("keeper")["value"])

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class World:
    """Starts groups of one job against one etcd and looks into it."""

    def __init__(self, job: str, *urls: str, user: str = "", password: str = "") -> None:
        self.job = job
        self.settings = {"etcd_user": f"{user}:{password}"} if user else {}
        self.urls = urls
        self.keys = JobKeys(job)
        self.ranks: list[Rank] = []
        self.etcd = Etcd(EtcdSettings(endpoints=urls, user=user, password=password))

    def start(
        self,
        name: str,
        *,
        rank: int = 0,
        incarnation: str | None = None,
        more: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Rank:
        base = {
            "etcd": ",".join(self.urls),
            "job": self.job,
            "replica_id": name,
            "lease_ttl": 2,
            "gather_window": 0.3,
            "freeze_grace": 1.0,
            "group_rank": rank,
            **self.settings,
        }
        if settings.get("group_world_size", 1) > 1:
            base |= {"master_addr": "127.0.0.1", "master_port": 1}
        started = Rank(
            {
                "settings": base | settings,
                "rank": rank,
                "incarnation": incarnation or uuid.uuid4().hex,
                **(more or {}),
            }
        )
        self.ranks.append(started)
        return started

    def get(self, key: str) -> Any:
        kv = self.etcd.get(key)
        return None if kv is None else json.loads(kv.value)

    def member(self, name: str) -> Any:
        return self.get(self.keys.member_of(name))

    def train(self, *names: str, **settings: Any) -> list[Rank]:
        """Start groups and bring them into one epoch."""
        ranks = [self.start(n, **settings) for n in names]
        for r in ranks:
            r.wait("Welcome")
        for r in ranks:
            r.do("want", [0, 0], "")
        for r in ranks:
            assert [s[0] for s in r.epoch()["seats"]] == sorted(names)
        return ranks

    def close(self) -> None:
        for r in self.ranks:
            r.close()
        self.etcd.close()
        wait_until(lambda: not processes_of(self.job), 20, "all keepers have ended")


def processes_of(job: str) -> list[int]:
    """Return the keepers, and other processes, that a job's ranks have left behind."""
    mark = f"FTKIT_TEST_JOB={job}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def server_of(etcd: Etcd, cluster: EtcdCluster) -> EtcdServer:
    """Return the server that a connection leads to."""
    answer = etcd.link.call(lambda c: c.maintenancestub.Status, rpc.StatusRequest(), repeatable=True)
    members = [s.member_id for s in etcd.status()]
    return cluster.servers[members.index(answer.header.member_id)]


@pytest.fixture
def world(etcd_url: str, job: str) -> Iterator[World]:
    with contextlib.closing(World(job, etcd_url)) as world:
        yield world


@pytest.fixture
def own_world(own_etcd: Any, job: str) -> Iterator[World]:
    with contextlib.closing(World(job, own_etcd.url)) as world:
        yield world


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ctl(server: EtcdServer, *arguments: str) -> None:
    command = [str(find_etcd().with_name("etcdctl")), f"--endpoints={server.url}", *arguments]
    subprocess.run(command, capture_output=True, check=True, env={"ETCDCTL_API": "3"})


@pytest.fixture(scope="module")
def auth_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    path = tmp_path_factory.mktemp("auth") / "data"
    with EtcdServer(data_dir=path, extra=("--auth-token-ttl=1",)) as server:
        ctl(server, "user", "add", "root:pw")
        ctl(server, "user", "grant-role", "root", "root")
        ctl(server, "role", "add", "trainer")
        ctl(server, "role", "grant-permission", "trainer", "--prefix=true", "readwrite", "/ftkit/")
        ctl(server, "user", "add", "me:pw")
        ctl(server, "user", "grant-role", "me", "trainer")
        ctl(server, "auth", "enable")
        yield server
