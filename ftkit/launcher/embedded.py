"""Give a launch an etcd of its own that lives exactly as long as the launch does."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from ftkit.launcher.process import Guardian


@contextlib.contextmanager
def embedded_etcd(guardian: Guardian) -> Iterator[str]:
    """Start an etcd, yield its URL, end it; the guardian does that should this process be killed."""
    from ftkit.keeper.embedded import EtcdServer  # imports grpc: only when it is needed

    with contextlib.ExitStack() as stack:
        stack.enter_context(_sigterm_raises())
        folder = tempfile.mkdtemp(prefix="ftkit-etcd-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        guardian.tell(f"dir {folder}")
        server = EtcdServer(data_dir=Path(folder) / "data")
        stack.callback(server.stop)
        server.start(wait=False)
        if server.process is not None:
            guardian.tell(f"pid {server.process.pid}")
        server.wait_ready()
        yield server.url


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
