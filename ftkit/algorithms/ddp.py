"""Average the gradients of a torch DistributedDataParallel over the replica groups.

torch's reducer does the bucketing and overlaps it with backward; a communication hook hands each bucket to
the manager. The reducer is given a process group of one rank, behind which nobody is. It knows nothing of
epochs: who the contributors are is the manager's affair.
"""

# Without `from __future__ import annotations`: torch compares the hook's annotations with the types.
import inspect
from collections.abc import Sequence
from functools import lru_cache, partial
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


class _Underway(dist.Work):
    """A bucket in flight."""

    def __init__(self, future: torch.futures.Future[torch.Tensor]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: object = None) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class _Reduction:
    """How one module's buckets are averaged.

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
        restorable: bool,
        may_divide: bool,
    ) -> None:
        """`may_divide`: the reducer divides gradients itself, while it copies them into a bucket."""
        self.manager = manager
        self.restorable = restorable
        """Whether `Parameter.grad` keeps this replica's own gradient until the averages are handed out."""
        self._may_divide = may_divide
        self._in_use = False
        self._cap = cap
        self._parameters = parameters
        self._whole: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []
        self._kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, parameter in enumerate(parameters):
            self._kinds.setdefault((parameter.dtype, parameter.device), []).append(i)
        self.buckets: list[list[int]] = []
        self._num_sent = 0
        self._pins = 0
        self._divisor = 1

    def begin(self) -> None:
        """A forward pass has begun: a backward that broke off in the middle is forgotten."""
        self._in_use = True
        self._whole, self._num_sent = [], 0

    def divisor(self) -> int:
        """Tell the reducer by how much to divide the gradients of this backward pass."""
        self._divisor = self.manager.num_contributors() if self._in_use and self._may_divide else 1
        return self._divisor

    def average(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Average the reducer's next bucket."""
        if self._pins >= 2:
            members = self.buckets[self._num_sent]
            self._num_sent += 1
            return self._send(buffer, members)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._whole.append((buffer, future))
        if len(self._whole) == len(self._kinds):
            self._send_pieces()
        return future

    def _send(self, buffer: torch.Tensor, members: list[int]) -> torch.futures.Future[torch.Tensor]:
        restore = partial(self._restore, buffer, members) if self.restorable else None
        last = members is self.buckets[-1]
        return self.manager.reduce_bucket(buffer, restore, last, divided_by=self._divisor)

    def _restore(self, buffer: torch.Tensor, members: list[int]) -> None:
        """Put this replica's own gradients back into a bucket, laid out as the reducer does."""
        parameters = [self._parameters[i] for i in members]
        views, offset = [], 0
        for parameter in parameters:
            flat = buffer[offset : offset + parameter.numel()]
            offset += parameter.numel()
            dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
            size, stride = parameter.size(), parameter.stride()
            views.append(flat.as_strided(size, stride) if dense else flat.view(size))
        _restore(parameters, views)

    def _send_pieces(self) -> None:
        whole, self._whole = self._whole, []
        slots: dict[int, tuple[int, int, int]] = {}
        # The reducer takes the kinds in the opposite order of their first parameters.
        for at, indices in enumerate(reversed(self._kinds.values())):
            offset = 0
            for i in indices:
                slots[i] = (at, offset, self._parameters[i].numel())
                offset += self._parameters[i].numel()
            if offset != whole[at][0].numel():
                raise FtkitError(
                    f"torch {torch.__version__} lays gradients out in a way that is not known here; pass "
                    "find_unused_parameters=True, which does not depend on it"
                )
        self.buckets = plan_buckets(
            [p.numel() * p.element_size() for p in self._parameters],
            [slots[i][0] for i in range(len(slots))],
            cap=self._cap,
        )
        futures = []
        for members in self.buckets:
            at, begin, _ = slots[members[0]]
            _, last, numel = slots[members[-1]]
            futures.append(self._send(whole[at][0][begin : last + numel], members))
        # Waiting costs nothing here: all of the backward is behind us.
        for reduced in futures:
            reduced.wait()
        for buffer, future in whole:
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


class _OneRank(dist.ProcessGroup):
    """The process group that the reducer is given: one rank, and nothing is sent.

    What it asks to reduce are its buckets, and the map of used parameters. That map concerns all replicas
    when they may differ in it (`shared`): a parameter that one of them has used gets its average on all.
    """

    def __init__(self, reduction: _Reduction, *, shared: bool) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # the stub lacks this form
        self._reduction = reduction
        self._shared = shared

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "ftkit"

    def getSize(self) -> int:  # noqa: N802  # torch's name
        return self._reduction.divisor()

    def allreduce(  # type: ignore[override]  # only the reducer's form
        self, tensors: list[torch.Tensor], opts: object = None
    ) -> dist.Work:
        if tensors[0].is_floating_point() or tensors[0].is_complex():
            return _Underway(self._reduction.average(tensors[0]))
        if not self._shared:
            return _Done(tensors)
        return _Done(tensors, [self._reduction.manager.allreduce(t, average=False) for t in tensors])

    def broadcast(  # type: ignore[override]  # only the reducer's form
        self, tensors: list[torch.Tensor], opts: object = None
    ) -> dist.Work:
        for tensor in tensors:
            self._reduction.pin(tensor)
        return _Done(tensors)


@lru_cache(maxsize=1)
def _divides_while_copying() -> bool:
    """Say whether this torch's reducer asks its group for the divisor in each backward."""

    class Two(dist.ProcessGroup):
        def getBackendName(self) -> str:  # noqa: N802  # torch's name
            return "ftkit"

        def getSize(self) -> int:  # noqa: N802  # torch's name
            return 2

        def allreduce(  # type: ignore[override]  # only the reducer's form
            self, tensors: list[torch.Tensor], opts: object = None
        ) -> dist.Work:
            return _Done(tensors)

    with torch.inference_mode(False), torch.enable_grad():
        alone = torch.nn.PReLU(device="cpu")  # needs no random numbers
        group = Two(0, 1)  # type: ignore[call-arg]  # the stub lacks this form
        probe = torch.nn.parallel.DistributedDataParallel(alone, process_group=group, **_quiet())
        probe(torch.tensor([-1.0])).sum().backward()
    return alone.weight.grad is not None and alone.weight.grad.item() == -0.5


def _quiet() -> dict[str, Any]:
    """Return what keeps torch's DDP from sending anything but gradients."""
    known = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
    quiet = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {quiet: False, "init_sync": False}


def _average(state: _Reduction, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket, whose parameters only torch knows (the communication hook)."""

    def restore() -> None:
        _restore(bucket.parameters(), bucket.gradients())

    return state.manager.reduce_bucket(
        bucket.buffer(), restore if state.restorable else None, bucket.is_last()
    )


def _restore(parameters: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
    """Put this replica's own gradients back into the views of a bucket."""
    with torch.no_grad():
        for parameter, view in zip(parameters, views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)


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
            restorable=not ddp_kwargs.get("gradient_as_bucket_view"),
            may_divide=not shared and _divides_while_copying(),
        )
        group = _OneRank(reduction, shared=shared)
        super().__init__(module, process_group=group, **(ddp_kwargs | _quiet()))
        self._manager = manager
        self._reduction = reduction
        if shared:  # the reducer never cuts anew when parameters may go unused, and only it knows its cut
            self.register_comm_hook(reduction, _average)
        manager.declare_model(module)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Start the step if that has not been done, and run the module."""
        if self.training and torch.is_grad_enabled():
            self._manager.start_step()
            self._reduction.begin()
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
