"""Check what the demo claims: the same bits everywhere, each sample once, no step lost.

Pure: the story goes in, the outcome of each check comes out, with the reason when it failed.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from ftkit.algorithms.stream import Stream
from ftkit.demo.journal import End
from ftkit.demo.recovery import Recovery
from ftkit.demo.story import Story


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One claim and whether it held."""

    name: str
    ok: bool
    detail: str


def same_bits(story: Story, replicas: tuple[str, ...]) -> Check:
    """All replicas that stood at one version had the same parameters and optimizer state."""
    name = "all replicas hold the same bits"
    compared = {v: by for v, by in story.hashes.items() if len(by) > 1}
    for version, by in compared.items():
        if len(set(by.values())) > 1:
            told = ", ".join(f"{r} {sha[:12]}" for r, sha in sorted(by.items()))
            return Check(name=name, ok=False, detail=f"at version {version}: {told}")
    full = [v for v, by in compared.items() if set(by) == set(replicas)]
    if not full:
        return Check(name=name, ok=False, detail="there is no version at which all of them were compared")
    newest = max(full, key=_version)
    sha = next(iter(compared[newest].values()))
    return Check(
        name=name, ok=True, detail=f"at {len(compared)} versions, the last is {newest} (sha256 {sha[:16]}…)"
    )


def _version(text: str) -> tuple[int, int]:
    epoch, _, step = text.partition("-")
    return int(epoch), int(step)


def steps_in_a_row(story: Story) -> Check:
    """The committed steps that count are 1, 2, 3 … without a gap."""
    name = "no committed step is lost"
    numbers = [s.step for s in story.lineage()]
    missing = sorted(set(range(1, max(numbers, default=0) + 1)) - set(numbers))
    if missing or not numbers:
        return Check(name=name, ok=False, detail=f"missing: {missing[:10]}" if missing else "no step at all")
    return Check(name=name, ok=True, detail=f"steps 1 to {numbers[-1]}")


def samples_once(story: Story) -> Check:
    """The committed steps used each sample of the stream up to their place in it exactly once."""
    name = "each sample is used exactly once"
    last = max(story.ends, key=lambda e: _version(e.version), default=None)
    if last is None:
        return Check(name=name, ok=False, detail="no trainer has ended in order")
    used: Counter[int] = Counter()
    for step in story.lineage():
        for member in step.members:
            drawn = [d for d in story.draws(member, step.step) if d.epoch <= step.epoch]
            if not drawn:
                return Check(name=name, ok=False, detail=f"{member} drew nothing for step {step.step}")
            used.update(drawn[-1].samples)
    due = Counter(_due(story, last))
    twice, never = used - due, due - used
    if twice or never:
        detail = f"too often: {sorted(twice)[:5]}, never: {sorted(never)[:5]}"
        return Check(name=name, ok=False, detail=detail)
    return Check(name=name, ok=True, detail=f"{used.total()} samples of {story.starts[0].training}")


def _due(story: Story, end: End) -> list[int]:
    """Return the samples that have been trained on by then: all before its place but for the holes in it."""
    start, place = story.starts[0], end.data
    stream = Stream(start.training, seed=start.seed)
    due = set(range(place.position)).difference(*(range(a, b) for a, b in place.holes))
    return stream.indices((at, at + 1) for at in sorted(due))


def recovered(recoveries: list[Recovery]) -> Check:
    """After each fault the others went on, and the victim came back."""
    name = "the job survives each fault"
    for r in recoveries:
        what = f"{r.fault.kind} of {r.fault.victim}"
        if r.first_commit_ms is None:
            return Check(name=name, ok=False, detail=f"{what}: not all survivors went on")
        if r.back is None:
            return Check(name=name, ok=False, detail=f"{what}: it did not come back")
    told = ", ".join(f"{r.fault.kind} {r.longest_pause_ms:.0f} ms" for r in recoveries)
    return Check(name=name, ok=True, detail=f"longest pause of a survivor: {told}" if told else "no fault")


def learned(story: Story) -> Check:
    """The loss of the last steps is well below that of the first."""
    name = "the model learns"
    losses = [loss for _, _, loss in story.losses()]
    if len(losses) < 20:
        return Check(name=name, ok=False, detail=f"only {len(losses)} steps")
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    return Check(name=name, ok=last < first - 0.5, detail=f"loss {first:.2f} to {last:.2f} nats per byte")


def all_checks(story: Story, replicas: tuple[str, ...], recoveries: list[Recovery]) -> list[Check]:
    """Run all checks."""
    return [
        recovered(recoveries),
        same_bits(story, replicas),
        steps_in_a_row(story),
        samples_once(story),
        learned(story),
    ]
