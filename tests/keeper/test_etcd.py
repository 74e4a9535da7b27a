"""The adapter against real servers: values, transactions, leases, credentials, certificates, failover."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftkit.errors import ConfigError, EtcdAuthError, EtcdError, EtcdUnavailable
from ftkit.keeper.embedded import EtcdCluster, EtcdServer, free_ports
from ftkit.keeper.etcd import (
    KV,
    Compare,
    Delete,
    DeletePrefix,
    Etcd,
    EtcdSettings,
    Get,
    LeaseLost,
    Put,
    prefix_end,
)
from tests.keeper.conftest import server_of


@pytest.fixture
def etcd(etcd_url: str) -> Iterator[Etcd]:
    with Etcd(EtcdSettings(endpoints=(etcd_url,))) as etcd:
        yield etcd


def test_what_is_put_can_be_read_listed_and_deleted(etcd: Etcd, job: str):
    first = etcd.put(f"/{job}/a", b"\x00\xff")
    etcd.put(f"/{job}/b", b"2")
    kv = etcd.get(f"/{job}/a")
    assert kv == KV(f"/{job}/a", b"\x00\xff", first, first, 0)
    kvs, revision = etcd.list(f"/{job}/")
    assert [k.value for k in kvs] == [b"\x00\xff", b"2"]
    assert revision >= kvs[1].mod_revision
    assert etcd.delete(f"/{job}/a")
    assert not etcd.delete(f"/{job}/a")
    assert etcd.get(f"/{job}/a") is None


def test_a_transaction_takes_the_branch_that_its_compares_allow(etcd: Etcd, job: str):
    key = f"/{job}/k"
    made = etcd.txn([Compare(key, "mod", "=", 0)], [Put(key, b"1")], [Get(key)])
    assert made.succeeded
    again = etcd.txn([Compare(key, "create", "=", 0)], [Put(key, b"2")], [Get(key)])
    assert not again.succeeded
    assert again.responses[0].kvs[0].mod_revision == made.revision
    both = etcd.txn(
        [Compare(key, "value", "=", b"1"), Compare(key, "mod", "<", made.revision + 1)],
        [Delete(key), DeletePrefix(f"/{job}/old/"), Put(f"/{job}/new", b"")],
    )
    assert both.succeeded
    assert [r.num_deleted for r in both.responses] == [1, 0, 0]


def test_only_one_of_many_proposers_wins(etcd: Etcd, job: str):
    """I2 rests on this compare alone."""
    key, wins = f"/{job}/epoch", []

    def propose(i: int) -> None:
        if etcd.txn([Compare(key, "mod", "=", 0)], [Put(key, b"%d" % i)]).succeeded:
            wins.append(i)

    threads = [threading.Thread(target=propose, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    kv = etcd.get(key)
    assert kv is not None
    assert [b"%d" % i for i in wins] == [kv.value]


def test_a_lease_binds_keys_and_its_loss_is_said(etcd: Etcd, job: str):
    lease = etcd.grant(5)
    etcd.put(f"/{job}/k", b"", lease)
    assert etcd.keep_alive(lease) == 5
    assert 0 < etcd.time_to_live(lease) <= 5
    assert etcd.txn([Compare(f"/{job}/k", "lease", "=", lease)], []).succeeded
    etcd.revoke(lease)
    etcd.revoke(lease)
    assert etcd.get(f"/{job}/k") is None
    assert etcd.keep_alive(lease) == 0
    with pytest.raises(LeaseLost):
        etcd.put(f"/{job}/k", b"", lease)


def test_ten_thousand_members_can_be_listed(etcd: Etcd, job: str):
    """The answer is larger than gRPC's default limit of 4 MB."""
    value = b"v" * 5000
    for start in range(0, 1000, 100):
        etcd.txn([], [Put(f"/{job}/{i:05d}", value) for i in range(start, start + 100)])
    kvs, _ = etcd.list(f"/{job}/")
    assert len(kvs) == 1000
    etcd.delete_prefix(f"/{job}/")


