"""Many simulated members in one process, for `scale.py`: real keepers' parts, without trainers.

Each member has what a keeper has: the machine, the lease, the writer, the watches, the stats; only the
connection to etcd is shared with others of its process, and etcd sees as many requests and streams as if it
were not. What its ranks would say is made up here: they stop the moment they are told to, and ask for the
next epoch. Reads orders as JSON lines, answers likewise; knows nothing of the measuring.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections import Counter
from typing import Any

from ftkit.core import events as ev
from ftkit.core.machine import Member
from ftkit.core.model import FRESH, Epoch, JobConfig, Policy, Record, Version
from ftkit.errors import EtcdError
from ftkit.keeper import link
from ftkit.keeper.admission import admit, own_config
from ftkit.keeper.etcd import Etcd, EtcdSettings
from ftkit.keeper.inbox import Changes, Inbox
from ftkit.keeper.keys import JobKeys
from ftkit.keeper.lease import LeaseKeeper
from ftkit.keeper.progress import Phase, Progress
from ftkit.keeper.sight import Sight
from ftkit.keeper.stats import StatsPublisher
from ftkit.keeper.writer import Writer

THREAD_STACK = 256 * 1024
SWITCH_S = 1.0
NICENESS = 10
"""etcd, which has a machine of its own elsewhere, goes first."""

# gRPC wakes each waiting thread ten times a second, so that Ctrl-C finds it. One keeper has a few of them and
# does not notice; this process has thousands, and would do nothing else.
link.grpc._common.MAXIMUM_WAIT_TIMEOUT = 60.0

# Likewise: each thread that waits for the interpreter's lock asks for it 200 times a second (`SWITCH_S`), and
# the collector, which in a keeper has next to nothing to look at, would look at what dozens of them know.

# A process that is late by seconds, as one of dozens of keepers may be here, has not lost its connection.
link._OPTIONS = [(name, 30_000 if name.endswith("timeout_ms") else value) for name, value in link._OPTIONS]


class Crowd:
    """The members of this process, and what they tell the process that measures."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.url = str(setup["etcd"])
        self.keys = JobKeys(setup["job"])
        self.ttl_s = int(setup["lease_ttl"])
        self.per_connection = int(setup["per_connection"])
        self.policy = Policy(min_replicas=setup["min_replicas"])
        self.members: dict[str, Simulated] = {}
        self.boundary = 0
        """The epoch whose members have agreed, in a vote, to switch to the next one."""
        self._lock = threading.Lock()
        self._epochs: Counter[tuple[int, int]] = Counter()
        """Of each epoch (id, number of seats), how many members here run in it."""
        self._held = 0

    def tell(self, **news: Any) -> None:
        """Write one line."""
        with self._lock:
            os.write(1, json.dumps(news).encode() + b"\n")

    def connection(self) -> Etcd:
        """Return a connection to etcd that few enough share."""
        if len(self.members) % self.per_connection == 0:
            self._connection = Etcd(EtcdSettings(endpoints=(self.url,), timeout_s=60.0))
        return self._connection

    def config(self) -> JobConfig:
        """Return what each member takes the job's settings to be."""
        return own_config(self.policy, group_world_size=1, token=None, fingerprint="", layout=())

    def start(self, names: list[str]) -> None:
        """Start members."""
        for name in names:
            self.members[name] = Simulated(self, name)
        for name in names:
            self.members[name].start()

    def holds(self) -> None:
        """One more member's key stands."""
        with self._lock:
            self._held += 1
            held = self._held
        self.tell(held=held)

    def moves(self, left: Epoch | None, entered: Epoch | None) -> None:
        """A member has left one epoch, or entered the next; tell when all here are in the same."""
        now = time.monotonic()
        with self._lock:
            if left is not None:
                self._epochs[(left.id, len(left.seats))] -= 1
            if entered is None:
                return
            at = (entered.id, len(entered.seats))
            self._epochs[at] += 1
            count = self._epochs[at]
        if count == len(self.members):
            self.tell(epoch=at[0], seats=at[1], members=count, at=now)


