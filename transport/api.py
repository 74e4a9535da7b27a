"""What every transport offers: publish a state, fetch a state.

Knows nothing of sockets, and nothing of who decides which peer is a source or what a version means: a
version is an opaque string that names one state, and all sources of a fetch hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProgress:
    """What one source has done in a fetch."""

    address: str
    bytes_received: int
    rate: float
    """Bytes per second of late, over all connections; since the beginning, at the end."""
    state: str
    """What it did last, in words."""
    failed: bool = False
    joiner: bool = False
    """It is itself fetching the state, and serves what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a fetch has come."""

    version: str
    bytes_done: int
    """Bytes in place and verified."""
    bytes_total: int
    num_sources: int
    """Sources that have not failed."""
    elapsed_s: float
    bytes_kept: int = 0
    """Of those done, the bytes that were here before, and are not fetched."""
    rate: float = 0.0
    """Bytes received per second of late; since the beginning, at the end."""
    sources: tuple[SourceProgress, ...] = ()


class Transport(Protocol):
    """Moves one state at a time from the processes that publish it to those that fetch it."""

    @property
    def address(self) -> str:
        """Return the name under which others find this transport as a source."""
        ...

    def publish(self, version: str, state: object) -> None:
        """Serve the memory of the state's live tensors, without a copy, until `withdraw`."""
        ...

    def withdraw(self) -> None:
        """Stop serving; return once nobody reads the live memory any more. Idempotent."""
        ...

    def fetch(
        self,
        sources: Sequence[str],
        version: str,
        into: object,
        *,
        deadline_s: float,
        progress: Callable[[Progress], None] | None = None,
        joiners: Sequence[str] = (),
        reuse: bool = False,
    ) -> object:
        """Receive a state in place into the tensors of `into` and return the whole state.

        Names, shapes and dtypes are compared with `into` before anything is written. Tensors that
        `into` lacks (optimizer state not yet created) are allocated. After an error the tensors of
        `into` may be partly overwritten, except after `StateMismatch`.

        `joiners` are the addresses of all that fetch this version at the same time, this one among them, in
        an order that is the same for all. They serve each other what they have verified, so that the sources
        send each byte about once; after the fetch this goes on, from the memory of `into`, until `withdraw`.

        With `reuse`, chunks that `into` holds already are found by their checksums and not fetched.
        """
        ...

    def abort(self, version: str = "") -> None:
        """Make a fetch in flight in another thread fail at once with `TransportAborted`.

        With `version`, only one of that version; should it begin later, it fails then.
        """
        ...

    def close(self) -> None:
        """Withdraw, abort and free all sockets and threads."""
        ...
