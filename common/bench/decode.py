"""Measures few queries on many keys, as when a model writes: profiles/<gpu>/decode.json.

The record's keys are those of headline.py, but for these:

sources     the hashes of the steps that are compared: those for few queries of few heads, few
            rows, few work tiles and few queries, where there are such, and last the one for any
            number
copy_bytes_per_second   of torch's copy of COPY_BYTES: what it reads and what it writes
copy_samples_ms     of that copy
skipped     the cells whose tensors do not fit into the device's memory, by name: what that said
cells       in the order of common.problem.DECODE, each an interleaved run of its own
routes      of a cell: which code a peer runs
taken       of a cell: which of the steps attention() takes
attentions  of a cell, by name: the steps and the peers, or why one is missing, as those for few
            rows and for few heads are where none of them is taken
bytes_per_second    of an attention: q, k, v, o and lse, each moved once
difference  of an attention: of its o from the step's, by comparison.difference_of()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from verify.case import Case
from verify.inputs import Inputs

from ..catalog import steps_to_run
from ..errors import UsageError
from ..operation import FORWARD
from ..problem import DECODE
from ..records import DECODE_FILE, SCHEMA
from ..runtime.backend import run
from ..runtime.gpu import GpuBackend
from ..step import FEW_HEADS, FEW_QUERIES, FEW_ROWS, FEW_WORK_TILES, FEWEST_ROWS, Step, few_of
from .cells import SETTLE_SECONDS, build_all
from .comparison import agreeing
from .device_state import POWER_CAP, device_state, git_state, versions
from .peers import Outputs, Peer, load_splitting
from .resumed import record_cells
from .timing import SLEEP_CYCLES, SLEEP_SECONDS, summarize, time_interleaved, time_rounds
from .trial import new_run

COPY_BYTES = 2 * 10**9
COPY_ROUNDS = 20
SEED = 0

# Steps that read the keys again for each of their small work tiles: where none of them is taken
# there may be many of these, which would take most of the time.
FEW_AGAIN = FEW_HEADS, FEWEST_ROWS, FEW_ROWS

# Rounds of a cell: as many as its share of the time allows, between bounds. All cells together take
# some minutes.
CELL_SECONDS = 0.25
LEAST_ROUNDS, MOST_ROUNDS = 5, 20


def measure_decode() -> Path:
    """Measures all cells and writes their record; returns its path.

    A run that is interrupted leaves what it has measured in build/, where the next of the same
    code on such a GPU goes on with it. Raises UsageError where the first of decode_steps() cannot
    run, or where the one that attention() takes is wrong.
    """
    backend = GpuBackend()
    steps = decode_steps(steps_to_run())
    cases = [Case.of(name, problem) for name, problem in DECODE.items()]
    build_all(backend, steps, cases)
    for spec in dict.fromkeys(case.specialization for case in cases):
        if refusal := backend.refusal(steps[0], spec):
            raise UsageError(f"{steps[0].name} {refusal}")
    begun = {
        "schema": SCHEMA,
        "git": git_state(),
        **versions(),
        "dtype": cases[0].specialization.dtype,
        "sources": {each.name: {"code_sha256": each.code_sha256} for each in steps},
    }
    return record_cells(
        DECODE_FILE,
        begun,
        partial(measure_copy, backend.device),
        {case.name: partial(measure_cell, backend, steps, case) for case in cases},
    )


def decode_steps(steps: Sequence[Step]) -> list[Step]:
    """Of these steps, the newest that attention() takes for few queries of few heads, for few rows,
    for few work tiles, for few queries, and for any number of them, as far as there are such.
    """
    newest = {
        step.few: step
        for step in steps
        if step.operation == FORWARD
        and not step.takes_lengths
        and not step.draft
        and (step.few or step.is_candidate())
    }
    return [newest[few] for few in (*FEW_AGAIN, FEW_WORK_TILES, FEW_QUERIES, None) if few in newest]


def measure_copy(device: torch.device) -> dict:
    """The record's copy, of such numbers as K and V hold."""
    source = torch.randn(COPY_BYTES // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    calls = {"copy": lambda: target.copy_(source)}
    samples_ms = time_interleaved(calls, rounds=COPY_ROUNDS)["copy"]
    rate = 2 * source.nbytes / summarize(samples_ms)["time_ms"] * 1e3
    return {"copy_bytes_per_second": round(rate), "copy_samples_ms": samples_ms}


def measure_cell(backend: GpuBackend, steps: Sequence[Step], case: Case) -> dict:
    """An entry of the record's cells. Every output is compared before anything is timed.

    Raises UsageError where the step that attention() takes agrees with no peer, and an error of not
    enough memory where it cannot run for that. Whoever else it disagrees with is missing.
    """
    inputs = _make_inputs(case, backend.device)
    taken = _taken(steps, case)
    compared = [step for step in steps if taken.few in FEW_AGAIN or step.few not in FEW_AGAIN]
    calls: dict[str, Callable[[], Outputs]] = {
        step.name: partial(run, backend, step, *inputs, **case.arguments) for step in compared
    }
    o, lse = calls[taken.name]()
    moved_bytes = sum(tensor.nbytes for tensor in (*inputs, o, lse))
    peers = load_splitting(*inputs)
    calls |= {name: peer.call for name, peer in peers.items() if isinstance(peer, Peer)}
    missing = {name: peer for name, peer in peers.items() if isinstance(peer, str)}
    missing |= {step.name: f"it is {step.few}" for step in steps if step not in compared}
    # The step before may be wrong in the same way: it counts only where there is no peer.
    ran = [name for name, peer in peers.items() if isinstance(peer, Peer)]
    witnesses = ran or [step.name for step in compared if step != taken]
    differences = agreeing(taken.name, case.name, o, calls, witnesses, missing)
    del o, lse
    calls = {name: calls[name] for name in differences}

    first = time_interleaved(calls, rounds=2, warmup=0, sleep_cycles=SLEEP_CYCLES)
    seconds = sum(map(min, first.values())) / 1e3
    rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(CELL_SECONDS / seconds)))
    warmup = _warmup(seconds, device_state())
    timed = time_rounds(calls, rounds=rounds, warmup=warmup, sleep_cycles=SLEEP_CYCLES)
    flops = FORWARD.flops(case.problem)
    return {
        "name": case.name,
        "run": new_run(),
        "environment": timed.environment,
        **asdict(case.shape),
        "routes": {name: peer.route for name, peer in peers.items() if isinstance(peer, Peer)},
        "taken": taken.name,
        "attentions": {
            name: {
                **_outcome(timed.samples_ms[name], flops, moved_bytes),
                "difference": differences[name],
            }
            if name in calls
            else {"missing": missing[name]}
            for name in (*(step.name for step in steps), *peers)
        },
    }


