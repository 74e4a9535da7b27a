"""The command `ftkit dashboard`, as a process."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from ftkit.keeper.embedded import EtcdServer


def begin(tmp_path: Path, *words: str, **more: object) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("FTKIT_", "ETCDCTL_"))}
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-m", "ftkit.cli.main", "dashboard", *words],
        cwd=tmp_path,
        env={**clean, "TERM": "xterm", **more.pop("env", {})},  # type: ignore[dict-item]
        text=True,
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more},
    )


@pytest.mark.usefixtures("training")
def test_it_tells_its_address_and_ends_when_asked_to(tmp_path: Path, etcd_url: str, job: str) -> None:
    with begin(tmp_path, "--json", "--listen", "127.0.0.1:0", "--etcd", etcd_url, "--job", job) as run:
        try:
            told = json.loads(run.stdout.readline())  # type: ignore[union-attr]
            assert told == {"url": f"http://127.0.0.1:{told['port']}/", "host": "127.0.0.1", **told}
            with urllib.request.urlopen(f"{told['url']}state.json", timeout=20) as answer:
                assert json.load(answer)["board"]["job"] == job
            with urllib.request.urlopen(f"{told['url']}events", timeout=20) as stream:
                assert stream.readline() == b"retry: 2000\n"
                run.send_signal(signal.SIGTERM)
                assert run.wait(20) == 0, "a viewer does not keep it alive"
            assert run.stderr.read() == ""  # type: ignore[union-attr]
        finally:
            run.kill()


def test_it_ends_at_once_when_etcd_is_away(tmp_path: Path, own_etcd: EtcdServer) -> None:
    with begin(tmp_path, "--json", "--listen", "127.0.0.1:0", "--etcd", own_etcd.url) as run:
        try:
            told = json.loads(run.stdout.readline())  # type: ignore[union-attr]
            deadline = time.monotonic() + 30
            while not was_read(told["url"]):
                assert time.monotonic() < deadline, "the job is not read"
                time.sleep(0.05)
            own_etcd.stop()
            while not etcd_error(told["url"]):
                assert time.monotonic() < deadline, "the outage is not shown"
                time.sleep(0.05)
            began = time.monotonic()
            run.send_signal(signal.SIGTERM)
            assert run.wait(20) == 0
            assert time.monotonic() - began < 3.0
            assert run.stderr.read() == ""  # type: ignore[union-attr]
        finally:
            run.kill()


def was_read(url: str) -> bool:
    try:
        return etcd_error(url) == ""
    except urllib.error.HTTPError as error:
        error.close()
        return False


def etcd_error(url: str) -> str:
    with urllib.request.urlopen(f"{url}state.json", timeout=20) as answer:
        return str(json.load(answer)["board"]["etcd_error"])


@pytest.mark.usefixtures("training")
def test_the_terminal_shows_the_job(tmp_path: Path, etcd_url: str, job: str) -> None:
    ours, theirs = pty.openpty()
    words = ("--terminal", "--etcd", etcd_url, "--job", job)
    with begin(tmp_path, *words, stdout=theirs, stdin=theirs, env={"COLUMNS": "110", "LINES": "30"}) as run:
        try:
            seen, deadline = "", time.monotonic() + 30
            while not ("training" in seen and "reason 3" in seen and "in epoch" in seen):
                assert time.monotonic() < deadline, seen
                if select.select([ours], [], [], 0.2)[0]:
                    seen += os.read(ours, 65536).decode(errors="replace")
            run.send_signal(signal.SIGTERM)
            assert run.wait(20) == 0
        finally:
            run.kill()
            os.close(theirs)
            os.close(ours)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--terminal",), "--terminal needs a terminal"),
        (("--terminal", "--json"), "leave out --json"),
        (("--listen", ":80"), "0.0.0.0:80"),
        (("--etcd", "embedded"), "give its URL"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tmp_path: Path, words: tuple[str, ...], error: str) -> None:
    with begin(tmp_path, *words) as run:
        _, told = run.communicate(timeout=60)
    assert (run.returncode, told.count("\n")) == (2, 1)
    assert error in told
