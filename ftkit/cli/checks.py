"""Check this machine: torch and gloo, the address to listen on, shared memory, open files.

Each check returns findings: what is the case, whether that is all right, and what to do if it is not.
"""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from ftkit.config import Settings
from ftkit.dashboard.text import size

LEAST_TORCH = (2, 7)
LEAST_SHM = 1 << 30
LEAST_FILES = 1024

_PROBE = """
import json, sys
found = {}
try:
    import torch
    found["torch"] = torch.__version__
    import torch.distributed as dist
    found["gloo"] = dist.is_available() and dist.is_gloo_available()
    if found["gloo"]:
        from datetime import timedelta
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
        group.allreduce([torch.ones(1)]).wait()
        found["gloo_works"] = True
    found["cuda"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found["nccl"] = dist.is_available() and dist.is_nccl_available()
except BaseException as error:
    found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check."""

    check: str
    status: Literal["ok", "warn", "fail"]
    text: str
    advice: str = ""


def ok(check: str, text: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(check=check, status="ok", text=text)


def warn(check: str, text: str, advice: str) -> Finding:
    """Return a finding that training can live with."""
    return Finding(check=check, status="warn", text=text, advice=advice)


def fail(check: str, text: str, advice: str) -> Finding:
    """Return a finding that training will fail on."""
    return Finding(check=check, status="fail", text=text, advice=advice)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    numbers = []
    for part in version.split("+")[0].split("-")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


class TorchProbe:
    """Imports torch in a process of its own, which may take seconds or crash, while other checks run."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def findings(self, within_s: float = 120.0) -> Iterator[Finding]:
        """Wait for the import and judge what it found."""
        try:
            out, err = self._process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.close()
            yield fail(
                "torch", f"importing torch took more than {within_s:g} s", "look at the disk it lies on"
            )
            return
        lines = out.splitlines()
        if self._process.returncode != 0 or not lines:
            last = err.strip().splitlines()[-1:] or ["no output"]
            text = f"importing torch ended with code {self._process.returncode}: {last[0]}"
            yield fail("torch", text, "install a torch that fits this machine")
            return
        yield from judge_torch(json.loads(lines[-1]))

    def close(self) -> None:
        """End the probe if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def judge_torch(found: dict[str, object]) -> Iterator[Finding]:
    """Judge what the probe found."""
    version = str(found.get("torch", ""))
    least = ".".join(map(str, LEAST_TORCH))
    if not version:
        advice = f"pip install 'torch>={least}' into {sys.prefix}"
        yield fail("torch", f"torch cannot be imported ({found.get('error')})", advice)
        return
    if release(version) < LEAST_TORCH:
        yield fail("torch", f"torch {version} is too old", f"install torch {least} or newer")
    else:
        nccl = ", NCCL" if found.get("nccl") else ""
        yield ok("torch", f"torch {version}, {found.get('cuda', 0)} GPUs{nccl}")
    if found.get("gloo_works"):
        yield ok("gloo", "a gloo group forms and reduces")
    elif found.get("gloo"):
        advice = "check that the hostname resolves, or set GLOO_SOCKET_IFNAME to the right network interface"
        yield fail("gloo", f"no gloo group can be formed ({found.get('error')})", advice)
    else:
        yield fail("gloo", "this torch was built without gloo", "install an official build of torch")


def machine(settings: Settings) -> Iterator[Finding]:
    """Check what can be checked of this machine without torch."""
    yield address(settings.bind, settings.advertise)
    yield shared_memory(Path("/dev/shm"))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        yield warn("files", f"only {soft} files may be open at once", f"ulimit -n {LEAST_FILES} or more")
    else:
        yield ok("files", f"{'any number of' if soft == resource.RLIM_INFINITY else soft} files may be open")


def address(bind: str, advertise: str, timeout_s: float = 3.0) -> Finding:
    """Check that one can listen on `bind` and be reached at `advertise`."""
    name = "address"
    try:
        family = socket.getaddrinfo(bind, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        return fail(name, f"bind {bind} is no address: {error}", "set --bind to an address of this machine")
    with contextlib.closing(listener):
        try:
            listener.bind((bind, 0))
            listener.listen(1)
        except OSError as error:
            advice = "set --bind (FTKIT_BIND) to an address that `ip addr` shows, or 0.0.0.0"
            return fail(name, f"cannot listen on {bind}: {error.strerror}", advice)
        port = int(listener.getsockname()[1])
        try:
            socket.create_connection((advertise, port), timeout=timeout_s).close()
        except OSError as error:
            text = f"listening on {bind} works, but {advertise} does not lead there: {error}"
            return fail(name, text, "set --advertise (FTKIT_ADVERTISE) to what the other members can reach")
    where = bind if bind == advertise else f"{bind}, reached as {advertise}"
    return ok(name, f"can listen on {where} (whether others reach it shows only from their machines)")


def shared_memory(path: Path) -> Finding:
    """Check the size of the shared memory that data loader workers need."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return warn("shm", f"there is no {path}", "data loader workers need it: mount a tmpfs there")
    text = f"{path} has {size(usage.total)}, {size(usage.free)} of it free"
    advice = (
        "data loader workers die with a bus error when it is full: docker run --shm-size=8g, or --ipc=host"
    )
    if usage.free < LEAST_SHM // 16:
        return fail("shm", text, advice)
    return warn("shm", text, advice) if usage.total < LEAST_SHM else ok("shm", text)
