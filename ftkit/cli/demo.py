"""Watch training survive failures on this machine.

Starts an etcd and three replica groups that train a small language model on real text. On the way one of them
is killed and started again, and one is frozen, as when a machine stands still, and thawed later. At the end
you see what each fault cost the others, moment by moment, a picture of the loss with the faults marked on it,
and whether all replicas hold the same bits and each sample was used exactly once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ftkit.config import EMBEDDED, child_environment
from ftkit.demo.checks import all_checks
from ftkit.demo.director import Action, Director, Finish, Freeze, Kill, Thaw
from ftkit.demo.journal import Tail
from ftkit.demo.picture import draw
from ftkit.demo.processes import END_S, Launch, find_script, signal_trainer
from ftkit.demo.recovery import measure
from ftkit.demo.report import Report, as_text, make_report
from ftkit.demo.story import Story
from ftkit.demo.view import Narrator, View, open_view, stream_for
from ftkit.errors import ConfigError
from ftkit.launcher.process import die_with_parent

EXAMPLES = """\
examples:
  the whole thing, about a minute:       ftkit demo
  other moments and other victims:       ftkit demo --seed 7
  keep picture, logs and journals:       ftkit demo --out demo
  the figures for a script:              ftkit demo --json

exit code: 0 when everything it claims held, 1 when not.
"""

_LOOK_S = 0.03
_STEP_S = 0.08
"""The pace of the training, so that three groups on two cores leave room for whoever starts again."""
_LEASE_TTL_S = 2
_TIMEOUT_S = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `ftkit demo`."""
    add = parser.add_argument
    add("--groups", type=int, default=3, metavar="N", help="replica groups (default: 3)")
    add(
        "--seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="train at least this long (default: 30 s; starting and coming back take their own time)",
    )
    add("--seed", type=int, default=0, help="of the faults' moments and victims, and the model (default: 0)")
    add("--no-kill", action="store_true", help="leave out the SIGKILL")
    add("--no-freeze", action="store_true", help="leave out the SIGSTOP")
    add("--out", type=Path, metavar="DIR", help="where picture and logs go (default: a temporary folder)")
    add(
        "--script",
        type=Path,
        metavar="FILE",
        help="the train_lm.py to run (default: the one that comes along)",
    )
    add("--json", action="store_true", help="print the outcome as one JSON object; progress goes to stderr")


def run(args: argparse.Namespace) -> int:
    """Run the demo and return 0 when all that it claims held."""
    if args.groups < 2:
        raise ConfigError(f"--groups must be at least 2, got {args.groups}: somebody has to survive")
    if args.seconds <= 0:
        raise ConfigError(f"--seconds must be above 0, got {args.seconds:g}")
    script = args.script or find_script()
    folder = _folder(args.out)
    replicas = tuple(f"trainer-{i}" for i in range(args.groups))
    director = Director(
        replicas, seed=args.seed, seconds=args.seconds, kill=not args.no_kill, freeze=not args.no_freeze
    )
    begun = time.monotonic()
    view = open_view(stream_for(args.json), replicas, begun)
    view.note(f"starting etcd and {args.groups} replica groups; logs are in {folder}", begun)
    try:
        with _sigterm_interrupts(), _launch(args, script, folder) as launch:
            story, trouble = _Show(launch, director, replicas, view, folder / "journal").play()
    finally:
        view.close()
    report = _report(args, story, director, replicas, folder, trouble, time.monotonic() - begun)
    (folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    if args.json:
        print(msgspec.json.encode(report).decode())
    else:
        print(f"\n{as_text(report)}")
    return 0 if report.ok else 1


def _folder(wanted: Path | None) -> Path:
    """Return an empty-enough folder: journals of an earlier demo would be taken for this one's."""
    folder = Path(tempfile.mkdtemp(prefix="ftkit-demo-")) if wanted is None else wanted.resolve()
    (folder / "journal").mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("journal/*.jsonl"), *folder.glob("logs/*.log"), *folder.glob("loss.png")]:
        old.unlink()
    return folder


