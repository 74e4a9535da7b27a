"""Settle every setting of a process, once, before anything starts.

The only module that reads the environment; nobody writes it. An explicit argument beats the variable, which
beats the default. It knows names, types and limits; it does not know what the settings are used for.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import logging
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from ftkit import config_values as values
from ftkit.config_checks import clashes
from ftkit.config_values import Reader
from ftkit.core.model import Policy
from ftkit.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_ENDPOINT = f"127.0.0.1:{values.DEFAULT_PORT}"
EMBEDDED = values.EMBEDDED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """What is known about one setting: how it is called everywhere, read, described and defaulted."""

    name: str
    help: str
    read: Reader
    default: object
    default_text: str
    also: tuple[str, ...]
    secret: bool

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that set it, the strongest first."""
        return (f"FTKIT_{self.name.upper()}", *self.also)

    @property
    def flag(self) -> str:
        """The command line flag."""
        return "--" + self.name.replace("_", "-")


def _setting(
    help: str, read: Reader, default: object = None, *, shown: str = "", also: str = "", secret: bool = False
) -> Any:
    """Declare a setting; `default` None means derived or unset, `shown` says so in words."""
    text = shown or ("none" if default is None else values.write(default))
    kept = {"help": help, "read": read, "default": default, "default_text": text, "secret": secret}
    return dataclasses.field(repr=not secret, metadata={**kept, "also": tuple(also.split())})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """All settings of one process, settled and checked; made by `Settings.resolve`. Times are in seconds."""

    etcd: tuple[str, ...] = _setting(
        "etcd's client URLs, comma separated; `embedded` starts one on this machine",
        values.read_endpoints,
        (DEFAULT_ENDPOINT,),
        shown=f"http://{DEFAULT_ENDPOINT}",
        also="ETCDCTL_ENDPOINTS",
    )
    etcd_ca_cert: str | None = _setting(
        "file of the CA certificate that etcd's own is checked against",
        values.read_file,
        also="ETCDCTL_CACERT",
    )
    etcd_cert: str | None = _setting("file of the client certificate", values.read_file, also="ETCDCTL_CERT")
    etcd_key: str | None = _setting(
        "file of the client certificate's key", values.read_file, also="ETCDCTL_KEY"
    )
    etcd_user: str | None = _setting(
        "`user:password` for etcd's authentication; better as a variable, since flags show in `ps`, "
        "or `user` alone, with the password in `ETCDCTL_PASSWORD`",
        values.read_text,
        also="ETCDCTL_USER",
        secret=True,
    )
    job: str = _setting(
        "name of the training run; its keys live under `/ftkit/<job>/`", values.read_name, "default"
    )
    replica_id: str = _setting(
        "stable name of this replica group, unique in the job", values.read_name, shown="hostname"
    )
    token: str | None = _setting(
        "secret shared by the members of the job; better as a variable, since flags show in `ps`",
        values.read_secret,
        shown="made by the first member",
        secret=True,
    )
    group_rank: int = _setting(
        "place of this process in its replica group", values.whole(0), shown="0", also="RANK"
    )
    group_world_size: int = _setting(
        "number of processes of a replica group", values.whole(1), 1, also="WORLD_SIZE"
    )
    master_addr: str | None = _setting(
        "address of the replica group's own store", values.read_host, also="MASTER_ADDR"
    )
    master_port: int | None = _setting(
        "port of the replica group's own store", values.whole(1, 65535), also="MASTER_PORT"
    )
    min_replicas: int = _setting("fewest replica groups that may commit a step", values.whole(1), 1)
    max_replicas: int = _setting(
        "most replica groups in an epoch, the others wait as spares; 0: no limit", values.whole(0), 0
    )
    bind: str = _setting(
        "address to listen on",
        values.read_host,
        shown="127.0.0.1 if etcd is local, else the interface that leads to etcd",
    )
    advertise: str = _setting("address told to the other members", values.read_host, shown="`bind`")
    timeout: float = _setting(
        "the one budget: longest wait for a peer in a step", values.seconds(above=0), 60.0
    )
    collective_timeout: float = _setting(
        "longest wait for one collective", values.seconds(above=0), shown="`timeout`"
    )
    rendezvous_timeout: float = _setting(
        "longest time to configure the process groups", values.seconds(above=0), shown="`timeout`, at most 30"
    )
    heal_timeout: float = _setting(
        "longest time to receive the live state", values.seconds(above=0), shown="10 × `timeout`"
    )
    heal_rate_floor: int = _setting(
        "MB/s; of a peer that sends the live state slower, the log warns; 0: never", values.whole(0), 0
    )
    join_timeout: float = _setting(
        "longest wait for the members of an epoch to ask for the next one, before going without them",
        values.seconds(above=0),
        shown="`timeout`",
    )
    gather_window: float = _setting(
        "newcomers within this time of the first are admitted together", values.seconds(), 0.1
    )
    lease_ttl: int = _setting("life of a member's lease without a keep-alive", values.whole(2), 5)
    suspect_grace: float = _setting(
        "a member whose lease ran out is given up when a collective makes no progress for this long",
        values.seconds(),
        shown="0.3",
    )
    freeze_grace: float = _setting(
        "a trainer whose process stands still (SIGSTOP, debugger) is given up after this long",
        values.seconds(),
        shown="`lease_ttl`",
    )
    outage_grace: float = _setting(
        "a member without word from etcd stops committing after this long", values.seconds(above=0), 60.0
    )
    takeover_after: float = _setting(
        "members that vanished without proof of death are replaced after this long",
        values.seconds(above=0),
        90.0,
    )
    quorum_timeout: float = _setting(
        "longest total wait for an epoch, then training ends with an error", values.seconds(above=0), 3600.0
    )
    progress_timeout: float | None = _setting(
        "a trainer without progress for this long is killed; `off`: never",
        values.optional_seconds(above=0),
        shown="off",
    )
    max_retries: int = _setting("a step that fails this often in a row ends training", values.whole(1), 10)
    init_sync: bool = _setting(
        "at step 0 all take the first member's state", values.read_bool, True, shown="true"
    )
    keeper_log: str = _setting("least level that the keeper logs", values.read_level, "WARNING")
    stats_interval: float = _setting(
        "time between two publications of a member's stats", values.seconds(above=0), 10.0
    )

    @classmethod
    def resolve(cls, environ: Mapping[str, str] | None = None, /, **explicit: object) -> Settings:
        """Settle all settings; None means not given. Raise one `ConfigError` that names all that is wrong."""
        environ = os.environ if environ is None else environ
        known = {field.name: field for field in FIELDS}
        problems = [values.unknown(name, known) for name in explicit if name not in known]
        _warn_of_misspelled(environ)
        found: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for field in FIELDS:
            raw, origin[field.name] = _lookup(field, explicit, environ)
            if raw is None:
                found[field.name] = field.default
                continue
            try:
                found[field.name] = field.read(raw)
            except ValueError as error:
                shown = "" if field.secret else f"={raw if isinstance(raw, str) else repr(raw)}"
                problems.append(f"{origin[field.name]}{shown}: {error}")
                found[field.name] = field.default
        found["etcd_user"] = values.add_password(found["etcd_user"], environ.get("ETCDCTL_PASSWORD"))
        if not problems:  # what could not be read makes no sense to compare
            _derive(found)
            problems = clashes(found, origin, environ)
        if problems:
            raise ConfigError(_sentence(problems))
        return cls(**found)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace, **explicit: object) -> Settings:
        """Settle the settings from parsed arguments (see `add_arguments`); `explicit` beats them."""
        given = {f.name: getattr(arguments, f.name) for f in FIELDS if hasattr(arguments, f.name)}
        return cls.resolve(**{**given, **{k: v for k, v in explicit.items() if v is not None}})

    def replace(self, **changes: object) -> Settings:
        """Return a checked copy with some settings changed; derived ones keep their value."""
        kept = {field.name: getattr(self, field.name) for field in FIELDS}
        return type(self).resolve({}, **{**kept, **changes})

    def policy(self) -> Policy:
        """Return the limits that the pure core works under."""
        return Policy(
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            join_timeout=self.join_timeout,
            gather_window=self.gather_window,
            takeover_after=self.takeover_after,
            outage_grace=self.outage_grace,
            freeze_grace=self.freeze_grace,
        )

    def variables(self) -> dict[str, str]:
        """Return the settings as `FTKIT_` variables, for a process to be started; unset ones are left out."""
        return as_variables({field.name: getattr(self, field.name) for field in FIELDS})

    @property
    def embedded(self) -> bool:
        """Whether an etcd of our own is asked for."""
        return self.etcd == (EMBEDDED,)

    @property
    def secure(self) -> bool:
        """Whether etcd is reached over TLS."""
        return self.etcd[0].startswith("https://")

    @property
    def etcd_hosts(self) -> tuple[str, ...]:
        """etcd's endpoints as host:port; empty when embedded."""
        return () if self.embedded else tuple(url.partition("://")[2] for url in self.etcd)

    @property
    def etcd_username(self) -> str | None:
        """The user part of `etcd_user`."""
        return None if self.etcd_user is None else self.etcd_user.partition(":")[0]

    @property
    def etcd_password(self) -> str | None:
        """The password part of `etcd_user`."""
        return None if self.etcd_user is None else self.etcd_user.partition(":")[2]

    @property
    def prefix(self) -> str:
        """The prefix of all keys of the job."""
        return f"/ftkit/{self.job}/"


