"""What a ladder of steps computes, as data: the only place where the harness knows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .problem import GRID, GRID_BACKWARD, HEADLINE, Problem

SIZES = ("batch", "heads", "kv_heads", "seq_q", "seq_k")  # in the order of enum Size of launch.h
# "v04"; a variant's name continues: "v04_no_padding".
STEP_NAME = re.compile(r"(?P<letter>[a-z])(?P<number>\d\d)")

_HEAD_DIMS = ("head_dim", "v_head_dim")  # of q and k, and of v and o
_QUERIES = ("batch", "heads", "seq_q", "head_dim")
_KEYS = ("batch", "kv_heads", "seq_k", "head_dim")
_VALUES = ("batch", "kv_heads", "seq_k", "v_head_dim")
_OUTPUTS = ("batch", "heads", "seq_q", "v_head_dim")
_ROWS = ("batch", "heads", "seq_q")


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel takes: its axes by the names of their sizes.

    Where the last one is head_dim or v_head_dim it has the dtype of the call, any strides and,
    where a launch descriptor asks for it, a tensor map. Elsewhere it is float32 and contiguous.
    """

    name: str
    axes: tuple[str, ...]

    @cached_property
    def strided(self) -> bool:
        return self.axes[-1] in _HEAD_DIMS


@dataclass(frozen=True)
class Operation:
    """Inputs and outputs are in the order in which calls and kernels take them.

    The first inputs are q, k and v.
    """

    name: str
    letter: str  # of the steps' names
    suffix: str  # of the names of its records and plots
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    workspaces: int  # that a step can ask for, at most
    scalars: tuple[str, ...]
    products: int  # matrix products, each with as many multiply-adds as Q K^T or as P V
    v_products: int  # of those, how many are like P V
    oracle: str  # in verify/reference.py: a function of the inputs, causal and the scalars
    yardstick: str  # likewise, with every intermediate in the inputs' dtype
    headline: Problem
    grid: Mapping[str, Problem] = field(compare=False, repr=False)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        return self.inputs + self.outputs

    @cached_property
    def strided(self) -> tuple[Operand, ...]:
        return tuple(operand for operand in self.operands if operand.strided)

    @cached_property
    def models(self) -> tuple[tuple[int, int | None], ...]:
        """By output: the input that it lies like, whose axes it has up to the last one; and that
        which has its last axis, the same one if it can be. None where the output is not strided.
        """
        inputs = [(i, operand.axes) for i, operand in enumerate(self.inputs)]

        def model(output: Operand) -> tuple[int, int | None]:
            if not output.strided:
                return next(i for i, axes in inputs if axes[:-1] == output.axes), None
            alike = [i for i, axes in inputs if axes[:-1] == output.axes[:-1]]
            as_wide = [i for i, axes in inputs if axes[-1] == output.axes[-1]]
            both = [i for i in alike if i in as_wide]
            return (both or alike)[0], (both or as_wide)[0]

        return tuple(map(model, self.outputs))

    def named(self, what: str) -> str:
        """The name of what each ladder has one of: "grid" of forward, "grid_backward"."""
        return f"{what}{self.suffix}"

    def flops(self, problem: Problem) -> int:
        """Of the products of matrices, a multiply-add counted as two.

        With a causal mask those of the visible keys: half of the square of the last queries and
        keys, by FlashAttention's convention, and all keys before it.
        """
        shape = problem.shape
        side = min(shape.seq_q, shape.seq_k) if problem.causal else 0
        scores = 2 * shape.seq_q * (shape.seq_k - side) + side**2  # twice as many
        columns = (self.products - self.v_products) * shape.head_dim
        columns += self.v_products * shape.v_head_dim
        return shape.batch * shape.heads * scores * columns


FORWARD = Operation(
    name="forward",
    letter="v",
    suffix="",
    inputs=(Operand("q", _QUERIES), Operand("k", _KEYS), Operand("v", _VALUES)),
    outputs=(Operand("o", _OUTPUTS), Operand("lse", _ROWS)),
    workspaces=2,
    scalars=("softmax_scale",),
    products=2,
    v_products=1,
    oracle="attention_reference",
    yardstick="attention_in_dtype",
    headline=HEADLINE,
    grid=GRID,
)
# o and lse are what forward returned, rounded as it rounds them; dout is the gradient of o.
BACKWARD = Operation(
    name="backward",
    letter="b",
    suffix="_backward",
    inputs=(
        *FORWARD.inputs,
        Operand("o", _OUTPUTS),
        Operand("lse", _ROWS),
        Operand("dout", _OUTPUTS),
    ),
    outputs=(Operand("dq", _QUERIES), Operand("dk", _KEYS), Operand("dv", _VALUES)),
    workspaces=3,
    scalars=("softmax_scale",),
    products=5,
    v_products=2,
    oracle="gradients_reference",
    yardstick="gradients_in_dtype",
    headline=HEADLINE,
    grid=GRID_BACKWARD,
)
OPERATIONS = {operation.letter: operation for operation in (FORWARD, BACKWARD)}


def operation_of(step_name: str) -> Operation:
    """The operation of a step named like "v04" or "v04_no_padding"; forward for any other name."""
    named = STEP_NAME.match(step_name)
    return OPERATIONS.get(named["letter"], FORWARD) if named else FORWARD
