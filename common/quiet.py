"""When a host that others share was quiet, so that a time on it is that of the code."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

QUIET = 0.8  # of the fastest rate: neighbours take a third and more


def quiet_turns(loop_rates: Sequence[float], fastest: float) -> list[bool]:
    """Of each turn between two runs of a loop, whether that was nearly at full speed in both."""
    return [min(before, after) >= QUIET * fastest for before, after in pairwise(loop_rates)]
