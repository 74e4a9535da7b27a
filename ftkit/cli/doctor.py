"""Check etcd, the settings and this machine, and say what to do about what is not right.

Run it where a replica group is to run, with the environment that it will have. Exit code 1 when a check
fails; warnings are no failure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import msgspec

from ftkit.cli.checks import Finding, TorchProbe, fail, machine, ok
from ftkit.cli.connect import CONNECTION, add_json
from ftkit.cli.etcd_checks import etcd_findings
from ftkit.config import FIELDS, Settings, child_environment
from ftkit.config import add_arguments as add_settings
from ftkit.errors import ConfigError

EXAMPLES = """\
examples:
  ftkit doctor
  ftkit doctor --etcd https://10.0.0.1:2379 --etcd-ca-cert ca.pem --bind 10.0.0.7
  ftkit doctor --json | jq '.findings[] | select(.status == "fail")'
"""

_MORE = ("replica_id", "bind", "advertise", "timeout", "lease_ttl", "outage_grace", "takeover_after")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `ftkit doctor`."""
    add_json(parser)
    parser.add_argument("--no-torch", action="store_true", help="do not import torch, which takes seconds")
    add_settings(parser, (*CONNECTION, *_MORE))


def run(args: argparse.Namespace) -> int:
    """Run all checks and print the findings as they come."""
    probe = None if args.no_torch else TorchProbe()  # runs beside the other checks
    try:
        findings = []
        for finding in _all(args, probe):
            findings.append(finding)
            if not args.json:
                _print(finding)
    finally:
        if probe is not None:
            probe.close()
    counts = {s: sum(f.status == s for f in findings) for s in ("ok", "warn", "fail")}
    if args.json:
        print(msgspec.json.encode({"findings": findings, "counts": counts}).decode())
    else:
        print(f"{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failures")
    return 1 if counts["fail"] else 0


def _all(args: argparse.Namespace, probe: TorchProbe | None) -> Iterator[Finding]:
    try:
        settings = Settings.from_arguments(args)
    except ConfigError as error:
        advice = "correct the settings; etcd and the address are checked when they are right"
        yield fail("settings", str(error), advice)
    else:
        yield _settings(settings)
        yield from etcd_findings(settings)
        yield from machine(settings)
    if probe is not None:
        yield from probe.findings()


def _settings(settings: Settings) -> Finding:
    environ = child_environment()
    given = [v for field in FIELDS for v in field.variables if environ.get(v)]
    source = f"; from the environment: {', '.join(given)}" if given else ""
    return ok(
        "settings",
        f"consistent: lease {settings.lease_ttl} s < outage grace {settings.outage_grace:g} s < takeover "
        f"{settings.takeover_after:g} s; timeout {settings.timeout:g} s{source}",
    )


def _print(finding: Finding) -> None:
    mark = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}[finding.status]
    if sys.stdout.isatty() and not child_environment().get("NO_COLOR"):
        mark = f"\x1b[{ {'ok': 32, 'warn': 33, 'fail': 31}[finding.status] }m{mark}\x1b[0m"
    print(f"{mark}  {finding.check}: {finding.text}", flush=True)
    if finding.advice:
        print(f"      -> {finding.advice}", flush=True)
