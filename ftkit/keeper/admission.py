"""Decide whether a replica group may take part in the job: its settings, its model, its name.

The first member writes the job's `config`; all others must match it. When no member is live, a group with
other settings starts the job anew. Two live processes under one replica id are an error for the second.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from ftkit.core.model import JobConfig, Policy, Record
from ftkit.errors import JobMismatch, NameInUse
from ftkit.keeper.etcd import KV, Compare, Etcd, Get, Put
from ftkit.keeper.keys import JobKeys, decode_config, encode

_AGREED = (
    "schema",
    "min_replicas",
    "max_replicas",
    "group_world_size",
    "outage_grace",
    "takeover_after",
)

_MAX_LAYOUT_BYTES = 400_000
"""A longer layout is left out of the config: etcd takes 1.5 MB at most. The fingerprint still tells."""


class Admitted(NamedTuple):
    """The config that the group agrees with, its revision, and the job's secret."""

    config: JobConfig
    mod_revision: int
    token: str


def own_config(
    policy: Policy,
    *,
    group_world_size: int,
    token: str | None,
    fingerprint: str,
    layout: tuple[str, ...],
) -> JobConfig:
    """Return what this group would write if it were the first."""
    return JobConfig(
        min_replicas=policy.min_replicas,
        max_replicas=policy.max_replicas,
        group_world_size=group_world_size,
        outage_grace=policy.outage_grace,
        takeover_after=policy.takeover_after,
        token="" if token else secrets.token_hex(32),
        token_sha256=_digest(token) if token else "",
        fingerprint=fingerprint,
        layout=layout if sum(len(line) + 3 for line in layout) <= _MAX_LAYOUT_BYTES else (),
    )


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def difference(ours: JobConfig, theirs: JobConfig) -> str | None:
    """Name the first setting in which a group differs from its job, or None."""
    for name in _AGREED:
        mine, jobs = getattr(ours, name), getattr(theirs, name)
        if mine != jobs:
            return f"{name} is {mine:g} here and {jobs:g} in the job"
    if ours.token_sha256 != theirs.token_sha256:
        if not theirs.token_sha256:
            return "token is given here, but the job was started without one"
        if not ours.token_sha256:
            return "token is not given here, but the job was started with one (set FTKIT_TOKEN)"
        return "token is not the one that the job was started with"
    if ours.fingerprint and theirs.fingerprint and ours.fingerprint != theirs.fingerprint:
        return f"the model differs: {_first_difference(ours.layout, theirs.layout)}"
    return None


def _first_difference(ours: tuple[str, ...], theirs: tuple[str, ...]) -> str:
    for mine, jobs in itertools.zip_longest(ours, theirs):
        if mine != jobs and ours and theirs:
            return f"{mine or 'no such tensor'} here, {jobs or 'no such tensor'} in the job"
    return "its fingerprint is another (names, shapes or dtypes of its tensors)"


def admit(etcd: Etcd, keys: JobKeys, replica_id: str, ours: JobConfig, token: str | None) -> Admitted:
    """Agree on the job's config, writing it if need be.

    Raises:
        JobMismatch: live members have agreed on something else.
        EtcdError: etcd cannot be used now.
    """
    while True:
        kv = etcd.get(keys.config)
        theirs = None if kv is None else decode_config(keys.config, kv.value)
        if kv is not None and theirs is not None:
            differs = difference(ours, theirs)
            if differs is None and (theirs.token or token):
                return Admitted(theirs, kv.mod_revision, token or theirs.token)
            if differs is not None and _has_others(etcd, keys, replica_id):
                raise JobMismatch(
                    f"{replica_id} cannot join: {differs}. All members must agree (the first one wrote "
                    f"{keys.config}); correct it here, or choose another job name"
                )
        written = etcd.txn(
            [Compare(keys.config, "mod", "=", 0 if kv is None else kv.mod_revision)],
            [Put(keys.config, encode(ours))],
        )
        if written.succeeded:
            return Admitted(ours, written.revision, token or ours.token)


def _has_others(etcd: Etcd, keys: JobKeys, replica_id: str) -> bool:
    members, _ = etcd.list(keys.members)
    return any(kv.key != keys.member_of(replica_id) for kv in members)


def restore_config(etcd: Etcd, keys: JobKeys, config: JobConfig) -> None:
    """I8: put the config back into an etcd that has lost it, unless somebody was faster."""
    etcd.txn([Compare(keys.config, "mod", "=", 0)], [Put(keys.config, encode(config))], [Get(keys.config)])


def wait_for_name(
    etcd: Etcd, holder: KV, record: Record, waiting: Callable[[str], None], stopped: Callable[[], bool]
) -> None:
    """Wait until the member key of another incarnation is gone: its process may just have been killed.

    Raises:
        NameInUse: it is alive, as its lease is being renewed.
    """
    who = f"{record.host or 'an unknown host'}, pid {record.pid}"
    waiting(f"waiting for the lease of an earlier {record.replica_id} ({who}) to run out")
    last = etcd.time_to_live(holder.lease) if holder.lease else float("inf")
    # etcd gives whole seconds only, and takes a moment to let a lease run out.
    deadline = time.monotonic() + last + 2.5
    while not stopped():
        now = etcd.get(holder.key)
        if now is None or now.create_revision != holder.create_revision:
            return
        left = etcd.time_to_live(holder.lease) if holder.lease else float("inf")
        # A renewed lease has more time than before; a key without a lease will never go away.
        if left > last or left == float("inf") or time.monotonic() > deadline:
            raise NameInUse(
                f"{record.replica_id} is already running ({who}); give this one another replica_id, "
                "or end the other first"
            )
        last = left
        time.sleep(0.2)


def same_secret(one: JobConfig, other: JobConfig) -> bool:
    """Say whether two configs authenticate members to each other by the same secret."""
    return (one.token, one.token_sha256) == (other.token, other.token_sha256)
