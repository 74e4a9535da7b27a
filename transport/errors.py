"""Every error that `transport` raises, in one tree.

A message says what happened, at which peer or at which path of the state, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping


class TransportError(Exception):
    """The root of all errors raised by `transport`."""


class TransportAborted(TransportError):
    """The fetch was aborted on purpose, from another thread."""


class TransportTimeout(TransportError, TimeoutError):
    """The fetch did not end within its deadline; the message says what each source was doing."""


class UnsupportedState(TransportError, TypeError):
    """The state holds something that has no encoding; the message names its path."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"state at {path or '<root>'!s}: {why}")
        self.path = path


class MalformedState(TransportError, ValueError):
    """What a peer or a file says about a state contradicts itself or exceeds a limit."""


class StateMismatch(TransportError):
    """The state to receive does not fit into the one given; the message names the first difference."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"state at {path or '<root>'!s}: {why}")
        self.path = path


class SourceError(TransportError):
    """No source could serve the state; `sources` says of each what it did."""

    def __init__(self, message: str, sources: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.sources: dict[str, str] = dict(sources or {})


class VersionMismatch(SourceError):
    """A source serves another version than the one asked for, or another layout of it."""


class TokenRefused(SourceError):
    """A source refused the token."""


class ChecksumError(SourceError):
    """What a source sent differs from its checksum."""


class ProtocolError(SourceError):
    """A source sent something that is not a valid answer."""
