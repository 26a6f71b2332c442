"""Measures forward and backward where head_dim is 256 and more, or v has one of its own.

The record is profiles/<gpu>/large_head_dim.json, large_head_dim_backward.json of the backward
ladder, whose keys are those of grid.py, but for these:

sources    the hashes of the steps that attention() takes only for large head_dim, the newest first,
           then of the one that it takes at LARGE_HEAD_DIM
cells      in the order of LARGE_HEAD_DIMS; v_head_dim where it is not head_dim
tflops     of a cell: the median rate of each step whose limits allow the head_dim, then of each
           peer for large head_dim, or why it is missing; attention() takes the first step, unless
           head_dim is LARGE_HEAD_DIM

A run after another of the same sources leaves that in large_head_dim_previous.json, or its
backward twin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from verify.case import Case

from ..catalog import steps_to_run
from ..errors import UsageError
from ..operation import Operation
from ..problem import LARGE_HEAD_DIMS
from ..record_schema import LARGE_HEAD_DIM_RECORD
from ..records import large_head_dim_file
from ..runtime.gpu import GpuBackend
from ..step import LARGE_HEAD_DIM, Step
from .grid import measure_shape, record_shapes
from .peers import load_for_large_head_dim


def cases_of(operation: Operation) -> tuple[Case, ...]:
    """The operation's cells."""
    return tuple(Case.of(name, problem, operation) for name, problem in LARGE_HEAD_DIMS.items())


def measure_large_head_dim(operation: Operation) -> Path:
    """Measures all cells of an operation and writes their record; returns its path.

    Raises UsageError where a step cannot be compiled, where none for large head_dim runs in a cell,
    or where a step or a peer is wrong there.
    """
    backend, steps = GpuBackend(), chosen_steps(steps_to_run(), operation)
    cases = cases_of(operation)

    def fitting(case: Case) -> list[Step]:
        return [step for step in steps if not step.limits.refusal(case.specialization)]

    for case in cases:
        first = fitting(case)[0] if fitting(case) else steps[0]
        if refusal := backend.refusal(first, case.specialization):
            raise UsageError(f"{first.name} {refusal}")

    def measure(case: Case) -> dict:
        return measure_shape(backend, fitting(case), case, load_for_large_head_dim)

    file = large_head_dim_file(operation)
    return record_shapes(backend, steps, cases, measure, file, LARGE_HEAD_DIM_RECORD)


def chosen_steps(steps: Sequence[Step], operation: Operation) -> tuple[Step, ...]:
    """Of these steps of the operation, those for large head_dim, the newest first, then the newest
    that attention() takes at LARGE_HEAD_DIM. Raises UsageError where there is none.
    """

    def newest_first(is_chosen: Callable[[Step], bool], what: str) -> list[Step]:
        found = [step for step in steps if step.operation == operation and is_chosen(step)]
        if not found:
            raise UsageError(f"nothing to measure: there is no {operation.name} step {what}")
        return found[::-1]

    large = newest_first(lambda step: step.only_large_head_dim, "for large head_dim")
    narrow, *_ = newest_first(
        lambda step: step.is_candidate() and step.limits.highest_head_dim >= LARGE_HEAD_DIM,
        f"that attention() takes at head_dim {LARGE_HEAD_DIM}",
    )
    return (*large, narrow)
