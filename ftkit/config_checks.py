"""Say which settings contradict each other, each with the names of the two and what to do about it.

Pure: it is given settled values, where each came from, and the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftkit.config_values import WILDCARDS, write

_ORDERED = (
    ("outage_grace", "takeover_after", True, "a member cut off must stop before the others replace it"),
    ("lease_ttl", "outage_grace", True, "a short silence of etcd must cost a lease before it stops training"),
    ("freeze_grace", "outage_grace", False, "members must be back before the others stop committing"),
    ("suspect_grace", "collective_timeout", True, "a suspect must be given up before the collective does"),
    ("rendezvous_timeout", "join_timeout", False, "a failed rendezvous must end before the next is given up"),
    ("rendezvous_timeout", "heal_timeout", False, "healing takes longer than meeting"),
    ("join_timeout", "quorum_timeout", False, "the wait for one member is part of the wait for the epoch"),
)
"""Pairs (lower, higher, whether they must differ, why)."""


def clashes(found: Mapping[str, Any], origin: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """Return what contradicts each other, each with the names of the two and what to do."""

    def show(name: str) -> str:
        source = origin[name]
        text = write(found[name])
        return f"{name} ({text}{', from ' + source if source not in ('', name) else ''})"

    problems = [
        f"{show(low)} must be {'less than' if strict else 'at most'} {show(high)}: {why}; "
        f"lower {low} or raise {high}"
        for low, high, strict, why in _ORDERED
        if (found[low] >= found[high] if strict else found[low] > found[high])
    ]
    if 0 < found["max_replicas"] < found["min_replicas"]:
        problems.append(
            f"{show('max_replicas')} is below {show('min_replicas')}: no step could commit; "
            "raise max_replicas, or set it to 0 for no limit"
        )
    if found["group_rank"] >= found["group_world_size"]:
        problems.append(
            f"{show('group_rank')} must be below {show('group_world_size')}: "
            "start with torchrun, or give both RANK and WORLD_SIZE"
        )
    if found["group_world_size"] > 1:
        problems += _group_problems(found, origin, environ)
    return problems + _etcd_problems(found) + _address_problems(found)


def _group_problems(
    found: Mapping[str, Any], origin: Mapping[str, str], environ: Mapping[str, str]
) -> list[str]:
    """Return what a replica group of several ranks lacks."""
    size = f"group_world_size is {found['group_world_size']}"
    problems = []
    if not origin["group_rank"]:
        problems.append(f"{size} but group_rank is not given: start with torchrun, or set RANK")
    for name in ("master_addr", "master_port"):
        if found[name] is None:
            problems.append(f"{size} but {name} is not given: start with torchrun, or set {name.upper()}")
    local = environ.get("LOCAL_WORLD_SIZE", "")
    if not origin["replica_id"] and local.isdecimal() and int(local) < found["group_world_size"]:
        problems.append(
            f"{size}, on several machines, but replica_id is not given: their hostnames differ; "
            "set FTKIT_REPLICA_ID to one name on all of them"
        )
    return problems


def _etcd_problems(found: Mapping[str, object]) -> list[str]:
    """Return what contradicts each other among the settings of the connection to etcd."""
    problems = []
    for one, other in (("etcd_cert", "etcd_key"), ("etcd_key", "etcd_cert")):
        if found[one] is not None and found[other] is None:
            problems.append(f"{one} is given without {other}: a client certificate needs both")
    urls = found["etcd"]
    assert isinstance(urls, tuple)
    if urls[0].startswith("http://"):
        problems += [
            f"{name} is given but etcd ({urls[0]}) is not https: write https:// or leave {name} out"
            for name in ("etcd_ca_cert", "etcd_cert")
            if found[name] is not None
        ]
    user = found["etcd_user"]
    if isinstance(user, str) and not all(user.partition(":")):
        problems.append("etcd_user has no password: give user:password, or set ETCDCTL_PASSWORD as well")
    return problems


def _address_problems(found: Mapping[str, object]) -> list[str]:
    """Return what is wrong with the addresses of this member."""
    if found["advertise"] in WILDCARDS:
        return [f"advertise ({found['advertise']}) is no address that others could reach: name a real one"]
    return []
