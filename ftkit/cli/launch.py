"""Run replica groups as local processes and keep them running.

Each group (trainer-0, trainer-1, ...) is one full copy of the model, on one process or, with
--nproc-per-group, on several ranks that get torchrun's variables. A group that fails is started again, with
a growing delay; exit 0 means done, exit 2 (a configuration error) is final. SIGTERM or Ctrl-C asks all groups
to leave at a step boundary, a second one kills them. No process outlives the launch.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

from ftkit.config import DEFAULT_ENDPOINT, EMBEDDED, FIELDS, Settings, as_variables, child_environment
from ftkit.config import add_arguments as add_settings
from ftkit.errors import ConfigError
from ftkit.launcher.embedded import embedded_etcd
from ftkit.launcher.output import Console
from ftkit.launcher.process import Guardian
from ftkit.launcher.restart import RestartPolicy
from ftkit.launcher.spec import LaunchSpec, command_line
from ftkit.launcher.supervisor import Supervisor

TAKES_COMMAND = True

EXAMPLES = """\
examples:
  two groups of one process, with an etcd of their own:
    ftkit launch --groups 2 -- train.py --lr 0.1
  four groups of two ranks each (FSDP inside the group), on an existing etcd:
    ftkit launch --groups 4 --nproc-per-group 2 --etcd http://10.0.0.1:2379 --job llm-7 -- -m my.train
  two machines, two groups each; on the second one:
    ftkit launch --groups 2 --first-index 2 --etcd http://10.0.0.1:2379 --job llm-7 -- train.py
  give up a lost machine after 3 s, a stuck collective after 20 s:
    ftkit launch --groups 2 --lease-ttl 3 --timeout 20 -- train.py
  keep each group's output in a file:
    ftkit launch --groups 2 --log-dir logs -- train.py

