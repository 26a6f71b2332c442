"""A case: one problem, its inputs, and how the tensors of the call lie."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch

from common.operation import BACKWARD, FORWARD, Operand, Operation
from common.problem import Problem, Shape, Specialization
from common.runtime.backend import DTYPE_NAMES, DTYPES
from verify.gradients import normal_gradient, saved_by_forward
from verify.inputs import Inputs, normal
from verify.layouts import Layout, contiguous
from verify.lengths import CaseLengths, Sequence, sequences_of, window_of


@dataclass(frozen=True)
class Case:
    """One problem with its inputs, and how the tensors of the call lie.

    inputs: a function of the case and a generator that gives q, k and v. Of a backward case `saved`
    gives o and lse for those as they lie, `dout` the gradient of o. layouts: of the operation's
    strided operands, in its order; all contiguous without. softmax_scale None means head_dim^-0.5.
    may_refuse marks tensors that not every step can read: it either raises UsageError or computes
    the right outputs. gpu_only marks what is too large for the SIMT runtime. A case with lengths is
    for the steps that take them. The keys that seqused_k says are not there are NaN, as
    in a cache where nobody has written them yet.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    causal: bool = False
    inputs: Callable[[Case, torch.Generator], Inputs] = normal
    layouts: tuple[Layout, ...] = ()
    softmax_scale: float | None = None
    may_refuse: bool = False
    gpu_only: bool = False
    operation: Operation = FORWARD
    saved: Callable[..., tuple[torch.Tensor, torch.Tensor]] = saved_by_forward
    dout: Callable[[Case, torch.Generator], torch.Tensor] = normal_gradient
    lengths: CaseLengths | None = None

    @classmethod
    def of(cls, name: str, problem: Problem, operation: Operation = FORWARD) -> Case:
        """The problem with normally distributed inputs."""
        dtype = DTYPES[problem.dtype]
        return cls(name, problem.shape, dtype, problem.causal, operation=operation)

    @property
    def problem(self) -> Problem:
        return Problem(self.shape, DTYPE_NAMES[self.dtype], self.causal)

    @property
    def arguments(self) -> dict:
        """What a call takes beside its tensors, which are on the CPU."""
        return self.arguments_on("cpu")

    def arguments_on(self, device: torch.device | str) -> dict:
        """What a call takes beside its tensors, which are on the device."""
        arguments = {"causal": self.causal, "softmax_scale": self.scale}
        if self.lengths:
            arguments["lengths"] = self.lengths.on(device)
        return arguments

    @property
    def sequences(self) -> list[Sequence]:
        shape = self.shape
        lengths = (self.lengths or CaseLengths()).on("cpu")
        return sequences_of(lengths, shape.batch, shape.seq_q, shape.seq_k)

    @property
    def window(self) -> tuple[int, int]:
        return window_of((self.lengths or CaseLengths()).on("cpu"), self.causal)

    @property
    def most_queries(self) -> int:
        """Those of the sequence that has most."""
        return max(sequence.seq_q for sequence in self.sequences)

    @property
    def most_keys(self) -> int:
        """Those of the longest sequence."""
        return max(sequence.seq_k for sequence in self.sequences)

    def fill_unused(self, x: torch.Tensor, value: float) -> torch.Tensor:
        """k or v with the value in place of the keys that are not there."""
        if not self.lengths or self.lengths.seqused_k is None:
            return x
        used = torch.zeros(self.shape.batch, 1, self.shape.seq_k, 1, dtype=torch.bool)
        for sequence in self.sequences:
            used[sequence.batch, :, sequence.keys] = True
        return x.masked_fill(~used.to(x.device), value)

    @property
    def specialization(self) -> Specialization:
        return self.problem.specialization

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    def make(self, device: torch.device | str, seed: int = 0) -> Inputs:
        """The operation's inputs; the same numbers on every device."""
        rng = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {seed}".encode()))
        q, *kv = self.inputs(self, rng)
        made = (q, *(self.fill_unused(x, torch.nan) for x in kv))
        placed = self._place(made, self.operation.inputs[:3], device)
        if self.operation == BACKWARD:
            more = (*self.saved(self, *placed), self.dout(self, rng))
            placed += self._place(more, self.operation.inputs[3:], device)
        return placed

    def make_outputs(
        self, device: torch.device | str
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Storage and view of each output, all NaN."""
        sizes = asdict(self.shape)
        return tuple(
            self._layout_of(operand)(
                [sizes[axis] for axis in operand.axes],
                dtype=self.dtype if operand.strided else torch.float32,
                device=device,
            )
            for operand in self.operation.outputs
        )

    def _layout_of(self, operand: Operand) -> Layout:
        if not operand.strided or not self.layouts:
            return contiguous
        return self.layouts[self.operation.strided.index(operand)]

    def _place(
        self,
        tensors: Iterable[torch.Tensor],
        operands: Iterable[Operand],
        device: torch.device | str,
    ) -> Inputs:
        placed = []
        for x, operand in zip(tensors, operands, strict=True):
            dtype = self.dtype if operand.strided else torch.float32
            layout = self._layout_of(operand)
            _, view = layout(x.shape, dtype=dtype, device=device)
            # Of the elements that share a place, the first is taken.
            own = tuple(slice(1) if stride == 0 else slice(None) for stride in view.stride())
            view[own].copy_(x[own].to(device, dtype))
            placed.append(view)
        return tuple(placed)
