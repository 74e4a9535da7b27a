"""The optimizer steps when all members commit, and only then."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim

from ftkit.algorithms.amp import GradScaler
from ftkit.algorithms.optimizer import Optimizer
from ftkit.errors import ConfigError, FtkitError

from .scripted import ScriptedManager, World


def build(votes: list[bool] | None = None, **arguments: Any) -> tuple[ScriptedManager, nn.Linear, Optimizer]:
    (manager,) = World(1).members
    manager.next_votes = list(votes or [])
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    return manager, module, Optimizer(manager, optim.AdamW(module.parameters(), lr=0.1), **arguments)


def backward(module: nn.Module, factor: float = 1.0) -> None:
    (module(torch.ones(4, 3)).square().sum() * factor).backward()


def test_nothing_moves_unless_the_step_is_committed() -> None:
    manager, module, optimizer = build([False, True])
    scheduler = optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    optimizer.register_scheduler(scheduler)
    before = copy.deepcopy(module.state_dict())
    optimizer.zero_grad()
    assert manager.starts == 1
    backward(module)
    optimizer.step()
    assert not optimizer.committed
    assert (manager.finished_with, scheduler.last_epoch, dict(optimizer.state)) == ([], 0, {})
    assert all(torch.equal(v, module.state_dict()[k]) for k, v in before.items())
    optimizer.zero_grad()
    assert module.weight.grad is None
    backward(module)
    optimizer.step()
    assert optimizer.committed
    assert (manager.finished_with, scheduler.last_epoch) == ([None], 1)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not torch.equal(before["weight"], module.weight)


def test_it_steps_as_the_inner_one_would() -> None:
    _, module, optimizer = build()
    other = copy.deepcopy(module)
    plain = optim.AdamW(other.parameters(), lr=0.1)
    for _ in range(3):
        for m, o in ((module, optimizer), (other, plain)):
            o.zero_grad()
            backward(m)
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            o.step()
    assert torch.equal(module.weight, other.weight)


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    manager, module, optimizer = build()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = module(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() > 0
    assert manager.step == 1


def test_schedulers_may_be_built_on_either() -> None:
    _, module, optimizer = build()
    outer = optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=20)
    inner = optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda n: 0.9**n)
    for s in (outer, inner):
        optimizer.register_scheduler(s)
    rates = []
    for _ in range(3):
        optimizer.zero_grad()
        backward(module)
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert outer.last_epoch == inner.last_epoch == 3
    assert len(set(rates)) == 3


def test_schedulers_are_part_of_the_state_that_heals() -> None:
    world = World(1)
    (source,) = world.members
    joiner = ScriptedManager(world)
    schedulers = []
    for manager in (source, joiner):
        module = nn.Linear(2, 2)
        inner = optim.SGD(module.parameters(), lr=1.0)
        schedulers.append(optim.lr_scheduler.MultiStepLR(inner, [2, 4], gamma=0.1))
        optimizer = Optimizer(manager, inner, [schedulers[-1]])
        if manager is source:
            for _ in range(3):
                optimizer.zero_grad()
                module(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    joiner.heal_from(source)
    assert schedulers[1].state_dict() == schedulers[0].state_dict()
    assert schedulers[1].last_epoch == 3


def test_a_scheduler_that_follows_a_metric_is_refused() -> None:
    _, _, optimizer = build()
    with pytest.raises(ConfigError, match="metric"):
        optimizer.register_scheduler(optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer))  # type: ignore[arg-type]


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(ConfigError, match="LBFGS"):
        Optimizer(World(1).members[0], optim.LBFGS(nn.Linear(1, 1).parameters()))


def test_an_update_that_fails_half_way_is_reported_so_that_the_member_heals() -> None:
    manager, module, optimizer = build()
    optimizer.register_step_post_hook(lambda *_: 1 / 0)
    optimizer.zero_grad()
    backward(module)
    with pytest.raises(FtkitError, match="half way") as caught:
        optimizer.step()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert [type(e) for e in manager.finished_with] == [ZeroDivisionError]
    assert not optimizer.committed


def test_an_interrupt_during_the_update_is_passed_on_as_it_is() -> None:
    manager, module, optimizer = build()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    optimizer.register_step_post_hook(interrupt)
    optimizer.zero_grad()
    backward(module)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert [type(e) for e in manager.finished_with] == [KeyboardInterrupt]


def test_a_step_in_doubt_is_applied_from_the_gradients_at_hand() -> None:
    """It was committed elsewhere: this member must end up with the very bits that its peers have."""
    manager, module, optimizer = build([False])
    other = copy.deepcopy(module)
    plain = optim.AdamW(other.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_scheduler(scheduler)
    for m, o in ((module, optimizer), (other, plain)):
        o.zero_grad()
        backward(m)
        o.step()
    manager.updates[-1]()
    assert torch.equal(module.weight, other.weight)
    assert scheduler.last_epoch == 1


@pytest.mark.parametrize("change", ["zeroed", "dropped", "added to", "stepped"])
def test_a_step_in_doubt_is_not_applied_from_other_gradients(change: str) -> None:
    """A script may clear or change gradients behind our back; then the member heals."""
    manager, module, optimizer = build([False, False, True])
    optimizer.zero_grad()
    backward(module)
    optimizer.step()
    settle = manager.updates[-1]
    if change == "zeroed":
        module.zero_grad(set_to_none=False)
    elif change == "dropped":
        module.zero_grad()
    elif change == "added to":
        backward(module)
    else:
        optimizer.zero_grad()
    before = module.weight.clone()
    assert settle() is False
    assert torch.equal(before, module.weight)


def test_gradients_are_dropped_after_the_step_has_begun() -> None:
    """Beginning the step may apply them: a vote in doubt turns out to be won."""
    manager, module, optimizer = build([False])
    optimizer.zero_grad()
    backward(module)
    optimizer.step()
    seen: list[object] = []
    manager.start_step = lambda: seen.append(module.weight.grad)  # type: ignore[method-assign]
    dropped = manager.dropped
    optimizer.zero_grad()
    assert seen[0] is not None
    assert manager.dropped == dropped + 1


def test_it_passes_for_the_inner_optimizer() -> None:
    _, module, optimizer = build()
    assert isinstance(optimizer, optim.Optimizer)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.defaults["lr"] == 0.1
    assert "AdamW" in repr(optimizer)
    extra = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [extra]})
    assert optimizer.optimizer.param_groups[1]["params"] == [extra]
    state = optimizer.state_dict()
    assert set(state["state"]) == {0, 1, 2}, "created before the first step, to be received in place"
    moment = optimizer.state[module.weight]["exp_avg"]
    optimizer.load_state_dict(state)
    assert optimizer.state[module.weight]["exp_avg"] is moment


SCALED: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.Adam, {"lr": 0.1, "fused": True}),
]


@pytest.mark.parametrize(("kind", "arguments"), SCALED, ids=["plain", "fused"])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_works_as_without_ftkit(
    kind: type[optim.Optimizer], arguments: dict[str, Any], unscale: bool
) -> None:
    (manager,) = World(1).members
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    other = copy.deepcopy(module)
    options: dict[str, Any] = {"init_scale": 8.0, "growth_interval": 2}
    sides = (
        (
            module,
            Optimizer(manager, kind(module.parameters(), **arguments)),
            GradScaler(manager, "cpu", **options),
        ),
        (other, kind(other.parameters(), **arguments), torch.amp.GradScaler("cpu", **options)),
    )
    for step in range(6):
        factor = float("inf") if step == 3 else 1.0
        for m, o, s in sides:
            o.zero_grad()
            s.scale(m(torch.ones(4, 3)).square().sum() * factor).backward()
            if unscale:
                s.unscale_(o)
                nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            s.step(o)
            s.update()
        assert torch.equal(module.weight, other.weight)
        assert sides[0][2].get_scale() == sides[1][2].get_scale()
    assert manager.step == 6, "a skipped update is a committed step like any other"


def test_the_loss_scale_stays_put_in_a_step_that_is_not_committed() -> None:
    """An infinity out of a broken all-reduce shows on some replicas only: their scales would differ."""
    (manager,) = World(1).members
    manager.next_votes = [True, False, True]
    module = nn.Linear(3, 2)
    optimizer = Optimizer(manager, optim.SGD(module.parameters(), lr=0.1))
    scaler = GradScaler(manager, "cpu", init_scale=8.0, growth_interval=2)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(module(torch.ones(4, 3)).sum() * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 8.0, 16.0]
    assert manager.dropped == 4, "what the scaler had found is gone, so a doubt cannot be settled any more"


def test_the_loss_scale_heals() -> None:
    world = World(2)
    a, b = (GradScaler(m, "cpu", init_scale=8.0) for m in world.members)
    a.scale(torch.ones(1))
    a.load_state_dict({**a.state_dict(), "scale": 32.0, "_growth_tracker": 7})
    world.members[1].heal_from(world.members[0])
    assert (b.get_scale(), b.state_dict()["_growth_tracker"]) == (32.0, 7)
    assert b.scale(torch.ones(1)).item() == 32.0


@pytest.mark.parametrize("first", ["cpu", torch.device("cpu"), object()])
def test_a_grad_scaler_without_a_manager_says_what_to_write(first: Any) -> None:
    """Whoever moves a script over has torch's arguments there."""
    with pytest.raises(ConfigError, match=r"write GradScaler\(manager"):
        GradScaler(first)
