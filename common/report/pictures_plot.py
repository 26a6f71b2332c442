"""The plot of what heads look at, and below each map what O errs over the positions."""

from __future__ import annotations

import math
from itertools import groupby

from ..record_schema import OURS, SDPA
from ..text import label
from .diagrams.svg import (
    EMPTY,
    MARKS,
    MUTED,
    RAMP,
    RULE,
    SMALL,
    TITLE,
    WIDTH,
    Drawing,
)
from .record_set import Whole

COLUMNS, LEFT, GAP = 5, 18, 18
SIDE = (WIDTH - 2 * LEFT - (COLUMNS - 1) * GAP) // COLUMNS  # of a map, in pixels
CURVE = 44  # the height of the errors' panel
BLOCK = SIDE + CURVE + 62
COLORS = {SDPA: (MARKS[0], 3.0), OURS: (RAMP[-1], 1.2)}  # the later one is drawn on top


def draw_pictures(pictures: Whole) -> Drawing:
    """A map a head: queries downwards, keys to the right."""
    record = pictures.record
    heads = record["heads"]
    lines = -(-len(heads) // COLUMNS)
    drawing = Drawing(70 + lines * BLOCK + 30)
    forward = label(next(iter(record["sources"])), stale=pictures.stale)
    title = f"{forward} on the {record['device']}: where the weight of each query goes"
    drawing.text(LEFT, 22, title, TITLE, bold=True)
    _legend(drawing, forward)
    for n, head in enumerate(heads):
        x = LEFT + n % COLUMNS * (SIDE + GAP)
        y = 70 + n // COLUMNS * BLOCK
        mask = ", causal" if head["causal"] else ""
        drawing.text(x, y, f"{head['name']}{mask}", SMALL, bold=True)
        _map(drawing, x, y + 12, head["map"])
        _errors(drawing, x, y + SIDE + 22, head["errors"]["o"])
    drawing.text(
        LEFT,
        70 + lines * BLOCK + 8,
        f"A map's cell: {heads[0]['seq'] // record['cells']} queries (downwards) by as many keys; "
        "its color goes with the root of their weight. Below it O's error from float64.",
        SMALL,
        MUTED,
    )
    return drawing


def _legend(drawing: Drawing, step: str) -> None:
    x = LEFT
    texts = {OURS: f"O of {step}", SDPA: "O of torch's scaled_dot_product_attention"}
    for who, text in texts.items():
        color, width = COLORS[who]
        drawing.line(x, 46, x + 22, 46, color, width)
        drawing.text(x + 30, 46, text, SMALL)
        x += 240


def _level(weight: int, largest: int) -> int:
    """An index of RAMP, or -1 for next to nothing."""
    return min(int(math.sqrt(weight / largest) * (len(RAMP) + 1)), len(RAMP)) - 1


def _map(drawing: Drawing, x: float, y: float, cells: list[list[int]]) -> None:
    """Neighbours of one color in one box."""
    size = SIDE / len(cells)
    largest = max(map(max, cells)) or 1
    drawing.box(x, y, SIDE, SIDE, EMPTY, EMPTY)
    for row, weights in enumerate(cells):
        column = 0
        for level, run in groupby(_level(weight, largest) for weight in weights):
            count = len(list(run))
            if level >= 0:
                left, top = round(x + column * size, 1), round(y + row * size, 1)
                place = left, top, round(count * size, 1), round(size, 1)
                drawing.box(*place, RAMP[level], RAMP[level], 0)
            column += count


def _errors(drawing: Drawing, x: float, y: float, by_who: dict[str, dict]) -> None:
    """On one linear axis from zero, along the positions of the queries."""
    largest = max(max(each["groups"]) for each in by_who.values()) or 1.0
    drawing.line(x, y + CURVE, x + SIDE, y + CURVE, RULE)
    drawing.text(x + SIDE, y + CURVE + 12, f"up to {largest:.1e}", SMALL, MUTED, anchor="end")
    drawing.text(x, y + CURVE + 12, "error of O", SMALL, MUTED)
    for who, (color, width) in COLORS.items():
        groups = by_who[who]["groups"]
        points = [
            (
                round(x + SIDE * (n + 0.5) / len(groups), 1),
                round(y + CURVE - CURVE * error / largest, 1),
            )
            for n, error in enumerate(groups)
        ]
        drawing.curve(points, color, width)
