"""Measures the steps and their peers over a grid of shapes: profiles/<gpu>/grid.json.

Every cell of the grid is an interleaved run of its own. The record's keys are those of
common/measure.py, but for these:

sources    the hashes of each step that was measured
cells      in the order of CELLS
tflops     of a cell: the median rate of each step, then of each peer, or why it is missing
routes     which code a peer runs
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from common.environment import device_state, git_state, versions
from common.errors import UsageError
from common.gpu import GpuBackend
from common.measure import new_run, outcome, try_call, try_steps
from common.peers import Peer, load
from common.record import GRID, PROFILES_DIR, SCHEMA, gpu_folder, header_hashes, write_record
from common.step import Step, all_steps
from common.timing import time_interleaved
from verify.accuracy import expect
from verify.cases import BF16, Case, Shape

# FlashAttention's convention: the same number of tokens and the same hidden size in every cell.
TOKENS, HIDDEN = 16384, 2048

# The steps before are slower than the slowest peer that one would choose, at any shape.
FIRST_STEP = "v07"


def _cell(head_dim: int, causal: bool, seq: int = 4096) -> Case:
    heads = HIDDEN // head_dim
    shape = Shape(TOKENS // seq, heads, heads, seq, seq, head_dim)
    return Case(f"d{head_dim}{'_causal' if causal else ''}", shape, BF16, causal)


CELLS = tuple(_cell(head_dim, causal) for head_dim in (64, 128, 256) for causal in (False, True))


def grid_steps() -> list[Step]:
    return [step for step in all_steps() if step.name >= FIRST_STEP]


def measure_grid() -> Path:
    """Measures all cells and writes their record; returns its path.

    Raises UsageError where no step runs in a cell, or where a step or a peer is wrong there.
    """
    backend = GpuBackend()
    steps = grid_steps()
    record = {
        "schema": SCHEMA,
        "git": git_state(),
        **versions(),
        "dtype": CELLS[0].specialization.dtype,
        "sources": {
            step.name: {"source_sha256": step.source_sha256, "headers": header_hashes(step)}
            for step in steps
        },
    }
    progress = tqdm(CELLS, "grid", unit="cell", leave=False, disable=None)
    record["cells"] = [measure_cell(backend, steps, case) for case in progress]
    path = PROFILES_DIR / gpu_folder(record["device"]) / GRID
    write_record(path, record)
    return path


def measure_cell(backend: GpuBackend, steps: Sequence[Step], case: Case) -> dict:
    """An entry of the record's cells."""
    q, k, v = case.make(backend.device)
    expected = expect(case, q, k, v)
    oracle = expected.o, expected.lse
    trials, missing = try_steps(backend, steps, case, (q, k, v), oracle)
    if not trials:
        raise UsageError("; ".join(missing.values()))
    peers = load(q, k, v, causal=case.causal)
    for name, peer in peers.items():
        if isinstance(peer, Peer):
            trials[name] = try_call(peer.forward, oracle)
        else:
            missing[name] = peer
    allowed = {"o": expected.o_max, "lse": expected.lse_max}
    for name, trial in trials.items():
        for output, error in trial.errors.items():
            if not error <= allowed[output]:  # as for NaN
                raise UsageError(
                    f"{name} is wrong on {case.name}: an error of {error:.1e} in {output}, where "
                    f"{allowed[output]:.1e} is allowed"
                )
    before = device_state()
    samples = time_interleaved({name: trial.call for name, trial in trials.items()})
    after = device_state()
    outcomes = {name: outcome(trial, samples[name], case) for name, trial in trials.items()}
    shape = case.shape
    return {
        "name": case.name,
        "run": new_run(),
        "environment": {"before": before, "after": after},
        "batch": shape.batch,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "seq": shape.seq_q,
        "head_dim": shape.head_dim,
        "causal": case.causal,
        "tflops": {
            name: outcomes[name]["tflops"] if name in outcomes else {"missing": missing[name]}
            for name in (*(step.name for step in steps), *peers)
        },
        "routes": {name: peer.route for name, peer in peers.items() if isinstance(peer, Peer)},
        "errors": {name: trial.errors for name, trial in trials.items()},
        "samples_ms": samples,
    }
