"""Ranks of a real gloo group, in processes of their own: they hold shards, publish them or fetch others."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from transport import HTTPTransport, Progress

SHAPES = {
    "first": ((1001, 300), 0),
    "second": ((200, 1003), 1),
    "middle": ((6, 40, 50), 1),
    "short": ((3, 7), 0),
    "bias": ((1000,), 0),
    "large": ((3000, 1000), 0),
}
"""Of tensors: the whole shape, and the dimension that is cut."""


def whole_tensors(fill: float = 1.0) -> dict[str, torch.Tensor]:
    """Return what the shards make up together."""
    generator = torch.Generator().manual_seed(7)
    return {name: fill * torch.randn(shape, generator=generator) for name, (shape, _) in SHAPES.items()}


def make_state(mesh: DeviceMesh, fill: float = 1.0) -> dict[str, Any]:
    """Return this rank's state: DTensors of all kinds and what is no DTensor."""
    wholes = whole_tensors(fill)
    state: dict[str, Any] = {
        name: distribute_tensor(whole, mesh, [Shard(SHAPES[name][1])]) for name, whole in wholes.items()
    }
    state["everywhere"] = distribute_tensor(wholes["second"].t(), mesh, [Replicate()])
    state["tied"] = state["first"]
    state["plain"] = wholes["short"].clone()
    state["many"] = [distribute_tensor(torch.full((8,), fill * i), mesh, [Shard(0)]) for i in range(400)]
    state["step"] = int(7 * fill)
    return state


def make_trainer(mesh: DeviceMesh, steps: int) -> dict[str, Any]:
    """Return the state of a model under FSDP2 and its Adam, after some steps."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 130), torch.nn.ReLU(), torch.nn.Linear(130, 10))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(max(steps, 1)):
        # The same on every rank, so that the result does not depend on how many there are.
        model(torch.linspace(-1, 1, 640).view(10, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if not steps:
        for tensor in tensors(state):
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    return state


def tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors of a state, in order."""
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in items for tensor in tensors(item)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def source(rank: int, size: int, store: str, trainer: bool, pipe: Connection) -> None:
    """Publish this rank's state until told to end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    with HTTPTransport(token="secret", chunk_bytes=1 << 20) as transport:
        transport.publish("v", make_trainer(mesh, 2) if trainer else make_state(mesh))
        pipe.send(transport.address)
        pipe.recv()
    dist.destroy_process_group()


def joiner(rank: int, size: int, store: str, trainer: bool, pipe: Connection) -> None:
    """Fetch this rank's part from the shards that are told, compare it, and say how many bytes came."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    into = make_trainer(mesh, 0) if trainer else make_state(mesh, 0.0)
    right = make_trainer(mesh, 2) if trainer else make_state(mesh)
    pointers = [local(tensor).data_ptr() for tensor in tensors(into)]
    last: list[Progress] = []
    pipe.send("ready")
    shards = pipe.recv()
    with HTTPTransport(token="secret") as transport:
        got: Any = transport.fetch_shards(shards, "v", into, deadline_s=60, progress=last.append)
    differences = [
        i
        for i, (a, b) in enumerate(zip(tensors(got), tensors(right), strict=True))
        if not torch.equal(local(a), local(b)) or type(a) is not type(b)
    ]
    seen: dict[int, int] = {local(t).data_ptr(): local(t).nbytes for t in tensors(right)}
    pipe.send(
        {
            "differences": differences,
            "in_place": [local(tensor).data_ptr() for tensor in tensors(got)] == pointers,
            "received": sum(s.bytes_received for s in last[-1].sources),
            "needed": sum(seen.values()),
            "step": got.get("step"),
        }
    )
    pipe.recv()
    dist.destroy_process_group()
