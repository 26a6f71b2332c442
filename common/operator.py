"""The operators behind attention(): torch.ops.attention_worklog.forward and .backward.

torch.compile and CUDA graphs see one call each, whose fake gives the outputs' shapes and strides.
What a step depends on is looked up. The rest is computed, lengths and strides included: in decoding
each call has a key more than the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import Function, forward_ad
from torch.autograd.function import _SingleLevelFunction

from .cache import Cache
from .catalog import STEPS_DIR, all_steps, find_step
from .errors import NotEnoughMemoryError, UsageError
from .operation import BACKWARD, FORWARD, SIZES, Operand, Operation
from .runtime.backend import (
    DTYPE_NAMES,
    Backend,
    Call,
    empty_outputs,
    refuse,
    specialization,
)
from .runtime.launch import check_alignment, sizes_of, strides
from .step import Step, are_few

MOST_ALIGNMENT = 64  # bytes: no step asks for rows aligned to more
# Inputs that lie as whoever computed them left them, autograd or torch.vmap: where a step cannot
# read one, it is copied. All others it must read where they are.
COPIED = ("lse", "dout")

# Not torch.library.custom_op: a call of that takes several times as long, because it goes through
# Python twice more, for gradients and for aliases.
_library = torch.library.Library("attention_worklog", "DEF")
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, str? step, "
    "str? backward_step=None, bool deterministic=False) -> (Tensor o, Tensor lse)",
    tags=_tags,
)
_library.define(
    "backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor dout, bool causal, "
    "float? softmax_scale, str? step, bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=_tags,
)
forward = torch.ops.attention_worklog.forward.default
backward = torch.ops.attention_worklog.backward.default

_calls = Cache()  # _Chosen, by all that the choice depends on
# Never removed: what a backend has loaded stays loaded, and cached calls refer to it.
_backends: dict[torch.device, Backend] = {}
_backends_lock = threading.Lock()

# The dispatch keys of a call that only autograd intercepts before the backend: no mode, no subclass
# of Tensor, no transform of torch.func.
_PLAIN_KEYS = {
    DispatchKeySet(DispatchKey.CPU).add(DispatchKey.AutogradCPU).raw_repr(),
    DispatchKeySet(DispatchKey.CUDA).add(DispatchKey.AutogradCUDA).raw_repr(),
}


class _Chosen(NamedTuple):
    call: Call
    default_scale: float  # softmax_scale, where none is given
    step: Step
    alignment: int  # bytes that divide the rows' addresses, for the step


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    step: str | None,
    backward_step: str | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse; arguments and exceptions as in common.attention."""
    if not q.dim() == k.dim() == v.dim() == 4:
        _validate_shapes(FORWARD, (q, k, v))
    # fmt: off
    key = (
        step, backward_step, deterministic, causal,
        are_few(q.shape[2], q.shape[1], k.shape[1]), q.shape[3], q.dtype, q.device,
        k.dtype, k.device, v.dtype, v.device,
    )
    # fmt: on
    chosen = _calls.get(key)
    if chosen is None:
        _validate(FORWARD, (q, k, v))
        if backward_step is not None:  # found wrong here, not somewhere in a backward pass
            _find(BACKWARD, backward_step, deterministic)
        chosen = _calls.add(
            key, _choose(FORWARD, (q, k, v), causal, step, deterministic, as_they_lie=False)
        )
    scale = chosen.default_scale if softmax_scale is None else softmax_scale
    outputs = _try(FORWARD, chosen.call, (q, k, v), scale)
    return outputs or _call_as_they_lie(FORWARD, key, (q, k, v), causal, scale, step, deterministic)


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    step: str | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, which lie like q, k and v, where dout is the gradient of o.

    o and lse are what forward returned, and step is one of the backward ladder; lse and dout may
    have any strides. Other arguments and exceptions are as in common.attention.
    """
    inputs = (q, k, v, o, lse, dout)
    if not (q.dim() == k.dim() == v.dim() == o.dim() == dout.dim() == 4):
        _validate_shapes(BACKWARD, inputs)
    key = (step, deterministic, causal, q.shape[3], *[(t.dtype, t.device) for t in inputs])
    chosen = _calls.get(key)
    if chosen is None:
        _validate(BACKWARD, inputs)
        chosen = _calls.add(
            key, _choose(BACKWARD, inputs, causal, step, deterministic, as_they_lie=False)
        )
    scale = chosen.default_scale if softmax_scale is None else softmax_scale
    outputs = None
    if lse.is_contiguous() and lse.shape == q.shape[:3] and dout.stride(3) == 1:
        outputs = _try(BACKWARD, chosen.call, inputs, scale)
    return outputs or _call_as_they_lie(BACKWARD, key, inputs, causal, scale, step, deterministic)


def _try(
    operation: Operation, call: Call, inputs: tuple[torch.Tensor, ...], softmax_scale: float
) -> tuple[torch.Tensor, ...] | None:
    """The outputs of a call; None where its step cannot take these inputs."""
    try:
        outputs = empty_outputs(operation, inputs)
        workspace = call(inputs + outputs, (softmax_scale,))
    except (RuntimeError, NotEnoughMemoryError):  # perhaps of shapes that do not fit
        _validate(operation, inputs)
        raise
    return None if workspace is None else outputs


def _call_as_they_lie(
    operation: Operation,
    key: tuple,
    inputs: Sequence[torch.Tensor],
    causal: bool,
    softmax_scale: float,
    step: str | None,
    deterministic: bool,
) -> tuple[torch.Tensor, ...]:
    """The outputs, where the step of that key cannot take these inputs: another one may, or copies.

    Raises UsageError where none can, or shapes do not fit together.
    """
    _validate(operation, inputs)
    key = (*key, _alignment(_fixed(operation, inputs).values()))
    chosen = _calls.get(key) or _calls.add(
        key, _choose(operation, inputs, causal, step, deterministic, as_they_lie=True)
    )
    inputs = tuple(
        t if operand.name not in COPIED or _is_readable(operand, t, chosen.alignment) else _copy(t)
        for operand, t in zip(operation.inputs, inputs, strict=True)
    )
    outputs = empty_outputs(operation, inputs)
    if chosen.call((*inputs, *outputs), (softmax_scale,)) is None:
        refuse(chosen.step, chosen.alignment, (*inputs, *outputs))
    return outputs


def _copy(t: torch.Tensor) -> torch.Tensor:
    """Contiguous and at an address of its own, where even contiguous() would return t itself."""
    return t.clone(memory_format=torch.contiguous_format)


def _fake(operation: Operation, *arguments) -> tuple[torch.Tensor, ...]:
    """Outputs without contents, for fake tensors and for the meta device."""
    inputs = _tensors(operation, arguments)
    _validate(operation, inputs)
    return empty_outputs(operation, inputs)


def _tensors(operation: Operation, arguments: Sequence) -> tuple[torch.Tensor, ...]:
    """The tensors among an operator's arguments: those come first."""
    return tuple(arguments[: len(operation.inputs)])


