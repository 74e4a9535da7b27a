"""The collectives of one step: started in order, finished together, and started again with fewer members.

A gradient bucket is handed back to DDP only when the whole backward pass has been reduced. Until then this
replica's own gradients still exist, so a step whose peer has died can be salvaged: put the own gradients
back, and reduce again among the survivors. It knows neither epochs nor votes, and never raises into autograd.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import Work
from torch.futures import Future

from ftkit.errors import GroupError

Launch = Callable[["Collective"], "Work | None"]
"""Scale (when averaging) and start the reduction of a tensor; None when no peer is needed."""

_LOOK_S = timedelta(seconds=0.02)


class Collective:
    """One reduction; `wait` and the future end without an error even when it failed: the vote will tell."""

    __slots__ = (
        "_future",
        "average",
        "divided_by",
        "done",
        "held",
        "last",
        "owner",
        "restore",
        "started",
        "tensor",
        "work",
    )

    def __init__(
        self,
        owner: Collectives,
        tensor: torch.Tensor,
        *,
        average: bool,
        restore: Callable[[], None] | None = None,
        held: bool = False,
        last: bool = False,
        divided_by: int = 1,
    ) -> None:
        """`held`: the result is handed out with that of the whole backward pass, which ends with `last`.

        `divided_by`: what the tensor, but not what `restore` puts there, is already divided by.
        """
        self.owner = owner
        self.tensor = tensor
        self.average = average
        self.restore = restore
        self.held = held
        self.last = last
        self.divided_by = divided_by
        self.started = False
        self.done = False
        self.work: Work | None = None
        devices: list[int | str | torch.device] = [] if tensor.device.type == "cpu" else [tensor.device]
        self._future: Future[torch.Tensor] = Future(devices=devices)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is there; False when the step has failed."""
        if not self.held:
            self.owner.collect([self])
        self._future.wait()
        return not self.owner.failed

    def get_future(self) -> Future[torch.Tensor]:
        """Return a future of the reduced tensor, which is never set to an exception."""
        if not self.held:
            self.owner.collect_later(self)
        return self._future

    def hand_out(self) -> None:
        """Complete the future, once."""
        if not self._future.done():
            self._future.set_result(self.tensor)

    @property
    def handed_out(self) -> bool:
        """Whether the future is complete."""
        return bool(self._future.done())


class Collectives:
    """All reductions of the running step, in the order in which every member starts them."""

    def __init__(self, launch: Launch, on_error: Callable[[Exception], None]) -> None:
        """`on_error` hears the first failure, on whatever thread saw it."""
        self._launch = launch
        self._on_error = on_error
        self._lock = threading.RLock()
        self._calls: list[Collective] = []
        self._generation = 0
        self._handed_out = False
        self._moved_at = time.monotonic()
        self.failed = False
        self.paused = False
        """Between the failure and the decision whether the step can be salvaged: nothing is started."""

    # -- the training thread and autograd ------------------------------------------------------------

    def begin(self) -> None:
        """A new step: forget the last one."""
        with self._lock:
            self._calls = []
            self._generation += 1
            self._handed_out = self.failed = self.paused = False

    def reduce(self, call: Collective) -> Collective:
        """Start a reduction, or keep it for later while the members are changing.

        The last bucket of a backward pass waits for all of them here: DDP would do so next anyway, and
        waiting is cheaper than being called back from another thread.
        """
        with self._lock:
            self._calls.append(call)
            if self.failed:
                call.hand_out()
            elif not self.paused:
                self._start(call)
        if call.last:
            self._collect_held()
        return call

    def collect(self, calls: list[Collective]) -> None:
        """Wait until these have ended, then hand their results out; what fails is left to the reformer."""
        with self._lock:
            if self.paused or self.failed:
                return
            generation = self._generation
            works = [(c, c.work) for c in calls if c.started and not c.done]
        for call, work in works:
            try:
                if work is not None:
                    _wait(work, [w for _, w in works if w is not None])
            except Exception as error:  # whatever the backend raises ends the step, not the process
                self._failed(error, generation)
                return
            self._moved_at = time.monotonic()
            call.done = generation == self._generation
        with self._lock:
            if generation == self._generation and not self.paused and all(c.done for c in calls):
                self._handed_out = True
                for call in calls:
                    call.hand_out()

    def collect_later(self, call: Collective) -> None:
        """Hand the result out when it is there, on the backend's own thread."""
        work, generation = call.work, self._generation
        if work is None:
            self.collect([call])
            return

        def finished(future: Future[list[torch.Tensor]]) -> None:
            try:
                future.value()
            except Exception as error:
                self._failed(error, generation)
            else:
                self.collect([call])

        work.get_future().then(finished)

    def drain(self) -> None:
        """Wait for all of them."""
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.wait()

    def _collect_held(self) -> None:
        """Collect the buckets of a backward pass, if all of them are there."""
        with self._lock:
            held = [c for c in self._calls if c.held and not c.handed_out]
        if held and held[-1].last:
            self.collect(held)

    # -- those who change the members ----------------------------------------------------------------

    def pause(self) -> None:
        """Start nothing more until `resume` or `fail`; what is in flight has failed or is about to."""
        with self._lock:
            if not self.failed:
                self.paused = True

    def can_salvage(self) -> bool:
        """Say whether all that was started can be started again from this replica's own gradients."""
        with self._lock:
            if self.failed or self._handed_out:
                return False
            return all(not c.started or c.restore is not None for c in self._calls)

    def resume(self) -> None:
        """Start everything again, with the members that are there now."""
        with self._lock:
            self._generation += 1  # late news of the first attempt counts no more
            self.paused = False
            for call in self._calls:
                if call.started and call.restore is not None:
                    call.restore()
                    call.divided_by = 1
                call.started = call.done = False
            for call in self._calls:
                self._start(call)
        self._collect_held()

    def fail(self) -> None:
        """The step is lost: let everyone go who waits for a result."""
        with self._lock:
            self.failed, self.paused = True, False
            self._generation += 1
            for call in self._calls:
                call.hand_out()

    # -- the watchdog --------------------------------------------------------------------------------

    def num_pending(self) -> int:
        """Count the reductions that wait for peers; takes no lock, which a hung thread might hold."""
        calls = [c for c in tuple(self._calls) if c.started and not c.done]
        return sum(c.work is not None and not c.work.is_completed() for c in calls)

    @property
    def moved_at(self) -> float:
        """When a reduction was last started or finished (monotonic clock)."""
        return self._moved_at

    # -- inside --------------------------------------------------------------------------------------

    def _start(self, call: Collective) -> None:
        call.started = True
        self._moved_at = time.monotonic()
        generation = self._generation
        try:
            call.work = self._launch(call)
        except Exception as error:  # the group was aborted in this very moment, or its backend failed
            self._failed(error, generation)

    def _failed(self, error: Exception, generation: int) -> None:
        with self._lock:
            if generation != self._generation or self.failed:
                return
            self.pause()
        self._on_error(error)


def _wait(work: Work, others: list[Work]) -> None:
    """Wait for a collective; raise what it failed of, or what one of the others has failed of meanwhile.

    A collective whose peer died may never be told, while another one on the same group was.
    """
    while True:
        try:
            work.wait(_LOOK_S)
            return
        except GroupError:
            if work.is_completed():
                break
        for other in others:
            if other is not work and other.is_completed():
                other.wait()
    work.wait()
