"""Give a launch an etcd of its own that lives exactly as long as the launch does."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ftkit.config_values import DEFAULT_PORT
from ftkit.errors import EtcdUnavailable
from ftkit.keeper.ports import is_free
from ftkit.launcher.process import Guardian

if TYPE_CHECKING:
    from ftkit.keeper.embedded import EtcdServer

_READY_S = 60.0


@contextlib.contextmanager
def embedded_etcd(guardian: Guardian) -> Iterator[str]:
    """Start an etcd, yield its URL, end it; the guardian does that should this process be killed.

    It takes etcd's usual port when that is free, so that `ftkit status` finds it without being told.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_sigterm_raises())
        folder = tempfile.mkdtemp(prefix="ftkit-etcd-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        guardian.tell(f"dir {folder}")
        server: EtcdServer | None = None
        if is_free(DEFAULT_PORT):
            with contextlib.suppress(EtcdUnavailable):  # somebody else may take the port at this moment
                server = _start(guardian, Path(folder) / "usual", DEFAULT_PORT)
        server = server or _start(guardian, Path(folder) / "data", 0)
        stack.callback(server.stop)
        yield server.url


def _start(guardian: Guardian, data_dir: Path, port: int) -> EtcdServer:
    """Start a server and wait until it answers; the guardian knows of it from the first moment."""
    from ftkit.keeper.embedded import EtcdServer  # imports grpc: only when it is needed

    server = EtcdServer(data_dir=data_dir, client_port=port)
    try:
        server.start(wait=False)
        assert server.process is not None
        guardian.tell(f"pid {server.process.pid}")
        deadline = time.monotonic() + _READY_S
        while not _healthy(server.url):
            if server.process.poll() is not None or time.monotonic() > deadline:
                server.wait_ready(0.0)  # says what is wrong
                break
            time.sleep(0.02)
    except BaseException:
        server.stop()
        raise
    return server


def _healthy(url: str) -> bool:
    """Ask over plain HTTP: a gRPC client would leave threads behind in a process that is about to fork."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return b'"true"' in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM unwind the stack, where by default it would end the process and leave etcd behind."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]  # nohup means it
    before = {n: signal.signal(n, _exit) for n in (signal.SIGTERM, *hangup)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
