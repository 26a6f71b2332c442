"""Measures forward where head_dim is 256 and more.

The record is profiles/<gpu>/large_head_dim.json, whose keys are those of
grid.py, but for these:

sources    the hashes of the newest step that attention() takes only for large head_dim, then of the
           one that it takes up to LARGE_HEAD_DIM
cells      in the order of LARGE_HEAD_DIMS
tflops     of a cell: the median rate of the first step, of the other one where its limits allow the
           head_dim, then of each peer for large head_dim, or why it is missing

A run after another of the same sources leaves that in large_head_dim_previous.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from verify.case import Case

from ..catalog import steps_to_run
from ..errors import UsageError
from ..operation import FORWARD
from ..problem import LARGE_HEAD_DIMS
from ..record_schema import LARGE_HEAD_DIM_RECORD
from ..records import LARGE_HEAD_DIM_FILE
from ..runtime.gpu import GpuBackend
from ..step import Step
from .grid import measure_shape, record_shapes
from .peers import load_for_large_head_dim

CASES = tuple(Case.of(name, problem, FORWARD) for name, problem in LARGE_HEAD_DIMS.items())


def measure_large_head_dim() -> Path:
    """Measures all cells and writes their record; returns its path.

    Raises UsageError where a step cannot be compiled, where the first one does not run in a cell,
    or where a step or a peer is wrong there.
    """
    backend, steps = GpuBackend(), chosen_steps(steps_to_run())
    for case in CASES:
        if refusal := backend.refusal(steps[0], case.specialization):
            raise UsageError(f"{steps[0].name} {refusal}")

    def measure(case: Case) -> dict:
        fitting = [step for step in steps if not step.limits.refusal(case.specialization)]
        return measure_shape(backend, fitting, case, load_for_large_head_dim)

    return record_shapes(backend, steps, CASES, measure, LARGE_HEAD_DIM_FILE, LARGE_HEAD_DIM_RECORD)


def chosen_steps(steps: Sequence[Step]) -> tuple[Step, Step]:
    """Of these forward steps, the newest for large head_dim, then the newest that attention() takes
    without. Raises UsageError where there is none.
    """

    def newest(is_chosen: Callable[[Step], bool], what: str) -> Step:
        found = [step for step in steps if step.operation == FORWARD and is_chosen(step)]
        if not found:
            raise UsageError(f"nothing to measure: there is no forward step {what}")
        return found[-1]

    return (
        newest(lambda step: step.only_large_head_dim, "for large head_dim"),
        newest(Step.is_candidate, "that attention() takes"),
    )