def test_status_tells_of_each_server_also_of_one_that_is_away(etcd_url: str):
    away = f"http://127.0.0.1:{free_ports(1)[0]}"
    with Etcd(EtcdSettings(endpoints=(etcd_url, away), timeout_s=0.5)) as etcd:
        up, down = etcd.status()
    assert up.is_leader
    assert up.version.startswith("3.")
    assert not up.error
    assert away in down.error


def test_nobody_there_is_an_error_that_names_the_endpoint():
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with Etcd(EtcdSettings(endpoints=(url,), timeout_s=0.3)) as etcd:
        with pytest.raises(EtcdUnavailable, match=url):
            etcd.get("/x")
        with pytest.raises(EtcdUnavailable, match=url):
            etcd.txn([], [Put("/x", b"")])


def test_a_closed_connection_refuses_and_frees_who_waits(etcd_url: str):
    etcd = Etcd(EtcdSettings(endpoints=(etcd_url,)))
    etcd.get("/x")
    etcd.close()
    with pytest.raises(EtcdUnavailable, match="closed"):
        etcd.get("/x")


def test_a_password_is_in_no_message():
    settings = EtcdSettings(endpoints=("http://h",), user="u", password="secret")
    assert "secret" not in repr(settings)
    with pytest.raises(ConfigError) as caught:
        EtcdSettings(endpoints=("http://u:secret@h",))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoints": ()},
        {"endpoints": ("http://a", "https://b")},
        {"endpoints": ("ftp://a",)},
        {"endpoints": ("http://a:b",)},
        {"endpoints": ("http://a",), "cert": "c"},
        {"endpoints": ("http://a",), "user": "u"},
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong):
    with pytest.raises(ConfigError):
        EtcdSettings(**wrong)


def test_ends_of_prefixes():
    assert prefix_end("/a/") == "/a0"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


class TestFailover:
    """Three servers; some of them die or freeze."""

    @pytest.mark.parametrize("how", ["kill", "freeze"])
    def test_a_put_goes_on_when_a_server_is_lost(self, cluster: EtcdCluster, how: str, job: str):
        """A frozen server is worse than a dead one: its connections stay open and silent."""
        for server in cluster.servers:
            if server.process is None:
                server.start()
        with Etcd(EtcdSettings(endpoints=cluster.endpoints, timeout_s=10.0)) as etcd:
            etcd.put(f"/{job}/k", b"0")
            status = etcd.status()
            lost = server_of(etcd, cluster)
            leads = status[cluster.servers.index(lost)].is_leader
            getattr(lost, how)()
            begun = time.monotonic()
            etcd.put(f"/{job}/k", b"1")
            took = time.monotonic() - begun
            kv = etcd.get(f"/{job}/k")
            assert kv is not None
            assert kv.value == b"1"
            # If it was the leader, an election comes on top.
            assert took < (9.0 if leads else 5.0)
            if how == "freeze":
                lost.thaw()

    def test_all_keep_working_after_all_servers_have_taken_turns(self, cluster: EtcdCluster, job: str):
        for server in cluster.servers:
            if server.process is None:
                server.start()
        with Etcd(EtcdSettings(endpoints=cluster.endpoints, timeout_s=10.0)) as etcd:
            lease = etcd.grant(30)
            for _ in range(3):
                server = server_of(etcd, cluster)
                server.kill()
                etcd.put(f"/{job}/k", server.name.encode())
                assert etcd.keep_alive(lease) > 0
                server.start()


