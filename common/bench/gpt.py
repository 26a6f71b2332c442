"""A byte-level GPT in plain torch, whose attention is a function that each call is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..problem import Shape

BYTES = 256  # the vocabulary

# Of q, k and v [batch, heads, seq, head_dim], causal: o like q.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    head_dim: int
    context: int  # the longest sequence, in bytes

    rotary_base: ClassVar[float] = 10000.0

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def shape(self, batch: int) -> Shape:
        """What each block asks attention to compute, of sequences as long as the context."""
        return Shape(batch, self.heads, self.heads, self.context, self.context, self.head_dim)

    def block(self) -> nn.Module:
        return Block(self)


class GPT(nn.Module):
    """Pre-norm blocks with rotary positions. Parameters are float32, drawn from the seed."""

    def __init__(self, size: Size, seed: int) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(BYTES, size.width)
        self.blocks = nn.ModuleList(size.block() for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)
        self.register_buffer("rotation", _rotation(size), persistent=False)
        rng = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:  # a product with it keeps the variance of its inputs
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=rng)
        # Each block adds to the stream twice, all of them together as much as one product.
        for block in self.blocks:
            for last in (block.attention_out, block.mlp_out):
                last.weight.data /= math.sqrt(2 * size.layers)

    def forward(self, text: Tensor, attention: Attention) -> Tensor:
        """Logits [batch, seq, 256] of the byte that follows each of text [batch, seq], int64."""
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x, self.rotation[:, : text.shape[1]], attention)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.attention_out = nn.Linear(size.width, size.width, bias=False)
        self.mlp_norm = nn.RMSNorm(size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width, bias=False)
        self.mlp_out = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, attention: Attention) -> Tensor:
        """x and the result are [batch, seq, width], rotation is as from _rotation()."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.unbind(2)  # [batch, seq, heads, head_dim] each
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, rotation), rotate(k, rotation), v))
        x = x + self.attention_out(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp_out(nn.functional.gelu(self.mlp_in(self.mlp_norm(x))))


def _rotation(size: Size) -> Tensor:
    """Cosine and sine of each position's angles, float32 [2, context, 1, head_dim / 2]."""
    exponents = torch.arange(0, size.head_dim, 2) / size.head_dim
    angles = torch.arange(size.context)[:, None] * size.rotary_base**-exponents
    return torch.stack((angles.cos(), angles.sin()))[:, :, None]


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """x [batch, seq, heads, head_dim] in float32, pairs of its channels turned by the angles."""
    cos, sin = rotation
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
