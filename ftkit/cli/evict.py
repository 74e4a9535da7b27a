"""Throw a replica group out at once, for one that is stuck or does harm.

Its step in progress is lost. To let a healthy group go, use `ftkit drain`.
"""

from __future__ import annotations

import argparse

from ftkit.cli.control import add_request_arguments, request

EXAMPLES = """\
examples:
  ftkit evict trainer-3 --job llm-7
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `ftkit evict`."""
    add_request_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Put the request and wait for its acknowledgement."""
    return request(args, "evict")