class _Node(_SingleLevelFunction):
    """A node of autograd's graph, at one level of torch.func's transforms.

    The dispatcher calls an operator once for each level: Function would apply itself at all.
    """

    # What compiled autograd knows a node's code by. Function alone has it.
    _compiled_autograd_key = staticmethod(Function._compiled_autograd_key)


class _Attention(_Node):
    """forward, whose gradients are those of backward."""

    @staticmethod
    def forward(ctx, keys, q, k, v, causal, softmax_scale, step, backward_step, deterministic):
        options = (causal, softmax_scale, step, backward_step, deterministic)
        o, lse = _below_node(forward, _forward, keys, q, k, v, *options)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = causal, softmax_scale, backward_step, deterministic
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # of lse they would be zeros that nobody reads
        return o, lse

    @staticmethod
    def backward(ctx, dout, _):
        if dout is None:
            return (None,) * 9
        gradients = backward(*ctx.saved_tensors, dout, *ctx.options)
        needed = ctx.needs_input_grad[1:4]
        asked = (g if need else None for g, need in zip(gradients, needed, strict=True))
        return None, *asked, None, None, None, None, None


class _Gradients(_Node):
    """backward, whose gradients are an error: there is no second derivative.

    There is a node wherever create_graph=True, as in all of torch.func, whether or not it is asked.
    """

    @staticmethod
    def forward(ctx, keys, *arguments):
        return _below_node(backward, _backward, keys, *arguments)

    @staticmethod
    def backward(ctx, *_):
        raise UsageError(
            "a second derivative was asked for, and attention has only the first: take torch's "
            "scaled_dot_product_attention with SDPBackend.MATH, or detach the gradients"
        )


