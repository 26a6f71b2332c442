"""Measures the steps of a ladder and their peers at every problem of its grid.

The record is profiles/<gpu>/grid.json, grid_backward.json of the backward ladder. Inputs are
normally distributed. The record's keys are those of headline.py and, of a cell, of
cells.py, but for these:

sources    the hashes of each step that was measured
ceiling    what the same timer says of a large matrix product by torch: its sizes and median rate
cells      in the order of the operation's grid
seq_k      of a cell: the keys, where there are not as many as queries, seq

A run after another of the same sources leaves that in grid_previous.json, or in
grid_backward_previous.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from verify.accuracy import expect
from verify.case import Case

from ..operation import BACKWARD, FORWARD, Operation
from ..record_schema import GRID_RECORD, Form
from ..records import PROFILES_DIR, SCHEMA, gpu_folder, grid_file, write_record
from ..runtime.gpu import GpuBackend
from ..step import Step
from .cells import LoadPeers, build_all, keep_previous, load_fast, measure_cell, steps_from
from .device_state import git_state, versions
from .timing import summarize, time_interleaved

# The steps before are slower, and v01 and v02 hold all scores.
FIRST_STEP = {FORWARD: "v04", BACKWARD: "b03"}
CEILING = 8192  # rows and columns of each matrix of a product


def cases_of(operation: Operation) -> tuple[Case, ...]:
    """The cells of the operation's grid."""
    return tuple(Case.of(name, problem, operation) for name, problem in operation.grid.items())


def measure_grid(operation: Operation) -> Path:
    """Measures all cells of a ladder and writes their record; returns its path.

    Raises UsageError where a step cannot be compiled, where no step runs in a cell, or where a step
    or a peer is wrong there.
    """
    backend = GpuBackend()
    steps, cases = steps_from(FIRST_STEP[operation]), cases_of(operation)
    return record_shapes(
        backend,
        steps,
        cases,
        lambda case: measure_shape(backend, steps, case),
        grid_file(operation),
    )


def record_shapes(
    backend: GpuBackend,
    steps: Sequence[Step],
    cases: Sequence[Case],
    measure: Callable[[Case], dict],
    file: str,
    form: Form = GRID_RECORD,
) -> Path:
    """Measures a cell for each case and writes the record, which has this form, into a file of this
    name in the folder of the GPU; returns its path.
    """
    build_all(backend, steps, cases)
    record = {
        "schema": SCHEMA,
        "git": git_state(),
        **versions(),
        "dtype": cases[0].specialization.dtype,
        "sources": {step.name: {"code_sha256": step.code_sha256} for step in steps},
        "ceiling": measure_ceiling(backend.device),
    }
    path = PROFILES_DIR / gpu_folder(record["device"]) / file
    progress = tqdm(cases, path.stem, unit="cell", leave=False, disable=None)
    record["cells"] = [measure(case) for case in progress]
    keep_previous(path, form, record["sources"])
    write_record(path, record)
    return path


def measure_ceiling(device: torch.device) -> dict:
    """The record's ceiling: random normal bf16 matrices, as the inputs of the cells are."""
    rng = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(CEILING, CEILING, generator=rng, dtype=torch.bfloat16, device=device)
        for _ in range(2)
    )
    samples = time_interleaved({"matmul": lambda: a @ b})["matmul"]
    return {
        "matmul": f"{CEILING}^3",
        "tflops": 2 * CEILING**3 / summarize(samples)["time_ms"] / 1e9,
        "samples_ms": samples,
    }


def measure_shape(
    backend: GpuBackend, steps: Sequence[Step], case: Case, load_peers: LoadPeers = load_fast
) -> dict:
    """An entry of the record's cells."""
    inputs = case.make(backend.device)
    return measure_cell(backend, steps, case, inputs, expect(case, *inputs), load_peers)
