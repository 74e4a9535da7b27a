"""etcd as the keeper sees it: keys, ranges, transactions, leases.

Keys are strings, values are bytes. Thread-safe. Knows nothing of jobs and members, and of servers only
what `link` tells it: which of them answers is decided there.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple

from ftkit.errors import EtcdError, EtcdUnavailable
from ftkit.keeper.link import Compacted, LeaseLost, Link, rpc
from ftkit.keeper.settings import EtcdSettings

__all__ = [
    "KV",
    "Compacted",
    "Compare",
    "Delete",
    "DeletePrefix",
    "Etcd",
    "EtcdSettings",
    "EtcdStatus",
    "Get",
    "LeaseLost",
    "Listing",
    "Op",
    "OpResult",
    "Put",
    "TxnResult",
    "prefix_end",
]


class KV(NamedTuple):
    """A key with its value and where in etcd's history they come from."""

    key: str
    value: bytes
    mod_revision: int
    create_revision: int
    lease: int


Listing = tuple[list[KV], int]
"""The keys of a range, sorted, and the revision at which they were all there was."""


class Compare(NamedTuple):
    """One condition of a transaction; all must hold. A missing key has revisions and lease 0."""

    key: str
    target: Literal["mod", "create", "lease", "value"]
    is_: Literal["=", "!=", "<", ">"]
    operand: int | bytes


class Put(NamedTuple):
    """Write a key; with `lease`, it vanishes with that lease."""

    key: str
    value: bytes
    lease: int = 0


class Delete(NamedTuple):
    """Delete a key, if it exists."""

    key: str


class DeletePrefix(NamedTuple):
    """Delete all keys that begin so; with `end`, all in `[prefix, end)`."""

    prefix: str
    end: str = ""


class Get(NamedTuple):
    """Read a key."""

    key: str


Op = Put | Delete | DeletePrefix | Get


class OpResult(NamedTuple):
    """What one operation of a transaction did."""

    kvs: tuple[KV, ...] = ()
    num_deleted: int = 0


