"""The kinds of faults: what each does, whom it strikes, and what it needs. A table, no decisions."""

from __future__ import annotations

import msgspec


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of fault."""

    meaning: str
    group: bool = True
    """It strikes one replica group; otherwise etcd, or all groups at once."""
    takes_out: bool = False
    """The group is out for a while: somebody else must be there to keep the state."""
    phase: str = ""
    """It strikes from inside of the trainer, in this phase of its step; see `orders`."""
    from_outside: bool = False
    """`ftkit chaos` can do it to a job that it has not started."""
    default: bool = True
    """A plan has it unless told otherwise."""


TABLE: dict[str, Kind] = {
    # -- processes --
    "kill": Kind(meaning="SIGKILL to the trainer", takes_out=True, from_outside=True),
    "lose-machine": Kind(
        meaning="SIGKILL to the keeper and the trainer: nobody is left to tell of the death",
        takes_out=True,
        from_outside=True,
    ),
    "blink": Kind(
        meaning="SIGSTOP to trainer and keeper for less than the lease's life",
        takes_out=True,
        from_outside=True,
    ),
    "freeze": Kind(
        meaning="SIGSTOP to trainer and keeper for longer than the lease's life",
        takes_out=True,
        from_outside=True,
    ),
    "freeze-trainer": Kind(
        meaning="SIGSTOP to the trainer alone, for longer than the lease's life",
        takes_out=True,
        from_outside=True,
    ),
    "drain": Kind(
        meaning="SIGTERM to the trainer: it leaves at a step boundary, and another one starts in its place",
        takes_out=True,
        from_outside=True,
    ),
    "kill-keeper": Kind(meaning="SIGKILL to the keeper; training goes on", from_outside=True),
    # -- inside of a step --
    "kill-in-forward": Kind(meaning="SIGKILL in the middle of forward", takes_out=True, phase="forward"),
    "kill-in-backward": Kind(meaning="SIGKILL in the middle of backward", takes_out=True, phase="backward"),
    "kill-in-vote": Kind(meaning="SIGKILL while the vote is carried", takes_out=True, phase="vote"),
    "kill-in-update": Kind(
        meaning="SIGKILL while the optimizer changes the weights, after the vote",
        takes_out=True,
        phase="update",
    ),
    "kill-in-meeting": Kind(
        meaning="SIGKILL of a newcomer between the publication of its epoch and the rendezvous",
        takes_out=True,
        phase="meeting",
    ),
    "kill-in-reform": Kind(
        meaning="SIGKILL of a survivor between the epoch after another's death and its rendezvous",
        takes_out=True,
        phase="meeting",
    ),
    "kill-joiner": Kind(
        meaning="SIGKILL of a newcomer while it receives the state", takes_out=True, phase="heal"
    ),
    "kill-source": Kind(
        meaning="SIGKILL of a member while it serves its state to a newcomer", takes_out=True, phase="heal"
    ),
    "raise": Kind(meaning="an exception in the user's forward", takes_out=True, phase="forward"),
    "raise-in-update": Kind(
        meaning="an exception in the optimizer, after the vote", takes_out=True, phase="update"
    ),
    "hold-gil": Kind(meaning="a call that keeps the GIL for longer than the lease's life", phase="forward"),
    "flip-bit": Kind(
        meaning="flip a bit in one member's gradient before it is averaged; all take the same wrong step",
        phase="backward",
    ),
    "nan": Kind(
        meaning="a NaN in one member's gradient; all take it in, the training is spoilt but nobody diverges",
        phase="backward",
        default=False,
    ),
    "corrupt": Kind(
        meaning="flip a bit in one member's weights, after the update: what the oracle must find",
        phase="updated",
        default=False,
    ),
    # -- leases --
    "revoke-lease": Kind(
        meaning="revoke the member's lease: its keys vanish although it lives", from_outside=True
    ),
    "expire-lease": Kind(
        meaning="SIGSTOP to the keeper alone, for longer than the lease's life", from_outside=True
    ),
    "revoke-all": Kind(meaning="revoke all members' leases at once", group=False, from_outside=True),
    # -- the network between a group's keeper and etcd --
    "net-delay": Kind(meaning="the way to etcd takes a quarter of the lease's life longer"),
    "net-throttle": Kind(meaning="the way to etcd carries 2 kB/s"),
    "net-reset": Kind(meaning="all connections to etcd are reset"),
    "net-truncate": Kind(meaning="all connections to etcd end in the middle of a message"),
    "net-silent": Kind(meaning="etcd does not answer, and nobody says so, for longer than the lease's life"),
    "net-flip": Kind(
        meaning="flip a bit on the way from etcd; without TLS nothing else would notice",
        default=False,
    ),
    # -- partitions, between network namespaces: packets are lost in silence --
    "part-machine": Kind(
        meaning="a group's machine reaches neither the others nor etcd, for longer than the lease's life",
        takes_out=True,
        default=False,
    ),
    "part-data": Kind(
        meaning="a group's machine reaches etcd but none of the others, for less than the lease's life",
        takes_out=True,
        default=False,
    ),
    "part-halves": Kind(
        meaning="half of the groups reach etcd and each other, the others only each other",
        group=False,
        default=False,
    ),
    # -- etcd --
    "etcd-kill": Kind(meaning="SIGKILL to all etcd servers, started again with their data", group=False),
    "etcd-restart": Kind(meaning="SIGTERM to all etcd servers, started again with their data", group=False),
    "etcd-freeze": Kind(
        meaning="SIGSTOP to etcd for longer than a lease's life: all leases are lost at once", group=False
    ),
    "etcd-wipe": Kind(meaning="SIGKILL to etcd, its data deleted, started again", group=False),
    "etcd-compact": Kind(
        meaning="compact etcd's history up to the present: watches must begin anew", group=False
    ),
    "etcd-full": Kind(meaning="etcd's database is full: it answers reads and refuses writes", group=False),
    "etcd-expire-token": Kind(
        meaning="etcd forgets the token of whoever has proven its password (with --etcd-auth)",
        group=False,
        default=False,
    ),
    "etcd-lose-one": Kind(
        meaning="SIGKILL to one of three etcd servers (with --etcd-servers 3)", group=False, default=False
    ),
    "etcd-lose-leader": Kind(
        meaning="SIGKILL to the leader of three etcd servers", group=False, default=False
    ),
    "etcd-lose-majority": Kind(meaning="SIGKILL to two of three etcd servers", group=False, default=False),
}
"""Every kind by its name."""

ALL = tuple(TABLE)
DEFAULT = tuple(name for name, kind in TABLE.items() if kind.default)
GROUP_FAULTS = tuple(name for name, kind in TABLE.items() if kind.group)
FROM_OUTSIDE = tuple(name for name, kind in TABLE.items() if kind.from_outside)
TAKES_TWO = ("kill-source", "kill-in-reform")
"""Faults that take out another group first: a third one must keep the state."""
OF_THREE = ("etcd-lose-one", "etcd-lose-leader", "etcd-lose-majority")

PARTITIONS = ("part-machine", "part-data", "part-halves")
"""Faults that need network namespaces, see `netns.missing`."""

SHORT = ("blink", "net-delay", "net-throttle", "net-truncate", "net-flip", "part-data")
"""Faults that last for less than a lease's life."""
FREEZES = (
    *("freeze", "freeze-trainer", "expire-lease", "hold-gil", "net-silent"),
    *("part-machine", "part-halves", "etcd-freeze", "etcd-full"),
)
"""Faults that last for longer than a lease's life."""
STARTS_AGAIN = ("etcd-kill", "etcd-restart", "etcd-wipe", *OF_THREE)
"""Faults after which a server is started again."""
