"""Run replica groups to their end: one loop that feeds events to the groups and carries their effects out.

What is done is decided in `group` and `restart`. One thread, which must be the main one: it receives the
signals, and the ranks' lives are tied to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import selectors
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from ftkit.keeper.ports import free_port
from ftkit.launcher.group import (
    Effect,
    Event,
    GroupMachine,
    Kill,
    Phase,
    RankExited,
    Say,
    Spawn,
    Stop,
    Terminate,
    Tick,
)
from ftkit.launcher.output import Console, LineWriter
from ftkit.launcher.process import Guardian, RankProcess, reap_adopted
from ftkit.launcher.spec import LaunchSpec, rank_environment

logger = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LONGEST_WAIT_S = 5.0
NOT_STARTED = 127
"""The exit code of a rank that could not be started, as a shell has it."""


class _Group:
    """A replica group's machine and the processes that it now has."""

    def __init__(self, machine: GroupMachine, index: int) -> None:
        self.machine = machine
        self.index = index
        self.ranks: dict[int, RankProcess] = {}
        self.port = 0


class Supervisor:
    """Starts the groups of a spec, keeps them running as its policy says, and ends them all."""

    def __init__(
        self,
        spec: LaunchSpec,
        *,
        env: Mapping[str, str],
        console: Console,
        notices: Console | None = None,
        guardian: Guardian,
        rng: random.Random | None = None,
    ) -> None:
        self._spec = spec
        self._env = env
        self._console = console
        self._notices = notices or console
        self._rng = rng or random.Random()
        self._selector = selectors.DefaultSelector()
        self._outputs: dict[int, LineWriter] = {}
        self._failed: list[_Group] = []
        self._guardian = guardian
        self._stops = 0
        now = time.monotonic()
        self._groups = [
            _Group(
                GroupMachine(
                    name,
                    num_ranks=spec.nproc,
                    policy=spec.restart,
                    grace_s=spec.grace_s,
                    sibling_grace_s=min(spec.sibling_grace_s, spec.grace_s),
                    uniform=self._rng.random,
                    now=now,
                ),
                index,
            )
            for index, name in enumerate(spec.replica_ids())
        ]

    def run(self) -> int:
        """Run all groups to their end; return 0, or the exit code of the first that failed."""
        if self._spec.log_dir is not None:
            self._spec.log_dir.mkdir(parents=True, exist_ok=True)
        with self._signals():
            try:
                self._loop()
            finally:
                self._clean_up()
        return self._verdict()

    def _loop(self) -> None:
        while not all(g.machine.phase is Phase.OVER for g in self._groups):
            now = time.monotonic()
            for group in self._groups:
                self._feed(group, Tick(), now)
            deadlines = [d for g in self._groups if (d := g.machine.next_deadline()) is not None]
            wait = min([_LONGEST_WAIT_S, *(d - now for d in deadlines)])
            for key, _ in self._selector.select(max(0.0, wait)):
                if key.data is None:
                    self._take_signals(key.fd)
                else:
                    self._pump(key.data)
            self._reap()

    def _feed(self, group: _Group, event: Event, now: float) -> None:
        for effect in group.machine.handle(event, now):
            self._carry_out(group, effect)
        if group.machine.exit_code and group not in self._failed:
            self._failed.append(group)
            self._warn_of_too_few()

    def _carry_out(self, group: _Group, effect: Effect) -> None:
        if isinstance(effect, Say):
            self._say(effect.text)
        elif isinstance(effect, Spawn):
            self._spawn(group)
        else:
            for rank in group.ranks.values():
                if isinstance(effect, Terminate):
                    rank.terminate()
                else:
                    assert isinstance(effect, Kill)
                    rank.kill()

    def _spawn(self, group: _Group) -> None:
        """Start the ranks of a new incarnation of a group."""
        spec, name = self._spec, group.machine.name
        if spec.nproc > 1:
            group.port = free_port({g.port for g in self._groups}, self._rng)
        group.ranks = {}
        trouble: OSError | None = None
        for rank in range(spec.nproc):
            env = rank_environment(
                spec, self._env, index=group.index, rank=rank, port=group.port, run=self._guardian.run
            )
            try:
                process = RankProcess(spec.argv, env)
            except OSError as error:
                trouble = error
                break
            self._guardian.tell(f"session {process.pid}")
            group.ranks[rank] = process
            label = name if spec.nproc == 1 else f"{name}/{rank}"
            self._outputs[process.output] = LineWriter(
                self._console, label, group.index, self._log_path(name, rank)
            )
            self._selector.register(process.output, selectors.EVENT_READ, process)
        if trouble is not None:
            self._say(f"{name}: could not start {spec.argv[0]}: {trouble}")
            now = time.monotonic()
            for rank in range(len(group.ranks), spec.nproc):
                self._feed(group, RankExited(rank, NOT_STARTED), now)

    def _log_path(self, name: str, rank: int) -> Path | None:
        if self._spec.log_dir is None:
            return None
        part = "" if self._spec.nproc == 1 else f".rank{rank}"
        return self._spec.log_dir / f"{name}{part}.log"

    def _pump(self, process: RankProcess) -> bool:
        """Pass on what a rank has written; say whether there may be more."""
        writer = self._outputs.get(process.output)
        data = process.read() if writer is not None else None
        if writer is None or data is None:
            return False
        if data:
            writer.feed(data)
            return True
        writer.close()
        self._selector.unregister(process.output)
        del self._outputs[process.output]
        os.close(process.output)
        return False

    def _reap(self) -> None:
        now = time.monotonic()
        for group in self._groups:
            for rank, process in list(group.ranks.items()):
                code = process.poll()
                if code is None:
                    continue
                # Its last words come before the news of its end. A keeper may hold the pipe open longer.
                while self._pump(process):
                    pass
                del group.ranks[rank]
                self._feed(group, RankExited(rank, code), now)
        self._guardian.check()
        reap_adopted(self._guardian.own)

    def _take_signals(self, fd: int) -> None:
        for number in os.read(fd, 4096):
            if number not in _STOP_SIGNALS:
                continue
            self._stops += 1
            name = signal.Signals(number).name
            if self._stops == 1:
                self._say(
                    f"{name}: groups have {self._spec.grace_s:g} s to leave at a step boundary; again to kill"
                )
            elif self._stops == 2:
                self._say(f"{name} again: killing all groups")
            now = time.monotonic()
            for group in self._groups:
                self._feed(group, Stop(now=self._stops > 1), now)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn signals into bytes that the loop reads, for as long as it runs."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # then a hangup is no reason to stop
        wanted = [n for n in _STOP_SIGNALS if not (nohup and n == signal.SIGHUP)]
        before = {n: signal.signal(n, _noted) for n in (*wanted, signal.SIGCHLD)}
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._selector.register(reader, selectors.EVENT_READ, None)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            os.close(reader)
            os.close(writer)

    def _clean_up(self) -> None:
        """Leave no process behind, whatever has happened."""
        for group in self._groups:
            for process in group.ranks.values():
                process.kill()
        for group in self._groups:
            for process in group.ranks.values():
                process.wait()
        killed = self._guardian.sweep()
        if killed:
            self._say(f"killed {killed} processes that the groups had left behind")
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, RankProcess):
                while self._pump(key.data):
                    pass
        for fd, writer in self._outputs.items():
            writer.close()
            os.close(fd)
        self._outputs.clear()

    def _verdict(self) -> int:
        if not self._failed:
            self._say(f"all {len(self._groups)} replica groups ended well")
            return 0
        names = ", ".join(f"{g.machine.name} (exit {g.machine.exit_code})" for g in self._failed)
        self._say(f"{len(self._failed)} of {len(self._groups)} replica groups failed: {names}")
        code = self._failed[0].machine.exit_code
        assert code is not None
        return code

    def _warn_of_too_few(self) -> None:
        left = sum(g.machine.phase is not Phase.OVER for g in self._groups)
        need = self._spec.min_replicas
        if need is not None and 0 < left < need and not self._stops:
            self._say(
                f"{left} groups are left here, min_replicas is {need}: they will wait for others to join"
            )

    def _say(self, text: str) -> None:
        self._notices.line("ftkit", text)


def _noted(_number: int, _frame: FrameType | None) -> None:
    """Let the wakeup descriptor do the work; a handler has to exist for that."""
