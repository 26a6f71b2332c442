"""Measures steps and their peers in one interleaved run on the GPU and writes a record of each.

A record is a JSON object. Times are in milliseconds, sizes in bytes, errors are the largest
absolute difference from the float64 oracle. Some keys need a word:

run                 only numbers with the same run were measured together; so a record brings along
                    the peers and the baseline of its own run
baseline            the step before; for an experiment, the step that it changes
peak_memory_bytes   what one call takes beyond q, k and v: o, lse and workspace
memory              the same over the sequence length
least_bytes         what the step must move through global memory: q, k, v, o and lse once, its
                    workspace once written and once read
code_sha256         of the step's code and its headers', without comments
counters            what `make profile` added, kept while the source is the same
"""

from __future__ import annotations

import datetime
import math
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from verify.accuracy import Expected
from verify.cases import Case, Inputs, find_cases
from verify.reference import attention_in_dtype, attention_reference

from ..catalog import all_steps
from ..errors import UsageError
from ..patch import read_patch
from ..records import (
    PROFILES_DIR,
    SCHEMA,
    gpu_folder,
    is_stale,
    read_records,
    write_record,
)
from ..runtime.backend import run
from ..runtime.gpu import GpuBackend
from ..runtime.launch import Sizes, evaluate
from ..source import ROOT
from ..step import Step, read_step
from .device_state import NOT_COLLECTED, device_state, git_state, versions
from .peers import Peer, load
from .timing import summarize, time_interleaved

EXPERIMENTS_DIR = ROOT / "experiments"
MEMORY_SEQS = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Candidate:
    """A step, or a step with a patch: what it is compared with, its source and its record."""

    step: Step
    baseline: Step | None
    source: Path
    record: Path  # from the folder of the GPU's records


def step_candidate(step: Step) -> Candidate:
    steps = all_steps()
    index = steps.index(step)
    baseline = steps[index - 1] if index else None
    return Candidate(step, baseline, step.path, Path(f"{step.name}.json"))


def experiment_candidates() -> list[Candidate]:
    """The experiments whose patch applies; any other is named on stderr."""
    candidates = []
    for path in sorted(EXPERIMENTS_DIR.glob("*.patch")):
        try:
            patch = read_patch(path)
            step = read_step(patch.write())
        except UsageError as error:
            print(f"warning: {path.name} is not measured: {error}", file=sys.stderr)
        else:
            record = Path("experiments", f"{patch.name}.json")
            candidates.append(Candidate(step, patch.step, path, record))
    return candidates


def measure(candidates: Sequence[Candidate]) -> list[Path]:
    """Measures the candidates, their baselines and the peers together; returns the records written.

    A step that this GPU cannot run is named on stderr and left out. Raises UsageError where no
    candidate is left.
    """
    backend = GpuBackend()
    case = find_cases(["headline"])[0]
    q, k, v = case.make(backend.device)
    oracle = attention_reference(q, k, v, causal=case.causal, softmax_scale=case.scale)
    baselines = [candidate.baseline for candidate in candidates if candidate.baseline]
    steps = dict.fromkeys([*(candidate.step for candidate in candidates), *baselines])

    trials, reasons = try_steps(backend, steps, case, (q, k, v), oracle)
    refusals = [f"{name} is not measured: {reason}" for name, reason in reasons.items()]
    # A step is worth measuring without the one before it; an experiment is not without its step.
    candidates = [
        candidate
        for candidate in candidates
        if candidate.step.name in trials
        and (candidate.step in all_steps() or candidate.baseline.name in trials)
    ]
    if not candidates:
        raise UsageError("; ".join(refusals))
    for refusal in refusals:
        print(f"warning: {refusal}", file=sys.stderr)
    memory = {
        candidate.step: _memory_over_seq(backend, candidate.step, case) for candidate in candidates
    }
    peers = load(q, k, v, causal=case.causal)
    trials |= {
        name: try_call(peer.forward, oracle)
        for name, peer in peers.items()
        if isinstance(peer, Peer)
    }

    # Sources as they are built and loaded by now, not as they may be when the last round is over.
    descriptions = {
        candidate.step: _description(candidate, backend, case) for candidate in candidates
    }
    git = git_state()
    before = device_state()
    samples = time_interleaved({name: trial.call for name, trial in trials.items()})
    after = device_state()

    outcomes = {name: outcome(trial, samples[name], case) for name, trial in trials.items()}
    yardstick = attention_in_dtype(q, k, v, causal=case.causal, softmax_scale=case.scale)
    shared = {
        "run": new_run(),
        "git": git,
        **versions(),
        "environment": {"before": before, "after": after},
        "shape": {
            **asdict(case.shape),
            "dtype": case.specialization.dtype,
            "causal": case.causal,
        },
        "flops": flops(case),
        "torch_errors": _errors(yardstick, oracle),
        "peers": {
            name: {"route": peer.route, **outcomes[name]}
            if isinstance(peer, Peer)
            else {"missing": peer}
            for name, peer in peers.items()
        },
    }
    written = []
    for candidate in candidates:
        baseline = candidate.baseline
        path = PROFILES_DIR / gpu_folder(shared["device"]) / candidate.record
        record = {
            "schema": SCHEMA,
            **descriptions[candidate.step],
            **shared,
            **outcomes[candidate.step.name],
            "memory": memory[candidate.step],
            "baseline": {
                "step": baseline.name,
                "code_sha256": baseline.code_sha256,
                **outcomes[baseline.name],
            }
            if baseline and baseline.name in outcomes
            else None,
            "counters": _counters_so_far(path, candidate.step),
        }
        write_record(path, record)
        written.append(path)
    return written


