"""A source in a process of its own, to be killed: publish a state that the seed determines, say where."""

from __future__ import annotations

import sys

import torch

from transport import HTTPTransport


def make_state(seed: int, megabytes: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = (megabytes << 20) // 4
    return {f"p{i}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for i in range(4)}


if __name__ == "__main__":
    with HTTPTransport(token="secret", chunk_bytes=1 << 20) as transport:
        transport.publish("v", make_state(int(sys.argv[1]), int(sys.argv[2])))
        print(transport.address, flush=True)
        sys.stdin.read()
