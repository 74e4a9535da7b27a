"""Measure how a job's control plane behaves with many members: a death, a hundred joiners, a calm minute.

python scripts/scale.py
python scripts/scale.py --members 50,200 --json

Starts an etcd on this machine and simulated members: the keepers' real parts, dozens per process, without
trainers (`scale_member.py`). All share this machine's processors with etcd, while real keepers have their
own: the times are upper bounds, which is why the processor seconds behind them are told as well. What only
dozens of keepers in one process would do to each other is switched off. Prints what etcd has to do while
nothing changes, how long it takes until all know of a death and of a hundred joiners, and with which power
of the number of members each figure grew. Exit code 1: a promise is not kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftkit.keeper.embedded import EtcdServer

WORKER = Path(__file__).with_name("scale_member.py")
JOB = "scale"
STATS_S = 10.0
SETTLE_S = 3.0
WAVE = 100
"""So many members start at a time: on a few processors, a thousand at once would starve etcd."""
DEATH_S = 2.0
"""A death must be known by all after this time."""
TOLERANCE = 1.1
"""Of what is allowed per second: the time that is measured begins and ends between two keep-alives."""
SLACK = 5
"""All but so many must be there before the first epoch: a job that grows one by one is another story."""

Row = dict[str, float]
Counter = dict[str, float]


class Etcd:
    """The server under load, asked for its own account."""

    def __init__(self, server: EtcdServer) -> None:
        self.server = server

    def figures(self) -> Counter:
        """Return requests by method, bytes, processor seconds and the size of the database."""
        with urllib.request.urlopen(f"{self.server.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found: Counter = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("grpc_server_msg_received_total"):
                method = re.search(r'grpc_method="(\w+)"', name)
                key = f"requests {method[1] if method else name}"
            elif name in _PLAIN:
                key = _PLAIN[name]
            else:
                continue
            found[key] = found.get(key, 0.0) + float(value)
        return found


_PLAIN = {
    "etcd_network_client_grpc_received_bytes_total": "bytes in",
    "etcd_network_client_grpc_sent_bytes_total": "bytes out",
    "process_cpu_seconds_total": "cpu",
    "etcd_mvcc_db_total_size_in_bytes": "database",
    "process_resident_memory_bytes": "memory",
}


def difference(after: Counter, before: Counter) -> Counter:
    """Return what came on top."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def requests(figures: Counter) -> float:
    """Sum the requests of all methods."""
    return sum(value for name, value in figures.items() if name.startswith("requests "))


