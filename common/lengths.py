"""Lengths and windows: what a call says of its sequences beside the shapes of its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

UNLIMITED = 2**31 - 1  # of a window's side: all keys


class Lengths(NamedTuple):
    """The sequences of a call, and the window of keys that a query sees.

    All tensors are int32, contiguous and on the call's device. With cu_seqlens, q is
    [1, heads, total_q, head_dim], k and v are [1, kv_heads, total_k, head_dim], and sequence i has
    the rows cu_seqlens[i] ... cu_seqlens[i + 1] - 1 of them; both are given, or neither. Without,
    each batch is a sequence. With seqused_k, only the first seqused_k[i] keys of a sequence are
    there.

    Of a sequence of seq_q queries and seq_k keys, query i sees the keys from
    i + seq_k - seq_q - window_left to i + seq_k - seq_q + window_right. A causal mask is a
    window_right of 0.
    """

    cu_seqlens_q: torch.Tensor | None = None  # [sequences + 1], from 0 to total_q, never falling
    cu_seqlens_k: torch.Tensor | None = None  # [sequences + 1], from 0 to total_k, never falling
    seqused_k: torch.Tensor | None = None  # [sequences], at most a sequence's keys
    window_left: int = UNLIMITED  # 0 or more
    window_right: int = UNLIMITED

    def num_sequences(self, batch: int) -> int:
        return batch if self.cu_seqlens_q is None else self.cu_seqlens_q.numel() - 1
