"""What a record of many cells is made of; each cell is an interleaved run of its own.

The keys of a cell, beside those that say what it is:

tflops     the median rate of each step, then of each peer, or why it is missing
routes     which code a peer runs
errors     of each step and peer: the largest absolute difference from the float64 oracle
slow       who was timed in rounds of their own; environment is that of the others' rounds
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from verify.accuracy import Expected
from verify.case import Case
from verify.inputs import Inputs

from ..catalog import steps_to_run
from ..errors import UsageError
from ..operation import Operation, operation_of
from ..record_schema import NAIVE, Form
from ..records import previous_path, read_replaced
from ..runtime.gpu import GpuBackend
from ..step import Step
from .peers import Peer, load
from .timing import SLEEP_CYCLES, WARMUP, Rounds, time_rounds
from .trial import describe_cell, require_right, try_peers, try_steps

# Of an operation, its inputs and causal: the peers by name, or why one is missing.
LoadPeers = Callable[..., dict[str, Peer | str]]

WITHOUT = (NAIVE,)  # holds all scores: nobody would choose it for these lengths

# Rounds of a cell: as many as its share of the time allows, between bounds.
CELL_SECONDS = 3.0
LEAST_ROUNDS, MOST_ROUNDS = 10, 30

# A card at its power cap lowers its clock some time after the load has risen, so a call is faster
# after a slow one, which draws less, than after any other. Whoever takes more than SLOW times as
# long as the fastest is timed apart, and no sample is taken until the clock has followed the load.
SLOW = 1.5
SETTLE_SECONDS = 0.3


def steps_from(first: str) -> list[Step]:
    """The steps of a ladder from one on, but those for special calls alone, which are measured on
    their own. Raises UsageError where there is none.
    """
    ladder = [
        step for step in steps_to_run() if step.operation == operation_of(first) and step.is_general
    ]
    if not (steps := [step for step in ladder if step.name >= first]):
        raise UsageError(f"nothing to measure: there is no step from {first} on")
    return steps


def build_all(backend: GpuBackend, steps: Iterable[Step], cases: Iterable[Case]) -> None:
    """Compiles the steps for all cases at once, so that the device waits for no compiler after."""
    specs = dict.fromkeys(case.specialization for case in cases)
    jobs = [job for job in product(steps, specs) if not job[0].limits.refusal(job[1])]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: backend.build(*job), jobs))


def load_fast(operation: Operation, inputs: Inputs, *, causal: bool) -> dict[str, Peer | str]:
    """The peers but those in WITHOUT, or why one is missing."""
    return load(operation, inputs, causal=causal, without=WITHOUT)


def measure_cell(
    backend: GpuBackend,
    steps: Sequence[Step],
    case: Case,
    inputs: Inputs,
    expected: Expected,
    load_peers: LoadPeers = load_fast,
) -> dict:
    """An entry of a record's cells. Every output is checked before anything is timed.

    Raises UsageError where no step runs, or where a step or a peer is wrong.
    """
    operation = case.operation
    trials, missing = try_steps(backend, steps, case, inputs, expected.outputs)
    if not trials:
        raise UsageError("; ".join(missing.values()))
    peers = load_peers(operation, inputs, causal=case.causal)
    trials |= try_peers(peers, operation, expected.outputs)
    missing |= {name: peer for name, peer in peers.items() if isinstance(peer, str)}
    for name, trial in trials.items():
        require_right(name, trial.errors, case, expected)
    calls = {name: trial.call for name, trial in trials.items()}
    timed, slow = time_apart(calls)
    samples_ms = timed.samples_ms
    flops = operation.flops(case.problem)
    outcomes = {name: trial.outcome(samples_ms[name], flops) for name, trial in trials.items()}
    return {
        **describe_cell(case, timed.environment),
        "tflops": {
            name: outcomes[name]["tflops"] if name in outcomes else {"missing": missing[name]}
            for name in (*(step.name for step in steps), *peers)
        },
        "routes": {name: peer.route for name, peer in peers.items() if isinstance(peer, Peer)},
        "errors": {name: trial.errors for name, trial in trials.items()},
        "slow": slow,
        "samples_ms": samples_ms,
    }


def time_apart(
    calls: dict[str, Callable[[], object]],
    cell_seconds: float = CELL_SECONDS,
    most_warmup: int | None = None,
) -> tuple[Rounds, list[str]]:
    """The samples of all calls, and who was slow; the environment is that of the others' rounds.

    Each of the two gets as many rounds as cell_seconds allow, after most_warmup at most.
    """
    first = time_rounds(calls, rounds=3, warmup=0, sleep_cycles=SLEEP_CYCLES)
    call_ms = {name: min(samples) for name, samples in first.samples_ms.items()}
    limit = SLOW * min(call_ms.values())
    slow = [name for name in calls if call_ms[name] > limit]

    def timed(names: Iterable[str]) -> Rounds:
        seconds = sum(call_ms[name] for name in names) / 1e3
        warmup = max(WARMUP, math.ceil(SETTLE_SECONDS / seconds))
        return time_rounds(
            {name: calls[name] for name in names},
            rounds=affordable_rounds(seconds, cell_seconds),
            warmup=warmup if most_warmup is None else min(warmup, most_warmup),
            sleep_cycles=SLEEP_CYCLES,
        )

    fast = timed([name for name in calls if name not in slow])
    samples_ms = fast.samples_ms | (timed(slow).samples_ms if slow else {})
    return Rounds(samples_ms, fast.environment), slow


def affordable_rounds(round_seconds: float, cell_seconds: float = CELL_SECONDS) -> int:
    """As many rounds of that length as the time for a cell allows, between the bounds."""
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, int(cell_seconds / round_seconds)))


def keep_previous(path: Path, form: Form, sources: dict) -> None:
    """Renames the record of the run before if it was of these sources; removes any older one."""
    previous_path(path).unlink(missing_ok=True)
    record = read_replaced(path, form)
    if record and record["sources"] == sources:
        path.replace(previous_path(path))


def read_unfinished(path: Path, begun: dict) -> dict | None:
    """The record of an interrupted run that began alike, or None."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if {key: record.get(key) for key in begun} == begun else None
