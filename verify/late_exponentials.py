"""Finds exponentials that wait for a product which they do not need.

Softmax is to run while the product of the tile before does: behind the wait for S, which leaves a
product under way, and in front of the wait for that one. ptxas may move most of it behind both, and
says nothing. v14 was like that at head_dim 128. It shows in the machine code alone.
"""

from __future__ import annotations

import re
from heapq import heappop, heappush

from .machine_code import Instruction

_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)")
ONE_UNDER_WAY, NONE_UNDER_WAY = "0x1", "0x0"


def late_exponentials(kernels: dict[str, list[Instruction]]) -> list[str]:
    """A line for each of these kernels in which more of them wait than do not."""
    return [
        f"{kernel}: {mistake}"
        for kernel, code in kernels.items()
        for mistake in _mistakes(code)[:1]
    ]


def _mistakes(code: list[Instruction]) -> list[str]:
    mistakes = []
    for x in code:
        if _waits(x) != ONE_UNDER_WAY:
            continue
        early, writes, second = _next_wait(x)
        # Where outputs are written in between, what is under way is S of the next tile.
        if second is None or _waits(second) != NONE_UNDER_WAY or writes:
            continue
        late, *_ = _next_wait(second)
        if late > early:
            mistakes.append(
                f"{late} exponentials wait at {second.address} for a product under way, and {early}"
                " do not"
            )
    return mistakes


def _next_wait(start: Instruction) -> tuple[int, bool, Instruction | None]:
    """On the way with the fewest exponentials to the next wait or product: how many they are,
    whether outputs are written there, and where it leads, None if nowhere.
    """
    ways, seen, number = [(0, 0, False, start)], set(), 0
    while ways:
        count, _, writes, x = heappop(ways)
        if x.address in seen:
            continue
        seen.add(x.address)
        if x is not start and (_waits(x) or x.opcode == "HGMMA"):
            return count, writes, x
        count += x.text.startswith("MUFU.EX2")
        writes |= x.opcode == "STSM"
        for y in x.after:
            number += 1  # of two ways with as many the first one
            heappush(ways, (count, number, writes, y))
    return 0, False, None


def _waits(x: Instruction) -> str | None:
    """How many products may be under way behind a wait for some."""
    found = _WAIT.match(x.text)
    return found and found[1]
