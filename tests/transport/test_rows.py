"""A box of a tensor is described in a few numbers, and gathered without touching anything else."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from transport.rows import MAX_BYTES, Rows, box_rows, dump, gather, parse
from transport.staging import HostReader


def views_of(data: memoryview, piece: int = 1 << 30):  # type: ignore[no-untyped-def]
    def views(start: int, end: int, reader: HostReader) -> Iterator[memoryview]:
        while start < end:
            stop = min(end, start + piece)
            yield data[start:stop]
            start = stop

    return views


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("piece", [1 << 30, 100], ids=["whole", "pieces"])
def test_any_part_of_any_box_is_gathered(seed: int, piece: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randint(1, 7) for _ in range(rng.randint(0, 4))]
    order = rng.sample(range(len(shape)), len(shape))
    memory = torch.randint(-(2**31), 2**31 - 1, [shape[i] for i in order], dtype=torch.int32)
    tensor = memory.permute([order.index(i) for i in range(len(shape))])
    data = b"x" * 12 + memory.numpy().tobytes()
    low = [rng.randrange(n) for n in shape]
    size = [rng.randint(1, n - a) for n, a in zip(shape, low, strict=True)]
    box = tensor[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))]
    right = box.numpy().tobytes()
    rows = box_rows(12, 4, tensor.stride(), low, size)
    assert rows.length == len(right)
    start = rng.randrange(len(right))
    end = rng.randint(start + 1, len(right))
    for a, b in ((0, len(right)), (start, end)):
        (asked,) = parse(dump([rows.part(a, b)]), len(data))
        assert gather([asked], views_of(memoryview(data), piece), HostReader()) == right[a:b]


def test_shards_of_the_first_dimension_are_one_run() -> None:
    assert box_rows(0, 4, (100, 10, 1), (2, 0, 0), (3, 10, 10)) == Rows(800, 1200, 0, 1200)
    assert box_rows(0, 4, (100, 1), (0, 20), (5, 30)) == Rows(80, 120, 0, 600, ((5, 400),))


@pytest.mark.parametrize(
    "text",
    [
        "", "1", "1,2,3", "a,1,0,1", "0,1,0,1,2", "-1,1,0,1", "0,1,0,2", "0,0,0,1", "0,1,0,0", "90,11,0,11",
        "0,10,0,10,11,10", "0,1,0,1,0,1", "0,1,1,1", f"0,1,0,{MAX_BYTES + 1},{MAX_BYTES + 1},0",
        ";".join(["0,1,0,1"] * 400), "0,1,0,1" + ",1,1" * 70,
    ],
)  # fmt: skip
def test_rows_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"rows|bytes|invalid literal"):
        parse(text, 100)
