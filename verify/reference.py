"""Attention written to be believed: the float64 oracle and the yardstick for rounding errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from common.lengths import UNLIMITED, Lengths
from common.operation import Operation
from verify.lengths import sequences_of, window_of

MAX_SCORES = 2**24  # scores held at once, so that long sequences fit in memory


def oracle_of(operation: Operation) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The function of the inputs, causal and the scalars that computes the outputs in float64."""
    return globals()[operation.oracle]


def yardstick_of(operation: Operation) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The same with every intermediate in the inputs' dtype."""
    return globals()[operation.yardstick]


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    lengths: Lengths | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: o = softmax(softmax_scale * q k^T + mask) v and its log-sum-exp, in float64.

    q [batch, heads, seq_q, head_dim], k [batch, kv_heads, seq_k, head_dim] and v [batch, kv_heads,
    seq_k, v_head_dim], any dtype, device and strides; query head h reads key head
    h // (heads / kv_heads). causal: query i sees the keys j <= i + seq_k - seq_q. Returns o [batch,
    heads, seq_q, v_head_dim] and lse [batch, heads, seq_q] (natural logarithm), both float64; a
    query that sees no key has o = 0 and lse = -inf.

    With lengths, each sequence is computed by itself, and a query sees the keys of its window: of a
    causal one, those that are in the window, too. Keys that are not there may be NaN.
    """
    return _attention(q, k, v, torch.float64, causal, softmax_scale, lengths)


def attention_in_dtype(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    lengths: Lengths | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The yardstick: the same with every intermediate in q's dtype, as unfused torch code has it.

    softmax_scale multiplies q and not the scores, which could overflow in fp16.
    """
    return _attention(q, k, v, q.dtype, causal, softmax_scale, lengths)


def gradients_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    lengths: Lengths | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The oracle of backward: the gradients of q, k and v, in float64, where dout is that of o.

    P = exp(softmax_scale * q k^T - lse), delta = rowsum(dout * o), dS = P * (dout v^T - delta):
    dq = softmax_scale * dS k, dk = softmax_scale * dS^T q, dv = P^T dout, dk and dv summed over the
    query heads that share a head of k and v. o and dout [batch, heads, seq_q, v_head_dim], the
    others, and the mask, as in attention_reference.
    o and lse are inputs: they may be rounded, or belong to more keys than are here. P is 0 where
    lse is -inf.

    The gradients of keys that no query sees are 0, and so are those of keys that are not there.
    """
    return _gradients(q, k, v, o, lse, dout, torch.float64, causal, softmax_scale, lengths)


def gradients_in_dtype(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    lengths: Lengths | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The yardstick: every matrix in q's dtype, as unfused torch code has it.

    As torch's softmax and its backward do, it computes P from S and dS from dP in float32. dout is
    scaled by a power of two, as by a GradScaler, so that no dP overflows; the gradients are rounded
    to q's dtype and returned in float32, with the scale taken away.
    """
    # The largest becomes 2^-5 to 2^-4.
    of_queries, of_keys = (factor / 16 for factor in gradient_factors(dout, k, lengths))
    scaled = (dout.float() * of_queries).to(q.dtype)
    gradients = _gradients(q, k, v, o, lse, scaled, q.dtype, causal, softmax_scale, lengths)
    factors = (of_queries, of_keys, of_keys)
    return tuple(x.float() / factor for x, factor in zip(gradients, factors, strict=True))