FIELDS: tuple[Field, ...] = tuple(Field(name=f.name, **f.metadata) for f in dataclasses.fields(Settings))
"""All settings, in the order of the README's table."""


def add_arguments(
    parser: argparse.ArgumentParser, fields: Iterable[str], *, title: str = "", about: str | None = None
) -> None:
    """Add the flags of some settings to a parser; one that is not given is None in the namespace.

    With a `title` they are a group of their own in the help.
    """
    target = parser.add_argument_group(title, about) if title else parser
    known = {field.name: field for field in FIELDS}
    for field in (known[name] for name in fields):
        text = f"{field.help} [{field.variables[0]}; default: {field.default_text}]".replace("`", "")
        text = text.replace("%", "%%")
        if field.read is values.read_bool:
            target.add_argument(
                field.flag, dest=field.name, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            metavar = field.name.rpartition("_")[2].upper()
            target.add_argument(
                field.flag, dest=field.name, type=_argument(field), default=None, metavar=metavar, help=text
            )


def child_environment(**settings: object) -> dict[str, str]:
    """Return this process's environment with some settings added, for a process to be started."""
    return {**os.environ, **as_variables(settings)}


def agent_store() -> bool:
    """Say whether torchrun's agent already serves a store at `master_addr` and `master_port`."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"


def restart_count() -> int:
    """Return how often torchrun has restarted this replica group; 0 without torchrun."""
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def settings_table() -> str:
    """Return the README's table of settings, in markdown."""
    lines = ["| setting | variable | default | meaning |", "| --- | --- | --- | --- |"]
    for field in FIELDS:
        variables = ", ".join(f"`{name}`" for name in field.variables)
        lines.append(f"| `{field.name}` | {variables} | {field.default_text} | {field.help} |")
    return "\n".join(lines) + "\n"


def _lookup(field: Field, explicit: Mapping[str, object], environ: Mapping[str, str]) -> tuple[object, str]:
    """Return the raw value of a setting and where it came from; an empty variable counts as not set."""
    if explicit.get(field.name) is not None:
        return explicit[field.name], field.name
    for variable in field.variables:
        text = environ.get(variable, "").strip()
        if text:
            return text, variable
    return None, ""


def _warn_of_misspelled(environ: Mapping[str, str]) -> None:
    """Say that a variable looks like a setting but is none; not an error, since it may be somebody else's."""
    known = [field.variables[0] for field in FIELDS]
    for name in environ:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.85) if name.startswith("FTKIT_") else []
        if close and name not in known:
            logger.warning("there is no setting %s; did you mean %s?", name, close[0])


