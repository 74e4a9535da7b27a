"""NCCL groups, where there is a CUDA device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ftkit.errors import Aborted, ConfigError
from ftkit.groups.nccl import ProcessGroupNCCL

HAS_NCCL = dist.is_nccl_available() and torch.cuda.is_available()


@pytest.mark.skipif(HAS_NCCL, reason="there is a CUDA device")
def test_without_a_device_the_error_says_what_to_use() -> None:
    with pytest.raises(ConfigError, match="use ProcessGroupGloo"):
        ProcessGroupNCCL(timeout_s=5)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_NCCL, reason="needs a CUDA device and NCCL")
def test_a_communicator_is_made_and_aborted_for_each_epoch() -> None:
    with ProcessGroupNCCL(timeout_s=30) as group:
        for epoch in range(3):
            group.configure("127.0.0.1:1", f"epoch/{epoch}", 0, 1, timeout_s=60)
            tensor = torch.ones(1000, device="cuda")
            group.allreduce(tensor).wait()
            torch.cuda.synchronize()
            assert float(tensor.sum()) == 1000
            group.abort("the epoch is over")
            with pytest.raises(Aborted):
                group.allreduce(tensor).wait()
