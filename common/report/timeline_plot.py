"""The diagrams of recorded timelines: some tiles of one block's pipeline, drawn to scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ..operation import BACKWARD, FORWARD, OPERATIONS, operation_of
from ..timeline_events import TIMELINE_EVENTS, TimelineEvents
from .diagrams.svg import (
    BANK_COLORS,
    MUTED,
    RAMP,
    SMALL,
    TINTS,
    TITLE,
    WIDTH,
    Drawing,
    files,
    tick_distance,
)
from .record_set import Recorded

LEFT, RIGHT = 104, WIDTH - 24  # of the rows, in pixels
ROW, GAP, HEADING, NOTE = 28, 4, 24, 18
NARROWEST = 15  # box with room for its tile's number
OUTPUT_COLOR = TINTS[3]  # of O: only forward samples its output
BUSY_COLOR = RAMP[3]

WARPGROUP_ROWS = 64
TENSOR_FLOP = 4096  # of bf16 or fp16 on Hopper, per SM and clock

Interval = tuple[int, int]  # clocks


@dataclass(frozen=True)
class Span:
    """What takes from the last of some events to another one, in boxes of one color."""

    begins: tuple[str, ...]
    end: str
    color: str


@dataclass(frozen=True)
class Look:
    """What the rows of a ladder's timelines show of its events."""

    copies: Mapping[str, tuple[str, str]]  # by tensor: the event of its use, the color
    products: Mapping[str, str]  # colors by name
    rows: Mapping[str, tuple[Span, ...]]  # below a consumer's products, by title
    legend: tuple[tuple[str, str, int], ...]  # color, text and width
    notes: tuple[str, ...] = ()


def _forward() -> Look:
    k_color, softmax_color, v_color, _ = TINTS
    return Look(
        copies={"K": ("start S", k_color), "V": ("start PV", v_color)},
        products={"S": k_color, "PV": v_color},
        rows={"softmax": (Span(("end S",), "end softmax", softmax_color),)},
        legend=(
            (k_color, "S = Q K^T, copy of K", 132),
            (softmax_color, "softmax", 66),
            (v_color, "O += P V, copy of V", 132),
            (OUTPUT_COLOR, "O to memory", 90),
        ),
    )


def _backward() -> Look:
    q_color, k_color, v_color, dout_color = TINTS  # as in the diagrams of backward
    p_color, ds_color, dq_color = BANK_COLORS[3:6]
    return Look(
        copies={"Q": ("start S", q_color), "dO": ("start dP", dout_color)},
        products={"S": q_color, "dP": dout_color, "dV": v_color, "dK": k_color, "dQ": dq_color},
        rows={
            "P, dS, dQ": (
                Span(("end S", "start dP"), "end P", p_color),
                Span(("end P", "end dP"), "end dS", ds_color),
                Span(("end dQ",), "dQ stored", dq_color),
            ),
            "adds dQ": (Span(("dQ full",), "dQ read", dq_color),),
        },
        legend=(
            (q_color, "S, copy of Q", 84),
            (p_color, "P", 24),
            (dout_color, "dP, copy of dO", 98),
            (ds_color, "dS", 28),
            (v_color, "dV", 28),
            (k_color, "dK", 28),
            (dq_color, "dQ, its way to the sum", 134),
        ),
        notes=(
            "dQ: stored by the consumer, once the place is free, then added to its sum by a warp, "
            "until the place has been read.",
        ),
    )


LOOKS = {FORWARD: _forward(), BACKWARD: _backward()}


def render_timelines(timelines: Recorded) -> dict[str, str]:
    """SVG text by file name."""
    drawings: dict[str, Drawing] = {}
    for operation in OPERATIONS.values():
        drawings |= _draw_ladder(timelines.of(operation))
    return files(drawings)


def _draw_ladder(timelines: Recorded) -> dict[str, Drawing]:
    """All show as many clocks: those that the slowest one's tiles in the middle take."""
    records = timelines.records
    clocks = max(map(_clocks_shown, records.values()), default=0)
    return {
        name: draw_timeline(record, timelines.label(name), clocks)
        for name, record in records.items()
    }


def _clocks_shown(record: dict) -> int:
    starts, first = _starts(record)
    return starts[first + _events(record).shown] - starts[first]


def _starts(record: dict) -> tuple[list[int], int]:
    """When the first consumer starts S of each tile, and the tile whose start begins the window."""
    starts = record["clocks"]["consumer 0"]["start S"]
    return starts, (len(starts) - _events(record).shown) // 2


