"""attention(): checks what torch's dispatcher cannot, then calls the operator forward."""

from __future__ import annotations

from math import inf
from numbers import Real
from pathlib import Path
from typing import Literal, NoReturn, overload

import numpy as np
import torch
from torch import Tensor

from .errors import UsageError
from .operator import forward

MAX_FLOAT32 = torch.finfo(torch.float32).max
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
    backward_step: str | Path | None = ...,
    deterministic: bool = ...,
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
    backward_step: str | Path | None = ...,
    deterministic: bool = ...,
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
    backward_step: str | Path | None = ...,
    deterministic: bool = ...,
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
    backward_step=None,
    deterministic=False,
    return_lse=False,
    **unknown,
):
    """softmax(softmax_scale q k^T + mask) v, and its gradients where q, k or v requires grad.

    Args:
        q: [batch, heads, seq_q, head_dim]; bf16, fp16 or fp32; last dimension contiguous, other
            strides free, so that [batch, seq, heads, head_dim] storage passes as x.transpose(1, 2).
        k, v: [batch, kv_heads, seq_k, head_dim], same dtype and device; heads % kv_heads == 0.
            Within torch.autocast all three are cast to its dtype.
        causal: query i sees keys j <= i + seq_k - seq_q. A row that sees none gives 0 (lse -inf).
        softmax_scale: head_dim ** -0.5 if None.
        step: "v04", or a path to a .cu file, which is read once; None takes the highest step that
            can run these inputs, is no draft and, where its header says so, is asked for the same
            bits each time.
        backward_step: likewise "b01" or a path, of the step that computes the gradients.
        deterministic: take only steps that give the same bits each time, in the backward pass of
            this call as well. Implied by torch.use_deterministic_algorithms(True), also where that
            is to warn only.
        return_lse: also return log sum exp of each row of scaled scores, float32
            [batch, heads, seq_q], which has no gradient: it does not require grad.

    Returns:
        o like q, or (o, lse). CUDA tensors: computed on torch's current stream, without a copy or
        a synchronisation. CPU tensors: executed by the SIMT runtime, a checker, not a timer. Meta
        tensors: nothing is computed, shapes and strides are the same.

    Raises:
        UsageError: the inputs are inconsistent, have a tangent of forward-mode AD, or are not
            supported by the step or the device. Also in the backward pass, where no step can
            compute the gradients, and where a second derivative is asked for.

    It keeps q, k, v, o and lse for the backward pass, which computes all three gradients, with the
    layouts of q, k and v, and copies the gradient of o where the step cannot read it. torch.func's
    transforms may be nested in any way that takes one derivative, by reverse mode. torch.vmap's
    axis joins the batch.

    It calls the operators torch.ops.attention_worklog.forward and backward, which are opaque to
    torch.compile; that reports invalid inputs in an error of its own.
    """
    if unknown:
        _refuse_keywords(unknown)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        _refuse_types(q=q, k=k, v=v)
    if causal is not True and causal is not False:
        causal = _to_bool("causal", causal)
    if deterministic is not True and deterministic is not False:
        deterministic = _to_bool("deterministic", deterministic)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    if softmax_scale is not None:
        if not isinstance(softmax_scale, Real):
            raise UsageError(f"softmax_scale must be a number, not {type(softmax_scale).__name__}")
        softmax_scale = float(softmax_scale)
        if MAX_FLOAT32 < abs(softmax_scale) < inf:
            raise UsageError(f"softmax_scale must be a float32, not {softmax_scale}")
    if step is not None:
        step = _to_name("step", step)
    if backward_step is not None:
        backward_step = _to_name("backward_step", backward_step)
    o, lse = forward(q, k, v, causal, softmax_scale, step, backward_step, deterministic)
    return (o, lse) if return_lse else o


def _to_bool(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{name} must be True or False, not of type {type(value).__name__}")
    return bool(value)


def _to_name(name: str, value: object) -> str:
    if not isinstance(value, (str, Path)):  # no union: torch.compile of 2.9 does not know those
        raise UsageError(f"{name} must be a step's name or a path, not {type(value).__name__}")
    return str(value)


def _refuse_types(**inputs: object) -> NoReturn:
    name, given = next((name, t) for name, t in inputs.items() if not isinstance(t, Tensor))
    raise UsageError(f"{name} must be a torch tensor, not {type(given).__name__}")


def _refuse_keywords(unknown: dict[str, object]) -> NoReturn:
    """Raises UsageError for a keyword of scaled_dot_product_attention, TypeError for any other."""
    for name in unknown:
        if advice := _KEYWORDS_OF_SDPA.get(name):
            raise UsageError(f"attention() takes no {name}: {advice}")
    raise TypeError(f"attention() got an unexpected keyword argument '{next(iter(unknown))}'")
