"""The same over TLS, where tensors' memory goes through OpenSSL in slices."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from transport import HTTPTransport, Progress, SourceError

Make = Callable[..., HTTPTransport]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
               "-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1",
               "-keyout", key, "-out", cert]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return cert, key


@pytest.fixture
def make_secure(make_transport: Make, certificate: tuple[Path, Path]) -> Make:
    def make(**settings: object) -> HTTPTransport:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(*certificate)
        client = ssl.create_default_context(cafile=str(certificate[0]))
        return make_transport(**{"server_ssl": server, "client_ssl": client, **settings})

    return make


def test_a_state_travels_over_tls(make_secure: Make) -> None:
    state: dict[str, Any] = {
        "w": torch.randint(0, 256, (20 << 20,), dtype=torch.uint8),
        "s": {f"p{i}": torch.randn(9) for i in range(50)},
    }
    into = {"w": torch.zeros_like(state["w"])}
    sources = [make_secure(chunk_bytes=1 << 20) for _ in range(2)]
    for source in sources:
        source.publish("v", state)
        assert source.address.startswith("https://")
    result = make_secure().fetch([s.address for s in sources], "v", into, deadline_s=30)
    assert torch.equal(into["w"], state["w"])
    assert isinstance(result, dict)
    assert torch.equal(result["s"]["p49"], state["s"]["p49"])
    for source in sources:
        source.withdraw()


def test_a_source_without_a_trusted_certificate_is_refused(make_secure: Make) -> None:
    source = make_secure()
    source.publish("v", {"a": 1})
    with pytest.raises(SourceError, match="certificate"):
        make_secure(client_ssl=ssl.create_default_context()).fetch([source.address], "v", None, deadline_s=10)


def test_plain_http_to_a_tls_source_is_an_error(make_secure: Make, make_transport: Make) -> None:
    source = make_secure()
    source.publish("v", {"a": 1})
    with pytest.raises(SourceError):
        make_transport().fetch([source.address.replace("https", "http")], "v", None, deadline_s=10)


def test_after_withdraw_the_rest_comes_from_a_copy(make_secure: Make) -> None:
    """OpenSSL may hold live memory for as long as the peer takes nothing, but for one piece only."""
    state = {f"p{i}": torch.randint(0, 256, (16 << 20,), dtype=torch.uint8) for i in range(4)}
    right = {name: tensor.clone() for name, tensor in state.items()}
    source, joiner = make_secure(chunk_bytes=1 << 20), make_secure(streams=1)
    source.publish("v", state)
    withdrawn = False

    def progress(report: Progress) -> None:
        nonlocal withdrawn
        if report.bytes_done > 0 and not withdrawn:
            withdrawn = True
            source.withdraw()
            for tensor in state.values():
                tensor.zero_()

    result: Any = joiner.fetch([source.address], "v", {}, deadline_s=60, progress=progress)
    assert withdrawn
    assert all(torch.equal(result[name], tensor) for name, tensor in right.items())
