"""Stream safetensors shards peer to peer.

`HTTPTransport` publishes the live state of a process and fetches that of others; `encode` and `decode`
turn a state into a safetensors file and back. This package imports nothing of `ftkit`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transport.api import Progress, SourceProgress, Transport
    from transport.connection import Limits
    from transport.encoded import Encoded, decode, encode
    from transport.errors import (
        ChecksumError,
        MalformedState,
        ProtocolError,
        SourceError,
        StateMismatch,
        TokenRefused,
        TransportAborted,
        TransportError,
        TransportTimeout,
        UnsupportedState,
        VersionMismatch,
    )
    from transport.http import HTTPTransport
    from transport.pg import DistributedTransport

__all__ = [
    "ChecksumError",
    "DistributedTransport",
    "Encoded",
    "HTTPTransport",
    "Limits",
    "MalformedState",
    "Progress",
    "ProtocolError",
    "SourceError",
    "SourceProgress",
    "StateMismatch",
    "TokenRefused",
    "Transport",
    "TransportAborted",
    "TransportError",
    "TransportTimeout",
    "UnsupportedState",
    "VersionMismatch",
    "decode",
    "encode",
]

_HOMES = {
    "DistributedTransport": "pg",
    "Encoded": "encoded",
    "HTTPTransport": "http",
    "Limits": "connection",
    "Progress": "api",
    "SourceProgress": "api",
    "Transport": "api",
    "decode": "encoded",
    "encode": "encoded",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Lazily, so that the errors can be imported without torch.
    value = getattr(importlib.import_module(f"transport.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
