"""Of a DTensor the local shard travels; where it arrives it is a DTensor again.

How shards are cut in another way: `test_sharded.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from transport import HTTPTransport, StateMismatch

Make = Callable[..., HTTPTransport]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_shards_are_received_in_place_and_missing_ones_are_created(
    make_transport: Make, mesh: DeviceMesh
) -> None:
    weight = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
    moment = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
    into = {"w": torch.nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)]))}
    source = make_transport()
    source.publish("v", {"w": weight, "m": moment})
    result: Any = make_transport().fetch([source.address], "v", into, deadline_s=10)
    assert result["w"] is into["w"]
    assert torch.equal(result["w"].to_local(), weight.to_local())
    assert isinstance(result["m"], DTensor)
    assert result["m"].placements == moment.placements
    assert torch.equal(result["m"].to_local(), moment.to_local())


def test_another_placement_or_a_plain_tensor_is_a_mismatch(make_transport: Make, mesh: DeviceMesh) -> None:
    source = make_transport()
    source.publish("v", {"w": distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])})
    joiner = make_transport()
    for wrong in (distribute_tensor(torch.zeros(6, 4), mesh, [Replicate()]), torch.zeros(6, 4)):
        with pytest.raises(StateMismatch, match="w: the source has float32"):
            joiner.fetch([source.address], "v", {"w": wrong}, deadline_s=10)
    with pytest.raises(StateMismatch, match="cannot be created here"):
        joiner.fetch([source.address], "v", {}, deadline_s=10)
