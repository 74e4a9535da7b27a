"""Bring a rank into the job: its store, its transport, its keeper, and the other ranks of its group.

It ends when the group is a member of the job; what happens from then on is the step's affair.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable

import msgspec
from torch.distributed.rendezvous import rendezvous

from ftkit.config import Settings, agent_store, restart_count
from ftkit.core.model import Epoch
from ftkit.errors import ConfigError, EtcdUnavailable, KeeperError, Left
from ftkit.groups.store import RendezvousStore
from ftkit.keeper.client import KeeperAddress, KeeperClient
from ftkit.keeper.messages import Hello, Welcome
from ftkit.runtime.inbox import Inbox
from ftkit.runtime.state import StateRegistry, fingerprint

logger = logging.getLogger(__name__)


class Bootstrap:
    """What a rank has to set up once, before its first epoch."""

    def __init__(
        self,
        settings: Settings,
        inbox: Inbox,
        state: StateRegistry,
        *,
        transport_address: str,
        user_data: dict[str, str],
        running: Callable[[], Epoch | None],
    ) -> None:
        """Start the keeper (group rank 0), or find it; the job is joined later, by `join`."""
        self._settings = settings
        self._inbox = inbox
        self._state = state
        self._transport_address = transport_address
        self._user_data = user_data
        self._running = running
        self.store: RendezvousStore | None = None
        self.group_store = ""
        """host:port of the rendezvous store of group rank 0."""
        self._group_store: object = None  # kept alive: rank 0 serves it
        incarnation = uuid.uuid4().hex
        if settings.group_rank == 0:
            self.store = RendezvousStore(settings.bind, settings.advertise)
            self.group_store = self.store.address
        self.keeper = KeeperClient(
            settings,
            rank=settings.group_rank,
            incarnation=incarnation,
            hello=self._hello,
            on_message=inbox.deliver,
            on_lost=inbox.fail,
        )
        self._address = self.keeper.start() if settings.group_rank == 0 else None
        if settings.group_world_size > 1:
            self._address = self._share(self._address)
        self._joined = False

    def _share(self, address: KeeperAddress | None) -> KeeperAddress:
        """Let all ranks of the group know where its keeper and its store are, over torchrun's store."""
        settings = self._settings
        if settings.master_addr is None or settings.master_port is None:
            raise ConfigError(
                f"a replica group of {settings.group_world_size} ranks needs MASTER_ADDR and MASTER_PORT: "
                "start it with torchrun, or with `ftkit launch --nproc-per-group`"
            )
        url = f"tcp://{settings.master_addr}:{settings.master_port}"
        if agent_store():
            url = "env://"
        found = rendezvous(url, settings.group_rank, settings.group_world_size)
        store, _, _ = next(found)
        self._group_store = store
        key = f"ftkit/{settings.job}/{restart_count()}"
        if address is not None:
            store.set(f"{key}/store", self.group_store)
            store.set(f"{key}/keeper", msgspec.json.encode(address).decode())
            return address
        self.group_store = store.get(f"{key}/store").decode()
        return msgspec.json.decode(store.get(f"{key}/keeper"), type=KeeperAddress)

    def _hello(self) -> Hello:
        settings = self._settings
        first = settings.group_rank == 0
        layout = self._state.layout() if first else ()
        return Hello(
            rank=settings.group_rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            transport=self._transport_address,
            rendezvous="" if self.store is None else self.store.address,
            fingerprint=fingerprint(layout),
            layout=layout,
            user_data=self._user_data,
            running=self._running(),
        )

    def join(self, interrupted: Callable[[], bool]) -> Welcome:
        """Become a member of the job, unless `interrupted` meanwhile; costs nothing the second time.

        Raises:
            Left: interrupted; a SystemExit with code 0.
            FtkitError: the keeper's refusal: a name in use, another model, settings that differ …
            EtcdUnavailable: etcd did not answer within `timeout`.
        """
        if not self._joined:
            assert self._address is not None, "started, or told by rank 0"
            self.keeper.connect(self._address)
            self._joined = True
        welcome = self._inbox.wait_welcome(self._settings.timeout, interrupted)
        if welcome is None and interrupted():
            raise Left("asked to leave before it had joined the job")
        if welcome is None:
            raise EtcdUnavailable(
                f"could not join job {self._settings.job!r} within {self._settings.timeout:g} s (timeout): "
                f"waiting for {self._inbox.waiting}; etcd is expected at {', '.join(self._settings.etcd)}"
            )
        return welcome

    def close(self) -> None:
        """End the keeper's connection and the store."""
        try:
            self.keeper.close()
        except KeeperError as error:
            logger.debug("the keeper had ended already: %s", error)
        if self.store is not None:
            self.store.close()
