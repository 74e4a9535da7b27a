"""Put the vote in front of an optimizer's step.

`zero_grad` begins the step, `step` ends it: vote, then update, then the schedulers. When the members do
not commit, nothing moves and the next `zero_grad` drops the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from ftkit.algorithms.optimizer_state import (
    load_optimizer_state,
    materialize_optimizer_state,
    needs_closure,
)
from ftkit.algorithms.protocols import StepManager
from ftkit.errors import ConfigError, FtkitError

__all__ = ["Optimizer", "Scheduler"]

Grads = list[tuple[torch.Tensor, torch.Tensor | None, int]]


class Scheduler(Protocol):
    """A learning rate scheduler whose step needs no argument; each of torch's but ReduceLROnPlateau."""

    def step(self) -> None:
        """Set the rates for the next step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's place."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a scheduler's place."""


class Optimizer(torch.optim.Optimizer):
    """A torch optimizer whose steps are committed by all replicas or by none.

    It passes for the optimizer it wraps: `param_groups`, `state`, `state_dict` and everything else are the
    inner one's, so schedulers may be built on either. Gradients may be clipped before `step` as usual.

    With a GradScaler, use `ftkit.algorithms.amp.GradScaler`: an infinity in one replica's gradients is in
    everybody's average, so all replicas skip the update alike (the step still counts as committed).

    Args:
        manager: the manager of this replica.
        optimizer: the optimizer to wrap; not one that needs a closure, such as LBFGS.
        schedulers: stepped after each committed update; their state is healed with the rest.
        name: tells the schedulers of several optimizers apart.
    """

    # torch's GradScaler then always calls `step` and says what it found, instead of leaving the step out:
    # a replica that did not vote would make the others wait.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        manager: StepManager,
        optimizer: torch.optim.Optimizer,
        schedulers: Iterable[Scheduler] = (),
        *,
        name: str = "optimizer",
    ) -> None:
        # torch's own constructor is left out on purpose: all it would set up belongs to the inner optimizer.
        if needs_closure(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} evaluates the loss several times per step, so there is no one "
                "gradient to average and vote on"
            )
        self.optimizer = optimizer
        self._manager = manager
        self._name = name
        self._schedulers: list[Scheduler] = []
        self._committed = False
        self._undecided: Grads | None = None
        for scheduler in schedulers:
            self.register_scheduler(scheduler)

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_manager"):  # not yet set: a copy or an unpickled object in the making
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute in torch
        """The inner optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute in torch
        """The inner optimizer's state."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # an attribute in torch
        """The inner optimizer's defaults."""
        return self.optimizer.defaults

    @property
    def committed(self) -> bool:
        """Whether the last `step` was committed and applied."""
        return self._committed

    def register_scheduler(self, scheduler: Scheduler) -> None:
        """Step this scheduler after each committed update, and heal its state."""
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                "ReduceLROnPlateau follows a metric: average the metric over the replicas with "
                "manager.allreduce and step it yourself when `committed`"
            )

        def load(state: object) -> None:
            if not isinstance(state, dict):
                raise FtkitError(f"the state received for a scheduler is a {type(state).__name__}")
            scheduler.load_state_dict(state)

        self._manager.register_state_dict_fn(
            f"{self._name}.scheduler{len(self._schedulers)}", load, scheduler.state_dict
        )
        self._schedulers.append(scheduler)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin the step, then drop the gradients of the last one.

        In this order: when the last vote was in doubt, the new epoch may tell that it was won, and then
        those gradients are applied.
        """
        self._manager.start_step()
        self._manager.drop_gradients()
        self._undecided = None
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Vote; if all members commit, update the parameters and step the schedulers.

        Returns what the closure returns, which is called once, before the vote.

        Raises:
            FtkitError: the update failed half way; this member heals at the next step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._committed, self._undecided = False, None
        self._manager.register_update(self._settle)  # of several optimizers the one that votes
        if not self._manager.should_commit():
            if self.__dict__.get("found_inf") is not None:
                # What the scaler knows of this step will be gone when the doubt is resolved.
                self._manager.drop_gradients()
            else:
                self._undecided = self._grads()
            return loss
        try:
            self._update()
        except BaseException as error:
            self._manager.finish_step(error)
            if not isinstance(error, Exception):
                raise
            raise FtkitError(
                "the update that all members have committed failed half way on this replica "
                f"({type(error).__name__}: {error}); it heals from its peers at the next step"
            ) from error
        self._manager.finish_step()
        self._committed = True
        return loss

    def _update(self) -> None:
        found_inf, grad_scale = self.__dict__.get("found_inf"), self.__dict__.get("grad_scale")
        inner: Any = self.optimizer
        if found_inf is None:
            inner.step()
        elif getattr(inner, "_step_supports_amp_scaling", False):
            inner.found_inf, inner.grad_scale = found_inf, grad_scale
            try:
                inner.step()
            finally:
                del inner.found_inf, inner.grad_scale
            if self._schedulers and found_inf.item():
                return
        elif found_inf.item():
            return
        else:
            if grad_scale is not None:  # None: `unscale_` was called, by a script that clips
                for _, grad, _ in self._grads():
                    if grad is not None:
                        grad.div_(grad_scale.to(grad.device))
            inner.step()
        for scheduler in self._schedulers:
            scheduler.step()

    def _settle(self) -> bool:
        """Apply the gradients of a step that turned out to be committed; False when they are not whole."""
        voted, self._undecided = self._undecided, None
        if voted is None or any(p.grad is not g or (g is not None and g._version != v) for p, g, v in voted):
            return False
        self._update()
        return True

    def _grads(self) -> Grads:
        """Return each parameter with its gradient and how often that has been written to."""
        return [
            (p, p.grad, 0 if p.grad is None else p.grad._version)
            for group in self.param_groups
            for p in group["params"]
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state; created first when it is still empty.

        So a joiner can receive its peers' state in place.
        """
        if not self.optimizer.state:
            materialize_optimizer_state(self.optimizer)
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the inner optimizer, without rounding."""
        load_optimizer_state(self.optimizer, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer; on all replicas at the same step."""
        self.optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
