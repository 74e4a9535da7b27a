"""Keep the loss scale equal on all replicas.

It decides when the scale may move: only with a committed step. Replicas with different scales would
average gradients of different units.
"""

from __future__ import annotations

from typing import Any

import torch

from ftkit.algorithms.protocols import VoteManager
from ftkit.errors import ConfigError, FtkitError

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler whose scale is healed, and moves with committed steps only.

    The infinities found in a step that was not committed may be those of a broken all-reduce, and differ
    from replica to replica.

    Args:
        manager: the manager of this replica.
        device: the device type of the gradients.
        name: tells several scalers of one job apart.
        kwargs: what torch's GradScaler takes (`init_scale`, `growth_interval`, `enabled` …).

    Raises:
        ConfigError: the first argument is no manager, as in torch's `GradScaler("cuda")`.
    """

    def __init__(
        self, manager: VoteManager, device: str = "cuda", *, name: str = "grad_scaler", **kwargs: Any
    ) -> None:
        if not callable(getattr(manager, "register_state_dict_fn", None)):
            shown = repr(manager) if isinstance(manager, str | torch.device) else type(manager).__name__
            raise ConfigError(
                f"ftkit's GradScaler takes the manager first, and got {shown}: "
                'write GradScaler(manager, "cuda")'
            )
        super().__init__(device, **kwargs)
        self._committed = False
        manager.register_state_dict_fn(name, self._load, self.state_dict)
        manager.on_commit(lambda: self._vote(True))
        manager.on_abort(lambda: self._vote(False))

    def _vote(self, committed: bool) -> None:
        self._committed = committed

    def _load(self, state: object) -> None:
        if not isinstance(state, dict):
            raise FtkitError(f"the state received for the loss scale is a {type(state).__name__}")
        if state or self.is_enabled():
            self.load_state_dict(state)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to what this step found; leave it alone when the step was not committed."""
        if not self._committed and self.is_enabled():
            new_scale = self.get_scale()  # forgets what was found and keeps scale and growth count
        super().update(new_scale)
