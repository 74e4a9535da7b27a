"""A member of process groups in a process of its own, driven by lines of JSON; run as a script.

Commands are carried out one after the other on the main thread, except `abort`, which comes from another
thread as it does in life. Each answer carries the number of its command and the seconds that it took.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ReduceOp, Work

from ftkit.errors import GroupError
from ftkit.groups.gloo import ProcessGroupGloo
from ftkit.groups.store import RendezvousStore


class Member:
    """What the commands work on: groups, works and tensors by name."""

    def __init__(self) -> None:
        self.groups: dict[str, ProcessGroupGloo] = {}
        self.stores: list[RendezvousStore] = []
        self.works: dict[str, Work] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def group(self, name: str) -> ProcessGroupGloo:
        if name not in self.groups:
            self.groups[name] = ProcessGroupGloo(timeout_s=30)
        return self.groups[name]

    def host(self) -> str:
        self.stores.append(RendezvousStore())
        return self.stores[-1].address

    def num_keys(self) -> int:
        return self.stores[-1].num_keys()

    def configure(self, name: str, timeout_s: float = 20, **where: Any) -> None:
        self.group(name).configure(**where, timeout_s=timeout_s)

    def abort(self, name: str, why: str = "told to") -> None:
        self.group(name).abort(why)

    def sum(self, name: str, value: float = 1, numel: int = 4) -> float:
        tensor = torch.full((numel,), float(value))
        self.group(name).allreduce(tensor).wait()
        return float(tensor[-1])

    def start(self, name: str, numel: int = 4) -> None:
        self.tensors[name] = torch.ones(numel)
        self.works[name] = self.group(name).allreduce(self.tensors[name])

    def wait(self, name: str) -> float:
        self.works[name].wait()
        return float(self.tensors[name][-1])

    def start_recv(self, name: str, src: int, numel: int = 4) -> None:
        self.tensors[name] = torch.zeros(numel)
        self.works[name] = self.group(name).recv(self.tensors[name], src)

    def send(self, name: str, dst: int, value: float, numel: int = 4) -> None:
        self.group(name).send(torch.full((numel,), float(value)), dst).wait()

    def part(self, name: str, rank: int) -> None:
        """Let two members know that both have finished; else the first to abort fails the other."""
        group, tensor = self.group(name), torch.zeros(1)
        (group.recv(tensor, 1) if rank == 0 else group.send(tensor, 0)).wait()

    def changes(self, name: str, num: int, **where: Any) -> None:
        """Form groups anew without an abort, as members do that have agreed to change."""
        for epoch in range(num):
            self.configure(name, prefix=f"changes/{epoch}", **where)
            assert self.sum(name) == where["size"]

    def scribbled_on_after_abort(self, name: str) -> bool:
        """Abort, look at the tensor, and say whether it changed afterwards."""
        self.group(name).abort()
        before = self.tensors[name].clone()
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            if not torch.equal(before, self.tensors[name]):
                return True
        return False

    def error(self, name: str) -> str:
        error = self.group(name).errored()
        return "" if error is None else type(error).__name__

    def epochs(self, store: str, rank: int, size: int, first: int, num: int) -> None:
        for epoch in range(first, first + num):
            self.configure("many", store=store, prefix=f"many/{epoch}", rank=rank, size=size)
            assert self.sum("many", 2) == 2 * size
            self.part("many", rank)
            self.abort("many")

    def latencies_us(self, name: str, num: int) -> list[float]:
        took = []
        tensor = torch.zeros(6, dtype=torch.int64)
        for _ in range(num):
            start = time.perf_counter()
            self.group(name).allreduce(tensor, ReduceOp.MAX).wait()
            took.append((time.perf_counter() - start) * 1e6)
        return sorted(took)

    def churn(self, name: str, **where: Any) -> int:
        """Form and abort groups while another thread opens, uses and closes sockets; count what it lost."""
        over = threading.Event()
        lost = []

        def serve_ourselves() -> None:
            while not over.is_set():
                with socket.create_server(("127.0.0.1", 0)) as server, select.epoll() as poller:
                    poller.register(server)
                    with socket.create_connection(server.getsockname()) as caller:
                        called, _ = server.accept()
                        with called:
                            poller.register(called)
                            for _ in range(20):
                                caller.sendall(b"x")
                                if called.recv(1) != b"x":
                                    lost.append(1)

        thread = threading.Thread(target=serve_ourselves)
        thread.start()
        try:
            for epoch in range(20):
                self.configure(name, prefix=f"churn/{epoch}", **where)
                self.sum(name)
                self.part(name, where["rank"])
                self.abort(name)
        finally:
            over.set()
            thread.join()
        return len(lost)

    def break_off(self, name: str, folder: str, num: int, rank: int, **where: Any) -> float:
        """Form groups of which one member leaves in the middle; return the longest abort in seconds.

        Whoever fails first leaves a file, and all abort when they see it, as a keeper would have them do.
        """
        longest = 0.0

        def abort_when_told(sign: Path) -> None:
            nonlocal longest
            while not sign.exists():
                time.sleep(0.001)
            start = time.monotonic()
            self.group(name).abort("a member is gone")
            longest = max(longest, time.monotonic() - start)

        for epoch in range(num):
            dice = random.Random(epoch)
            leaver, after, numel = (
                dice.randrange(where["size"]),
                dice.randrange(1, 8),
                dice.choice([36, 5000, 200000]),
            )
            self.configure(name, prefix=f"{folder}/{epoch}", rank=rank, **where)
            group, sign = self.group(name), Path(folder, str(epoch))
            reader = threading.Thread(target=abort_when_told, args=(sign,))
            reader.start()
            for step in itertools.count():
                works = [group.allreduce(torch.ones(numel)) for _ in range(1 + epoch % 3)]
                if rank == leaver and step == after:
                    break
                try:
                    for work in works:
                        work.wait()
                except GroupError:
                    break
            sign.touch()
            start = time.monotonic()
            group.abort("broke off")
            longest = max(longest, time.monotonic() - start)
            reader.join()
        return longest

    def usage(self) -> dict[str, int]:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return {
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        }

    def fork(self) -> int:
        """Leave a child behind, as a DataLoader worker is when its trainer is killed."""
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        return pid

    def fork_and_say(self, name: str) -> list[str]:
        """Use the group and free it in a forked child; return what the child saw."""
        rfd, wfd = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self.groups[name].allreduce(torch.ones(1)).wait()
                seen = "it worked"
            except Exception as error:
                seen = type(error).__name__
            os.write(wfd, f"{seen} {self.groups[name].configured}".encode())
            self.groups.clear()
            sys.exit(0)
        os.close(wfd)
        with os.fdopen(rfd) as pipe:
            said = pipe.read().split()
        return [*said, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))]

    def run_program(self) -> int:
        """Leave a program behind that was started without closing descriptors."""
        return subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL).pid


def main() -> None:
    member = Member()
    inbox: queue.Queue[dict[str, Any]] = queue.Queue()
    # Children must not hold the pipe to the test open: it reads until its end.
    out = os.fdopen(os.dup(1), "w", buffering=1)

    def carry_out(command: dict[str, Any]) -> None:
        call: Callable[..., Any] = getattr(member, command.pop("do"))
        number = command.pop("number")
        start = time.monotonic()
        answer: dict[str, Any] = {"number": number}
        try:
            answer["value"] = call(**command)
        except SystemExit:
            raise
        except BaseException as error:
            answer["error"] = type(error).__name__
            answer["message"] = str(error)
        answer["took_s"] = time.monotonic() - start
        out.write(json.dumps(answer) + "\n")

    def read() -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "abort":
                threading.Thread(target=carry_out, args=(command,)).start()
            else:
                inbox.put(command)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        carry_out(inbox.get())


if __name__ == "__main__":
    main()