def _forward_autograd(
    keys: DispatchKeySet,
    q,
    k,
    v,
    causal,
    softmax_scale,
    step,
    backward_step=None,
    deterministic=False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Records a node if anything requires grad, then redispatches below autograd.

    torch.func's transforms call it once per level, with that level's wrapped tensors: what
    requires grad at one level does not below it.
    """
    if forward_ad._current_level >= 0:
        _refuse_tangents(FORWARD, (q, k, v))
    needs_grad = torch.is_grad_enabled() and torch._C._any_requires_grad(q, k, v)
    if not needs_grad and keys.raw_repr() in _PLAIN_KEYS:  # most calls: as short as can be
        return _forward(q, k, v, causal, softmax_scale, step, backward_step, deterministic)
    arguments = (q, k, v, causal, softmax_scale, step, backward_step, deterministic)
    if needs_grad:
        return _record(_Attention, keys, *arguments)
    return _below_autograd(forward, _forward, keys, *arguments)


def _backward_autograd(
    keys: DispatchKeySet, *arguments
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Likewise for backward."""
    inputs = _tensors(BACKWARD, arguments)
    if forward_ad._current_level >= 0:
        _refuse_tangents(BACKWARD, inputs)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        return _record(_Gradients, keys, *arguments)
    return _below_autograd(backward, _backward, keys, *arguments)


def _record(node: type[_Node], keys: DispatchKeySet, *arguments):
    with enable_single_level_autograd_function():
        return node.apply(keys, *arguments)


def _below_autograd(operator, implementation, keys: DispatchKeySet, *arguments):
    if keys.raw_repr() in _PLAIN_KEYS:  # skips the dispatcher, which takes 3 us
        return implementation(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


def _below_node(operator, implementation, keys: DispatchKeySet, *arguments):
    """The same within a node, where torch has disabled gradients and tangents.

    Outer levels of torch.func's transforms would lose theirs by that.
    """
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return _below_autograd(operator, implementation, keys, *arguments)


def _refuse_tangents(operation: Operation, inputs: Sequence[torch.Tensor]) -> None:
    """Raises UsageError for a dual tensor of forward-mode AD."""
    if not torch._C._is_fwd_grad_enabled():
        return
    for operand, t in zip(operation.inputs, inputs, strict=True):
        if forward_ad.unpack_dual(t).tangent is not None:
            raise UsageError(
                f"{operand.name} has a tangent, and there is no forward-mode derivative: "
                f"pass {operand.name}.detach()"
            )


def _autocast(
    device_type: str, key: DispatchKey, q, k, v, *options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts q, k and v to the dtype of torch.autocast, as scaled_dot_product_attention does.

    Above autograd, which casts the gradients back. backward has no casts: its inputs have the dtype
    that forward's had.
    """
    dtype = torch.get_autocast_dtype(device_type)

    def cast(t: torch.Tensor) -> torch.Tensor:
        here = t.device.type == device_type and t.is_floating_point()
        return t.to(dtype) if here and t.dtype != torch.float64 else t

    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(key)):
        return forward(cast(q), cast(k), cast(v), *options)


def _vmap(operation: Operation, operator, info, in_dims, *arguments):
    """The axis that torch.vmap maps over becomes part of the batch."""

    def merge(t: torch.Tensor, axis: int | None) -> torch.Tensor:
        t = t.expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)
        return t.flatten(0, 1)

    inputs = _tensors(operation, arguments)
    merged = [merge(t, axis) for t, axis in zip(inputs, in_dims, strict=False)]
    outputs = operator(*merged, *arguments[len(inputs) :])
    outputs = tuple(t.unflatten(0, (info.batch_size, -1)) for t in outputs)
    return outputs, (0,) * len(outputs)


def _register(operation: Operation, operator, implementation, autograd) -> None:
    name = operation.name
    # One for all devices, so that a device without a backend gets our error message.
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    _library.impl(name, autograd, "Autograd", with_keyset=True)
    qualified = f"attention_worklog::{name}"
    torch.library.register_fake(qualified, partial(_fake, operation), lib=_library)
    torch.library.register_vmap(qualified, partial(_vmap, operation, operator), lib=_library)


_register(FORWARD, forward, _forward, _forward_autograd)
_register(BACKWARD, backward, _backward, _backward_autograd)
_library.impl("forward", partial(_autocast, "cpu", DispatchKey.AutocastCPU), "AutocastCPU")
_library.impl("forward", partial(_autocast, "cuda", DispatchKey.AutocastCUDA), "AutocastCUDA")


def _choose(
    operation: Operation,
    inputs: Sequence[torch.Tensor],
    causal: bool,
    step: str | None,
    deterministic: bool,
    as_they_lie: bool,
) -> _Chosen:
    """The given step, or the highest one that can run such inputs, or these as their rows lie."""
    backend = _backend(inputs[0].device)
    if step is None:
        found = highest_step(backend, operation, inputs, causal, deterministic, as_they_lie)
    else:
        found = _find(operation, step, deterministic)
    spec = specialization(inputs, causal)
    call = backend.prepare(found, spec)
    needed = backend.descriptor(found, spec).alignment
    return _Chosen(call, spec.head_dim**-0.5, found, needed)


def _alignment(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that divide the addresses of all rows, at most MOST_ALIGNMENT."""
    bits = MOST_ALIGNMENT
    for t in tensors:
        batch, head, row = strides(t)
        bits |= t.data_ptr() | (batch | head | row) * t.itemsize
    return bits & -bits


def _validate_shapes(operation: Operation, inputs: Sequence[torch.Tensor]) -> None:
    """Raises UsageError unless the inputs' shapes fit together."""
    q, k, v = [t.shape for t in inputs[:3]]
    _validate_shape("q", q)
    _validate_shape("k", k)
    if k != v:
        _validate_shape("v", v)
        raise UsageError(f"k and v must have the same shape, not {list(k)} and {list(v)}")
    if q[0] != k[0] or q[3] != k[3]:
        raise UsageError(f"q {list(q)} and k {list(k)} must have the same batch and head_dim")
    if q[1] % k[1]:
        raise UsageError(f"heads ({q[1]}) must be a multiple of kv_heads ({k[1]})")
    if len(inputs) == 3:
        return
    sizes = dict(zip(SIZES, sizes_of(inputs), strict=True)) | {"head_dim": q[3]}
    for operand, t in zip(operation.inputs[3:], inputs[3:], strict=True):
        shape = [sizes[axis] for axis in operand.axes]
        if list(t.shape) != shape:
            raise UsageError(f"{operand.name} must be of shape {shape}, not {list(t.shape)}")


def _validate_shape(name: str, shape: Sequence[int]) -> None:
    if len(shape) != 4:
        raise UsageError(
            f"{name} must be [batch, heads, seq, head_dim], not of shape {list(shape)}"
        )
    if 0 in shape:
        raise UsageError(f"{name} is empty: shape {list(shape)}")
    if max(shape) >= 2**31:
        raise UsageError(f"{name} is too long: shape {list(shape)}, sizes must be below 2^31")


def _validate(operation: Operation, inputs: Sequence[torch.Tensor]) -> None:
    """Raises UsageError unless the inputs can be of the operation, for whatever step."""
    _validate_shapes(operation, inputs)
    strided = {}
    for operand, t in zip(operation.inputs, inputs, strict=True):
        if operand.strided:
            strided[operand.name] = t
            _validate_strided(operand.name, t)
        elif t.dtype != torch.float32:
            raise UsageError(f"{operand.name} must be float32, not {t.dtype}")
    _require_same("dtype", strided)
    names = (operand.name for operand in operation.inputs)
    _require_same("device", dict(zip(names, inputs, strict=True)))


def _validate_strided(name: str, t: torch.Tensor) -> None:
    if t.dtype not in DTYPE_NAMES:
        raise UsageError(f"{name} must be bfloat16, float16 or float32, not {t.dtype}")
    if t.device.type not in ("cpu", "cuda", "meta"):
        raise UsageError(f"{name} must be a CPU or CUDA tensor, not one on {t.device}")
    if t.stride(-1) != 1 and name not in COPIED:
        raise UsageError(
            f"the last dimension of {name} must be contiguous, its stride is {t.stride(-1)}: "
            f"pass {name}.contiguous()"
        )


def _require_same(attribute: str, tensors: Mapping[str, torch.Tensor]) -> None:
    if len({getattr(t, attribute) for t in tensors.values()}) > 1:
        *names, last = tensors
        found = ", ".join(f"{name} {getattr(t, attribute)}" for name, t in tensors.items())
        raise UsageError(f"{', '.join(names)} and {last} must have the same {attribute}: {found}")


def _is_readable(operand: Operand, t: torch.Tensor, alignment: int) -> bool:
    if not operand.strided:
        return t.is_contiguous()
    try:
        check_alignment("a step", alignment, {operand.name: t})
    except UsageError:
        return False
    return t.stride(-1) == 1


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


def _find(operation: Operation, name: str, deterministic: bool) -> Step:
    """The step that a caller asks for. Raises UsageError where it is none for this operation."""
    step = find_step(name)
    if step.operation != operation:
        names = ", ".join(other.name for other in _steps_of(operation))
        raise UsageError(
            f"{step.name} computes {step.operation.name}, not {operation.name}: the steps of "
            f"{operation.name} are {names}"
        )
    if deterministic and (reason := _disorder(step)):
        raise UsageError(
            f"{step.name} {reason}, and deterministic=True or torch.use_deterministic_algorithms "
            "asks for the same bits each time: take another step"
        )
    return step


def _steps_of(operation: Operation) -> list[Step]:
    return [step for step in all_steps() if step.operation == operation]


def _disorder(step: Step) -> str | None:
    """Why the step is not deterministic, or None."""
    return f"does not repeat the bits of {', '.join(step.unordered)}" if step.unordered else None


def highest_step(
    backend: Backend,
    operation: Operation,
    inputs: Sequence[torch.Tensor],
    causal: bool,
    deterministic: bool = False,
    as_they_lie: bool = True,
) -> Step:
    """The step that attention() uses where none is given, or would if all rows were aligned.

    Raises UsageError where none can run.
    """
    refusals: dict[str, str] = {}
    q, *others = inputs
    few = bool(others) and are_few(q.shape[2], q.shape[1], others[0].shape[1])
    for step in reversed(_steps_of(operation)):
        if step.draft or step.only_deterministic > deterministic or step.only_few_queries > few:
            continue
        reason = (_disorder(step) if deterministic else None) or _refusal(
            backend, step, inputs, causal, as_they_lie
        )
        if reason is None:
            return step
        refusals.setdefault(reason, step.name)
    if not refusals:
        raise UsageError(
            f"there is no step of {operation.name} in {STEPS_DIR}: restore it, or install again"
        )
    told = "; ".join(f"{name} {reason}" for reason, name in refusals.items())
    raise UsageError(f"no step can run these inputs: {told}")


def _refusal(
    backend: Backend, step: Step, inputs: Sequence[torch.Tensor], causal: bool, as_they_lie: bool
) -> str | None:
    """Why the step cannot run these inputs on that device, or None."""
    spec = specialization(inputs, causal)
    if reason := backend.refusal(step, spec):
        return reason
    if as_they_lie:
        alignment = backend.descriptor(step, spec).alignment
        try:
            check_alignment(step.name, alignment, _fixed(step.operation, inputs))
        except UsageError as error:
            return str(error).removeprefix(f"{step.name} ")
    return None


def _fixed(operation: Operation, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs that a step must read where they are, by name."""
    operands = zip(operation.inputs, inputs, strict=True)
    return {operand.name: t for operand, t in operands if operand.name not in COPIED}
