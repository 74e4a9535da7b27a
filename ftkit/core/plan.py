"""Read from an epoch what one member has to do in it: its rank, who heals, and from whom.

Pure: every member computes the same plan from the same epoch, so that nothing needs to be negotiated.
"""

from __future__ import annotations

import msgspec

from ftkit.core.model import Epoch, Version


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One member's part in an epoch."""

    epoch: int
    replica_rank: int
    num_replicas: int
    version: Version
    """The highest version of the epoch: the state that all start from."""
    sources: tuple[str, ...]
    """Replica ids that hold this state and serve it; all of them, for striping."""
    healing: tuple[str, ...]
    """Replica ids that must receive it."""
    store: str
    """Replica id whose rendezvous store is used."""
    heals: bool
    """Whether this member is one of `healing`."""


def plan(epoch: Epoch, replica_id: str, *, init_sync: bool = True) -> Plan:
    """Compute the part of `replica_id` in `epoch`.

    With `init_sync`, members that start together at step 0 take the initial state of the first of them.

    Raises:
        KeyError: `replica_id` is not a member of the epoch.
    """
    ids = [s.replica_id for s in epoch.seats]
    if replica_id not in ids:
        raise KeyError(f"{replica_id} is not a member of epoch {epoch.id}")
    highest = max(s.version for s in epoch.seats)
    sources = [s.replica_id for s in epoch.seats if s.version == highest]
    if highest.step == 0 and init_sync:
        sources = sources[:1]
    whole = set(sources)
    healing = [
        r
        for r, s in zip(ids, epoch.seats, strict=True)
        if r not in whole and _behind(s.version, highest, init_sync)
    ]
    return Plan(
        epoch=epoch.id,
        replica_rank=ids.index(replica_id),
        num_replicas=len(ids),
        version=highest,
        sources=tuple(sources),
        healing=tuple(healing),
        store=ids[0],
        heals=replica_id in healing,
    )


def _behind(version: Version, highest: Version, init_sync: bool) -> bool:
    return version < highest or (highest.step == 0 and init_sync)
