"""attention() and attention_varlen(), which check what torch's dispatcher cannot."""

from __future__ import annotations

from math import inf
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, NoReturn, overload

import numpy as np
import torch
from torch import Tensor

from .errors import UsageError
from .operator import forward, forward_lengths

MAX_FLOAT32 = torch.finfo(torch.float32).max
# Keywords of torch's scaled_dot_product_attention and of flash_attn's functions that have another
# name here, or no counterpart.
_FOREIGN_KEYWORDS = {
    "is_causal": "say causal=, whose mask ends at the last query and the last key (query i sees "
    "keys j <= i + seq_k - seq_q), where torch's begins at the first of both (j <= i)",
    "scale": "say softmax_scale=",
    "attn_mask": "causal=True is the only mask there is, beside a window=",
    "dropout_p": "there is no dropout",
    "enable_gqa": "leave it out, k and v may always have fewer heads than q",
    "window_size": "say window=, likewise (left, right)",
    "softcap": "logits are not capped",
    "alibi_slopes": "there are no biases",
    "return_attn_probs": "say return_lse=, the probabilities are never stored",
    "return_softmax_lse": "say return_lse=",
    "block_table": "there is no paged cache",
    "cache_seqlens": "say seqused_k=",
    "seqused_q": "all queries of a sequence are there, leave it out",
    "max_seqlen_q": "leave it out, no step needs it",
    "max_seqlen_k": "leave it out, no step needs it",
    # Only attention() lacks these.
    "cu_seqlens_q": "attention_varlen() takes packed sequences",
    "cu_seqlens_k": "attention_varlen() takes packed sequences",
}
_NO_LIMIT = (-1, -1)  # a window


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window: tuple[int, int] | None = ...,
    seqused_k: Tensor | None = ...,
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
    window: tuple[int, int] | None = ...,
    seqused_k: Tensor | None = ...,
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
    window: tuple[int, int] | None = ...,
    seqused_k: Tensor | None = ...,
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
    window=None,
    seqused_k=None,
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
            Within torch.autocast all three are cast to its dtype. v may have a head_dim of its own,
            as in multi-head latent attention: there is no window then, and no seqused_k.
        causal: query i sees keys j <= i + seq_k - seq_q. A row that sees none gives 0 (lse -inf).
        window: (left, right), how many keys before and after its own, i + seq_k - seq_q, a query
            sees as well; -1 is no limit. With causal right is 0, and a right of 0 is causal.
        seqused_k: int32 [batch], contiguous: how many keys of each sequence are there, from 0 to
            seq_k, the first ones of a cache. Those are the seq_k of its mask and its window.
        softmax_scale: head_dim ** -0.5 if None, that of q and k.
        step: "v04", or a path to a .cu file, which is read once; None takes the highest step that
            can run these inputs, is no draft and, where its header says so, is asked for the same
            bits each time, or for a window or seqused_k; with these only such a step can.
        backward_step: likewise "b01" or a path, of the step that computes the gradients.
        deterministic: take only steps that give the same bits each time, in the backward pass of
            this call as well. Implied by torch.use_deterministic_algorithms(True), also where that
            is to warn only.
        return_lse: also return log sum exp of each row of scaled scores, float32
            [batch, heads, seq_q], which has no gradient: it does not require grad.

    Returns:
        o like q, but of v's head_dim, or (o, lse). CUDA tensors: computed on torch's current
        stream, without a copy or a synchronisation. CPU tensors: executed by the SIMT runtime, a
        checker, not a timer. Meta tensors: nothing is computed, shapes and strides are the same.

    Raises:
        UsageError: the inputs are inconsistent, have a tangent of forward-mode AD, or are not
            supported by the step or the device. Also in the backward pass, where no step can
            compute the gradients, and where a second derivative is asked for.

    It keeps q, k, v, o, lse and seqused_k for the backward pass, which computes all three
    gradients, with the layouts of q, k and v, and copies the gradient of o where the step cannot
    read it. The gradients of keys that are not there, or that no query sees, are 0. torch.func's
    transforms may be nested in any way that takes one derivative, by reverse mode. torch.vmap's
    axis joins the batch; with seqused_k that is an error.

    The values of seqused_k are checked on the CPU only. On a GPU the host would have to wait for
    them: the result of wrong ones is undefined.

    It calls the operators torch.ops.attention_worklog.forward and backward, or forward_lengths and
    backward_lengths with a window or seqused_k. They are opaque to torch.compile, which reports
    invalid inputs in an error of its own. A window of (-1, -1), or (-1, 0), without seqused_k is
    none, or causal=True.
    """
    if unknown:
        _refuse_keywords("attention", unknown)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        _refuse_types(q=q, k=k, v=v)
    if causal is not True and causal is not False:
        causal = _to_bool("causal", causal)
    if deterministic is not True and deterministic is not False:
        deterministic = _to_bool("deterministic", deterministic)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    if softmax_scale is not None:
        softmax_scale = _to_scale(softmax_scale)
    if step is not None:
        step = _to_name("step", step)
    if backward_step is not None:
        backward_step = _to_name("backward_step", backward_step)
    if window is not None or seqused_k is not None:
        causal, window = _to_mask(causal, window)
        if seqused_k is not None or window != _NO_LIMIT:
            if seqused_k is not None and not isinstance(seqused_k, Tensor):
                _refuse_types(seqused_k=seqused_k)
            lengths = (None, None, seqused_k, *window)
            options = (causal, softmax_scale, step, backward_step, deterministic)
            o, lse = forward_lengths(q, k, v, *lengths, *options)
            return (o, lse) if return_lse else o
    o, lse = forward(q, k, v, causal, softmax_scale, step, backward_step, deterministic)
    return (o, lse) if return_lse else o


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = ...,
    window: tuple[int, int] | None = ...,
    seqused_k: Tensor | None = ...,
    softmax_scale: float | None = ...,
    step: str | Path | None = ...,
    backward_step: str | Path | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = ...,
    window: tuple[int, int] | None = ...,
    seqused_k: Tensor | None = ...,
    softmax_scale: float | None = ...,
    step: str | Path | None = ...,
    backward_step: str | Path | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = ...,
    window: tuple[int, int] | None = ...,
    seqused_k: Tensor | None = ...,
    softmax_scale: float | None = ...,
    step: str | Path | None = ...,
    backward_step: str | Path | None = ...,
    deterministic: bool = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    causal=False,
    window=None,
    seqused_k=None,
    softmax_scale=None,
    step=None,
    backward_step=None,
    deterministic=False,
    return_lse=False,
    **unknown,
):
    """attention() of sequences of any lengths, packed one after another, without padding, and its
    gradients where q, k or v requires grad.

    The layout is that of flash_attn_varlen_func. The longest lengths, its max_seqlen_q and
    max_seqlen_k, are not asked for: no step needs them.

    Args:
        q: [total_q, heads, head_dim]; bf16, fp16 or fp32, where a step takes it; last dimension
            contiguous, other strides free.
        k, v: [total_k, kv_heads, head_dim], same dtype and device; heads % kv_heads == 0.
            Within torch.autocast all three are cast to its dtype.
        cu_seqlens_q: int32 [sequences + 1], contiguous, on the same device: from 0 to total_q,
            never falling. Sequence i has the queries cu_seqlens_q[i] to cu_seqlens_q[i + 1] - 1.
            A sequence may be empty; total_q may not be 0.
        cu_seqlens_k: int32 [sequences + 1], likewise, from 0 to total_k: its keys. A query of a
            sequence without keys gives 0 (lse -inf).
        causal, window: as in attention(), of each sequence by itself, with its seq_q and seq_k.
        seqused_k: int32 [sequences], contiguous: how many keys of each sequence are there, from 0
            to its cu_seqlens_k[i + 1] - cu_seqlens_k[i], the first ones. Those are its seq_k.
        softmax_scale: head_dim ** -0.5 if None.
        step: "v14", or a path to a .cu file, of a step that takes lengths; None takes the highest
            one that can run these inputs and is no draft.
        backward_step: likewise "b11" or a path, of the step that computes the gradients.
        deterministic: take only steps that give the same bits each time. Implied by
            torch.use_deterministic_algorithms(True).
        return_lse: also return log sum exp of each row of scaled scores, float32 [heads, total_q],
            which has no gradient: it does not require grad.

    Returns:
        o like q, or (o, lse). As in attention(), nothing is copied, and the host waits for no GPU.

    Raises:
        UsageError: the inputs are inconsistent, have a tangent of forward-mode AD, or are not
            supported by the step or the device; or this is under torch.vmap. Also in the backward
            pass, where no step can compute the gradients, and where a second derivative is asked
            for.

    It keeps q, k, v, o, lse and the lengths for the backward pass, as attention() does: change none
    of them in place before. The gradients of keys that are not there, or that no query sees, are 0,
    and so are those of queries that see no key.

    The values of cu_seqlens_q, cu_seqlens_k and seqused_k are checked on the CPU only. On a GPU the
    host would have to wait for them: the result of wrong ones is undefined.

    It calls the operators torch.ops.attention_worklog.forward_lengths and backward_lengths, which
    are opaque to torch.compile; that reports invalid inputs in an error of its own.
    """
    if unknown:
        _refuse_keywords("attention_varlen", unknown)
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    if seqused_k is not None:
        tensors["seqused_k"] = seqused_k
    if not all(isinstance(t, Tensor) for t in tensors.values()):
        _refuse_types(**tensors)
    causal, window = _to_mask(_to_bool("causal", causal), window)
    deterministic = _to_bool("deterministic", deterministic)
    o, lse = forward_lengths(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        *window,
        causal,
        None if softmax_scale is None else _to_scale(softmax_scale),
        None if step is None else _to_name("step", step),
        None if backward_step is None else _to_name("backward_step", backward_step),
        deterministic or torch.are_deterministic_algorithms_enabled(),
    )
    return (o, lse) if return_lse else o


def _to_bool(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{name} must be True or False, not of type {type(value).__name__}")
    return bool(value)


def _to_scale(value: object) -> float:
    if not isinstance(value, Real):
        raise UsageError(f"softmax_scale must be a number, not {type(value).__name__}")
    scale = float(value)
    if MAX_FLOAT32 < abs(scale) < inf:
        raise UsageError(f"softmax_scale must be a float32, not {scale}")
    return scale


def _to_mask(causal: bool, window: object) -> tuple[bool, tuple[int, int]]:
    """Whether the mask is causal, and the window, whose right side is -1 where it is."""
    if window is None:
        return causal, _NO_LIMIT
    if not isinstance(window, (tuple, list)):
        raise UsageError(f"window must be a pair (left, right), not {type(window).__name__}")
    if len(window) != 2:
        raise UsageError(f"window must be a pair (left, right), not {len(window)} numbers")
    for side in window:
        if not isinstance(side, Integral) or isinstance(side, bool):
            raise UsageError(f"window must be two ints, not one of type {type(side).__name__}")
        if side < -1:
            raise UsageError(f"window must be two ints from -1 (no limit) up, not {side}")
    left, right = (int(side) for side in window)
    return (True, (left, -1)) if causal or right == 0 else (False, (left, right))


def _to_name(name: str, value: object) -> str:
    if not isinstance(value, (str, Path)):  # no union: torch.compile of 2.9 does not know those
        raise UsageError(f"{name} must be a step's name or a path, not {type(value).__name__}")
    return str(value)


def _refuse_types(**inputs: object) -> NoReturn:
    name, given = next((name, t) for name, t in inputs.items() if not isinstance(t, Tensor))
    raise UsageError(f"{name} must be a torch tensor, not {type(given).__name__}")


def _refuse_keywords(function: str, unknown: dict[str, object]) -> NoReturn:
    """Raises UsageError for a keyword of another library, TypeError for any other."""
    for name in unknown:
        if advice := _FOREIGN_KEYWORDS.get(name):
            raise UsageError(f"{function}() takes no {name}: {advice}")
    raise TypeError(f"{function}() got an unexpected keyword argument '{next(iter(unknown))}'")