def _launch(args: argparse.Namespace, script: Path, folder: Path) -> Launch:
    # The user's own job is none of the demo's business.
    env = {k: v for k, v in child_environment().items() if not k.startswith(("FTKIT_", "ETCDCTL_"))}
    env |= {"FTKIT_LEASE_TTL": str(_LEASE_TTL_S), "FTKIT_TIMEOUT": str(_TIMEOUT_S)}
    expected = max(40, round(args.seconds / _STEP_S))
    train = ["--steps", 1_000_000, "--decay-steps", expected, "--seed", args.seed, "--step-time", _STEP_S]
    train += ["--width", 96, "--layers", 3, "--context", 64, "--batch-size", 8, "--lr", 0.003]
    train += ["--hash-every", 10, "--eval-every", 50, "--log-samples", "--log-jsonl", folder / "journal"]
    words = ["--groups", args.groups, "--etcd", EMBEDDED, "--job", "demo", "--grace", END_S / 2]
    words += [
        "--min-replicas",
        max(1, args.groups - 1),
        "--restart-delay",
        0.2,
        "--max-restarts",
        3,
        "--log-dir",
        folder / "logs",
    ]
    command = [str(word) for word in [*words, "--", script, *train]]
    return Launch(command, env=env, log=folder / "launch.log", before_exec=die_with_parent())


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end the launch in order too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Show:
    """The running demo: what the journals tell goes to the director, what it decides is carried out."""

    def __init__(
        self, launch: Launch, director: Director, replicas: tuple[str, ...], view: View, journal: Path
    ) -> None:
        self._launch = launch
        self._director = director
        self._replicas = replicas
        self._view = view
        self._tail = Tail(journal)
        self._story = Story()
        self._narrator = Narrator()

    def play(self) -> tuple[Story, str]:
        """Run it to its end; return the story, and what did not happen in time."""
        try:
            trouble = self._play()
            if not trouble:
                trouble = self._wait_end()
        except KeyboardInterrupt:
            self._thaw_all()
            raise
        self._thaw_all()
        self._look()
        return self._story, trouble

    def _play(self) -> str:
        while True:
            now = self._look()
            if self._launch.exit_code is not None:
                return (
                    f"the launch ended too early (exit {self._launch.exit_code}): {self._launch.last_words()}"
                )
            action = self._director.decide(self._story, now)
            if action is not None:
                self._carry_out(action)
            if isinstance(action, Finish):
                return action.trouble
            time.sleep(_LOOK_S)

    def _look(self) -> float:
        for line in self._tail.poll():
            self._story.absorb(line)
            text = self._narrator.tell(line)
            if text is not None:
                self._view.note(text, line.monotonic)
        now = time.monotonic()
        self._view.update(self._story, self._director, now)
        return now

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Finish):
            self._view.note(action.trouble or "that is all: asking all groups to leave", time.monotonic())
            self._launch.ask_to_end()
            return
        number, text = {
            Kill: (signal.SIGKILL, f"SIGKILL to {action.victim}"),
            Freeze: (signal.SIGSTOP, f"SIGSTOP to {action.victim} and its keeper"),
            Thaw: (signal.SIGCONT, f"SIGCONT to {action.victim} and its keeper"),
        }[type(action)]
        pid = self._story.pid(action.victim)
        assert pid is not None, "the director harms only those that train"
        now = time.monotonic()
        signal_trainer(pid, action.victim, number, family=not isinstance(action, Kill))
        self._director.done(now)
        self._view.note(text, now)

    def _wait_end(self) -> str:
        deadline = time.monotonic() + END_S
        while self._launch.exit_code is None:
            if self._look() > deadline:
                return f"the groups did not leave within {END_S:g} s: {self._launch.last_words()}"
            time.sleep(_LOOK_S)
        if self._launch.exit_code != 0:
            return f"the launch ended with exit {self._launch.exit_code}: {self._launch.last_words()}"
        return ""

    def _thaw_all(self) -> None:
        """Nobody may stay frozen, whatever happened."""
        for replica in self._replicas:
            pid = self._story.pid(replica)
            if pid is not None:
                signal_trainer(pid, replica, signal.SIGCONT, family=True)


def _report(
    args: argparse.Namespace,
    story: Story,
    director: Director,
    replicas: tuple[str, ...],
    folder: Path,
    trouble: str,
    seconds: float,
) -> Report:
    recoveries = [measure(story, fault) for fault in director.faults]
    picture = folder / "loss.png"
    if importlib.util.find_spec("matplotlib") is not None and story.lineage():
        draw(story, recoveries, director.begun or story.lineage()[0].monotonic, picture)
    return make_report(
        story,
        recoveries,
        all_checks(story, replicas, recoveries),
        trouble=trouble,
        replicas=replicas,
        seed=args.seed,
        seconds=seconds,
        picture=str(picture) if picture.exists() else "",
        folder=str(folder),
    )
