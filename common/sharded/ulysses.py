"""Ulysses: the ranks exchange parts, so that each has all positions, of some of the heads.

Then attention() is what it is on one GPU. The exchange is an all-to-all, there and back. It moves q
and o as well as k and v, hides behind nothing, and needs as many heads as ranks, of k and v too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from ..functional import attention
from .order import join_shards, take_shard
from .transport import Transport


@dataclass(frozen=True)
class HeadExchange:
    """Of a sequence that has these lengths on the ranks, in zigzag order or as the ranks follow."""

    transport: Transport
    lengths: tuple[int, ...]
    in_zigzag: bool

    def to_heads(self, x: Tensor) -> Tensor:
        """[batch, heads, the rank's positions, d] -> [batch, heads / P, all positions, d]"""
        batch, heads, _, last = x.shape
        shapes = [(batch, heads // self.transport.size, seq, last) for seq in self.lengths]
        parts = self.transport.all_to_all(x.chunk(self.transport.size, dim=1), shapes)
        return join_shards(parts, 2) if self.in_zigzag else torch.cat(parts, 2)

    def to_positions(self, x: Tensor) -> Tensor:
        """And back."""
        ranks, rank = self.transport.size, self.transport.rank
        if self.in_zigzag:
            parts = [take_shard(x, ranks, to, 2) for to in range(ranks)]
        else:
            parts = list(x.split(self.lengths, 2))
        shape = (*x.shape[:2], self.lengths[rank], *x.shape[3:])
        return torch.cat(self.transport.all_to_all(parts, [shape] * ranks), 1)


class _ToHeads(Function):
    @staticmethod
    def forward(ctx, exchange: HeadExchange, x: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_heads(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return None, ctx.exchange.to_positions(gradient)


class _ToPositions(Function):
    @staticmethod
    def forward(ctx, exchange: HeadExchange, x: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_positions(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        agreement = ctx.exchange.transport.agreement
        agreement.require_same({"pass": "backward", "seq": sum(ctx.exchange.lengths)})
        return None, ctx.exchange.to_heads(gradient)


def ulysses_attention(
    queries: HeadExchange, keys: HeadExchange, q: Tensor, k: Tensor, v: Tensor, **options
) -> tuple[Tensor, Tensor]:
    """o and lse of the rank's queries; options are attention()'s."""
    inputs = (
        _ToHeads.apply(each, x) for each, x in zip((queries, keys, keys), (q, k, v), strict=True)
    )
    o, lse = attention(*inputs, **options, return_lse=True)
    lse = queries.to_positions(lse.unsqueeze(-1)).squeeze(-1)
    return _ToPositions.apply(queries, o), lse
