"""Fixtures for pytest with which a project breaks its own training script.

In `conftest.py`:

    pytest_plugins = ["ftkit.chaos.fixtures"]

Everything that a fixture starts ends with the test. An example is in docs/chaos.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftkit.chaos import netns
from ftkit.chaos.faults import Fault
from ftkit.chaos.live import Live, View
from ftkit.chaos.proxy import Proxy
from ftkit.config import as_variables, child_environment
from ftkit.demo.processes import Launch
from ftkit.errors import EtcdError
from ftkit.keeper.embedded import EtcdCluster, EtcdServer
from ftkit.keeper.etcd import Etcd, EtcdSettings
from ftkit.launcher.process import die_with_parent

LOOK_S = 0.05


class LaunchedJob:
    """A training script under `ftkit launch`, and what may be done to it."""

    def __init__(self, launch: Launch, etcd: Etcd, job: str, log: Path) -> None:
        self.launch = launch
        self.live = Live(etcd, job)
        self.log = log
        """Where the output of launch and of all trainers goes."""

    def wait(self, condition: Callable[[View], bool], what: str, timeout_s: float = 60.0) -> View:
        """Wait until the job is as wanted, and return how it is; faults that are due are taken back.

        Raises:
            AssertionError: it did not come so far; the end of the job's output tells why.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(EtcdError):
                view = self.live.look()
                if condition(view):
                    return view
            if time.monotonic() > deadline or self.launch.exit_code is not None:
                raise AssertionError(f"waited in vain for {what}\n{self.launch.last_words(30)}")
            time.sleep(LOOK_S)

    def wait_training(self, *names: str, after: int = 0, timeout_s: float = 60.0) -> int:
        """Wait until exactly these groups form an epoch, one later than `after`; return its number."""

        def formed(view: View) -> bool:
            return view.epoch is not None and view.epoch.id > after and view.training == set(names)

        view = self.wait(formed, f"an epoch of {', '.join(names)}", timeout_s)
        assert view.epoch is not None, "just seen"
        return view.epoch.id

    def strike(self, kind: str, replica_id: str = "", *, lasting: float = 0.0) -> str:
        """Do to a group, at once, what `ftkit chaos` would do; return it in words."""
        view = self.live.look()
        names = [member.replica_id for member in self.live.candidates(view)]
        victim = names.index(replica_id) if replica_id else -1
        return self.live.strike(Fault(at=0.0, kind=kind, victim=victim, lasting=lasting), view)


@pytest.fixture
def chaos_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of the test's own: `kill`, `stop`, `freeze`, `thaw`, `wipe`, `start`."""
    with EtcdServer(data_dir=tmp_path / "chaos-etcd") as server:
        yield server


@pytest.fixture
def chaos_etcd_cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three etcd servers that form a cluster; each of them may be treated badly."""
    with EtcdCluster(tmp_path / "chaos-etcds") as cluster:
        yield cluster


@pytest.fixture
def chaos_proxy() -> Iterator[Callable[..., Proxy]]:
    """Make proxies: `chaos_proxy(target, seed=0)`, see `ftkit.chaos.proxy`."""
    with contextlib.ExitStack() as stack:
        yield lambda target, **settings: stack.enter_context(Proxy(target, **settings))


@pytest.fixture
def chaos_machines() -> Iterator[Callable[..., netns.Machines]]:
    """Make machines with a network that can be parted; skips where there are no rights for it."""
    why_not = netns.missing()
    if why_not:
        pytest.skip(why_not)
    with contextlib.ExitStack() as stack:
        yield lambda *hosts, **settings: stack.enter_context(netns.Machines(hosts, **settings))


@pytest.fixture
def chaos_job(tmp_path: Path, chaos_etcd: EtcdServer) -> Iterator[Callable[..., LaunchedJob]]:
    """Run a training script: `chaos_job("train.py", "--lr", 0.1, groups=3, lease_ttl=2)`.

    `groups` replica groups named trainer-0, trainer-1 …; `etcd` (default: that of `chaos_etcd`) is the URL
    that they are given; all other keywords are settings of ftkit. A group that fails is started again.
    """
    with contextlib.ExitStack() as stack:

        def run(
            script: str | Path, *words: object, groups: int = 2, etcd: str = "", **settings: object
        ) -> LaunchedJob:
            env = {k: v for k, v in child_environment().items() if not k.startswith(("FTKIT_", "ETCDCTL_"))}
            env |= as_variables(settings)
            job, log = f"chaos-{time.monotonic_ns()}", tmp_path / "launch.log"
            command = ["--groups", groups, "--etcd", etcd or chaos_etcd.url, "--job", job]
            command += ["--restart-delay", 0.2, "--max-restarts", -1, "--grace", 10, "--", script, *words]
            client = stack.enter_context(Etcd(EtcdSettings(endpoints=(chaos_etcd.url,), timeout_s=3.0)))
            argv = [str(word) for word in command]
            launch = stack.enter_context(Launch(argv, env=env, log=log, before_exec=die_with_parent()))
            made = LaunchedJob(launch, client, job, log)
            stack.callback(made.live.undo_all)  # before the launch is ended: nobody may stay frozen
            return made

        yield run
