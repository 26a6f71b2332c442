"""FlashAttention-3's interface on attention() and attention_varlen(), for its own tests.

    make fa3-tests HOPPER=path/to/flash-attention/hopper

runs its test_flash_attn.py with this module in place of its own. Its reference answers what we do
not compute, so that the rest of a test runs: a head_dim of v that is not that of q and k,
attention_chunk, lengths of the queries in use, gradients of packed sequences or of a window beyond
head_dim 128. At the end this module says how many calls each has answered.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from test_util import attention_ref  # FlashAttention's

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import attention, attention_varlen

WIDEST_GRADIENTS = 128  # head_dim, of packed sequences and windows
ALL_KEYS = (-1, -1)
FORWARD_ONLY = os.environ.get("FLASH_ATTENTION_DISABLE_BACKWARD") == "TRUE"

_answered = Counter()


@atexit.register
def _tell() -> None:
    print(
        f"calls answered by attention_worklog: {_answered['ours']}, "
        f"by FlashAttention's reference: {_answered['theirs']}"
    )


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    deterministic=False,
    attention_chunk=0,
    num_splits=1,
    pack_gqa=None,
    **unsupported,
):
    """q, k and v [batch, seq, heads, head_dim]."""
    _skip(unsupported)
    window = _window(window_size)
    if attention_chunk or not _is_ours(q, v, needs_lengths=window != ALL_KEYS):
        _answered["theirs"] += 1
        return attention_ref(
            q, k, v, causal=causal, window_size=window, attention_chunk=attention_chunk
        )[0]
    _answered["ours"] += 1
    o = attention(
        *(x.transpose(1, 2) for x in _inputs(q, k, v)),
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        deterministic=deterministic,
    )
    return o.transpose(1, 2)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    deterministic=False,
    attention_chunk=0,
    num_splits=1,
    pack_gqa=None,
    **unsupported,
):
    """q [total_q, heads, head_dim], k and v [total_k, kv_heads, head_dim]."""
    _skip(unsupported)
    window = _window(window_size)
    if attention_chunk or seqused_q is not None or not _is_ours(q, v, needs_lengths=True):
        _answered["theirs"] += 1
        options = {"causal": causal, "window_size": window, "attention_chunk": attention_chunk}
        return _by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, options)
    _answered["ours"] += 1
    return attention_varlen(
        *_inputs(q, k, v),
        cu_seqlens_q,
        cu_seqlens_k,
        causal=causal,
        window=window,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        deterministic=deterministic,
    )


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    scheduler_metadata=None,
    num_splits=0,
    rotary_interleaved=True,
    return_softmax_lse=False,
    **unsupported,
):
    """q [batch, seq_q, heads, head_dim], the caches [batch, seq_k, kv_heads, head_dim]."""
    _skip(unsupported | {"k": k, "cache_batch_idx": cache_batch_idx, "cu_seqlens_q": cu_seqlens_q})
    window = _window(window_size)
    if attention_chunk:
        _answered["theirs"] += 1
        keys = torch.arange(k_cache.shape[1], device=q.device) < cache_seqlens[:, None]
        o = attention_ref(
            q,
            k_cache,
            v_cache,
            key_padding_mask=keys,
            causal=causal,
            window_size=window,
            attention_chunk=attention_chunk,
        )[0]
        return (o, None) if return_softmax_lse else o
    _answered["ours"] += 1
    o, lse = attention(
        *(x.transpose(1, 2) for x in (q, k_cache, v_cache)),
        causal=causal,
        window=window,
        seqused_k=cache_seqlens,
        softmax_scale=softmax_scale,
        return_lse=True,
    )
    o = o.transpose(1, 2)
    return (o, lse) if return_softmax_lse else o


def flash_attn_combine(*_, **__):
    pytest.skip("parts are merged within a call")


def get_scheduler_metadata(*_, **__):
    return None


def _skip(unsupported: dict) -> None:
    """Skips a test that asks for what neither we nor this module have."""
    for name, value in unsupported.items():
        if isinstance(value, torch.Tensor) or value:
            pytest.skip(f"there is no {name}")


def _is_ours(q, v, needs_lengths: bool) -> bool:
    head_dim = q.shape[-1]
    if v.shape[-1] != head_dim:
        return False
    return FORWARD_ONLY or not needs_lengths or head_dim <= WIDEST_GRADIENTS


def _inputs(*tensors):
    return [x.detach() for x in tensors] if FORWARD_ONLY else tensors


def _window(window_size) -> tuple[int, int]:
    left, right = map(int, window_size)
    return left, right


def _by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, options):
    """By the reference; rows that are not used are 0."""
    parts = []
    ends = [pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k)]
    for i, ((q_begin, q_end), (k_begin, k_end)) in enumerate(zip(*ends, strict=True)):
        q_used = q_end - q_begin if seqused_q is None else int(seqused_q[i])
        k_used = k_end - k_begin if seqused_k is None else int(seqused_k[i])
        queries = q[q_begin : q_begin + q_used]
        keys, values = (x[k_begin : k_begin + k_used] for x in (k, v))
        if k_used:
            part = attention_ref(queries[None], keys[None], values[None], **options)[0][0]
        else:
            part = queries.new_zeros(q_used, q.shape[1], v.shape[-1])
        parts += [part, part.new_zeros(q_end - q_begin - q_used, *part.shape[1:])]
    # Gradients of 0, where no sequence has keys.
    return torch.cat(parts) + 0 * (q.sum() + k.sum() + v.sum())
