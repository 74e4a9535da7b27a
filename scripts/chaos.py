#!/usr/bin/env python3
"""Break a job on this machine from a seed, then prove from its logs that nothing was lost.

    python scripts/chaos.py --groups 3 --seconds 60 --seed 7    a minute of faults
    python scripts/chaos.py --plan --seed 7                     only show what would be done
    python scripts/chaos.py --faults kill,etcd-wipe --every 3   only these kinds
    make soak MINUTES=30                                        a long night

Starts an etcd and replica groups that train with train_lm.py, each by an `ftkit launch` of its own, as on
machines of their own. After a calm time, whose speed is the measure, faults strike. At the end all groups
must train together again; then the logs are judged as by `ftkit verify`. Exit code 1: a promise was broken.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ftkit.chaos.checks import pauses
from ftkit.chaos.cost import longest_pauses
from ftkit.chaos.faults import ETCD_FAULTS, KINDS, Fault, plan
from ftkit.chaos.gauges import Gauges, folder_bytes
from ftkit.chaos.log import read
from ftkit.chaos.oracle import judge
from ftkit.chaos.result import Result, Strike, report
from ftkit.config import child_environment
from ftkit.demo.journal import Tail
from ftkit.demo.processes import Launch, descendants, signal_trainer
from ftkit.demo.story import Story
from ftkit.errors import ConfigError, FtkitError
from ftkit.keeper.embedded import EtcdServer
from ftkit.keeper.etcd import Etcd, EtcdSettings
from ftkit.launcher.process import die_with_parent

JOB = "chaos"
LOOK_S = 0.02
PATIENCE_S = 90.0
"""How long the job may need until all groups train together; a restart imports torch on a busy machine."""
DEADLY = ("kill", "lose-machine", "drain", "blink", "freeze", "freeze-trainer")
"""Faults that take a group out for a while: somebody else must be there to keep the state."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    text = __doc__ or ""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--groups", type=int, default=3, metavar="N", help="replica groups (default: 3)")
    add("--seconds", type=float, default=60.0, metavar="S", help="time in which faults strike (default: 60)")
    add("--seed", type=int, default=0, help="of the faults (default: 0)")
    add("--every", type=float, default=5.0, metavar="S", help="mean time between two faults (default: 5)")
    add("--faults", metavar="KIND,KIND", help=f"kinds of faults (default: all: {', '.join(KINDS)})")
    add(
        "--turmoil",
        type=float,
        default=0.25,
        help="share of faults that strike in the middle of a recovery (default: 0.25)",
    )
    add("--calm", type=float, metavar="S", help="fault-free time before (default: 5 to 30 s)")
    add("--min-replicas", type=int, default=1, help="fewest groups that may commit (default: 1)")
    add("--step-time", type=float, default=0.1, metavar="S", help="a step lasts this long (default: 0.1)")
    add("--lease-ttl", type=int, default=2, metavar="S", help="life of a lease (default: 2)")
    add("--max-pause", type=float, default=30.0, metavar="S", help="longest pause allowed (default: 30)")
    add("--min-goodput", type=float, default=0.0, metavar="G", help="fail below this share (default: 0)")
    add("--out", type=Path, metavar="DIR", help="where the logs go (default: a temporary folder)")
    add("--plan", action="store_true", help="print the plan and exit")
    add("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    return parser.parse_args(argv)


class Job:
    """The etcd and the groups, and what their journals tell."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.names = tuple(f"trainer-{i}" for i in range(args.groups))
        self.story = Story()
        self.trouble = ""
        self.etcd = EtcdServer(data_dir=folder / "etcd")
        self._tail = Tail(folder / "journal")
        self._journal = os.open(folder / "journal" / "chaos.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._launches: dict[int, Launch] = {}
        self._num_launched = 0
        self._struck: dict[str, float] = {}
        self._undo: list[tuple[float, str, Callable[[], None]]] = []
        self._ending = False
        self.gauges = Gauges()
        self._next_reading = 0.0

    # -- what runs -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start etcd and all groups."""
        self.etcd.start()
        for index in range(self.args.groups):
            self._launch(index)

    def _launch(self, index: int) -> None:
        """Start a group as on a machine of its own: a group that was drained comes back as a new one."""
        args, folder = self.args, self.folder
        env = {k: v for k, v in child_environment().items() if not k.startswith(("FTKIT_", "ETCDCTL_"))}
        env |= {"FTKIT_LEASE_TTL": str(args.lease_ttl), "FTKIT_TIMEOUT": "20", "OMP_NUM_THREADS": "1"}
        words = ["--groups", 1, "--first-index", index, "--etcd", self.etcd.url, "--job", JOB, "--grace", 20]
        words += ["--min-replicas", args.min_replicas, "--restart-delay", 0.2, "--max-restart-delay", 1]
        words += ["--max-restarts", -1, "--log-dir", folder / "logs", "--"]
        words += [Path(__file__).with_name("train_lm.py"), "--width", 32, "--layers", 1, "--context", 32]
        words += ["--batch-size", 4, "--steps", 10_000_000, "--decay-steps", 10_000, "--eval-every", 0]
        words += ["--hash-every", 1, "--log-samples", "--step-time", args.step_time]
        words += ["--log-jsonl", folder / "journal"]
        self._num_launched += 1
        log = folder / "logs" / f"launch-{index}.{self._num_launched}.log"
        self._launches[index] = Launch(
            [str(w) for w in words], env=env, log=log, before_exec=die_with_parent()
        )

    def note(self, type: str, **content: object) -> None:
        """Append a line to the journal of faults, for the oracle."""
        line = {"type": type, "monotonic": time.monotonic(), **content}
        os.write(self._journal, json.dumps(line).encode() + b"\n")

    def look(self) -> float:
        """Take in what the journals tell, take back faults that are due; return the time."""
        for line in self._tail.poll():
            self.story.absorb(line)
        now = time.monotonic()
        for due in [u for u in self._undo if u[0] <= now]:
            self._undo.remove(due)
            due[2]()
        for index, launch in self._launches.items():
            code = launch.exit_code
            if code is None or self._ending:
                continue
            if code != 0:
                self.trouble = self.trouble or f"group {index} ended with {code}: {launch.last_words(5)}"
            self._launch(index)
        if now >= self._next_reading:
            self._next_reading = now + 5.0
            for name in self.names:
                pid = self.story.pid(name)
                if pid is not None:
                    self.gauges.look(name, pid, now)
                    for keeper in keepers_of(pid):
                        self.gauges.look(f"keeper of {name}", keeper, now)
        return now

    def together(self) -> bool:
        """Say whether all groups commit in one epoch, each after what was last done to it."""
        return not self._undo and self.story.together(self.names) and self.fit() == set(self.names)

    def fit(self) -> set[str]:
        """Return the groups that have committed of late, and after what was done to them."""
        found, now = set(), time.monotonic()
        for name in self.names:
            last = self.story.last_commit(name)
            if last is not None and last.monotonic > max(self._struck.get(name, 0.0), now - 2.0):
                found.add(name)
        return found

    def wait_together(self, patience_s: float) -> bool:
        """Wait until all groups train together."""
        deadline = time.monotonic() + patience_s
        while not self.together():
            if self.look() > deadline:
                return False
            time.sleep(LOOK_S)
        return True

    # -- faults --------------------------------------------------------------------------------------

    def ready_for(self, fault: Fault) -> bool:
        """Say whether the fault may strike now: never the last one that has the state."""
        if fault.calm:
            return self.together()
        target = "etcd" if fault.victim < 0 else self.names[fault.victim]
        if any(name == target for _, name, _ in self._undo):
            return False
        if fault.kind in ETCD_FAULTS:
            return True
        newest = self.story.newest()
        if newest is None or self.story.pid(target) is None:
            return False
        keepers = self.fit() & set(newest.members) - {target}
        return fault.kind not in DEADLY or len(keepers) >= max(1, self.args.min_replicas)

    def strike(self, fault: Fault) -> None:
        """Carry a fault out; one that lasts is taken back later."""
        if fault.victim >= 0:
            self._strike_group(fault, self.names[fault.victim])
        else:
            self._strike_etcd(fault)

    def _strike_group(self, fault: Fault, name: str) -> None:
        pid = self.story.pid(name)
        assert pid is not None, "only those that have started are struck"
        keepers = keepers_of(pid)
        if fault.kind in ("kill", "lose-machine"):
            self._signal(name, signal.SIGKILL, [*(keepers if fault.kind == "lose-machine" else []), pid])
        elif fault.kind == "drain":
            self._signal(name, signal.SIGTERM, [pid])
        elif fault.kind == "kill-keeper":
            self._signal(name, signal.SIGKILL, keepers)
        elif fault.kind == "revoke-lease":
            with contextlib.suppress(FtkitError), self._client() as client:
                record = client.get(f"/ftkit/{JOB}/members/{name}")
                if record is not None and record.lease:
                    client.revoke(record.lease)
        else:
            pids = [pid] if fault.kind == "freeze-trainer" else [*keepers, pid]
            self._signal(name, signal.SIGSTOP, pids)
            self._later(fault.lasting, name, lambda: self._thaw(name, pids))
        self._struck[name] = time.monotonic()

    def _thaw(self, name: str, pids: list[int]) -> None:
        self._signal(name, signal.SIGCONT, pids)
        self._struck[name] = time.monotonic()

    def _signal(self, name: str, number: signal.Signals, pids: list[int]) -> None:
        for pid in pids:
            # Noted before: whoever dies of it cannot be found without its fault.
            self.note("fault", kind=number.name, pid=pid, replica=name)
            signal_trainer(pid, name, number)

    def _strike_etcd(self, fault: Fault) -> None:
        etcd = self.etcd
        self.note("fault", kind=fault.kind)
        if fault.kind == "etcd-compact":
            with contextlib.suppress(FtkitError), self._client() as client:
                client.compact(client.list(f"/ftkit/{JOB}/")[1])
            return
        if fault.kind == "etcd-freeze":
            etcd.freeze()
            self._later(fault.lasting, "etcd", etcd.thaw)
            return
        {"etcd-kill": etcd.kill, "etcd-restart": etcd.stop, "etcd-wipe": etcd.wipe}[fault.kind]()
        self._later(fault.lasting, "etcd", lambda: etcd.start(wait=False))

    def _client(self) -> Etcd:
        return Etcd(EtcdSettings(endpoints=(self.etcd.url,), timeout_s=2.0))

    def _later(self, seconds: float, target: str, undo: Callable[[], None]) -> None:
        self._undo.append((time.monotonic() + seconds, target, undo))

    # -- the end -------------------------------------------------------------------------------------

    def undo_all(self) -> None:
        """Take back all faults that still last: nobody may stay frozen."""
        undo, self._undo = self._undo, []
        for _, _, fn in undo:
            fn()

    def end(self) -> None:
        """Ask all groups to leave, see that they do, and say that nobody runs any more."""
        self._ending = True
        self.undo_all()
        for launch in self._launches.values():
            launch.ask_to_end()
        deadline = time.monotonic() + 40.0
        while any(x.exit_code is None for x in self._launches.values()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        for index, launch in self._launches.items():
            if launch.exit_code != 0:
                code = launch.exit_code
                how = "did not end" if code is None else f"ended with {code}"
                self.trouble = self.trouble or f"group {index} {how}: {launch.last_words(5)}"
            with launch:
                pass
        self.etcd.stop()
        self.look()
        self.note("over")
        os.close(self._journal)


def keepers_of(pid: int) -> list[int]:
    """Return the keepers that a trainer has started."""
    found = []
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if b"ftkit.keeper" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def say(text: str) -> None:
    """Tell of progress."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def run_faults(job: Job, faults: list[Fault], begun: float, seconds: float) -> tuple[list[Strike], int]:
    """Carry the plan out, each fault at its time or as soon as it may; return what was done."""
    strikes: list[Strike] = []
    todo = list(faults)
    waiting_since: float | None = None
    while (now := job.look()) - begun < seconds and not job.trouble:
        if todo and now - begun >= todo[0].at:
            waiting_since = waiting_since or now
            if job.ready_for(todo[0]):
                fault = todo.pop(0)
                say(f"{now - begun:6.1f} s  {fault}")
                strikes.append(Strike(fault=fault, at=time.monotonic(), text=str(fault)))
                job.strike(fault)
                waiting_since = None
            elif now - waiting_since > PATIENCE_S:
                job.trouble = f"the job did not recover within {PATIENCE_S:g} s before {todo[0]}"
        time.sleep(LOOK_S)
    return strikes, len(todo)


def play(args: argparse.Namespace, folder: Path, faults: list[Fault]) -> Result:
    """Run the job, break it, end it and judge it."""
    job = Job(args, folder)
    strikes: list[Strike] = []
    skipped, begun, until, rate = len(faults), 0.0, 0.0, 0.0
    try:
        job.start()
        say(f"{args.groups} replica groups are starting; logs are in {folder}")
        if not job.wait_together(2 * PATIENCE_S):
            job.trouble = job.trouble or "the groups did not come together at the start"
        calm_s = args.calm or max(5.0, min(30.0, args.seconds / 5))
        calm_from = time.monotonic()
        while not job.trouble and job.look() < calm_from + calm_s:
            time.sleep(LOOK_S)
        begun = time.monotonic()
        rate = count_steps(job.story, calm_from, begun) / calm_s
        say(f"calm: {rate:.1f} steps/s; now {len(faults)} faults in {args.seconds:g} s")
        if not job.trouble:
            strikes, skipped = run_faults(job, faults, begun, args.seconds)
        until = time.monotonic()
        job.undo_all()
        if not job.trouble and not job.wait_together(PATIENCE_S):
            job.trouble = f"not all groups trained together within {PATIENCE_S:g} s after the last fault"
    finally:
        job.end()
    log = read(folder / "journal")
    verdict = judge(log, max_pause_s=args.max_pause, min_replicas=args.min_replicas, strict=True)
    times = [(x.at, "" if x.fault.victim < 0 else job.names[x.fault.victim]) for x in strikes]
    for strike, longest in zip(strikes, longest_pauses(pauses(log), times), strict=True):
        strike.longest_pause_s = round(longest, 3)
    steps = count_steps(job.story, begun, until)
    expected = rate * (until - begun)
    goodput = round(steps / expected, 4) if expected else 0.0
    return Result(
        ok=verdict.ok and not job.trouble and goodput >= args.min_goodput,
        seed=args.seed,
        trouble=job.trouble,
        goodput=goodput,
        steps=steps,
        fault_free_steps_per_s=round(rate, 3),
        seconds=round(until - begun, 1),
        num_skipped=skipped,
        strikes=strikes,
        growth=job.gauges.growth(),
        etcd_bytes=folder_bytes(folder / "etcd"),
        verdict=verdict,
        folder=str(folder),
    )


def count_steps(story: Story, since: float, until: float) -> int:
    """Count the committed steps that lived on."""
    return sum(since <= s.monotonic < until for s in story.lineage())


def main(argv: list[str] | None = None) -> int:
    """Make the plan, carry it out, judge, report."""
    args = arguments(argv)
    kinds = KINDS if not args.faults else tuple(k.strip() for k in args.faults.split(","))
    faults = plan(
        args.seed,
        seconds=args.seconds,
        groups=args.groups,
        every_s=args.every,
        lease_ttl=args.lease_ttl,
        kinds=kinds,
        turmoil=args.turmoil,
    )
    if args.plan:
        for fault in faults:
            print(f"{fault.at:7.2f} s  {fault}{'' if fault.calm else ', in the middle of a recovery'}")
        return 0
    if args.groups <= args.min_replicas:
        raise ConfigError(f"--groups {args.groups} must be above --min-replicas {args.min_replicas}")
    folder = Path(tempfile.mkdtemp(prefix="ftkit-chaos-")) if args.out is None else args.out.resolve()
    for part in ("journal", "logs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    if any((folder / "journal").iterdir()):
        raise ConfigError(f"{folder} holds the logs of another run, which would be taken for this one's")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside, it ends the job in order
    result = play(args, folder, faults)
    encoded = msgspec.json.encode(result)
    (folder / "report.json").write_bytes(msgspec.json.format(encoded))
    print(encoded.decode() if args.json else report(result))
    return 0 if result.ok else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"chaos: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
