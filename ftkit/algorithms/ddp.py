"""Average the gradients of a torch DistributedDataParallel over the replica groups.

torch's reducer does the bucketing and overlaps it with backward; a communication hook hands each bucket to
the manager. The reducer is given a process group of one rank, behind which nobody is. It knows nothing of
epochs: who the contributors are is the manager's affair.
"""

# Without `from __future__ import annotations`: torch compares the hook's annotations with the types.
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from ftkit.algorithms.buckets import BUCKET_BYTES, plan_buckets
from ftkit.algorithms.protocols import GradientManager, PendingWork
from ftkit.errors import ConfigError, FtkitError

__all__ = ["DistributedDataParallel"]

_REFUSED = {
    "process_group": "the manager decides who takes part",
    "device_mesh": "the manager decides who takes part",
    "mixed_precision": "it brings a communication hook of its own; use torch.autocast",
    "delay_all_reduce_named_params": "it bypasses the communication hook",
    "param_to_hook_all_reduce": "it bypasses the communication hook",
    "bucket_cap_mb_list": "use bucket_cap_mb",
    "skip_all_reduce_unused_params": "replicas may differ in what they use",
}


class _Done(dist.Work):
    """A collective among one rank."""

    def __init__(self, tensors: list[torch.Tensor], pending: Sequence[PendingWork] = ()) -> None:
        super().__init__()
        self._tensors = tensors
        self._pending = pending

    def wait(self, timeout: object = None) -> bool:
        for work in self._pending:
            work.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class _Reduction:
    """How one module's buckets are averaged; shared by the hook and the group.

    The reducer begins with one bucket per dtype and cuts new ones after the first backward, in the order in
    which gradients came. A replica that joins would be one backward behind its peers and its collectives
    would not match theirs. So the cut is pinned: `plan_buckets` decides it, from the model alone. The first
    backward sends pieces of the big bucket as if they were the buckets of the later ones.
    """

    def __init__(
        self,
        manager: GradientManager,
        parameters: Sequence[torch.nn.Parameter],
        *,
        cap: int,
        pinned: bool,
        restorable: bool,
    ) -> None:
        self.manager = manager
        self.pinned = pinned
        """Whether the reducer's buckets are those that are sent."""
        self.restorable = restorable
        """Whether `Parameter.grad` keeps this replica's own gradient until the averages are handed out."""
        self._cap = cap
        self._index = {id(p): i for i, p in enumerate(parameters)}
        self._whole: list[tuple[GradBucket, torch.Tensor, torch.futures.Future[torch.Tensor]]] = []
        self._slots: dict[int, tuple[int, int, int]] = {}
        self.buckets: list[list[int]] = []
        self._pins = 0

    def cut(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket of the first backward; with the last of them average all, in pieces."""
        buffer = bucket.buffer()
        offset = 0
        for parameter in bucket.parameters():
            index = self._index.get(id(parameter))
            if index is None:
                raise FtkitError(
                    "torch's reducer averages a parameter that the module did not have when wrapped"
                )
            self._slots[index] = (len(self._whole), offset, parameter.numel())
            offset += parameter.numel()
        if offset != buffer.numel():
            raise FtkitError(
                f"a bucket of {buffer.numel()} elements holds gradients of {offset}: unknown layout"
            )
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._whole.append((bucket, buffer, future))
        if bucket.is_last():
            self._send_pieces()
        return future

    def _send_pieces(self) -> None:
        whole, self._whole = self._whole, []
        slots = [self._slots[i] for i in range(len(self._index))]
        self.buckets = plan_buckets(
            [numel * whole[at][1].element_size() for at, _, numel in slots],
            [at for at, _, _ in slots],
            cap=self._cap,
        )
        futures = []
        for members in self.buckets:
            at, begin, _ = slots[members[0]]
            _, last, numel = slots[members[-1]]
            bucket, buffer, _ = whole[at]
            restore = partial(_restore, bucket, frozenset(members), self._index) if self.restorable else None
            futures.append(
                self.manager.reduce_bucket(
                    buffer[begin : last + numel], restore, last=members is self.buckets[-1]
                )
            )
        # Waiting costs nothing here: all of the backward is behind us.
        for reduced in futures:
            reduced.wait()
        for _, buffer, future in whole:
            future.set_result(buffer)

    def pin(self, tensor: torch.Tensor) -> None:
        """Overwrite what the reducer believes to hear from rank 0: the buckets it shall have from now on.

        It asks twice: for all indices in a row and the number of buckets, then for the buckets' lengths.
        """
        words = [len(members) for members in self.buckets]
        if self._pins == 0:
            words = [i for members in self.buckets for i in members] + [len(self.buckets)]
        if not self.buckets or tensor.numel() != len(words):
            raise FtkitError(
                f"torch {torch.__version__} cuts gradient buckets in a way that is not known here; pass "
                "find_unused_parameters=True, which keeps it from doing so"
            )
        tensor.copy_(torch.tensor(words, dtype=tensor.dtype))
        self._pins += 1
        self.pinned = self._pins >= 2


class _OneRank(dist.ProcessGroup):
    """The process group that the reducer is given: one rank, and nothing is sent.

    With one exception: the map of used parameters (`shared`) concerns all replicas. A parameter that one
    of them has used gets its average on all of them.
    """

    def __init__(self, reduction: _Reduction, *, shared: bool) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # the stub lacks this form
        self._reduction = reduction
        self._shared = shared

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "ftkit"

    def allreduce(  # type: ignore[override]  # only the reducer's form
        self, tensors: list[torch.Tensor], opts: object = None
    ) -> dist.Work:
        if not self._shared:
            return _Done(tensors)
        return _Done(tensors, [self._reduction.manager.allreduce(t, average=False) for t in tensors])

    def broadcast(  # type: ignore[override]  # only the reducer's form
        self, tensors: list[torch.Tensor], opts: object = None
    ) -> dist.Work:
        for tensor in tensors:
            self._reduction.pin(tensor)
        return _Done(tensors)


def _restore(
    bucket: GradBucket, only: frozenset[int] | None = None, index: dict[int, int] | None = None
) -> None:
    """Put this replica's own gradients back into a bucket; `only` those of some parameters, by `index`."""
    with torch.no_grad():
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if only is not None and index is not None and index[id(parameter)] not in only:
                continue
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)


