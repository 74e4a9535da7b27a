"""No secret in a log, in the arguments of a process, or in what a command prints."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ftkit.keeper.embedded import EtcdServer
from ftkit.keeper.etcd import Etcd, EtcdSettings
from ftkit.keeper.keys import JobKeys, decode, decode_config
from tests.cli.conftest import Start, eventually
from tests.keeper.conftest import ctl

TRAINER = Path(__file__).parents[1] / "runtime" / "trainer.py"
PASSWORD = "open-sesame-93f1"


def command_lines() -> str:
    """Return the arguments of all processes, as any user of the machine can read them."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return "\n".join(found)


def test_secrets_are_told_to_nobody(auth_server: EtcdServer, job: str, start: Start) -> None:
    """etcd's password, the job's token, the stores' keys; with all logs at their most talkative."""
    ctl(auth_server, "--user=root:pw", "user", "add", f"talker:{PASSWORD}")
    ctl(auth_server, "--user=root:pw", "user", "grant-role", "talker", "trainer")
    env = {
        "FTKIT_ETCD": auth_server.url,
        "FTKIT_JOB": job,
        "FTKIT_ETCD_USER": f"talker:{PASSWORD}",
        "FTKIT_KEEPER_LOG": "DEBUG",
        "FTKIT_DEBUG": "1",
    }
    run = start("launch", "--groups", 2, "--min-replicas", 2, "--", TRAINER, env=env)
    keys = JobKeys(job)
    with Etcd(EtcdSettings(endpoints=(auth_server.url,), user="talker", password=PASSWORD)) as etcd:
        eventually(lambda: '"n": 2' in run.text, "both to train", 90)
        config = etcd.get(keys.config)
        assert config is not None
        settled = decode_config(keys.config, config.value)
        assert settled is not None
        records = [decode("members", kv.key, kv.value) for kv in etcd.list(keys.members)[0]]
    secrets = {PASSWORD, settled.token, *(r.rendezvous.partition("#")[2] for r in records)}
    assert len(secrets) == 4
    assert all(len(secret) > 15 for secret in secrets)
    told = {"arguments": command_lines()}
    for words in (("status", "--json"), ("status",), ("doctor", "--json")):
        asked = start(*words, env=env)
        asked.wait(60)
        told[" ".join(words)] = asked.text
    run.process.terminate()
    assert run.wait(60) == 0
    told["launch"] = run.text
    assert "keeper of trainer-0: DEBUG" in run.text or "keeper of trainer-0: INFO" in run.text
    leaks = [(where, secret) for where, text in told.items() for secret in secrets if secret in text]
    assert not leaks
