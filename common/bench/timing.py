"""Times several candidates against each other on the current CUDA stream."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tqdm import tqdm

from .device_state import device_state

WARMUP = 3  # rounds
SLEEP_CYCLES = 2_000_000  # longer than the host takes to launch a round
SLEEP_SECONDS = 1e-3  # what these are, about


def time_interleaved(
    candidates: dict[str, Callable[[], object]],
    *,
    rounds: int = 30,
    warmup: int = WARMUP,
    seed: int = 0,
    sleep_cycles: int = 0,
) -> dict[str, list[float]]:
    """Milliseconds of every call, by candidate, one sample per round.

    A round runs each candidate once, in a newly shuffled order, so that drifting clocks and
    temperature affect all candidates alike and a ratio between two of them holds. Before each call,
    outside its events, a buffer twice the size of the L2 cache is written, so that every call
    starts with its inputs in DRAM.

    Calls that the host launches more slowly than the device runs them need sleep_cycles: before
    each round the device sleeps for that many clocks while the host launches the whole round.
    """
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    flush = torch.empty(2 * l2_bytes, dtype=torch.uint8, device="cuda")
    shuffle = random.Random(seed).shuffle
    order = list(candidates)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
        name: [] for name in candidates
    }
    round_before = None
    for _ in tqdm(range(warmup + rounds), "timing", unit="round", leave=False, disable=None):
        shuffle(order)
        if sleep_cycles:
            torch.cuda._sleep(sleep_cycles)
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            candidates[name]()
            end.record()
            events[name].append((start, end))
        # The host stays one round ahead: the device never waits for a launch, so no sample contains
        # launch overhead.
        if round_before:
            round_before.synchronize()
        round_before = end
    torch.cuda.synchronize()
    return {
        name: [round(start.elapsed_time(end), 6) for start, end in pairs[warmup:]]
        for name, pairs in events.items()
    }


@dataclass(frozen=True)
class Rounds:
    """Samples by candidate, one per round, and the device's state before and after."""

    samples_ms: dict[str, list[float]]
    environment: dict


def time_rounds(candidates: dict[str, Callable[[], object]], **options) -> Rounds:
    """time_interleaved(), with the device's state before and after for the record."""
    before = device_state()
    samples_ms = time_interleaved(candidates, **options)
    return Rounds(samples_ms, {"before": before, "after": device_state()})


def summarize(samples_ms: list[float]) -> dict[str, float]:
    """Median and quartiles of at least two samples, in milliseconds."""
    p25, median, p75 = statistics.quantiles(samples_ms, n=4, method="inclusive")
    times = {"time_ms": median, "time_p25_ms": p25, "time_p75_ms": p75}
    return {name: round(time, 6) for name, time in times.items()}
