"""docker-compose.yml: read, checked, and run here without containers.

The services' own commands and variables are started as local processes; only addresses and folders differ.
"""

import ast
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ftkit import config
from ftkit.cli import main as cli
from ftkit.config import FIELDS, Settings
from ftkit.dashboard.guard import parse_listen
from ftkit.keeper.embedded import find_etcd
from ftkit.keeper.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
ETCDS = sorted(name for name in SERVICES if name.startswith("etcd-"))
TRAINERS = sorted(name for name in SERVICES if name.startswith("trainer-"))

SERVICE_KEYS = {
    *(
        "build",
        "command",
        "depends_on",
        "deploy",
        "entrypoint",
        "environment",
        "healthcheck",
        "image",
        "init",
        "profiles",
    ),
    *("ports", "restart", "shm_size", "stop_grace_period", "volumes"),
}
"""The keys of the compose specification that we use; another one is probably a slip of the pen."""


SHORT = {"STEPS": "160", "STEP_TIME": "0.1"}
"""What a person would export before `docker compose up` for a short run."""


def filled_in(text: str) -> str:
    """Replace ${NAME:-default} as compose does."""
    pattern = r"\$\{(\w+)(?::-([^}]*))?\}"
    return re.sub(pattern, lambda m: SHORT.get(m[1]) or m[2] or "", text).replace("$$", "$")


def environment(name: str) -> dict[str, str]:
    return {key: filled_in(value) for key, value in SERVICES[name].get("environment", {}).items()}


def command(name: str) -> list[str]:
    words = SERVICES[name]["command"]
    return [filled_in(word) for word in (shlex.split(words) if isinstance(words, str) else words)]


