"""Decide which fault a pause is due to. Pure: pauses and the times of faults go in."""

from __future__ import annotations

from collections.abc import Sequence

from ftkit.chaos.checks import Pause


def longest_pauses(pauses: Sequence[Pause], strikes: Sequence[tuple[float, str]]) -> list[float]:
    """Return for each fault, given as its time and its victim, the longest pause of all but the victim.

    A pause is due to the first fault that struck during it, else to the last one before it. The faults must
    be in the order of time.
    """
    longest = [0.0] * len(strikes)
    for pause in pauses:
        during = [i for i, (at, _) in enumerate(strikes) if pause.since <= at <= pause.until]
        before = [i for i, (at, _) in enumerate(strikes) if at < pause.since]
        cause = during[0] if during else before[-1] if before else None
        if cause is not None and pause.replica != strikes[cause][1]:
            longest[cause] = max(longest[cause], pause.seconds)
    return longest
