"""The operator behind attention(): torch.ops.attention_worklog.forward.

For torch.compile and for CUDA graphs it is one call, and its fake says how the outputs lie. What it
finds out about some inputs, it keeps for the next ones that lie alike.
"""

from __future__ import annotations

from functools import cache

import torch

from .cache import Cache
from .catalog import all_steps, find_step
from .errors import UsageError
from .operation import FORWARD
from .runtime.backend import DTYPE_NAMES, Backend, Call, empty_outputs, specialization
from .runtime.launch import check_alignment
from .step import Step

ADDRESS_BITS = 63  # of an address: no step asks for rows at multiples of more than 64 bytes

# Not by torch.library.custom_op: a call of that takes several times as long, as it goes through
# Python twice more, for gradients and for aliases.
_library = torch.library.Library("attention_worklog", "DEF")
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, str? step) "
    "-> (Tensor o, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
forward = torch.ops.attention_worklog.forward.default

_calls = Cache()


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    step: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse; the arguments, and what is raised, are those of common.attention."""
    _refuse_grad(q, k, v)
    # fmt: off
    key = (
        step, causal, (q.data_ptr() | k.data_ptr() | v.data_ptr()) & ADDRESS_BITS,
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
    )
    # fmt: on
    call = _calls.get(key) or _calls.add(key, _prepare(q, k, v, causal, step))
    o, lse = empty_outputs(FORWARD, (q, k, v))
    call(q, k, v, o, lse, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    return o, lse


def _fake(q, k, v, causal, softmax_scale, step) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs without contents."""
    _refuse_grad(q, k, v)
    _validate(q, k, v)
    return empty_outputs(FORWARD, (q, k, v))


# One for all devices, so that a device that has no backend is refused in our words.
_library.impl("forward", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("attention_worklog::forward", _fake, lib=_library)


def _refuse_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Here, and not in attention(), it also sees who calls the operator itself."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        name = next(name for name, t in zip("qkv", (q, k, v), strict=True) if t.requires_grad)
        raise UsageError(f"{name} requires grad, and there is no backward: use torch.no_grad()")


def _prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, step: str | None
) -> Call:
    """What computes it: Backend.prepare of the step, or of the highest that can run it."""
    _validate(q, k, v)
    backend = _backend(q.device)
    chosen = highest_step(backend, q, k, v, causal) if step is None else find_step(step)
    tensors = (q, k, v, *empty_outputs(FORWARD, (q, k, v)))
    return backend.prepare(chosen, tensors, causal=causal)


def _validate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise UsageError(
                f"{name} must be [batch, heads, seq, head_dim], not of shape {list(t.shape)}"
            )
        if t.numel() == 0:
            raise UsageError(f"{name} is empty: shape {list(t.shape)}")
        if max(t.shape) >= 2**31:
            raise UsageError(f"{name} is too long: shape {list(t.shape)}, sizes must be below 2^31")
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
        from .runtime.gpu import GpuBackend

        return GpuBackend(device)
    from .runtime.cpu import CpuBackend

    return CpuBackend()


def highest_step(
    backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> Step:
    """What attention() takes where it is given no step. Raises UsageError where none can run."""
    spec = specialization((q, k, v), causal)
    refusals: dict[str, str] = {}
    for step in reversed(all_steps()):
        reason = backend.refusal(step, spec)
        if reason is None:
            alignment = backend.descriptor(step, spec).alignment
            try:
                check_alignment(step.name, alignment, {"q": q, "k": k, "v": v})
                return step
            except UsageError as error:
                reason = str(error)
        refusals.setdefault(reason, step.name)
    told = "; ".join(f"{name} {reason}" for reason, name in refusals.items())
    raise UsageError(f"no step can run these inputs: {told}")
