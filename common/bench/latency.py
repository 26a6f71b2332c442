"""Measures what one call costs where there is little to compute: profiles/<gpu>/latency.json.

The record's keys are those of headline.py, but for these:

sources    the hashes of the steps that attention() chooses for the cells, and for decoding
host       SHA-256 of the files that a call of attention() runs on the host, by path
cells      in the order of common.problem.LATENCY
device_us  of a cell: what the device took for each round's launch of its step alone, and for each
           peer's call
host_us    what the host took for each call of attention(), under the step's name, and of each peer,
           by turns
loop_rates rounds a microsecond of a loop in Python, before, between and after those turns
fastest_loop_rate   the highest of all
missing    why a peer is missing
routes     which code a peer runs
decoding   one query on a cache that has a key more at each call: for attention() and for torch's
           scaled_dot_product_attention the fewest and the most keys, loop_rates, and host_us for
           each of CACHES
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import repeat
from pathlib import Path

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
from .host import CALLS, MAX_TURNS, Host
from .peers import Peer, load
from .timing import SLEEP_CYCLES, time_interleaved
from .trial import describe_cell, require_right, try_call

WITHOUT = (NAIVE,)  # several kernels: nobody would choose it for small calls
ROUNDS = 100
FIRST_KEYS, LAYERS = 1024, 32  # of decoding: so many that all calls have one step

CELLS = tuple(Case.of(name, problem) for name, problem in LATENCY.items())
DECODED = Case.of(
    "decoding", Problem(Shape(1, 16, 16, 1, FIRST_KEYS + (1 + MAX_TURNS) * CALLS, 128), "bf16")
)
# How the keys and values of a call lie: in one buffer for the longest; as torch.cat made them; in
# the buffers of LAYERS layers, which take turns; and always the same ones, to compare with.
SLICED, CONCATENATED, LAYERED, FIXED = CACHES


def measure_latency() -> Path:
    """Measures all cells and writes their record; returns its path.

    Raises UsageError where no step runs, or where attention() or a peer is wrong.
    """
    backend = GpuBackend()
    decoded = DECODED.make(backend.device)
    taken = [
        highest_step(backend, case.operation, case.make(backend.device), case.causal)
        for case in CELLS
    ]
    decoding_step = highest_step(backend, DECODED.operation, decoded, DECODED.causal)
    steps = dict.fromkeys((*taken, decoding_step))
    cells = list(zip(taken, CELLS, strict=True))
    progress = tqdm(cells, "latency", unit="cell", leave=False, disable=None)
    host = Host()
    host.find_fastest()
    record = {
        "schema": SCHEMA,
        "git": git_state(),
        **versions(),
        "dtype": CELLS[0].specialization.dtype,
        "sources": {step.name: {"code_sha256": step.code_sha256} for step in steps},
        "host": host_hashes(),
        "cells": [measure_cell(backend, step, case, host) for step, case in progress],
        "decoding": measure_decoding(decoding_step, *decoded, host),
        "fastest_loop_rate": host.fastest_loop_rate,
    }
    path = PROFILES_DIR / gpu_folder(record["device"]) / LATENCY_FILE
    write_record(path, record)
    return path


def measure_cell(backend: GpuBackend, step: Step, case: Case, host: Host) -> dict:
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
    on_host = host.time({name: (call, repeat(())) for name, call in calls.items()})
    after = device_state()
    return {
        **describe_cell(case, {"before": before, "after": after}),
        "device_us": {
            name: [round(1000 * time, 3) for time in times] for name, times in device_ms.items()
        },
        **on_host,
        "missing": {name: peer for name, peer in peers.items() if isinstance(peer, str)},
        "routes": {name: peer.route for name, peer in peers.items() if isinstance(peer, Peer)},
    }


def measure_decoding(
    step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, host: Host
) -> dict:
    """The record's decoding: of some of these keys, one more at each call."""
    lengths = range(FIRST_KEYS, k.shape[2])
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
    decoding = {}
    for who, call in calls.items():
        timed = host.time({name: (call, cache()) for name, cache in caches.items()})
        turns = len(timed["host_us"][SLICED])
        counted = lengths[CALLS : (1 + turns) * CALLS]  # without the warm-up
        decoding[who] = {"keys": [counted[0], counted[-1]], **timed}
    return decoding
