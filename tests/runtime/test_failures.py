"""One replica group fails in every way that it can; the others go on, and all end with the same bits."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.runtime.cluster import Cluster, Group, longest_gap

MakeCluster = Callable[..., Cluster]


def survive(c: Cluster, survivors: list[Group], since: float, timeout: float = 30.0) -> float:
    """Wait until the survivors commit without the lost group; return their longest pause."""
    n = len(survivors)
    c.wait(lambda: all(len(g.commits(since, n)) >= 5 for g in survivors), "the survivors", survivors, timeout)
    return max(longest_gap(g.commits(), since, g.commits(since, n)[0]["t"]) for g in survivors)


def come_back(c: Cluster, groups: list[Group], *args: object) -> None:
    """Start the last group again, and wait until all train together."""
    groups[-1] = c.start(groups[-1].replica_id, *args)
    c.wait_together(groups, since=groups[-1].started)


@pytest.mark.parametrize("inside", ["anywhere", "backward"])
def test_a_killed_group_costs_no_step_and_comes_back(
    cluster: MakeCluster, etcd_url: str, inside: str
) -> None:
    """The survivors salvage the step in which their peer dies, also inside of backward."""
    c = cluster(etcd_url)
    groups = c.start_all(3, "--period-ms", 30)
    for _ in range(3):
        since = groups[-1].signal(signal.SIGKILL if inside == "anywhere" else signal.SIGUSR2)
        pause = survive(c, groups[:-1], since)
        assert pause < 2.0  # generous: a loaded machine must not fail the test; `ftkit bench` measures
        come_back(c, groups, "--period-ms", 30)
        assert groups[-1].events("healed")[0]["detail"]["bytes"] > 0
    c.check_versions()
    ends = c.finish(groups)
    assert len(ends) == 3
    failed = [r for g in groups[:-1] for r in g.steps() if not r["ok"]]
    assert len(failed) <= 2, "a death between the reduction and the vote may cost a step, other deaths none"


def test_only_the_killed_one_of_five_ends(cluster: MakeCluster, etcd_url: str) -> None:
    """gloo tells only the neighbours in its ring; the others must be freed by the abort."""
    c = cluster(etcd_url)
    groups = c.start_all(5, "--period-ms", 20)
    since = groups[-1].signal(signal.SIGKILL)
    survive(c, groups[:-1], since)
    assert all(g.alive for g in groups[:-1])
    c.check_versions()


@pytest.mark.parametrize("what", ["trainer", "host"])
def test_a_frozen_group_is_given_up_after_its_lease_and_heals_when_it_thaws(
    cluster: MakeCluster, etcd_url: str, what: str
) -> None:
    """SIGSTOP sends no message: the keeper sees it, or, when it is frozen too, the lease runs out."""
    c = cluster(etcd_url, lease_ttl=2, timeout=60)
    groups = c.start_all(3)
    frozen = groups[-1]
    keeper = frozen.keeper_pid()
    if what == "host":
        os.kill(keeper, signal.SIGSTOP)
    since = frozen.signal(signal.SIGSTOP)
    pause = survive(c, groups[:-1], since)
    assert pause < 2 + 1 + 1.0  # the TTL and a second, and one more for a loaded machine
    thawed = time.monotonic()
    if what == "host":
        os.kill(keeper, signal.SIGCONT)
    frozen.signal(signal.SIGCONT)
    c.wait_together(groups, since=thawed)
    c.check_versions()


def test_a_hung_training_thread_is_noticed_and_its_process_ended(cluster: MakeCluster, etcd_url: str) -> None:
    """Its other threads live, its lease is kept: only its progress tells."""
    c = cluster(etcd_url, progress_timeout=2)
    groups = c.start_all(3)
    since = groups[-1].signal(signal.SIGUSR1)
    pause = survive(c, groups[:-1], since)
    assert pause < 2 + 1 + 1.0
    assert groups[-1].process.wait(10) != 0


def test_sigterm_leaves_at_a_boundary_without_a_lost_step(cluster: MakeCluster, etcd_url: str) -> None:
    """A spot instance's notice is no failure: the leaver exits 0, the others lose nothing."""
    c = cluster(etcd_url)
    groups = c.start_all(3, "--period-ms", 30)
    since = groups[-1].signal(signal.SIGTERM)
    survive(c, groups[:-1], since)
    assert groups[-1].process.wait(10) == 0
    assert not [r for g in groups for r in g.steps(since) if not r["ok"]]
    c.check_versions()


def test_a_join_costs_the_others_no_step(cluster: MakeCluster, etcd_url: str) -> None:
    """All switch at the same boundary, after a vote that said so."""
    c = cluster(etcd_url)
    groups = c.start_all(2, "--period-ms", 20)
    since = time.monotonic()
    joiner = c.start("trainer-2", "--period-ms", 20)
    c.wait_together([*groups, joiner], since=since)
    assert not [r for g in groups for r in g.steps(since) if not r["ok"]]
    assert joiner.commits()[0]["step"] > groups[0].commits()[0]["step"]
    c.check_versions()


