"""Ulysses: the ranks exchange parts, so that each has all positions, of some of the heads.

Then attention() is what it is on one GPU. The exchange is an all-to-all, there and back. It moves q
and o as well as k and v, hides behind nothing, and needs as many heads as ranks, of k and v too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from ..operator import backward as attention_backward
from ..operator import forward as attention_forward
from .order import join_shards, take_shard
from .ring import Options
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


@dataclass(frozen=True)
class Ulysses:
    """The exchanges of a call."""

    call: int  # a number of its own, which is the same on all ranks
    queries: HeadExchange
    keys: HeadExchange
    options: Options


class UlyssesAttention(Function):
    """o of the rank's queries and, where asked for, lse."""

    @staticmethod
    def forward(ctx, ulysses: Ulysses, wants_lse: bool, q: Tensor, k: Tensor, v: Tensor):
        queries, keys, options = ulysses.queries, ulysses.keys, ulysses.options
        with queries.transport.agreement.telling(travelling=True):
            inputs = (queries.to_heads(q), keys.to_heads(k), keys.to_heads(v))
            o, lse = attention_forward(
                *inputs,
                options.causal,
                options.softmax_scale,
                None,
                deterministic=options.deterministic,
            )
            ctx.save_for_backward(*inputs, o, lse)
            ctx.ulysses = ulysses
            ctx.set_materialize_grads(False)
            if not wants_lse:
                return queries.to_positions(o), None
            lse = queries.to_positions(lse.unsqueeze(-1)).squeeze(-1)
            ctx.mark_non_differentiable(lse)
            return queries.to_positions(o), lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor | None, _):
        queries, keys, options = ctx.ulysses.queries, ctx.ulysses.keys, ctx.ulysses.options
        q, k, v, o, lse = ctx.saved_tensors
        agreement = queries.transport.agreement
        agreement.require_same({"pass": "backward", "call": ctx.ulysses.call})
        with agreement.telling(travelling=True):
            if dout is None:  # the other ranks' may not be
                seq = queries.lengths[queries.transport.rank]
                dout = o.new_zeros(o.shape[0], o.shape[1] * len(queries.lengths), seq, o.shape[3])
            gradients = attention_backward(
                *(q, k, v, o, lse, queries.to_heads(dout)),
                options.causal,
                options.softmax_scale,
                None,
                options.deterministic,
            )
            exchanges = (queries, keys, keys)
            whole = zip(exchanges, gradients, strict=True)
            return None, None, *(exchange.to_positions(t) for exchange, t in whole)
