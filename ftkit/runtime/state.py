"""Collect the replicated state of a trainer from its parts, and hand a received one back to them.

It knows names and callbacks; it does not know how the state travels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch

from ftkit.errors import FtkitError

Load = Callable[[object], None]
Save = Callable[[], object]


class StateRegistry:
    """The named parts of the state that all replicas share."""

    def __init__(self) -> None:
        """Start without any part."""
        self._parts: dict[str, tuple[Load, Save]] = {}
        self._models: dict[str, torch.nn.Module] = {}

    def register(self, name: str, load: Load, save: Save) -> None:
        """Add a part; a name can be used once."""
        if name in self._parts:
            raise FtkitError(f"the state part {name!r} is registered already; choose another name")
        self._parts[name] = (load, save)

    def __len__(self) -> int:
        """Count the parts."""
        return len(self._parts)

    def save(self) -> dict[str, object]:
        """Return the live state of all parts, in the order of their names; tensors are not copied."""
        return {name: self._parts[name][1]() for name in sorted(self._parts)}

    def load(self, state: object) -> None:
        """Hand each part what was received for it."""
        if not isinstance(state, Mapping) or set(state) != set(self._parts):
            have = sorted(state) if isinstance(state, Mapping) else type(state).__name__
            raise FtkitError(
                f"the received state has the parts {have}, this trainer has {sorted(self._parts)}: "
                "all replicas must register the same"
            )
        for name in sorted(self._parts):
            self._parts[name][0](state[name])

    def declare_model(self, module: torch.nn.Module, name: str = "") -> None:
        """Note a model, so that a replica with a different one is refused with the first difference named."""
        self._models[name or f"model{len(self._models) or ''}"] = module

    def layout(self) -> tuple[str, ...]:
        """Describe every parameter and buffer of the models: `name shape dtype`."""
        lines = []
        for prefix, module in self._models.items():
            entries = [*module.named_parameters(), *module.named_buffers()]
            lines += [
                f"{prefix}.{n} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for n, t in entries
            ]
        return tuple(lines)


def fingerprint(layout: tuple[str, ...]) -> str:
    """Digest a layout; empty when there is none."""
    return hashlib.sha256("\n".join(layout).encode()).hexdigest()[:32] if layout else ""