def test_failures_leave_no_trace_in_the_bits(cluster: MakeCluster, etcd_url: str, job: str) -> None:
    """With all groups required, three failures and none give the same batches: equal bit for bit."""
    args = ("--steps", 60, "--period-ms", 15, "--seed", 7)
    troubled = cluster(etcd_url, min_replicas=3)
    groups = [troubled.start(f"trainer-{i}", *args) for i in range(3)]
    for victim in (2, 0, 1):
        mark = time.monotonic()
        troubled.wait(lambda m=mark: all(len(g.commits(m)) >= 5 for g in groups), "some steps", groups)
        groups[victim].process.kill()
        groups[victim].process.wait()
        groups[victim] = troubled.start(f"trainer-{victim}", *args)
    calm = cluster(etcd_url, min_replicas=3)
    calm.env["FTKIT_JOB"] = f"{job}-calm"
    ends = troubled.wait_end(groups) + calm.wait_end([calm.start(f"trainer-{i}", *args) for i in range(3)])
    assert [r["step"] for r in ends] == [60] * 6
    assert len({r["hash"] for r in ends}) == 1
    troubled.check_versions()


def test_a_held_gil_does_not_lose_the_lease(cluster: MakeCluster, etcd_url: str) -> None:
    """The keeper is a process of its own; the others wait for the slow step."""
    c = cluster(etcd_url, lease_ttl=2)
    groups = [
        c.start("trainer-0"),
        c.start("trainer-1"),
        c.start("trainer-2", "--hold-gil-at", 200, "--hold-gil-s", 6),
    ]
    c.wait_together(groups)
    c.wait(lambda: _longest_pause(groups[0]) > 5, "the held GIL", groups)
    c.wait_together(groups, since=time.monotonic())
    for g in groups:
        before, after = max(itertools.pairwise(g.commits()), key=lambda pair: pair[1]["t"] - pair[0]["t"])
        assert (before["epoch"], before["n"]) == (after["epoch"], 3), "one epoch before and after"
    assert not [r for g in groups for r in g.steps() if not r["ok"]]


def _longest_pause(group: Group) -> float:
    times = [r["t"] for r in group.commits()]
    return max(b - a for a, b in itertools.pairwise(times))


def test_a_dead_keeper_is_replaced_without_a_lost_step(cluster: MakeCluster, etcd_url: str) -> None:
    """The new keeper takes the record over: same incarnation, no new epoch."""
    c = cluster(etcd_url, lease_ttl=2)
    groups = c.start_all(2)
    epoch = groups[0].commits()[-1]["epoch"]
    for g in groups:
        old = g.keeper_pid()
        os.kill(old, signal.SIGKILL)
        since = time.monotonic()
        c.wait(lambda g=g, old=old: _another_keeper(g, old), "another keeper", groups)
        c.wait_together(groups, commits=100, since=since)
    time_of_a_lease = time.monotonic() + 4
    c.wait(lambda: time.monotonic() > time_of_a_lease, "a lease's life", groups)
    assert groups[0].commits()[-1]["epoch"] == epoch
    assert not [r for g in groups for r in g.steps() if not r["ok"]]


def _another_keeper(group: Group, old: int) -> bool:
    try:
        return group.keeper_pid() != old
    except (AssertionError, OSError):
        return False


def test_an_update_that_fails_half_way_heals_from_the_others(cluster: MakeCluster, etcd_url: str) -> None:
    """I5: a half-applied update is no state; the member takes the others' state before it votes again."""
    c = cluster(etcd_url)
    groups = c.start_all(2)
    odd = c.start("trainer-2", "--fail-at", groups[0].commits()[-1]["step"] + 120)
    c.wait(lambda: any("update_failed" in r for r in odd.rows()), "the failed update", [*groups, odd])
    failed = next(i for i, r in enumerate(odd.rows()) if "update_failed" in r)
    c.wait_together([*groups, odd], since=time.monotonic())
    assert any(r.get("event") == "healed" for r in odd.rows()[failed:])
    c.check_versions()


def test_a_member_that_always_fails_is_named_and_leaves(cluster: MakeCluster, etcd_url: str) -> None:
    """The others go on without it."""
    c = cluster(etcd_url, max_retries=3)
    groups = c.start_all(2)
    bad = c.start("trainer-2", "--report-always")
    assert bad.process.wait(60) == 3
    assert "trainer-2" in bad.rows()[-1]["message"]
    assert bad.rows()[-1]["error"] == "StepFailed"
    c.wait_together(groups, since=time.monotonic())
