"""The operators behind attention(): torch.ops.attention_worklog.forward and .backward and, where
sequences have lengths or queries a window, .forward_lengths and .backward_lengths.

torch.compile and CUDA graphs see one call each, whose fake gives the outputs' shapes and strides.
What a step depends on is looked up. The rest is computed, lengths and strides included: in decoding
each call has a key more than the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
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
from .lengths import UNLIMITED, Lengths
from .operation import BACKWARD, FORWARD, Operand, Operation
from .runtime.backend import (
    Backend,
    Call,
    empty_like,
    empty_outputs,
    refuse,
    specialization,
)
from .runtime.launch import check_alignment, strides
from .step import Step, few_of, few_with, is_large
from .validation import (
    COPIED,
    is_packed,
    rows_shape,
    validate,
    validate_lengths,
    validate_shapes,
    validate_values,
)

MOST_ALIGNMENT = 64  # bytes: no step asks for rows aligned to more

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
_library.define(
    "forward_lengths(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_k, int window_left, int window_right, bool causal, float? softmax_scale, "
    "str? step, str? backward_step, bool deterministic) -> (Tensor o, Tensor lse)",
    tags=_tags,
)
_library.define(
    "backward_lengths(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor dout, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, int window_left, "
    "int window_right, bool causal, float? softmax_scale, str? step, bool deterministic) -> "
    "(Tensor dq, Tensor dk, Tensor dv)",
    tags=_tags,
)
forward = torch.ops.attention_worklog.forward.default
backward = torch.ops.attention_worklog.backward.default
forward_lengths = torch.ops.attention_worklog.forward_lengths.default
backward_lengths = torch.ops.attention_worklog.backward_lengths.default

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
        validate_shapes(FORWARD, (q, k, v))
    # fmt: off
    key = (
        step, backward_step, deterministic, causal, _few(q, k, causal), q.shape[3], v.shape[3],
        q.dtype, q.device, k.dtype, k.device, v.dtype, v.device,
    )
    # fmt: on
    chosen = _calls.get(key)
    if chosen is None:
        validate(FORWARD, (q, k, v))
        if backward_step is not None:  # found wrong here, not somewhere in a backward pass
            _find(BACKWARD, backward_step, deterministic)
        chosen = _calls.add(
            key, _choose(FORWARD, (q, k, v), causal, step, deterministic, as_they_lie=False)
        )
    scale = chosen.default_scale if softmax_scale is None else softmax_scale
    outputs = _try(FORWARD, chosen.call, (q, k, v), scale)
    return outputs or _call_as_they_lie(FORWARD, key, (q, k, v), causal, scale, step, deterministic)


def _forward_lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    window_left: int,
    window_right: int,
    causal: bool,
    softmax_scale: float | None,
    step: str | None,
    backward_step: str | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse; arguments and exceptions as in common.attention or, with cu_seqlens, as in
    common.attention_varlen. window_left and window_right are the sides of its window.
    """
    inputs = (q, k, v)
    lengths = _lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, window_left, window_right, causal)
    # Each time: a backend checks the shapes of q, k and v, and nothing of these.
    validate_lengths(inputs, lengths)
    if q.is_cpu:  # elsewhere the host would wait for the values
        validate_values(inputs, lengths)
    key = (
        *("lengths", step, backward_step, deterministic, causal, _few(q, k, causal, lengths)),
        *(q.shape[-1], v.shape[-1]),
        *(q.dtype, q.device, k.dtype, k.device, v.dtype, v.device),
    )
    chosen = _calls.get(key)
    if chosen is None:
        validate(FORWARD, inputs, lengths)
        if backward_step is not None:
            _find(BACKWARD, backward_step, deterministic, lengths)
        batched = _batched(inputs, lengths)
        chosen = _calls.add(
            key,
            _choose(FORWARD, batched, causal, step, deterministic, lengths, as_they_lie=False),
        )
    scale = chosen.default_scale if softmax_scale is None else softmax_scale
    outputs = _try(FORWARD, chosen.call, inputs, scale, lengths)
    return outputs or _call_as_they_lie(
        FORWARD, key, inputs, causal, scale, step, deterministic, lengths
    )


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
        validate_shapes(BACKWARD, inputs)
    key = (step, deterministic, causal, q.shape[3], v.shape[3])
    key += tuple((t.dtype, t.device) for t in inputs)
    chosen = _calls.get(key)
    if chosen is None:
        validate(BACKWARD, inputs)
        chosen = _calls.add(
            key, _choose(BACKWARD, inputs, causal, step, deterministic, as_they_lie=False)
        )
    scale = chosen.default_scale if softmax_scale is None else softmax_scale
    outputs = None
    if lse.is_contiguous() and lse.shape == q.shape[:3] and dout.stride(3) == 1:
        outputs = _try(BACKWARD, chosen.call, inputs, scale)
    return outputs or _call_as_they_lie(BACKWARD, key, inputs, causal, scale, step, deterministic)


