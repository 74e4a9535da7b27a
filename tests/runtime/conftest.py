"""Fixtures for tests with whole replica groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runtime.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path, job: str) -> Iterator[Callable[..., Cluster]]:
    """Make a job's cluster; all its processes end with the test."""
    made: list[Cluster] = []

    def make(etcd: str, **settings: object) -> Cluster:
        made.append(Cluster(tmp_path, etcd, job, **settings))
        return made[-1]

    yield make
    for c in made:
        c.end()
