"""Decide which chunks a joiner asks the sources for, and for which it waits until another joiner has them.

Pure: no sockets, no locks (the caller holds one); the time is an argument. Of K joiners each owns one K-th of
the chunks and fetches these from the sources, those of the others from the others: so the sources send each
byte about once. What belongs to one that is gone, late or slow is shared out among the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from transport.ledger import Mask

MAX_SWARM: Final = 16
"""Joiners in one swarm, at most; more are several swarms."""
PATIENCE_S: Final = 1.0
"""How long nothing new at another joiner is nothing to worry about, at least; else four chunks' time."""
SLOWER: Final = 4
"""A joiner that is so many times slower than the sources is not waited for."""


@dataclass(slots=True)
class Peer:
    """What is known of another joiner."""

    turn: int
    have: Mask
    news_at: float
    """When it was last seen to have got something."""
    good: bool = False
    """It is there, and answers."""
    chunk_s: float = 0.0
    """How long it takes to send a chunk on one connection; 0 when not known."""

    def update(self, have: Mask, now: float) -> None:
        """Note which chunks it has."""
        if have.sum() > self.have.sum():
            self.news_at = now
        self.have = have


def neighbours(joiners: Sequence[str], own: str) -> tuple[list[str], int]:
    """Return the swarm that `own` belongs to, and its turn there; it is alone if it is not listed."""
    everyone = list(dict.fromkeys(joiners))
    if own not in everyone:
        return [own], 0
    first = everyone.index(own) // MAX_SWARM * MAX_SWARM
    swarm = everyone[first : first + MAX_SWARM]
    return swarm, swarm.index(own)


class Swarm:
    """The joiners of one version, from the point of view of one of them."""

    def __init__(self, num_chunks: int, num_joiners: int, turn: int, started: float) -> None:
        self.num_chunks, self.num_joiners, self.turn, self.started = num_chunks, num_joiners, turn, started
        self._shares: dict[tuple[int, ...], list[Mask]] = {}

    @property
    def first(self) -> int:
        """Return the chunk that is fetched first."""
        return self.turn * self.num_chunks // self.num_joiners

    def wanted(self, peers: Sequence[Peer], open_chunks: Mask, now: float, chunk_s: float) -> Mask:
        """Return the chunks that the sources are to be asked for, out of those that nobody is fetching.

        `chunk_s` is how long they take for one, on one connection; 0 when not known.
        """
        here = np.zeros(self.num_chunks, np.bool_)
        hopeful = {self.turn}
        for peer in peers:
            if not peer.good or self._slow(peer, open_chunks, chunk_s):
                continue
            here |= peer.have
            if self._hopeful(peer, now, chunk_s):
                hopeful.add(peer.turn)
        turns = tuple(sorted(hopeful))
        return open_chunks & self._share_out(turns)[turns.index(self.turn)] & ~here

    @staticmethod
    def _slow(peer: Peer, open_chunks: Mask, chunk_s: float) -> bool:
        """Say whether the sources would send what another joiner has much sooner than it does."""
        count = int((peer.have & open_chunks).sum())
        return bool(chunk_s) and count * peer.chunk_s > SLOWER * count * chunk_s + PATIENCE_S

    def _hopeful(self, peer: Peer, now: float, chunk_s: float) -> bool:
        """Say whether another joiner will have what belongs to it in good time."""
        patience_s = max(PATIENCE_S, 4 * chunk_s)
        got = int(peer.have.sum())
        if got == self.num_chunks:
            return True
        if now - peer.news_at >= patience_s:
            return False
        if now - self.started < patience_s:
            return True  # too early to tell how fast it is
        everyone = tuple(range(self.num_joiners))
        missing = int((self._share_out(everyone)[peer.turn] & ~peer.have).sum())
        theirs_s = missing * (now - self.started) / got if got else 0.0
        return not chunk_s or theirs_s <= 2 * missing * chunk_s + patience_s

    def _share_out(self, turns: tuple[int, ...]) -> list[Mask]:
        """Return whose the chunks are, if only these joiners take part, in their order."""
        shares = self._shares.get(turns)
        if shares is None:
            shares = [np.zeros(self.num_chunks, np.bool_) for _ in turns]
            for turn in range(self.num_joiners):
                low = turn * self.num_chunks // self.num_joiners
                high = (turn + 1) * self.num_chunks // self.num_joiners
                if turn in turns:
                    shares[turns.index(turn)][low:high] = True
                    continue
                for i, share in enumerate(shares):
                    a, b = (low + (high - low) * j // len(shares) for j in (i, i + 1))
                    share[a:b] = True
            self._shares[turns] = shares
        return shares
