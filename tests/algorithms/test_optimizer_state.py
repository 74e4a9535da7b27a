"""State that is created before the first step is the state that the first step would have created."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn, optim

from ftkit.algorithms.optimizer_state import load_optimizer_state, materialize_optimizer_state
from ftkit.errors import ConfigError

OPTIMIZERS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    (optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (optim.Adam, {"fused": True}),
    (optim.AdamW, {"capturable": False, "foreach": True}),
    (optim.AdamW, {"lr": torch.tensor(0.01)}),
    (optim.Adamax, {"weight_decay": 0.1}),
    (optim.NAdam, {"weight_decay": 0.1}),
    (optim.RAdam, {}),
    (optim.Adadelta, {}),
    (optim.Adagrad, {"lr_decay": 0.1}),
    (optim.Adafactor, {"weight_decay": 0.1}),
    (optim.ASGD, {"weight_decay": 0.1, "t0": 2.0}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Rprop, {}),
]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def train(module: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("kind", "arguments"), OPTIMIZERS, ids=[f"{k.__name__}-{a}" for k, a in OPTIMIZERS])
def test_training_goes_on_as_if_the_state_had_not_been_created(
    kind: type[optim.Optimizer], arguments: dict[str, Any]
) -> None:
    plain, ahead = build(), build()
    expected, optimizer = (kind(m.parameters(), **copy.deepcopy(arguments)) for m in (plain, ahead))
    gradient = torch.ones(5)
    next(ahead.parameters()).grad = gradient.expand(7, 5)
    before = copy.deepcopy(optimizer.param_groups)

    materialize_optimizer_state(optimizer)

    groups = copy.deepcopy(optimizer.param_groups)
    for a, b in zip(before, groups, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.pop("params"), b.pop("params"), strict=True))
        assert a == b
    assert next(ahead.parameters()).grad is not None
    sizes = {k: getattr(v, "shape", None) for k, v in optimizer.state_dict()["state"].items()}
    train(plain, expected, 3)
    train(ahead, optimizer, 3)
    for a, b in zip(plain.parameters(), ahead.parameters(), strict=True):
        assert torch.equal(a, b)
    lazy, early = expected.state_dict()["state"], optimizer.state_dict()["state"]
    if "dampening" not in arguments and arguments != {"lr": 0.1}:
        assert sorted(sizes) == sorted(lazy)
    torch.testing.assert_close(early, lazy, rtol=0, atol=0)


def test_existing_state_frozen_parameters_hooks_and_schedulers_are_left_alone() -> None:
    module = build()
    module[0].bias.requires_grad_(False)
    optimizer = optim.AdamW(module.parameters(), lr=0.1)
    called: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("hook"))
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.state[module[0].weight] = {"step": torch.tensor(5.0), "exp_avg": torch.ones(7, 5)}
    materialize_optimizer_state(optimizer)
    assert called == []
    assert optimizer.state[module[0].weight]["step"] == 5
    assert module[0].bias not in optimizer.state
    assert optimizer.state[module[1].weight]["step"] == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step()
    assert any("before `optimizer.step()`" in str(w.message) for w in caught), "no step has been counted"


def test_a_master_copy_in_the_state_holds_the_parameter() -> None:
    """Optimizers that keep float32 masters of their parameters copy them at the first step."""

    class Master(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"weight_decay": 0.5})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        master = state.setdefault("master", p.detach().float().clone())
                        master.mul_(1 - group["weight_decay"]).sub_(p.grad.float())
                        p.data.copy_(master)

    p = nn.Parameter(torch.tensor([1.0, -0.0, 3.0]))
    optimizer = Master([p])
    materialize_optimizer_state(optimizer)
    assert torch.equal(optimizer.state[p]["master"], p)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_optimizers_that_need_a_closure_are_refused() -> None:
    with pytest.raises(ConfigError, match="closure"):
        materialize_optimizer_state(optim.LBFGS(build().parameters()))


def test_loaded_state_is_not_rounded_to_the_dtype_of_the_parameters() -> None:
    """torch's own loading would cast float32 moments of a bfloat16 model: other bits than the source has."""
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = optim.SGD([p], lr=0.1, momentum=0.9)
    third = torch.full((3,), 1 / 3)
    state = {"state": {0: {"momentum_buffer": third}}, "param_groups": optimizer.state_dict()["param_groups"]}
    load_optimizer_state(optimizer, state)
    assert torch.equal(optimizer.state[p]["momentum_buffer"], third)
    assert optimizer.state[p]["momentum_buffer"] is third, "received in place, kept in place"