def _events(record: dict) -> TimelineEvents:
    return TIMELINE_EVENTS[operation_of(record["step"])]


def draw_timeline(record: dict, name: str, window_clocks: int) -> Drawing:
    """Rows for the producer, a group of rows for each consumer, one for the tensor cores."""
    look = LOOKS[operation_of(record["step"])]
    producer = record["clocks"]["producer"]
    consumers = {who: clocks for who, clocks in record["clocks"].items() if who != "producer"}
    starts, first = _starts(record)
    window = starts[first], starts[first] + window_clocks

    groups = 44 + HEADING + len(look.copies) * (ROW + GAP)  # of consumers, from here on
    group = HEADING + (1 + len(look.rows)) * (ROW + GAP)
    tensor = groups + group * len(consumers) + 10
    axis = tensor + ROW + 8
    drawing = Drawing(axis + 134 + NOTE * len(look.notes))
    period = median(later - earlier for earlier, later in pairwise(starts))
    title = f"{name}, one block on an {record['device']}: a tile every {period:.0f} clocks"
    drawing.text(18, 22, title, TITLE, bold=True)
    rows = _Rows(drawing, window, _numbers(record))

    drawing.text(18, 44 + HEADING / 2, "producer", bold=True)
    for n, (what, (use, color)) in enumerate(look.copies.items()):
        top = 44 + HEADING + n * (ROW + GAP)
        drawing.text(18, top + ROW / 2, f"copies {what}")
        used = map(min, zip(*(clocks[use] for clocks in consumers.values()), strict=True))
        intervals = list(zip(producer[f"load {what}"], used, strict=True))
        # The next copy may start before this one is used: two lines take turns.
        for line in range(2):
            rows.boxes(top + line * ROW / 2, ROW / 2, intervals, color, line, 2)

    for n, (who, clocks) in enumerate(consumers.items()):
        top = groups + n * group
        drawing.text(18, top + HEADING / 2, who, bold=True)
        for row, what in enumerate(("products", *look.rows)):
            drawing.text(18, top + HEADING + row * (ROW + GAP) + ROW / 2, what)
        top += HEADING
        for what, intervals in _products(clocks, look).items():
            rows.boxes(top, ROW, intervals, look.products[what])
        for row, spans in enumerate(look.rows.values(), 1):
            for span in spans:
                rows.boxes(top + row * (ROW + GAP), ROW, _intervals(clocks, span), span.color)
        for output in record["outputs"].get(who, ()):
            rows.box(top + ROW + GAP, ROW, (output["start"], output["end"]), OUTPUT_COLOR, "O")

    needed = clocks_a_product(record)
    started = [
        start
        for clocks in consumers.values()
        for what in look.products
        for start in clocks[f"start {what}"]
    ]
    drawing.text(18, tensor + ROW / 2, "tensor cores", bold=True)
    for interval in busy_times(started, needed):
        rows.box(tensor, ROW, interval, BUSY_COLOR, "")
    rows.axis(axis)
    _legend(drawing, axis + 46, look, needed)
    return drawing


def _numbers(record: dict) -> list[int]:
    """Each tile's number in its work tile: a record has as many, but may begin in the middle."""
    tiles = len(_starts(record)[0])
    outputs = record["outputs"].get("consumer 0")
    last = outputs[-1]["tile"] if outputs else tiles - 1
    return [(tile - last - 1) % tiles for tile in range(tiles)]


def clocks_a_product(record: dict) -> int:
    """What the tensor cores need for one product of a warpgroup and a tile: all take as long."""
    shape, tiles = record["shape"], len(_starts(record)[0])
    rows = -(-shape[_events(record).axis] // tiles)  # of K and V, or of Q and dO
    return 2 * WARPGROUP_ROWS * rows * shape["head_dim"] // TENSOR_FLOP


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


def _products(clocks: dict[str, list[int]], look: Look) -> dict[str, list[Interval]]:
    """Of each tile. A warpgroup's products follow one another."""
    started = sorted(
        (start, end, what)
        for what in look.products
        for start, end in zip(clocks[f"start {what}"], clocks[f"end {what}"], strict=True)
    )
    intervals: dict[str, list[Interval]] = {what: [] for what in look.products}
    done = started[0][0]
    for start, end, what in started:
        intervals[what].append((max(start, done), end))
        done = end
    return intervals


def _intervals(clocks: dict[str, list[int]], span: Span) -> list[Interval]:
    """Of each tile."""
    begins = map(max, zip(*(clocks[event] for event in span.begins), strict=True))
    return list(zip(begins, clocks[span.end], strict=True))


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
