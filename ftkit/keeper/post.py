"""What a keeper is started with, and what it answers: the first line each way."""

from __future__ import annotations

import dataclasses

import msgspec

from ftkit.config import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Post:
    """Everything that a keeper needs to know; comes as JSON on its standard input, since it holds secrets."""

    settings: Settings
    incarnation: str
    secret: str = dataclasses.field(repr=False)
    port: int = 0
    """0: any that is free."""
    progress_file: str = ""
    parent: int = 0
    """The pid of the process that started it."""
    takeover: bool = False
    """Whether an earlier keeper of this incarnation has died: its ranks are about to connect."""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one line that a keeper writes to its standard output."""

    port: int = 0
    error: str = ""
    kind: str = ""
    """Name of the error's class in `ftkit.errors`."""
