"""The etcd of a job that is broken on purpose: one server or three, and every harm that is done to them.

It carries out and takes back; when and how long is the caller's.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import tenacity

from ftkit.chaos.kinds import OF_THREE
from ftkit.errors import ConfigError, EtcdError, EtcdNoSpace, EtcdUnavailable, FtkitError
from ftkit.keeper.embedded import EtcdCluster, EtcdServer, find_etcd
from ftkit.keeper.etcd import Etcd, EtcdSettings, EtcdStatus
from ftkit.keeper.keys import JobKeys

USER = "trainer"
PASSWORD = "chaos"
QUOTA = 16_000_000
"""Bytes that the database may have: little, so that it can be filled."""
_FILLER = "/filler/"
_PIECE = 250_000
_PIECES = 2 * QUOTA // _PIECE
_COUNTED_S = 0.2
_LAST_PIECES = 10
"""More pieces, with time for etcd to count between them, if it has not refused twice its quota."""

Undo = Callable[[], None]


class Servers:
    """One etcd server, or three that form a cluster, on this machine."""

    def __init__(self, folder: Path, job: str, *, num: int = 1, auth: bool = False) -> None:
        """Start nothing yet; with `auth` whoever connects has to prove a password, whose token runs out."""
        if num not in (1, 3):
            raise ConfigError(f"etcd runs on one or three servers here, not {num}")
        if auth and not etcdctl_path().is_file():
            raise ConfigError(f"authentication is switched on with etcdctl, and there is no {etcdctl_path()}")
        self._keys = JobKeys(job)
        self._auth = auth
        extra = (f"--quota-backend-bytes={QUOTA}", "--auth-token-ttl=2")
        if num == 1:
            self.servers = [EtcdServer(data_dir=folder / "m0", extra=extra)]
        else:
            self.servers = EtcdCluster(folder, num, extra=extra).servers

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all servers."""
        return tuple(s.url for s in self.servers)

    @property
    def user(self) -> str:
        """What FTKIT_ETCD_USER has to be; empty without authentication."""
        return f"{USER}:{PASSWORD}" if self._auth else ""

    def start(self) -> None:
        """Start all servers and wait until they answer."""
        self._start_all()
        for server in self.servers:
            server.wait_ready()
        if self._auth:
            self._enable_auth()

    def stop(self) -> None:
        """End all servers."""
        for server in self.servers:
            server.kill()

    def client(self, *, root: bool = False) -> Etcd:
        """Return a connection to all servers."""
        user, password = (("root" if root else USER), PASSWORD) if self._auth else ("", "")
        return Etcd(EtcdSettings(endpoints=self.urls, user=user, password=password, timeout_s=3.0))

    def answers(self) -> bool:
        """Say whether etcd has a leader and answers."""
        try:
            with self.client() as client:
                client.get(self._keys.epoch)
        except EtcdError:
            return False
        return True

    def db_bytes(self) -> int:
        """Return the size of the largest database, as the servers tell; 0 when none does."""
        with self.client() as client:
            return max((s.db_size for s in client.status()), default=0)

    # -- harm ------------------------------------------------------------------------------------------

    def strike(self, kind: str, chance: float) -> Undo | None:
        """Do harm of a kind; return what takes it back, None when nothing is left to take back."""
        if kind in OF_THREE:
            victims = self._victims(kind, chance)
            for server in victims:
                server.kill()
            return lambda: _start(victims)
        if kind in ("etcd-kill", "etcd-restart", "etcd-wipe"):
            for server in self.servers:
                {"etcd-kill": server.kill, "etcd-restart": server.stop, "etcd-wipe": server.wipe}[kind]()
            return self._start_all
        if kind == "etcd-freeze":
            for server in self.servers:
                server.freeze()
            return self._thaw_all
        if kind == "etcd-full":
            self._fill()
            return self._make_room
        # What may find etcd away, after another fault, is then nothing.
        with contextlib.suppress(FtkitError):
            if kind == "etcd-compact":
                with self.client(root=True) as client:
                    client.compact(client.list(self._keys.prefix)[1])
            elif kind == "etcd-expire-token":
                self._ctl("user", "passwd", USER, "--interactive=false", text=PASSWORD)
            elif kind == "revoke-all":
                self._revoke_all()
        return None

    def _start_all(self) -> None:
        _start(self.servers)

    def _thaw_all(self) -> None:
        for server in self.servers:
            server.thaw()

    def _victims(self, kind: str, chance: float) -> list[EtcdServer]:
        if len(self.servers) < 3:
            raise ConfigError(f"{kind} needs three etcd servers")
        if kind == "etcd-lose-leader":
            return [s for s, status in self._status() if status.is_leader]
        return random.Random(chance).sample(self.servers, 1 if kind == "etcd-lose-one" else 2)

    def _status(self) -> list[tuple[EtcdServer, EtcdStatus]]:
        with self.client() as client:
            return list(zip(self.servers, client.status(), strict=True))

    def _revoke_all(self) -> None:
        with self.client(root=True) as client:
            for member in client.list(self._keys.members)[0]:
                if member.lease:
                    client.revoke(member.lease)

    def _fill(self) -> None:
        """Write until etcd refuses; what a busy server does not get done in time is tried no more.

        It counts what it has only at its next commit, and takes all that comes until then.
        """
        with contextlib.suppress(EtcdNoSpace), self.client(root=True) as client:
            for number in range(_PIECES + _LAST_PIECES):
                if number >= _PIECES:
                    time.sleep(_COUNTED_S)
                with contextlib.suppress(EtcdUnavailable):
                    client.put(f"{_FILLER}{number}", os.urandom(_PIECE))

    def _make_room(self) -> None:
        """Do what the error message advises, until it has succeeded: compact, defragment, disarm."""
        for attempt in tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(EtcdError),
            stop=tenacity.stop_after_delay(60.0),
            wait=tenacity.wait_fixed(0.2),
            reraise=True,
        ):
            with attempt:
                with self.client(root=True) as client:
                    client.delete_prefix(_FILLER)
                    client.compact(client.list(_FILLER)[1])
                for server in self.servers:
                    self._ctl("defrag", server=server)
                self._ctl("alarm", "disarm")

    # -- etcdctl ---------------------------------------------------------------------------------------

    def _ctl(self, *words: str, server: EtcdServer | None = None, text: str = "", auth: bool = True) -> None:
        """Run etcdctl; passwords go through its environment and its input, not through its arguments."""
        urls = self.urls if server is None else (server.url,)
        env = {"ETCDCTL_API": "3"}
        if self._auth and auth:
            env["ETCDCTL_USER"] = f"root:{PASSWORD}"
        command = [str(etcdctl_path()), f"--endpoints={','.join(urls)}", "--command-timeout=10s", *words]
        done = subprocess.run(command, input=text.encode(), env=env, capture_output=True, check=False)
        if done.returncode != 0:
            raise EtcdError(f"etcdctl {' '.join(words)}: {done.stderr.decode(errors='replace').strip()}")

    def _enable_auth(self) -> None:
        for user in ("root", USER):
            self._ctl("user", "add", user, "--interactive=false", text=PASSWORD, auth=False)
        self._ctl("role", "add", USER, auth=False)
        self._ctl(
            "role", "grant-permission", USER, "--prefix=true", "readwrite", self._keys.prefix, auth=False
        )
        self._ctl("user", "grant-role", "root", "root", auth=False)
        self._ctl("user", "grant-role", USER, USER, auth=False)
        self._ctl("auth", "enable", auth=False)


def impossible(kind: str, *, num: int, auth: bool) -> str:
    """Say why a kind of fault cannot be done to such an etcd; empty when it can."""
    if kind in OF_THREE and num < 3:
        return f"{kind} needs three etcd servers (--etcd-servers 3)"
    if kind == "etcd-expire-token" and not auth:
        return f"{kind} needs an etcd that asks for passwords (--etcd-auth)"
    if kind == "etcd-wipe" and auth:
        return f"{kind} would delete the users of an etcd that asks for passwords"
    if kind == "etcd-full" and not etcdctl_path().is_file():
        return f"{kind} is taken back with etcdctl, and there is no {etcdctl_path()}"
    return ""


def etcdctl_path() -> Path:
    """Return where etcdctl should be: beside etcd."""
    return find_etcd().with_name("etcdctl")


def _start(servers: list[EtcdServer]) -> None:
    for server in servers:
        server.start(wait=False)
