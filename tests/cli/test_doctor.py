"""What `ftkit doctor` finds, and what it advises."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections import deque
from pathlib import Path

import pytest

from ftkit.cli.checks import address, judge_torch, release, shared_memory
from ftkit.cli.etcd_checks import diagnose, judge_servers, judge_version
from ftkit.config import Settings
from ftkit.errors import EtcdNoSpace
from ftkit.keeper.embedded import EtcdServer
from ftkit.keeper.etcd import Etcd, EtcdSettings, EtcdStatus
from ftkit.keeper.link import rpc
from tests.cli.conftest import Start

NO_TORCH = "--no-torch"


def outcome(run_out: list[str]) -> dict[str, str]:
    return {f["check"]: f["status"] for f in json.loads(run_out[0])["findings"]}


def test_a_healthy_place_has_no_failures(start: Start, etcd_url: str, job: str) -> None:
    run = start("doctor", "--json", "--etcd", etcd_url, "--job", job)
    assert run.wait() == 0
    found = outcome(run.out)
    assert found[f"etcd {etcd_url}"] in ("ok", "warn")
    for check in (
        "settings",
        "etcd write",
        "etcd lease",
        "etcd cluster",
        "address",
        "torch",
        "gloo",
        "clock",
    ):
        assert found[check] == "ok", run.text
    assert "fail" not in found.values()


def test_an_etcd_that_is_not_there_fails_and_the_rest_is_still_checked(start: Start) -> None:
    run = start("doctor", NO_TORCH, "--etcd", "http://127.0.0.1:1")
    assert run.wait() == 1
    assert "FAIL  etcd http://127.0.0.1:1: cannot connect" in run.text
    assert "-> is etcd running there" in run.text
    assert "ok    address" in run.text


def test_one_server_down_of_two_is_found(start: Start, etcd_url: str) -> None:
    run = start("doctor", NO_TORCH, "--json", "--etcd", f"http://127.0.0.1:1,{etcd_url}")
    assert run.wait() == 1
    found = outcome(run.out)
    assert found["etcd http://127.0.0.1:1"] == "fail"
    assert found["etcd write"] == "ok"


def test_timeouts_that_clash_are_named(start: Start) -> None:
    run = start("doctor", NO_TORCH, "--takeover-after", 10, "--outage-grace", 20)
    assert run.wait() == 1
    assert "outage_grace (20" in run.text
    assert "takeover_after (10" in run.text


def test_a_full_etcd_is_told(start: Start, tmp_path: Path) -> None:
    """It still answers reads: without this check all looks well, and no member can register."""
    with EtcdServer(data_dir=tmp_path / "etcd", extra=("--quota-backend-bytes=100000",)) as server:
        with Etcd(EtcdSettings(endpoints=(server.url,))) as etcd, pytest.raises(EtcdNoSpace):
            deque(etcd.put(f"/x/{i}", b"x" * 10_000) for i in range(5000))
        run = start("doctor", NO_TORCH, "--etcd", server.url)
        assert run.wait() == 1
        assert "NOSPACE" in run.text
        assert "etcdctl alarm disarm" in run.text


def test_an_embedded_etcd_needs_only_its_binary(start: Start) -> None:
    run = start("doctor", NO_TORCH, "--json", "--etcd", "embedded")
    assert run.wait() == 0
    assert outcome(run.out)["etcd"] == "ok"


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("3.5.0", "warn"),
        ("3.5.2", "warn"),
        ("3.5.3", "ok"),
        ("3.6.1", "ok"),
        ("3.4.30", "ok"),
        ("3.3.8", "warn"),
        ("3.2.1", "fail"),
        ("3.6.0-rc.1", "ok"),
    ],
)
def test_versions_known_to_be_bad_are_told(version: str, status: str) -> None:
    finding = judge_version(version)
    assert finding.status == status
    assert bool(finding.advice) == (status != "ok")


def test_servers_are_judged_together() -> None:
    def server(**more: object) -> EtcdStatus:
        fields = {"endpoint": "http://a:1", "version": "3.6.1", "leader": 1, "cluster_id": 1, "db_size": 1000}
        return EtcdStatus(**{**fields, **more})  # type: ignore[arg-type]

    def status(check: str, *servers: EtcdStatus) -> str:
        return next(f.status for f in judge_servers(servers) if f.check == check)

    assert status("etcd cluster", server(), server()) == "ok"
    assert status("etcd cluster", server(), server(cluster_id=2)) == "fail"
    assert status("etcd cluster", server(leader=0)) == "fail"
    assert status("etcd space", server(alarms=("NOSPACE on 1",))) == "fail"
    assert status("etcd space", server(alarms=("CORRUPT on 1",))) == "fail"
    assert status("etcd space", server(db_size=1_900_000_000)) == "warn"
    assert status("etcd version") == "warn"


def test_kinds_of_unreachable_are_told_apart(etcd_url: str) -> None:
    def told(url: str, message: str = "no answer") -> str:
        return diagnose("etcd", Settings.resolve({}, etcd=url), url, message).text

    assert "cannot be resolved" in told("http://no-such-host.invalid:2379")
    assert "cannot connect" in told("http://127.0.0.1:1")
    assert "does not speak TLS" in told(etcd_url.replace("http:", "https:"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(1)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "no leader" in told(url, "etcdserver: no leader")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, a server's certificate for 127.0.0.1 and a client's, made for this run."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make certificates")
    folder = tmp_path_factory.mktemp("certificates")
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", *ec, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test ca")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name in ("server", "client"):
        openssl("req", *ec, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-out", f"{name}.pem", "-days", "2", "-extfile", "names"),
        )
    return folder


def test_troubles_with_certificates_are_told_apart(start: Start, certificates: Path, tmp_path: Path) -> None:
    """ "Unavailable" is all that gRPC says of each of them."""
    server_tls = (f"{certificates}/server.pem", f"{certificates}/server.key", f"{certificates}/ca.pem")
    ca = ("--etcd-ca-cert", certificates / "ca.pem")
    client = ("--etcd-cert", certificates / "client.pem", "--etcd-key", certificates / "client.key")
    with EtcdServer(data_dir=tmp_path / "etcd", tls=server_tls) as server:
        expected = {
            ("--etcd", server.url, *ca, *client): (0, "etcd write: keys under /ftkit/ can be written"),
            ("--etcd", server.url, *ca): (1, "it refuses the client certificate or wants one"),
            ("--etcd", server.url): (1, "its certificate is not accepted"),
            ("--etcd", server.url.replace("https", "http")): (1, "this server speaks TLS, the URL says http"),
        }
        runs = [(start("doctor", NO_TORCH, *words), words) for words in expected]
        for run, words in runs:
            code, text = expected[words]
            assert run.wait() == code, run.text
            assert text in run.text


def test_a_missing_or_wrong_user_is_told_from_an_etcd_that_is_down(
    start: Start, own_etcd: EtcdServer
) -> None:
    with Etcd(EtcdSettings(endpoints=(own_etcd.url,))) as etcd:
        client, _ = etcd.link.client()
        auth = rpc.AuthStub(client.channel)
        auth.UserAdd(rpc.AuthUserAddRequest(name="root", password="right"))
        auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"))
        auth.AuthEnable(rpc.AuthEnableRequest())
    expected = {
        "root:right": (0, "etcd write: keys under /ftkit/ can be written"),
        "root:wrong": (1, "check the password of root"),
        "": (1, "this etcd wants a user"),
    }
    runs = {
        user: start("doctor", NO_TORCH, "--etcd", own_etcd.url, env={"ETCDCTL_USER": user})
        for user in expected
    }
    for user, run in runs.items():
        code, text = expected[user]
        assert run.wait() == code, run.text
        assert text in run.text


def test_the_address_must_be_ours_and_lead_back_to_us() -> None:
    assert address("127.0.0.1", "127.0.0.1").status == "ok"
    assert address("0.0.0.0", "127.0.0.1").status == "ok"
    foreign = address("192.0.2.1", "192.0.2.1")
    assert foreign.status == "fail"
    assert "--bind" in foreign.advice
    astray = address("127.0.0.1", "127.0.0.2")
    assert astray.status == "fail"
    assert "--advertise" in astray.advice


def test_torch_is_judged() -> None:
    def statuses(**found: object) -> list[str]:
        return [f.status for f in judge_torch(found)]

    assert statuses(error="ModuleNotFoundError: no torch") == ["fail"]
    assert statuses(torch="2.13.0+cpu", gloo=True, gloo_works=True) == ["ok", "ok"]
    assert statuses(torch="2.6.1", gloo=True, gloo_works=True) == ["fail", "ok"]
    assert statuses(torch="2.10.0a0+git", gloo=True, error="RuntimeError: x") == ["ok", "fail"]
    assert statuses(torch="2.7.0", gloo=False) == ["ok", "fail"]


def test_versions_are_compared_as_numbers() -> None:
    assert release("2.13.0+cpu") == (2, 13, 0) > (2, 7)
    assert release("2.10.0a0+git") == (2, 10, 0)
    assert release("main") == ()


def test_a_missing_shared_memory_is_a_warning(tmp_path: Path) -> None:
    assert shared_memory(tmp_path / "none").status == "warn"
