"""Show a person how far a fetch has come: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shutil
import time
from typing import Final, TextIO

from transport.api import Progress

LINE_S: Final = 5.0
"""Between two lines where there is no terminal."""
WINDOW_S: Final = 2.0
"""Over which the rate is taken."""


def megabytes(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


class Bar:
    """Writes to a stream what `Progress` says; a context manager, so that the line is ended."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._tty = stream, stream.isatty()
        self._next = time.monotonic() + (0.0 if self._tty else LINE_S)
        self._marks: list[tuple[float, int]] = [(0.0, 0)]
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        """Show it, if it is time."""
        done = progress.bytes_done == progress.bytes_total
        now = time.monotonic()
        if now < self._next and not (done and self._tty):
            return
        self._next = now + (0.1 if self._tty else LINE_S)
        text = self.text(progress)
        if not self._tty:
            self._stream.write(f"{text}\n")
        else:
            columns = shutil.get_terminal_size().columns
            room = columns - len(text) - 4
            if room >= 10:
                share = progress.bytes_done / max(1, progress.bytes_total)
                filled = int(min(room, 40) * share)
                text = f"[{'#' * filled}{'.' * (min(room, 40) - filled)}] {text}"
            text = text[: columns - 1]
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        self._stream.flush()

    def text(self, progress: Progress) -> str:
        """Return the figures: share, bytes, rate, time left, sources."""
        self._marks.append((progress.elapsed_s, progress.bytes_done))
        while len(self._marks) > 2 and progress.elapsed_s - self._marks[1][0] > WINDOW_S:
            del self._marks[0]
        since, before = self._marks[0]
        rate = (progress.bytes_done - before) / max(1e-9, progress.elapsed_s - since)
        left = progress.bytes_total - progress.bytes_done
        share = 100 * progress.bytes_done // max(1, progress.bytes_total) if left else 100
        parts = [f"{share:3d} %", f"{megabytes(progress.bytes_done)} of {megabytes(progress.bytes_total)}"]
        if rate > 0:
            parts.append(f"{megabytes(rate)}/s")
            if left:
                parts.append(f"{left / rate:.0f} s left")
        parts.append(f"{progress.num_sources} source{'s' if progress.num_sources != 1 else ''}")
        return ", ".join(parts)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
