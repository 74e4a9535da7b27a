"""Ask a replica group to leave in order: it finishes its step, leaves at the boundary and exits 0.

No step is lost, and the others go on without it.
"""

from __future__ import annotations

import argparse

from ftkit.cli.control import add_request_arguments, request

EXAMPLES = """\
examples:
  ftkit drain trainer-3 --job llm-7
  ftkit drain trainer-3 --wait --timeout 600      before its machine is switched off
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `ftkit drain`."""
    add_request_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Put the request and wait for its acknowledgement."""
    return request(args, "drain")
