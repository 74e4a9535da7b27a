"""`python -m transport serve` and `fetch`, as a person uses them: real processes, real files."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from transport import HTTPTransport
from transport.cli import main
from transport.download import Downloader, split_url
from transport.errors import MalformedState, SourceError, TokenRefused, TransportTimeout
from transport.files import open_file

Make = Callable[..., HTTPTransport]


def tensors() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.randn(300, 700),
        "half": torch.randn(33, dtype=torch.float16),
        "brain": torch.randn(5, 7).to(torch.bfloat16),
        "tiny": torch.randn(9).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False, True]),
        "step": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "größe/ü": torch.arange(11, dtype=torch.uint8),
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path, metadata={"format": "pt", "who": "a test"})
    return path


@pytest.fixture
def source(make_transport: Make, model: Path) -> str:
    transport = make_transport(chunk_bytes=1 << 16)
    transport.publish_file("model.safetensors", model)
    return transport.address


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_TOKEN", "secret")


@pytest.fixture
def serve() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "transport", "serve", *map(str, arguments)]
        kept = {k: v for k, v in os.environ.items() if k != "TRANSPORT_TOKEN"}
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**kept, **variables},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_what_serve_prints_fetches_the_very_file(
    serve: Callable[..., subprocess.Popen[str]], model: Path, tmp_path: Path
) -> None:
    """It is tried in a minute because its output is the next command."""
    server = serve(model)
    assert server.stdout is not None
    text = ""
    while "state.safetensors" not in text:
        line = server.stdout.readline()
        assert line, server.communicate()
        text += line
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    script = "\n".join(lines[:2]).replace("python -m", f"{sys.executable} -m")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    root = str(Path(__file__).resolve().parents[2])
    variables = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(
        ["sh", "-ec", script], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout
    assert [path.name for path in folder.iterdir()] == [model.name]
    assert (folder / model.name).read_bytes() == model.read_bytes()
    secret = re.search(r"TRANSPORT_TOKEN=(\S+)", text)
    assert secret is not None
    assert len(secret[1]) >= 32
    server.send_signal(signal.SIGTERM)
    assert server.wait(10) == 0


def test_serve_says_in_json_where_it_is(serve: Callable[..., subprocess.Popen[str]], model: Path) -> None:
    server = serve(model, "--json", "--version", "v 1", TRANSPORT_TOKEN="mine")
    assert server.stdout is not None
    row = json.loads(server.stdout.readline())
    assert row == {"url": row["url"], "version": "v 1", "size": model.stat().st_size}
    assert Downloader(token="mine", deadline_s=10).find_version([row["url"]]) == "v 1"


def test_the_fetched_file_has_the_tensors_and_the_metadata(
    source: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(b"an older one")
    assert main(["fetch", source, "-o", str(copy), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["path"], row["size"]) == (str(copy), model.stat().st_size)
    assert row["sources"][source] > 0
    with safe_open(copy, "pt") as new, safe_open(model, "pt") as old:
        assert new.metadata() == old.metadata()
        assert set(new.keys()) == set(old.keys())
        for name in old.keys():  # noqa: SIM118 - it is no dict
            a, b = new.get_tensor(name), old.get_tensor(name)
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_several_sources_share_the_work(make_transport: Make, model: Path, tmp_path: Path) -> None:
    sources = [make_transport(chunk_bytes=1 << 14) for _ in range(3)]
    for each in sources:
        each.publish_file("m", model)
    addresses = [each.address for each in sources]
    done = Downloader(token="secret", deadline_s=20, streams=3).fetch(addresses, "m", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == model.read_bytes()
    assert set(done.sources) == set(addresses)


def test_any_published_state_can_be_fetched_as_a_file(make_transport: Make, tmp_path: Path) -> None:
    """A look into a training job that is under way."""
    trainer = make_transport()
    base = torch.arange(20.0)
    state: dict[str, Any] = {"model": {"a": base[:10], "b": base[10:].view(2, 5)}, "step": 3, "x": [1, (2,)]}
    trainer.publish("4-7", state)
    assert main(["fetch", f"{trainer.address}/v1/4-7/state.safetensors", "-o", str(tmp_path / "f")]) == 0
    with safe_open(tmp_path / "f", "pt") as file:
        assert torch.equal(file.get_tensor("model/b"), state["model"]["b"])


def test_a_model_receives_a_served_file_in_place(source: str, make_transport: Make, model: Path) -> None:
    with safe_open(model, "pt") as file:
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    into = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    make_transport().fetch([source], "model.safetensors", into, deadline_s=10)
    for name, tensor in expected.items():
        assert torch.equal(into[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_the_memory_of_the_source_is_the_file_itself(model: Path) -> None:
    encoded = open_file(model, version="v")
    assert encoded.tobytes() == model.read_bytes()


def test_after_an_error_the_old_file_is_still_there_and_no_part(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    copy = folder / "copy.safetensors"
    copy.write_bytes(b"an older one")
    assert main(["fetch", source, "-o", str(copy), "--version", "other"]) == 1
    assert "model.safetensors" in capsys.readouterr().err
    monkeypatch.setenv("TRANSPORT_TOKEN", "wrong")
    assert main(["fetch", source, "-o", str(copy)]) == 1
    error = capsys.readouterr().err
    assert source in error
    assert "token" in error
    assert [path.name for path in folder.iterdir()] == [copy.name]
    assert copy.read_bytes() == b"an older one"


def test_the_token_comes_from_a_file(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSPORT_TOKEN")
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    out = str(tmp_path / "copy")
    assert main(["fetch", source, "-o", out, "--token-file", str(secret), "--json"]) == 0
    secret.write_text("\n")
    assert main(["fetch", source, "-o", out, "--token-file", str(secret)]) == 2
    assert main(["fetch", source, "-o", out, "--json"]) == 2


def test_what_is_wrong_is_said_in_one_line(
    source: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_file = tmp_path / "not.safetensors"
    no_file.write_bytes(b"0123456789")
    for words, code, said in (
        (["serve", str(no_file)], 1, "not a safetensors file"),
        (["serve", str(tmp_path / "none")], 1, "none"),
        (["serve", str(model), "--listen", "4242"], 2, "HOST:PORT"),
        (["fetch", "ftp://x", "-o", "f"], 2, "ftp://x"),
        (["fetch", "127.0.0.1:1", "-o", str(tmp_path / "f")], 1, "127.0.0.1:1"),
        (["fetch", source, "-o", str(tmp_path)], 1, "directory"),
        (["fetch", source, "-o", str(tmp_path / "no" / "f")], 1, "No such file"),
    ):
        assert main(words) == code, words
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1, error


def test_a_source_that_has_nothing_yet_is_waited_for(make_transport: Make) -> None:
    nobody = make_transport()
    with pytest.raises(TransportTimeout, match="nothing yet"):
        Downloader(token="secret", deadline_s=0.3).find_version([nobody.address])
    with pytest.raises(TokenRefused):
        Downloader(token="wrong", deadline_s=5).find_version([nobody.address])
    with pytest.raises(SourceError):
        Downloader(token="wrong", deadline_s=5).find_version([nobody.address, "http://127.0.0.1:1"])


def test_a_file_with_a_hole_or_a_lie_is_not_served(tmp_path: Path) -> None:
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}).encode()
    path = tmp_path / "hole.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    with pytest.raises(MalformedState, match="hole"):
        open_file(path, version="v")


def test_urls_name_a_source_and_maybe_a_version() -> None:
    assert split_url("10.0.0.5:42") == ("http://10.0.0.5:42", None)
    assert split_url("https://[::1]:42/") == ("https://[::1]:42", None)
    assert split_url("http://h:1/v1/a%20b/state.safetensors") == ("http://h:1", "a b")
    for wrong in ("http://h:1/x", "http://h:99999", "http://u:p@h:1", "http://"):
        with pytest.raises(ValueError, match="source"):
            split_url(wrong)


def test_a_terminal_gets_a_bar_and_a_log_gets_lines() -> None:
    from transport import Progress
    from transport.bar import Bar

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    reports = [
        Progress(version="v", bytes_done=n << 20, bytes_total=4 << 20, num_sources=2, elapsed_s=float(n))
        for n in (0, 4)
    ]
    screen, log = Screen(), io.StringIO()
    for stream in (screen, log):
        with Bar(stream) as bar:
            for report in reports:
                bar(report)
    assert "\r" in screen.getvalue()
    assert "100 %, 4.0 MiB of 4.0 MiB, 1.0 MiB/s, 2 sources" in screen.getvalue()
    assert screen.getvalue().endswith("\n")
    assert log.getvalue() == ""  # over before the first line was due
