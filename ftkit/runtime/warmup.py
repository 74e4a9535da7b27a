"""Start, while a new replica waits to be let in, what else its peers would wait for in its first step."""

from __future__ import annotations

import encodings.idna  # noqa: F401  (else loaded when a first host name is looked up: 1 to 2 ms)

import torch

from ftkit.runtime.healing import Healer
from ftkit.runtime.links import Links


def warm_up(healer: Healer, links: Links) -> None:
    """Take the first steps on the way of a joiner, which take longer than the next, with tiny tensors."""
    links.crew.prepare(2)
    healer.warm_up()
    with torch.enable_grad():
        torch.ones(1, device="cpu", requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
