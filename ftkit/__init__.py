"""Fault tolerant PyTorch training over etcd: per-step recovery, no coordinator of its own.

Names are imported when they are used, so that `ftkit status` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftkit.algorithms.data import DataLoader, DistributedSampler
    from ftkit.algorithms.ddp import DistributedDataParallel
    from ftkit.algorithms.optimizer import Optimizer
    from ftkit.errors import FtkitError, Left
    from ftkit.groups.gloo import ProcessGroupGloo
    from ftkit.groups.nccl import ProcessGroupNCCL
    from ftkit.manager import Manager

_HOMES = {
    "DataLoader": "ftkit.algorithms.data",
    "DistributedDataParallel": "ftkit.algorithms.ddp",
    "DistributedSampler": "ftkit.algorithms.data",
    "FtkitError": "ftkit.errors",
    "Left": "ftkit.errors",
    "Manager": "ftkit.manager",
    "Optimizer": "ftkit.algorithms.optimizer",
    "ProcessGroupGloo": "ftkit.groups.gloo",
    "ProcessGroupNCCL": "ftkit.groups.nccl",
}

__all__ = [
    "DataLoader",
    "DistributedDataParallel",
    "DistributedSampler",
    "FtkitError",
    "Left",
    "Manager",
    "Optimizer",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ftkit' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
