"""The keeper's process: take the post from standard input, say the port, keep the group until it is over.

Reads no environment and no command line: settings and secrets come as JSON on standard input, so that
`ps` shows nothing. Its standard output carries one line, `{"port": …}` or `{"error": …}`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator

import msgspec

from ftkit.config import Settings
from ftkit.errors import FtkitError, KeeperError
from ftkit.keeper.embedded import Embedded
from ftkit.keeper.etcd import Etcd
from ftkit.keeper.inbox import ParentDied
from ftkit.keeper.loop import Keeper
from ftkit.keeper.post import Answer, Post
from ftkit.keeper.settings import etcd_settings

log = logging.getLogger(__name__)


def main() -> int:
    """Run a keeper; return its exit code."""
    # Ctrl-C and `kill` are for the trainers: the keeper must outlive them by a moment, and tell etcd.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    post = msgspec.json.decode(sys.stdin.buffer.readline(), type=Post)
    logging.basicConfig(
        level=post.settings.keeper_log,
        format=f"%(asctime)s keeper of {post.settings.replica_id}: %(levelname)s: %(message)s",
    )
    with contextlib.ExitStack() as stack:
        try:
            settings = stack.enter_context(_reachable(post.settings))
            etcd = stack.enter_context(Etcd(etcd_settings(settings)))
            keeper = Keeper(post, etcd)
            if post.parent:
                _watch_parent(post.parent, keeper)
        except FtkitError as error:
            _answer(Answer(error=str(error), kind=type(error).__name__))
            return 1
        _answer(Answer(port=keeper.port))
        return keeper.run()


@contextlib.contextmanager
def _reachable(settings: Settings) -> Iterator[Settings]:
    """Start, or find, an etcd of this machine if `embedded` is asked for."""
    if not settings.embedded:
        yield settings
        return
    with Embedded() as embedded:
        yield settings.replace(etcd=",".join(embedded.endpoints))


def _answer(answer: Answer) -> None:
    """Say how the start went, and close standard output: whoever holds its other end may wait for that."""
    with contextlib.suppress(OSError):
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _watch_parent(pid: int, keeper: Keeper) -> None:
    """Tell the loop when the process that started the keeper has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise KeeperError("the process that started this keeper has ended already") from None
    except (OSError, AttributeError):
        return  # no pidfd here; the closing connections tell the same, once there are any

    def run() -> None:
        select.select([descriptor], [], [])
        keeper.post(ParentDied())

    threading.Thread(target=run, name="keeper parent", daemon=True).start()
