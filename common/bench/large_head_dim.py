"""Measures forward and backward where head_dim is 256 and more, or v has one of its own.

The record is profiles/<gpu>/large_head_dim.json, large_head_dim_backward.json of the backward
ladder, whose keys are those of grid.py, but for these:

sources    the hashes of the newest step that attention() takes only for large head_dim, then of the
           one that it takes at LARGE_HEAD_DIM
cells      in the order of LARGE_HEAD_DIMS; v_head_dim where it is not head_dim
tflops     of a cell: the median rate of the first step, of the other one where its limits allow the
           head_dim, then of each peer for large head_dim, or why it is missing

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

    Raises UsageError where a step cannot be compiled, where the first one does not run in a cell,
    or where a step or a peer is wrong there.
    """
    backend, steps = GpuBackend(), chosen_steps(steps_to_run(), operation)
    cases = cases_of(operation)
    for case in cases:
        if refusal := backend.refusal(steps[0], case.specialization):
            raise UsageError(f"{steps[0].name} {refusal}")

    def measure(case: Case) -> dict:
        fitting = [step for step in steps if not step.limits.refusal(case.specialization)]
        return measure_shape(backend, fitting, case, load_for_large_head_dim)

    file = large_head_dim_file(operation)
    return record_shapes(backend, steps, cases, measure, file, LARGE_HEAD_DIM_RECORD)


def chosen_steps(steps: Sequence[Step], operation: Operation) -> tuple[Step, Step]:
    """Of these steps of the operation, the newest for large head_dim, then the newest that
    attention() takes at LARGE_HEAD_DIM. Raises UsageError where there is none.
    """

    def newest(is_chosen: Callable[[Step], bool], what: str) -> Step:
        found = [step for step in steps if step.operation == operation and is_chosen(step)]
        if not found:
            raise UsageError(f"nothing to measure: there is no {operation.name} step {what}")
        return found[-1]

    return (
        newest(lambda step: step.only_large_head_dim, "for large head_dim"),
        newest(
            lambda step: step.is_candidate() and step.limits.highest_head_dim >= LARGE_HEAD_DIM,
            f"that attention() takes at head_dim {LARGE_HEAD_DIM}",
        ),
    )