def gradient_factors(
    dout: torch.Tensor, k: torch.Tensor, lengths: Lengths | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The powers of two by which the largest |dout| becomes 1/2 to 1, of queries and of keys.

    With lengths each sequence has its own for each head of k and v, and so have its keys. Float32,
    and broadcast to dout [batch, heads, seq_q, head_dim] and to k.
    """

    def factor(x: torch.Tensor) -> float:
        return 2.0 ** -math.frexp(x.abs().max().item())[1]

    of_all = torch.full((1, 1, 1, 1), factor(dout), device=dout.device)
    if lengths is None:
        return of_all, of_all
    (batch, heads, seq_q, _), (_, kv_heads, seq_k, _) = dout.shape, k.shape
    of_queries, of_keys = (
        of_all.repeat(*x.shape[:3], 1).unflatten(1, (kv_heads, -1)) for x in (dout, k)
    )
    for sequence, h in product(sequences_of(lengths, batch, seq_q, seq_k), range(kv_heads)):
        group = slice(h * heads // kv_heads, (h + 1) * heads // kv_heads)
        own = dout[sequence.batch, group, sequence.queries]
        if own.any():
            of_queries[sequence.batch, h, :, sequence.queries] = factor(own)
            of_keys[sequence.batch, h, :, sequence.keys] = factor(own)
    return of_queries.flatten(1, 2), of_keys.flatten(1, 2)


@dataclass(frozen=True)
class BackwardRows:
    """Some rows of a head: what backward computes of them, in one dtype."""

    at: tuple[int, int, slice]  # batch, query head, query rows
    kv: tuple[int, int, slice]  # batch, head of k and v, rows that are the sequence's keys
    q: torch.Tensor  # scaled by softmax_scale
    k: torch.Tensor
    dout: torch.Tensor
    p: torch.Tensor  # [rows, seq_k]
    dp_less_delta: torch.Tensor  # [rows, seq_k], float32 or wider
    ds: torch.Tensor  # [rows, seq_k]


def _rows(
    q: torch.Tensor, k: torch.Tensor, causal: bool, lengths: Lengths | None
) -> Iterator[tuple[tuple[int, int, slice], tuple[int, int, slice], torch.Tensor | None]]:
    """Some rows of a head at a time, all of one sequence: where they are, and its keys.

    And which of these each row does not see, bool [rows, seq_k]; None if it sees all of them.
    """
    batch, heads, seq_q, _ = q.shape
    kv_heads, seq_k = k.shape[1:3]
    lengths = lengths or Lengths()
    left, right = window_of(lengths, causal)
    for sequence, h in product(sequences_of(lengths, batch, seq_q, seq_k), range(heads)):
        kv = (sequence.batch, h * kv_heads // heads, sequence.keys)
        key = torch.arange(sequence.seq_k, device=q.device)
        own_key = sequence.own_keys(q.device)[:, None]
        num_rows = max(1, MAX_SCORES // max(1, sequence.seq_k))
        for first in range(0, sequence.seq_q, num_rows):
            own = own_key[first : first + num_rows]
            start = sequence.queries.start + first
            hidden = key > own + right if right < UNLIMITED else None
            if left < UNLIMITED:
                before = key < own - left
                hidden = before if hidden is None else hidden | before
            yield (sequence.batch, h, slice(start, start + len(own))), kv, hidden


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, by float32 in fp16 on a CPU: torch takes several times longer there for fp16."""
    if a.dtype == torch.float16 and a.device.type == "cpu":
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def backward_rows(
    q,
    k,
    v,
    o,
    lse,
    dout,
    dtype: torch.dtype,
    causal: bool,
    softmax_scale: float,
    lengths: Lengths | None = None,
) -> Iterator[BackwardRows]:
    """Backward, some rows of a head at a time; the arguments are those of gradients_reference."""
    wide = torch.promote_types(dtype, torch.float32)
    for at, kv, hidden in _rows(q, k, causal, lengths):
        keys, values = (x[kv].to(dtype).contiguous() for x in (k, v))
        queries, gradients = q[at].to(dtype) * softmax_scale, dout[at].to(dtype).contiguous()
        row_lse = lse[at].to(wide)[:, None]
        p = _matmul(queries, keys.mT).to(wide).sub_(row_lse).exp_()
        sees_nothing = row_lse.isneginf()
        hidden = sees_nothing if hidden is None else hidden | sees_nothing
        p = p.masked_fill_(hidden, 0).to(dtype)
        delta = (dout[at].to(wide) * o[at].to(wide)).sum(-1, keepdim=True)
        dp_less_delta = _matmul(gradients, values.mT).to(wide) - delta
        ds = (p.to(wide) * dp_less_delta).to(dtype)
        yield BackwardRows(at, kv, queries, keys, gradients, p, dp_less_delta, ds)


def _gradients(
    q,
    k,
    v,
    o,
    lse,
    dout,
    dtype: torch.dtype,
    causal: bool,
    softmax_scale: float,
    lengths: Lengths | None,
):
    wide = torch.promote_types(dtype, torch.float32)
    dq = torch.empty(q.shape, dtype=dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=q.device) for x in (k, v))
    for rows in backward_rows(q, k, v, o, lse, dout, dtype, causal, softmax_scale, lengths):
        dq[rows.at] = _matmul(rows.ds, rows.k) * softmax_scale
        dk[rows.kv] += _matmul(rows.ds.mT, rows.q)
        dv[rows.kv] += _matmul(rows.p.mT, rows.dout)
    return dq, dk.to(dtype), dv.to(dtype)