def _warmup(round_seconds: float, state: dict | str) -> int:
    """Rounds that do not count: one, or as many as take SETTLE_SECONDS where the card is at its
    power limit, mostly since the cell before. The clock rises some time after the load has fallen:
    amid the rounds that count it would do so before the median sample of one call and after that
    of another.
    """
    if isinstance(state, str) or POWER_CAP not in (state["throttle_reasons"] or ()):
        return 1
    return math.ceil(SETTLE_SECONDS / (round_seconds + SLEEP_SECONDS))


def _taken(steps: Sequence[Step], case: Case) -> Step:
    """The first of the steps but those for what the case has not few of."""
    shape = case.shape
    sizes = shape.batch, shape.heads, shape.kv_heads, shape.seq_q, shape.seq_k
    few = few_of(*sizes, shape.head_dim, case.causal)
    return next((step for step in steps if step.few in (None, few)), steps[0])


def _make_inputs(case: Case, device: torch.device) -> Inputs:
    """Normally distributed q, k and v. They are made where they lie, as they may be all there is
    room for.
    """
    rng = torch.Generator(device).manual_seed(SEED)
    shape = case.shape
    return tuple(
        torch.randn(size, generator=rng, dtype=case.dtype, device=device)
        for size in (shape.q, shape.kv, shape.kv)
    )


def _outcome(samples_ms: list[float], flops: int, moved_bytes: int) -> dict:
    summary = summarize(samples_ms)
    return {
        **summary,
        "samples_ms": samples_ms,
        "tflops": flops / summary["time_ms"] / 1e9,
        "bytes_per_second": round(moved_bytes / summary["time_ms"] * 1e3),
    }
