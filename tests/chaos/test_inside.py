"""Faults inside of a trainer: the phase that was asked for, once, and written down before it strikes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ftkit.chaos.faults import plan
from ftkit.chaos.inside import Injected, Saboteur, flip
from ftkit.chaos.kinds import TABLE
from ftkit.chaos.orders import ACTS, PHASES, Order, Orders
from ftkit.chaos.strikes import order_for

SCRIPT = """
import sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    try:
        loss = model(torch.ones(1, 2)).sum()
    except RuntimeError as error:
        print(type(error).__name__, flush=True)
        continue
    loss.backward()
    optimizer.step()
    finite = all(torch.isfinite(p).all() for p in model.parameters())
    print("step", step, __name__, bool(finite), flush=True)
"""


def run(folder: Path, order: Order | None) -> tuple[int, list[str], list[dict]]:
    """Run the script with an order that waits; return its exit code, its lines and the noted faults."""
    script, journal, orders = folder / "train.py", folder / "chaos.jsonl", folder / "orders"
    script.write_text(SCRIPT)
    orders.mkdir()
    # The first look may come after the script has begun: enough steps for it to come in the middle.
    words = [sys.executable, "-m", "ftkit.chaos.inside", "--orders", orders, "--journal", journal, script]
    if order is not None:
        Orders(orders).give("a", order)
    env = {"FTKIT_REPLICA_ID": "a", "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*words, "2000"], env=env, capture_output=True, text=True, check=False, timeout=90)
    rows = [json.loads(x) for x in journal.read_text().splitlines()] if journal.exists() else []
    assert not Orders(orders).waiting(), done.stderr
    return done.returncode, done.stdout.splitlines(), rows


def test_a_kill_strikes_in_its_phase_and_is_noted_before(tmp_path: Path) -> None:
    code, lines, [row] = run(tmp_path, Order(number=1, act="kill", phase="update"))
    assert code == -signal.SIGKILL
    assert len(lines) < 2000
    assert all("__main__ True" in line for line in lines), "the script is run as it would be without us"
    assert (row["type"], row["kind"], row["phase"], row["replica"]) == ("fault", "SIGKILL", "update", "a")


class Model:
    """A model of one parameter with the saboteur's hooks on it."""

    def __init__(self, folder: Path) -> None:
        self.orders = Orders(folder)
        self.module = torch.nn.Linear(2, 1, bias=False)
        self.saboteur = Saboteur(self.orders, "a", folder / "chaos.jsonl")
        self.module.register_forward_pre_hook(self.saboteur._forward)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.optimizer.register_step_pre_hook(self.saboteur._update)
        self.optimizer.register_step_post_hook(self.saboteur._updated)
        self.number = 0

    def step(self, act: str, phase: str, **more: float) -> torch.Tensor:
        """Give an order, wait until it is known, and make a step; return the gradient."""
        self.number += 1
        self.orders.give("a", Order(number=self.number, act=act, phase=phase, **more))
        deadline = time.monotonic() + 20
        while self.saboteur._order is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        self.module.zero_grad()
        self.module(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        assert not self.orders.waiting()
        assert self.module.weight.grad is not None
        return self.module.weight.grad


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    made = Model(tmp_path)
    yield made
    made.saboteur.close()


def test_gradients_and_weights_are_spoilt_as_ordered(model: Model, tmp_path: Path) -> None:
    assert model.step("nan", "backward").isnan().tolist() == [[True, False]]
    assert model.step("flip-bit", "backward", bit=31).tolist() == [[-1.0, 1.0]]
    before = torch.zeros_like(model.module.weight)
    with torch.no_grad():
        model.module.weight.zero_()
    model.step("corrupt", "updated", bit=31)
    assert (model.module.weight - before).flatten().tolist() == pytest.approx([0.1, -0.1])
    kinds = [json.loads(x)["kind"] for x in (tmp_path / "chaos.jsonl").read_text().splitlines()]
    assert kinds == ["nan", "flip-bit", "corrupt"]


@pytest.mark.parametrize("phase", ["forward", "update"])
def test_an_exception_comes_from_the_users_code(model: Model, phase: str) -> None:
    with pytest.raises(Injected, match=phase):
        model.step("raise", phase)
    assert model.saboteur._order is None, "once"


def test_one_bit_is_flipped_and_flipped_back() -> None:
    tensor = torch.tensor([1.0, 2.0])
    flip(tensor, 0)
    assert tensor[0] != 1.0
    assert tensor[1] == 2.0
    flip(tensor, 0)
    assert tensor.tolist() == [1.0, 2.0]


def test_every_kind_with_a_phase_gives_an_order_that_can_be_carried_out(tmp_path: Path) -> None:
    kinds = [name for name, kind in TABLE.items() if kind.phase]
    orders = Orders(tmp_path)
    seen = set()
    for fault in plan(4, seconds=1000.0, kinds=kinds):
        order = order_for(fault, TABLE[fault.kind].phase, 7)
        seen.add((order.act, order.phase))
        orders.give("a", order)
        assert orders.read("a") == order
    assert {act for act, _ in seen} == set(ACTS) - {"stop"}
    assert {phase for _, phase in seen} == set(PHASES) - {"want"}
    assert orders.waiting() == {"a"}
    assert orders.take("a")
    assert not orders.take("a"), "another process was faster"
    with pytest.raises(ValueError, match="dance"):
        Order(number=1, act="dance", phase="vote")
