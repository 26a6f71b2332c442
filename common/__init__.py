"""The attention worklog: attention(q, k, v) by any step of the worklog, on a GPU or without one."""

from __future__ import annotations

from functools import cache
from numbers import Real
from pathlib import Path

import torch

from common.backend import DTYPE_NAMES, Backend, run
from common.errors import UsageError
from common.launch import check_alignment
from common.step import Specialization, Step, all_steps, find_step

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
        step: "v04", or a path to a .cu file; None takes the highest step that can run these inputs.
        return_lse: also return log sum exp of each row of scaled scores, float32
            [batch, heads, seq_q].

    Returns:
        o like q, or (o, lse). CUDA tensors: computed on torch's current stream, without a copy or
        a synchronisation. CPU tensors: executed by the SIMT runtime, a checker, not a timer.

    Raises:
        UsageError: inputs that disagree, or that the step or the device cannot take.
    """
    _validate(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if not isinstance(scale, Real):
        raise UsageError(f"softmax_scale must be a number, not {type(scale).__name__}")
    backend = _backend(q.device)
    spec = Specialization(q.shape[-1], DTYPE_NAMES[q.dtype], bool(causal))
    o, lse = run(
        backend,
        find_step(step) if step is not None else _highest_step(backend, spec, q, k, v),
        q,
        k,
        v,
        causal=spec.causal,
        softmax_scale=float(scale),
    )
    return (o, lse) if return_lse else o


def _validate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise UsageError(f"{name} must be a torch tensor, not {type(t).__name__}")
        if t.dim() != 4:
            raise UsageError(
                f"{name} must be [batch, heads, seq, head_dim], not of shape {list(t.shape)}"
            )
        if t.numel() == 0:
            raise UsageError(f"{name} is empty: shape {list(t.shape)}")
        if max(t.shape) >= 2**31:
            raise UsageError(f"{name} is too long: shape {list(t.shape)}, sizes must be below 2^31")
        if t.requires_grad and torch.is_grad_enabled():
            raise UsageError(f"{name} requires grad, and there is no backward: use torch.no_grad()")
        if t.dtype not in DTYPE_NAMES:
            raise UsageError(f"{name} must be bfloat16, float16 or float32, not {t.dtype}")
        if t.device.type not in ("cpu", "cuda"):
            raise UsageError(f"{name} must be a CPU or CUDA tensor, not one on {t.device}")
        if t.stride(-1) != 1:
            raise UsageError(
                f"the last dimension of {name} must be contiguous, its stride is {t.stride(-1)}: "
                f"pass {name}.contiguous()"
            )
    for attribute in ("dtype", "device"):
        if not getattr(q, attribute) == getattr(k, attribute) == getattr(v, attribute):
            found = ", ".join(
                f"{n} {getattr(t, attribute)}" for n, t in zip("qkv", (q, k, v), strict=True)
            )
            raise UsageError(f"q, k and v must have the same {attribute}: {found}")
    if k.shape != v.shape:
        raise UsageError(
            f"k and v must have the same shape, not {list(k.shape)} and {list(v.shape)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise UsageError(
            f"q {list(q.shape)} and k {list(k.shape)} must have the same batch and head_dim"
        )
    if q.shape[1] % k.shape[1]:
        raise UsageError(f"heads ({q.shape[1]}) must be a multiple of kv_heads ({k.shape[1]})")


@cache
def _backend(device: torch.device) -> Backend:
    if device.type == "cuda":
        from common.gpu import GpuBackend

        return GpuBackend(device)
    from common.cpu import CpuBackend

    return CpuBackend()


def _highest_step(backend: Backend, spec: Specialization, q, k, v) -> Step:
    refusals: dict[str, str] = {}
    for step in reversed(all_steps()):
        reason = backend.refusal(step, spec)
        if reason is None:
            alignment = backend.descriptor(step, spec).alignment
            try:
                check_alignment(step.name, alignment, q=q, k=k, v=v)
                return step
            except UsageError as error:
                reason = str(error)
        refusals.setdefault(reason, step.name)
    told = "; ".join(f"{name} {reason}" for reason, name in refusals.items())
    raise UsageError(f"no step can run these inputs: {told}")
