"""Which machines do not answer; told by real sockets."""

from __future__ import annotations

import contextlib
import socket
import time

from ftkit.groups.reach import unreachable


def test_only_silence_counts_as_unreachable() -> None:
    """A full queue of callers looks like a machine that is gone: nobody answers a new one."""
    with contextlib.ExitStack() as stack:
        heard = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(4):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(silent.getsockname())
        with socket.create_server(("127.0.0.1", 0)) as closed:
            refused = closed.getsockname()[1]
        addresses = {
            "heard": f"127.0.0.1:{heard.getsockname()[1]}#key",
            "silent": f"127.0.0.1:{silent.getsockname()[1]}",
            "refused": f"127.0.0.1:{refused}",
            "nonsense": "nowhere",
        }
        assert unreachable(addresses, 0.3) == ("silent",)


def test_nobody_is_waited_for_when_all_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        begun = time.monotonic()
        assert unreachable({"a": f"127.0.0.1:{server.getsockname()[1]}"}, 30.0) == ()
        assert time.monotonic() - begun < 10.0
