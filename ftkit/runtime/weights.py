"""The divisor of a step's averages: the number of contributors, or the sum of their weights.

Gradients are scaled before they are summed, so that a reduced-precision sum does not overflow.
"""

from __future__ import annotations

import torch

from ftkit.errors import FtkitError
from ftkit.runtime.links import Links


class Weights:
    """This rank's weight in the averages of the running step."""

    def __init__(self, links: Links) -> None:
        """Every member weighs the same until `set` says otherwise."""
        self._links = links
        self._scale: float | None = None
        self.used = False
        """Whether this step has weights; one that has is not salvaged."""

    def reset(self) -> None:
        """The step is over: back to equal weights."""
        self._scale = None
        self.used = False

    def set(self, weight: float) -> None:
        """Agree on the sum of all weights; every member must call this in the same step.

        Raises:
            FtkitError: the weight is negative or not finite, or all weights are zero.
            GroupError: the sum could not be agreed on.
        """
        if not 0.0 <= weight < float("inf"):
            raise FtkitError(f"a weight must be finite and not negative, got {weight}")
        total = self._links.votes.total(weight)
        if total == 0.0:
            raise FtkitError("the weights of all members are zero in this step")
        self._scale = weight / total

    def apply(self, tensor: torch.Tensor, participants: int, divided_by: int = 1) -> None:
        """Scale this rank's contribution in place, so that the sum over all members is the average.

        `divided_by` is what has been done to that end already.
        """
        if self._scale is not None:
            tensor.mul_(self._scale * divided_by)
        elif participants != divided_by:
            tensor.mul_(divided_by / participants)  # as torch's reducer does, so that the bits are the same
