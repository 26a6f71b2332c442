"""Measures steps and their peers at the headline problem: a record for each, a run for each ladder.

A record is a JSON object. Times are in milliseconds, sizes in bytes, errors are the largest
absolute difference from the float64 oracle. Some keys need a word:

run                 only numbers of the same run were measured together, so a record includes the
                    peers and the baseline of its own run
baseline            the step before; for an experiment, the step that it changes
peak_memory_bytes   what one call takes beyond the operation's inputs: its outputs and workspace; of
                    a peer that differentiates its own forward, also what that has saved
memory              the same over the sequence length
naive_memory        likewise, of torch's unfused code: what its forward saves for backward included
least_bytes         what the step must move through global memory: inputs and outputs once, its
                    workspace once written and once read
code_sha256         of the step's code and its headers', without comments
counters            what `make profile` added, kept while the source is the same
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from verify.case import Case
from verify.inputs import Inputs
from verify.reference import oracle_of, yardstick_of

from ..catalog import all_steps, step_before
from ..errors import UsageError
from ..operation import SIZES, Operand, Operation
from ..patch import EXPERIMENTS_DIR, read_patch
from ..paths import ROOT
from ..record_schema import NAIVE, RECORD
from ..records import PROFILES_DIR, SCHEMA, gpu_folder, is_stale, read_replaced, write_record
from ..runtime.backend import run
from ..runtime.gpu import GpuBackend
from ..runtime.launch import padded_queries, read_plan
from ..step import Step, read_step
from .device_state import NOT_COLLECTED, git_state, versions
from .peers import Peer, load, load_peer
from .timing import time_rounds
from .trial import Trial, errors_of, new_run, peak_memory, try_peers, try_steps

MEMORY_SEQS = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Candidate:
    """A step, or a step with a patch: what it is compared with, its source and its record."""

    step: Step
    baseline: Step | None
    source: Path
    record: Path  # from the folder of the GPU's records


def step_candidate(step: Step) -> Candidate:
    return Candidate(step, step_before(step), step.path, Path(f"{step.name}.json"))


def experiment_candidates() -> list[Candidate]:
    """The experiments whose patch applies; any other is named on stderr."""
    candidates = []
    for path in sorted(EXPERIMENTS_DIR.glob("*.patch")):
        try:
            patch = read_patch(path)
            step = read_step(patch.write())
        except UsageError as error:
            _warn_not_measured(path.name, error)
        else:
            record = Path("experiments", f"{patch.name}.json")
            candidates.append(Candidate(step, patch.step, path, record))
    return candidates


def measure(candidates: Sequence[Candidate]) -> list[Path]:
    """Measures the candidates of each operation together; returns the records written."""
    operations = dict.fromkeys(candidate.step.operation for candidate in candidates)
    return [
        path
        for operation in operations
        for path in _measure_together(
            operation, [each for each in candidates if each.step.operation == operation]
        )
    ]


def _measure_together(operation: Operation, candidates: Sequence[Candidate]) -> list[Path]:
    """Measures candidates in interleaved rounds with their baselines and the peers.

    A step that this GPU cannot run is named on stderr and left out.
    Raises UsageError where no candidate is left.
    """
    backend = GpuBackend()
    case = Case.of("headline", operation.headline, operation)
    inputs = case.make(backend.device)
    oracle = oracle_of(operation)(*inputs, **case.arguments)

    baselines = [candidate.baseline for candidate in candidates if candidate.baseline]
    steps = dict.fromkeys([*(candidate.step for candidate in candidates), *baselines])
    trials, refusals = try_steps(backend, steps, case, inputs, oracle)
    candidates = _measurable(candidates, trials, refusals)
    peers = load(operation, inputs, causal=case.causal)
    trials |= try_peers(peers, operation, oracle)
    yardstick = yardstick_of(operation)(*inputs, **case.arguments)
    # Hash the sources as they were built and loaded: they may change before the last round is over.
    described = [
        {
            **_description(candidate, backend, case),
            "memory": _memory_over_seq(backend, case, partial(_step_memory, candidate.step)),
        }
        for candidate in candidates
    ]
    shared = {
        "run": new_run(),
        "git": git_state(),
        **versions(),
        "shape": case.problem.as_record(),
        "flops": operation.flops(case.problem),
        "torch_errors": errors_of(operation, yardstick, oracle),
        "naive_memory": _memory_over_seq(backend, case, _naive_memory),
    }

    rounds = time_rounds({name: trial.call for name, trial in trials.items()})
    outcomes = {
        name: trial.outcome(rounds.samples_ms[name], shared["flops"])
        for name, trial in trials.items()
    }
    shared["environment"] = rounds.environment
    shared["peers"] = {
        name: {"route": peer.route, **outcomes[name]}
        if isinstance(peer, Peer)
        else {"missing": peer}
        for name, peer in peers.items()
    }
    folder = PROFILES_DIR / gpu_folder(shared["device"])
    written = []
    for candidate, description in zip(candidates, described, strict=True):
        path = folder / candidate.record
        record = {
            "schema": SCHEMA,
            **description,
            **shared,
            **outcomes[candidate.step.name],
            "baseline": _baseline(candidate.baseline, outcomes),
            "counters": counters_so_far(path, candidate.step),
        }
        write_record(path, record)
        written.append(path)
    return written


def _measurable(
    candidates: Sequence[Candidate], trials: dict[str, Trial], refusals: dict[str, str]
) -> list[Candidate]:
    """The candidates that run. An experiment also needs its step to run; a step stands alone.

    The others are named on stderr. Raises UsageError where none is left.
    """
    steps = all_steps()
    left = [
        candidate
        for candidate in candidates
        if candidate.step.name in trials
        and (candidate.step in steps or candidate.baseline.name in trials)
    ]
    if not left:
        told = (f"{name} is not measured: {reason}" for name, reason in refusals.items())
        raise UsageError("; ".join(told))
    for name, reason in refusals.items():
        _warn_not_measured(name, reason)
    return left


def _warn_not_measured(name: str, reason: object) -> None:
    print(f"warning: {name} is not measured: {reason}", file=sys.stderr)


def _description(candidate: Candidate, backend: GpuBackend, case: Case) -> dict:
    """What is measured: source, compiler's flags, resources, the least traffic."""
    step, spec = candidate.step, case.specialization
    resources = backend.resources(step, spec)
    sizes = asdict(case.shape)
    plan = read_plan(step, backend.descriptor(step, spec), backend.multiprocessors)
    in_order = [sizes[name] for name in SIZES]
    in_order.append(padded_queries(sizes["batch"], sizes["seq_q"], sizes["batch"]))
    workspace_bytes = sum(plan.workspace_bytes(in_order))
    operand_bytes = sum(
        math.prod(sizes[axis] for axis in operand.axes) * _dtype(operand, case).itemsize
        for operand in step.operation.operands
    )
    return {
        "step": step.name,
        "title": step.title,
        "source": candidate.source.relative_to(ROOT).as_posix(),
        "code_sha256": step.code_sha256,
        "compile": backend.compile_command(step, spec),
        "resources": {kernel.name: asdict(resources[kernel.name]) for kernel in plan.kernels},
        "least_bytes": operand_bytes + 2 * workspace_bytes,
    }


def _dtype(operand: Operand, case: Case) -> torch.dtype:
    return case.dtype if operand.strided else torch.float32


def _memory_over_seq(
    backend: GpuBackend, case: Case, measure: Callable[[GpuBackend, Case, Inputs], int]
) -> list[dict]:
    """Peak memory of the case with other sequence lengths, in bytes, as measure says."""
    entries = []
    for seq in MEMORY_SEQS:
        longer = replace(case, shape=replace(case.shape, seq_q=seq, seq_k=seq))
        sizes = asdict(longer.shape)
        inputs = tuple(
            torch.zeros(
                [sizes[axis] for axis in operand.axes],
                dtype=_dtype(operand, case),
                device=backend.device,
            )
            for operand in case.operation.inputs
        )
        try:
            entries.append({"seq": seq, "bytes": measure(backend, longer, inputs)})
        except UsageError as error:
            entries.append({"seq": seq, "bytes": None, "reason": str(error)})
        torch.cuda.empty_cache()
    return entries


def _step_memory(step: Step, backend: GpuBackend, case: Case, inputs: Inputs) -> int:
    return peak_memory(partial(run, backend, step, *inputs, **case.arguments))[1]


def _naive_memory(backend: GpuBackend, case: Case, inputs: Inputs) -> int:
    """Raises UsageError where it does not fit."""
    peer = load_peer(NAIVE, case.operation, inputs, causal=case.causal)
    if isinstance(peer, str):
        raise UsageError(peer)
    return peer.held_bytes + peak_memory(peer.call)[1]


def _baseline(baseline: Step | None, outcomes: dict[str, dict]) -> dict | None:
    if baseline is None or baseline.name not in outcomes:
        return None
    return {
        "step": baseline.name,
        "code_sha256": baseline.code_sha256,
        **outcomes[baseline.name],
    }


def counters_so_far(path: Path, step: Step) -> dict | str:
    """The counters of the record about to be replaced, if its source is the same."""
    record = read_replaced(path, RECORD)
    return record["counters"] if record and not is_stale(record, step) else NOT_COLLECTED