exit code: 0 when all groups ended well, else that of the first group that failed (128 + n: ended by
signal n). A launched shell script should `exec` its last command, so that SIGTERM reaches it.
"""

_CONNECTION = ("etcd", "etcd_ca_cert", "etcd_cert", "etcd_key", "etcd_user", "job")
_OF_EACH_GROUP = ("replica_id", "group_rank", "group_world_size", "master_addr", "master_port")
_FLAGS = (*_CONNECTION, "min_replicas")
_TRAINERS = tuple(
    field.name for field in FIELDS if field.name not in (*_FLAGS, *_OF_EACH_GROUP) and not field.secret
)
"""What `launch` hands on as it is; a secret would show in `ps`, so that it stays a variable."""
_ABOUT_TRAINERS = """\
Every rank gets those that are given as its variables. All are checked here, against each other too, before
anything starts. What the script itself says, as in Manager(timeout=30), beats them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `ftkit launch`."""
    policy = RestartPolicy()
    parser.usage = "ftkit launch --groups N [options] -- train.py [arguments]"
    parser.add_argument("--groups", type=int, required=True, metavar="N", help="number of replica groups")
    parser.add_argument(
        "--nproc-per-group", type=int, default=1, metavar="M", help="ranks of each group (default: 1)"
    )
    add_settings(parser, _FLAGS)
    restart = parser.add_argument_group("restarts")
    restart.add_argument(
        *("--max-restarts",),
        type=int,
        default=policy.max_restarts,
        metavar="N",
        help=f"restarts of a group in a row; -1: no limit (default: {policy.max_restarts})",
    )
    restart.add_argument(
        *("--restart-delay",),
        type=float,
        default=policy.first_delay_s,
        metavar="S",
        help=f"delay before the first restart, doubled for each more (default: {policy.first_delay_s:g} s)",
    )
    restart.add_argument(
        *("--max-restart-delay",),
        type=float,
        default=policy.max_delay_s,
        metavar="S",
        help=f"the longest delay (default: {policy.max_delay_s:g} s)",
    )
    restart.add_argument(
        *("--healthy-after",),
        type=float,
        default=policy.healthy_after_s,
        metavar="S",
        help=f"a group that ran this long starts counting anew (default: {policy.healthy_after_s:g} s)",
    )
    _add_more(parser)
    add_settings(parser, _TRAINERS, title="settings of the trainers", about=_ABOUT_TRAINERS)


def _add_more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("--grace",),
        type=float,
        default=30.0,
        metavar="S",
        help="time between SIGTERM and SIGKILL when groups are ended (default: 30 s)",
    )
    parser.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="also write each group's output to a file"
    )
    parser.add_argument(
        "--prefix", default="trainer", help="groups are PREFIX-0, PREFIX-1 ... (default: trainer)"
    )
    parser.add_argument(
        "--first-index", type=int, default=0, metavar="I", help="number of the first group (default: 0)"
    )
    parser.add_argument(
        *("--devices-per-group",),
        type=int,
        default=0,
        metavar="K",
        help="give each group K GPUs of its own through CUDA_VISIBLE_DEVICES (default: leave it alone)",
    )
    parser.add_argument("--no-color", action="store_true", help="no colours in a terminal")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, default=[], help="launch a Python module"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="train.py, -m module, or any command")


def run(args: argparse.Namespace) -> int:
    """Launch the groups and return when they have all ended."""
    environ = child_environment()
    settings, chosen = _settings(args, environ)
    spec = _spec(args, settings)
    width = max(len(name) + (0 if spec.nproc == 1 else 2) for name in spec.replica_ids())
    colour = sys.stdout.isatty() and not args.no_color and not environ.get("NO_COLOR")
    console = Console(sys.stdout, colour=colour, width=width)
    notices = Console(sys.stderr, colour=False, width=width)
    run_id = uuid.uuid4().hex
    with Guardian(run_id, environ) as guardian, contextlib.ExitStack() as stack:
        if settings.embedded:
            notices.line("ftkit", f"starting an etcd for this run{chosen}")
            url = stack.enter_context(embedded_etcd(guardian))
            # etcdctl's variables describe another etcd: its certificates would not fit this one.
            environ = {k: v for k, v in environ.items() if not k.startswith("ETCDCTL_")}
            environ = {k: v for k, v in environ.items() if not k.startswith("FTKIT_ETCD_")}
            environ |= {"FTKIT_ETCD": url, "FTKIT_JOB": settings.job}
        else:
            url = ",".join(settings.etcd)
            environ = child_environment(**{name: getattr(settings, name) for name in _CONNECTION})
        notices.line(
            "ftkit", f"job {settings.job} on {url}; look at it with: {_status_command(settings, url)}"
        )
        groups = f"{spec.num_groups} replica groups" if spec.num_groups > 1 else "1 replica group"
        notices.line("ftkit", f"starting {groups} of {spec.nproc} rank(s): {' '.join(spec.argv)}")
        supervisor = Supervisor(spec, env=environ, console=console, notices=notices, guardian=guardian)
        return supervisor.run()


def _settings(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Settings, str]:
    """Settle the connection; without any word about etcd it is an embedded one, and the notice says so."""
    # RANK and WORLD_SIZE around launch are not those of the groups.
    fixed: dict[str, object] = {"group_rank": 0, "group_world_size": 1}
    named = args.etcd or any(environ.get(name, "").strip() for name in ("FTKIT_ETCD", "ETCDCTL_ENDPOINTS"))
    if named:
        return Settings.from_arguments(args, **fixed), ""
    settings = Settings.from_arguments(args, etcd=EMBEDDED, **fixed)
    return settings, " (neither --etcd nor FTKIT_ETCD nor ETCDCTL_ENDPOINTS names one)"


def _spec(args: argparse.Namespace, settings: Settings) -> LaunchSpec:
    """Return what is to be launched, or raise ConfigError."""
    if args.after_dashes is not None and (args.program or args.module):
        raise ConfigError(
            f"{(args.program or args.module)[0]} stands before --, where only flags of launch may"
        )
    spec = LaunchSpec(
        argv=command_line(args.after_dashes or args.program, args.module),
        num_groups=args.groups,
        nproc=args.nproc_per_group,
        prefix=args.prefix,
        first_index=args.first_index,
        min_replicas=settings.min_replicas,
        devices_per_group=args.devices_per_group,
        restart=RestartPolicy(
            max_restarts=args.max_restarts,
            first_delay_s=args.restart_delay,
            max_delay_s=args.max_restart_delay,
            healthy_after_s=args.healthy_after,
        ),
        grace_s=args.grace,
        log_dir=args.log_dir,
        env=as_variables({name: getattr(args, name) for name in _TRAINERS}),
    )
    if settings.embedded and settings.min_replicas > spec.num_groups:
        raise ConfigError(
            f"--min-replicas {settings.min_replicas} with --groups {spec.num_groups} and an etcd of this run "
            "alone: no step could ever commit; lower one, raise the other, or name an etcd that others join"
        )
    return spec


def _status_command(settings: Settings, url: str) -> str:
    job = "" if settings.job == "default" else f" --job {settings.job}"
    etcd = "" if url == f"http://{DEFAULT_ENDPOINT}" else f" --etcd {url}"
    return f"ftkit status{etcd}{job}"
