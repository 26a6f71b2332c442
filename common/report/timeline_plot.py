"""The diagrams of recorded timelines: some tiles of one block's pipeline, drawn to scale."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from ..record_schema import TIMELINE_TILES
from .diagrams.svg import MUTED, RAMP, SMALL, TINTS, TITLE, WIDTH, Drawing, files, tick_distance
from .record_set import Recorded

LEFT, RIGHT = 104, WIDTH - 24  # of the rows, in pixels
ROW, GAP, HEADING = 28, 4, 24
NARROWEST = 15  # box with room for its tile's number
K_COLOR, SOFTMAX_COLOR, V_COLOR, OUTPUT_COLOR = TINTS
BUSY_COLOR = RAMP[3]

WARPGROUP_ROWS = 64
TENSOR_FLOP = 4096  # of bf16 or fp16 on Hopper, per SM and clock

Interval = tuple[int, int]  # clocks


def render_timelines(timelines: Recorded) -> dict[str, str]:
    """SVG text by file name: all show as many clocks, those of TIMELINE_TILES of the slowest."""
    records = timelines.records
    clocks = max((_span(record) for record in records.values()), default=0)
    return files(
        {
            name: draw_timeline(record, timelines.label(name), clocks)
            for name, record in records.items()
        }
    )


def _span(record: dict) -> int:
    starts, first = _starts(record)
    return starts[first + TIMELINE_TILES] - starts[first]


def _starts(record: dict) -> tuple[list[int], int]:
    """When the first consumer starts S of each tile, and the tile whose start begins the window."""
    starts = record["clocks"]["consumer 0"]["start S"]
    return starts, (len(starts) - TIMELINE_TILES) // 2


def draw_timeline(record: dict, name: str, window_clocks: int) -> Drawing:
    """Rows for the producer, a group of rows for each consumer, one for the tensor cores."""
    producer = record["clocks"]["producer"]
    consumers = {who: clocks for who, clocks in record["clocks"].items() if who != "producer"}
    starts, first = _starts(record)
    window = starts[first], starts[first] + window_clocks

    group = HEADING + 2 * (ROW + GAP)
    tensor = 44 + group * (1 + len(consumers)) + 10
    axis = tensor + ROW + 8
    drawing = Drawing(axis + 134)
    period = median(later - earlier for earlier, later in pairwise(starts))
    title = f"{name}, one block on an {record['device']}: a tile every {period:.0f} clocks"
    drawing.text(18, 22, title, TITLE, bold=True)
    rows = _Rows(drawing, window, _numbers(record))

    drawing.text(18, 44 + HEADING / 2, "producer", bold=True)
    for n, (copies, color, event) in enumerate(
        (("copies K", K_COLOR, "start S"), ("copies V", V_COLOR, "start PV"))
    ):
        top = 44 + HEADING + n * (ROW + GAP)
        drawing.text(18, top + ROW / 2, copies)
        used = map(min, zip(*(clocks[event] for clocks in consumers.values()), strict=True))
        intervals = list(zip(producer[f"load {copies[-1]}"], used, strict=True))
        # The next copy may start before this one is used: two lines take turns.
        for line in range(2):
            rows.boxes(top + line * ROW / 2, ROW / 2, intervals, color, line, 2)

    for n, (who, clocks) in enumerate(consumers.items(), 1):
        top = 44 + n * group
        drawing.text(18, top + HEADING / 2, who, bold=True)
        for row, what in enumerate(("products", "softmax")):
            drawing.text(18, top + HEADING + row * (ROW + GAP) + ROW / 2, what)
        top += HEADING
        s, pv = _products(clocks)
        rows.boxes(top, ROW, s, K_COLOR)
        rows.boxes(top, ROW, pv, V_COLOR)
        softmax = list(zip(clocks["end S"], clocks["end softmax"], strict=True))
        rows.boxes(top + ROW + GAP, ROW, softmax, SOFTMAX_COLOR)
        for output in record["outputs"].get(who, ()):
            rows.box(top + ROW + GAP, ROW, (output["start"], output["end"]), OUTPUT_COLOR, "O")

    needed = clocks_a_product(record)
    started = [start for clocks in consumers.values() for start in _product_starts(clocks)]
    drawing.text(18, tensor + ROW / 2, "tensor cores", bold=True)
    for interval in busy_times(started, needed):
        rows.box(tensor, ROW, interval, BUSY_COLOR, "")
    rows.axis(axis)
    _legend(drawing, axis + 46, needed)
    return drawing


def _numbers(record: dict) -> list[int]:
    """Each tile's number in its work tile: a record has as many, but may begin in the middle."""
    tiles = len(record["clocks"]["producer"]["load K"])
    outputs = record["outputs"].get("consumer 0")
    last = outputs[-1]["tile"] if outputs else tiles - 1
    return [(tile - last - 1) % tiles for tile in range(tiles)]


