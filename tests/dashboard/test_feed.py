"""Following a job in a real etcd, for any number of viewers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ftkit.core.model import Abort, Policy
from ftkit.dashboard.board import Snapshot
from ftkit.dashboard.feed import Feed
from ftkit.errors import FtkitError
from ftkit.keeper.embedded import EtcdServer
from ftkit.keeper.etcd import Etcd, EtcdSettings
from tests.dashboard.conftest import Put, eventually


def now(feed: Feed) -> Snapshot:
    update = feed.latest()
    assert update is not None
    return update.snapshot


@pytest.mark.usefixtures("training")
def test_it_shows_the_job_and_each_change(etcd: Etcd, job: str, put: Put) -> None:
    with Feed(etcd, job, Policy()) as feed:
        first = feed.wait_newer(0, 20.0)
        assert first is not None
        assert (first.snapshot.state, first.snapshot.epoch) == ("training", 3)
        assert [s.epoch for s in first.snapshot.spans] == [1, 2, 3]
        put("abort", Abort(epoch=3, by="t0", why="reset"))
        eventually(lambda: now(feed).state != "training", "the abort is shown")
        assert msgspec.json.decode(feed.latest().data)["board"]["reason"] == now(feed).reason  # type: ignore[union-attr]
        etcd.delete(f"/ftkit/{job}/members/t1")
        eventually(lambda: {r.state for r in now(feed).rows} == {"in epoch", "suspect"}, "t1 is a suspect")


@pytest.mark.usefixtures("training")
def test_nothing_new_is_not_sent(etcd: Etcd, job: str) -> None:
    with Feed(etcd, job, Policy()) as feed:
        first = feed.wait_newer(0, 20.0)
        assert first is not None
        assert feed.wait_newer(first.number, 1.5) is None


@pytest.mark.usefixtures("training")
def test_viewers_cost_etcd_nothing(etcd: Etcd, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the job has been read once, looking at it makes no request."""
    requests: list[object] = []
    real = etcd.link.call

    def counting(*args: Any, **more: Any) -> Any:
        requests.append(args)
        return real(*args, **more)

    monkeypatch.setattr(etcd.link, "call", counting)
    with Feed(etcd, job, Policy()) as feed:
        assert feed.wait_newer(0, 20.0)
        read = len(requests)
        assert read == 2, "what is so, and the past epochs"
        for _ in range(200):
            assert feed.wait_newer(0, 1.0)
        assert feed.wait_newer(feed.latest().number, 1.2) is None  # type: ignore[union-attr]
        assert len(requests) == read


def test_an_etcd_that_goes_away_is_told_and_forgotten_when_it_returns(own_etcd: EtcdServer) -> None:
    with Etcd(EtcdSettings(endpoints=(own_etcd.url,))) as etcd, Feed(etcd, "j", Policy()) as feed:
        assert feed.wait_newer(0, 20.0)
        own_etcd.stop()
        eventually(lambda: now(feed).etcd_error, "the outage is told")
        own_etcd.start()
        eventually(lambda: not now(feed).etcd_error, "its end is told")
        etcd.put("/ftkit/j/abort", b'{"epoch": 4, "why": "x"}')
        eventually(lambda: any(m.event == "abort" for m in now(feed).moments), "changes are shown again")


@pytest.mark.usefixtures("training")
def test_a_wiped_etcd_is_shown_as_it_is(etcd: Etcd, job: str) -> None:
    with Feed(etcd, job, Policy()) as feed:
        assert feed.wait_newer(0, 20.0)
        etcd.delete_prefix(f"/ftkit/{job}/")
        eventually(lambda: now(feed).state == "empty", "the job is gone")


def test_who_waits_is_sent_away_when_it_closes(etcd: Etcd, job: str) -> None:
    feed = Feed(etcd, job, Policy())
    with feed:
        assert feed.wait_newer(0, 20.0)
    assert feed.closed
    assert feed.wait_newer(0, 20.0) is None
    feed.wait_end(None)


def test_its_own_failure_reaches_the_command(etcd: Etcd, job: str) -> None:
    with Feed(etcd, job, Policy()) as feed:
        assert feed.wait_newer(0, 20.0)
        feed._inbox.put(42)  # type: ignore[arg-type]
        feed._board._known["broken"] = None  # type: ignore[assignment]
        with pytest.raises(FtkitError, match="error in ftkit"):
            feed.wait_end(20.0)
