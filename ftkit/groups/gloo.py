"""Process groups over gloo (CPU tensors), with the abort that gloo lacks.

When a peer dies, gloo tells only its neighbours in the ring, and `ProcessGroupGloo.abort()` does nothing.
But an operation ends at once when its connection does. So each configure makes a gloo device of its own
and notes the epoll instance that drives it; abort shuts down every connection which that instance watches.
torch's experimental reconfigure (2.14) is no better here: its abort leaves operations pending as well.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from ftkit.errors import ConfigError, GroupError
from ftkit.groups import sockets
from ftkit.groups.base import ProcessGroup
from ftkit.groups.link import StoreLink
from ftkit.groups.rendezvous import Attempt
from ftkit.groups.session import Session
from ftkit.groups.sockets import Descriptor

log = logging.getLogger(__name__)

_TRIED_S = 0.002
"""CPU time in which gloo's thread has looked at all of its connections, many times over."""

_SETTLED_S = 0.1
"""How long it may take until what looks like gloo's, but is another thread's, can be told from it."""

_device_lock = threading.Lock()


class _Device:
    """A gloo device, and where to find the sockets that it drives."""

    def __init__(self, torch_device: Any, poller: int, listener: Descriptor | None, loop: int = 0) -> None:
        """`loop` is the id of the thread that drives the sockets."""
        self.torch_device = torch_device
        self._poller = poller
        self._listener = listener
        self._loop = loop
        self._left: list[tuple[Descriptor, int]] = []
        self._left_at_s = 0.0

    def connections(self) -> list[Descriptor]:
        """Return the connections to the peers that are open now."""
        found = sockets.targets(self._poller) if self._listener is not None else []
        if self._listener not in found:  # not ours (any more)
            return []
        return [d for d in found if d != self._listener and sockets.is_socket(d)]

    def cut(self) -> bool:
        """Shut all connections down; say whether all that were left are stuck.

        When one operation has failed in the middle of another connection's message, gloo knows no more where
        to put the rest: it never reads on there, nor sees the end, and tries again and again. What was
        unread and still is, when gloo's thread has worked on since, nobody will ever read.
        """
        found = self.connections()
        for descriptor in found:
            sockets.cut(descriptor)
        left = [(descriptor, sockets.unread(descriptor)) for descriptor in found]
        worked_s = sockets.ran_s(self._loop) if left else 0.0
        if left != self._left:
            self._left, self._left_at_s = left, worked_s
        return not left or worked_s > self._left_at_s + _TRIED_S

    def hush(self) -> None:
        """Keep gloo's thread from trying again and again to read what is stuck; after `cut` only."""
        for descriptor, _ in self._left:
            sockets.hush(self._poller, descriptor)

    def fds(self) -> list[int]:
        """Return the descriptors that a forked child must let go of."""
        if self._listener is None:
            return []
        # The epoll instance too: the child shares it, and could take our sockets off its list.
        return [self._poller, self._listener.fd, *(d.fd for d in self.connections())]

    def hang_up_on_ourselves(self, size: int) -> None:
        """End gloo's wait for a peer that is to connect to us: play the peer, then close.

        A peer introduces itself with the number of the pair that it wants, counted from 0.
        """
        sock = None if self._listener is None else sockets.borrow(self._listener)
        if sock is None:
            return
        with sock:
            address = sock.getsockname()
            family = sock.family
        for number in range(size):
            with socket.socket(family, socket.SOCK_STREAM) as caller:
                caller.settimeout(0.05)
                try:
                    caller.connect(address)
                    caller.sendall(struct.pack("=q", number))
                except OSError:
                    return


def _make_device(hostname: str, interface: str) -> _Device:
    """Make a gloo device and find its epoll instance: the one that watches a new listening socket.

    Should another thread begin to listen in the same instant, two would fit. Then wait a moment, for that
    one may soon stop to listen, and otherwise try again. The new thread is the one that drives the device.
    """
    for _ in range(10):
        with _device_lock:
            if not sockets.supported():
                return _Device(_create(hostname, interface), -1, None)
            threads, before = sockets.threads(), sockets.socket_inodes()
            torch_device = _create(hostname, interface)
            found = _new_listeners(before)
            loops = _new_loops(threads)
            until = time.monotonic() + _SETTLED_S
            while len(found) > 1 and time.monotonic() < until:
                time.sleep(0.001)
                still = _new_listeners(before)
                found = [candidate for candidate in found if candidate in still]
        if len(found) == len(loops) == 1:
            sockets.close_on_exec([found[0][1]])
            _let_others_finish(loops[0])
            return _Device(torch_device, *found[0], loops[0])
    raise GroupError("cannot tell gloo's sockets from those of other threads, which keep opening new ones")


