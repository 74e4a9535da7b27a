"""The keeper's small parts, one by one."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ftkit.core import events as ev
from ftkit.core.model import Epoch, JobConfig, Policy, Seat, Version
from ftkit.errors import KeeperError
from ftkit.keeper import messages as msg
from ftkit.keeper.admission import difference, own_config
from ftkit.keeper.group import Group
from ftkit.keeper.hearing import REFRESH_S, Hearing
from ftkit.keeper.inbox import Changes, Inbox, ParentDied
from ftkit.keeper.keys import JobKeys, decode, timeline_kept
from ftkit.keeper.processes import Exited, Hung, Processes, Stopped, exit_status
from ftkit.keeper.progress import Phase, Progress, ProgressReader, ProgressWriter, progress_path
from ftkit.keeper.stats import derive
from tests.keeper.conftest import wait_until


def hello(rank: int, **more) -> msg.Hello:
    return msg.Hello(rank=rank, pid=100 + rank, host="h", transport=f"t{rank}", **more)


class TestHistory:
    @pytest.mark.parametrize(("num", "kept"), [(3, 1000), (1_000, 1000), (10_000, 106), (10**6, 10)])
    def test_the_history_of_a_large_job_does_not_fill_etcd(self, num: int, kept: int):
        """A thousand copies of an epoch of ten thousand members would be a third of etcd's default quota."""
        assert timeline_kept(63 * num) == kept


class TestInbox:
    def test_changes_in_a_row_come_out_together_and_nothing_overtakes_them(self):
        """The machine reacts once to all of them: in a job of thousands it could not keep up otherwise."""
        inbox = Inbox()
        change = [ev.Changed("members", str(i), None, i) for i in range(4)]
        for item in (change[0], change[1], ev.Tick(), change[2], ParentDied(), change[3]):
            inbox.put(item)
        got = [inbox.get(0.0) for _ in range(6)]
        assert got == [
            *(Changes(change[:2]), ev.Tick(), Changes([change[2]]), ParentDied(), Changes([change[3]])),
            None,
        ]