class TxnResult(NamedTuple):
    """Whether the compares held, the revision, and one result per operation of the branch taken."""

    succeeded: bool
    revision: int
    responses: tuple[OpResult, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EtcdStatus:
    """One server's own account of itself; `error` is set instead when it did not answer."""

    endpoint: str
    version: str = ""
    db_size: int = 0
    leader: int = 0
    member_id: int = 0
    cluster_id: int = 0
    revision: int = 0
    alarms: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_leader(self) -> bool:
        """Say whether this server leads the cluster."""
        return self.leader != 0 and self.leader == self.member_id


def prefix_end(prefix: str) -> str:
    """Return the first key after all those that begin with `prefix` (ASCII, not ending in DEL)."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


class Etcd:
    """A connection to etcd; a context manager. Constructing it does not connect."""

    def __init__(self, settings: EtcdSettings) -> None:
        self.settings = settings
        self.link = Link(settings)

    def __enter__(self) -> Etcd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in flight, of other threads too, end with EtcdUnavailable."""
        self.link.close()

    @property
    def heard(self) -> float:
        """Monotonic time of the last answer of any server; 0 when there was none."""
        return self.link.heard

    # -- reading -----------------------------------------------------------------------------------

    def get(self, key: str) -> KV | None:
        """Return a key, or None when it does not exist."""
        response = self._range(rpc.RangeRequest(key=key.encode()))
        return _kv(response.kvs[0]) if response.kvs else None

    def list(self, prefix: str) -> Listing:
        """Return all keys that begin with `prefix`, sorted, and the revision at which that was so."""
        return self.range(prefix, prefix_end(prefix))

    def range(self, start: str, end: str) -> Listing:
        """Return all keys in `[start, end)`, sorted, and the revision at which that was so."""
        response = self._range(rpc.RangeRequest(key=start.encode(), range_end=end.encode()))
        return [_kv(kv) for kv in response.kvs], int(response.header.revision)

    def newest(self, start: str, end: str, revision: int) -> KV | None:
        """Return the last changed key in `[start, end)` as of a past revision.

        Raises Compacted when etcd no longer has that revision, or has not reached it yet.
        """
        request = rpc.RangeRequest(
            key=start.encode(),
            range_end=end.encode(),
            revision=revision,
            limit=1,
            sort_target=rpc.RangeRequest.MOD,
            sort_order=rpc.RangeRequest.DESCEND,
        )
        response = self._range(request)
        return _kv(response.kvs[0]) if response.kvs else None

    def summary(self, start: str, end: str) -> tuple[int, KV | None, int]:
        """Return how many keys `[start, end)` has now, the last changed of them, and the revision."""
        request = rpc.RangeRequest(
            key=start.encode(),
            range_end=end.encode(),
            limit=1,
            sort_target=rpc.RangeRequest.MOD,
            sort_order=rpc.RangeRequest.DESCEND,
        )
        response = self._range(request)
        newest = _kv(response.kvs[0]) if response.kvs else None
        return int(response.count), newest, int(response.header.revision)

    def _range(self, request: Any) -> Any:
        return self.link.call(lambda client: client.kvstub.Range, request, repeatable=True)

    # -- writing -----------------------------------------------------------------------------------

    def txn(
        self,
        compare: Sequence[Compare],
        then: Sequence[Op],
        orelse: Sequence[Op] = (),
        *,
        timeout_s: float | None = None,
    ) -> TxnResult:
        """Carry out `then` if all compares hold, `orelse` if not, all at once.

        EtcdUnavailable may mean that it was carried out nevertheless: read again and decide anew.
        """
        request = rpc.TxnRequest(
            compare=[_compare(c) for c in compare],
            success=[_op(o) for o in then],
            failure=[_op(o) for o in orelse],
        )
        response = self.link.call(
            lambda client: client.kvstub.Txn, request, repeatable=not then and not orelse, timeout_s=timeout_s
        )
        return TxnResult(
            bool(response.succeeded),
            int(response.header.revision),
            tuple(_op_result(r) for r in response.responses),
        )

    def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write a key and return the revision. Repeated if in doubt, since writing twice does no harm."""
        request = rpc.PutRequest(key=key.encode(), value=value, lease=lease)
        response = self.link.call(lambda client: client.kvstub.Put, request, repeatable=True)
        return int(response.header.revision)

    def delete(self, key: str) -> bool:
        """Delete a key and say whether it was there."""
        request = rpc.DeleteRangeRequest(key=key.encode())
        return bool(
            self.link.call(lambda client: client.kvstub.DeleteRange, request, repeatable=True).deleted
        )

    def delete_prefix(self, prefix: str) -> int:
        """Delete all keys that begin with `prefix` and return how many there were."""
        request = rpc.DeleteRangeRequest(key=prefix.encode(), range_end=prefix_end(prefix).encode())
        return int(self.link.call(lambda client: client.kvstub.DeleteRange, request, repeatable=True).deleted)

    # -- leases ------------------------------------------------------------------------------------

    def grant(self, ttl_s: int) -> int:
        """Make a lease and return its id. Repeated if in doubt: a lease that nobody keeps runs out."""
        request = rpc.LeaseGrantRequest(TTL=ttl_s)
        return int(self.link.call(lambda client: client.leasestub.LeaseGrant, request, repeatable=True).ID)

    def keep_alive(self, lease: int, *, timeout_s: float | None = None) -> float:
        """Renew a lease and return the seconds it now has; 0 when it is lost."""
        request = rpc.LeaseKeepAliveRequest(ID=lease)
        response = self.link.call(_keep_alive_once, request, repeatable=True, timeout_s=timeout_s)
        return float(max(0, response.TTL))

    def time_to_live(self, lease: int) -> float:
        """Return the seconds that a lease still has, without renewing it; 0 when it is gone."""
        request = rpc.LeaseTimeToLiveRequest(ID=lease)
        response = self.link.call(lambda c: c.leasestub.LeaseTimeToLive, request, repeatable=True)
        return float(max(0, response.TTL))

    def revoke(self, lease: int, *, timeout_s: float | None = None) -> None:
        """Give a lease back; its keys vanish. One that is gone already is fine."""
        request = rpc.LeaseRevokeRequest(ID=lease)
        try:
            self.link.call(lambda c: c.leasestub.LeaseRevoke, request, repeatable=True, timeout_s=timeout_s)
        except LeaseLost:
            return

    # -- servers -----------------------------------------------------------------------------------

    def status(self) -> tuple[EtcdStatus, ...]:
        """Ask each server how it is, all at once; takes `timeout_s` at most, and 3 s."""
        endpoints = [str(e) for e in self.settings.parsed()]
        with concurrent.futures.ThreadPoolExecutor(len(endpoints)) as pool:
            return tuple(pool.map(lambda e: _status(self.settings, e), endpoints))

    def version(self) -> str:
        """Return the version of the server that the connection leads to."""
        response = self.link.call(lambda c: c.maintenancestub.Status, rpc.StatusRequest(), repeatable=True)
        return str(response.version)

    def compact(self, revision: int) -> None:
        """Drop the history before a revision."""
        request = rpc.CompactionRequest(revision=revision)
        self.link.call(lambda client: client.kvstub.Compact, request, repeatable=False)


def _keep_alive_once(client: Any) -> Any:
    """Return a call that opens a keep-alive stream for a single request."""

    def call(request: Any, timeout: float, metadata: Any) -> Any:
        stream = client.leasestub.LeaseKeepAlive(iter([request]), timeout=timeout, metadata=metadata)
        try:
            for response in stream:
                return response
        finally:
            stream.cancel()
        raise EtcdUnavailable("etcd ended the keep-alive without an answer")

    return call


def _status(settings: EtcdSettings, endpoint: str) -> EtcdStatus:
    """Ask one server over a connection of its own."""
    only = dataclasses.replace(settings, endpoints=(endpoint,), timeout_s=min(settings.timeout_s, 3.0))
    link = Link(only)
    deadline = time.monotonic() + only.timeout_s
    try:
        answer = link.call(
            lambda client: client.maintenancestub.Status,
            rpc.StatusRequest(),
            repeatable=False,
            timeout_s=only.timeout_s,
        )
        return EtcdStatus(
            endpoint=endpoint,
            version=answer.version,
            db_size=int(answer.dbSize),
            leader=int(answer.leader),
            member_id=int(answer.header.member_id),
            cluster_id=int(answer.header.cluster_id),
            revision=int(answer.header.revision),
            alarms=_alarms(link, deadline),
        )
    except EtcdError as error:
        return EtcdStatus(endpoint=endpoint, error=str(error))
    finally:
        link.close()


def _alarms(link: Link, deadline: float) -> tuple[str, ...]:
    """Return the cluster's alarms as `NOSPACE on <member>`; a cluster without a leader cannot tell."""
    request = rpc.AlarmRequest(action=rpc.AlarmRequest.GET, memberID=0, alarm=rpc.NONE)
    timeout_s = max(0.1, deadline - time.monotonic())
    try:
        answer = link.call(
            lambda client: client.maintenancestub.Alarm, request, repeatable=False, timeout_s=timeout_s
        )
    except EtcdError:
        return ()
    return tuple(f"{rpc.AlarmType.Name(a.alarm)} on {a.memberID:x}" for a in answer.alarms)


def _kv(kv: Any) -> KV:
    return KV(
        kv.key.decode(errors="replace"),
        bytes(kv.value),
        int(kv.mod_revision),
        int(kv.create_revision),
        int(kv.lease),
    )


_RESULT = {
    "=": rpc.Compare.EQUAL,
    "!=": rpc.Compare.NOT_EQUAL,
    "<": rpc.Compare.LESS,
    ">": rpc.Compare.GREATER,
}
_TARGET = {
    "mod": (rpc.Compare.MOD, "mod_revision"),
    "create": (rpc.Compare.CREATE, "create_revision"),
    "lease": (rpc.Compare.LEASE, "lease"),
    "value": (rpc.Compare.VALUE, "value"),
}


def _compare(compare: Compare) -> Any:
    target, field = _TARGET[compare.target]
    return rpc.Compare(
        key=compare.key.encode(), result=_RESULT[compare.is_], target=target, **{field: compare.operand}
    )


def _op(op: Op) -> Any:
    if isinstance(op, Put):
        put = rpc.PutRequest(key=op.key.encode(), value=op.value, lease=op.lease)
        return rpc.RequestOp(request_put=put)
    if isinstance(op, Delete):
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=op.key.encode()))
    if isinstance(op, DeletePrefix):
        end = op.end or prefix_end(op.prefix)
        delete = rpc.DeleteRangeRequest(key=op.prefix.encode(), range_end=end.encode())
        return rpc.RequestOp(request_delete_range=delete)
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=op.key.encode()))


def _op_result(response: Any) -> OpResult:
    kvs: Iterable[Any] = response.response_range.kvs
    return OpResult(tuple(_kv(kv) for kv in kvs), int(response.response_delete_range.deleted))