def _let_others_finish(loop: int) -> None:
    """Keep gloo's thread from interrupting those that it works with.

    While another thread holds a connection's lock, gloo's spins: it looks again and again whether it can be
    had. If it has interrupted that very thread, on its processor, both stand still until the scheduler's next
    tick, 4 ms later. As a batch thread it gets as much time as before, but waits for the other to pause.
    """
    with suppress(AttributeError, OSError):  # not Linux; or forbidden, then it is slower
        os.sched_setscheduler(loop, os.SCHED_BATCH, os.sched_param(0))


def _new_listeners(before: set[int]) -> list[tuple[int, Descriptor]]:
    """Return each listening socket that was not there before, after the epoll instance that watches it."""
    return [
        (poller, target)
        for poller in sockets.pollers()
        for target in sockets.targets(poller)
        if target.inode not in before and sockets.is_listening(target)
    ]


def _new_loops(before: set[int]) -> list[int]:
    """Return the new threads; of several, those that say that they are gloo's, which takes a moment."""
    found = list(sockets.threads() - before)
    until = time.monotonic() + _SETTLED_S
    while len(found) > 1 and time.monotonic() < until:
        named = [t for t in found if sockets.thread_name(t) == "gloo_tcp_loop"]
        if named:
            return named
        time.sleep(0.0001)
    return found


def _create(hostname: str, interface: str) -> Any:
    chosen = {"interface": interface} if interface else {"hostname": hostname}
    try:
        # Lazy connections would be made in the middle of a step.
        return dist.ProcessGroupGloo.create_device(**chosen, lazy_init=False)
    except TypeError:  # torch before 2.8 connects eagerly always
        return dist.ProcessGroupGloo.create_device(**chosen)


class _LinkStore(Store):
    """What gloo publishes its addresses through: torch's store interface over our link."""

    def __init__(self, link: StoreLink) -> None:
        super().__init__()
        self._link = link

    def set(self, key: str, value: bytes | str) -> None:
        self._link.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._link.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._link.get(key)


class _GlooSession(Session):
    def __init__(self, backend: Any, device: _Device, attempt: Attempt) -> None:
        super().__init__(backend, attempt.rank, attempt.size)
        self._device: _Device | None = device
        self._clear = False

    def sever(self) -> None:
        device = self._device
        self._clear = device is None or device.cut()

    def is_severed(self) -> bool:
        return self._clear

    def at_rest(self) -> bool:
        # An operation whose message is half received or half sent when its connection goes is not told by
        # gloo, and sleeps until its timeout. Other groups' threads count too: then this takes longer.
        return sockets.supported() and sockets.threads_sleep("pt_gloo_runloop")

    def hush(self) -> None:
        if self._device is not None:
            self._device.hush()

    def free(self) -> None:
        # The device ends within 10 ms, and holds the GIL meanwhile unless the backend is the last to hold it.
        self._device = None
        super().free()

    def hidden_fds(self) -> list[int]:
        device = self._device
        return [] if device is None else device.fds()

    def process_group(self) -> dist.ProcessGroup:
        if self._group is None:
            kind = dist.ProcessGroup.BackendType.GLOO
            group = dist.ProcessGroup(HashStore(), self.rank, self.size)
            group._set_default_backend(kind)
            for device in ("cpu", "cuda"):
                group._register_backend(torch.device(device), kind, self.backend)
            self._group = group
        return self._group


class ProcessGroupGloo(ProcessGroup):
    """A reconfigurable gloo group.

    `interface` (a network interface) or `hostname` say where to listen for the peers; by default at the
    address from which the rendezvous store is reached, which is the loopback when the store is there.
    """

    def __init__(
        self,
        timeout: timedelta | float | None = None,
        *,
        timeout_s: float | None = None,
        hostname: str = "",
        interface: str = "",
    ) -> None:
        super().__init__(timeout, timeout_s=timeout_s)
        if hostname and interface:
            raise ConfigError("give a process group a hostname or an interface, not both")
        if not dist.is_gloo_available():
            raise ConfigError("this build of torch has no gloo")
        if not sockets.supported():
            log.warning("this system does not say which sockets are gloo's: an abort waits for its timeout")
        self._hostname = hostname
        self._interface = interface

    def _build(self, attempt: Attempt) -> Session:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self.timeout_s)
        if attempt.size == 1:
            device = _Device(_create(self._hostname or "127.0.0.1", self._interface), -1, None)
            store: Any = HashStore()
        else:
            attempt.meet()
            device = _make_device(self._hostname or attempt.link.local_host, self._interface)
            attempt.part_fds = device.fds
            attempt.cut_parts = lambda: _cut_unfinished(device, attempt.size)
            if attempt.given_up is not None:
                raise GroupError(attempt.given_up)
            store = _LinkStore(attempt.link)
        options._devices = [device.torch_device]
        backend = gloo(store, attempt.rank, attempt.size, options)
        sockets.close_on_exec(device.connections())
        return _GlooSession(backend, device, attempt)


def _cut_unfinished(device: _Device, size: int) -> None:
    device.cut()
    device.hang_up_on_ourselves(size)
