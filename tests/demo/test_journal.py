"""The journals of trainers that may be killed while they write."""

import math
from pathlib import Path

from ftkit.demo.journal import Eval, Hash, Tail, parse

HASH = b'{"type": "hash", "monotonic": 1.5, "replica": "a", "pid": 7, "version": "1-10", "sha256": "ab"}'


def test_a_line_is_read_and_what_is_unknown_in_it_is_left_out() -> None:
    line = parse(HASH[:-1] + b', "later": [1]}')
    assert line == Hash(monotonic=1.5, replica="a", pid=7, version="1-10", sha256="ab")


def test_half_a_line_and_a_line_of_another_kind_are_nothing() -> None:
    """A SIGKILL may end a line anywhere; the next incarnation appends behind it."""
    assert parse(HASH[:40]) is None
    assert parse(HASH[:40] + HASH) is None
    assert parse(b'{"type": "weather"}') is None
    assert parse(b"\xff\xfe") is None


def test_a_loss_that_is_no_number_is_read() -> None:
    """Python's json writes NaN, which is no JSON; the steps of a spoilt training are steps all the same."""
    line = b'{"type": "eval", "monotonic": 1.5, "replica": "a", "pid": 7, "step": 3, "loss": NaN}'
    told = parse(line)
    assert isinstance(told, Eval)
    assert math.isnan(told.loss)
    assert parse(line.replace(b"eval", b"weather")) is None


def test_a_line_is_told_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    tail, path = Tail(tmp_path), tmp_path / "a.0.jsonl"
    assert tail.poll() == []
    with path.open("wb", buffering=0) as file:
        file.write(HASH + b"\n" + HASH[:30])
        assert len(tail.poll()) == 1
        assert tail.poll() == []
        file.write(HASH[30:] + b"\n")
        assert len(tail.poll()) == 1


def test_lines_of_several_files_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    for name, at in (("a", b"3.0"), ("b", b"2.0"), ("c", b"9.0")):
        (tmp_path / f"{name}.0.jsonl").write_bytes(HASH.replace(b"1.5", at) + b"\n")
    assert [line.monotonic for line in Tail(tmp_path).poll()] == [2.0, 3.0, 9.0]
