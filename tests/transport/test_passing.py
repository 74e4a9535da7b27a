"""Checksums are computed while the bytes are sent: each once, of the right bytes, and before they count."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash

from tests.transport.proxy import Proxy
from transport import ChecksumError, HTTPTransport
from transport.passing import Passing
from transport.publication import Publication

Make = Callable[..., HTTPTransport]
MB = 1 << 20


def make_state(megabytes: int) -> dict[str, torch.Tensor]:
    """So large that its checksums do not come with the manifest."""
    generator = torch.Generator().manual_seed(megabytes)
    return {
        f"p{i}": torch.randint(0, 256, (megabytes * MB // 5,), dtype=torch.uint8, generator=generator)
        for i in range(5)
    }


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the chunks whose checksums are computed apart from sending."""
    chunks: list[int] = []
    apart = Publication._hash

    def note(self: Publication, chunk: int, *rest: Any) -> bytes:
        chunks.append(chunk)
        return apart(self, chunk, *rest)

    monkeypatch.setattr(Publication, "_hash", note)
    return chunks


@pytest.mark.parametrize("seed", range(20))
def test_whole_chunks_are_summed_however_the_bytes_come(seed: int) -> None:
    """A slow peer takes part of a piece, and the rest of it is shown again."""
    rng = random.Random(seed)
    size, chunk = rng.randrange(1, 1000), rng.randrange(1, 200)
    data = memoryview(rng.randbytes(size))
    start, end = sorted((rng.randrange(size + 1), rng.randrange(size + 1)))
    digests: list[bytes | None] = [None] * -(-size // chunk)
    known = rng.randrange(len(digests))
    digests[known] = b"known"
    passing, at = Passing(digests, size, chunk, start, end), start
    while at < end:
        piece = data[at : min(end, at + rng.randrange(1, 300))]
        passing.show(at, piece)
        at += rng.randrange(len(piece) + 1)
    for number, digest in enumerate(digests):
        low, high = number * chunk, min(size, (number + 1) * chunk)
        if number == known:
            assert digest == b"known"
        elif start <= low and high <= end:
            assert digest == xxhash.xxh3_128_digest(data[low:high])
        else:
            assert digest is None


def test_what_is_sent_is_not_read_a_second_time_for_its_checksums(
    make_transport: Make, assert_same: Any, computed: list[int]
) -> None:
    state, source = make_state(40), make_transport(chunk_bytes=MB)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    source.publish("v", state)
    make_transport().fetch([source.address], "v", into, deadline_s=30)
    assert_same(into, state)
    assert not computed
    assert source._board.current is not None
    assert None not in source._board.current._hashes


def test_nobody_computes_checksums_that_are_not_asked_for(make_transport: Make, computed: list[int]) -> None:
    """Of several sources, one says what is right."""
    state, sources = make_state(40), [make_transport(chunk_bytes=MB) for _ in range(2)]
    for source in sources:
        source.publish("v", state)
    make_transport().fetch([source.address for source in sources], "v", {}, deadline_s=30)
    boards = [source._board.current for source in sources]
    known = [sum(h is not None for h in board._hashes) for board in boards if board is not None]
    assert sorted(known) == [0, 40]


@pytest.mark.parametrize("lies", [1, 1000])
def test_wrong_bytes_are_found_although_the_checksum_comes_after_them(
    make_transport: Make, make_proxy: Callable[..., Proxy], assert_same: Any, lies: int
) -> None:
    """One bit that flips is fetched again; a source that goes on sending wrong bytes is asked no more."""
    state, source = make_state(40), make_transport(chunk_bytes=MB)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    source.publish("v", state)
    left = lies

    def mangle(proxy: Proxy, before: int, data: bytes) -> bytes:
        nonlocal left
        if left and before > MB // 2 and len(data) > 4096:  # in the middle of an extent, not in a head
            left -= 1
            return data[:2048] + bytes([data[2048] ^ 1]) + data[2049:]
        return data

    joiner, address = make_transport(), make_proxy(source.address, mangle).address
    if lies == 1:
        joiner.fetch([address], "v", into, deadline_s=30)
        assert left == 0
        assert_same(into, state)
        return
    with pytest.raises(ChecksumError, match="wrong checksum"):
        joiner.fetch([address], "v", into, deadline_s=30)
