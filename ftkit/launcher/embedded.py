"""Give a launch an etcd of its own that lives exactly as long as the launch does."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ftkit.config_values import DEFAULT_PORT
from ftkit.errors import EtcdUnavailable
from ftkit.launcher.ports import is_free
from ftkit.launcher.process import Guardian

if TYPE_CHECKING:
    from ftkit.keeper.embedded import EtcdServer


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
        server.wait_ready()
    except BaseException:
        server.stop()
        raise
    return server


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