def _average(state: _Reduction, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket in the background (the communication hook)."""
    if state.pinned:
        restore = partial(_restore, bucket) if state.restorable else None
        return state.manager.reduce_bucket(bucket.buffer(), restore, bucket.is_last())
    return state.cut(bucket)


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """torch's DDP over the replica groups of the running epoch.

    `forward` in training mode starts the step. All of DDP's ways to be used work as they do there:
    `no_sync()`, `find_unused_parameters` (what any replica has used is averaged on all of them),
    `static_graph`, `gradient_as_bucket_view`. After an error in a step the gradients hold anything; the vote
    sees to it that they are not used.

    Different from torch's: buckets follow the order in which parameters are registered, not the order of the
    first backward; parameters and buffers are not broadcast when the module is wrapped, since a joiner
    is healed anyhow; buffers (BatchNorm's statistics) stay local between heals.

    Args:
        manager: the manager of this replica.
        module: the model of this replica.
        ddp_kwargs: what torch's DDP takes, but for what names other processes.
    """

    def __init__(self, manager: GradientManager, module: torch.nn.Module, **ddp_kwargs: Any) -> None:
        for name, why in _REFUSED.items():
            if ddp_kwargs.pop(name, None):
                raise ConfigError(f"DistributedDataParallel does not take {name}: {why}")
        for name in ("broadcast_buffers", "forward_sync_buffers", "init_sync"):
            if ddp_kwargs.pop(name, False):
                raise ConfigError(
                    f"DistributedDataParallel cannot do {name}: healing keeps the replicas equal"
                )
        if any(getattr(m, "sparse", False) for m in module.modules()):
            raise ConfigError("sparse gradients cannot be averaged; build the embedding with sparse=False")
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        parameters = [p for n, p in module.named_parameters() if p.requires_grad and n not in ignored]
        # A static graph needs the map only once, on a replica's first backward, where its peers would not
        # take part; it is the same on all of them by definition.
        shared = bool(ddp_kwargs.get("find_unused_parameters")) and not ddp_kwargs.get("static_graph")
        cap = ddp_kwargs.get("bucket_cap_mb")
        reduction = _Reduction(
            manager,
            parameters,
            cap=BUCKET_BYTES if cap is None else int(cap * 2**20),
            pinned=shared,  # the reducer never cuts anew when parameters may go unused
            restorable=not ddp_kwargs.get("gradient_as_bucket_view"),
        )
        known = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
        quiet = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        ddp_kwargs |= {quiet: False, "init_sync": False}
        super().__init__(module, process_group=_OneRank(reduction, shared=shared), **ddp_kwargs)
        self._manager = manager
        self.register_comm_hook(reduction, _average)
        manager.declare_model(module)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Start the step if that has not been done, and run the module."""
        if self.training and torch.is_grad_enabled():
            self._manager.start_step()
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
