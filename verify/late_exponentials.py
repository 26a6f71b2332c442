"""Finds exponentials that wait for a product which they do not need.

Softmax is to run while the product of the tile before, P V, does: behind the wait for S, which
leaves a product under way, and in front of the wait for that one. ptxas may move most of it behind
both, and says nothing. v14 was like that at head_dim 128. It shows in the machine code alone.
"""

from __future__ import annotations

import re
from heapq import heappop, heappush

from .machine_code import Instruction, first_mistakes
from .wgmma_operands import writers_of_a

_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)")
ONE_UNDER_WAY, NONE_UNDER_WAY = "0x1", "0x0"


def late_exponentials(kernels: dict[str, list[Instruction]]) -> list[str]:
    """A line for each of these kernels in which more of them wait than do not."""
    return first_mistakes(kernels, _mistakes)


def _mistakes(code: list[Instruction]) -> list[str]:
    mistakes = []
    for x in code:
        if _waits(x) != ONE_UNDER_WAY or not _is_of_rounded(_last_product(x)):
            continue
        early, second = _next_wait(x)
        if second is None or _waits(second) != NONE_UNDER_WAY:
            continue
        late, _ = _next_wait(second)
        if late > early:
            mistakes.append(
                f"{late} exponentials wait at {second.address} for a product under way, and {early}"
                " do not"
            )
    return mistakes


def _last_product(wait: Instruction) -> Instruction | None:
    """One that is the last to be started before a wait, which leaves it under way."""
    paths, seen = list(wait.before), set()
    while paths:
        x = paths.pop(0)
        if x.opcode == "HGMMA":
            return x
        if x.address not in seen:
            seen.add(x.address)
            paths += x.before
    return None


def _is_of_rounded(product: Instruction | None) -> bool:
    """Whether its operand A is P or dS, rounded. No exponential needs that: they make the next P of
    the next S.
    """
    found = product and writers_of_a(product)
    return bool(found) and "F2FP" in found[1]


def _next_wait(start: Instruction) -> tuple[int, Instruction | None]:
    """On the way with the fewest exponentials to the next wait or product: how many they are, and
    where it leads, None if nowhere.
    """
    ways, seen, number = [(0, 0, start)], set(), 0
    while ways:
        count, _, x = heappop(ways)
        if x.address in seen:
            continue
        seen.add(x.address)
        if x is not start and (_waits(x) or x.opcode == "HGMMA"):
            return count, x
        count += x.text.startswith("MUFU.EX2")
        for y in x.after:
            number += 1  # of two ways with as many the first one
            heappush(ways, (count, number, y))
    return 0, None


def _waits(x: Instruction) -> str | None:
    """How many products may be under way behind a wait for some."""
    found = _WAIT.match(x.text)
    return found and found[1]
