"""Process groups over NCCL (CUDA tensors): a new communicator for each epoch, aborted when it is over.

torch's own watchdog answers a lost peer or a timeout by ending the process, so it is switched off for these
groups; a thread per session looks for collectives that take too long instead, and aborts their
communicator. Waiting for a collective makes the current stream wait, not the CPU: an error shows in
`errored()`, in the next `wait()`, and in the vote that ends the step.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import Work

from ftkit.errors import ConfigError, GroupError
from ftkit.groups.base import ProcessGroup
from ftkit.groups.rendezvous import Attempt
from ftkit.groups.session import Session
from ftkit.groups.store import join_address, split_address
from ftkit.groups.work import StreamWork

log = logging.getLogger(__name__)

_NEVER = timedelta(days=365)
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class _NcclSession(Session):
    def __init__(self, backend: Any, store: Any, attempt: Attempt, timeout_s: float) -> None:
        super().__init__(backend, attempt.rank, attempt.size)
        self._store = store
        self._timeout_s = timeout_s
        self._deadlines: deque[tuple[Work, float]] = deque()
        self._severing = threading.Lock()
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="ftkit-nccl-clock", daemon=True).start()

    def wrap(self, inner: Work, *, tracked: bool) -> Work:
        self.pending.append(inner)
        self._deadlines.append((inner, time.monotonic() + self._timeout_s))
        return StreamWork(inner, self)

    def prune(self) -> None:
        while self.pending and self.pending[0].is_completed():
            self.ended(self.pending[0])

    def sever(self) -> None:
        with self._severing:  # who comes second waits until the communicator is gone
            if not self._over.is_set():
                try:
                    if self.backend is not None:
                        self.backend.abort()
                finally:
                    self._over.set()

    def is_severed(self) -> bool:
        return self._over.is_set()

    def at_rest(self) -> bool:
        return False  # a kernel that is still on the device may write

    def free(self) -> None:
        self.sever()
        super().free()
        self._store = None

    def hidden_fds(self) -> list[int]:
        return []

    def process_group(self) -> dist.ProcessGroup:
        if self._group is None:
            kind = dist.ProcessGroup.BackendType.NCCL
            group = dist.ProcessGroup(self._store, self.rank, self.size)
            group._set_default_backend(kind)
            group._register_backend(torch.device("cuda"), kind, self.backend)
            self._group = group
        return self._group

    def _watch(self) -> None:
        pause_s = min(1.0, self._timeout_s / 20)
        while not self._over.wait(pause_s):
            while self._deadlines and self._deadlines[0][0].is_completed():
                self._deadlines.popleft()
            if self._deadlines and time.monotonic() > self._deadlines[0][1]:
                self.failed(f"it did not end within {self._timeout_s:g} s")
                log.warning("rank %d of %d: %s", self.rank, self.size, self.error)
                self.sever()


class ProcessGroupNCCL(ProcessGroup):
    """A reconfigurable NCCL group on this process's current CUDA device."""

    def __init__(self, timeout: timedelta | float | None = None, *, timeout_s: float | None = None) -> None:
        super().__init__(timeout, timeout_s=timeout_s)
        if not dist.is_nccl_available():
            raise ConfigError("this build of torch has no NCCL; use ProcessGroupGloo")
        if not torch.cuda.is_available():
            raise ConfigError("NCCL needs a CUDA device, and there is none; use ProcessGroupGloo")
        self._device = torch.device("cuda", torch.cuda.current_device())

    def _build(self, attempt: Attempt) -> Session:
        torch.cuda.set_device(self._device)  # this thread is new, and would take device 0
        if attempt.size == 1:
            store: Any = HashStore()
        else:
            attempt.meet()
            store = self._share_store(attempt)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = _NEVER  # torch's watchdog would end the process; `_watch` keeps the time
        options.config.blocking = 0  # so that abort works in the middle of forming the communicator, too
        # torch takes this from the environment only, and reads it when a group is made.
        os.environ.setdefault(_WATCHDOG, "0")
        backend = nccl(store, attempt.rank, attempt.size, options)
        attempt.cut_parts = backend.abort
        if attempt.given_up is not None:
            raise GroupError(attempt.given_up)
        backend.eager_connect_single_device(self._device)
        return _NcclSession(backend, store, attempt, self.timeout_s)

    def _share_store(self, attempt: Attempt) -> TCPStore:
        """Make the store that torch wants for as long as the communicator lives: rank 0 hosts it."""
        link = attempt.link
        timeout = timedelta(seconds=attempt.left_s())
        if attempt.rank > 0:
            host, port = split_address(link.get("nccl").decode())
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        family = socket.AF_INET6 if ":" in link.local_host else socket.AF_INET
        listener = socket.create_server((link.local_host, 0), family=family)
        port = int(listener.getsockname()[1])
        store = TCPStore(
            link.local_host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
        link.set("nccl", join_address(link.local_host, port).encode())
        return store
