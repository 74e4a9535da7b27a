"""What the training helpers of this package ask of a manager.

Declared here, by the side that calls: any object with these methods will do. Nothing here knows how an
epoch is agreed on or how tensors travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

__all__ = [
    "DataManager",
    "GradientManager",
    "PendingWork",
    "StateManager",
    "StepManager",
    "VoteManager",
]


class PendingWork(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Block until the tensor holds its result; an error is kept for the vote, not raised."""

    def get_future(self) -> torch.futures.Future[torch.Tensor]:
        """Return a future of the reduced tensor, which completes also when the collective fails."""


class StateManager(Protocol):
    """The part of the manager that heals and checkpoints named pieces of state."""

    def register_state_dict_fn(
        self, name: str, load: Callable[[object], None], save: Callable[[], object]
    ) -> None:
        """Make a piece of state part of what a healing member receives."""


class GradientManager(Protocol):
    """The part of the manager that averages gradients."""

    def declare_model(self, module: torch.nn.Module, name: str = "") -> None:
        """Let the job know the model, so that a replica with another one is refused."""

    def start_step(self) -> None:
        """Enter the step: be in an epoch and healed. Does nothing when the step has already begun."""

    def allreduce(self, tensor: torch.Tensor, *, average: bool = True) -> PendingWork:
        """Sum (or average) the tensor over the replicas, in place and asynchronously."""

    def num_contributors(self) -> int:
        """Return by how much gradients are to be divided; 1 when the replicas have weights in this step."""

    def reduce_bucket(
        self,
        buffer: torch.Tensor,
        restore: Callable[[], None] | None,
        last: bool,
        *,
        divided_by: int = 1,
    ) -> torch.futures.Future[torch.Tensor]:
        """Average one bucket of a backward pass, in place and asynchronously.

        The futures of all its buckets complete together, failed or not. `restore` puts this replica's own
        gradients back into the buffer, so that they can be averaged again without a member that died.
        `divided_by` is what the buffer has been divided by already, but not what `restore` puts there.
        """


class StepManager(StateManager, Protocol):
    """The part of the manager that closes a step."""

    def start_step(self) -> None:
        """Enter the step: be in an epoch and healed. Does nothing when the step has already begun."""

    def should_commit(self) -> bool:
        """Vote; True on every member or on none."""

    def finish_step(self, error: BaseException | None = None) -> None:
        """Say that the committed step has been applied, or what went wrong while it was."""

    def register_update(self, fn: Callable[[], bool | None]) -> None:
        """Give the function that applies the gradients at hand when a vote in doubt turns out to be won.

        It returns False when they are gone, and has changed nothing then.
        """

    def drop_gradients(self) -> None:
        """Say that the last step's gradients are gone."""

    def current_step(self) -> int:
        """Return the number of committed steps, one that is being applied included."""


class VoteManager(StateManager, Protocol):
    """The part of the manager that tells how a vote ended."""

    def on_commit(self, fn: Callable[[], None]) -> None:
        """Have `fn` called whenever a step has been committed and applied."""

    def on_abort(self, fn: Callable[[], None]) -> None:
        """Have `fn` called whenever a vote has failed."""


class DataManager(VoteManager, Protocol):
    """The part of the manager that tells a data stream who takes which samples."""

    @property
    def replica_id(self) -> str:
        """The name of this replica group."""

    def start_step(self) -> None:
        """Enter the step: be in an epoch and healed. Does nothing when the step has already begun."""

    def step_members(self) -> tuple[str, ...]:
        """Return the replica groups that began the running step, in the order of their ranks."""

    def members(self) -> tuple[str, ...]:
        """Return the members now; in a hook after a commit, those who have committed."""

    def set_weight(self, w: float) -> None:
        """Set this replica's weight in the averages of this step.

        Raises:
            FtkitError: no replica has any weight.
        """

    def report_error(self, e: Exception) -> None:
        """Make this step's vote fail."""
