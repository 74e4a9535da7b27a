"""The ledger hands out every byte once, again only when it must, and knows when all is there."""

from __future__ import annotations

import random

import numpy as np
import pytest

from transport.ledger import Extent, Ledger


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
                ledger.verify(missing[0]) if verdict else ledger.reject(missing[0])
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
                    ledger.verify(done) if verdict else ledger.reject(done)
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


def test_only_allowed_chunks_are_handed_out_beginning_with_the_first_one_wanted() -> None:
    """Joiners begin at different places, and one that holds a part of the chunks is asked for these."""
    ledger = Ledger(100, 10, first=6)
    some = np.zeros(10, np.bool_)
    some[[1, 2, 7, 9]] = True
    assert ledger.take("a", "a", 1, some) == Extent(70, 80)
    assert ledger.take("a", "a", 1, some) == Extent(90, 100)
    assert ledger.take("a", "a", 1) == Extent(60, 70)
    assert ledger.take("a", "a", 1, ~some) == Extent(80, 90)
    assert ledger.take("a", "a", 1, some) == Extent(10, 30)
    assert ledger.take("a", "a", 1, some) is None


def test_a_chunk_sent_wrong_by_two_comes_from_one_the_next_time() -> None:
    """So that it is known whom to blame: what one of them sends in part is not completed by another."""
    ledger = Ledger(20, 10)
    ledger.expect(0, b"right")
    ledger.take_all()
    ledger.arrived("a", 0, 4)
    assert ledger.arrived("b", 4, 10) == 0
    assert ledger.hashed(0, b"wrong") is False
    assert ledger.reject(0) == {"a", "b"}
    assert ledger.take("a", "ab", 1) == Extent(0, 10, frozenset("ab")), "there is no third"
    ledger.arrived("a", 0, 7)
    ledger.give_back(7, 10)
    assert ledger.bytes_pending == 10
    assert ledger.take("b", "ab", 1) == Extent(0, 10)


def test_a_second_copy_replaces_what_had_arrived() -> None:
    ledger = Ledger(10, 10)
    ledger.expect(0, b"right")
    ledger.take("a", "ab", 1)
    ledger.arrived("a", 0, 4)
    ledger.replace(0, "b")
    assert ledger.hashed(0, b"wrong") is False
    assert ledger.reject(0) == {"b"}


def test_parts_of_one_chunk_can_be_given_back_by_several() -> None:
    ledger = Ledger(30, 30)
    ledger.take_all()
    ledger.give_back(20, 30)
    ledger.arrived("a", 10, 20)
    ledger.give_back(0, 10)
    taken = [ledger.take("a", "a", 1), ledger.take("a", "a", 1)]
    assert sorted(extent.start for extent in taken if extent is not None) == [0, 20]
    assert ledger.take("a", "a", 1) is None