class TestCompat:
    def test_etcd3_is_imported_without_a_trace(self):
        """Others in the process may use protobuf, too: its shared pool and the environment stay clean."""
        code = (
            "import os; before = dict(os.environ)\n"
            "from ftkit.keeper.compat import load_etcd3\n"
            "etcd3 = load_etcd3(); import etcd3 as again; assert etcd3 is again\n"
            "from google.protobuf import descriptor_pool, __version__\n"
            "assert dict(os.environ) == before\n"
            "if int(__version__.split('.')[0]) >= 4:\n"
            "    for name in ('kv.proto', 'rpc.proto', 'auth.proto'):\n"
            "        try: descriptor_pool.Default().FindFileByName(name)\n"
            "        except KeyError: continue\n"
            "        raise SystemExit(name)\n"
            "m = etcd3.etcdrpc.RangeRequest(key=b'k')\n"
            "assert etcd3.etcdrpc.RangeRequest.FromString(m.SerializeToString()) == m\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_a_missing_etcd3_is_said(self):
        code = (
            "import sys, importlib.util as u; real = u.find_spec\n"
            "u.find_spec = lambda n, *a: None if n == 'etcd3' else real(n, *a)\n"
            "from ftkit.errors import ConfigError\n"
            "from ftkit.keeper.compat import load_etcd3\n"
            "try: load_etcd3()\n"
            "except ConfigError as e: assert 'pip install etcd3' in str(e)\n"
            "else: raise SystemExit('no error')\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


class TestGroup:
    def test_the_group_wants_what_all_its_ranks_want(self):
        group = Group(2, "a", "i")
        assert group.joined(hello(0, rendezvous="r")) is None
        assert not group.complete
        assert group.joined(hello(1)) is None
        group.wants[0] = msg.WantEpoch(version=Version(2, 5))
        assert group.take_want() is None
        group.wants[1] = msg.WantEpoch(version=Version(2, 4), failed="lost a peer", shrink_only=True)
        want = group.take_want()
        assert want == ev.Want(version=Version(2, 4), failed="lost a peer", shrink_only=True)
        assert group.take_want() is None, "it is handed on once"
        group.wants[1] = msg.WantEpoch(version=Version(2, 4), leaving=True)
        assert group.take_want().leaving
        group.offered(3)
        group.wants[0] = msg.WantEpoch(version=Version(3, 9))
        assert group.take_want() is None, "the other rank has not asked again"

    def test_a_wish_that_crosses_an_offer_is_void(self):
        """The rank finds the offer; were its wish kept, the group would leave an epoch that it runs in."""
        group = Group(2, "a", "i")
        group.joined(hello(0))
        group.joined(hello(1))
        group.offered(8)
        group.wants_epoch(0, msg.WantEpoch(version=Version(7, 1), offered=7))
        group.wants_epoch(1, msg.WantEpoch(version=Version(8, 2), failed="peer died", offered=8))
        assert group.take_want() is None
        group.wants_epoch(0, msg.WantEpoch(version=Version(8, 2), offered=8))
        want = group.take_want()
        assert (want.offered, want.failed) == (8, "peer died")

    def test_ranks_are_who_they_say(self):
        group = Group(1, "a", "i")
        assert "outside" in group.joined(hello(1))
        assert group.joined(hello(0)) is None
        assert "already" in group.joined(hello(0))

    def test_the_newest_epoch_that_a_rank_runs_in_counts(self):
        group = Group(2, "a", "i")
        epochs = [Epoch(id=i, seats=(Seat("a", "i", Version(0, 0)),)) for i in (3, 4)]
        group.joined(hello(0, running=epochs[0]))
        group.joined(hello(1, running=epochs[1]))
        assert group.running() == epochs[1]

    def test_goodbye_is_said_when_all_have_said_it(self):
        group = Group(2, "a", "i")
        group.goodbyes[0] = msg.GoodbyeKeeper(version=Version(1, 3), planned=True)
        assert group.goodbye() is None
        group.goodbyes[1] = msg.GoodbyeKeeper(version=Version(1, 2), how="gave up", planned=True)
        assert group.goodbye() == ev.Goodbye(how="gave up", version=Version(1, 2), planned=True)


class TestHearing:
    def test_a_silence_ends_only_when_all_has_been_seen(self):
        """I3: a keep-alive may be answered before the watch has brought what happened meanwhile."""
        hearing = Hearing(5.0)
        assert hearing.notice(None, 0.0) is None
        assert hearing.notice(4.9, 0.0) is None
        assert hearing.notice(5.1, 1.0) == ev.Silence(True)
        assert hearing.notice(6.0, 2.0) is None
        assert hearing.notice(0.1, 3.0) == 1
        assert hearing.notice(0.1, 3.1) is None, "it is under way"
        assert hearing.refreshed(1) == ev.Silence(False)
        assert hearing.refreshed(1) is None

    def test_a_refresh_that_a_second_silence_has_overtaken_does_not_count(self):
        hearing = Hearing(5.0)
        hearing.notice(9.0, 0.0)
        assert hearing.notice(0.0, 1.0) == 1
        hearing.notice(9.0, 20.0)
        assert hearing.refreshed(1) is None
        assert hearing.notice(0.0, 21.0) == 2
        assert hearing.refreshed(1) is None
        assert hearing.notice(0.0, 21.0 + 2 * REFRESH_S) == 3, "one that is lost is asked for again"
        assert hearing.refreshed(3) == ev.Silence(False)


class TestConfig:
    BASE: ClassVar[dict[str, Any]] = {
        "policy": Policy(min_replicas=2),
        "group_world_size": 1,
        "token": None,
        "fingerprint": "f",
        "layout": ("w 1",),
    }

    def test_equal_settings_agree_whatever_secret_each_would_have_made(self):
        assert difference(own_config(**self.BASE), own_config(**self.BASE)) is None

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"policy": Policy(min_replicas=3)}, "min_replicas is 3 here and 2 in the job"),
            ({"policy": Policy(min_replicas=2, max_replicas=4)}, "max_replicas is 4 here and 0 in the job"),
            ({"policy": Policy(min_replicas=2, outage_grace=50.5)}, "outage_grace is 50.5 here and 60 in"),
            ({"policy": Policy(min_replicas=2, takeover_after=99)}, "takeover_after is 99 here and 90 in"),
            ({"group_world_size": 4}, "group_world_size is 4 here"),
            ({"token": "t"}, "without one"),
            ({"fingerprint": "g", "layout": ("w 1", "b 2")}, "b 2 here, no such tensor in the job"),
            ({"fingerprint": "g", "layout": ()}, "fingerprint"),
        ],
    )
    def test_a_difference_is_named(self, change, words):
        ours = own_config(**{**self.BASE, **change})
        assert words in difference(ours, own_config(**self.BASE))

    def test_tokens_are_compared_by_digest_only(self):
        ours = own_config(**{**self.BASE, "token": "one"})
        theirs = own_config(**{**self.BASE, "token": "two"})
        assert "token" in difference(ours, theirs)
        assert "one" not in repr(ours)
        assert "FTKIT_TOKEN" in difference(own_config(**self.BASE), theirs)

    def test_a_layout_that_etcd_could_not_take_is_left_out(self):
        layout = tuple(f"layer.{i}.weight [1024, 1024] float32" for i in range(20_000))
        assert own_config(**{**self.BASE, "layout": layout}).layout == ()

    def test_unknown_fields_of_a_newer_release_are_ignored(self):
        keys = JobKeys("j")
        assert decode("members", keys.members + "a", b'{"replica_id":"a","incarnation":"i","new":1}')
        assert decode("epoch", keys.epoch, b"nonsense") is None
        assert JobConfig().schema == 1


