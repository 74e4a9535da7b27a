"""Gradients are averaged over replicas as torch's DDP averages them, with members that come and go."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ftkit.algorithms.buckets import plan_buckets
from ftkit.algorithms.ddp import DistributedDataParallel
from ftkit.errors import ConfigError

from .gloo_world import GlooManager, replicas

CAP_MB = 0.0005


_template = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def model() -> nn.Module:
    return copy.deepcopy(_template)


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def local_grads(rank: int, steps: tuple[int, ...] = (0,)) -> list[torch.Tensor]:
    alone = model()
    for step in steps:
        alone(batch(rank, step)).square().mean().backward()
    return [p.grad for p in alone.parameters() if p.grad is not None]


def expected(ranks: range | tuple[int, ...], steps: tuple[int, ...] = (0,)) -> list[torch.Tensor]:
    per_rank = [local_grads(r, steps) for r in ranks]
    return [torch.stack(g).mean(0) for g in zip(*per_rank, strict=True)]


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "find_unused_parameters": True},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true:UserWarning")
def test_gradients_are_averaged_in_every_mode(kwargs: dict[str, Any]) -> None:
    """Over several steps: torch cuts its buckets anew after the first."""

    def train(manager: GlooManager) -> tuple[list[list[torch.Tensor]], list[list[int]]]:
        ddp = DistributedDataParallel(manager, model(), bucket_cap_mb=CAP_MB, **kwargs)
        seen, sent = [], []
        for step in range(3):
            manager.begin()
            ddp.zero_grad()
            ddp(batch(manager.rank, step)).square().mean().backward()
            seen.append(grads(ddp))
            sent.append(manager.sent)
            # torch divides while it copies; only where it cuts the buckets by itself this is left to us.
            asks_torch = "static_graph" in kwargs or "find_unused_parameters" not in kwargs
            assert set(manager.divided_by) <= {2 if asks_torch else 1}
        assert manager.starts == 3
        assert manager.errors == []
        assert manager.models == [ddp.module]
        return seen, sent

    with replicas(2) as on_all:
        for seen, sent in on_all(train):
            for step in range(3):
                torch.testing.assert_close(seen[step], expected(range(2), (step,)))
            assert sent[0] == sent[1] == sent[2], "all steps send the same buckets"
            assert len(sent[0]) >= 3


@pytest.mark.parametrize("kwargs", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_late_joiner_sends_the_same_buckets(kwargs: dict[str, Any]) -> None:
    """Its reducer is in its first backward while those of its peers have long cut their buckets anew."""

    def train(manager: GlooManager) -> list[list[torch.Tensor]]:
        ddp = DistributedDataParallel(manager, model(), bucket_cap_mb=CAP_MB, **kwargs)
        seen = []
        for step in range(4):
            if step == 2 and manager.rank == 1:
                ddp = DistributedDataParallel(manager, model(), bucket_cap_mb=CAP_MB, **kwargs)
            manager.begin()
            ddp.zero_grad()
            ddp(batch(manager.rank, step)).square().mean().backward()
            seen.append(grads(ddp))
        return seen

    with replicas(2) as on_all:
        for seen in on_all(train):
            for step in range(4):
                torch.testing.assert_close(seen[step], expected(range(2), (step,)))


def test_mixed_dtypes_keep_one_order() -> None:
    """There is one flat buffer per dtype; replicas must send the pieces of all of them in one order."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Linear(16, 16, dtype=d) for d in (torch.float32, torch.float64) * 3
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x.to(layer.weight.dtype)).tanh()
            return x

    _mixed = Mixed()

    def data(rank: int) -> torch.Tensor:
        return torch.randn(3, 16, generator=torch.Generator().manual_seed(rank))

    def train(manager: GlooManager) -> list[torch.Tensor]:
        ddp = DistributedDataParallel(manager, copy.deepcopy(_mixed), bucket_cap_mb=0.0005)
        for step in range(3):
            if step == 1 and manager.rank == 1:
                ddp = DistributedDataParallel(manager, copy.deepcopy(_mixed), bucket_cap_mb=0.0005)
            manager.begin()
            ddp.zero_grad()
            ddp(data(manager.rank)).square().mean().backward()
        assert len(manager.sent) >= 4
        return grads(ddp)

    alone = []
    for rank in range(2):
        m = copy.deepcopy(_mixed)
        m(data(rank)).square().mean().backward()
        alone.append(grads(m))
    with replicas(2) as on_all:
        for got in on_all(train):
            torch.testing.assert_close(got, [(a + b) / 2 for a, b in zip(*alone, strict=True)])


@pytest.mark.parametrize("as_view", [False, True])
def test_accumulated_gradients_are_averaged_once(as_view: bool) -> None:
    def train(manager: GlooManager) -> list[torch.Tensor]:
        ddp = DistributedDataParallel(manager, model(), bucket_cap_mb=CAP_MB, gradient_as_bucket_view=as_view)
        for first in (0, 2, 4):
            manager.begin()
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(batch(manager.rank, first)).square().mean().backward()
                assert manager.sent == []
            ddp(batch(manager.rank, first + 1)).square().mean().backward()
        return grads(ddp)

    with replicas(2) as on_all:
        for got in on_all(train):
            torch.testing.assert_close(got, expected(range(2), (4, 5)))


