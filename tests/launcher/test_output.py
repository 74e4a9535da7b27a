"""Many outputs on one terminal."""

from __future__ import annotations

import io
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ftkit.launcher.output import Console, LineWriter


def written(*chunks: bytes) -> list[str]:
    out = io.StringIO()
    writer = LineWriter(Console(out, colour=False, width=2), "t0", 0)
    for chunk in chunks:
        writer.feed(chunk)
    writer.close()
    return out.getvalue().splitlines()


def test_lines_are_prefixed_and_kept_whole() -> None:
    assert written(b"one\ntw", b"o\nthree") == ["[t0] one", "[t0] two", "[t0] three"]


def test_a_progress_bar_becomes_lines() -> None:
    """tqdm ends each update with a carriage return: raw, it would overwrite the other groups' lines."""
    assert written(b"1%\r2%\r", b"3%\r\ndone\n") == ["[t0] 1%", "[t0] 2%", "[t0] 3%", "[t0] done"]


def test_output_without_line_ends_does_not_pile_up() -> None:
    assert len(written(b"x" * 200_000)) == 4


def test_bytes_that_are_no_text_do_no_harm() -> None:
    assert written(b"\xff\xfe\n") == ["[t0] ��"]


@given(st.lists(st.text("ab\n", max_size=8).map(str.encode)))
def test_how_the_bytes_are_cut_makes_no_difference(chunks: list[bytes]) -> None:
    assert written(*chunks) == written(b"".join(chunks))


def test_a_console_that_nobody_reads_goes_silent() -> None:
    out = io.StringIO()
    out.close()
    console = Console(out, colour=False, width=2)
    console.line("t0", "x")
    console.line("t0", "y")


def test_the_log_file_holds_the_raw_output_of_all_incarnations(tmp_path: Path) -> None:
    log = tmp_path / "t0.log"
    for text in (b"first\n", b"second"):
        LineWriter(Console(io.StringIO(), colour=False, width=2), "t0", 0, log).feed(text)
    lines = log.read_text().splitlines()
    assert [line for line in lines if not line.startswith("---")] == ["first", "second"]
    assert sum(line.startswith("--- t0 started") for line in lines) == 2


def test_a_log_file_that_cannot_be_written_is_given_up() -> None:
    out = io.StringIO()
    writer = LineWriter(Console(out, colour=False, width=2), "t0", 0, Path("/proc/no/such.log"))
    writer.feed(b"x\n")
    assert "given up" in out.getvalue()
    assert "[t0] x" in out.getvalue()
