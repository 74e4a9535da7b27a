"""Peers: members of process groups in processes of their own, started once and replaced when they die."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Answer:
    """What a peer said to one command."""

    value: Any
    error: str
    message: str
    took_s: float


class Peer:
    """One peer process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._num_asked = 0
        self._answers: dict[int, queue.Queue[Answer]] = {}
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            answer = Answer(said.get("value"), said.get("error", ""), said.get("message", ""), said["took_s"])
            self._answers[said["number"]].put(answer)
        for answers in list(self._answers.values()):
            answers.put(Answer(None, "Died", f"peer {self.pid} has died", 0.0))

    def tell(self, do: str, **arguments: Any) -> Callable[..., Answer]:
        """Send a command; return a function that waits for its answer."""
        number = self._num_asked
        self._num_asked += 1
        answers = self._answers[number] = queue.Queue()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "number": number, **arguments}) + "\n")
        self._process.stdin.flush()
        return lambda timeout_s=40.0: answers.get(timeout=timeout_s)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send a command, wait until it is done, and return its value; it must not fail."""
        answer = self.tell(do, **arguments)()
        assert answer.error == "", answer.message
        return answer.value

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        if self.is_alive:
            self.signal(signal.SIGCONT)
            self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._reader.join(10)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[list[Peer]]:
    peers: list[Peer] = []
    yield peers
    for peer in peers:
        peer.close()


@pytest.fixture
def peers(pool: list[Peer]) -> Callable[[int], list[Peer]]:
    """Return a function that hands out so many living peers."""

    def hand_out(number: int) -> list[Peer]:
        for peer in [p for p in pool if not p.is_alive]:
            peer.close()
            pool.remove(peer)
        while len(pool) < number:
            pool.append(Peer())
        return pool[:number]

    return hand_out