class Simulated:
    """One member."""

    def __init__(self, crowd: Crowd, name: str) -> None:
        self.crowd, self.name = crowd, name
        self.incarnation = os.urandom(16).hex()
        self.running: Epoch | None = None
        self.version = FRESH
        self._welcome = False
        self._steps = 0
        keys, put = crowd.keys, self._put
        self._inbox = Inbox()
        self._etcd = crowd.connection()
        self._machine = Member(name, self.incarnation, crowd.policy)
        self._lease = LeaseKeeper(
            self._etcd,
            crowd.ttl_s,
            lambda _: put(ev.LeaseLost()),
            self._trouble,
            period_s=crowd.policy.outage_grace / 4,
        )
        self._writer = Writer(
            self._etcd,
            keys,
            name,
            self.incarnation,
            self._lease,
            post=put,
            on_trouble=self._trouble,
            on_refused=self._trouble,
            on_waiting=lambda reason: None,
            readmit=lambda: admit(self._etcd, keys, name, crowd.config(), None),
        )
        self._sight = Sight(self._etcd, keys, name, put, on_config=lambda kv: None, on_trouble=self._trouble)
        self._stats = StatsPublisher(
            self._etcd,
            keys,
            name,
            self.incarnation,
            interval_s=10.0,
            lease=lambda: self._lease.id,
            read=self._progress,
            etcd_age=lambda: 0.0,
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin as a keeper does whose ranks have all connected."""
        self._thread.start()

    def die(self) -> None:
        """Be killed: the connection to the rank closes."""
        self._put(ev.Died(how="SIGKILL", version=self.version))

    def vote(self) -> None:
        """End a step: if the vote says so, all switch."""
        self._put(ev.Tick())

    def _put(self, event: ev.Event) -> None:
        self._inbox.put(event)

    def _trouble(self, error: Exception) -> None:
        self.crowd.tell(trouble=f"{self.name}: {error}")

    def _progress(self) -> Progress:
        self._steps += 200
        return Progress(mark=self._steps, version=self.version, phase=Phase.COMPUTE, committed=self._steps)

    def _record(self) -> Record:
        return Record(
            replica_id=self.name,
            incarnation=self.incarnation,
            host=f"host-{self.name}",
            pid=os.getpid(),
            rendezvous="10.0.0.1:41234",
            transports=("10.0.0.1:41235",),
        )

    def _run(self) -> None:
        self._lease.start()
        self._writer.start()
        while True:
            try:
                admitted = admit(self._etcd, self.crowd.keys, self.name, self.crowd.config(), None)
                break
            except EtcdError as error:
                self._trouble(error)
        self._writer.config_revision = admitted.mod_revision
        self._sight.open()
        self._have_done(self._machine.handle(ev.Ready(record=self._record()), time.monotonic()))
        while not self._machine.gone:
            self._turn()
        self._close()

    def _turn(self) -> None:
        """Do what the keeper's loop does."""
        wake = self._machine.wake_at()
        timeout_s = 60.0 if wake is None else max(0.0, wake - time.monotonic())
        item = self._inbox.get(timeout_s)
        now = time.monotonic()
        if item is None:
            self._have_done(self._machine.handle(ev.Tick(), now))
        elif isinstance(item, Changes):
            for change in item.changes:
                if change.section == "abort":
                    self._writer.abort_seen(0 if change.value is None else change.revision)
            self._have_done(self._machine.handle_all(item.changes, now))
        else:
            self._have_done(self._machine.handle(item, now))  # type: ignore[arg-type]
            if isinstance(item, ev.Held) and not self._welcome:
                self._welcome = True
                self._stats.start()
                self.crowd.holds()
                self._want("")

    def _have_done(self, effects: list[ev.Effect]) -> None:
        self._carry_out(effects)
        if self.running is not None and self.running.id <= self.crowd.boundary:
            self._want("")

    def _carry_out(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ev.Offer):
                self.crowd.moves(self.running, effect.epoch)
                self.running = effect.epoch
                self.version = Version(effect.epoch.id, effect.epoch.id)  # healed, and one step on
            elif isinstance(effect, ev.AbortWork):
                if self.running is not None and self.running.id == effect.epoch:
                    self._want(effect.why)
            elif isinstance(effect, ev.Reconfigure):
                self.crowd.tell(reconfigure=effect.epoch)
            elif isinstance(effect, ev.WatchTickets):
                self._sight.watch_tickets(effect.on)
            elif not isinstance(effect, ev.Suspects | ev.Waiting | ev.Leave):
                self._writer.submit(effect)

    def _want(self, failed: str) -> None:
        """Say what the ranks say at a boundary."""
        offered = None if self.running is None else self.running.id
        self.crowd.moves(self.running, None)
        self.running = None
        self._put(ev.Want(version=self.version, failed=failed, offered=offered))

    def _close(self) -> None:
        self._writer.close()
        self._stats.close()
        self._sight.close()
        self._lease.close(revoke=True)


def main() -> None:
    """Obey orders until the input ends."""
    os.nice(NICENESS)
    threading.stack_size(THREAD_STACK)
    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    crowd = Crowd(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        order = json.loads(line)
        if "start" in order:
            crowd.start(order["start"])
        elif "kill" in order:
            crowd.tell(killed=order["kill"], at=time.monotonic())
            crowd.members.pop(order["kill"]).die()
        elif "boundary" in order:
            crowd.boundary = order["boundary"]
            for member in list(crowd.members.values()):
                member.vote()
        elif "cpu" in order:
            crowd.tell(cpu=time.process_time())
    os._exit(0)


if __name__ == "__main__":
    main()