def _backward_lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    window_left: int,
    window_right: int,
    causal: bool,
    softmax_scale: float | None,
    step: str | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Likewise, where o and lse are what forward_lengths returned."""
    inputs = (q, k, v, o, lse, dout)
    lengths = _lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, window_left, window_right, causal)
    validate_lengths(inputs[:3], lengths)
    if not q.dim() == o.dim() == dout.dim():
        validate_shapes(BACKWARD, inputs, is_packed(lengths))
    if q.is_cpu:
        validate_values(inputs[:3], lengths)
    key = (
        *("lengths", step, deterministic, causal, q.shape[-1], v.shape[-1]),
        *[(t.dtype, t.device) for t in inputs],
    )
    chosen = _calls.get(key)
    if chosen is None:
        validate(BACKWARD, inputs, lengths)
        batched = _batched(inputs, lengths)
        chosen = _calls.add(
            key,
            _choose(BACKWARD, batched, causal, step, deterministic, lengths, as_they_lie=False),
        )
    scale = chosen.default_scale if softmax_scale is None else softmax_scale
    outputs = None
    if lse.is_contiguous() and lse.shape == rows_shape(q.shape) and dout.stride(-1) == 1:
        outputs = _try(BACKWARD, chosen.call, inputs, scale, lengths)
    return outputs or _call_as_they_lie(
        BACKWARD, key, inputs, causal, scale, step, deterministic, lengths
    )


def _try(
    operation: Operation,
    call: Call,
    inputs: tuple[torch.Tensor, ...],
    softmax_scale: float,
    lengths: Lengths | None = None,
) -> tuple[torch.Tensor, ...] | None:
    """The outputs of a call; None where its step cannot take these inputs."""
    try:
        if lengths is None:
            outputs = empty_outputs(operation, inputs)
            tensors = inputs + outputs
        else:
            outputs = _outputs(operation, inputs, lengths)
            tensors = _batched(inputs + outputs, lengths)
        workspace = call(tensors, (softmax_scale,), lengths)
    except (RuntimeError, NotEnoughMemoryError):  # perhaps of shapes that do not fit
        validate(operation, inputs, lengths)
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
    lengths: Lengths | None = None,
) -> tuple[torch.Tensor, ...]:
    """The outputs, where the step of that key cannot take these inputs: another one may, or copies.

    Raises UsageError where none can, or shapes do not fit together.
    """
    validate(operation, inputs, lengths)
    batched = _batched(inputs, lengths)
    key = (*key, _alignment(_fixed(operation, batched).values()))
    chosen = _calls.get(key) or _calls.add(
        key,
        _choose(operation, batched, causal, step, deterministic, lengths, as_they_lie=True),
    )
    batched = tuple(
        t if operand.name not in COPIED or _is_readable(operand, t, chosen.alignment) else _copy(t)
        for operand, t in zip(operation.inputs, batched, strict=True)
    )
    outputs = _outputs(operation, inputs, lengths)
    tensors = batched + _batched(outputs, lengths)
    if chosen.call(tensors, (softmax_scale,), lengths) is None:
        refuse(chosen.step, chosen.alignment, tensors)
    return outputs


def _outputs(
    operation: Operation, inputs: Sequence[torch.Tensor], lengths: Lengths | None
) -> tuple[torch.Tensor, ...]:
    """New outputs. Those of packed sequences are no views of a batch's: autograd would let nobody
    change them in place.
    """
    if not is_packed(lengths) or operation is BACKWARD:  # gradients have their inputs' axes
        return empty_outputs(operation, inputs)
    q, _, v = inputs
    return empty_like(q, v.shape[-1]), torch.empty(
        rows_shape(q.shape), dtype=torch.float32, device=q.device
    )


def _batched(
    tensors: tuple[torch.Tensor, ...], lengths: Lengths | None
) -> tuple[torch.Tensor, ...]:
    """As a backend takes them: packed sequences are the rows of a batch of one."""
    if not is_packed(lengths):
        return tensors
    return tuple((t.transpose(0, 1) if t.dim() == 3 else t).unsqueeze(0) for t in tensors)


def _copy(t: torch.Tensor) -> torch.Tensor:
    """Contiguous and at an address of its own, where even contiguous() would return t itself."""
    return t.clone(memory_format=torch.contiguous_format)


def _fake(operation: Operation, *arguments) -> tuple[torch.Tensor, ...]:
    """Outputs without contents, for fake tensors and for the meta device."""
    inputs = _tensors(operation, arguments)
    validate(operation, inputs)
    return empty_outputs(operation, inputs)


def _fake_lengths(operation: Operation, *arguments) -> tuple[torch.Tensor, ...]:
    """Likewise, where there are lengths. Of these only the shapes are there."""
    inputs = _tensors(operation, arguments)
    lengths = _lengths(*arguments[len(inputs) :][:6])
    validate_lengths(inputs[:3], lengths)
    validate(operation, inputs, lengths)
    return _outputs(operation, inputs, lengths)


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
    def forward(ctx, keys, q, k, v, *options):
        o, lse = _below_node(forward, _forward, keys, q, k, v, *options)
        ctx.save_for_backward(q, k, v, o, lse)
        _set_up(ctx, lse, options)
        return o, lse

    @staticmethod
    def backward(ctx, dout, _):
        return _differentiate(ctx, backward, dout)


class _AttentionOfLengths(_Node):
    """forward_lengths, whose gradients are those of backward_lengths."""

    @staticmethod
    def forward(ctx, keys, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, *options):
        lengths = (cu_seqlens_q, cu_seqlens_k, seqused_k)
        o, lse = _below_node(forward_lengths, _forward_lengths, keys, q, k, v, *lengths, *options)
        ctx.save_for_backward(q, k, v, o, lse, *lengths)
        _set_up(ctx, lse, options)
        return o, lse

    @staticmethod
    def backward(ctx, dout, _):
        return _differentiate(ctx, backward_lengths, dout)


def _set_up(ctx, lse: torch.Tensor, options: Sequence) -> None:
    """Sets up a node of o and lse, for _differentiate()."""
    ctx.options = options
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)  # of lse they would be zeros that nobody reads


def _differentiate(ctx, operator, dout: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The gradients of all that a node takes, by an operator; None of what needs none."""
    needed = ctx.needs_input_grad
    if dout is None:
        return (None,) * len(needed)
    q, k, v, o, lse, *lengths = ctx.saved_tensors
    *options, _, backward_step, deterministic = ctx.options
    gradients = operator(q, k, v, o, lse, dout, *lengths, *options, backward_step, deterministic)
    asked = [g if need else None for g, need in zip(gradients, needed[1:4], strict=True)]
    return None, *asked, *[None] * (len(needed) - 4)


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


