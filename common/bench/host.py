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
LOOP_S = 0.3  # that the loop takes between turns. To sleep would lower the processor's clock
FIND_FASTEST_S = 10  # at the beginning: longer than most of the neighbours' work


class Host:
    """The processor, which neighbours may slow down; a loop in Python then slows down as well."""

    def __init__(self) -> None:
        self.fastest_loop_rate = 0.0

    def find_fastest(self) -> None:
        end = perf_counter() + FIND_FASTEST_S
        while perf_counter() < end:
            self.run_loop()

    def run_loop(self) -> float:
        """Returns its rounds a microsecond."""
        rounds, end = 0, perf_counter() + LOOP_S
        while perf_counter() < end:
            rounds += 1
        rate = round(rounds / LOOP_S / 1e6, 3)
        self.fastest_loop_rate = max(self.fastest_loop_rate, rate)
        return rate

    def time(
        self,
        calls: Mapping[str, tuple[Callable[..., object], Iterable[tuple[torch.Tensor, ...]]]],
    ) -> dict[str, dict | list]:
        """host_us and loop_rates: what CALLS of each took in every turn, until they returned.

        A call takes its arguments one after the other. The host synchronizes with the device before
        the calls of each name, and the first turn, a warm-up, does not count.
        """
        calls = {name: (call, iter(arguments)) for name, (call, arguments) in calls.items()}
        _take_turn(calls)
        loop_rates, turns = [self.run_loop()], {name: [] for name in calls}
        for _ in range(MAX_TURNS):
            for name, times in _take_turn(calls).items():
                turns[name].append(times)
            loop_rates.append(self.run_loop())
            if sum(quiet_turns(loop_rates, self.fastest_loop_rate)) >= QUIET_TURNS:
                break
        return {"host_us": turns, "loop_rates": loop_rates}


def _take_turn(
    calls: Mapping[str, tuple[Callable[..., object], Iterator[tuple[torch.Tensor, ...]]]],
) -> dict[str, list[float]]:
    """Microseconds of each of CALLS calls, by name."""
    turn = {}
    for name, (call, arguments) in calls.items():
        torch.cuda.synchronize()
        times = turn[name] = []
        for _ in range(CALLS):
            given = next(arguments)
            start = perf_counter_ns()
            call(*given)
            times.append((perf_counter_ns() - start) / 1000)
    torch.cuda.synchronize()
    return turn