def test_there_are_three_of_each():
    assert ETCDS == ["etcd-1", "etcd-2", "etcd-3"]
    assert TRAINERS == ["trainer-0", "trainer-1", "trainer-2"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_what_compose_understands(name):
    service = SERVICES[name]
    assert set(service) <= SERVICE_KEYS
    assert "image" in service or "build" in service
    assert service.get("restart", "no") in {"no", "always", "on-failure", "unless-stopped"}
    for value in service.get("environment", {}).values():
        assert isinstance(value, str), "compose takes numbers and truth values differently; quote them"
    for other, how in service.get("depends_on", {}).items():
        assert how == {"condition": "service_healthy"}
        assert "healthcheck" in SERVICES[other]
    for volume in service.get("volumes", []):
        assert volume.partition(":")[0] in COMPOSE["volumes"]


@pytest.mark.parametrize("name", ETCDS)
def test_each_etcd_keeps_its_data_in_a_volume_of_its_own(name):
    flags = dict(word.split("=", 1) for word in command(name)[1:])
    assert SERVICES[name]["volumes"] == [f"{name}:{flags['--data-dir']}"]
    assert flags["--name"] == name
    assert flags["--advertise-client-urls"] == f"http://{name}:2379"
    assert flags["--initial-cluster"] == ",".join(f"{n}=http://{n}:2380" for n in ETCDS)


def test_etcd_is_of_a_release_without_known_loss_of_data():
    """3.5.0 to 3.5.2 were withdrawn by their makers."""
    images = {SERVICES[name]["image"] for name in ETCDS}
    assert len(images) == 1
    assert re.fullmatch(r"quay\.io/coreos/etcd:v3\.6\.\d+", images.pop())


@pytest.mark.parametrize("name", [*TRAINERS, "trainer", "dashboard", "ftkit"])
def test_the_variables_are_settings_and_fit_together(name, monkeypatch):
    variables = environment(name)
    known = {variable for field in FIELDS for variable in field.variables}
    assert {key for key in variables if key.startswith("FTKIT_")} <= known
    monkeypatch.setattr(config.values, "_local_address", lambda host, port: "172.18.0.7")
    settings = Settings.resolve(variables)
    assert settings.etcd == tuple(f"http://{n}:2379" for n in ETCDS)
    assert settings.token is None
    assert settings.bind == settings.advertise == "172.18.0.7", "a member must not hide on loopback"


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_has_its_name_and_time_to_leave(name):
    service = SERVICES[name]
    assert environment(name)["FTKIT_REPLICA_ID"] == name
    assert service["restart"] == "on-failure"
    assert service["init"] is True
    assert int(service["stop_grace_period"].removesuffix("s")) >= 30
    assert set(service["depends_on"]) == set(ETCDS)


def test_scaled_trainers_are_as_the_others_and_take_the_names_of_their_containers():
    """A fixed name would make the second of them an intruder under the first one's name."""
    own, other = SERVICES["trainer"], SERVICES["trainer-0"]
    assert own["deploy"] == {"replicas": 0}, "none without --scale"
    assert "FTKIT_REPLICA_ID" not in own["environment"]
    assert "container_name" not in own
    assert "hostname" not in own
    assert {**other, "environment": None} == {k: v for k, v in own.items() if k != "deploy"} | {
        "environment": None
    }
    assert Settings.resolve(environment("trainer"), bind="127.0.0.1").replica_id == socket.gethostname()


def test_only_up_to_date_commands_are_offered():
    tool = SERVICES["ftkit"]
    assert tool["profiles"] == ["tools"]
    assert "profiles" not in SERVICES["trainer-0"]


def test_the_dashboard_is_shown_to_this_machine_alone():
    """It asks for no password."""
    service = SERVICES["dashboard"]
    assert (service["entrypoint"], service["command"][0]) == (["ftkit"], "dashboard")
    parser, _ = cli.build_parser("dashboard")
    port = parse_listen(parser.parse_args(service["command"]).listen)[1]
    assert service["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert not any(s.get("ports") for name, s in SERVICES.items() if name != "dashboard")


def test_the_image_is_built_from_files_that_exist_and_are_sent():
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for line in re.findall(r"^COPY (.+)$", dockerfile, flags=re.M):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists(), name
            assert f"!{name}" in ignore, name


def test_the_image_installs_first_what_the_package_needs():
    """Or a change of the source would download torch again."""
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    listed = set(re.search(r"^ +(torch .+)$", dockerfile, flags=re.M).group(1).split())
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = [re.search(rf"^{key} = (\[.*?\])", project, re.M | re.S) for key in ("dependencies", "examples")]
    needed = [item for found in lists for item in ast.literal_eval(found.group(1))]
    assert {re.split(r"[>=<; ]", item)[0] for item in needed} == listed


def children(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


class Here:
    """The services' processes on this machine: who has which address, and all of them ended at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        # Not from the range that outgoing connections use: the etcds of other tests make many.
        self.addresses: dict[str, str] = {}
        for there in (f"{name}:{port}" for name in ETCDS for port in (2379, 2380)):
            taken = {int(here.rpartition(":")[2]) for here in self.addresses.values()}
            self.addresses[there] = f"127.0.0.1:{free_port(taken)}"

    def place(self, name: str, text: str) -> str:
        """Replace the addresses and folders of containers in one word."""
        for port in (2379, 2380):
            for anyone in ("0.0.0.0", "127.0.0.1"):
                text = text.replace(f"{anyone}:{port}", self.addresses.get(f"{name}:{port}", ""))
        for there, here in self.addresses.items():
            text = text.replace(there, here)
        return text.replace("/var/lib/etcd", str(self.folder / name))

    def variables(self, name: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("FTKIT_", "ETCDCTL_"))}
        return {**kept, **{key: self.place(name, value) for key, value in environment(name).items()}}

    def start(self, name: str, service: str = "") -> None:
        """Start a service; of a scaled one `name` is the container's, and so the replica's."""
        service = service or name
        words = [self.place(service, word) for word in command(service)]
        programs = {"/usr/local/bin/etcd": str(find_etcd()), "python": sys.executable}
        with self.log(name).open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [programs[words[0]], *words[1:]],
                env={**self.variables(service), **({"FTKIT_REPLICA_ID": name} if name != service else {})},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def healthy(self, name: str) -> bool:
        program, *words = SERVICES[name]["healthcheck"]["test"][1:]
        assert program == "/usr/local/bin/etcdctl"
        etcdctl = find_etcd().with_name("etcdctl")
        words = [self.place(name, word) for word in words]
        return subprocess.run([etcdctl, *words], capture_output=True, check=False, timeout=30).returncode == 0

    def wait_healthy(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not all(self.healthy(name) for name in ETCDS):
            ended = [name for name in ETCDS if self.processes[name].poll() is not None]
            logs = "\n".join(self.log(name).read_text()[-1500:] for name in ended or ETCDS)
            assert not ended, logs
            assert time.monotonic() < deadline, logs
            time.sleep(0.1)

    def kill(self, name: str) -> None:
        """Do what `docker compose kill` does: all of a container's processes die at once, the keeper too."""
        process = self.processes[name]
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP)  # it must not see its keeper die, nor the keeper it
        for pid in [*children(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def status(self) -> dict:
        """Run the service `ftkit` as `docker compose run --rm ftkit status --json` would."""
        assert (SERVICES["ftkit"]["entrypoint"], SERVICES["ftkit"]["command"]) == (["ftkit"], ["status"])
        words = [sys.executable, "-m", "ftkit.cli.main", "status", "--json"]
        answer = subprocess.run(
            words, env=self.variables("ftkit"), capture_output=True, check=True, timeout=30
        )
        return json.loads(answer.stdout)

    def wait_members(self, *names: str, timeout_s: float = 60.0) -> None:
        """Wait until the job trains with exactly these."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            members = {m["replica_id"] for m in status["members"] if m["rank"] is not None and m["live"]}
            if status["state"] == "training" and members == set(names):
                return
            logs = "\n".join(self.log(name).read_text(errors="replace")[-2000:] for name in TRAINERS)
            assert time.monotonic() < deadline, f"{status}\n{logs}"
            time.sleep(0.5)

    def wait_end(self, name: str, timeout_s: float = 90.0) -> int:
        return self.processes[name].wait(timeout_s)

    def stop(self) -> None:
        for name in reversed(self.processes):
            self.kill(name)


@pytest.fixture
def here(tmp_path):
    services = Here(tmp_path)
    try:
        yield services
    finally:
        services.stop()


def test_the_three_etcds_form_a_cluster_and_their_health_check_sees_it(here):
    for name in ETCDS[:1]:
        here.start(name)
    assert not here.healthy("etcd-1"), "one of three has no leader"
    for name in ETCDS[1:]:
        here.start(name)
    here.wait_healthy()


@pytest.mark.timeout(240)
def test_the_services_train_through_the_loss_of_a_trainer_and_of_an_etcd(here):
    """What the head of docker-compose.yml promises, with the very processes that it starts."""
    for name in ETCDS:
        here.start(name)
    here.wait_healthy()
    for name in TRAINERS:
        here.start(name)
    here.wait_members(*TRAINERS)

    here.kill("trainer-2")
    here.wait_members("trainer-0", "trainer-1")
    here.start("trainer-2")
    here.kill("etcd-1")
    here.start("4f1c0de", service="trainer")  # --scale trainer=1
    here.wait_members(*TRAINERS, "4f1c0de")
    here.start("etcd-1")
    here.wait_healthy()

    for name in ("trainer-1", "4f1c0de"):  # stop, --scale trainer=0
        here.processes[name].send_signal(signal.SIGTERM)
    assert [here.wait_end(name) for name in ("trainer-1", "4f1c0de")] == [0, 0]
    assert [here.wait_end(name) for name in ("trainer-0", "trainer-2")] == [0, 0]
    texts = [here.log(name).read_text() for name in ("trainer-0", "trainer-2")]
    ends = {re.findall(r"version (\S+) sha256 (\w+)", text)[-1] for text in texts}
    assert len(ends) == 1, ends
    assert ends.pop()[0].endswith("-160")
