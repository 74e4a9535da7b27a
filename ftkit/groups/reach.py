"""Find out which machines do not answer at all, when a group could not be formed.

A refused connection is an answer: the machine is there, whatever became of the process. Nothing is sent.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack

from ftkit.errors import ConfigError
from ftkit.groups.store import split_address

MOST = 128
"""So many at once: if all members of a large job asked all others, that would be a storm."""

_SILENT = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ETIMEDOUT}


def unreachable(addresses: Mapping[str, str], timeout_s: float) -> tuple[str, ...]:
    """Return the names, sorted, whose address (host:port) does not answer within `timeout_s`.

    An address whose host is unknown is not judged; of more than `MOST` only the first are tried.
    """
    silent = []
    with ExitStack() as stack:
        poll = select.poll()
        waiting: dict[int, tuple[str, socket.socket]] = {}
        for name in sorted(addresses)[:MOST]:
            try:
                host, port = split_address(addresses[name])
                family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                sock = stack.enter_context(socket.socket(family, kind, protocol))
            except (OSError, ConfigError):
                continue
            sock.setblocking(False)
            code = sock.connect_ex(where)
            if code == errno.EINPROGRESS:
                poll.register(sock, select.POLLOUT)
                waiting[sock.fileno()] = (name, sock)
            elif code in _SILENT:
                silent.append(name)
        until = time.monotonic() + timeout_s
        while waiting and (left := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                poll.unregister(fd)
                name, sock = waiting.pop(fd)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _SILENT:
                    silent.append(name)
        silent += [name for name, _ in waiting.values()]
    return tuple(sorted(silent))
