"""How many bytes a source sends where one could send more: views of one tensor, several joiners at once.

All in one process: bytes do not depend on who waits for whom. Counted are those of the state and of the
manifest; heads and checksums are a few hundred more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ftkit.bench.processes import Row
from transport import DistributedTransport, HTTPTransport, Progress, Transport, encode
from transport.manifest import dump

VIEWS: Final = 1000
JOINERS: Final = 4
JOINERS_MIB: Final = 64
LIMIT_S: Final = 120.0


def measure_bytes() -> list[Row]:
    """Return one row for each thing that is moved: what a source sent, in bytes and in sizes of the state."""
    return [_views("http"), _views("gloo"), _joiners()]


def _row(what: str, method: str, sent: int, size: int) -> Row:
    return {"what": what, "method": method, "sent_bytes": sent, "sent_sizes": round(sent / size, 4)}


def _fetch(
    transport: Transport, sources: Sequence[str], into: object, joiners: Sequence[str] = ()
) -> Callable[[str], int]:
    """Fetch; return how many bytes came from an address."""
    seen: list[Progress] = []
    transport.fetch(sources, "v", into, deadline_s=LIMIT_S, progress=seen.append, joiners=joiners)
    received = {source.address: source.bytes_received for source in seen[-1].sources}
    return lambda address: received[address]


def _views(method: str) -> Row:
    flat = torch.rand(1_000_000)
    views = [flat[i * 100 : i * 100 + 900_000] for i in range(VIEWS)]
    ends: list[HTTPTransport | DistributedTransport] = [_transport() for _ in range(2)]
    if method == "gloo":
        ends = [
            DistributedTransport(end, timeout_s=LIMIT_S) for end in ends if isinstance(end, HTTPTransport)
        ]
        store = HashStore()
        _in_threads([partial(_join, end, rank, store) for rank, end in enumerate(ends)])
    source, receiver = ends
    try:
        source.publish("v", views)
        sent = _fetch(receiver, [source.address], None)(source.address)
    finally:
        for end in ends:
            end.close()
    manifest = len(dump(encode(views, version="v").manifest))
    return _row(f"4 MB in {VIEWS} views of one tensor", method, sent + manifest, flat.nbytes)


def _transport() -> HTTPTransport:
    return HTTPTransport(token="bench", chunk_bytes=1 << 20, same_host=False)


def _join(transport: object, rank: int, store: HashStore) -> None:
    assert isinstance(transport, DistributedTransport)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=LIMIT_S)
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    transport.configure(gloo(store, rank, 2, options), "bench")


def _in_threads(works: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)


def _joiners() -> Row:
    size = JOINERS_MIB << 20
    source, joiners = _transport(), [_transport() for _ in range(JOINERS)]
    addresses = [joiner.address for joiner in joiners]
    sent: list[int] = []

    def fetch(joiner: HTTPTransport) -> None:
        into = {"w": torch.zeros(size, dtype=torch.uint8)}
        sent.append(_fetch(joiner, [source.address], into, addresses)(source.address))

    try:
        source.publish("v", {"w": torch.randint(0, 256, (size,), dtype=torch.uint8)})
        _in_threads([partial(fetch, joiner) for joiner in joiners])
    finally:
        for end in (source, *joiners):
            end.close()
    if len(sent) != JOINERS:
        raise RuntimeError("a joiner failed")
    return _row(f"{JOINERS} joiners of {JOINERS_MIB} MiB from 1 source", "http", sum(sent), size)