class Workers:
    """The processes that hold the members, spoken to in JSON lines."""

    def __init__(self, num: int, setup: dict[str, Any]) -> None:
        self.news: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self.members: list[list[str]] = [[] for _ in range(num)]
        self.trouble: list[str] = []
        self._cpu: dict[int, float] = {}
        self._held: dict[int, int] = {}
        self._epochs: dict[tuple[int, int], dict[int, tuple[int, float]]] = {}
        self._switched = 0
        self._processes = [
            subprocess.Popen([sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(num)
        ]
        for index in range(num):
            threading.Thread(target=self._read, args=(index,), daemon=True).start()
        self.order(**setup)

    def order(self, worker: int | None = None, **words: Any) -> None:
        """Tell one worker something, or all."""
        for index, process in enumerate(self._processes):
            if worker in (None, index):
                assert process.stdin is not None
                process.stdin.write(json.dumps(words).encode() + b"\n")
                process.stdin.flush()

    def start(self, names: list[str]) -> None:
        """Start members, spread over the workers."""
        for index in range(len(self.members)):
            mine = names[index :: len(self.members)]
            self.members[index] += mine
            self.order(index, start=mine)

    def kill(self, name: str) -> None:
        """Kill one member."""
        index = next(i for i, names in enumerate(self.members) if name in names)
        self.members[index].remove(name)
        self.order(index, kill=name)

    def wait(self, kind: str, timeout_s: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the news of a kind as they come; see to the rest."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise SystemExit(f"no end after {timeout_s:g} s; {self.trouble[-3:]} {self._last()}")
            try:
                index, news = self.news.get(timeout=left)
            except queue.Empty:
                continue
            self._note(index, news)
            if kind in news:
                yield index, news

    def _last(self) -> str:
        return str({at: sum(n for n, _ in by.values()) for at, by in list(self._epochs.items())[-3:]})

    def _note(self, index: int, news: dict[str, Any]) -> None:
        if "reconfigure" in news and news["reconfigure"] > self._switched:
            # What the vote does between trainers: all learn at the same step boundary that they switch.
            self._switched = news["reconfigure"]
            self.order(boundary=self._switched)
        elif "trouble" in news:
            self.trouble.append(news["trouble"])
        elif "epoch" in news:
            by = self._epochs.setdefault((news["epoch"], news["seats"]), {})
            count, at = by.get(index, (0, 0.0))
            by[index] = (max(count, news["members"]), max(at, news["at"]))

    def wait_together(self, timeout_s: float) -> tuple[int, float]:
        """Wait until all members are in one epoch of them all; return it, and when the last one knew it."""
        wanted = sum(len(names) for names in self.members)
        for _, news in self.wait("epoch", timeout_s):
            by = self._epochs[(news["epoch"], news["seats"])]
            if news["seats"] == wanted == sum(count for count, _ in by.values()):
                return news["epoch"], max(at for _, at in by.values())
        raise AssertionError("unreachable")

    def newest_epoch(self) -> int:
        """Return the newest epoch that anybody has told of."""
        return max((epoch for epoch, _ in self._epochs), default=0)

    def wait_held(self, num: int, timeout_s: float) -> None:
        """Wait until so many member keys stand."""
        for index, news in self.wait("held", timeout_s):
            self._held[index] = news["held"]
            if sum(self._held.values()) >= num:
                return

    def cpu(self) -> float:
        """Return the processor seconds that all workers have used."""
        self.order(cpu=1)
        used: dict[int, float] = {}
        for index, news in self.wait("cpu", 60.0):
            used[index] = news["cpu"]
            if len(used) == len(self._processes):
                break
        return sum(used.values())

    def _read(self, index: int) -> None:
        stdout = self._processes[index].stdout
        assert stdout is not None
        for line in stdout:
            self.news.put((index, json.loads(line)))

    def close(self) -> None:
        """End all."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def measure(num: int, args: argparse.Namespace) -> Row:
    """Measure one size of job."""
    with tempfile.TemporaryDirectory(prefix="ftkit-scale-") as folder, contextlib.ExitStack() as stack:
        server = stack.enter_context(EtcdServer(data_dir=Path(folder) / "etcd", durable=True))
        etcd = Etcd(server)
        names = [f"trainer-{i:05d}" for i in range(num)]
        setup = {
            "etcd": server.url,
            "job": JOB,
            "lease_ttl": args.lease_ttl,
            "min_replicas": max(1, num - args.deaths - SLACK),
            "per_connection": args.per_connection,
        }
        workers = Workers(max(2, math.ceil(num / args.per_process)), setup)
        stack.callback(workers.close)
        began = time.monotonic()
        for first in range(0, num, WAVE):
            workers.start(names[first : first + WAVE])
            workers.wait_held(min(num, first + WAVE), 600.0)
        held = time.monotonic()
        _, known = workers.wait_together(600.0)
        say(f"{num} members: {held - began:.1f} s to start, in one epoch after {known - began:.1f} s")
        row: Row = {"members": num}
        time.sleep(SETTLE_S)
        for part in (steady, deaths, joiners):
            found = part(workers, etcd, names, args)
            say("  " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
            row |= found
        figures = etcd.figures()
        row |= {"etcd_memory_mib": figures["memory"] / 2**20, "database_mib": figures["database"] / 2**20}
        row["troubles"] = len(workers.trouble)
        for line in workers.trouble[:3]:
            say(f"  {line}")
    return row


def steady(workers: Workers, etcd: Etcd, names: list[str], args: argparse.Namespace) -> Row:
    """Measure what etcd has to do while nothing changes."""
    num = len(names)
    before, cpu, began = etcd.figures(), workers.cpu(), time.monotonic()
    time.sleep(args.steady)
    seconds = time.monotonic() - began
    more = difference(etcd.figures(), before)
    keepers = workers.cpu() - cpu
    per_s = {name: value / seconds for name, value in more.items()}
    keep_alives, stats = per_s["requests LeaseKeepAlive"], per_s["requests Put"]
    return {
        "steady_requests_per_s": requests(per_s),
        "steady_bytes_per_s": per_s["bytes in"] + per_s["bytes out"],
        "keep_alives_of_allowed": keep_alives / (num / (args.lease_ttl / 3)),
        "stats_of_allowed": stats / (num / STATS_S),
        "other_requests_per_s": requests(per_s) - keep_alives - stats,
        "steady_etcd_cpu": per_s["cpu"],
        "steady_keeper_cpu_per_member": keepers / seconds / num,
    }


def deaths(workers: Workers, etcd: Etcd, names: list[str], args: argparse.Namespace) -> Row:
    """Kill members one by one, the first proposer among them."""
    times: list[float] = []
    costs: list[Counter] = []
    cpu = 0.0
    victims = [names[0], *names[len(names) // 2 :]][: args.deaths]
    for victim in victims:
        before, used = etcd.figures(), workers.cpu()
        workers.kill(victim)
        at = next(news["at"] for _, news in workers.wait("killed", 60.0))
        _, known = workers.wait_together(120.0)
        say(f"  {victim}: {known - at:.3f} s")
        times.append(known - at)
        costs.append(difference(etcd.figures(), before))
        cpu += workers.cpu() - used
        time.sleep(1.0)
    return {
        "death_p50_s": statistics.median(times),
        "death_max_s": max(times),
        "death_requests": statistics.median(requests(c) for c in costs),
        "death_bytes": statistics.median(c["bytes in"] + c["bytes out"] for c in costs),
        "death_etcd_cpu_s": statistics.median(c["cpu"] for c in costs),
        "death_keeper_cpu_s": cpu / len(victims),
    }


def joiners(workers: Workers, etcd: Etcd, names: list[str], args: argparse.Namespace) -> Row:
    """Let many join at once."""
    many = min(args.joiners, len(names))
    before = etcd.figures()
    began = time.monotonic()
    first = workers.newest_epoch()
    workers.start([f"joiner-{i:05d}" for i in range(many)])
    last, known = workers.wait_together(300.0)
    return {
        "joiners": many,
        "join_s": known - began,
        "join_epochs": last - first,
        "join_requests": requests(difference(etcd.figures(), before)),
    }


def growth(rows: list[Row]) -> dict[str, float]:
    """Return for each figure the power of N with which it grew from the first row to the last."""
    first, last = rows[0], rows[-1]
    span = math.log(last["members"] / first["members"]) if len(rows) > 1 else 0.0
    return {
        name: math.log(last[name] / first[name]) / span
        for name in last
        if span and name not in ("members", "troubles", "joiners") and first[name] > 0 and last[name] > 0
    }


def table(rows: list[Row]) -> str:
    """Lay the figures out, one line each."""
    grew = growth(rows)
    lines = ["".join([f"{'':32}", *(f"{row['members']:>12.0f}" for row in rows), f"{'grows as':>12}"])]
    for name in rows[0]:
        if name == "members":
            continue
        power = f"N^{grew[name]:.1f}" if name in grew else ""
        lines.append("".join([f"{name:32}", *(f"{row[name]:>12.4g}" for row in rows), f"{power:>12}"]))
    return "\n".join(lines)


def verdict(row: Row) -> list[str]:
    """Return what does not hold of what is promised."""
    who, wrong = f"{row['members']:.0f} members", []
    if row["death_p50_s"] >= DEATH_S:
        wrong.append(f"{who}: a death was known by all after {row['death_p50_s']:.2f} s")
    idle = (row["keep_alives_of_allowed"], row["stats_of_allowed"])
    if max(idle) > TOLERANCE or row["other_requests_per_s"] > 1.0:
        wrong.append(f"{who}: etcd has more to do than it should while nothing changes")
    return wrong


def say(text: str) -> None:
    """Tell how it goes, apart from the result."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--members", default="50,200,1000", metavar="N,N", help="sizes of job (default: 50,200,1000)")
    add("--per-process", type=int, default=25, metavar="N", help="members in one process (default: 25)")
    add("--per-connection", type=int, default=16, metavar="N", help="members on one connection (default: 16)")
    add("--lease-ttl", type=int, default=45, metavar="S", help="life of a lease (default: 45)")
    add(
        "--steady", type=float, default=30.0, metavar="S", help="the calm time that is measured (default: 30)"
    )
    add("--deaths", type=int, default=5, metavar="N", help="how many die, one by one (default: 5)")
    add("--joiners", type=int, default=100, metavar="N", help="how many join at once (default: 100)")
    add("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # etcd and the workers must not be left behind
    rows = [measure(int(num), args) for num in args.members.split(",")]
    wrong = [line for row in rows for line in verdict(row)]
    if args.json:
        print(json.dumps({"rows": rows, "grows_as_power_of_n": growth(rows), "wrong": wrong}))
    else:
        print(table(rows))
        print("\n".join(wrong) or "all as promised")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
