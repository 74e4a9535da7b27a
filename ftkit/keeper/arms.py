"""All that acts for the keeper's loop: its connection to etcd, its threads, its ears. Decides nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ftkit.core import events as ev
from ftkit.core.model import Departed, JobConfig
from ftkit.errors import EtcdAuthError, EtcdError, EtcdNoSpace, KeeperError
from ftkit.keeper.admission import Admitted, admit
from ftkit.keeper.etcd import Etcd
from ftkit.keeper.inbox import ConfigSeen, Item, LetIn, RefusedBy, Trouble, Waits
from ftkit.keeper.keys import JobKeys, decode
from ftkit.keeper.lease import LeaseKeeper
from ftkit.keeper.post import Post
from ftkit.keeper.processes import Processes
from ftkit.keeper.progress import Progress, ProgressReader
from ftkit.keeper.ranks import Ranks
from ftkit.keeper.sight import Sight
from ftkit.keeper.stats import StatsPublisher
from ftkit.keeper.writer import Writer

log = logging.getLogger(__name__)

_ADMISSION_PAUSE_S = 0.3


class Arms:
    """Build everything; nothing runs before `start` but the listener, whose port must be known."""

    def __init__(self, post: Post, etcd: Etcd, put: Callable[[Item], None]) -> None:
        settings = post.settings
        self.etcd = etcd
        self.keys = JobKeys(settings.job)
        self._post = post
        self._put = put
        self._closed = threading.Event()
        self._config: JobConfig | None = None
        self._began = time.monotonic()
        self._progress: ProgressReader | None = None
        try:
            self._progress = ProgressReader(post.progress_file, settings.group_world_size)
        except KeeperError as error:
            log.warning("going without stats and without progress_timeout: %s", error)
        self.progress_file = "" if self._progress is None else post.progress_file

        def trouble(error: Exception) -> None:
            put(Trouble(error))

        self.lease = LeaseKeeper(
            etcd,
            settings.lease_ttl,
            lambda _: put(ev.LeaseLost()),  # also with the first: the machine then writes its keys at once
            trouble,
            period_s=settings.outage_grace / 4,
        )
        self.writer = Writer(
            etcd,
            self.keys,
            settings.replica_id,
            post.incarnation,
            self.lease,
            post=put,
            on_trouble=trouble,
            on_refused=lambda error: put(RefusedBy(error)),
            on_waiting=lambda reason: put(Waits(reason)),
            readmit=self._admit,
        )
        self.sight = Sight(
            etcd,
            self.keys,
            settings.replica_id,
            put,
            on_config=lambda kv: put(ConfigSeen(kv)),
            on_trouble=trouble,
        )
        self.processes = Processes(
            put,
            freeze_grace=settings.freeze_grace,
            progress_timeout=settings.progress_timeout,
            read=self.read_progress,
            mutex=lambda rank: None if self._progress is None else self._progress.mutex(rank),
            on_failure=lambda error: put(RefusedBy(error)),
        )
        self.stats = StatsPublisher(
            etcd,
            self.keys,
            settings.replica_id,
            post.incarnation,
            interval_s=settings.stats_interval,
            lease=lambda: self.lease.id,
            read=lambda: self.read_progress(0),
            etcd_age=self.etcd_age,
        )
        # A group of one has its rank on this machine.
        host = settings.bind if settings.group_world_size > 1 else "127.0.0.1"
        self.ranks = Ranks(host, post.port, post.secret, put)

    def start(self) -> None:
        """Let the lease and the writer run."""
        self.lease.start()
        self.writer.start()

    def close(self, *, revoke: bool) -> None:
        """End everything; with `revoke`, give the lease back, so that nothing of us stays in etcd."""
        self._closed.set()
        self.ranks.close()
        self.writer.close()
        self.stats.close()
        self.processes.close()
        self.sight.close()
        self.lease.close(revoke=revoke)
        self.etcd.close()
        if self._progress is not None:
            self._progress.close(delete=revoke)

    def read_progress(self, rank: int) -> Progress | None:
        """Return what a rank has noted; None when that cannot be read."""
        try:
            return None if self._progress is None else self._progress.read(rank)
        except ValueError:  # closed, or no phase that we know
            return None

    def etcd_age(self) -> float | None:
        """Return for how many seconds nothing has been known of etcd; None when it never was heard."""
        heard, blind = self.lease.heard, self.sight.blind_since
        if heard == 0.0:
            return None
        # A watch that is broken may hide a new epoch, whatever else is heard (I3).
        return time.monotonic() - (heard if blind is None else max(self._began, min(heard, blind)))

    def begin_admission(self, config: JobConfig, *, patient: bool) -> None:
        """Find out, in a thread, whether the job takes the group: posts `LetIn` or `RefusedBy`.

        `patient`: the group is a member already, so that even a refusal of etcd's is waited out.
        """
        self._config = config

        def run() -> None:
            self._put(Waits(f"waiting for etcd at {self.etcd.link.where}"))
            while not self._closed.is_set():
                try:
                    self._check_obituary()
                    self._put(LetIn(self._admit(), self._etcd_version()))
                    return
                except (EtcdAuthError, EtcdNoSpace) as error:
                    if not patient:
                        self._put(RefusedBy(error))
                        return
                    self._put(Waits(str(error)))
                except EtcdError as error:
                    self._put(Waits(str(error)))
                except Exception as error:
                    self._put(RefusedBy(error))
                    return
                self._closed.wait(_ADMISSION_PAUSE_S)

        threading.Thread(target=run, name="keeper admission", daemon=True).start()

    def _etcd_version(self) -> str:
        """Return what the server calls itself; nice to know, but no reason to stay outside."""
        try:
            return self.etcd.version()
        except EtcdError:
            return ""

    def _admit(self) -> Admitted:
        assert self._config is not None, "the group is complete"
        settings = self._post.settings
        return admit(self.etcd, self.keys, settings.replica_id, self._config, settings.token)

    def _check_obituary(self) -> None:
        """An incarnation that was declared dead cannot come back: others have acted on it."""
        if not self._post.takeover:
            return
        replica_id = self._post.settings.replica_id
        kv = self.etcd.get(self.keys.departed_of(replica_id))
        departed = None if kv is None else decode("departed", kv.key, kv.value)
        if isinstance(departed, Departed) and departed.incarnation == self._post.incarnation:
            raise KeeperError(
                f"{replica_id} was declared dead ({departed.how}) while its keeper was away; start it again"
            )
