"""The ledger hands out every byte once, again only when it must, and knows when all is there."""

from __future__ import annotations

import random

import pytest

from transport.ledger import Ledger


@pytest.mark.parametrize("seed", range(30))
def test_whatever_sources_do_each_byte_arrives_and_is_verified(seed: int) -> None:
    rng = random.Random(seed)
    chunk, size = 10, rng.randint(0, 400)
    ledger = Ledger(size, chunk)
    count = -(-size // chunk)
    content, known, wrong = bytearray(size), set(), 0
    steps = 0
    while not ledger.complete:
        steps += 1
        assert steps < 10_000
        missing = [i for i in range(count) if i not in known]
        if missing and rng.random() < 0.3:
            known.add(missing[0])
            verdict = ledger.expect(missing[0], b"right")
            if verdict is not None:
                ledger.verified(missing[0]) if verdict else ledger.reject(missing[0])
        source = rng.choice("abc")
        extent = ledger.take(source, "abc", 3)
        if extent is None:
            continue
        at, stop = extent.start, rng.randint(extent.start, extent.end)
        while at < stop:
            end = min(stop, (at // chunk + 1) * chunk, at + rng.randint(1, chunk))
            content[at:end] = bytes([1]) * (end - at)
            done = ledger.arrived(source, at, end)
            at = end
            if done is not None:
                bad = wrong < 5 and rng.random() < 0.2
                wrong += bad
                verdict = ledger.hashed(done, b"wrong" if bad else b"right")
                if verdict is not None:
                    ledger.verified(done) if verdict else ledger.reject(done)
        ledger.give_back(at, extent.end)
    assert all(content)
    assert ledger.bytes_pending == 0
    assert ledger.take("a", "abc", 3) is None


def test_extents_are_cut_at_chunks_and_shared_out() -> None:
    ledger = Ledger(1000, 10)
    sizes = []
    while (extent := ledger.take("a", "a", 4)) is not None:
        assert extent.start % 10 == 0
        sizes.append(extent.end - extent.start)
    assert sizes[0] == 80
    assert sizes[-1] == 10, "the last ones are small, so that all sources end together"


def test_a_rejected_chunk_goes_to_another_source_if_there_is_one() -> None:
    ledger = Ledger(10, 10)
    ledger.expect(0, b"right")
    assert ledger.take("a", "ab", 2) is not None
    assert ledger.arrived("a", 0, 10) == 0
    assert ledger.hashed(0, b"wrong") is False
    assert ledger.reject(0) == {"a"}
    assert ledger.take("a", "ab", 2) is None
    assert ledger.take("b", "ab", 2) is not None
    ledger.give_back(0, 10, {"a"})
    assert ledger.take("a", "a", 2) is not None, "there is no other any more"
