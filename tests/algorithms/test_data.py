"""Batches reach the training loop once, loaded ahead or not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from ftkit.algorithms.data import DataLoader, DistributedSampler
from ftkit.errors import ConfigError, FtkitError

from .scripted import ScriptedManager, World

# Python from 3.12 on warns of a fork in a process with threads; torch's default on Linux is to fork.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Squares:
    """A sample says its own index, and which process has read it."""

    def __init__(self, length: int, fail_at: int | None = None) -> None:
        self.length = length
        self.fail_at = fail_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int, /) -> torch.Tensor:
        if index == self.fail_at:
            raise ValueError(f"sample {index} is broken")
        return torch.tensor([index, index * index, os.getpid()])


def test_the_sampler_drives_a_torch_data_loader() -> None:
    world = World(2)
    samplers = [DistributedSampler(m, 10, batch_size=2, seed=1, epochs=2) for m in world.members]
    loaders = [iter(TorchDataLoader(Squares(10), batch_sampler=s)) for s in samplers]
    seen: Counter[int] = Counter()
    for step, batches in enumerate(zip(*loaders, strict=True)):
        for sampler, batch in zip(samplers, batches, strict=True):
            assert batch[:, 0].tolist() == sampler.indices
        if step % 2:  # every other vote fails
            for m in world.members:
                m.abort()
            continue
        for m, batch in zip(world.members, batches, strict=True):
            seen.update(batch[:, 0].tolist())
            m.commit()
    assert seen == Counter(dict.fromkeys(range(10), 2))
    assert all(s.finished and s.num_trained == 20 and s.epoch == 2 for s in samplers)


def test_a_sampler_read_ahead_is_noticed() -> None:
    """torch's workers would draw batches for steps whose members nobody knows yet."""
    sampler = DistributedSampler(World(1).members[0], 100, batch_size=2)
    it = iter(sampler)
    next(it)
    with pytest.raises(FtkitError, match="accumulate=1"):
        next(it)
    twice = iter(DistributedSampler(World(1).members[0], 100, batch_size=2, accumulate=2, shuffle=False))
    assert [next(twice), next(twice)] == [[0, 1], [2, 3]]


def run(loader: DataLoader, manager: ScriptedManager, votes: list[bool]) -> list[list[int]]:
    """Draw one batch per vote; return the indices of each batch."""
    batches = []
    for batch, vote in zip(loader, votes, strict=False):
        batches.append(batch[:, 0].tolist())
        assert batches[-1] == loader.indices
        manager.commit() if vote else manager.abort()
    return batches


@pytest.mark.parametrize("num_workers", [0, 2])
def test_membership_and_votes_decide_what_is_loaded_and_the_guess_does_not(num_workers: int) -> None:
    """Batches loaded ahead for a wrong guess are dropped: with workers the loop sees what it sees without."""
    world = World(1)
    (first,) = world.members
    with DataLoader(
        first,
        Squares(24),
        2,
        shuffle=False,
        epochs=1,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    ) as loader:
        assert run(loader, first, [True, False, True]) == [[0, 1], [2, 3], [2, 3]]
        second = ScriptedManager(world)
        other = DataLoader(second, Squares(24), 2, shuffle=False, epochs=1)
        world.form([first, second])
        mine, theirs = next(iter(loader)), next(iter(other))
        assert (mine[:, 0].tolist(), theirs[:, 0].tolist()) == ([4, 5], [6, 7])
        first.abort()
        world.form([first])
        assert run(loader, first, [True, True]) == [[4, 5], [6, 7]]
        world.form([first, second])
        assert next(iter(loader))[:, 0].tolist() == [8, 9]
        world.lose(second)
        first.commit()
        assert run(loader, first, [True] * 20)[:2] == [[10, 11], [12, 13]]
        assert loader.finished
        assert list(loader) == []


def test_workers_do_the_loading_and_go_on_from_step_to_step() -> None:
    world = World(1)
    (manager,) = world.members
    with DataLoader(
        manager, Squares(40), 2, epochs=1, num_workers=1, multiprocessing_context="fork"
    ) as loader:
        pids = set()
        for batch in loader:
            pids |= set(batch[:, 2].tolist())
            manager.commit()
    assert len(pids) == 1
    assert os.getpid() not in pids


def test_batches_of_one_step_follow_each_other_and_come_again_together() -> None:
    """Gradient accumulation draws several batches before the vote."""
    (manager,) = World(1).members
    loader = iter(DataLoader(manager, Squares(10), 2, shuffle=False, epochs=1))
    assert [next(loader)[:, 0].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    manager.abort()
    assert [next(loader)[:, 0].tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    manager.commit()
    assert next(loader)[:, 0].tolist() == [6, 7]


def test_a_batch_that_was_only_looked_at_is_drawn_again() -> None:
    (manager,) = World(1).members
    loader = DataLoader(manager, Squares(10), 2, shuffle=False)
    for _ in range(2):
        for batch in loader:
            assert batch[:, 0].tolist() == [0, 1]
            break


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_broken_sample_is_raised_when_its_turn_comes(num_workers: int) -> None:
    """A worker has read it long before; the loop must not hear of it at another batch."""
    (manager,) = World(1).members
    with DataLoader(
        manager,
        Squares(10, fail_at=4),
        2,
        shuffle=False,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    ) as loader:
        it = iter(loader)
        for _ in range(2):
            next(it)
            manager.commit()
        with pytest.raises(ValueError, match="sample 4 is broken"):
            next(it)
        assert next(it)[:, 0].tolist() == [6, 7]


def test_loading_leaves_the_global_random_numbers_alone() -> None:
    """They decide about dropout: a replica that restarts its workers must not go astray from the others."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    (manager,) = World(1).members
    with DataLoader(manager, Squares(10), 2, num_workers=1, multiprocessing_context="fork") as loader:
        next(iter(loader))
    assert torch.equal(torch.rand(3), expected)


def test_datasets_without_indices_are_refused() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(ConfigError, match="exactly once"):
        DataLoader(World(1).members[0], Endless(), 2)  # type: ignore[arg-type]


KILLED = """
    import os, sys, time
    sys.path.insert(0, sys.argv[1])
    from scripted import World
    from ftkit.algorithms.data import DataLoader

    class Slow:
        def __len__(self): return 100
        def __getitem__(self, i):
            print(os.getpid(), flush=True)
            time.sleep(600)

    next(iter(DataLoader(World(1).members[0], Slow(), 2, num_workers=1, multiprocessing_context="fork")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child's life to its parent's")
def test_a_worker_does_not_outlive_its_killed_trainer() -> None:
    """It holds copies of the trainer's sockets: peers would wait for a process that is gone."""
    here = str(Path(__file__).parent)
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), here], stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    with trainer.stdout:
        worker = int(trainer.stdout.readline())
        assert worker != trainer.pid
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        deadline = time.monotonic() + 3
        # End of file: nobody holds the pipe any more, the worker included.
        os.set_blocking(trainer.stdout.fileno(), False)
        while time.monotonic() < deadline:
            try:
                if os.read(trainer.stdout.fileno(), 100) == b"":
                    return
            except BlockingIOError:
                time.sleep(0.005)
    pytest.fail(f"worker {worker} still lives")
