"""A small byte-level language model, and text that every machine has: the standard library's own."""

import pydoc_data.topics
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional


def read_text(limit: int) -> torch.Tensor:
    """Return English and Python that every machine has, at most `limit` bytes."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).encode()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(text) >= limit:
            break
        text += path.read_bytes()
    return torch.frombuffer(bytearray(text[:limit]), dtype=torch.uint8)


class Windows(torch.utils.data.Dataset[torch.Tensor]):
    """Text cut into pieces of `context` bytes, each with the byte that follows it."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.pieces = text.unfold(0, context + 1, context)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.pieces[index].long()


class Block(nn.Module):
    """Causal self-attention and a multilayer perceptron, each normalized before and added after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, context, width) to the same shape."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """A transformer over bytes; called with (batch, context + 1) of them it gives the loss in nats."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 32)) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each byte from those before it."""
        x = self.bytes(batch[:, :-1]) + self.places[: batch.shape[1] - 1]
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
