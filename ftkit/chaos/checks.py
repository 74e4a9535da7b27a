"""Decide from the lines of all trainers whether a job kept its promises.

Pure: the log goes in, the outcome of each check comes out. Clocks of different machines are never compared:
`pauses` looks at one process at a time. A check that found nothing to look at says so and is no success.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from ftkit.chaos.log import Entry, Life, Log, version_of
from ftkit.core.model import Version


class Violation(msgspec.Struct, frozen=True):
    """One broken promise and where it shows."""

    where: str
    text: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a check looked at and what it found."""

    name: str
    looked_at: str
    """How much was checked, or why nothing was."""
    checked: bool = True
    violations: tuple[Violation, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether something was checked and nothing found."""
        return self.checked and not self.violations


def outcome(name: str, count: int, of_what: str, wrong: Iterable[Violation], nothing: str) -> Outcome:
    """Build an outcome; with nothing counted the reason is `nothing`."""
    found = tuple(wrong)
    checked = count > 0 or bool(found)
    return Outcome(
        name=name,
        looked_at=f"{count} {of_what}" if checked else nothing,
        checked=checked,
        violations=found,
    )


def lineage(log: Log) -> list[list[Entry]]:
    """Return the commits that count, one list of lines for each step number.

    A step may have been committed twice: by members that died with it before the others heard of it, and
    again by those. The later epoch is the one that lived on.
    """
    found: dict[int, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for life in log.lives:
        for entry in life.commits:
            found[entry.line.step][version_of(entry).epoch].append(entry)
    return [found[step][max(found[step])] for step in sorted(found)]


def one_state_per_version(log: Log) -> Outcome:
    """I1: whoever stands at one version holds the same bits."""
    known: dict[tuple[Version, int], dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in log.entries("hash", "end"):
        version = version_of(entry)
        # Before the first step each has weights of its own; a half written state has no version.
        if entry.line.sha256 and version.step > 0 and version.epoch > 0:
            known[version, entry.line.rank][entry.line.sha256].append(entry)
    wrong = []
    compared = 0
    for (version, _), by in sorted(known.items()):
        tellers = {e.line.replica for entries in by.values() for e in entries}
        compared += len(tellers) > 1
        if len(by) > 1:
            told = sorted(((entries[0], sha) for sha, entries in by.items()), key=lambda t: t[0].where)
            text = ", ".join(f"{e.line.replica} {sha[:12]} ({e.where})" for e, sha in told)
            wrong.append(Violation(told[1][0].where, f"version {version} names {len(by)} states: {text}"))
    return outcome(
        "one state per version",
        compared,
        f"versions compared between replicas, of {len(known)} with a hash",
        wrong,
        "no version has hashes of two replicas (train with --hash-every)",
    )


def steps_rise_by_one(log: Log) -> Outcome:
    """Each process commits step after step but for its heals; the surviving lineage has no gap."""
    wrong: list[Violation] = []
    count = 0
    for life in log.lives:
        at: int | None = None
        for entry in life.entries:
            line = entry.line
            if line.type == "event" and line.kind in ("healed", "settled"):
                at = line.step
            elif line.type == "step" and line.committed:
                count += 1
                if at is not None and line.step != at + 1:
                    wrong.append(Violation(entry.where, f"{life.name} commits step {line.step} after {at}"))
                if line.version and version_of(entry) != (line.epoch, line.step):
                    text = f"step {line.step} of epoch {line.epoch} leads to version {line.version}"
                    wrong.append(Violation(entry.where, f"{life.name}: {text}"))
                at = line.step
    for (before, *_), (after, *_) in itertools.pairwise(lineage(log)):
        if after.line.step != before.line.step + 1:
            text = f"nobody committed a step between {before.line.step} and {after.line.step}"
            wrong.append(Violation(after.where, text))
    return outcome("committed steps rise by one", count, "commits", wrong, "no step was committed")


def epochs_rise(log: Log) -> Outcome:
    """A process never goes back to an earlier epoch, and its successor begins in a later one."""
    wrong: list[Violation] = []
    count = 0
    last: dict[tuple[str, int], Entry] = {}
    for life in log.lives:
        newest = 0
        for entry in life.entries:
            line = entry.line
            if line.epoch <= 0 or line.type not in ("draw", "step", "event"):
                continue
            count += 1
            if line.epoch < newest:
                wrong.append(Violation(entry.where, f"{life.name} is in epoch {line.epoch} after {newest}"))
            newest = max(newest, line.epoch)
        commits = life.commits
        if not commits:
            continue
        before = last.get((life.replica, life.rank))
        if before is not None and version_of(commits[0]).epoch <= version_of(before).epoch:
            text = (
                f"{life.name} commits in epoch {version_of(commits[0]).epoch}, and so did its predecessor "
                f"({before.where})"
            )
            wrong.append(Violation(commits[0].where, text))
        last[life.replica, life.rank] = commits[-1]
    return outcome("epochs only rise", count, "lines", wrong, "no line names an epoch")


def agreement(log: Log) -> Outcome:
    """I2: an epoch has one list of members, and only members commit in it."""
    wrong: list[Violation] = []
    first: dict[int, Entry] = {}
    for life in log.lives:
        for entry in life.commits:
            line = entry.line
            known = first.setdefault(line.epoch, entry)
            if line.members != known.line.members:
                text = f"epoch {line.epoch} has members {', '.join(line.members)}; "
                text += f"{', '.join(known.line.members)} at {known.where}"
                wrong.append(Violation(entry.where, text))
            if line.replica not in line.members:
                text = f"{life.name} commits in epoch {line.epoch} without being a member"
                wrong.append(Violation(entry.where, text))
    return outcome("one list of members per epoch", len(first), "epochs", wrong, "no step was committed")


def no_superseded_commit(log: Log) -> Outcome:
    """I3: once a later epoch has committed, an earlier one does not go on.

    All members of an epoch vote for its last step before any of them enters a later one, which therefore goes
    on at that step, or repeats it when none of those who read the vote is left. No clock is needed.
    """
    bounds: dict[int, tuple[Entry, Entry]] = {}
    for life in log.lives:
        for entry in life.commits:
            epoch = version_of(entry).epoch
            low, high = bounds.get(epoch, (entry, entry))
            low = min(low, entry, key=lambda e: e.line.step)
            high = max(high, entry, key=lambda e: e.line.step)
            bounds[epoch] = (low, high)
    wrong = []
    highest: Entry | None = None
    for epoch in sorted(bounds):
        low, high = bounds[epoch]
        if highest is not None and highest.line.step > low.line.step:
            text = (
                f"step {highest.line.step} is committed in epoch {version_of(highest).epoch}, although epoch "
                f"{epoch} had gone on at step {low.line.step} ({low.where})"
            )
            wrong.append(Violation(highest.where, text))
        if highest is None or high.line.step >= highest.line.step:
            highest = high
    return outcome(
        "nobody commits in a superseded epoch", len(bounds), "epochs", wrong, "no step was committed"
    )


def enough_members(log: Log, min_replicas: int) -> Outcome:
    """No step is committed by fewer replica groups than agreed."""
    commits = [e for life in log.lives for e in life.commits]
    wrong = [
        Violation(e.where, f"step {e.line.step} is committed by {len(e.line.members)} members")
        for e in commits
        if len(e.line.members) < min_replicas
    ]
    return outcome(
        f"at least {min_replicas} members", len(commits), "commits", wrong, "no step was committed"
    )


def readable(log: Log) -> Outcome:
    """What was written can be read; a line torn by the death of its writer is none that anybody relied on."""
    wrong = [Violation(f"{c.file}:{c.number}", f"unreadable: {c.text}") for c in log.cuts if not c.torn]
    torn = sum(c.torn for c in log.cuts)
    return outcome(
        "the log is whole",
        log.num_lines,
        f"lines of {len(log.files)} files, {len(log.lives)} processes" + (f", {torn} torn" if torn else ""),
        wrong,
        "there is no line",
    )


DEADLY = frozenset({"SIGKILL", "raise"})
"""Kinds of fault after which a process ends with an error, or without a last word."""


def survivors_stay(log: Log) -> Outcome:
    """No trainer ends with an error, and none ends without a word that nobody killed."""
    wrong: list[Violation] = []
    killed = {e.line.pid for e in log.faults if e.line.kind in DEADLY}
    bereaved = _bereaved(log)
    unexplained = on_purpose = turned_away = 0
    for life in log.lives:
        end = life.end
        if _turned_away(life):
            turned_away += 1
        elif (life.pid in killed or id(life) in bereaved) and (end is None or end.line.error):
            on_purpose += 1
        elif end is not None:
            if end.line.error:
                wrong.append(Violation(end.where, f"{life.name} ended with {end.line.error}"))
        else:
            unexplained += 1
            if log.over:
                text = f"{life.name} has ended without a word, and no fault accounts for it"
                wrong.append(Violation(life.entries[-1].where, text))
    note = f"processes, {on_purpose} ended on purpose"
    if turned_away:
        note += f", {turned_away} newcomers turned away by a full etcd"
    if unexplained and not log.over:
        note += f", {unexplained} without a last word (killed, or still running: no fault lines tell)"
    return outcome("survivors never end with an error", len(log.lives), note, wrong, "there is no process")


def _turned_away(life: Life) -> bool:
    """Say whether it never was a member: a full etcd takes no newcomer, until an operator has made room."""
    was_member = any(e.line.type == "step" or e.line.kind == "epoch" for e in life.entries)
    return not was_member and life.end is not None and str(life.end.line.error).startswith("EtcdNoSpace(")


def _bereaved(log: Log) -> set[int]:
    """Return the lives, by their `id`, that had a rank of their own group killed: it takes them along."""
    found = set()
    for fault in (e.line for e in log.faults if e.line.kind in DEADLY):
        group = [x for x in log.lives if x.replica == fault.replica]
        for victim in (x for x in group if x.pid == fault.pid):
            for life in group:
                first, last = life.entries[0].line.monotonic, life.entries[-1].line.monotonic
                # A last word comes after the fault that it is due to.
                began = fault.monotonic if life.end else victim.entries[0].line.monotonic
                if life.rank != victim.rank and first <= fault.monotonic and last >= began:
                    found.add(id(life))
    return found


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """The time between two commits of one process, without the time that it was stopped itself."""

    seconds: float
    replica: str
    since: float
    until: float
    where: str


def pauses(log: Log) -> list[Pause]:
    """Return the time between each two commits of each process, also from the last to its end."""
    stops = _stops(log)
    found = []
    for life in log.lives:
        marks = life.commits
        if life.end is not None:
            marks = [*marks, life.end]
        for before, after in itertools.pairwise(marks):
            since, until = before.line.monotonic, after.line.monotonic
            stopped = sum(max(0.0, min(until, b) - max(since, a)) for pid, a, b in stops if pid == life.pid)
            found.append(
                Pause(
                    seconds=max(0.0, until - since - stopped),
                    replica=life.replica,
                    since=since,
                    until=until,
                    where=after.where,
                )
            )
    return found


def _stops(log: Log) -> list[tuple[int, float, float]]:
    """Return (pid, since, until) of each process that was stopped for a while."""
    found, since = [], dict[int, float]()
    for entry in log.faults:
        line = entry.line
        if line.kind == "SIGSTOP":
            since.setdefault(line.pid, line.monotonic)
        elif line.kind == "SIGCONT" and line.pid in since:
            found.append((line.pid, since.pop(line.pid), line.monotonic))
    return [*found, *((pid, at, float("inf")) for pid, at in since.items())]


def waits_bounded(log: Log, max_pause_s: float | None) -> Outcome:
    """No process waits longer than allowed for its next commit."""
    all_pauses = pauses(log)
    longest = max(all_pauses, key=lambda p: p.seconds, default=None)
    wrong = [
        Violation(p.where, f"{p.replica} waited {p.seconds:.1f} s for its next commit")
        for p in all_pauses
        if max_pause_s is not None and p.seconds > max_pause_s
    ]
    what = "waits between commits"
    if longest is not None:
        what += f", the longest {longest.seconds:.2f} s ({longest.where})"
    return outcome("waits are bounded", len(all_pauses), what, wrong, "no process committed twice")


def samples_once(log: Log) -> Outcome:
    """The surviving lineage uses each sample once per pass over the data, and leaves none out."""
    name, nothing = "each sample once per data epoch", "no samples are logged (train with --log-samples)"
    drawn: dict[tuple[str, int], dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in log.entries("draw"):
        drawn[entry.line.replica, entry.line.step][entry.line.rank].append(entry)
    if not drawn:
        return Outcome(name=name, looked_at=nothing, checked=False)
    length = max((e.line.training for e in log.entries("start")), default=0)
    ranks = {life.rank for life in log.lives}
    ledger = _Ledger(length)
    commits = lineage(log)
    for same in commits:
        commit = same[0]
        epoch = version_of(commit).epoch
        for member, rank in itertools.product(commit.line.members, sorted(ranks)):
            # What was drawn in an earlier epoch counts when the step was saved into a later one.
            mine = [e for e in drawn[member, commit.line.step][rank] if e.line.epoch <= epoch]
            if mine:
                ledger.use(mine[-1], len(commit.line.members) * len(ranks))
            else:
                ledger.complain(commit, f"{member} drew nothing for step {commit.line.step}")
    _compare_with_place(log, commits, ledger)
    passes = f" of {length}" if length else ""
    return outcome(name, ledger.used.total(), f"uses{passes} samples", ledger.wrong, nothing)


class _Ledger:
    """How often each sample has been used."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.used: Counter[int] = Counter()
        self.wrong: list[Violation] = []
        self._first: dict[int, Entry] = {}
        self._count = 0

    def complain(self, entry: Entry, text: str) -> None:
        self.wrong.append(Violation(entry.where, text))

    def use(self, entry: Entry, shares: int) -> None:
        """Book a batch; a sample comes again only when a pass over the data is behind it."""
        self._count += len(entry.line.samples)
        # Passes begun so far: a batch may reach into the next pass, and holes lag behind by a batch or two.
        slack = 2 * shares * len(entry.line.samples)
        passes = 1 if not self.length else -(-(self._count + slack) // self.length)
        for sample in entry.line.samples:
            self.used[sample] += 1
            if self.used[sample] > passes:
                text = f"{entry.line.replica} uses sample {sample} for the {self.used[sample]}. time"
                self.complain(entry, f"{text}, first {self._first[sample].where}")
            self._first.setdefault(sample, entry)


def _compare_with_place(log: Log, commits: list[list[Entry]], ledger: _Ledger) -> None:
    """Compare with the place in the stream that the trainer with the newest version had at its end."""
    ends = [e for e in log.entries("end") if e.line.data is not None]
    last = max(ends, key=version_of, default=None)
    if last is None or not commits or version_of(last) != version_of(commits[-1][0]):
        return
    if commits[0][0].line.step != 1:
        return  # begun from a checkpoint: what came before is not in this log
    place, used = last.line.data, ledger.used
    assert place is not None, "filtered above"
    if used.total() != place.num_trained:
        ledger.complain(last, f"the lineage used {used.total()} samples, its place says {place.num_trained}")
    if ledger.length:
        full, rest = divmod(place.position, ledger.length)
        missed = sum(max(0, full - used[s]) for s in range(ledger.length))
        again = sum(max(0, n - full - (rest > 0)) for n in used.values())
        if missed > place.num_left_out or again:
            text = f"after {full} whole passes {missed} uses are missing and {again} too many"
            ledger.complain(last, text)
