"""The diagrams of recorded timelines: some tiles of one block's pipeline, drawn to scale."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter

from ..operation import OPERATIONS, operation_of
from .diagrams.svg import MUTED, SMALL, TITLE, WIDTH, Drawing, files, tick_distance
from .pipeline import LOOKS, OUTPUT, PRODUCER, TENSOR_CORES, Box, Interval, Look, Pipeline, derive
from .record_set import Recorded

LEFT, RIGHT = 104, WIDTH - 24  # of the rows, in pixels
ROW, GAP, HEADING, NOTE = 28, 4, 24, 18
NARROWEST = 15  # box with room for its tile's number


def render_timelines(timelines: Recorded) -> dict[str, str]:
    """SVG text by file name."""
    drawings: dict[str, Drawing] = {}
    for operation in OPERATIONS.values():
        drawings |= _draw_ladder(timelines.of(operation))
    return files(drawings)


def _draw_ladder(timelines: Recorded) -> dict[str, Drawing]:
    """All show as many clocks: those that the slowest one's tiles in the middle take."""
    pipelines = {name: derive(record) for name, record in timelines.records.items()}
    windows = [pipeline.window for pipeline in pipelines.values()]
    clocks = max((last - first for first, last in windows), default=0)
    return {
        name: draw_timeline(timelines.records[name], pipeline, timelines.label(name), clocks)
        for name, pipeline in pipelines.items()
    }


def draw_timeline(record: dict, pipeline: Pipeline, name: str, window_clocks: int) -> Drawing:
    """Rows for the producer, a group of rows for each consumer, one for the tensor cores."""
    look = LOOKS[operation_of(record["step"])]
    first, _ = pipeline.window
    by_who = {who: list(rows) for who, rows in groupby(pipeline.rows, attrgetter("who"))}
    height = 44 + sum(HEADING + len(rows) * (ROW + GAP) for rows in by_who.values())
    axis = height + 10 - HEADING - GAP + 8
    drawing = Drawing(axis + 134 + NOTE * len(look.notes))
    title = f"{name}, one block on an {record['device']}: a tile every {pipeline.period:.0f} clocks"
    drawing.text(18, 22, title, TITLE, bold=True)
    boxes = _Boxes(drawing, (first, first + window_clocks))
    top = 44
    for who, rows in by_who.items():
        if who == TENSOR_CORES:
            top += 10
            drawing.text(18, top + ROW / 2, who, bold=True)
        else:
            drawing.text(18, top + HEADING / 2, who, bold=True)
            top += HEADING
        for row in rows:
            if row.title:
                drawing.text(18, top + ROW / 2, row.title)
            # The next copy may start before this one is used: two lines take turns.
            lines = 2 if who == PRODUCER else 1
            for line in range(lines):
                for box in row.boxes[line::lines]:
                    boxes.draw(top + line * ROW / 2, ROW / lines, box)
            top += ROW + GAP
    boxes.axis(axis)
    _legend(drawing, axis + 46, look, pipeline.clocks_a_product)
    return drawing


class _Boxes:
    """Draws boxes on a common time axis, clipped to a window of clocks."""

    def __init__(self, drawing: Drawing, window: Interval) -> None:
        self._drawing, self._window = drawing, window
        self._scale = (RIGHT - LEFT) / (window[1] - window[0])

    def draw(self, y: float, height: float, box: Box) -> None:
        left, right = self._x(box.start), self._x(box.end)
        if left < right:  # overlaps the window
            text = "O" if box.what == OUTPUT else "" if box.tile is None else f"{box.tile}"
            text = text if right - left >= NARROWEST else ""
            self._drawing.cell(left, y, right - left, height, box.color, text)

    def axis(self, y: float) -> None:
        """Draws the axis: clocks since the window's start."""
        first, last = self._window
        self._drawing.line(LEFT, y, RIGHT, y)
        step = int(tick_distance((last - first) / 14))
        for clock in range(0, last - first + 1, step):
            x = self._x(first + clock)
            self._drawing.line(x, y, x, y + 5)
            self._drawing.text(x, y + 14, f"{clock}", SMALL, MUTED, anchor="middle")
        self._drawing.text(18, y + 14, "clocks", SMALL, MUTED)

    def _x(self, clock: int) -> float:
        first, last = self._window
        return round(LEFT + (min(max(clock, first), last) - first) * self._scale, 1)


def _legend(drawing: Drawing, y: float, look: Look, needed: int) -> None:
    x = 18
    for color, text, width in look.legend:
        drawing.cell(x, y - 10, width, 20, color, text)
        x += width + 4
    drawing.text(x + 8, y, "The number is the tile's in its work tile.", color=MUTED)
    for n, text in enumerate(
        (
            "Copies: from the start to the first use.",
            "Products: from the start, or the end of the warpgroup's one before, until seen done.",
            *look.notes,
            f"Tensor cores: busy for {needed} clocks with each product, as soon as it has started "
            "or those before it are done.",
        )
    ):
        drawing.text(18, y + 28 + NOTE * n, text, color=MUTED)