def gradient_terms(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    lengths: Lengths | None = None,
    p_error: float,
    dp_error: float,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Of each gradient, element by element: the sum of its terms' magnitudes, and of their errors.

    The errors are those of a computation where P has a relative error of p_error, and dP and delta
    of a row have an absolute one of dp_error times the largest product of norms that they may have
    had. All float64.
    """
    dq, dq_error = (torch.empty(q.shape, dtype=torch.float64, device=q.device) for _ in range(2))
    dk, dk_error, dv = (
        torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in (k, k, v)
    )
    norm_v = torch.linalg.vector_norm(v, dim=-1, dtype=torch.float64)
    sequences = sequences_of(lengths or Lengths(), q.shape[0], q.shape[2], k.shape[2])
    of_sequences = [norm_v[i, :, keys] for i, _, keys in sequences if keys.stop > keys.start]
    largest_v = max((x.max().item() for x in of_sequences), default=0.0)
    arguments = (q, k, v, o, lse, dout, torch.float64, causal, softmax_scale, lengths)
    for rows in backward_rows(*arguments):
        norm_o, norm_dout = (
            torch.linalg.vector_norm(x[rows.at], dim=-1, keepdim=True, dtype=torch.float64)
            for x in (o, dout)
        )
        of_dp = dp_error * norm_dout * (largest_v + norm_o)
        ds_error = rows.p * (p_error * rows.dp_less_delta.abs() + of_dp)
        ds, keys = rows.ds.abs(), abs(softmax_scale) * rows.k.abs()
        dq[rows.at], dq_error[rows.at] = ds @ keys, ds_error @ keys
        dk[rows.kv] += ds.mT @ rows.q.abs()
        dk_error[rows.kv] += ds_error.mT @ rows.q.abs()
        dv[rows.kv] += rows.p.mT @ rows.dout.abs()
    return (dq, dk, dv), (dq_error, dk_error, p_error * dv)


def _attention(
    q, k, v, dtype: torch.dtype, causal: bool, softmax_scale: float, lengths: Lengths | None
):
    o = torch.empty(*q.shape[:3], v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
    for at, kv, hidden in _rows(q, k, causal, lengths):
        # Contiguous, since cuBLAS counts in 32 bits how far rows lie apart.
        keys, values = (x[kv].to(dtype).contiguous() for x in (k, v))
        scores = _matmul(q[at].to(dtype) * softmax_scale, keys.mT)  # [rows, seq_k]
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        lse[at] = scores.logsumexp(-1)
        sees_nothing = lse[at].isneginf()
        weighted = _matmul(scores.softmax(-1), values)  # NaN in a row that sees nothing
        o[at] = weighted.masked_fill(sees_nothing[:, None], 0)
    return o, lse
