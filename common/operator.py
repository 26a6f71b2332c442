"""The operator behind attention(): torch.ops.attention_worklog.forward.

torch.compile and CUDA graphs see one call, whose fake gives the outputs' shapes and strides. What a
call prepares is cached for later calls whose tensors have the same layout.
"""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad

from .cache import Cache
from .catalog import STEPS_DIR, all_steps, find_step
from .errors import UsageError
from .operation import FORWARD
from .runtime.backend import DTYPE_NAMES, Backend, Call, empty_outputs, specialization
from .runtime.launch import check_alignment
from .step import Step

ADDRESS_BITS = 63  # of an address: no step asks for rows aligned to more than 64 bytes

# Not torch.library.custom_op: a call of that takes several times as long, because it goes through
# Python twice more, for gradients and for aliases.
_library = torch.library.Library("attention_worklog", "DEF")
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, str? step) "
    "-> (Tensor o, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
forward = torch.ops.attention_worklog.forward.default

_calls = Cache()
# Never removed: a backend owns the modules that it has loaded, and cached calls refer to them.
# PyCUDA cannot unload them from a thread in which another context is current.
_backends: dict[torch.device, Backend] = {}
_backends_lock = threading.Lock()

# The dispatch keys of a call that only autograd intercepts before the backend: no mode, no subclass
# of Tensor, no transform of torch.func.
_PLAIN_KEYS = {
    DispatchKeySet(DispatchKey.CPU).add(DispatchKey.AutogradCPU).raw_repr(),
    DispatchKeySet(DispatchKey.CUDA).add(DispatchKey.AutogradCUDA).raw_repr(),
}


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    step: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse; arguments and exceptions as in common.attention."""
    # fmt: off
    key = (
        step, causal, (q.data_ptr() | k.data_ptr() | v.data_ptr()) & ADDRESS_BITS,
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
    )
    # fmt: on
    call, default_scale = _calls.get(key) or _calls.add(key, _prepare(q, k, v, causal, step))
    o, lse = empty_outputs(FORWARD, (q, k, v))
    call(q, k, v, o, lse, default_scale if softmax_scale is None else softmax_scale)
    return o, lse


def _fake(q, k, v, causal, softmax_scale, step) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs without contents, for fake tensors and for the meta device."""
    _validate(q, k, v)
    return empty_outputs(FORWARD, (q, k, v))


def _autograd(
    keys: DispatchKeySet, q, k, v, causal, softmax_scale, step
) -> tuple[torch.Tensor, torch.Tensor]:
    """Refuses derivatives, then redispatches below autograd.

    torch.func's transforms call it once per level, with that level's wrapped tensors: what
    requires grad at one level does not below it.
    """
    if torch.is_grad_enabled() and torch._C._any_requires_grad(q, k, v):
        name = next(name for name, t in zip("qkv", (q, k, v), strict=True) if t.requires_grad)
        raise UsageError(f"{name} requires grad, and there is no backward: use torch.no_grad()")
    if forward_ad._current_level >= 0:
        _refuse_tangents(q, k, v)
    if keys.raw_repr() in _PLAIN_KEYS:  # skips the dispatcher, which takes 3 us
        return _forward(q, k, v, causal, softmax_scale, step)
    with torch._C._AutoDispatchBelowAutograd():
        below = keys & torch._C._after_autograd_keyset
        return forward.redispatch(below, q, k, v, causal, softmax_scale, step)


def _refuse_tangents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises UsageError for a dual tensor of forward-mode AD."""
    if not torch._C._is_fwd_grad_enabled():
        return
    for name, t in (("q", q), ("k", k), ("v", v)):
        if forward_ad.unpack_dual(t).tangent is not None:
            raise UsageError(
                f"{name} has a tangent, and there is no forward-mode derivative: "
                f"pass {name}.detach()"
            )


def _autocast(
    device_type: str, key: DispatchKey, q, k, v, causal, softmax_scale, step
) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts q, k and v to the dtype of torch.autocast, as scaled_dot_product_attention does."""
    dtype = torch.get_autocast_dtype(device_type)

    def cast(t: torch.Tensor) -> torch.Tensor:
        here = t.device.type == device_type and t.is_floating_point()
        return t.to(dtype) if here and t.dtype != torch.float64 else t

    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(key)):
        return forward(cast(q), cast(k), cast(v), causal, softmax_scale, step)


def _vmap(info, in_dims, q, k, v, causal, softmax_scale, step):
    """The axis that torch.vmap maps over becomes part of the batch."""

    def merge(t: torch.Tensor, axis: int | None) -> torch.Tensor:
        t = t.expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)
        return t.flatten(0, 1)

    inputs = [merge(t, axis) for t, axis in zip((q, k, v), in_dims[:3], strict=True)]
    outputs = forward(*inputs, causal, softmax_scale, step)
    return tuple(t.unflatten(0, (info.batch_size, -1)) for t in outputs), (0, 0)


# One for all devices, so that a device without a backend gets our error message.
_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("forward", _autograd, "Autograd", with_keyset=True)
_library.impl("forward", partial(_autocast, "cpu", DispatchKey.AutocastCPU), "AutocastCPU")
_library.impl("forward", partial(_autocast, "cuda", DispatchKey.AutocastCUDA), "AutocastCUDA")
torch.library.register_fake("attention_worklog::forward", _fake, lib=_library)
torch.library.register_vmap("attention_worklog::forward", _vmap, lib=_library)


def _prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, step: str | None
) -> tuple[Call, float]:
    """The prepared call, and the softmax_scale where none is given.

    The call is prepared for the given step, or for the highest one that can run these inputs.
    """
    _validate(q, k, v)
    backend = _backend(q.device)
    chosen = highest_step(backend, q, k, v, causal) if step is None else find_step(step)
    tensors = (q, k, v, *empty_outputs(FORWARD, (q, k, v)))
    return backend.prepare(chosen, tensors, causal=causal), q.shape[-1] ** -0.5


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
        if t.device.type not in ("cpu", "cuda", "meta"):
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


def _backend(device: torch.device) -> Backend:
    """The backend of a device: one for the life of the process, whichever thread asks first."""
    with _backends_lock:
        if device not in _backends:
            _backends[device] = _make_backend(device)
        return _backends[device]


def _make_backend(device: torch.device) -> Backend:
    if device.type == "cuda":
        from .runtime.gpu import GpuBackend

        return GpuBackend(device)
    from .runtime.cpu import CpuBackend

    return CpuBackend()


def highest_step(
    backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> Step:
    """The step that attention() uses where none is given. Raises UsageError where none can run."""
    spec = specialization((q, k, v), causal)
    refusals: dict[str, str] = {}
    for step in reversed([step for step in all_steps() if step.operation == FORWARD]):
        reason = backend.refusal(step, spec)
        if reason is None:
            alignment = backend.descriptor(step, spec).alignment
            try:
                check_alignment(step.name, alignment, {"q": q, "k": k, "v": v})
                return step
            except UsageError as error:
                reason = str(error)
        refusals.setdefault(reason, step.name)
    if not refusals:
        raise UsageError(f"there is no step in {STEPS_DIR}: restore it, or install again")
    told = "; ".join(f"{name} {reason}" for reason, name in refusals.items())
    raise UsageError(f"no step can run these inputs: {told}")