def _counters_so_far(path: Path, step: Step) -> dict | str:
    record = read_records(path.parent).get(path.stem)
    return record["counters"] if record and not is_stale(record, step) else NOT_COLLECTED


def new_run() -> str:
    """What the records of one interleaved run share; a later one sorts behind it."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return f"{now} {secrets.token_hex(4)}"


@dataclass(frozen=True)
class Trial:
    """A call that works, and what was seen when it was tried."""

    call: Callable[[], object]
    errors: dict[str, float]
    peak_memory_bytes: int


def try_steps(
    backend: GpuBackend,
    steps: Iterable[Step],
    case: Case,
    inputs: Inputs,
    oracle: tuple[torch.Tensor, torch.Tensor],
) -> tuple[dict[str, Trial], dict[str, str]]:
    """By the steps' names: those that run, and why the others do not."""
    trials, refusals = {}, {}
    for step in steps:
        try:
            call = partial(run, backend, step, *inputs, **_arguments(case))
            trials[step.name] = try_call(call, oracle)
        except UsageError as refusal:
            refusals[step.name] = str(refusal)
    return trials, refusals


def try_call(call: Callable[[], object], oracle: tuple[torch.Tensor, torch.Tensor]) -> Trial:
    """call returns o or (o, lse)."""
    result, peak_memory_bytes = _peak_memory(call)
    outputs = (result,) if isinstance(result, torch.Tensor) else result
    return Trial(call, _errors(outputs, oracle), peak_memory_bytes)


def _arguments(case: Case) -> dict:
    return {"causal": case.causal, "softmax_scale": case.scale}


def _peak_memory(call: Callable[[], object]) -> tuple[object, int]:
    """The call's result, and the most bytes that torch's allocator had handed out to it at once."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


def _memory_over_seq(backend: GpuBackend, step: Step, case: Case) -> list[dict]:
    """Peak memory of the case with other sequence lengths."""
    shape = case.shape
    entries = []
    for seq in MEMORY_SEQS:
        q, k, v = (
            torch.zeros(
                shape.batch, heads, seq, shape.head_dim, dtype=case.dtype, device=backend.device
            )
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        try:
            _, size = _peak_memory(partial(run, backend, step, q, k, v, **_arguments(case)))
            entries.append({"seq": seq, "bytes": size})
        except UsageError as error:
            entries.append({"seq": seq, "bytes": None, "reason": str(error)})
    torch.cuda.empty_cache()
    return entries


def require_right(name: str, trial: Trial, case: Case, expected: Expected) -> None:
    """Raises UsageError where an output differs from the oracle by more than the case allows."""
    allowed = {"o": expected.o_max, "lse": expected.lse_max}
    for output, error in trial.errors.items():
        if not error <= allowed[output]:  # as for NaN
            raise UsageError(
                f"{name} is wrong on {case.name}: an error of {error:.1e} in {output}, where "
                f"{allowed[output]:.1e} is allowed"
            )


def describe_cell(case: Case, before: dict, after: dict) -> dict:
    """What the records of many shapes have in common in their cells, each a run of its own.

    before, after: the state of the device around its rounds
    """
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
    }


def _errors(outputs: Sequence[torch.Tensor], oracle: Sequence[torch.Tensor]) -> dict[str, float]:
    """Of o, and of lse where there is one; NaN if an element is NaN."""
    return {
        name: (output - expected).abs().max().item()
        for name, output, expected in zip(("o", "lse"), outputs, oracle, strict=False)
    }


def flops(case: Case) -> int:
    """Of the two matrix products, a multiply-add counted as two; half of them when causal."""
    shape = case.shape
    full = 4 * shape.batch * shape.heads * shape.seq_q * shape.seq_k * shape.head_dim
    return full // 2 if case.causal else full


def outcome(trial: Trial, samples_ms: list[float], case: Case) -> dict:
    summary = summarize(samples_ms)
    return {
        **summary,
        "tflops": flops(case) / summary["time_ms"] / 1e9,
        "samples_ms": samples_ms,
        "errors": trial.errors,
        "peak_memory_bytes": trial.peak_memory_bytes,
    }


def _description(candidate: Candidate, backend: GpuBackend, case: Case) -> dict:
    """What was measured: source, compiler's flags, resources."""
    step, spec, shape = candidate.step, case.specialization, case.shape
    resources = backend.resources(step, spec)
    sizes = Sizes(shape.batch, shape.heads, shape.kv_heads, shape.seq_q, shape.seq_k)
    plan = evaluate(backend.descriptor(step, spec), sizes, backend.multiprocessors)
    elements = 2 * math.prod(shape.q) + 2 * math.prod(shape.kv)
    lse_bytes = 4 * math.prod(shape.q[:3])
    return {
        "step": step.name,
        "title": step.title,
        "source": candidate.source.relative_to(ROOT).as_posix(),
        "code_sha256": step.code_sha256,
        "compile": backend.compile_command(step, spec),
        "resources": {kernel.name: asdict(resources[kernel.name]) for kernel in plan.kernels},
        "least_bytes": elements * case.dtype.itemsize + lse_bytes + 2 * sum(plan.workspace_bytes),
    }
