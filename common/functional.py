"""attention(): checks what torch's dispatcher cannot, then calls the operator."""

from __future__ import annotations

from numbers import Real
from pathlib import Path
from typing import Literal, NoReturn, overload

import numpy as np
from torch import Tensor

from .errors import UsageError
from .operator import forward

# Keywords of torch's scaled_dot_product_attention that have another name here, or no counterpart.
_KEYWORDS_OF_SDPA = {
    "is_causal": "say causal=, whose mask ends at the last query and the last key (query i sees "
    "keys j <= i + seq_k - seq_q), where torch's begins at the first of both (j <= i)",
    "scale": "say softmax_scale=",
    "attn_mask": "causal=True is the only mask there is",
    "dropout_p": "there is no dropout",
    "enable_gqa": "leave it out, k and v may always have fewer heads than q",
}


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    step: str | Path | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    step: str | Path | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    step: str | Path | None = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q,
    k,
    v,
    *,
    causal=False,
    softmax_scale=None,
    step=None,
    return_lse=False,
    **unknown,
):
    """softmax(softmax_scale q k^T + mask) v, forward only.

    Args:
        q: [batch, heads, seq_q, head_dim]; bf16, fp16 or fp32; last dimension contiguous, other
            strides free, so that [batch, seq, heads, head_dim] storage passes as x.transpose(1, 2).
        k, v: [batch, kv_heads, seq_k, head_dim], same dtype and device; heads % kv_heads == 0.
            Within torch.autocast all three are cast to its dtype.
        causal: query i sees keys j <= i + seq_k - seq_q. A row that sees none gives 0 (lse -inf).
        softmax_scale: head_dim ** -0.5 if None.
        step: "v04", or a path to a .cu file, which is read once; None takes the highest step that
            can run these inputs.
        return_lse: also return log sum exp of each row of scaled scores, float32
            [batch, heads, seq_q].

    Returns:
        o like q, or (o, lse). CUDA tensors: computed on torch's current stream, without a copy or
        a synchronisation. CPU tensors: executed by the SIMT runtime, a checker, not a timer. Meta
        tensors: nothing is computed, shapes and strides are the same.

    Raises:
        UsageError: the inputs are inconsistent, need a derivative (by autograd, torch.func or
            forward-mode AD), or are not supported by the step or the device.

    It calls the operator torch.ops.attention_worklog.forward, which is opaque to torch.compile;
    that reports invalid inputs in an error of its own. torch.vmap's axis joins the batch.
    """
    if unknown:
        _refuse_keywords(unknown)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        _refuse_types(q=q, k=k, v=v)
    if causal is not True and causal is not False:
        if not isinstance(causal, np.bool_):
            raise UsageError(f"causal must be True or False, not of type {type(causal).__name__}")
        causal = bool(causal)
    if softmax_scale is not None:
        if not isinstance(softmax_scale, Real):
            raise UsageError(f"softmax_scale must be a number, not {type(softmax_scale).__name__}")
        softmax_scale = float(softmax_scale)
    o, lse = forward(q, k, v, causal, softmax_scale, None if step is None else str(step))
    return (o, lse) if return_lse else o


def _refuse_types(**inputs: object) -> NoReturn:
    name, given = next((name, t) for name, t in inputs.items() if not isinstance(t, Tensor))
    raise UsageError(f"{name} must be a torch tensor, not {type(given).__name__}")


def _refuse_keywords(unknown: dict[str, object]) -> NoReturn:
    """Raises UsageError for a keyword of scaled_dot_product_attention, TypeError for any other."""
    for name in unknown:
        if advice := _KEYWORDS_OF_SDPA.get(name):
            raise UsageError(f"attention() takes no {name}: {advice}")
    raise TypeError(f"attention() got an unexpected keyword argument '{next(iter(unknown))}'")