class _GradientsOfLengths(_Gradients):
    """Likewise backward_lengths."""

    @staticmethod
    def forward(ctx, keys, *arguments):
        return _below_node(backward_lengths, _backward_lengths, keys, *arguments)


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
    if _needs_node(BACKWARD, arguments):
        return _record(_Gradients, keys, *arguments)
    return _below_autograd(backward, _backward, keys, *arguments)


def _forward_lengths_autograd(
    keys: DispatchKeySet, *arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise for forward_lengths."""
    if _needs_node(FORWARD, arguments):
        return _record(_AttentionOfLengths, keys, *arguments)
    return _below_autograd(forward_lengths, _forward_lengths, keys, *arguments)


def _backward_lengths_autograd(
    keys: DispatchKeySet, *arguments
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Likewise for backward_lengths."""
    if _needs_node(BACKWARD, arguments):
        return _record(_GradientsOfLengths, keys, *arguments)
    return _below_autograd(backward_lengths, _backward_lengths, keys, *arguments)


def _needs_node(operation: Operation, arguments: Sequence) -> bool:
    """Whether something requires grad here. Raises UsageError for a tangent."""
    inputs = _tensors(operation, arguments)
    if forward_ad._current_level >= 0:
        _refuse_tangents(operation, inputs)
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)


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
    operator, device_type: str, key: DispatchKey, q, k, v, *options
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
        return operator(cast(q), cast(k), cast(v), *options)


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


def _vmap_lengths(operation: Operation, operator, info, in_dims, *arguments):
    """Likewise of a window alone: lengths are those of one batch."""
    lengths = arguments[len(operation.inputs) :][:3]
    names = [name for name, t in zip(Lengths._fields, lengths, strict=False) if t is not None]
    if names:
        raise UsageError(
            f"torch.vmap maps over no call with {' and '.join(names)}: put all sequences into one"
        )
    return _vmap(operation, operator, info, in_dims, *arguments)


