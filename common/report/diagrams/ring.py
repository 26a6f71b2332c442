"""The diagrams of ring attention: who computes which part of S in which step, and how two parts
become one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .svg import (
    ACCENT,
    BANK_COLORS,
    EMPTY,
    MUTED,
    SMALL,
    TINTS,
    TITLE,
    Drawing,
)

RANKS = 4
CELL, UNIT, ROW = 36, 20, 20  # pixels: of a chunk in S; of the time for one; of a rank in time

# Two parts of a row's O, of which one element is shown, and their lse.
LSES, VALUES = (2.0, 3.0), (0.4, 1.6)
PART_COLORS = BANK_COLORS[0], BANK_COLORS[1]


def figures() -> dict[str, Drawing]:
    """The drawings by the names of their files."""
    return {"ring_zigzag": _ring_zigzag(), "ring_merge": _ring_merge()}


# ---- who computes what


def zigzag(ranks: int) -> list[int]:
    """Whose each of the 2 P chunks is, as sharded/order.py has it."""
    return [min(chunk, 2 * ranks - 1 - chunk) for chunk in range(2 * ranks)]


def contiguous(ranks: int) -> list[int]:
    """Whose each of the 2 P chunks is, where the ranks' parts follow one another."""
    return [chunk // 2 for chunk in range(2 * ranks)]


def step_of(rank: int, origin: int, ranks: int) -> int:
    """In which step of the ring a rank has another one's keys."""
    return (rank - origin) % ranks


def area(query_chunk: int, key_chunk: int) -> float:
    """How much of that square of S a causal mask leaves."""
    if query_chunk == key_chunk:
        return 0.5
    return float(key_chunk < query_chunk)


def work(holders: Sequence[int]) -> list[list[float]]:
    """Squares of a chunk that each rank computes in each step, by rank."""
    ranks = len(holders) // 2
    found = [[0.0] * ranks for _ in range(ranks)]
    for query_chunk, rank in enumerate(holders):
        for key_chunk, origin in enumerate(holders):
            found[rank][step_of(rank, origin, ranks)] += area(query_chunk, key_chunk)
    return found


def durations(holders: Sequence[int]) -> list[float]:
    """Of each step: as long as the rank with most to do takes."""
    return [max(of_step) for of_step in zip(*work(holders), strict=True)]


def _ring_zigzag() -> Drawing:
    """Both orders side by side: S, and below it what the ranks do over time."""
    drawing = Drawing(604)
    title = f"A causal mask on {RANKS} ranks: who computes which part of S, in which step"
    drawing.text(18, 22, title, TITLE, bold=True)
    _draw_order(drawing, 90, "Zigzag, chunks r and 2 P − 1 − r", zigzag(RANKS))
    _draw_order(drawing, 502, "Contiguous, one part after another", contiguous(RANKS))
    drawing.notes(
        540,
        "A color: a rank. Number in S: the step of the ring in which the rank has these keys. Grey "
        "is hidden, or a rank that waits.",
        "The ranks begin each step together, with the keys that have just arrived: it takes as "
        "long as the rank with most to compute.",
        "A unit of time: a square of S.",
    )
    return drawing


def _draw_order(drawing: Drawing, x: float, title: str, holders: Sequence[int]) -> None:
    text = f"{title}: {sum(durations(holders)):g} units of time"
    drawing.text(x - 72, 50, text, bold=True)
    y = 112
    drawing.text(x - 10, y - 40, "chunk", SMALL, MUTED, anchor="end")
    drawing.text(x - 10, y - 17, "keys of rank", SMALL, MUTED, anchor="end")
    for chunk, rank in enumerate(holders):
        left, top = x + chunk * CELL, y + chunk * CELL
        drawing.text(left + CELL / 2, y - 40, f"{chunk}", SMALL, MUTED, anchor="middle")
        drawing.cell(left, y - 28, CELL, 22, TINTS[rank], f"{rank}")
        drawing.cell(x - 32, top, 26, CELL, TINTS[rank], f"{rank}")
        if chunk == 0:
            drawing.text(x - 38, top + 11, "queries", SMALL, MUTED, anchor="end")
            drawing.text(x - 38, top + 25, "of rank", SMALL, MUTED, anchor="end")
    for query_chunk, rank in enumerate(holders):
        for key_chunk, origin in enumerate(holders):
            step = step_of(rank, origin, len(holders) // 2)
            left, top = x + key_chunk * CELL, y + query_chunk * CELL
            _draw_square(drawing, left, top, area(query_chunk, key_chunk), TINTS[rank], step)
    _draw_time(drawing, x, y + CELL * len(holders) + 30, holders)


def _draw_square(drawing: Drawing, x: float, y: float, share: float, color: str, step: int) -> None:
    drawing.box(x, y, CELL, CELL, color if share else EMPTY)
    if share == 0.5:
        drawing.polygon(((x, y), (x + CELL, y), (x + CELL, y + CELL)), EMPTY)
    if share:
        inset = CELL / 3 if share == 0.5 else CELL / 2
        drawing.text(x + inset, y + CELL - inset, f"{step}", anchor="middle")


def _draw_time(drawing: Drawing, x: float, y: float, holders: Sequence[int]) -> None:
    """A row for each rank: as wide as it computes in each step, and as the others let it wait."""
    lengths = durations(holders)
    start = 0.0
    for step, length in enumerate(lengths):
        middle = x + (start + length / 2) * UNIT
        drawing.text(middle, y - 9, f"{step}", SMALL, MUTED, anchor="middle")
        for rank, of_rank in enumerate(work(holders)):
            left, top = x + start * UNIT, y + rank * ROW
            drawing.box(left, top, length * UNIT, ROW, EMPTY)
            if of_rank[step]:
                drawing.box(left, top, of_rank[step] * UNIT, ROW, TINTS[rank])
        start += length
    drawing.text(x - 10, y - 9, "step", SMALL, MUTED, anchor="end")
    for rank in range(len(lengths)):
        drawing.text(x - 10, y + (rank + 0.5) * ROW, f"rank {rank}", SMALL, anchor="end")


# ---- how parts are merged


def merged(lses: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """The second part's weight, lse and the element of O, of two parts."""
    weight = 1 / (1 + math.exp(lses[0] - lses[1]))
    lse = math.log(sum(map(math.exp, lses)))
    return weight, lse, (1 - weight) * values[0] + weight * values[1]


def _ring_merge() -> Drawing:
    """Three lines: lse, the weights, and an element of O."""
    weight, lse, value = merged(LSES, VALUES)
    drawing = Drawing(316)
    title = "Two parts of a row of O, each of some of the keys, become one"
    drawing.text(18, 22, title, TITLE, bold=True)
    left, width = 200, 560
    names = ("part 1", "part 2")

    def scale(y: float, name: str, formula: str, ends: tuple[float, float], ticks: int) -> None:
        drawing.text(18, y - 8, name, bold=True)
        drawing.text(18, y + 9, formula, SMALL, MUTED)
        drawing.line(left, y, left + width, y)
        for tick in range(ticks + 1):
            x = left + width * tick / ticks
            number = ends[0] + (ends[1] - ends[0]) * tick / ticks
            drawing.line(x, y, x, y + 5)
            drawing.text(x, y + 14, f"{number:g}", SMALL, MUTED, anchor="middle")

    def dots(y: float, ends: tuple[float, float], parts: Sequence[float], both: float) -> None:
        for part, name, color in (
            *zip(parts, names, PART_COLORS, strict=True),
            (both, "both", ACCENT),
        ):
            x = round(left + width * (part - ends[0]) / (ends[1] - ends[0]), 1)
            drawing.dot(x, y, 6, color)
            drawing.text(x, y - 16, f"{name}: {part:.3g}", SMALL, anchor="middle")

    of_lse, of_value = (1.5, 3.5), (0.0, 2.0)
    scale(84, "lse", "log (exp lse₁ + exp lse₂)", of_lse, 4)
    dots(84, of_lse, LSES, lse)
    y = 140
    drawing.text(18, y + 7, "weights", bold=True)
    drawing.text(18, y + 24, "w = sigmoid (lse₂ − lse₁)", SMALL, MUTED)
    first = round((1 - weight) * width, 1)
    drawing.cell(left, y, first, 30, PART_COLORS[0], f"1 − w = {1 - weight:.3f}")
    drawing.cell(left + first, y, width - first, 30, PART_COLORS[1], f"w = {weight:.3f}")
    scale(234, "an element of o", "(1 − w) o₁ + w o₂", of_value, 4)
    dots(234, of_value, VALUES, value)
    drawing.notes(
        282,
        "As if one softmax had seen all keys: the part with the larger sum of exponentials counts "
        "more. Further parts are merged likewise.",
    )
    return drawing
