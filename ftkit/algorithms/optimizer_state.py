"""Create an optimizer's state before its first step, and load one without losing a bit.

A joiner's optimizer is empty: with its state created first, the peers' state can be received straight
into it, and no second copy is ever needed. It knows optimizers; it does not know managers or transports.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ftkit.errors import ConfigError

__all__ = ["load_optimizer_state", "materialize_optimizer_state", "needs_closure"]


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether each step evaluates the loss again (LBFGS), so that there is no one gradient to average."""
    parameter = inspect.signature(optimizer.step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def materialize_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of every parameter that has none, as it is before a first step.

    Parameters, gradients, learning rates, hooks and existing state stay exactly as they are: a stand-in
    for one parameter at a time makes a step on a gradient of zeros, so that the peak of extra memory is
    twice the largest parameter. SGD with `dampening` is left alone: with it, "no momentum yet" and a
    momentum of zero are not the same.

    Raises:
        ConfigError: the optimizer needs a closure, or refuses to step on zeros.
    """
    if needs_closure(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} needs a closure: its state cannot be created beforehand"
        )
    groups = optimizer.param_groups
    parameters = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = []
        for group, members in zip(groups, parameters, strict=True):
            if isinstance(optimizer, torch.optim.SGD) and (not group["momentum"] or group["dampening"]):
                continue
            for parameter in members:
                if parameter.requires_grad and parameter not in optimizer.state:
                    state = _first_state(optimizer, group, parameter)
                    if state:
                        optimizer.state[parameter] = state
    finally:
        for group, members in zip(groups, parameters, strict=True):
            group["params"] = members


def _first_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """Let a stand-in make one step and return the state it got, set back to before that step."""
    # A copy, not zeros: some optimizers keep a master copy of the parameter in their state.
    stand_in = torch.nn.Parameter(parameter.detach().clone())
    stand_in.grad = torch.zeros_like(stand_in)
    decay = group.get("weight_decay")
    group["params"] = [stand_in]
    if decay is not None:
        group["weight_decay"] = 0.0  # L2 decay would enter the moments
    try:
        with torch.no_grad():
            # The bare function: neither hooks nor schedulers' counters shall see this step.
            inspect.unwrap(type(optimizer).step)(optimizer)
    except Exception as e:
        raise ConfigError(
            f"the state of {type(optimizer).__name__} could not be created on a gradient of zeros: {e}"
        ) from e
    finally:
        group["params"] = []
        if decay is not None:
            group["weight_decay"] = decay
        state: dict[str, Any] = optimizer.state.pop(stand_in, {})
    for key, value in (("step", 0), ("mu_product", 1), ("mu", 1), ("eta", group.get("lr"))):
        if key in state and value is not None:
            _set(state, key, value)
    return state


def _set(state: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(state[key], torch.Tensor):
        state[key].copy_(torch.as_tensor(value))
    else:
        state[key] = type(state[key])(value)


def load_optimizer_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state dict and keep each state tensor's dtype.

    torch casts floating-point state to the dtype of its parameter, which would round the float32 moments
    of a bfloat16 model: the member that loads would no longer have the bits of its source.
    """
    optimizer.load_state_dict(state_dict)
    order = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    for parameter, i in zip(order, ids, strict=True):
        given = state_dict["state"].get(i, {})
        loaded = optimizer.state.get(parameter, {})
        for key, value in given.items():
            mine = loaded.get(key)
            if (
                isinstance(value, torch.Tensor)
                and isinstance(mine, torch.Tensor)
                and mine.dtype != value.dtype
            ):
                loaded[key] = value.to(device=mine.device)
