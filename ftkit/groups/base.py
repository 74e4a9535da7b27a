"""A process group that can be torn down at any moment and formed anew with other members.

Decides who may use which session (one underlying torch group, good for one epoch) and when: `configure`
builds one within a deadline or gives up at once when told to; `abort` ends it and returns only when
nothing can write into the tensors any more. How a session is built and ended is the subclass's affair.
Knows nothing of epochs, votes or etcd.

A collective never raises for the state of the group: it returns a Work whose `wait()` raises `Aborted`
after `abort()`, and `GroupError` after any other failure, or when the group was never configured; so do
the futures of `get_future()`.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ReduceOp, Work

from ftkit.errors import Aborted, ConfigError, GroupError
from ftkit.groups import sockets
from ftkit.groups.rendezvous import Attempt
from ftkit.groups.session import Session
from ftkit.groups.store import split_address
from ftkit.groups.work import FailedWork

log = logging.getLogger(__name__)

Tensors = torch.Tensor | Sequence[torch.Tensor]

DEFAULT_TIMEOUT_S = 60.0

_DRAIN_S = 30.0
"""How long `abort` waits for pending operations; they end in milliseconds unless something is badly wrong."""


class _Absent(NamedTuple):
    """Why there is no session."""

    kind: type[GroupError]
    why: str

    def error(self) -> GroupError:
        return self.kind(self.why)


class ProcessGroup(ABC):
    """A process group whose members change; `timeout_s` is how long one collective may take.

    `timeout` is a synonym, a `timedelta` or seconds, as torch and torchft call it.

    One thread configures and launches collectives at a time; `abort`, `errored` and `close` may be called
    from any thread at any moment. `prefix` must be new for each rendezvous: an epoch's id, say.
    """

    def __init__(self, timeout: timedelta | float | None = None, *, timeout_s: float | None = None) -> None:
        if timeout is not None and timeout_s is not None:
            raise ConfigError("give a process group `timeout` or `timeout_s`, not both: they mean the same")
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        given = timeout_s if timeout is None else timeout
        self.timeout_s = DEFAULT_TIMEOUT_S if given is None else float(given)
        if not self.timeout_s > 0:
            raise ConfigError(f"the timeout of a process group must be positive, not {self.timeout_s:g} s")
        self._lock = threading.Lock()
        self._configuring = threading.Lock()
        self._session: Session | None = None
        self._attempt: Attempt | None = None
        self._leftovers: list[Session] = []
        self._absent = _Absent(GroupError, "the process group is not configured; call configure() first")
        self._closed = False
        sockets.hidden.add(self)

    @abstractmethod
    def _build(self, attempt: Attempt) -> Session:
        """Meet the peers and make a session; runs on the attempt's own thread."""

    def configure(self, store: str, prefix: str, rank: int, size: int, *, timeout_s: float) -> None:
        """Form the group of `size` ranks that meet at `store` (host:port) under `prefix`.

        Raises GroupError, which says who failed, within `timeout_s`; Aborted at once when `abort()` is
        called meanwhile. A group that is configured already ends: at once when an operation is pending or has
        failed, else once the new one has formed. So a peer that has not quite finished the last collective
        of the old group, because the members agreed in it to change, still gets its result.
        """
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} does not fit a group of {size}")
        split_address(store)
        with self._configuring:
            self._end_session("the process group is being configured anew", gently=True)
            leftovers, self._leftovers = self._leftovers, []
            attempt = Attempt(self._build, store, prefix, rank, size, timeout_s, leftovers)
            with self._lock:
                if self._closed:
                    raise GroupError("the process group is closed")
                self._attempt = attempt
            try:
                self._await(attempt)
            finally:
                with self._lock:
                    self._attempt = None
                    session = attempt.take()
                    if session is not None and attempt.given_up is None:
                        self._session, session = session, None
                if session is not None:
                    _free([session])
                    del session
            if attempt.given_up is not None:
                raise Aborted(attempt.given_up)

    def _await(self, attempt: Attempt) -> None:
        attempt.thread.start()
        if not attempt.settled.wait(attempt.left_s()) and attempt.given_up is None:
            why = (
                f"rendezvous {attempt.prefix!r} of rank {attempt.rank} of {attempt.size} failed within"
                f" {attempt.timeout_s:g} s: {attempt.phase}"
            )
            attempt.give_up(why)
            raise GroupError(why)
        if attempt.given_up is not None:
            raise Aborted(attempt.given_up)
        error = attempt.error
        try:
            if isinstance(error, RuntimeError):
                raise GroupError(
                    f"rendezvous {attempt.prefix!r} of rank {attempt.rank} of {attempt.size} failed:"
                    f" {attempt.phase} ({error})"
                ) from error
            if error is not None:
                raise error
        finally:
            del error  # it would refer to itself through this frame

    def abort(self, why: str = "") -> None:
        """Make every pending collective and a running `configure` fail at once; from any thread, idempotent.

        Returns when the pending operations have ended. Afterwards `configure` may be called again.
        """
        reason = why or "the process group was aborted"
        with self._lock:
            attempt = self._attempt
            if attempt is not None and attempt.given_up is None:
                attempt.given_up = reason
        if attempt is not None:
            attempt.give_up(reason)
        self._end_session(reason)

    def _end_session(self, reason: str, *, gently: bool = False) -> None:
        with self._lock:
            session = self._session
            if session is not None and gently:
                session.prune()
                gently = session.error is None and session.aborted is None and not session.pending
            if session is not None:
                session.aborted = session.aborted or reason
                self._absent = _Absent(Aborted, reason)
        if session is None:
            return
        # Two threads may abort at once: both wait for the end, one puts the session away.
        drained = gently or session.drain(_DRAIN_S)
        if not drained:
            log.error("operations of %s were still pending %.0f s after its abort", self, _DRAIN_S)
        with self._lock:
            if self._session is session:
                if drained:
                    session.hush()
                self._session = None
                self._leftovers.append(session)

    def close(self) -> None:
        """Abort, free everything, and refuse to be configured again; idempotent."""
        with self._lock:
            self._closed = True
        self.abort("the process group is closed")
        with self._lock:
            leftovers, self._leftovers = self._leftovers, []
        # An operation that was left behind holds this up until its timeout: do not wait for it.
        freeing = _free(leftovers)
        freeing.join(1.0)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        session = self._session
        place = "not configured" if session is None else f"rank {session.rank} of {session.size}"
        return f"<{type(self).__name__} {place}>"

    @property
    def configured(self) -> bool:
        """Say whether there is a group that has not been aborted."""
        session = self._session
        return session is not None and session.aborted is None

    @property
    def rank(self) -> int:
        """This process's rank in the current group; GroupError when there is none."""
        return self._current().rank

    @property
    def size(self) -> int:
        """The number of ranks in the current group; GroupError when there is none."""
        return self._current().size

    @property
    def raw(self) -> dist.ProcessGroup | None:
        """The current torch group, None when aborted or never configured.

        `abort` makes what was launched on it directly fail too, but waits only for what was launched here.
        """
        session = self._session
        return None if session is None or session.aborted is not None else session.process_group()

    def errored(self) -> Exception | None:
        """Return why the current group is of no use any more, None while all is well."""
        session = self._session
        if session is None:
            return self._absent.error()
        if session.aborted is not None:
            return Aborted(session.aborted)
        session.prune()
        return None if session.error is None else GroupError(session.error)

    def _current(self) -> Session:
        session = self._session
        if session is None or session.aborted is not None:
            raise self._absent.error()
        return session

    def hidden_fds(self) -> list[int]:
        """Return the descriptors that a forked child must let go of."""
        return []  # the session and the attempt hide theirs

    def forget_in_child(self) -> None:
        """Start anew in a forked child: the sessions are the parent's."""
        self._lock = threading.Lock()
        self._configuring = threading.Lock()
        self._session, self._attempt, self._leftovers = None, None, []
        self._absent = _Absent(GroupError, "the group is the parent process's; call configure() in this one")

    def _launch(self, start: Callable[[Any], Work], *, tracked: bool = True) -> Work:
        with self._lock:
            session = self._session
            if session is None:
                return FailedWork(self._absent.kind, self._absent.why)
            if session.aborted is not None:
                return FailedWork(Aborted, session.aborted)
            session.prune()
            if session.error is not None:
                return FailedWork(GroupError, session.error)
            try:
                inner = start(session.backend)
            except RuntimeError as error:
                failed = session.failed(str(error))
                return FailedWork(type(failed), str(failed))
            return session.wrap(inner, tracked=tracked)

    def allreduce(
        self, tensors: Tensors, op: ReduceOp.RedOpType = ReduceOp.SUM, *, timeout_s: float | None = None
    ) -> Work:
        """Reduce each tensor over all ranks, in place; `timeout_s` replaces the group's for this once."""
        options = dist.AllreduceOptions()
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        options.reduceOp = op  # type: ignore[assignment]
        many = _many(tensors)
        return self._launch(lambda backend: backend.allreduce(many, options))

    def allgather(self, outputs: Sequence[Any], inputs: Tensors) -> Work:
        """Gather each rank's input into `outputs`: a list of tensors, or a list of them per input."""
        lists = [list(outputs)] if outputs and isinstance(outputs[0], torch.Tensor) else list(outputs)
        many = _many(inputs)
        return self._launch(lambda backend: backend.allgather(lists, many, AllgatherOptions()))

    def allgather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """Gather each rank's input into one tensor, in rank order."""
        options = AllgatherOptions()
        return self._launch(lambda backend: backend._allgather_base(output, input, options))

    def broadcast(self, tensors: Tensors, root: int = 0) -> Work:
        """Copy the tensors of rank `root` to all ranks."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        many = _many(tensors)
        return self._launch(lambda backend: backend.broadcast(many, options))

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp.RedOpType = ReduceOp.SUM
    ) -> Work:
        """Reduce `inputs` (one per rank) over all ranks and keep the one of this rank in `output`."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = op  # type: ignore[assignment]
        many = list(inputs)
        return self._launch(lambda backend: backend.reduce_scatter([output], [many], options))

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM
    ) -> Work:
        """Reduce `input` over all ranks and keep this rank's equal part of it in `output`."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = op  # type: ignore[assignment]
        return self._launch(lambda backend: backend._reduce_scatter_base(output, input, options))

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Work:
        """Send `inputs[r]` to each rank r and receive `outputs[r]` from it."""
        outs, ins = list(outputs), list(inputs)
        return self._launch(lambda backend: backend.alltoall(outs, ins, dist.AllToAllOptions()))

    def barrier(self) -> Work:
        """End when all ranks have come here."""
        return self._launch(lambda backend: backend.barrier(dist.BarrierOptions()))

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        """Send a tensor to rank `dst`."""
        many = _many(tensors)
        return self._launch(lambda backend: backend.send(many, dst, tag), tracked=False)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work:
        """Receive a tensor from rank `src`, in place."""
        many = _many(tensors)
        return self._launch(lambda backend: backend.recv(many, src, tag), tracked=False)


def _many(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _free(sessions: list[Session]) -> threading.Thread:
    def free() -> None:
        while sessions:
            session = sessions.pop()
            session.sever()
            session.free()

    thread = threading.Thread(target=free, name="ftkit-free-groups", daemon=True)
    thread.start()
    return thread
