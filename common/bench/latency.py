"""Measures what one call costs where there is little to compute: profiles/<gpu>/latency.json.

The record's keys are those of headline.py, but for these:

sources    the hashes of the step that attention() chooses
host       SHA-256 of the files that a call of attention() runs on the host, by path
cells      in the order of common.problem.LATENCY
device_us  of a cell: what the device took for each round's launch of the step alone, and for each
           peer's call
host_us    what the host took for each call of attention(), under the step's name, and of each peer,
           burst by burst
missing    why a peer is missing
routes     which code a peer runs
decoding   one query on a cache that has a key more at each call: the numbers of keys and, for each
           of CACHES, host_us of attention() and of torch's scaled_dot_product_attention
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import repeat
from pathlib import Path
from time import perf_counter, perf_counter_ns

import torch
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from verify.accuracy import expect
from verify.case import Case

from .. import attention
from ..operator import highest_step
from ..problem import LATENCY, Problem, Shape
from ..record_schema import CACHES, NAIVE, SDPA
from ..records import LATENCY_FILE, PROFILES_DIR, SCHEMA, gpu_folder, host_hashes, write_record
from ..runtime.backend import empty_outputs
from ..runtime.gpu import GpuBackend
from ..step import Step
from .device_state import device_state, git_state, versions
from .peers import Peer, load
from .timing import SLEEP_CYCLES, time_interleaved
from .trial import describe_cell, require_right, try_call

WITHOUT = (NAIVE,)  # several kernels: nobody would choose it for small calls
ROUNDS = 100
# Calls that the host makes before it waits: fewer than the device's launch queue holds.
BURSTS, CALLS = 10, 20
# Before each turn of bursts. Neighbours on a shared host slow it down for some seconds at a time:
# bursts that follow at once would all be slow, or none.
PAUSE_S = 0.5
FIRST_KEYS, LAYERS = 512, 32  # of decoding

CELLS = tuple(Case.of(name, problem) for name, problem in LATENCY.items())
DECODED = Case.of(
    "decoding", Problem(Shape(1, 16, 16, 1, FIRST_KEYS + (1 + BURSTS) * CALLS, 128), "bf16")
)
# How the keys and values of a call lie: in one buffer for the longest; as torch.cat made them; in
# the buffers of LAYERS layers, which take turns; and always the same ones, to compare with.
SLICED, CONCATENATED, LAYERED, FIXED = CACHES


def measure_latency() -> Path:
    """Measures all cells and writes their record; returns its path.

    Raises UsageError where no step runs, or where attention() or a peer is wrong.
    """
    backend = GpuBackend()
    case = CELLS[0]
    step = highest_step(backend, case.operation, case.make(backend.device), case.causal)
    progress = tqdm(CELLS, "latency", unit="cell", leave=False, disable=None)
    record = {
        "schema": SCHEMA,
        "git": git_state(),
        **versions(),
        "dtype": CELLS[0].specialization.dtype,
        "sources": {step.name: {"code_sha256": step.code_sha256}},
        "host": host_hashes(),
        "cells": [measure_cell(backend, step, case) for case in progress],
        "decoding": measure_decoding(step, *DECODED.make(backend.device)),
    }
    path = PROFILES_DIR / gpu_folder(record["device"]) / LATENCY_FILE
    write_record(path, record)
    return path


def measure_cell(backend: GpuBackend, step: Step, case: Case) -> dict:
    """An entry of the record's cells."""
    inputs = case.make(backend.device)
    expected = expect(case, *inputs)
    peers = load(case.operation, inputs, causal=case.causal, without=WITHOUT)
    calls = {step.name: partial(attention, *inputs, causal=case.causal)}
    calls |= {name: peer.call for name, peer in peers.items() if isinstance(peer, Peer)}
    for name, call in calls.items():
        trial = try_call(call, case.operation, expected.outputs)
        require_right(name, trial.errors, case, expected)
    tensors = (*inputs, *empty_outputs(case.operation, inputs))
    call = backend.prepare(step, case.specialization)
    launch = partial(call, tensors, [case.scale])
    before = device_state()
    device_ms = time_interleaved(
        calls | {step.name: launch}, rounds=ROUNDS, sleep_cycles=SLEEP_CYCLES
    )
    host_us = time_host({name: (call, repeat(())) for name, call in calls.items()})
    after = device_state()
    return {
        **describe_cell(case, {"before": before, "after": after}),
        "device_us": {
            name: [round(1000 * time, 3) for time in times] for name, times in device_ms.items()
        },
        "host_us": host_us,
        "missing": {name: peer for name, peer in peers.items() if isinstance(peer, str)},
        "routes": {name: peer.route for name, peer in peers.items() if isinstance(peer, Peer)},
    }


def measure_decoding(step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict:
    """The record's decoding: of some of these keys, one more at each call."""
    lengths = range(FIRST_KEYS, FIRST_KEYS + (1 + BURSTS) * CALLS)
    calls = {step.name: attention, SDPA: scaled_dot_product_attention}
    expected = expect(DECODED, q, k, v)
    for name, call in calls.items():
        trial = try_call(partial(call, q, k, v), DECODED.operation, expected.outputs)
        require_right(name, trial.errors, DECODED, expected)
    fixed = k[:, :, :FIRST_KEYS], v[:, :, :FIRST_KEYS]
    layers = [(k.clone(), v.clone()) for _ in range(LAYERS)]

    def layered() -> Iterator[tuple[torch.Tensor, ...]]:
        for n in lengths:
            for layer_k, layer_v in layers:
                yield q, layer_k[:, :, :n], layer_v[:, :, :n]

    # Made one by one, as in a model: their Python objects are as fresh, and the allocator gives the
    # memory of earlier ones again.
    caches = {
        SLICED: lambda: ((q, k[:, :, :n], v[:, :, :n]) for n in lengths),
        CONCATENATED: lambda: ((q, k[:, :, :n].clone(), v[:, :, :n].clone()) for n in lengths),
        LAYERED: layered,
        FIXED: lambda: repeat((q, *fixed)),
    }
    # Not by turns with each other: a call by sdpa of a new length can take tens of milliseconds,
    # and leaves nothing in the processor's caches.
    times = {
        who: time_host({name: (call, cache()) for name, cache in caches.items()})
        for who, call in calls.items()
    }
    return {
        "keys": [lengths[0], lengths[-1]],
        "host_us": {name: {who: times[who][name] for who in calls} for name in caches},
    }


def time_host(
    calls: Mapping[str, tuple[Callable[..., object], Iterable[tuple[torch.Tensor, ...]]]],
) -> dict[str, list[list[float]]]:
    """Microseconds that each call took until it returned: BURSTS of CALLS, by the call's name.

    A call has its arguments in turn. Bursts of all calls are interleaved, with PAUSE_S between
    turns, and the host synchronizes with the device before each; the first of each, a warm-up, does
    not count.
    """
    bursts = {name: [] for name in calls}
    turns = {name: (call, iter(arguments)) for name, (call, arguments) in calls.items()}
    for _ in range(1 + BURSTS):
        _stay_awake(PAUSE_S)
        for name, (call, arguments) in turns.items():
            torch.cuda.synchronize()
            times = []
            for _ in range(CALLS):
                given = next(arguments)
                start = perf_counter_ns()
                call(*given)
                times.append((perf_counter_ns() - start) / 1000)
            bursts[name].append(times)
    torch.cuda.synchronize()
    return {name: each[1:] for name, each in bursts.items()}


def _stay_awake(seconds: float) -> None:
    """Waits, at work: a processor that slept starts at a lower clock."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass
