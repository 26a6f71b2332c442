"""Measures steps and their peers on many kinds of inputs: profiles/<gpu>/distributions.json.

The record's keys are those of headline.py and, of a cell, of cells.py, but for these:

sources    the hashes of each step that was measured
repairs    the step whose repairs were counted, and the hash of the patched source; or null
trained    the run of the train.json whose inputs were measured, too; or null
cells      in the order of common.problem.DISTRIBUTIONS
inputs     of a cell: a key of verify.inputs.DISTRIBUTIONS, or "trained"
rescaled   of a cell: the share of the work tiles in which some row was rescaled, or null
redone     of a cell: the share of those in which some tile of S was computed again, or null

repairs/vNN.patch has each consumer warp of the step say what it did to a work tile. It is launched
once a cell, untimed. A run after another of the same sources leaves that in
distributions_previous.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from verify.accuracy import Expected, expect
from verify.case import Case
from verify.inputs import DISTRIBUTIONS as INPUTS
from verify.inputs import Inputs, trained

from ..catalog import find_step
from ..errors import UsageError
from ..operation import SIZES
from ..problem import DISTRIBUTIONS, TRAINED
from ..record_schema import DISTRIBUTIONS_RECORD, SHARES
from ..records import (
    DISTRIBUTIONS_FILE,
    PROFILES_DIR,
    SCHEMA,
    TRAINED_FILE,
    gpu_folder,
    write_record,
)
from ..runtime.backend import Backend, empty_outputs
from ..runtime.gpu import GpuBackend
from ..runtime.launch import LaunchDescriptor
from ..step import Step
from ..trained_inputs import TrainedInputs, read_trained
from .cells import build_all, keep_previous, measure_cell, steps_from
from .device_state import git_state, versions
from .trial import errors_of, require_right

FIRST_STEP = "v09"  # and on: those that come near the peers
SEED = 0

# Bits of the word that a consumer warp writes for a work tile.
BITS = dict(zip(SHARES, (1, 2), strict=True))
PRODUCER_WARPS = 4  # the block's last warps, which compute nothing


def cases_with(kept: TrainedInputs | None) -> tuple[Case, ...]:
    """The case of each cell; without trained inputs, of the other cells."""
    kinds = INPUTS | ({TRAINED: trained(kept)} if kept else {})
    return tuple(
        replace(Case.of(name, problem), inputs=kinds[inputs])
        for name, (problem, inputs) in DISTRIBUTIONS.items()
        if inputs in kinds
    )


def find_trained(folder: Path) -> TrainedInputs | None:
    """The trained inputs in the folder of a GPU; None, which stderr says, where there are none.

    Raises UsageError where their file is damaged.
    """
    path = folder / TRAINED_FILE
    if path.is_file():
        return read_trained(path)
    print(f"note: trained inputs are left out, no {path}: make train first", file=sys.stderr)
    return None


def repairs_patch(step: Step) -> Path:
    """Where the patch of a step is, if it has one."""
    return Path(__file__).parent / "repairs" / f"{step.name}.patch"


def measure_distributions() -> Path:
    """Measures all cells and writes their record; returns its path.

    Raises UsageError where the trained inputs are damaged, where a step cannot be compiled, where
    no step runs in a cell, or where a step or a peer is wrong there.
    """
    backend = GpuBackend()
    found = versions()
    folder = PROFILES_DIR / gpu_folder(found["device"])
    kept = find_trained(folder)
    cases = cases_with(kept)
    steps = steps_from(FIRST_STEP)
    patched = patched_step(steps)
    count = patched and partial(count_repairs, GpuBackend(poison=True), patched)
    build_all(backend, [*steps, patched] if patched else steps, cases)
    record = {
        "schema": SCHEMA,
        "git": git_state(),
        **found,
        "sources": {step.name: {"code_sha256": step.code_sha256} for step in steps},
        "repairs": patched and {"step": patched.name, "code_sha256": patched.code_sha256},
        "trained": kept and kept.run,
    }
    progress = tqdm(cases, "distributions", unit="cell", leave=False, disable=None)
    record["cells"] = [measure_inputs(backend, steps, case, count) for case in progress]
    path = folder / DISTRIBUTIONS_FILE
    keep_previous(path, DISTRIBUTIONS_RECORD, record["sources"])
    write_record(path, record)
    return path


def patched_step(steps: Sequence[Step]) -> Step | None:
    """The last step that has a patch, with it. Raises UsageError where it does not apply."""
    patches = (repairs_patch(step) for step in reversed(steps))
    path = next((path for path in patches if path.is_file()), None)
    return path and find_step(path)


def measure_inputs(
    backend: GpuBackend, steps: Sequence[Step], case: Case, count: Callable[..., dict] | None
) -> dict:
    """An entry of the record's cells; count is count_repairs() of a backend and a step."""
    inputs = make_inputs(case, backend.device)
    expected = expect(case, *inputs)
    shares = count(case, inputs, expected) if count else dict.fromkeys(SHARES)
    return {
        **measure_cell(backend, steps, case, inputs, expected),
        "dtype": case.specialization.dtype,
        "inputs": DISTRIBUTIONS[case.name][1],
        **shares,
    }


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Drawn on the device, where it takes no time: the same on every one of that kind."""
    rng = torch.Generator(device).manual_seed(SEED)
    return tuple(x.to(case.dtype).contiguous() for x in case.inputs(case, rng))


def count_repairs(
    backend: Backend, patched: Step, case: Case, inputs: Inputs, expected: Expected
) -> dict[str, float | None]:
    """The shares of a cell, null where the step cannot run; the backend poisons workspaces.

    Raises UsageError where the patched step is wrong, and where the case has so few queries that a
    consumer returns at once: its warps have nothing to say.
    """
    if backend.refusal(patched, case.specialization):
        return dict.fromkeys(SHARES)
    outputs = empty_outputs(patched.operation, inputs)
    workspace, *_ = backend.launch(patched, *inputs, *outputs, **case.arguments)
    errors = errors_of(patched.operation, outputs, expected.outputs)
    require_right(f"{patched.name} with its patch", errors, case, expected)
    return read_shares(words_of(workspace, backend.descriptor(patched, case.specialization)))


def words_of(workspace: torch.Tensor, descriptor: LaunchDescriptor) -> torch.Tensor:
    """What each consumer warp wrote for each work tile, [work tiles, warps].

    workspace has an int32 for each query, rounded up to whole work tiles; the first of a tile's are
    its warps'.
    """
    axis = SIZES.index("seq_q")
    (tile,) = (e.tile for e in descriptor.workspace[0].shape if e.tile and e.size == axis)
    warps = descriptor.kernels[0].threads // 32 - PRODUCER_WARPS
    return workspace.view(torch.int32).view(-1, tile)[:, :warps].cpu()


def read_shares(words: torch.Tensor) -> dict[str, float]:
    """The share of the work tiles of which some warp says so, by what it says.

    Raises UsageError where a warp has said nothing.
    """
    unknown = (words < 0) | (words > sum(BITS.values()))
    if unknown.any():
        tile, warp = unknown.nonzero()[0].tolist()
        raise UsageError(
            f"consumer warp {warp} of work tile {tile} wrote {words[tile, warp]} and not what it "
            f"repaired, 0 to {sum(BITS.values())}"
        )
    return {
        name: (words & bit).bool().any(dim=1).double().mean().item() for name, bit in BITS.items()
    }
