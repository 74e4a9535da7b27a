"""Bring the output of many ranks to one terminal, line by line, each with the name of who said it.

It knows nothing of processes: bytes come in, prefixed lines go out, and to a file where there is one.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TextIO

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_MAX_LINE = 64 * 1024
_LINE_END = re.compile(rb"\r?\n|\r(?!\n|$)")


class Console:
    """The terminal that all write to; it goes silent, and does not fail, when nobody reads any more."""

    def __init__(self, out: TextIO, *, colour: bool, width: int) -> None:
        self._out = out
        self._colour = colour
        self._width = width
        self._broken = False

    def line(self, label: str, text: str, index: int = 0) -> None:
        """Write one line under a label."""
        head = f"[{label}]"
        if self._colour:
            head = f"\x1b[{_COLOURS[index % len(_COLOURS)]}m{head}\x1b[0m"
        self.write(f"{head}{' ' * max(0, self._width - len(label))} {text}\n")

    def write(self, text: str) -> None:
        """Write text as it is."""
        if self._broken:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):  # `ftkit launch … | head`: the training is worth more than its log
            self._broken = True


class LineWriter:
    """One rank's output: cut into lines, prefixed for the console, raw in its log file."""

    def __init__(self, console: Console, label: str, index: int, log: Path | None = None) -> None:
        self._console = console
        self._label = label
        self._index = index
        self._rest = b""
        self._log = log
        if log is not None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            self._append(f"--- {label} started {stamp}\n".encode())

    def feed(self, data: bytes) -> None:
        """Take what was read; whole lines go out at once."""
        self._append(data)
        *lines, self._rest = _LINE_END.split(self._rest + data)
        for line in lines:
            self._emit(line)
        while len(self._rest) > _MAX_LINE:  # output without line ends must not eat the memory
            self._emit(self._rest[:_MAX_LINE])
            self._rest = self._rest[_MAX_LINE:]

    def close(self) -> None:
        """Write what is left of an unfinished line."""
        if self._rest:
            self._emit(self._rest.rstrip(b"\r"))
            self._rest = b""

    def _emit(self, line: bytes) -> None:
        self._console.line(self._label, line.decode("utf-8", "replace"), self._index)

    def _append(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            with self._log.open("ab", buffering=0) as file:
                file.write(data)
        except OSError as error:  # a full disk costs the log file, not the training
            self._console.line(self._label, f"log file {self._log} given up: {error}", self._index)
            self._log = None
