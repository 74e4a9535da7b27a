"""etcd goes away, stands still, or loses its data, while real replica groups train."""

from __future__ import annotations

import time
from collections.abc import Callable

from ftkit.keeper.embedded import EtcdServer
from tests.runtime.cluster import Cluster, Group

MakeCluster = Callable[..., Cluster]


def train_for(c: Cluster, groups: list[Group], seconds: float) -> None:
    """Let the job train for a while; nobody may end."""
    until = time.monotonic() + seconds
    c.wait(lambda: time.monotonic() > until, "time to pass", groups)


def failed_steps(groups: list[Group]) -> list[dict]:
    return [r for g in groups for r in g.steps() if not r["ok"]]


def test_an_outage_costs_no_step_and_no_pause(cluster: MakeCluster, own_etcd: EtcdServer) -> None:
    """I7: membership is watched, not asked for; a running epoch needs no etcd."""
    c = cluster(own_etcd.url, lease_ttl=2)
    groups = c.start_all(2)
    epoch = groups[0].commits()[-1]["epoch"]
    own_etcd.kill()
    begun = time.monotonic()
    train_for(c, groups, 6)
    assert all(len(g.commits(begun)) > 100 for g in groups)
    own_etcd.start()
    train_for(c, groups, 5)
    assert {g.commits()[-1]["epoch"] for g in groups} == {epoch}
    assert not failed_steps(groups)
    late = c.start("trainer-2")  # and the job is still open
    c.wait_together([*groups, late], since=late.started)
    c.check_versions()


def test_a_frozen_etcd_that_loses_every_lease_costs_at_most_one_epoch(
    cluster: MakeCluster, own_etcd: EtcdServer
) -> None:
    """I7: all keys vanish at one moment without proof of death, and are put again."""
    c = cluster(own_etcd.url, lease_ttl=2)
    groups = c.start_all(3)
    epoch = groups[0].commits()[-1]["epoch"]
    own_etcd.freeze()
    train_for(c, groups, 5)
    own_etcd.thaw()
    train_for(c, groups, 6)
    last = {g.commits()[-1]["epoch"] for g in groups}
    assert max(last) - epoch <= 1
    c.wait_together(groups, since=time.monotonic())
    c.check_versions()


def test_a_wiped_etcd_is_given_its_epoch_back(cluster: MakeCluster, own_etcd: EtcdServer) -> None:
    """I8: the running members know better than an empty etcd, and a joiner heals from them."""
    c = cluster(own_etcd.url, lease_ttl=2)
    groups = c.start_all(2)
    own_etcd.wipe()
    own_etcd.start()
    late = c.start("trainer-2")
    c.wait_together([*groups, late], since=late.started)
    assert late.commits(n=3)[0]["step"] > groups[0].commits()[0]["step"] + 5
    assert late.commits()[-1]["epoch"] > 1
    c.check_versions()


def test_without_word_from_etcd_for_too_long_nobody_commits(
    cluster: MakeCluster, own_etcd: EtcdServer
) -> None:
    """I3: after `outage_grace` the members may have been replaced; when etcd is back they go on."""
    c = cluster(own_etcd.url, lease_ttl=2, outage_grace=4, takeover_after=8)
    groups = c.start_all(2)
    own_etcd.kill()
    since = time.monotonic()
    c.wait(lambda: all(g.events("failed_step") for g in groups), "the fence", groups, timeout=20)
    fenced = max(g.commits()[-1]["t"] for g in groups)
    assert fenced - since < 4 + 2
    own_etcd.start()
    c.wait_together(groups, since=time.monotonic())
    c.check_versions()