class Branches(nn.Module):
    """Each replica takes another branch; nobody takes the last."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        out: torch.Tensor = self.branches[branch](self.trunk(x))
        return out


_branches = Branches()


def test_what_any_replica_has_used_is_averaged_on_all() -> None:
    """Otherwise the parameters of replicas that differ in their graphs drift apart; unused ones stay None."""

    def train(manager: GlooManager) -> list[torch.Tensor | None]:
        ddp = DistributedDataParallel(manager, copy.deepcopy(_branches), find_unused_parameters=True)
        for _ in range(2):
            manager.begin()
            ddp.zero_grad()
            ddp(batch(manager.rank), manager.rank).square().mean().backward()
        return [None if p.grad is None else p.grad.clone() for p in ddp.parameters()]

    own = []
    for rank in range(2):
        alone = copy.deepcopy(_branches)
        alone(batch(rank), rank).square().mean().backward()
        own.append([torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()])
    with replicas(2) as on_all:
        for got in on_all(train):
            assert [g is None for g in got] == [False] * 6 + [True] * 2
            for g, a, b in zip(got, *own, strict=True):
                if g is not None:
                    torch.testing.assert_close(g, (a + b) / 2)


@pytest.mark.parametrize("warm", [0, 2], ids=["first backward", "later backward"])
def test_a_step_is_salvaged_from_the_own_gradients(warm: int) -> None:
    """A replica dies in mid-backward: the others average the same backward again, without it."""
    finish = threading.Barrier(2)

    def train(manager: GlooManager) -> list[torch.Tensor] | None:
        ddp = DistributedDataParallel(manager, model(), bucket_cap_mb=CAP_MB)
        for step in range(warm):
            manager.begin()
            ddp.zero_grad()
            ddp(batch(manager.rank, step)).square().mean().backward()
        manager.begin()
        ddp.zero_grad()
        if manager.rank == 2:  # takes part in the first bucket and is gone
            sizes = [p.numel() * 4 for p in ddp.parameters()]
            bucket = plan_buckets(sizes, [0] * len(sizes), cap=int(CAP_MB * 2**20))[0]
            manager.reduce_bucket(torch.full((sum(sizes[i] // 4 for i in bucket),), 1e6), None, False)
            while manager.collectives.num_pending() and not manager.errors:
                time.sleep(0.002)
            manager.abort()
            return None

        def salvage() -> None:
            while not manager.errors:
                time.sleep(0.002)
            manager.abort()
            finish.wait(60)
            manager.form("second", manager.rank, 2)
            manager.collectives.resume()

        helper = threading.Thread(target=salvage)
        helper.start()
        ddp(batch(manager.rank, 9)).square().mean().backward()
        helper.join()
        assert not manager.collectives.failed
        return grads(ddp)

    with replicas(3) as on_all:
        first, second, _ = on_all(train)
    assert first is not None
    assert second is not None
    torch.testing.assert_close(first, expected((0, 1), (9,)))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_hangs_or_raises_in_a_step_that_has_failed() -> None:
    """Backward ends; the vote is what tells that the step is lost, and the next one is sound."""

    def train(manager: GlooManager) -> list[torch.Tensor]:
        ddp = DistributedDataParallel(manager, model(), bucket_cap_mb=CAP_MB)
        for step in range(3):
            manager.begin()
            if step == 1:
                manager.collectives.fail()
            ddp.zero_grad()
            ddp(batch(manager.rank, step)).square().mean().backward()
        return grads(ddp)

    with replicas(2) as on_all:
        for got in on_all(train):
            torch.testing.assert_close(got, expected(range(2), (2,)))


def test_evaluation_starts_no_step() -> None:
    """After the last step the peers have left: an epoch would be waited for in vain."""
    with replicas(1) as on_all:

        def evaluate(manager: GlooManager) -> int:
            ddp = DistributedDataParallel(manager, model())
            with torch.no_grad():
                ddp(batch(0))
            ddp.eval()
            ddp(batch(0))
            return manager.starts

        assert on_all(evaluate) == [0]


def test_buffers_stay_local_and_the_state_dict_is_that_of_ddp() -> None:
    def train(manager: GlooManager) -> torch.Tensor:
        ddp = DistributedDataParallel(manager, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
        manager.begin()
        ddp(batch(manager.rank)).sum().backward()
        assert "module.1.running_mean" in ddp.state_dict()
        buffer: torch.Tensor = ddp.module[1].running_mean
        return buffer.clone()

    with replicas(2) as on_all:
        a, b = on_all(train)
        assert not torch.equal(a, b)


def test_a_wrapped_model_can_be_freed_and_copied() -> None:
    """Scripts that rebuild their model would leak it through the reducer's reference to its hook."""
    with replicas(1) as on_all:

        def build(manager: GlooManager) -> weakref.ref[nn.Module]:
            manager.models.clear()
            ddp = DistributedDataParallel(manager, model())
            manager.begin()
            ddp(batch(0)).sum().backward()
            copy.deepcopy(ddp.module)
            manager.models.clear()
            manager.begin()
            return weakref.ref(ddp)

        (gone,) = on_all(build)
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize(
    "kwargs",
    [{"process_group": object()}, {"broadcast_buffers": True}, {"mixed_precision": object()}],
    ids=str,
)
def test_what_cannot_work_is_refused_by_name(kwargs: dict[str, Any]) -> None:
    with (
        replicas(1) as on_all,
        pytest.raises(ConfigError, match=next(iter(kwargs))),
    ):
        on_all(lambda manager: DistributedDataParallel(manager, model(), **kwargs))


def test_sparse_gradients_are_refused() -> None:
    with replicas(1) as on_all, pytest.raises(ConfigError, match="sparse"):
        on_all(lambda m: DistributedDataParallel(m, nn.Embedding(4, 4, sparse=True)))
