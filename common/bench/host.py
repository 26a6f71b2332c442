"""Times calls on the host, which neighbours share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter, perf_counter_ns

import torch

from ..quiet import quiet_turns

# Calls that the host makes before it waits: fewer than the device's launch queue holds.
CALLS = 20
# Neighbours slow a shared host down for seconds at a time. So calls are timed until there have been
# this many turns in which it was quiet, or so many in all.
QUIET_TURNS, MAX_TURNS = 10, 60
PAUSE_S = 0.3  # between turns
FIND_FASTEST_S = 10  # at the beginning: longer than most of the neighbours' work


class Host:
    """The processor, which neighbours may slow down: so does a loop in Python, then."""

    def __init__(self) -> None:
        self.fastest_loop_rate = 0.0

    def find_fastest(self) -> None:
        end = perf_counter() + FIND_FASTEST_S
        while perf_counter() < end:
            self.run_loop()

    def run_loop(self) -> float:
        """For PAUSE_S; returns its rounds a microsecond."""
        rounds, end = 0, perf_counter() + PAUSE_S
        while perf_counter() < end:
            rounds += 1
        rate = round(rounds / PAUSE_S / 1e6, 3)
        self.fastest_loop_rate = max(self.fastest_loop_rate, rate)
        return rate

    def time(
        self,
        calls: Mapping[str, tuple[Callable[..., object], Iterable[tuple[torch.Tensor, ...]]]],
    ) -> dict[str, dict | list]:
        """host_us and loop_rates: CALLS of each of these in a turn, until they returned.

        A call has its arguments in turn. The host synchronizes with the device before each burst of
        the same call, and the first turn, a warm-up, does not count.
        """
        turns = {name: (call, iter(arguments)) for name, (call, arguments) in calls.items()}
        _take_turn(turns)
        loop_rates, bursts = [self.run_loop()], {name: [] for name in calls}
        for _ in range(MAX_TURNS):
            for name, times in _take_turn(turns).items():
                bursts[name].append(times)
            loop_rates.append(self.run_loop())
            if sum(quiet_turns(loop_rates, self.fastest_loop_rate)) >= QUIET_TURNS:
                break
        return {"host_us": bursts, "loop_rates": loop_rates}


def _take_turn(
    turns: Mapping[str, tuple[Callable[..., object], Iterator[tuple[torch.Tensor, ...]]]],
) -> dict[str, list[float]]:
    """Microseconds of CALLS calls each."""
    bursts = {}
    for name, (call, arguments) in turns.items():
        torch.cuda.synchronize()
        times = bursts[name] = []
        for _ in range(CALLS):
            given = next(arguments)
            start = perf_counter_ns()
            call(*given)
            times.append((perf_counter_ns() - start) / 1000)
    torch.cuda.synchronize()
    return bursts
