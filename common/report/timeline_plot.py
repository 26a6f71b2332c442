"""The diagram of a recorded timeline: some tiles of one block's pipeline, drawn to scale."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from ..record_schema import TIMELINE_TILES
from ..text import label
from .diagrams.svg import MUTED, SMALL, TINTS, TITLE, WIDTH, Drawing

LEFT, RIGHT = 96, WIDTH - 24  # of the rows, in pixels
ROW, GAP, HEADING = 28, 4, 24
NARROWEST = 15  # box with room for its tile's number
K_COLOR, SOFTMAX_COLOR, V_COLOR, OUTPUT_COLOR = TINTS

Interval = tuple[int, int]  # clocks


def draw_timeline(record: dict, *, stale: bool) -> str:
    """SVG text: rows for the producer, then a group of rows for each consumer."""
    producer = record["clocks"]["producer"]
    consumers = {who: clocks for who, clocks in record["clocks"].items() if who != "producer"}
    starts = consumers["consumer 0"]["start S"]
    first = (len(starts) - TIMELINE_TILES) // 2
    window = starts[first], starts[first + TIMELINE_TILES]

    group = HEADING + 2 * (ROW + GAP)
    axis = 44 + group * (1 + len(consumers)) + 6
    drawing = Drawing(axis + 116)
    period = median(later - earlier for earlier, later in pairwise(starts))
    name = label(record["step"], stale=stale)
    title = f"{name}, one block on an {record['device']}: a tile every {period:.0f} clocks"
    drawing.text(18, 22, title, TITLE, bold=True)
    rows = _Rows(drawing, window)

    drawing.text(18, 44 + HEADING / 2, "producer", bold=True)
    for n, (name, color, event) in enumerate(
        (("copies K", K_COLOR, "start S"), ("copies V", V_COLOR, "start PV"))
    ):
        top = 44 + HEADING + n * (ROW + GAP)
        drawing.text(18, top + ROW / 2, name)
        used = map(min, zip(*(clocks[event] for clocks in consumers.values()), strict=True))
        copies = list(zip(producer[f"load {name[-1]}"], used, strict=True))
        # The next copy may start before this one is used: two lines take turns.
        for line in range(2):
            rows.boxes(top + line * ROW / 2, ROW / 2, copies, color, line, 2)

    for n, (who, clocks) in enumerate(consumers.items(), 1):
        top = 44 + n * group
        drawing.text(18, top + HEADING / 2, who, bold=True)
        for row, name in enumerate(("products", "softmax")):
            drawing.text(18, top + HEADING + row * (ROW + GAP) + ROW / 2, name)
        top += HEADING
        s, pv = _products(clocks)
        rows.boxes(top, ROW, s, K_COLOR)
        rows.boxes(top, ROW, pv, V_COLOR)
        softmax = list(zip(clocks["end S"], clocks["end softmax"], strict=True))
        rows.boxes(top + ROW + GAP, ROW, softmax, SOFTMAX_COLOR)
        for output in record["outputs"].get(who, ()):
            rows.box(top + ROW + GAP, ROW, (output["start"], output["end"]), OUTPUT_COLOR, "O")
    rows.axis(axis)
    _legend(drawing, axis + 46)
    return drawing.svg()


def _products(clocks: dict[str, list[int]]) -> tuple[list[Interval], list[Interval]]:
    """S = Q K^T and O += P V of each tile. A warpgroup's products follow one another."""
    starts, ends = ([*clocks[f"{when} S"], *clocks[f"{when} PV"]] for when in ("start", "end"))
    order = sorted(range(len(starts)), key=starts.__getitem__)
    begins = starts.copy()
    for before, product in pairwise(order):
        begins[product] = max(starts[product], ends[before])
    intervals = list(zip(begins, ends, strict=True))
    tiles = len(intervals) // 2
    return intervals[:tiles], intervals[tiles:]


class _Rows:
    """Draws boxes on a common time axis, clipped to a window of clocks."""

    def __init__(self, drawing: Drawing, window: Interval) -> None:
        self._drawing, self._window = drawing, window
        self._scale = (RIGHT - LEFT) / (window[1] - window[0])

    def boxes(
        self,
        y: float,
        height: float,
        intervals: list[Interval],
        color: str,
        first: int = 0,
        step: int = 1,
    ) -> None:
        """A numbered box for every step-th tile, as far as it lies in the window."""
        for tile in range(first, len(intervals), step):
            self.box(y, height, intervals[tile], color, f"{tile}")

    def box(self, y: float, height: float, interval: Interval, color: str, text: str) -> None:
        left, right = (self._x(clock) for clock in interval)
        if left < right:  # overlaps the window
            text = text if right - left >= NARROWEST else ""
            self._drawing.cell(left, y, right - left, height, color, text)

    def axis(self, y: float) -> None:
        """Draws the axis: clocks since the window's start."""
        first, last = self._window
        self._drawing.line(LEFT, y, RIGHT, y)
        step = 10 ** math.ceil(math.log10((last - first) / 14))
        for clock in range(0, last - first + 1, step):
            x = self._x(first + clock)
            self._drawing.line(x, y, x, y + 5)
            self._drawing.text(x, y + 14, f"{clock}", SMALL, MUTED, anchor="middle")
        self._drawing.text(18, y + 14, "clocks", SMALL, MUTED)

    def _x(self, clock: int) -> float:
        first, last = self._window
        return round(LEFT + (min(max(clock, first), last) - first) * self._scale, 1)


def _legend(drawing: Drawing, y: float) -> None:
    x = 18
    for color, text, width in (
        (K_COLOR, "S = Q K^T, copy of K", 132),
        (SOFTMAX_COLOR, "softmax", 66),
        (V_COLOR, "O += P V, copy of V", 132),
        (OUTPUT_COLOR, "O to memory", 90),
    ):
        drawing.cell(x, y - 10, width, 20, color, text)
        x += width + 4
    drawing.text(x + 8, y, "The number is the tile's.", color=MUTED)
    for n, text in enumerate(
        (
            "Copies: from the start to the first use.",
            "Products: from the start, or the end of the warpgroup's one before, until seen done.",
        )
    ):
        drawing.text(18, y + 28 + 18 * n, text, color=MUTED)
