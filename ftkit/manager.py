"""The facade that a training script holds: it wires the parts and decides nothing.

manager = Manager(state_dict=..., load_state_dict=..., min_replicas=2)
model = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, optimizer)
"""

from __future__ import annotations

import atexit
import logging
import signal
import threading
import weakref
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType

import torch

from ftkit.config import Settings
from ftkit.core.model import Version
from ftkit.core.vote import Lineage
from ftkit.errors import FtkitError
from ftkit.groups.base import ProcessGroup
from ftkit.groups.gloo import ProcessGroupGloo
from ftkit.runtime.bootstrap import Bootstrap
from ftkit.runtime.collectives import Collective
from ftkit.runtime.healing import Healer
from ftkit.runtime.inbox import Inbox
from ftkit.runtime.links import WILDCARDS, Links
from ftkit.runtime.membership import Membership
from ftkit.runtime.progress import Progress
from ftkit.runtime.state import Load, Save, StateRegistry
from ftkit.runtime.step import Step
from ftkit.runtime.telemetry import Timeline, TimelineEvent
from ftkit.runtime.watchdog import Watchdog
from transport import HTTPTransport, Transport

logger = logging.getLogger(__name__)


class Manager:
    """One rank of one replica group in a fault tolerant job.

    Args:
        pg: the process group that carries the gradients; gloo by default.
        load_state_dict: receives the state that `state_dict` returned at a healthy peer. Both are called at a
            step boundary, on the training thread, and may use the group's own collectives.
        state_dict: returns the live state, without copying: nested dicts and lists of tensors and numbers.
        min_replicas: fewest replica groups that may commit a step; `min_replica_size` is a synonym.
        transport: how the live state travels; HTTP by default.
        user_data: a few strings that the other members can read.
        handle_sigterm: leave in order at the next step boundary when SIGTERM arrives.
        settings: any setting of `ftkit.config.Settings` by its name: `etcd`, `job`, `replica_id` …

    Raises:
        ConfigError: settings that are wrong or contradict each other.
    """

    def __init__(
        self,
        pg: ProcessGroup | None = None,
        load_state_dict: Load | None = None,
        state_dict: Save | None = None,
        min_replicas: int | None = None,
        *,
        min_replica_size: int | None = None,
        transport: Transport | None = None,
        user_data: Mapping[str, str] | None = None,
        handle_sigterm: bool = True,
        **settings: object,
    ) -> None:
        """Check the settings and start the keeper; the job is joined at the first step."""
        least = min_replicas if min_replicas is not None else min_replica_size
        self.settings = Settings.resolve(None, min_replicas=least, **settings)
        if (load_state_dict is None) != (state_dict is None):
            raise FtkitError("give both `state_dict` and `load_state_dict`, or neither")
        self._state = StateRegistry()
        self._commits: list[Callable[[], None]] = []
        self._aborts: list[Callable[[], None]] = []
        self._update: Callable[[], bool | None] | None = None
        self._batches_committed = self._voters = 0
        self._closed = False
        self._timeline = Timeline()
        self._state.register("ftkit", self._load_counters, self._save_counters)
        if state_dict is not None and load_state_dict is not None:
            self._state.register("user", load_state_dict, state_dict)

        self._progress = Progress()
        self._inbox = Inbox(lambda m: self._step.abort(m.epoch, m.why, left_out=m.left_out))
        self._transport = transport or HTTPTransport(
            token=self._job_token,
            bind=self.settings.bind,
            advertise=self.settings.advertise,
            min_rate=self.settings.heal_rate_floor * 1e6,
        )
        self._links = Links(self.settings, pg or self._default_group())
        self._bootstrap = Bootstrap(
            self.settings,
            self._inbox,
            self._state,
            transport_address=self._transport.address,
            user_data=dict(user_data or {}),
            running=lambda: self._membership.epoch,
        )
        healer = Healer(
            self._transport,
            self._state,
            self._links,
            group_rank=self.settings.group_rank,
            timeout_s=self.settings.heal_timeout,
        )
        lineage = Lineage()
        self._membership = Membership(
            self.settings,
            keeper=self._bootstrap.keeper,
            inbox=self._inbox,
            links=self._links,
            lineage=lineage,
            timeline=self._timeline,
        )
        self._step = Step(
            self.settings,
            keeper=self._bootstrap.keeper,
            inbox=self._inbox,
            links=self._links,
            healer=healer,
            lineage=lineage,
            membership=self._membership,
            progress=self._progress,
            settle=self._settle,
        )
        self._watchdog = Watchdog(
            self._step, self._inbox, self._progress, suspect_grace=self.settings.suspect_grace
        )
        self._joined = False
        atexit.register(_shut_down, weakref.ref(self))
        if handle_sigterm:
            self._install_sigterm()

    def _default_group(self) -> ProcessGroup:
        host = "" if self.settings.bind in WILDCARDS else self.settings.bind
        return ProcessGroupGloo(timeout_s=self.settings.collective_timeout, hostname=host)

    def _job_token(self) -> str:
        """The secret of the job, empty before it is joined; it changes when a wiped etcd is filled anew."""
        welcome = self._inbox.welcome
        return "" if welcome is None else welcome.job_token

    # -- the step ----------------------------------------------------------------------------------

    def start_step(self) -> None:
        """Begin a step: be in an epoch, and healed. Costs nothing while nothing changes; idempotent.

        Raises:
            Left: this group was drained or got SIGTERM; a SystemExit with code 0.
            QuorumTimeout: no epoch formed within `quorum_timeout`.
            StepFailed: the step failed more than `max_retries` times in a row.
            FtkitError: the job refuses this member.
        """
        if not self._joined:
            welcome = self._bootstrap.join(lambda: self._step.leaving is not None)
            self._progress.open(welcome.progress_file, self.settings.group_rank)
            self._links.meet_siblings(self._bootstrap.group_store)
            self._joined = True
        if self._step.committing:
            self.finish_step()
        self._step.start()

    start_quorum = start_step

    def allreduce(self, tensor: torch.Tensor, *, average: bool = True) -> Collective:
        """Average (or sum) a tensor over the contributors, in place and in the background.

        Returns a work with `wait()` and `get_future()`. After the first error of a step it does nothing and
        never raises: the vote will fail, and the step is repeated.
        """
        if not self._step.started:
            self.start_step()
        return self._step.reduce(tensor, average=average)

    def num_contributors(self) -> int:
        """Return by how much gradients are to be divided; 1 when the replicas have weights in this step."""
        return self._step.num_contributors()

    def reduce_bucket(
        self,
        buffer: torch.Tensor,
        restore: Callable[[], None] | None,
        last: bool,
        *,
        divided_by: int = 1,
    ) -> torch.futures.Future[torch.Tensor]:
        """Average one bucket of a backward pass; the futures of all its buckets complete together.

        `restore` puts this replica's own gradients back into the buffer: with it, a step whose peer dies
        before that moment is reduced again among the survivors instead of being repeated. `divided_by` is
        what the buffer has been divided by already (`num_contributors()` of a moment ago, say).
        """
        if not self._step.started:
            self.start_step()
        call = self._step.reduce(buffer, restore=restore, held=True, last=last, divided_by=divided_by)
        return call.get_future()

    def set_weight(self, w: float) -> None:
        """Let this replica enter the step's averages with weight `w`; all must call it, before backward.

        Raises:
            FtkitError: `w` is negative or not finite, or all weights are zero.
        """
        self.start_step()
        self._step.set_weight(w)

    def should_commit(self) -> bool:
        """Vote: True on every member of the epoch, or on none. The update is due after a True."""
        if not self._joined:
            self.start_step()
        committed = self._step.vote()
        self._voters = self.num_participants()  # a vote in doubt is settled among other members
        if committed:
            return True
        self._call(self._aborts)
        return False

    def finish_step(self, error: BaseException | None = None) -> None:
        """Say that the update was applied, or failed half way: then this member heals.

        Called by `ftkit.Optimizer`. Without it the next `start_step` takes the update for applied.
        """
        if not self._step.committing:
            return
        if error is None:
            self._batches_committed += self._voters
        self._step.finish(error)
        if error is None:
            self._call(self._commits)

    @staticmethod
    def _call(hooks: list[Callable[[], None]]) -> None:
        for hook in hooks:
            hook()

    def report_error(self, e: Exception) -> None:
        """Make this step's vote fail; the step is repeated."""
        self._step.report_error(e)

    def errored(self) -> Exception | None:
        """Return the first error of this step, if any."""
        return self._membership.error

    # -- what a script may ask ---------------------------------------------------------------------

    def current_step(self) -> int:
        """Return how many steps have been committed."""
        return self._step.current_step

    def batches_committed(self) -> int:
        """Return how many batches went into the committed steps: one per contributor and step."""
        return self._batches_committed

    @property
    def epoch(self) -> int:
        """The id of the current epoch, 0 before the first."""
        return 0 if self._membership.epoch is None else self._membership.epoch.id

    @property
    def version(self) -> Version:
        """The version of the live state: the epoch of its last commit, and the step."""
        return self._step.lineage.version

    @property
    def replica_id(self) -> str:
        """The name of this replica group."""
        return self.settings.replica_id

    def members(self) -> tuple[str, ...]:
        """Return the names of the replica groups in the current epoch, in the order of their ranks."""
        return (
            ()
            if self._membership.epoch is None
            else tuple(s.replica_id for s in self._membership.epoch.seats)
        )

    def step_members(self) -> tuple[str, ...]:
        """Return the replica groups that began the running step, in the order of their ranks.

        Equal on all of them; `members()` may have become a subset when a step is salvaged.
        """
        return self._step.begun_by

    def num_participants(self) -> int:
        """Return how many replica groups contribute to the running step."""
        return 0 if self._membership.plan is None else self._membership.plan.num_replicas

    def participating_rank(self) -> int:
        """Return this group's place among them."""
        return 0 if self._membership.plan is None else self._membership.plan.replica_rank

    def is_participating(self) -> bool:
        """Say whether this group contributes: it does in every epoch it is in, since it heals at once."""
        return self._membership.plan is not None

    def is_checkpoint_writer(self) -> bool:
        """Say whether this rank is the one that should write checkpoints: one in each epoch."""
        return (
            self.settings.group_rank == 0
            and self._membership.plan is not None
            and self.participating_rank() == 0
        )

    # -- state -------------------------------------------------------------------------------------

    def register_state_dict_fn(self, name: str, load: Load, save: Save) -> None:
        """Add a part to the state that all replicas share and that a joiner receives."""
        if self._joined:
            raise FtkitError(f"register the state part {name!r} before the first step")
        self._state.register(name, load, save)

    def declare_model(self, module: torch.nn.Module, name: str = "") -> None:
        """Let the job know the model's names, shapes and dtypes, so that a different one is refused."""
        self._state.declare_model(module, name)

    def register_update(self, fn: Callable[[], bool | None]) -> None:
        """Give the function that applies the gradients at hand, for a commit in doubt (see `Lineage`).

        It returns False when it has changed nothing, as the gradients are not those that were voted on any
        more: then this member heals instead. An error means that the update was applied in part.
        """
        self._update = fn

    def drop_gradients(self) -> None:
        """Say that the gradients of the last step are gone, so that they cannot be applied any more."""
        self._step.lineage.forget_undecided()

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint needs of the manager itself."""
        step = self._step.current_step
        version = self._step.lineage.version
        return {"epoch": version.epoch, "step": step, "batches_committed": self._batches_committed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a checkpoint; before the first step."""
        if self._joined:
            raise FtkitError("load the manager's state before the first step")
        self._step.lineage.version = Version(int(state.get("epoch", 0)), int(state["step"]))
        self._batches_committed = int(state.get("batches_committed", 0))

    def _save_counters(self) -> object:
        return {"batches_committed": self._batches_committed}

    def _load_counters(self, state: object) -> None:
        assert isinstance(state, Mapping), "as saved"
        self._batches_committed = int(state["batches_committed"])

    def _settle(self) -> bool:
        """Apply the update that was in doubt."""
        if self._update is None or self._update() is False:
            return False
        self._batches_committed += self._voters
        self._call(self._commits)
        return True

    # -- hooks -------------------------------------------------------------------------------------

    def on_commit(self, fn: Callable[[], None]) -> None:
        """Call `fn` after each committed update: for logs and queues; register what must heal."""
        self._commits.append(fn)

    def on_abort(self, fn: Callable[[], None]) -> None:
        """Call `fn` after each vote that failed."""
        self._aborts.append(fn)

    def on_event(self, fn: Callable[[TimelineEvent], None]) -> None:
        """Call `fn` with each event of the timeline: epochs, aborts, heals, first commits."""
        self._timeline.subscribe(fn)

    # -- the end -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the job in order and free everything; idempotent. Also the exit of the context manager."""
        if self._closed:
            return
        self._closed = True
        self.finish_step()
        try:
            if self._joined and self._inbox.fatal is None and not self._inbox.gone:
                self._step.close()
        finally:
            self._watchdog.close()
            self._links.close()
            self._bootstrap.close()
            self._transport.close()
            self._progress.close()

    def __enter__(self) -> Manager:
        """Use the manager as a context."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        self.shutdown()

    def _install_sigterm(self) -> None:
        """A spot instance's notice: finish the step, leave at the boundary, exit 0."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return  # the script has its own idea

        def leave(signum: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends at once
            self._step.leaving = "SIGTERM"
            self._inbox.wake()

        signal.signal(signal.SIGTERM, leave)


def _shut_down(reference: weakref.ref[Manager]) -> None:
    """A script that ends without `shutdown` leaves in order all the same."""
    manager = reference()
    if manager is not None:
        manager.shutdown()
