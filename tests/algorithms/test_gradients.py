"""Gradients averaged by plain hooks."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from torch import nn

from ftkit.algorithms.gradients import average_gradients
from ftkit.errors import ConfigError

from .gloo_world import GlooManager, replicas

_template = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))


class Chain(nn.Module):
    """Uses the layers it is told to, so that replicas can differ."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = copy.deepcopy(_template)

    def forward(self, x: torch.Tensor, use: tuple[int, ...]) -> torch.Tensor:
        for i in use:
            x = self.layers[i](x).tanh()
        return x


ALL = (0, 1, 2, 3)
BUCKET = 100
"""Holds the weight and the bias of one layer: 42 elements."""


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]


def mean(*uses: tuple[int, ...], steps: tuple[int, ...] = (0,)) -> list[torch.Tensor]:
    own = []
    for rank, use in enumerate(uses):
        alone = Chain()
        for step in steps:
            alone(batch(rank, step), use).square().mean().backward()
        own.append(grads(alone))
    return [torch.stack(g).mean(0) for g in zip(*own, strict=True)]


@pytest.mark.parametrize("to_none", [True, False])
def test_replicas_with_different_graphs_average_the_same_buckets(to_none: bool) -> None:
    """Who does not use a parameter takes part with zeros, and gets its average like the others."""
    uses = ((0, 1, 3), (3, 2, 0))

    def train(manager: GlooManager) -> list[list[torch.Tensor]]:
        module = Chain()
        average_gradients(manager, module, bucket_bytes=BUCKET)
        seen = []
        for step in range(3):
            manager.begin()
            module.zero_grad(to_none)
            module(batch(manager.rank, step), uses[manager.rank]).square().mean().backward()
            seen.append(grads(module))
            assert len(manager.sent) >= 3
        assert manager.starts == 3
        return seen

    with replicas(2) as on_all:
        for seen in on_all(train):
            for step in range(3):
                torch.testing.assert_close(seen[step], mean(*uses, steps=(step,)))


def test_accumulated_gradients_are_averaged_once() -> None:
    """Also those of parameters that only the accumulated passes have used."""

    def train(manager: GlooManager) -> list[torch.Tensor]:
        module = Chain()
        averaged = average_gradients(manager, module, bucket_bytes=BUCKET)
        for _ in range(2):
            manager.begin()
            module.zero_grad()
            with averaged.no_sync():
                module(batch(manager.rank), ALL).square().mean().backward()
                assert manager.sent == []
            module(batch(manager.rank), (1, 2)).square().mean().backward()
        return grads(module)

    first, second = mean(ALL, ALL), mean((1, 2), (1, 2))
    with replicas(2) as on_all:
        for got in on_all(train):
            torch.testing.assert_close(got, [a + b for a, b in zip(first, second, strict=True)])


def test_several_backwards_in_a_step_add_up() -> None:
    """The second starts from gradients that are averages already and live in the buckets."""

    def train(manager: GlooManager) -> list[torch.Tensor]:
        module = Chain()
        average_gradients(manager, module, bucket_bytes=BUCKET)
        manager.begin()
        for step in range(2):
            module(batch(manager.rank, step), ALL).square().mean().backward()
        return grads(module)

    with replicas(2) as on_all:
        for got in on_all(train):
            torch.testing.assert_close(got, mean(ALL, ALL, steps=(0, 1)))


def test_a_backward_that_raised_leaves_no_trace() -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, g: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("on purpose")

    def train(manager: GlooManager) -> list[torch.Tensor]:
        module = Chain()
        average_gradients(manager, module, bucket_bytes=BUCKET)
        manager.begin()
        loss = module(Raises.apply(module(batch(manager.rank), (0,))), (1, 2)).sum()
        with pytest.raises(ArithmeticError):
            loss.backward()
        manager.begin()
        module.zero_grad()
        module(batch(manager.rank), ALL).square().mean().backward()
        return grads(module)

    with replicas(2) as on_all:
        for got in on_all(train):
            torch.testing.assert_close(got, mean(ALL, ALL))


def test_a_step_is_salvaged_from_the_own_gradients() -> None:
    met = threading.Barrier(2)

    def train(manager: GlooManager) -> list[torch.Tensor] | None:
        module = Chain()
        average_gradients(manager, module, bucket_bytes=BUCKET)
        manager.begin()
        if manager.rank == 2:
            manager.reduce_bucket(torch.full((42,), 1e6), None, False)
            manager.reduce_bucket(torch.full((42,), 1e6), None, False)
            while manager.collectives.num_pending() and not manager.errors:
                time.sleep(0.002)
            manager.abort()
            return None

        def salvage() -> None:
            while not manager.errors:
                time.sleep(0.002)
            manager.abort()
            met.wait(60)
            manager.form("second", manager.rank, 2)
            manager.collectives.resume()

        helper = threading.Thread(target=salvage)
        helper.start()
        module(batch(manager.rank), ALL).square().mean().backward()
        helper.join()
        assert not manager.collectives.failed
        return grads(module)

    with replicas(3) as on_all:
        first, second, _ = on_all(train)
    assert first is not None
    torch.testing.assert_close(first, mean(ALL, ALL))
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_gradients_lie_in_memory_as_their_parameters_do() -> None:
    """Fused optimizers refuse, or copy, what is laid out differently."""
    conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    template = nn.Sequential(conv, nn.Conv2d(4, 4, 3))

    def train(manager: GlooManager) -> list[bool]:
        module = copy.deepcopy(template)
        average_gradients(manager, module)
        manager.begin()
        module(torch.ones(1, 4, 8, 8)).sum().backward()
        return [p.grad is not None and p.grad.stride() == p.stride() for p in module.parameters()]

    with replicas(2) as on_all:
        assert all(all(ok) for ok in on_all(train))


def test_removed_hooks_average_nothing() -> None:
    def train(manager: GlooManager) -> list[int]:
        module = Chain()
        average_gradients(manager, module.parameters()).remove()
        manager.begin()
        module(batch(0), ALL).sum().backward()
        return manager.sent

    with replicas(1) as on_all:
        assert on_all(train) == [[]]


def test_a_frozen_model_is_refused() -> None:
    with replicas(1) as on_all, pytest.raises(ConfigError, match="no parameter"):
        on_all(lambda m: average_gradients(m, nn.Linear(2, 2).requires_grad_(False)))