class TestProgress:
    def test_what_a_rank_marks_the_keeper_reads(self, tmp_path: Path):
        path = str(tmp_path / "p")
        reader = ProgressReader(path, 40)
        writer = ProgressWriter(path, 39)
        writer.mark(epoch=2, step=7, phase=Phase.COMPUTE, pending=1)
        writer.note(compute_s=1.5, wait_s=0.5, bytes_healed=9, committed=7)
        seen = reader.read(39)
        assert (seen.version, seen.phase, seen.pending) == (Version(2, 7), Phase.COMPUTE, 1)
        assert (seen.compute_s, seen.bytes_healed, seen.committed) == (1.5, 9, 7)
        assert reader.read(0).mark == 0
        since = seen.since
        writer.mark(epoch=2, step=7, phase=Phase.COMPUTE, touch=False)
        assert reader.read(39).since == since
        writer.close()
        reader.close(delete=True)
        assert not Path(path).exists()

    def test_a_new_keeper_finds_the_file_of_the_last(self, tmp_path: Path):
        path = str(tmp_path / "p")
        first = ProgressReader(path, 1)
        writer = ProgressWriter(path, 0)
        writer.mark(epoch=1, step=1, phase=Phase.COMPUTE)
        first.close()
        second = ProgressReader(path, 1)
        writer.mark(epoch=1, step=2, phase=Phase.VOTING)
        assert second.read(0).version == Version(1, 2)
        writer.close()
        second.close(delete=True)

    def test_a_rank_without_a_slot_is_refused(self, tmp_path: Path):
        reader = ProgressReader(str(tmp_path / "p"), 1)
        with pytest.raises(KeeperError, match="no slot"):
            ProgressWriter(str(tmp_path / "p"), 10_000)
        reader.close(delete=True)
        with pytest.raises(KeeperError, match="cannot be opened"):
            ProgressWriter(str(tmp_path / "p"), 0)

    def test_a_mark_is_cheap(self, tmp_path: Path):
        """It is written several times per step."""
        reader = ProgressReader(str(tmp_path / "p"), 1)
        writer = ProgressWriter(str(tmp_path / "p"), 0)
        best = min(self.time_of(writer) for _ in range(20))
        assert best < 20e-6  # about 1 µs; the machine may be busy
        writer.close()
        reader.close(delete=True)

    def time_of(self, writer: ProgressWriter) -> float:
        begun = time.perf_counter()
        for i in range(100):
            writer.mark(epoch=1, step=i, phase=Phase.COMPUTE)
        return (time.perf_counter() - begun) / 100

    def test_the_file_is_for_its_owner_only(self):
        path = progress_path("test-of-permissions")
        reader = ProgressReader(path, 1)
        assert Path(path).stat().st_mode & 0o077 == 0
        reader.close(delete=True)

    def test_stats_are_per_step_since_the_last_time(self):
        before = Progress(mark=1, committed=10, compute_s=5.0, wait_s=1.0)
        after = Progress(
            mark=9, version=Version(3, 20), phase=Phase.VOTING, committed=20, compute_s=7.0, wait_s=2.0
        )
        stats = derive("a", "i", before, after, 4.0, 0.1)
        assert (stats.steps_per_s, stats.compute_s, stats.wait_s) == (2.5, 0.2, 0.1)
        assert (stats.epoch, stats.step, stats.phase) == (3, 20, "voting")


