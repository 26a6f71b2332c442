"""Attention written to be believed: the float64 oracle and the yardstick for rounding errors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch

from common.operation import Operation

MAX_SCORES = 2**24  # scores held at once, so that long sequences fit in memory


def oracle_of(operation: Operation) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The function of the inputs, causal and the scalars that computes the outputs in float64."""
    return globals()[operation.oracle]


def yardstick_of(operation: Operation) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The same with every intermediate in the inputs' dtype."""
    return globals()[operation.yardstick]


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: o = softmax(softmax_scale * q k^T + mask) v and its log-sum-exp, in float64.

    q [batch, heads, seq_q, head_dim], k and v [batch, kv_heads, seq_k, head_dim], any dtype, device
    and strides; query head h reads key head h // (heads / kv_heads). causal: query i sees the keys
    j <= i + seq_k - seq_q. Returns o [batch, heads, seq_q, head_dim] and lse [batch, heads, seq_q]
    (natural logarithm), both float64; a query that sees no key has o = 0 and lse = -inf. v may have
    another number of columns than k; o has as many.
    """
    return _attention(q, k, v, torch.float64, causal, softmax_scale)


def attention_in_dtype(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The yardstick: the same with every intermediate in q's dtype, as unfused torch code has it.

    softmax_scale multiplies q and not the scores, which could overflow in fp16.
    """
    return _attention(q, k, v, q.dtype, causal, softmax_scale)


def _attention(q, k, v, dtype: torch.dtype, causal: bool, softmax_scale: float):
    batch, heads, seq_q, _ = q.shape
    kv_heads, seq_k = k.shape[1:3]
    o = torch.empty(*q.shape[:3], v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
    key = torch.arange(seq_k, device=q.device)
    num_rows = max(1, MAX_SCORES // seq_k)
    for b, h, first in product(range(batch), range(heads), range(0, seq_q, num_rows)):
        rows = slice(first, min(first + num_rows, seq_q))
        # Contiguous, since cuBLAS counts in 32 bits how far rows lie apart.
        kv = (b, h * kv_heads // heads)
        keys, values = (x[kv].to(dtype).contiguous() for x in (k, v))
        scores = (q[b, h, rows].to(dtype) * softmax_scale) @ keys.mT  # [rows, seq_k]
        if causal:
            last_visible = torch.arange(rows.start, rows.stop, device=q.device) + seq_k - seq_q
            scores.masked_fill_(key > last_visible[:, None], -torch.inf)
        lse[b, h, rows] = scores.logsumexp(-1)
        sees_nothing = lse[b, h, rows].isneginf()
        weighted = scores.softmax(-1) @ values  # NaN in a row that sees nothing
        o[b, h, rows] = weighted.masked_fill(sees_nothing[:, None], 0)
    return o, lse
