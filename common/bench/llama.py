"""The blocks of Llama 3, for a model that is otherwise gpt.py's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from ..problem import Shape
from .gpt import Attention, Size, rotate

EPSILON = 1e-5  # of the norms


@dataclass(frozen=True)
class LlamaSize(Size):
    kv_heads: int
    mlp_width: int

    rotary_base: ClassVar[float] = 500000.0

    def shape(self, batch: int) -> Shape:
        """What each block asks attention to compute, of sequences as long as the context."""
        return Shape(batch, self.heads, self.kv_heads, self.context, self.context, self.head_dim)

    def block(self) -> nn.Module:
        return LlamaBlock(self)


class LlamaBlock(nn.Module):
    """Grouped-query attention and a SwiGLU MLP."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        kv_width = size.kv_heads * size.head_dim
        self.attention_norm = nn.RMSNorm(size.width, EPSILON)
        self.q = nn.Linear(size.width, size.width, bias=False)
        self.k = nn.Linear(size.width, kv_width, bias=False)
        self.v = nn.Linear(size.width, kv_width, bias=False)
        self.attention_out = nn.Linear(size.width, size.width, bias=False)
        self.mlp_norm = nn.RMSNorm(size.width, EPSILON)
        self.mlp_gate = nn.Linear(size.width, size.mlp_width, bias=False)
        self.mlp_in = nn.Linear(size.width, size.mlp_width, bias=False)
        self.mlp_out = nn.Linear(size.mlp_width, size.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, attention: Attention) -> Tensor:
        """x and the result are [batch, seq, width]; rotation and attention as in gpt.Block."""
        y = self.attention_norm(x)
        q, k, v = (each(y).unflatten(-1, (-1, self.head_dim)) for each in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, rotation), rotate(k, rotation), v))
        x = x + self.attention_out(attention(q, k, v).transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.mlp_out(nn.functional.silu(self.mlp_gate(y)) * self.mlp_in(y))