class TestProcesses:
    def processes(self, progress=lambda _: None, **limits):
        self.seen = []
        settings = {"freeze_grace": 0.2, "progress_timeout": None} | limits
        return Processes(self.seen.append, read=progress, on_failure=self.seen.append, **settings)

    def child(self, code: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout.readline() == "ready\n"
        return child

    def test_an_end_is_noticed_with_its_code(self):
        """The process is a zombie for a moment; that is when its status can be read by others."""
        processes = self.processes()
        code = "import sys; sys.stdin.read(); sys.exit(7)"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        assert processes.add(0, child.pid)
        child.stdin.close()
        wait_until(lambda: self.seen)
        assert self.seen == [Exited(0, "exit 7")]
        child.wait()
        assert exit_status(child.pid) == "ended"
        processes.close()

    def test_an_end_is_felt_before_the_memory_is_freed(self, tmp_path):
        """Seen by the flags of the threads: at that moment the kernel has not closed the process's files."""
        path = str(tmp_path / "p")
        reader = ProgressReader(path, 1)
        code = f"""if True:
            from ftkit.keeper.progress import ProgressWriter
            writer = ProgressWriter({path!r}, 0)
            memory = [bytearray(b"x" * (1 << 20)) for _ in range(700)]
            print("ready", flush=True)
            input()
        """
        child = self.child(code)
        open_then: list[bool] = []
        files = child.stdout.fileno()

        def post(item):
            open_then.append(not select.select([files], [], [], 0)[0])
            self.seen.append(item)

        self.seen = []
        processes = Processes(
            post,
            freeze_grace=1,
            progress_timeout=None,
            read=lambda _: None,
            mutex=reader.mutex,
            on_failure=post,
        )
        processes.add(0, child.pid)
        time.sleep(0.7)  # the keeper has come to wait for it, once in vain
        assert not self.seen
        child.kill()
        wait_until(lambda: self.seen)
        child.wait()
        time.sleep(0.2)
        child.communicate()
        assert self.seen == [Exited(0, "SIGKILL")]
        assert open_then == [True]
        processes.close()
        reader.close(delete=True)

    def test_a_thread_that_ends_is_no_process_that_ends(self, tmp_path):
        path = str(tmp_path / "p")
        reader = ProgressReader(path, 1)
        code = f"""if True:
            import threading
            from ftkit.keeper.progress import ProgressWriter
            thread = threading.Thread(target=ProgressWriter, args=({path!r}, 0))
            thread.start()
            thread.join()
            print("ready", flush=True)
            input()
        """
        child = self.child(code)
        processes = self.processes(mutex=reader.mutex)
        processes.add(0, child.pid)
        time.sleep(0.7)
        assert not self.seen
        child.kill()
        wait_until(lambda: self.seen)
        assert self.seen == [Exited(0, "SIGKILL")]
        child.communicate()
        processes.close()
        reader.close(delete=True)

    def test_a_stop_is_told_after_the_grace_and_its_end_too(self):
        processes = self.processes()
        child = subprocess.Popen(["sleep", "30"])
        processes.add(0, child.pid)
        child.send_signal(19)
        wait_until(lambda: self.seen)
        child.send_signal(18)
        wait_until(lambda: len(self.seen) == 2)
        processes.kill()
        wait_until(lambda: len(self.seen) == 3)
        assert self.seen == [Stopped(0, True), Stopped(0, False), Exited(0, "SIGKILL")]
        child.wait()
        processes.close()

    def test_who_computes_for_too_long_is_hung_and_who_waits_is_not(self):
        progress = {
            0: Progress(mark=5, phase=Phase.COMPUTE),
            1: Progress(mark=5, phase=Phase.VOTING, pending=1),
        }
        processes = self.processes(progress=progress.get, progress_timeout=0.3)
        children = [subprocess.Popen(["sleep", "30"]) for _ in range(2)]
        for rank, child in enumerate(children):
            processes.add(rank, child.pid)
        hung = wait_until(lambda: self.seen)[0]
        assert isinstance(hung, Hung)
        assert hung.rank == 0
        processes.kill()
        for child in children:
            child.wait()
        wait_until(lambda: len(self.seen) == 3)
        processes.close()

    def test_a_process_that_is_not_here_cannot_be_watched(self):
        processes = self.processes()
        assert not processes.add(0, 2**22 + 1)
        assert not processes.reports(0)
        processes.close()
