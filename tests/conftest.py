"""Fixtures that all tests share: a real etcd, and a job name of one's own."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftkit.keeper.embedded import EtcdServer

# What a shell has started in the background ignores SIGINT, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for the whole run; do not stop, freeze or wipe it: start another for that."""
    with EtcdServer(data_dir=tmp_path_factory.mktemp("etcd") / "data") as server:
        yield server


@pytest.fixture(scope="session")
def etcd_url(etcd_server: EtcdServer) -> str:
    return etcd_server.url


@pytest.fixture
def job() -> str:
    """A job name that no other test uses."""
    return f"job-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of one's own, to be treated badly."""
    with EtcdServer(data_dir=tmp_path / "etcd") as server:
        yield server
