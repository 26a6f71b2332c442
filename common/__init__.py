"""The attention worklog: attention(q, k, v) by any step of the worklog, on a GPU or without one."""

from __future__ import annotations

from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["UsageError", "attention"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    step: str | Path | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale q k^T + mask) v, forward only.

    Args:
        q: [batch, heads, seq_q, head_dim]; bf16, fp16 or fp32; last dimension contiguous, other
            strides free, so that [batch, seq, heads, head_dim] storage passes as x.transpose(1, 2).
        k, v: [batch, kv_heads, seq_k, head_dim], same dtype and device; heads % kv_heads == 0.
        causal: query i sees keys j <= i + seq_k - seq_q. A row that sees none gives 0 (lse -inf).
        softmax_scale: head_dim ** -0.5 if None.
        step: "v04", or a path to a .cu file, which is read once; None takes the highest step that
            can run these inputs.
        return_lse: also return log sum exp of each row of scaled scores, float32
            [batch, heads, seq_q].

    Returns:
        o like q, or (o, lse). CUDA tensors: computed on torch's current stream, without a copy or
        a synchronisation. CPU tensors: executed by the SIMT runtime, a checker, not a timer.

    Raises:
        UsageError: inputs that disagree, that require grad, or that the step or the device cannot
            take.

    It is the operator torch.ops.attention_worklog.forward: torch.compile does not look into it,
    and tells in an error of its own what is wrong with inputs.
    """
    import torch  # here, as reports need none

    from .operator import forward

    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise UsageError(f"{name} must be a torch tensor, not {type(t).__name__}")
    if softmax_scale is not None and not isinstance(softmax_scale, Real):
        raise UsageError(f"softmax_scale must be a number, not {type(softmax_scale).__name__}")
    scale = None if softmax_scale is None else float(softmax_scale)
    o, lse = forward(q, k, v, bool(causal), scale, None if step is None else str(step))
    return (o, lse) if return_lse else o
