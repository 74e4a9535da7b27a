"""Put an operator's request to a replica group and wait until its keeper has taken note of it."""

from __future__ import annotations

import argparse
import getpass
import json
import socket
import time
from typing import TYPE_CHECKING

from ftkit.cli.connect import add_connection, add_json, open_etcd, settle
from ftkit.core.model import Control, Record
from ftkit.dashboard.job import decode
from ftkit.errors import ConfigError, EtcdUnavailable, FtkitError
from ftkit.keeper.keys import JobKeys, encode

if TYPE_CHECKING:
    from ftkit.keeper.etcd import Etcd

_LOOK_AGAIN_S = 0.1


class RequestError(FtkitError):
    """The replica group is unknown, or did not take note of the request in time."""


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that all requests share."""
    parser.add_argument("replica", help="the replica group's id, e.g. trainer-1 (see ftkit status)")
    parser.add_argument(
        *("--timeout",),
        dest="wait_s",
        type=float,
        default=30.0,
        metavar="S",
        help="how long to wait for the answer; without one the request is withdrawn (default: 30)",
    )
    parser.add_argument("--wait", action="store_true", help="wait also until the group has left the job")
    add_json(parser)
    add_connection(parser)


def request(args: argparse.Namespace, what: str) -> int:
    """Put the request, wait, and tell what became of it."""
    if args.wait_s <= 0:
        raise ConfigError(f"--timeout must be greater than 0 seconds, got {args.wait_s:g}")
    settings = settle(args)
    began = time.monotonic()
    with open_etcd(settings) as etcd:
        asked = Request(etcd, settings.job, what, args.replica)
        record = asked.put()
        outcome = asked.wait(args.wait_s, left=args.wait)
    took_s = time.monotonic() - began
    if args.json:
        answer = {
            "request": what,
            "replica_id": args.replica,
            "outcome": outcome,
            "seconds": round(took_s, 3),
        }
        print(json.dumps({**answer, "incarnation": record.incarnation}))
    else:
        texts = {
            "acknowledged": f"{args.replica} has taken note: {what}",
            "left": f"{args.replica} has left the job",
        }
        print(f"{texts[outcome]} (after {took_s:.1f} s)")
    return 0


class Request:
    """One request to one replica group."""

    def __init__(self, etcd: Etcd, job: str, what: str, replica_id: str) -> None:
        self._etcd = etcd
        self._what = what
        self._replica_id = replica_id
        self._job = job
        keys = JobKeys(job)
        self._members = keys.members
        self._member = keys.member_of(replica_id)
        self._key = keys.control_of(what, replica_id)
        self._incarnation = ""

    def put(self) -> Record:
        """Write the request, if the replica group is live; raise RequestError otherwise."""
        from ftkit.keeper.etcd import Compare, Put

        found = self._etcd.get(self._member)
        record = None if found is None else decode(found.value, Record)
        if found is None or record is None:
            raise self._unknown()
        if isinstance(record, str):
            raise RequestError(f"the record of {self._replica_id} cannot be read: {record}")
        self._incarnation = record.incarnation
        by = f"{_user()}@{socket.gethostname()}"
        control = Control(what=self._what, replica_id=self._replica_id, by=by, time=time.time())
        # Only for the incarnation that was seen: its successor must not find a request it was not meant by.
        same = Compare(found.key, "mod", "=", found.mod_revision)
        if not self._etcd.txn([same], [Put(self._key, encode(control))]).succeeded:
            raise RequestError(
                f"{self._replica_id} changed at this moment; look at ftkit status and try again"
            )
        return record

    def wait(self, wait_s: float, *, left: bool) -> str:
        """Wait for the answer and return `acknowledged` or `left`; withdraw the request if none comes."""
        deadline = time.monotonic() + wait_s
        try:
            return self._wait(deadline, wait_s, left)
        except KeyboardInterrupt:
            self._withdraw()
            raise

    def _wait(self, deadline: float, wait_s: float, left: bool) -> str:
        noted = False
        while True:
            try:
                if self._gone():
                    self._withdraw()
                    return "left"
                noted = noted or self._etcd.get(self._key) is None
                if noted and not left:
                    return "acknowledged"
            except EtcdUnavailable:
                if time.monotonic() >= deadline:
                    raise
            if time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_AGAIN_S)
        if noted:
            raise RequestError(
                f"{self._replica_id} took note of {self._what} but has not left within {wait_s:g} s; "
                "it leaves at its next step boundary (see ftkit status)"
            )
        self._withdraw()
        raise RequestError(
            f"{self._replica_id} did not take note of {self._what} within {wait_s:g} s. "
            "The request is withdrawn. Its keeper may be cut off from etcd (see ftkit status); "
            "or give it longer with --timeout"
        )

    def _gone(self) -> bool:
        found = self._etcd.get(self._member)
        record = None if found is None else decode(found.value, Record)
        return record is None or (isinstance(record, Record) and record.incarnation != self._incarnation)

    def _withdraw(self) -> None:
        """Take the request back: left standing it would hit the group's next incarnation."""
        self._etcd.delete(self._key)

    def _unknown(self) -> RequestError:
        keys, _ = self._etcd.list(self._members)
        names = [kv.key.removeprefix(self._members) for kv in keys]
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        there = f"live are: {shown}" if names else "no replica group is live"
        return RequestError(f"job {self._job} has no live replica group {self._replica_id}; {there}")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user may have no name
        return "unknown"
