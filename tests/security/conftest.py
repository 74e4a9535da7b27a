"""Fixtures of the tests that attack."""

from __future__ import annotations

from tests.cli.conftest import start
from tests.keeper.conftest import auth_server, world
from tests.runtime.conftest import cluster

__all__ = ["auth_server", "cluster", "start", "world"]
