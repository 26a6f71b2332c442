"""What torch's dispatcher cannot check of a call's tensors, for whatever step: shapes, dtypes,
devices, lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from .errors import UsageError
from .lengths import Lengths
from .operation import FORWARD, Operation
from .runtime.backend import DTYPE_NAMES

# Inputs that lie as whoever computed them left them, autograd or torch.vmap: where a step cannot
# read one, it is copied. All others it must read where they are.
COPIED = ("lse", "dout")


def is_packed(lengths: Lengths | None) -> bool:
    return lengths is not None and lengths.cu_seqlens_q is not None


def rows_shape(q: torch.Size) -> tuple[int, ...]:
    """The shape of lse, by that of q, which has three axes where sequences are packed."""
    return (q[1], q[0]) if len(q) == 3 else q[:3]


def validate_lengths(inputs: Sequence[torch.Tensor], lengths: Lengths) -> None:
    """Raises UsageError unless the lengths fit together and the inputs, whatever their values are,
    and the inputs have as many axes as the lengths say.
    """
    cu_seqlens_q, cu_seqlens_k, seqused_k, *_ = lengths
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        given, missing = "qk" if cu_seqlens_k is None else "kq"
        raise UsageError(f"cu_seqlens_{given} is given without cu_seqlens_{missing}")
    packed = cu_seqlens_q is not None
    q, k, v = inputs
    if not q.dim() == k.dim() == v.dim() == (3 if packed else 4):
        validate_shapes(FORWARD, inputs, packed)
    for name, t in zip(Lengths._fields, lengths[:3], strict=False):
        if t is not None:
            _validate_length(name, t, q.device)
    sequences = q.shape[0]
    if packed:
        sequences = cu_seqlens_q.shape[0] - 1
        if cu_seqlens_k.shape[0] - 1 != sequences:
            raise UsageError(
                f"cu_seqlens_q and cu_seqlens_k must have the same shape, [sequences + 1], not "
                f"{list(cu_seqlens_q.shape)} and {list(cu_seqlens_k.shape)}"
            )
        if sequences < 1:
            raise UsageError(
                f"cu_seqlens_q must be [sequences + 1], not of shape {list(cu_seqlens_q.shape)}: "
                "there are no sequences"
            )
    if seqused_k is not None and seqused_k.shape[0] != sequences:
        raise UsageError(
            f"seqused_k must be of shape [{sequences}], a length for each sequence, not "
            f"{list(seqused_k.shape)}"
        )


def _validate_length(name: str, t: torch.Tensor, device: torch.device) -> None:
    if t.dtype != torch.int32:
        raise UsageError(f"{name} must be int32, not {t.dtype}: pass {name}.int()")
    if t.dim() != 1:
        axes = "[sequences]" if name == "seqused_k" else "[sequences + 1]"
        raise UsageError(f"{name} must be {axes}, not of shape {list(t.shape)}")
    if not t.is_contiguous():
        raise UsageError(
            f"{name} must be contiguous, its stride is {t.stride(0)}: pass {name}.contiguous()"
        )
    if t.device != device:
        raise UsageError(f"{name} must be on the device of q, {device}, not on {t.device}")


def validate_values(inputs: Sequence[torch.Tensor], lengths: Lengths) -> None:
    """Raises UsageError unless the lengths, which validate_lengths() has seen, fit the inputs."""
    q, k, _ = inputs
    cu_seqlens_q, cu_seqlens_k, seqused_k, *_ = lengths
    if cu_seqlens_q is None:
        keys = [k.shape[2]] * k.shape[0]
    else:
        _differences("cu_seqlens_q", cu_seqlens_q, "q", q.shape[0])
        keys = _differences("cu_seqlens_k", cu_seqlens_k, "k", k.shape[0])
    if seqused_k is None:
        return
    for i, (used, there) in enumerate(zip(seqused_k.tolist(), keys, strict=False)):
        if not 0 <= used <= there:
            raise UsageError(
                f"seqused_k must be from 0 to the keys of a sequence: seqused_k[{i}] is {used}, "
                f"and sequence {i} has {there}"
            )


def _differences(name: str, t: torch.Tensor, packed: str, total: int) -> list[int]:
    """The sequences' lengths. Raises UsageError unless t rises from 0 to the total."""
    first, *_, last = begins = t.tolist()
    if first != 0:
        raise UsageError(f"{name} must begin with 0, not with {first}")
    lengths = [end - begin for begin, end in pairwise(begins)]
    for i, length in enumerate(lengths):
        if length < 0:
            raise UsageError(
                f"{name} must never fall: {name}[{i}] is {begins[i]}, and {name}[{i + 1}] is "
                f"{begins[i + 1]}"
            )
    if last != total:
        raise UsageError(f"{name} must end with {total}, as {packed} has rows, not with {last}")
    return lengths


def validate_shapes(
    operation: Operation, inputs: Sequence[torch.Tensor], packed: bool = False
) -> None:
    """Raises UsageError unless the inputs' shapes fit together."""
    q, k, v = [t.shape for t in inputs[:3]]
    axes = ["total", "heads", "head_dim"] if packed else ["batch", "heads", "seq", "head_dim"]
    _validate_shape("q", q, axes)
    _validate_shape("k", k, axes)
    if k != v:
        _validate_shape("v", v, axes)
        if k[:-1] != v[:-1]:
            raise UsageError(
                f"k and v must have the same shape but for head_dim, not {list(k)} and {list(v)}"
            )
    if packed:
        if q[-1] != k[-1]:
            raise UsageError(f"q {list(q)} and k {list(k)} must have the same head_dim")
    elif q[0] != k[0] or q[3] != k[3]:
        raise UsageError(f"q {list(q)} and k {list(k)} must have the same batch and head_dim")
    if q[1] % k[1]:  # in both layouts
        raise UsageError(f"heads ({q[1]}) must be a multiple of kv_heads ({k[1]})")
    if len(inputs) == 3:
        return
    for operand, t in zip(operation.inputs[3:], inputs[3:], strict=True):  # all by query
        shape = [*q[:-1], v[-1]] if operand.strided else list(rows_shape(q))
        if list(t.shape) != shape:
            raise UsageError(f"{operand.name} must be of shape {shape}, not {list(t.shape)}")


def _validate_shape(name: str, shape: Sequence[int], axes: Sequence[str]) -> None:
    if len(shape) != len(axes):
        raise UsageError(f"{name} must be [{', '.join(axes)}], not of shape {list(shape)}")
    if 0 in shape:
        raise UsageError(f"{name} is empty: shape {list(shape)}")
    if max(shape) >= 2**31:
        raise UsageError(f"{name} is too long: shape {list(shape)}, sizes must be below 2^31")


def validate(
    operation: Operation, inputs: Sequence[torch.Tensor], lengths: Lengths | None = None
) -> None:
    """Raises UsageError unless the inputs can be of the operation, for whatever step."""
    validate_shapes(operation, inputs, is_packed(lengths))
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
