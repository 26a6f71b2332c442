"""The interface that both backends, gpu.py and cpu.py, offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from ..errors import NotEnoughMemoryError
from ..lengths import Lengths
from ..operation import Operation
from ..problem import Specialization
from ..step import Step
from .launch import LaunchDescriptor, check_alignment

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Call(Protocol):
    """A step ready for a specialization."""

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[float],
        lengths: Lengths | None = None,
    ) -> list[torch.Tensor] | None:
        """The tensors are in the order of the operation's operands, with its axes; their dtypes and
        devices are right. lengths are for steps that take them, and have been validated.

        Returns the bytes of the step's workspaces; None, and nothing has run, where shapes do not
        fit together, the head_dim is another one, or the step cannot read the rows as they lie.
        """


class Backend(Protocol):
    """Runs steps on torch tensors of one kind of device.

    The tensors of a call are the inputs and outputs of the step's operation, in its order. For the
    forward one: q [batch, heads, seq_q, head_dim], k [batch, kv_heads, seq_k, head_dim], v
    [batch, kv_heads, seq_k, v_head_dim], o [batch, heads, seq_q, v_head_dim]: bf16, fp16 or fp32,
    last dimension contiguous; lse float32 [batch, heads, seq_q], contiguous. They agree with each
    other (common.attention and verify/ see to that).
    """

    name: str  # "gpu" or "cpu"
    device: torch.device  # where its tensors live

    def refusal(self, step: Step, spec: Specialization) -> str | None:
        """Why this backend cannot run the step (limits, architecture, shared memory), or None."""

    def build(self, step: Step, spec: Specialization) -> Path:
        """Compiles, or finds in the cache. May be called from several threads."""

    def descriptor(self, step: Step, spec: Specialization) -> LaunchDescriptor:
        """The launch descriptor in the compiled module."""

    def prepare(self, step: Step, spec: Specialization) -> Call:
        """Raises UsageError where the step is refused."""

    def launch(
        self,
        step: Step,
        *tensors: torch.Tensor,
        causal: bool,
        lengths: Lengths | None = None,
        **scalars: float,
    ) -> list[torch.Tensor]:
        """Prepares and calls; writes the outputs among the tensors.

        Returns the bytes of the workspaces. Raises UsageError as prepare() and its call do, and
        where rows are not as aligned as the step asks for.
        """


def run(
    backend: Backend, step: Step, *inputs: torch.Tensor, causal: bool, **scalars: float
) -> tuple[torch.Tensor, ...]:
    """Backend.launch into new outputs, which it returns."""
    outputs = empty_outputs(step.operation, inputs)
    backend.launch(step, *inputs, *outputs, causal=causal, **scalars)
    return outputs


def launch(
    backend: Backend,
    step: Step,
    tensors: Sequence[torch.Tensor],
    causal: bool,
    lengths: Lengths | None,
    scalars: Mapping[str, float],
) -> list[torch.Tensor]:
    """Backend.launch, by its prepare()."""
    spec = specialization(tensors, causal)
    call = backend.prepare(step, spec)
    workspace = call(tensors, [scalars[name] for name in step.operation.scalars], lengths)
    if workspace is None:
        refuse(step, backend.descriptor(step, spec).alignment, tensors)
    return workspace


def refuse(step: Step, alignment: int, tensors: Sequence[torch.Tensor]) -> NoReturn:
    """Raises what a call that returned None says: UsageError, or ValueError of shapes."""
    operands = zip(step.operation.operands, tensors, strict=True)
    strided = {operand.name: t for operand, t in operands if operand.strided}
    check_alignment(step.name, alignment, strided)
    raise ValueError(f"no tensors of {step.operation.name}: {[list(t.shape) for t in tensors]}")


def not_enough_memory(step: Step, workspace_bytes: int, free_bytes: int) -> NotEnoughMemoryError:
    return NotEnoughMemoryError(
        f"{step.name} needs a workspace of {workspace_bytes} bytes, and {free_bytes} are free: use "
        "shorter sequences, or a step that stores no scores"
    )


def specialization(tensors: Sequence[torch.Tensor], causal: bool) -> Specialization:
    """What a step is compiled for to take these tensors: q, k and v, or something like q alone."""
    q, *others = tensors
    v_head_dim = others[1].shape[-1] if others else None
    return Specialization(q.shape[-1], DTYPE_NAMES[q.dtype], causal, v_head_dim)


def empty_outputs(operation: Operation, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """New outputs; a strided one lies like the input with its axes, if that has contiguous rows."""
    outputs = []
    for index, as_wide in operation.models:
        model = inputs[index]
        outputs.append(
            _empty_rows(model) if as_wide is None else empty_like(model, inputs[as_wide].shape[-1])
        )
    return tuple(outputs)


def empty_like(model: torch.Tensor, columns: int) -> torch.Tensor:
    """New, and lies like the model, but with so many elements along the last axis, and with
    contiguous rows where the model's axes overlap.
    """
    if columns != model.shape[-1]:
        return _empty_strided_like(model, columns)
    output = torch.empty_like(model)
    if output.stride(-1) != 1:
        output = torch.empty_like(model, memory_format=torch.contiguous_format)
    return output


def _empty_strided_like(model: torch.Tensor, columns: int) -> torch.Tensor:
    """New and dense, with rows of so many elements and the model's order of the other axes."""
    shape, strides = [*model.shape[:-1], columns], [1] * model.dim()
    elements = columns
    for axis in sorted(range(model.dim() - 1), key=lambda axis: (model.stride(axis), -axis)):
        strides[axis] = elements
        elements *= shape[axis]
    return torch.empty_strided(shape, strides, dtype=model.dtype, device=model.device)


def _empty_rows(model: torch.Tensor) -> torch.Tensor:
    """New float32 [batch, heads, seq], where the model is [batch, heads, seq, head_dim]."""
    batch, heads, seq, _ = model.shape
    if model.is_cuda and type(model) is torch.Tensor:  # and no fake of one
        sizes, strides = (batch, heads, seq), (heads * seq, seq, 1)
        return empty_on_gpu(sizes, strides, torch.float32, model.get_device())
    # Separate sizes are parsed faster than a shape.
    return torch.empty(batch, heads, seq, dtype=torch.float32, device=model.device)


def empty_on_gpu(
    sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, index: int
) -> torch.Tensor:
    """torch.empty_strided(), in half the time where that GPU is torch's current one.

    By what torch's compiled code calls. The driver's current context may be another GPU's.
    """
    if index == torch._C._cuda_getDevice():
        return torch._C._dynamo.guards._empty_strided_cuda(sizes, strides, dtype)
    return torch.empty_strided(sizes, strides, dtype=dtype, device=torch.device("cuda", index))