def _derive(found: dict[str, Any]) -> None:
    """Fill in what follows from other settings; what was given stays."""

    def unset(name: str, value: object) -> None:
        if found[name] is None:
            found[name] = value

    timeout = found["timeout"]
    found["etcd"] = values.with_scheme(
        found["etcd"], secure=any(found[n] for n in ("etcd_ca_cert", "etcd_cert"))
    )
    unset("replica_id", socket.gethostname())
    unset("group_rank", 0)
    unset("collective_timeout", timeout)
    unset("join_timeout", min(timeout, found["quorum_timeout"]))
    unset("heal_timeout", 10 * timeout)
    unset("rendezvous_timeout", min(timeout, 30.0, found["join_timeout"], found["heal_timeout"]))
    unset("suspect_grace", min(0.3, found["collective_timeout"] / 4))
    unset("freeze_grace", float(found["lease_ttl"]))
    if found["bind"] is None or (found["advertise"] is None and found["bind"] in values.WILDCARDS):
        address = values.own_address(found["etcd"])
        unset("bind", address)
        unset("advertise", address)
    unset("advertise", found["bind"])


def _sentence(problems: list[str]) -> str:
    return (
        problems[0] if len(problems) == 1 else "settings refused:\n" + "\n".join(f"  - {p}" for p in problems)
    )


def as_variables(settings: Mapping[str, object]) -> dict[str, str]:
    """Write settings as `FTKIT_` variables; those that are None are left out."""
    texts: dict[str, str] = {}
    known = {field.name for field in FIELDS}
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(values.unknown(name, known))
        if value is not None:
            texts[f"FTKIT_{name.upper()}"] = values.write(value)
    return texts


def _argument(field: Field) -> Reader:
    """Return argparse's converter for a setting."""

    def convert(text: object) -> object:
        try:
            value = field.read(text)
            return text if value is None else value  # `off` must beat the variable: None means not given
        except ValueError as error:
            shown = "the value" if field.secret else repr(text)
            raise argparse.ArgumentTypeError(f"{shown}: {error}") from None

    return convert
