"""Decide which gradients travel together, and in which order.

Pure, and a function of the model alone: a replica that joins late must cut its gradients exactly as those
that have been training for days, so nothing measured at run time may have a say in it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["BUCKET_BYTES", "FIRST_BUCKET_BYTES", "plan_buckets"]

BUCKET_BYTES = 25 * 2**20
"""torch's default."""

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that communication begins early; torch's default too."""


def plan_buckets(
    sizes: Sequence[int],
    kinds: Sequence[Hashable],
    *,
    cap: int = BUCKET_BYTES,
    first_cap: int = FIRST_BUCKET_BYTES,
) -> list[list[int]]:
    """Cut parameters 0, 1, … of `sizes` bytes into buckets of one kind each; return their indices.

    Gradients are expected to arrive last parameter first. A bucket is a run of neighbours among the
    parameters of its kind (dtype and device) and is closed once it holds `cap` bytes; the buckets come in
    the order in which they should be complete.
    """
    closed: list[list[int]] = []
    opened: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    limit: dict[Hashable, int] = {}
    for i in range(len(sizes) - 1, -1, -1):
        kind = kinds[i]
        opened.setdefault(kind, []).append(i)
        filled[kind] = filled.get(kind, 0) + sizes[i]
        if filled[kind] >= limit.get(kind, min(first_cap, cap)):
            closed.append(opened.pop(kind)[::-1])
            filled[kind], limit[kind] = 0, cap
    closed += [indices[::-1] for indices in opened.values()]
    return sorted(closed, key=lambda indices: -indices[0])
