"""What ranks that measure do together: they call at the same time, and gather what they saw."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

SEED = 0  # of the order of the calls
SLEEP_CYCLES = 20_000_000  # 10 ms: several times as long as the hosts take to launch a call

Events = tuple[torch.cuda.Event, torch.cuda.Event]  # of a call's start and end


def time_together(
    calls: dict[str, Callable[[], object]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds of every call on this rank's GPU and of its host, by name, one a round.

    As timing.time_interleaved() does, in an order that is the same on all ranks, which begin each
    call together. The GPUs sleep before it while the hosts launch it.
    """
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    flush = torch.empty(2 * l2_bytes, dtype=torch.uint8, device="cuda")
    shuffle = random.Random(SEED).shuffle
    order = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    hosts: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            flush.zero_()
            events, host_ms, _ = time_call(calls[name])
            torch.cuda.synchronize()
            samples[name].append(elapsed(events))
            hosts[name].append(host_ms)
    return samples, hosts


def time_call(call: Callable[[], object]) -> tuple[Events, float, object]:
    """Starts a call on all GPUs together; its events, the host's milliseconds, the result."""
    torch.cuda._sleep(SLEEP_CYCLES)
    dist.all_reduce(torch.empty(1, device="cuda"))  # ends on all GPUs at once
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    begin = time.perf_counter()
    result = call()
    host_ms = (time.perf_counter() - begin) * 1e3
    end.record()
    return (start, end), host_ms, result


def elapsed(events: Events) -> float:
    """Milliseconds."""
    start, end = events
    return round(start.elapsed_time(end), 6)


def gather(value):
    """That of all ranks, in order."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_first_rank(value):
    return gather(value)[0]


def is_first_rank() -> bool:
    return dist.get_rank() == 0


def slowest(samples_ms: list[float]) -> list[float]:
    """Of each sample, the rank's that took longest."""
    return [max(of_ranks) for of_ranks in zip(*gather(samples_ms), strict=True)]


def mean(samples_ms: list[float]) -> list[float]:
    """Of each sample, over the ranks."""
    return [statistics.mean(of_ranks) for of_ranks in zip(*gather(samples_ms), strict=True)]
