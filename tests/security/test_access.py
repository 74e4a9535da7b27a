"""Who has neither etcd's credentials nor the job's token can neither join, nor read, nor evict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from ftkit.errors import EtcdAuthError
from ftkit.keeper.embedded import EtcdServer
from ftkit.keeper.etcd import Compare, Etcd, EtcdSettings, Put
from ftkit.keeper.keys import JobKeys
from tests.cli.conftest import Start
from tests.keeper.conftest import World, ctl

STRANGERS = {"no credentials": ("", ""), "another job's user": ("other", "pw")}
ATTEMPTS: dict[str, Callable[[Etcd, JobKeys], object]] = {
    "read the token": lambda etcd, keys: etcd.get(keys.config),
    "list the members": lambda etcd, keys: etcd.list(keys.members),
    "evict": lambda etcd, keys: etcd.put(keys.control_of("evict", "a"), b"{}"),
    "delete a member": lambda etcd, keys: etcd.delete(keys.member_of("a")),
    "end the epoch": lambda etcd, keys: etcd.put(keys.abort, b'{"epoch":1}'),
    "form an epoch": lambda etcd, keys: etcd.txn(
        [Compare(keys.epoch, "mod", "!=", 0)], [Put(keys.epoch, b'{"id":9,"seats":[]}')]
    ),
    "delete all": lambda etcd, keys: etcd.delete_prefix(keys.prefix),
}


@pytest.fixture
def guarded(auth_server: EtcdServer, job: str) -> Iterator[World]:
    """A job in an etcd that asks for a password, as docs/operations.md has it."""
    if "other" not in _users(auth_server):
        for words in (
            ("role", "add", "other"),
            ("role", "grant-permission", "other", "--prefix=true", "readwrite", "/ftkit/other/"),
            ("user", "add", "other:pw"),
            ("user", "grant-role", "other", "other"),
        ):
            ctl(auth_server, "--user=root:pw", *words)
    with closing(World(job, auth_server.url, user="me", password="pw")) as world:
        yield world


def _users(server: EtcdServer) -> set[str]:
    with Etcd(EtcdSettings(endpoints=(server.url,), user="other", password="pw")) as etcd:
        try:
            etcd.get("/ftkit/other/x")
        except EtcdAuthError:
            return set()
    return {"other"}


def test_without_rights_nothing_of_a_job_can_be_read_or_changed(guarded: World) -> None:
    (a,) = guarded.train("a")
    for who, (user, password) in STRANGERS.items():
        settings = EtcdSettings(endpoints=guarded.urls, user=user, password=password)
        with Etcd(settings) as etcd:
            for what, attempt in ATTEMPTS.items():
                try:
                    attempt(etcd, guarded.keys)
                except EtcdAuthError:
                    continue
                pytest.fail(f"with {who} one can {what}")
    a.do("want", [1, 1], "")
    assert a.epoch()["id"] == 2, "it goes on where it was"


def test_without_rights_nobody_joins(guarded: World) -> None:
    (a,) = guarded.train("a")
    for intruder, user in (("x", None), ("y", "other:pw"), ("z", "me:guess")):
        refusal = guarded.start(intruder, etcd_user=user).wait("Refused")["value"]
        assert refusal["error"] == "EtcdAuthError"
    assert guarded.member("x") is guarded.member("y") is guarded.member("z") is None
    a.do("want", [1, 1], "")
    assert [s[0] for s in a.epoch()["seats"]] == ["a"]


def test_without_rights_the_commands_do_nothing(guarded: World, start: Start) -> None:
    guarded.train("a")
    for words in (("evict", "a"), ("drain", "a"), ("status",)):
        run = start(*words, "--etcd", guarded.urls[0], "--job", guarded.job)
        assert run.wait() == 1
        assert "FTKIT_ETCD_USER" in run.text
    assert guarded.member("a") is not None


@pytest.mark.parametrize("token", [None, "a guess"])
def test_who_reaches_etcd_but_does_not_know_the_token_does_not_join(world: World, token: str | None) -> None:
    world.train("a", token="the token")
    refusal = world.start("x", token=token).wait("Refused")["value"]
    assert refusal["error"] == "JobMismatch"
    assert "token" in refusal["message"]
    assert "the token" not in refusal["message"].replace("the token is", "")
    assert world.member("x") is None
