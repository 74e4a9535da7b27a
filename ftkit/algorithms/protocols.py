"""What the training helpers of this package ask of a manager.

Declared here, by the side that calls: any object with these methods will do. Nothing here knows how an
epoch is agreed on or how tensors travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["DataManager", "GradientManager", "PendingWork", "StateManager", "StepManager"]


class PendingWork(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Block until the tensor holds its result; an error is kept for the vote, not raised."""

    def get_future(self) -> torch.futures.Future[object]:
        """Return a future that completes with the collective, also when it failed."""


class StateManager(Protocol):
    """The part of the manager that heals and checkpoints named pieces of state."""

    def register_state_dict_fn(
        self, name: str, load: Callable[[object], None], save: Callable[[], object]
    ) -> None:
        """Make a piece of state part of what a healing member receives."""


class GradientManager(Protocol):
    """The part of the manager that averages gradients."""

    def start_step(self) -> None:
        """Enter the step: be in an epoch and healed. Does nothing when the step has already begun."""

    def allreduce(self, tensor: torch.Tensor, *, average: bool = True) -> PendingWork:
        """Sum (or average) the tensor over the replicas, in place and asynchronously."""

    def report_error(self, e: Exception) -> None:
        """Make this step's vote fail."""

    def errored(self) -> Exception | None:
        """Return the first error of this step."""


class StepManager(Protocol):
    """The part of the manager that closes a step."""

    def start_step(self) -> None:
        """Enter the step: be in an epoch and healed. Does nothing when the step has already begun."""

    def should_commit(self) -> bool:
        """Vote; True on every member or on none."""

    def finish_step(self, error: BaseException | None = None) -> None:
        """Say that the committed step has been applied, or what went wrong while it was."""

    def current_step(self) -> int:
        """Return the number of committed steps."""


class DataManager(StateManager, Protocol):
    """The part of the manager that tells a data stream who takes which samples."""

    @property
    def epoch(self) -> int:
        """The id of the current epoch."""

    def start_step(self) -> None:
        """Enter the step: be in an epoch and healed. Does nothing when the step has already begun."""

    def num_participants(self) -> int:
        """Return how many replicas take part in this step."""

    def participating_rank(self) -> int:
        """Return this replica's rank among them."""

    def set_weight(self, w: float) -> None:
        """Set this replica's weight in the averages of this step."""

    def on_commit(self, fn: Callable[[], None]) -> None:
        """Have `fn` called whenever a step has been committed and applied."""

    def on_abort(self, fn: Callable[[], None]) -> None:
        """Have `fn` called whenever a vote has failed."""
