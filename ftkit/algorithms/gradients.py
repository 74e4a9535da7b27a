"""Average gradients without torch's DDP: flat buckets that leave while backward goes on.

Every replica averages the same buckets in the same order, whatever part of the model its loss depends on;
a gradient that this replica does not have counts as zeros. It knows nothing of epochs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ftkit.algorithms.buckets import BUCKET_BYTES, plan_buckets
from ftkit.algorithms.protocols import GradientManager
from ftkit.errors import ConfigError

__all__ = ["AveragedGradients", "average_gradients"]


class _Bucket:
    """A flat buffer, and the place in it of each of its parameters' gradients."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []

    def fill(self) -> torch.Tensor:
        """Collect this replica's gradients, zeros where there is none."""
        if self._flat is None:
            self._allocate()
        assert self._flat is not None
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self._views, strict=True):
                grad = parameter.grad
                if grad is None:
                    view.zero_()
                elif grad is not view:
                    view.copy_(grad.to_dense() if grad.is_sparse else grad)
        return self._flat

    def refill(self) -> None:
        """Put this replica's own gradients back in place of half an average."""
        self.fill()

    def restorable(self) -> bool:
        """Say whether `Parameter.grad` is apart from the buffer, so that `fill` can be done again."""
        return all(p.grad is not v for p, v in zip(self.parameters, self._views, strict=True))

    def hand_out(self) -> None:
        """Make the averages in the buffer the parameters' gradients."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def _allocate(self) -> None:
        first = self.parameters[0]
        self._flat = torch.empty(
            sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device
        )
        offset = 0
        for p in self.parameters:
            # As the parameter lies in memory, so that the optimizer's fused kernels take both.
            packed = torch.empty_like(p, device="meta")
            self._views.append(self._flat.as_strided(p.size(), packed.stride(), offset))
            offset += p.numel()


class AveragedGradients:
    """The hooks that average a module's gradients over the replicas; see `average_gradients`."""

    def __init__(
        self,
        manager: GradientManager,
        parameters: Iterable[torch.nn.Parameter],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        trained = list(dict.fromkeys(p for p in parameters if p.requires_grad))
        if not trained:
            raise ConfigError("no parameter requires a gradient: there is nothing to average")
        if any(isinstance(p, DTensor) for p in trained):
            raise ConfigError("sharded parameters (DTensor) are averaged by ftkit.fully_shard")
        cut = plan_buckets(
            [p.numel() * p.element_size() for p in trained],
            [(p.dtype, p.device) for p in trained],
            cap=bucket_bytes,
        )
        self._manager = manager
        self._buckets = [_Bucket([trained[i] for i in indices]) for indices in cut]
        self._bucket_of = {p: b for b in self._buckets for p in b.parameters}
        self._futures: list[torch.futures.Future[torch.Tensor]] = []
        self._sent = 0
        self._backward = -1
        self._enabled = True
        self._hooks: list[Any] = []
        for p in trained:
            tensor: Any = p  # torch's method lacks annotations
            self._hooks.append(tensor.register_post_accumulate_grad_hook(self._arrived))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the first backward outside averages the sum."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def remove(self) -> None:
        """Take the hooks off the model; its gradients stay local from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def watch(self, module: torch.nn.Module) -> None:
        """Start the step in the module's forward, when in training mode."""

        def start(module: torch.nn.Module, _: object) -> None:
            if module.training and torch.is_grad_enabled():
                self._manager.start_step()

        self._hooks.append(module.register_forward_pre_hook(start))

    def _arrived(self, parameter: torch.Tensor) -> None:
        if not self._enabled:
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._begin(backward)
        self._bucket_of[parameter].missing -= 1
        while self._sent < len(self._buckets) and self._buckets[self._sent].missing <= 0:
            self._send()

    def _begin(self, backward: int) -> None:
        # Everything is reset here and not at the end: a backward that raised never got there.
        self._backward, self._sent, self._futures = backward, 0, []
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        engine: Any = torch.autograd.Variable._execution_engine  # as FSDP does
        engine.queue_callback(self._finish)

    def _send(self) -> None:
        bucket = self._buckets[self._sent]
        self._sent += 1
        flat = bucket.fill()
        self._futures.append(
            self._manager.reduce_bucket(
                flat,
                bucket.refill if bucket.restorable() else None,
                last=self._sent == len(self._buckets),
            )
        )

    def _finish(self) -> None:
        """End a backward: send what it has not completed, and see that all averages are there."""
        while self._sent < len(self._buckets):
            self._send()
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()
        for bucket in self._buckets:
            bucket.hand_out()


def average_gradients(
    manager: GradientManager,
    module_or_parameters: torch.nn.Module | Iterable[torch.nn.Parameter],
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> AveragedGradients:
    """Have each `backward()` average the gradients over the replicas, on its way and before it returns.

    Parameters that this replica's loss does not depend on take part with zeros, so replicas may differ in
    what they use; afterwards every parameter has a gradient, which lives in its bucket.

    A module's forward starts the step; with bare parameters `Optimizer.zero_grad` has to. Activation
    checkpointing must be the non-reentrant one (`use_reentrant=False`).

    Returns:
        a handle with `no_sync()` and `remove()`.
    """
    if isinstance(module_or_parameters, torch.nn.Module):
        averaged = AveragedGradients(manager, module_or_parameters.parameters(), bucket_bytes=bucket_bytes)
        averaged.watch(module_or_parameters)
        manager.declare_model(module_or_parameters)
        return averaged
    return AveragedGradients(manager, module_or_parameters, bucket_bytes=bucket_bytes)
