"""A source in a gloo group, in a process of its own, that is killed when it has sent a few buckets."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from tests.transport.test_pg import Group, join_group, state
from transport import DistributedTransport, HTTPTransport


class Mortal(Group):
    sends_left = 2

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.sends_left -= 1
        if self.sends_left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().send(tensors, rank, tag)


if __name__ == "__main__":
    port, rank, size = map(int, sys.argv[1:])
    group = Mortal(join_group(TCPStore("127.0.0.1", port, is_master=False), rank, size))
    with DistributedTransport(HTTPTransport(token="secret", chunk_bytes=1 << 20)) as transport:
        transport.configure(group, "epoch 4")  # type: ignore[arg-type]
        transport.publish("v", state())
        print(transport.address, flush=True)
        sys.stdin.read()
