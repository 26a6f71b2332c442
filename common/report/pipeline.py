"""What a recorded timeline says of a block's pipeline: who does what, when, and after what.

The diagrams draw some tiles of it, the page plays it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from ..operation import BACKWARD, FORWARD, operation_of
from ..timeline_events import TIMELINE_EVENTS, TimelineEvents
from .diagrams.svg import BANK_COLORS, RAMP, TINTS

WARPGROUP_ROWS = 64
TENSOR_FLOP = 4096  # of bf16 or fp16 on Hopper, per SM and clock
OUTPUT_COLOR = TINTS[3]  # of O: only forward samples its output
BUSY_COLOR = RAMP[3]
PRODUCER, TENSOR_CORES = "producer", "tensor cores"  # beside the consumers
OUTPUT, COPY = "O to memory", "copy of {}"

Interval = tuple[int, int]  # clocks


@dataclass(frozen=True)
class Box:
    """Something that takes from one clock to another."""

    what: str
    tile: int | None  # its number in its work tile
    start: int
    end: int
    color: str
    # The row and the place in it of the box that ended last, of those that this one comes after.
    after: tuple[int, int] | None = None


@dataclass(frozen=True)
class Row:
    """What one of the block's parts does of one kind."""

    who: str
    title: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Pipeline:
    rows: tuple[Row, ...]
    window: Interval  # some tiles in the middle
    period: float  # clocks a tile
    clocks_a_product: int


@dataclass(frozen=True)
class Span:
    """What takes from the last of some events to another one, in boxes of one color."""

    what: str
    begins: tuple[str, ...]
    end: str
    color: str


@dataclass(frozen=True)
class Look:
    """What the rows of a ladder's timelines show of its events."""

    copies: Mapping[str, tuple[str, str]]  # by tensor: the event of its use, the color
    products: Mapping[str, str]  # colors by name
    rows: Mapping[str, tuple[Span, ...]]  # below a consumer's products, by title
    # What comes after what of the same tile and consumer. A product comes after the one before too.
    after: Mapping[str, tuple[str, ...]]
    legend: tuple[tuple[str, str, int], ...]  # color, text and width
    notes: tuple[str, ...] = ()


_STORED = "dQ to shared memory"


def _forward() -> Look:
    k_color, softmax_color, v_color, _ = TINTS
    return Look(
        copies={"K": ("start S", k_color), "V": ("start PV", v_color)},
        products={"S": k_color, "PV": v_color},
        rows={"softmax": (Span("softmax", ("end S",), "end softmax", softmax_color),)},
        after={"softmax": ("S",), "PV": ("softmax",), OUTPUT: ("PV",)},
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
                Span("P", ("end S", "start dP"), "end P", p_color),
                Span("dS", ("end P", "end dP"), "end dS", ds_color),
                Span(_STORED, ("end dQ",), "dQ stored", dq_color),
            ),
            "adds dQ": (Span("dQ added", ("dQ full",), "dQ read", dq_color),),
        },
        after={
            **{"P": ("S",), "dS": ("P", "dP"), "dV": ("P",), "dK": ("dS",), "dQ": ("dS",)},
            _STORED: ("dQ",),
            "dQ added": (_STORED,),
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


def derive(record: dict) -> Pipeline:
    """The rows from above: the producer, each consumer, the tensor cores."""
    look = LOOKS[operation_of(record["step"])]
    starts, first = _starts(record)
    rows = [*_copies(record, look)]
    for who, clocks in _consumers(record).items():
        rows += _consumer_rows(who, clocks, record["outputs"].get(who, ()), look, _numbers(record))
    needed = clocks_a_product(record)
    started = [
        start
        for clocks in _consumers(record).values()
        for what in look.products
        for start in clocks[f"start {what}"]
    ]
    busy = tuple(Box("busy", None, *each, BUSY_COLOR) for each in busy_times(started, needed))
    rows.append(Row(TENSOR_CORES, "", busy))
    return Pipeline(
        tuple(_with_predecessors(rows, look)),
        (starts[first], starts[first + _events(record).shown]),
        median(later - earlier for earlier, later in pairwise(starts)),
        needed,
    )


def _consumers(record: dict) -> dict[str, dict[str, list[int]]]:
    return {who: clocks for who, clocks in record["clocks"].items() if who != PRODUCER}


def _copies(record: dict, look: Look) -> list[Row]:
    """From the start to the first use."""
    numbers, producer = _numbers(record), record["clocks"][PRODUCER]
    rows = []
    for what, (use, color) in look.copies.items():
        used = map(min, zip(*(c[use] for c in _consumers(record).values()), strict=True))
        intervals = list(zip(producer[f"load {what}"], used, strict=True))
        boxes = _boxes(COPY.format(what), intervals, color, numbers)
        rows.append(Row(PRODUCER, f"copies {what}", boxes))
    return rows


def _consumer_rows(
    who: str,
    clocks: dict[str, list[int]],
    outputs: Sequence[dict],
    look: Look,
    numbers: list[int],
) -> list[Row]:
    products = [
        box
        for what, intervals in _products(clocks, look).items()
        for box in _boxes(what, intervals, look.products[what], numbers)
    ]
    rows = [Row(who, "products", tuple(products))]
    for title, spans in look.rows.items():
        boxes = [
            box
            for span in spans
            for box in _boxes(span.what, _intervals(clocks, span), span.color, numbers)
        ]
        rows.append(Row(who, title, tuple(boxes)))
    written = tuple(
        Box(OUTPUT, numbers[each["tile"]], each["start"], each["end"], OUTPUT_COLOR)
        for each in outputs
    )
    rows[1] = replace(rows[1], boxes=rows[1].boxes + written)
    return rows


def _boxes(what: str, intervals: list[Interval], color: str, numbers: list[int]) -> tuple[Box, ...]:
    return tuple(
        Box(what, number, *interval, color)
        for number, interval in zip(numbers, intervals, strict=True)
    )


def _with_predecessors(rows: Sequence[Row], look: Look) -> list[Row]:
    """The same rows, whose boxes say what they come after."""
    ended: dict[tuple[str, str], list[tuple[int, int, int]]] = {}  # in time's order
    for r, row in enumerate(rows):
        for b, box in enumerate(row.boxes):
            ended.setdefault((row.who, box.what), []).append((box.end, r, b))
    for each in ended.values():
        each.sort()

    def after(who: str, box: Box) -> tuple[int, int] | None:
        kinds = look.after.get(box.what, ())
        if box.what in look.products:
            kinds = (*kinds, *look.products)
        last = (0, 0, 0)
        for kind in kinds:
            of_kind = ended[who, kind]
            if count := bisect_right(of_kind, box.start, key=lambda each: each[0]):
                last = max(last, of_kind[count - 1])
        return last[1:] if last[0] else None

    return [
        replace(
            row,
            boxes=tuple(replace(box, after=after(row.who, box)) for box in row.boxes),
        )
        for row in rows
    ]


def _starts(record: dict) -> tuple[list[int], int]:
    """When the first consumer starts S of each tile, and the tile whose start begins the window."""
    starts = record["clocks"]["consumer 0"]["start S"]
    return starts, (len(starts) - _events(record).shown) // 2


def _events(record: dict) -> TimelineEvents:
    return TIMELINE_EVENTS[operation_of(record["step"])]


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
