"""What the GPU does during a call: its kernels' times, by torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

EXCHANGE = "exchange"
# By the beginning of a kernel's name; all others are "sum".
KINDS = {"ncclDevKernel_SendRecv": EXCHANGE, "attention_": "attention", "merge_kernel": "merge"}
OTHER = "sum"
# Of what is no kernel, and of kernels that only synchronize the ranks.
LEFT_OUT = ("nccl:", "ncclDevKernel_AllReduce", "Memset", "Memcpy", "spin_kernel")


@dataclass(frozen=True)
class Interval:
    """Of a kernel; nanoseconds of the host's clock, which the GPUs of a host share."""

    what: str
    start: int
    end: int


def trace_kernels(call: Callable[[], object]) -> list[Interval]:
    """The kernels of a call, in the order of their starts."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    intervals = [
        Interval(_kind(event.name()), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == torch.profiler.DeviceType.CUDA
        and not any(part in event.name() for part in LEFT_OUT)
    ]
    return sorted(intervals, key=lambda interval: interval.start)


def _kind(name: str) -> str:
    return next((kind for start, kind in KINDS.items() if name.startswith(start)), OTHER)


def hidden_share(intervals: Iterable[Interval]) -> tuple[float, float]:
    """Milliseconds of exchanges, and the share of them in which something else was computed."""
    intervals = list(intervals)
    exchanges = _union(i for i in intervals if i.what == EXCHANGE)
    others = _union(i for i in intervals if i.what != EXCHANGE)
    total = sum(end - start for start, end in exchanges)
    hidden = sum(
        max(0, min(end, other_end) - max(start, other_start))
        for start, end in exchanges
        for other_start, other_end in others
    )
    return total / 1e6, hidden / total if total else 1.0


def _union(intervals: Iterable[Interval]) -> list[tuple[int, int]]:
    """The times in which there is any of them, in order and apart."""
    joined: list[tuple[int, int]] = []
    for interval in sorted(intervals, key=lambda interval: interval.start):
        if joined and interval.start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], interval.end)
        else:
            joined.append((interval.start, interval.end))
    return joined