class TestCredentials:
    """etcd with users, whose tokens run out after a second."""

    def settings(self, auth_server: EtcdServer, user: str = "me", password: str = "pw") -> EtcdSettings:
        return EtcdSettings(endpoints=(auth_server.url,), user=user, password=password)

    def test_a_token_that_has_run_out_is_renewed(self, auth_server: EtcdServer):
        """Simple tokens live five minutes by default; training lives longer."""
        with Etcd(self.settings(auth_server)) as etcd:
            etcd.put("/ftkit/x", b"1")
            token = etcd.link._token
            deadline = time.monotonic() + 10
            while etcd.link._token == token:
                assert time.monotonic() < deadline
                threading.Event().wait(1.2)  # a request would renew the token's life
                assert etcd.txn([], [Put("/ftkit/x", b"2")]).succeeded

    def test_a_wrong_password_is_said(self, auth_server: EtcdServer):
        with (
            Etcd(self.settings(auth_server, password="no")) as etcd,
            pytest.raises(EtcdAuthError, match="password"),
        ):
            etcd.get("/ftkit/x")

    def test_no_user_is_said(self, auth_server: EtcdServer):
        with (
            Etcd(EtcdSettings(endpoints=(auth_server.url,))) as etcd,
            pytest.raises(EtcdAuthError, match="FTKIT_ETCD_USER"),
        ):
            etcd.get("/ftkit/x")

    def test_a_missing_permission_is_said(self, auth_server: EtcdServer):
        with Etcd(self.settings(auth_server)) as etcd, pytest.raises(EtcdAuthError, match="grant"):
            etcd.put("/other", b"")

    def test_credentials_are_ignored_where_nobody_asks_for_them(self, etcd_url: str):
        with Etcd(EtcdSettings(endpoints=(etcd_url,), user="u", password="p")) as etcd:
            assert etcd.get("/x") is None


class Certificates:
    """A CA of our own, a server's certificate and a client's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ca",
                     "-keyout", "ca.key", "-out", "ca.pem")  # fmt: skip
        (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        for name in ("server", "client"):
            self.openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}",
                         "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
            self.openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                         "-CAcreateserial", "-days", "2", "-extfile", "ext",
                         "-out", f"{name}.pem")  # fmt: skip

    def openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)

    def path(self, name: str) -> str:
        return str(self.folder / name)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


class TestTLS:
    """Encrypted connections, with and without a client's certificate."""

    @pytest.mark.parametrize("mutual", [False, True])
    def test_https_works(self, certificates: Certificates, tmp_path: Path, mutual: bool):
        ca = certificates.path("ca.pem")
        tls = (certificates.path("server.pem"), certificates.path("server.key"), ca if mutual else "")
        with EtcdServer(data_dir=tmp_path / "tls", tls=tls) as server:
            mine = {"cert": certificates.path("client.pem"), "key": certificates.path("client.key")}
            # Two endpoints, the first of which nobody listens on: TLS fails over as well.
            away = f"https://127.0.0.1:{free_ports(1)[0]}"
            settings = EtcdSettings(endpoints=(away, server.url), ca_cert=ca, **(mine if mutual else {}))
            with Etcd(settings) as etcd:
                etcd.put("/x", b"1")
                assert etcd.keep_alive(etcd.grant(5)) == 5
            if mutual:
                bare = EtcdSettings(endpoints=(server.url,), ca_cert=ca, timeout_s=1.0)
                with Etcd(bare) as etcd, pytest.raises(EtcdError):
                    etcd.get("/x")

    def test_an_untrusted_certificate_is_said(self, certificates: Certificates, tmp_path: Path):
        other = tmp_path / "other"
        other.mkdir()
        ca = Certificates(other).path("ca.pem")
        tls = (certificates.path("server.pem"), certificates.path("server.key"), "")
        with (
            EtcdServer(data_dir=tmp_path / "tls", tls=tls) as server,
            Etcd(EtcdSettings(endpoints=(server.url,), ca_cert=ca, timeout_s=1.0)) as etcd,
            pytest.raises(EtcdAuthError, match="trusted"),
        ):
            etcd.get("/x")

    def test_a_missing_file_is_a_wrong_setting(self):
        settings = EtcdSettings(endpoints=("https://127.0.0.1:1",), ca_cert="/no/such/file")
        with Etcd(settings) as etcd, pytest.raises(ConfigError, match="/no/such/file"):
            etcd.get("/x")
