"""A job of one's own to be broken: etcd, a proxy per group in front of it, and replica groups.

Each group is an `ftkit launch` of its own, as on a machine of its own. What the trainers' journals tell says
who is well; `strike` does harm, `look` takes it back when it is due.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ftkit.chaos.faults import Fault
from ftkit.chaos.gauges import Gauges
from ftkit.chaos.kinds import PARTITIONS, TABLE, TAKES_TWO
from ftkit.chaos.netns import Machines
from ftkit.chaos.network import Network, Parts
from ftkit.chaos.orders import Orders
from ftkit.chaos.processes import is_trainer, keepers_of
from ftkit.chaos.servers import Servers
from ftkit.chaos.strikes import Victim, order_for
from ftkit.config import child_environment
from ftkit.demo.journal import Tail
from ftkit.demo.processes import Launch, find_script
from ftkit.demo.story import Story
from ftkit.errors import FtkitError
from ftkit.keeper.keys import JobKeys
from ftkit.launcher.process import die_with_parent

JOB = "chaos"
LOOK_S = 0.02
END_S = 40.0
GAUGE_EVERY_S = 5.0
ORDER_S = 0.2
"""An order that was taken strikes within this time; a commit in between says nothing of the time after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the job consists of."""

    folder: Path
    groups: int = 3
    ranks: int = 1
    """Of each group."""
    min_replicas: int = 1
    lease_ttl: int = 2
    step_time_s: float = 0.1
    etcd_servers: int = 1
    etcd_auth: bool = False
    machines: bool = False
    """Each group on a machine of its own: a network namespace, see `netns.missing`."""


class Job:
    """The etcd and the groups, and what their journals tell."""

    def __init__(self, setup: Setup) -> None:
        """Start nothing yet; the folder is the run's own."""
        self.setup = setup
        folder = setup.folder
        self.journal = folder / "journal"
        for part in (self.journal, folder / "logs", folder / "orders"):
            part.mkdir(parents=True, exist_ok=True)
        self.names = tuple(f"trainer-{i}" for i in range(setup.groups))
        self.stories = tuple(Story() for _ in range(setup.ranks))
        """What the ranks of each number tell."""
        self.story = self.stories[0]
        self.trouble = ""
        self.gauges = Gauges()
        self.etcd = Servers(folder / "etcd", JOB, num=setup.etcd_servers, auth=setup.etcd_auth)
        self.orders = Orders(folder / "orders")
        self._network: dict[str, Network] = {}
        self._machines: Machines | None = None
        self._parts: Parts | None = None
        self._tail = Tail(self.journal)
        self._notes = os.open(self.journal / "chaos.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._launches: dict[str, Launch] = {}
        self._num_launched = self._num_orders = 0
        self._struck: dict[str, float] = {}
        self._ordered: set[str] = set()
        self._etcd_hurt = False
        """Whether etcd has not been seen to answer after what was last done to it."""
        self._undo: list[tuple[float, str, Callable[[], object]]] = []
        self._ending = False
        self._ends = contextlib.ExitStack()
        self._next_reading = 0.0

    # -- what runs -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start etcd and all groups; with machines, this thread moves to that of etcd for good."""
        host = "127.0.0.1"
        if self.setup.machines:
            self._machines = Machines((Parts.HOME, *self.names), Parts.NETWORKS)
            self._ends.enter_context(self._machines)
            self._machines.enter(Parts.HOME)
            self._parts = Parts(self._machines, self.names)
            host = self._machines.address(Parts.HOME, "etcd")
        self.etcd.start()
        for index, name in enumerate(self.names):
            self._network[name] = Network(self.etcd.urls, seed=index, host=host)
            self._launch(name)

    def _launch(self, name: str) -> None:
        """Start a group as on a machine of its own: a group that was drained comes back as a new one."""
        setup, folder = self.setup, self.setup.folder
        env = {k: v for k, v in child_environment().items() if not k.startswith(("FTKIT_", "ETCDCTL_"))}
        env |= {"FTKIT_LEASE_TTL": str(setup.lease_ttl), "FTKIT_TIMEOUT": "20", "OMP_NUM_THREADS": "1"}
        if self.etcd.user:
            env["FTKIT_ETCD_USER"] = self.etcd.user
        etcd = ",".join(self._network[name].urls)
        wrap: list[str] = []
        if self._machines is not None:
            wrap = self._machines.command(name)
            env |= dict.fromkeys(("FTKIT_BIND", "FTKIT_ADVERTISE"), self._machines.address(name, "data"))
        words = ["--groups", 1, "--first-index", self.names.index(name), "--etcd", etcd, "--job", JOB]
        words += ["--nproc-per-group", setup.ranks]
        words += ["--min-replicas", setup.min_replicas, "--restart-delay", 0.2, "--max-restart-delay", 1]
        words += ["--max-restarts", -1, "--grace", 20, "--log-dir", folder / "logs", "--"]
        words += ["-m", "ftkit.chaos.inside", "--orders", folder / "orders"]
        words += ["--journal", self.journal / "chaos.jsonl", find_script()]
        words += ["--width", 32, "--layers", 1, "--context", 32, "--batch-size", 4]
        words += ["--steps", 10_000_000, "--decay-steps", 10_000, "--eval-every", 0, "--hash-every", 1]
        words += ["--log-samples", "--step-time", setup.step_time_s, "--log-jsonl", self.journal]
        self._num_launched += 1
        log = folder / "logs" / f"launch-{name}.{self._num_launched}.log"
        self._launches[name] = Launch(
            [str(w) for w in words], env=env, log=log, before_exec=die_with_parent(), wrap=wrap
        )

    def note(self, type: str, **content: object) -> None:
        """Append a line to the journal of faults, for the oracle."""
        line = {"type": type, "monotonic": time.monotonic(), **content}
        os.write(self._notes, json.dumps(line).encode() + b"\n")

    def look(self) -> float:
        """Take in what the journals tell, take back faults that are due; return the time."""
        for line in self._tail.poll():
            self.stories[line.rank].absorb(line)
        now = time.monotonic()
        for due in [u for u in self._undo if u[0] <= now]:
            self._undo.remove(due)
            due[2]()
        for name, launch in self._launches.items():
            code = launch.exit_code
            if code is None or self._ending:
                continue
            if code != 0:
                self.trouble = self.trouble or f"{name} ended with {code}: {launch.last_words(5)}"
            self._launch(name)
        if now >= self._next_reading:
            self._next_reading = now + GAUGE_EVERY_S
            self._read_gauges(now)
        return now

    def _read_gauges(self, now: float) -> None:
        for name in self.names:
            pid = self.story.pid(name)
            if pid is not None:
                self.gauges.look(name, pid, now)
                for keeper in keepers_of(pid):
                    self.gauges.look(f"keeper of {name}", keeper, now)

    def together(self) -> bool:
        """Say whether all groups commit in one epoch, each after what was last done to it."""
        busy = self._undo or self.waiting() or not self._etcd_answers()
        return (
            not busy
            and all(story.together(self.names) for story in self.stories)
            and self.fit() == set(self.names)
        )

    def _etcd_answers(self) -> bool:
        """Ask it after a harm: trainers commit without it, but the next fault would wait for it."""
        if self._etcd_hurt and self.etcd.answers():
            self._etcd_hurt = False
            self._struck["etcd"] = time.monotonic()
        return not self._etcd_hurt

    def waiting(self) -> set[str]:
        """Return the groups whose order still waits; those that have taken theirs are struck from now on."""
        waiting = self.orders.waiting()
        for name in self._ordered - waiting:
            self._struck[name] = time.monotonic() + ORDER_S
        self._ordered = waiting
        return waiting

    def fit(self) -> set[str]:
        """Return the groups that have committed of late, and after what was done to them."""
        found, now = set(), time.monotonic()
        for name in self.names:
            since = max(self._struck.get(name, 0.0), self._struck.get("etcd", 0.0), now - 2.0)
            commits = [story.last_commit(name) for story in self.stories]
            if all(last is not None and last.monotonic > since for last in commits):
                found.add(name)
        return found

    def wait_together(self, patience_s: float) -> bool:
        """Wait until all groups train together."""
        deadline = time.monotonic() + patience_s
        while not self.together():
            if self.look() > deadline or self.trouble:
                return False
            time.sleep(LOOK_S)
        return True

    # -- faults --------------------------------------------------------------------------------------

    def ready_for(self, fault: Fault) -> bool:
        """Say whether the fault may strike now: never the last one that has the state."""
        if fault.calm:
            return self.together()
        target, waiting = "etcd" if fault.victim < 0 else self.names[fault.victim], self.waiting()
        if any(name == target for _, name, _ in self._undo) or target in waiting:
            return False
        if fault.victim < 0:
            return True
        newest = self.story.newest()
        if newest is None or self.story.pid(target) is None:
            return False
        keepers = (self.fit() & set(newest.members)) - {target} - waiting
        return not TABLE[fault.kind].takes_out or len(keepers) >= max(1, self.setup.min_replicas)

    def strike(self, fault: Fault) -> None:
        """Carry a fault out; one that lasts is taken back later."""
        kind, name = fault.kind, "etcd" if fault.victim < 0 else self.names[fault.victim]
        undo: Callable[[], object] | None = None
        if kind in PARTITIONS:
            assert self._parts is not None, "the job runs on machines of its own"
            self.note("fault", kind=kind, replica="" if fault.victim < 0 else name)
            undo = self._parts.strike(kind, name)
        elif fault.victim < 0:
            self.note("fault", kind=kind)
            self._etcd_hurt = True
            undo = self.etcd.strike(kind, fault.chance)
        elif kind.startswith("net-"):
            self.note("fault", kind=kind, replica=name)
            undo = self._network[name].strike(kind, fault.chance, self.setup.lease_ttl)
        elif kind == "revoke-lease":
            self.note("fault", kind=kind, replica=name)
            self._revoke(name)
        elif TABLE[kind].phase:
            self._order(fault, name)
        else:
            undo = self._victim(name).strike(kind, fault.chance)
        self._struck[name] = time.monotonic()
        if undo is not None:
            self._later(fault.lasting, name, undo)

    def _order(self, fault: Fault, name: str) -> None:
        """Tell a trainer to fail in a phase, and see that the phase comes."""
        self._num_orders += 1
        self.orders.give(name, order_for(fault, TABLE[fault.kind].phase, self._num_orders))
        self._ordered.add(name)
        if fault.lasting:
            self._later(fault.lasting, name, lambda: None)  # it ends by itself
        if fault.kind in ("kill-in-meeting", "kill-joiner"):
            self._victim(name).strike("kill", fault.chance)  # its successor reads the order
        elif fault.kind in TAKES_TWO:
            other = self.names[(fault.victim + 1) % len(self.names)]
            self._victim(other).strike("kill")
            self._struck[other] = time.monotonic()

    def _victim(self, name: str) -> Victim:
        pid = self.story.pid(name)
        assert pid is not None, "only those that have started are struck"

        def note(number: signal.Signals, whose: int) -> None:
            self.note("fault", kind=number.name, pid=whose, replica=name)

        return Victim(name, pid, note, lambda: is_trainer(pid, name))

    def _revoke(self, name: str) -> None:
        with contextlib.suppress(FtkitError), self.etcd.client() as client:
            record = client.get(JobKeys(JOB).member_of(name))
            if record is not None and record.lease:
                client.revoke(record.lease)

    def _later(self, seconds: float, target: str, undo: Callable[[], object]) -> None:
        def take_back() -> None:
            undo()
            self._struck[target] = time.monotonic()

        self._undo.append((time.monotonic() + seconds, target, take_back))

    # -- the end -------------------------------------------------------------------------------------

    def undo_all(self) -> None:
        """Take back all faults that still last: nobody may stay frozen."""
        undo, self._undo = self._undo, []
        for _, _, fn in undo:
            fn()

    def end(self) -> None:
        """Ask all groups to leave, see that they do, and say that nobody runs any more."""
        self._ending = True
        self.undo_all()
        for launch in self._launches.values():
            launch.ask_to_end()
        deadline = time.monotonic() + END_S
        while any(x.exit_code is None for x in self._launches.values()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        for name, launch in self._launches.items():
            if launch.exit_code != 0:
                code = launch.exit_code
                how = "did not end" if code is None else f"ended with {code}"
                self.trouble = self.trouble or f"{name} {how}: {launch.last_words(5)}"
            with launch:
                pass
        for network in self._network.values():
            network.close()
        self.etcd.stop()
        self._ends.close()
        self.look()
        self.note("over")
        os.close(self._notes)
