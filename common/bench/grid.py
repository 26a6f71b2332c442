"""Measures the steps and their peers at every problem of the grid: profiles/<gpu>/grid.json.

Every cell of the grid is an interleaved run of its own. The record's keys are those of
headline.py, but for these:

sources    the hashes of each step that was measured
ceiling    what the same timer says of a large matrix product by torch: its sizes and median rate
cells      in the order of common.problem.GRID
tflops     of a cell: the median rate of each step, then of each peer, or why it is missing
routes     which code a peer runs

A run after another of the same sources leaves that in grid_previous.json.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm

from verify.accuracy import expect
from verify.cases import Case

from ..catalog import steps_to_run
from ..errors import UsageError
from ..operation import FORWARD
from ..problem import GRID
from ..record_schema import GRID_RECORD
from ..records import (
    GRID_FILE,
    GRID_PREVIOUS_FILE,
    PROFILES_DIR,
    SCHEMA,
    gpu_folder,
    read_replaced,
    write_record,
)
from ..runtime.gpu import GpuBackend
from ..step import Step
from .device_state import git_state, versions
from .peers import Peer, load
from .timing import summarize, time_interleaved, time_rounds
from .trial import describe_cell, require_right, try_call, try_steps

FIRST_STEP = "v04"  # the steps before are slower, and v01 and v02 hold all scores
WITHOUT = ("sdpa_math",)  # holds all scores, too: nobody would choose it for these lengths
CEILING = 8192  # rows and columns of each matrix of a product

# Rounds of a cell: as many as its share of the time allows, between bounds.
CELL_SECONDS = 3.0
LEAST_ROUNDS, MOST_ROUNDS = 10, 30


CELLS = tuple(Case.of(name, problem) for name, problem in GRID.items())


def grid_steps() -> list[Step]:
    steps = [step for step in steps_to_run() if step.operation == FORWARD]
    return [step for step in steps if step.name >= FIRST_STEP]


def measure_grid() -> Path:
    """Measures all cells and writes their record; returns its path.

    Raises UsageError where a step cannot be compiled, where no step runs in a cell, or where a step
    or a peer is wrong there.
    """
    backend = GpuBackend()
    steps = grid_steps()
    build_all(backend, steps, CELLS)
    record = {
        "schema": SCHEMA,
        "git": git_state(),
        **versions(),
        "dtype": CELLS[0].specialization.dtype,
        "sources": {step.name: {"code_sha256": step.code_sha256} for step in steps},
        "ceiling": measure_ceiling(backend.device),
    }
    progress = tqdm(CELLS, "grid", unit="cell", leave=False, disable=None)
    record["cells"] = [measure_cell(backend, steps, case) for case in progress]
    folder = PROFILES_DIR / gpu_folder(record["device"])
    keep_previous(folder, record["sources"])
    write_record(folder / GRID_FILE, record)
    return folder / GRID_FILE


def build_all(backend: GpuBackend, steps: Iterable[Step], cases: Iterable[Case]) -> None:
    """Compiles the steps for all cases at once, so that the device waits for no compiler after."""
    specs = dict.fromkeys(case.specialization for case in cases)
    jobs = [job for job in product(steps, specs) if not job[0].limits.refusal(job[1])]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: backend.build(*job), jobs))


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


def keep_previous(folder: Path, sources: dict) -> None:
    """Renames the record of the run before if it was of these sources; removes any older one."""
    previous = folder / GRID_PREVIOUS_FILE
    previous.unlink(missing_ok=True)
    record = read_replaced(folder / GRID_FILE, GRID_RECORD)
    if record and record["sources"] == sources:
        (folder / GRID_FILE).replace(previous)


def measure_cell(backend: GpuBackend, steps: Sequence[Step], case: Case) -> dict:
    """An entry of the record's cells. All of o and lse is checked before anything is timed."""
    q, k, v = case.make(backend.device)
    expected = expect(case, q, k, v)
    trials, missing = try_steps(backend, steps, case, (q, k, v), expected.outputs)
    if not trials:
        raise UsageError("; ".join(missing.values()))
    peers = load(q, k, v, causal=case.causal, without=WITHOUT)
    for name, peer in peers.items():
        if isinstance(peer, Peer):
            trials[name] = try_call(peer.forward, FORWARD, expected.outputs)
        else:
            missing[name] = peer
    for name, trial in trials.items():
        require_right(name, trial, case, expected)
    calls = {name: trial.call for name, trial in trials.items()}
    timed = time_rounds(calls, rounds=affordable_rounds(_seconds(calls.values())))
    flops = FORWARD.flops(case.problem)
    outcomes = {
        name: trial.outcome(timed.samples_ms[name], flops) for name, trial in trials.items()
    }
    return {
        **describe_cell(case, timed.environment),
        "tflops": {
            name: outcomes[name]["tflops"] if name in outcomes else {"missing": missing[name]}
            for name in (*(step.name for step in steps), *peers)
        },
        "routes": {name: peer.route for name, peer in peers.items() if isinstance(peer, Peer)},
        "errors": {name: trial.errors for name, trial in trials.items()},
        "samples_ms": timed.samples_ms,
    }


def affordable_rounds(round_seconds: float) -> int:
    """As many rounds of that length as CELL_SECONDS allows, between the bounds."""
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, int(CELL_SECONDS / round_seconds)))


def _seconds(calls: Iterable[Callable[[], object]]) -> float:
    """Host time of one round, until the device has finished."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - start