def clocks_a_product(record: dict) -> int:
    """What the tensor cores need for one product of a warpgroup and a tile: S or P V."""
    shape, tiles = record["shape"], len(record["clocks"]["producer"]["load K"])
    keys = -(-shape["seq_k"] // tiles)
    return 2 * WARPGROUP_ROWS * keys * shape["head_dim"] // TENSOR_FLOP


def busy_times(starts: list[int], clocks: int) -> list[Interval]:
    """When the tensor cores compute, if they never wait while a product has been started.

    In which order they serve two products makes no difference.
    """
    busy: list[Interval] = []
    for start in sorted(starts):
        if busy and start <= busy[-1][1]:
            busy[-1] = busy[-1][0], busy[-1][1] + clocks
        else:
            busy.append((start, start + clocks))
    return busy


def _products(clocks: dict[str, list[int]]) -> tuple[list[Interval], list[Interval]]:
    """S = Q K^T and O += P V of each tile. A warpgroup's products follow one another."""
    starts, ends = _product_starts(clocks), [*clocks["end S"], *clocks["end PV"]]
    order = sorted(range(len(starts)), key=starts.__getitem__)
    begins = starts.copy()
    for before, product in pairwise(order):
        begins[product] = max(starts[product], ends[before])
    intervals = list(zip(begins, ends, strict=True))
    tiles = len(intervals) // 2
    return intervals[:tiles], intervals[tiles:]


def _product_starts(clocks: dict[str, list[int]]) -> list[int]:
    return [*clocks["start S"], *clocks["start PV"]]


class _Rows:
    """Draws boxes on a common time axis, clipped to a window of clocks."""

    def __init__(self, drawing: Drawing, window: Interval, numbers: list[int]) -> None:
        self._drawing, self._window, self._numbers = drawing, window, numbers
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
            self.box(y, height, intervals[tile], color, f"{self._numbers[tile]}")

    def box(self, y: float, height: float, interval: Interval, color: str, text: str) -> None:
        left, right = (self._x(clock) for clock in interval)
        if left < right:  # overlaps the window
            text = text if right - left >= NARROWEST else ""
            self._drawing.cell(left, y, right - left, height, color, text)

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


def _legend(drawing: Drawing, y: float, needed: int) -> None:
    x = 18
    for color, text, width in (
        (K_COLOR, "S = Q K^T, copy of K", 132),
        (SOFTMAX_COLOR, "softmax", 66),
        (V_COLOR, "O += P V, copy of V", 132),
        (OUTPUT_COLOR, "O to memory", 90),
    ):
        drawing.cell(x, y - 10, width, 20, color, text)
        x += width + 4
    drawing.text(x + 8, y, "The number is the tile's in its work tile.", color=MUTED)
    for n, text in enumerate(
        (
            "Copies: from the start to the first use.",
            "Products: from the start, or the end of the warpgroup's one before, until seen done.",
            f"Tensor cores: busy for {needed} clocks with each product, as soon as it has started "
            "or those before it are done.",
        )
    ):
        drawing.text(18, y + 28 + 18 * n, text, color=MUTED)