def _register(operator, implementation, autograd, fake, vmap) -> None:
    # One for all devices, so that a device without a backend gets our error message.
    _library.impl(operator, implementation, "CompositeExplicitAutograd")
    _library.impl(operator, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(operator, fake, lib=_library)
    torch.library.register_vmap(operator, vmap, lib=_library)


def _register_autocast(operator) -> None:
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        cast = partial(_autocast, operator, device_type, getattr(DispatchKey, key))
        _library.impl(operator, cast, key)


_register(
    forward,
    _forward,
    _forward_autograd,
    partial(_fake, FORWARD),
    partial(_vmap, FORWARD, forward),
)
_register(
    backward,
    _backward,
    _backward_autograd,
    partial(_fake, BACKWARD),
    partial(_vmap, BACKWARD, backward),
)
_register(
    forward_lengths,
    _forward_lengths,
    _forward_lengths_autograd,
    partial(_fake_lengths, FORWARD),
    partial(_vmap_lengths, FORWARD, forward_lengths),
)
_register(
    backward_lengths,
    _backward_lengths,
    _backward_lengths_autograd,
    partial(_fake_lengths, BACKWARD),
    partial(_vmap_lengths, BACKWARD, backward_lengths),
)
_register_autocast(forward)
_register_autocast(forward_lengths)


def _choose(
    operation: Operation,
    inputs: Sequence[torch.Tensor],
    causal: bool,
    step: str | None,
    deterministic: bool,
    lengths: Lengths | None = None,
    *,
    as_they_lie: bool,
) -> _Chosen:
    """The given step, or the highest one that can run such inputs, or these as their rows lie."""
    backend = backend_of(inputs[0].device)
    if step is None:
        found = highest_step(
            backend, operation, inputs, causal, deterministic, as_they_lie, lengths
        )
    else:
        found = _find(operation, step, deterministic, lengths)
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


def _lengths(
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    window_left: int,
    window_right: int,
    causal: bool,
) -> Lengths:
    """The Lengths of a call, whose window has negative sides where it is unlimited."""
    sides = (window_left, 0 if causal else window_right)
    limits = (side if 0 <= side < UNLIMITED else UNLIMITED for side in sides)
    return Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, *limits)


def _few(
    q: torch.Tensor, k: torch.Tensor, causal: bool, lengths: Lengths | None = None
) -> str | None:
    """What the call has few of. Packed sequences are a batch of one, with or without that axis."""
    if q.dim() == 3:
        sizes = 1, q.shape[1], k.shape[1], q.shape[0], k.shape[0]
    else:
        sizes = *q.shape[:2], k.shape[1], q.shape[2], k.shape[2]
    if lengths is not None:
        return few_with(lengths, *sizes)
    return few_of(*sizes, q.shape[3], causal)


def _is_readable(operand: Operand, t: torch.Tensor, alignment: int) -> bool:
    if not operand.strided:
        return t.is_contiguous()
    try:
        check_alignment("a step", alignment, {operand.name: t})
    except UsageError:
        return False
    return t.stride(-1) == 1


def backend_of(device: torch.device) -> Backend:
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


def _find(
    operation: Operation, name: str, deterministic: bool, lengths: Lengths | None = None
) -> Step:
    """The step that a caller asks for. Raises UsageError where it is none for this operation, or
    for lengths.
    """
    step = find_step(name)
    if step.operation != operation:
        names = ", ".join(other.name for other in _steps_of(operation))
        raise UsageError(
            f"{step.name} computes {step.operation.name}, not {operation.name}: the steps of "
            f"{operation.name} are {names}"
        )
    if lengths is not None and not step.takes_lengths:
        names = ", ".join(other.name for other in _steps_of(operation) if other.takes_lengths)
        raise UsageError(
            f"{step.name} takes no {_told(lengths)}: the steps that do are {names or 'missing'}"
        )
    if deterministic and (reason := _disorder(step)):
        raise UsageError(
            f"{step.name} {reason}, and deterministic=True or torch.use_deterministic_algorithms "
            "asks for the same bits each time: take another step"
        )
    return step


def _told(lengths: Lengths) -> str:
    """What of them is given."""
    names = [name for name, t in zip(Lengths._fields, lengths[:3], strict=False) if t is not None]
    if lengths.window_left != UNLIMITED or lengths.window_right not in (0, UNLIMITED):
        names.append("window")  # and not only causal
    return " and no ".join(names) or "lengths or window"


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
    lengths: Lengths | None = None,
) -> Step:
    """The step that attention() uses where none is given, or would if all rows were aligned.

    With lengths it is one that takes them, and without it is none of those.

    Raises UsageError where none can run.
    """
    refusals: dict[str, str] = {}
    q, *others = inputs
    few = _few(q, others[0], causal, lengths) if others else None
    v_head_dim = others[1].shape[3] if others else q.shape[3]
    newest_first = _steps_of(operation)[::-1]
    for step in sorted(newest_first, key=lambda step: step.only_left_over):
        if step.takes_lengths != (lengths is not None):
            continue
        if step.draft or step.only_deterministic > deterministic or step.few not in (None, few):
            continue
        if step.only_large_head_dim > is_large(q.shape[3], v_head_dim):
            continue
        reason = (_disorder(step) if deterministic else None) or _refusal(
            backend, step, inputs, causal, as_they_lie
        )
        if reason is None:
            return step
        refusals.setdefault(reason, step.name)
    if not refusals:
        what = f"{operation.name}{' for lengths and windows' if lengths else ''}"
        raise UsageError(f"there is no step of {what} in {STEPS_DIR}: restore it, or install again")
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
