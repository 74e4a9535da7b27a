"""Bad input gets a clear error that says what to do, and loses nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from tests.runtime.cluster import Cluster, Group

MakeCluster = Callable[..., Cluster]


def last_words(group: Group) -> dict:
    assert group.process.wait(60) == 3, group.stderr()[-2000:]
    return group.rows()[-1]


def test_a_name_in_use_is_refused_with_host_and_pid(cluster: MakeCluster, etcd_url: str) -> None:
    c = cluster(etcd_url, lease_ttl=2)
    groups = c.start_all(2)
    words = last_words(c.start("trainer-1"))
    assert words["error"] == "NameInUse"
    assert socket.gethostname() in words["message"]
    assert str(groups[1].process.pid) in words["message"]
    c.wait_together(groups, since=time.monotonic())


def test_another_model_is_refused_with_the_first_difference(cluster: MakeCluster, etcd_url: str) -> None:
    c = cluster(etcd_url)
    groups = c.start_all(2)
    words = last_words(c.start("trainer-2", "--width", 33))
    assert words["error"] == "JobMismatch"
    assert "0.weight" in words["message"]
    assert "[32, 8]" in words["message"]
    assert "[33, 8]" in words["message"]
    c.wait_together(groups, since=time.monotonic())


def test_another_min_replicas_is_refused_by_name(cluster: MakeCluster, etcd_url: str) -> None:
    c = cluster(etcd_url)
    groups = c.start_all(2)
    words = last_words(c.start("trainer-2", min_replicas=2))
    assert words["error"] == "JobMismatch"
    assert "min_replicas" in words["message"]
    c.wait_together(groups, since=time.monotonic())


def test_an_etcd_that_is_not_there_is_named(cluster: MakeCluster) -> None:
    c = cluster("http://127.0.0.1:9", timeout=4)
    words = last_words(c.start("trainer-0"))
    assert words["error"] == "EtcdUnavailable"
    assert "127.0.0.1:9" in words["message"]
    assert time.monotonic() - c.groups[0].started < 30


def test_sigterm_before_the_job_is_joined_ends_in_order(cluster: MakeCluster) -> None:
    """A spot instance's notice may come while etcd is not there; its grace is shorter than `timeout`."""
    c = cluster("http://127.0.0.1:9")
    group = c.start("trainer-0")
    c.wait(lambda: "127.0.0.1:9" in group.stderr(), "the keeper to say that there is no etcd", [group])
    group.process.terminate()
    assert group.process.wait(20) == 0, group.stderr()[-2000:]


def test_settings_that_clash_are_refused_at_the_start(cluster: MakeCluster, etcd_url: str) -> None:
    c = cluster(etcd_url)
    words = last_words(c.start("trainer-0", outage_grace=100, takeover_after=50))
    assert words["error"] == "ConfigError"
    assert "outage_grace" in words["message"]
    assert "takeover_after" in words["message"]
    words = last_words(c.start("trainer-0", lease_ttl=1))
    assert "LEASE_TTL" in words["message"].upper()
    words = last_words(c.start("trainer-0", job="a/b"))
    assert "JOB" in words["message"].upper()
