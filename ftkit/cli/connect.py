"""What the commands that look at a job share: the flags of the connection, and the connection itself."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ftkit.config import Settings
from ftkit.config import add_arguments as add_settings
from ftkit.errors import ConfigError

if TYPE_CHECKING:
    from ftkit.keeper.etcd import Etcd

CONNECTION = ("etcd", "etcd_ca_cert", "etcd_cert", "etcd_key", "etcd_user", "job")


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where etcd is and which job is meant."""
    add_settings(parser, CONNECTION)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def settle(args: argparse.Namespace) -> Settings:
    """Return the settings of a command that looks at a job from outside."""
    # A RANK in the environment of this shell says nothing about a command.
    settings = Settings.from_arguments(args, group_rank=0, group_world_size=1)
    if settings.embedded:
        raise ConfigError(
            "`embedded` is an etcd that a launch starts for itself: give its URL, which launch prints"
        )
    return settings


def open_etcd(settings: Settings, *, timeout_s: float = 3.0) -> Etcd:
    """Return a connection to the etcd that the settings name; it connects at the first request."""
    from ftkit.keeper.etcd import Etcd, EtcdSettings  # imports grpc: only when it is needed

    return Etcd(
        EtcdSettings(
            endpoints=settings.etcd,
            ca_cert=settings.etcd_ca_cert or "",
            cert=settings.etcd_cert or "",
            key=settings.etcd_key or "",
            user=settings.etcd_username or "",
            password=settings.etcd_password or "",
            timeout_s=timeout_s,
        )
    )
