"""What a recorded timeline says of a block's pipeline: who does what, when, and what it waits for.

The diagrams draw some tiles of it, the page plays it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
START, END = "start", "end"
OWN, EACH, TURN = "own", "each", "turn"  # of consumers: the waiting one, all, the one before it

Interval = tuple[int, int]  # clocks


@dataclass(frozen=True)
class Box:
    """Something that takes from one clock to another."""

    what: str
    tile: int | None  # its number in its work tile
    start: int
    end: int
    color: str
    queued: int = 0  # clocks before the start at which a product was issued, behind another one

    @property
    def issued(self) -> int:
        return self.start - self.queued


@dataclass(frozen=True)
class Need:
    """What the boxes of a kind wait for: that others have been issued, or have ended."""

    why: str
    row: int
    what: str
    back: int  # tiles
    event: str  # START or END


@dataclass(frozen=True)
class Row:
    """What one of the block's parts does of one kind."""

    who: str
    title: str
    boxes: tuple[Box, ...]
    needs: Mapping[str, tuple[Need, ...]]  # by what waits
    in_order: bool = False  # its boxes follow one another, in the order of their issue


@dataclass(frozen=True)
class Met:
    """What met a need of one box: the event of another box, in its row."""

    why: str
    row: int
    box: Box
    event: str  # START or END

    @property
    def clock(self) -> int:
        return self.box.issued if self.event == START else self.box.end


@dataclass(frozen=True)
class Pipeline:
    rows: tuple[Row, ...]
    window: Interval  # some tiles in the middle
    period: float  # clocks a tile
    clocks_a_product: int
    tiles: int  # that were recorded
    first_tile: int  # the first one's number in its work tile

    def needs_of(self, row: int, box: Box) -> list[Met]:
        """What a row's box waited for, as far as it was recorded, the last first."""
        needs = self.rows[row].needs.get(box.what, ())
        found = [met for need in needs if (met := self._meet(need, box)) is not None]
        if self.rows[row].in_order:
            in_order = self._in_order[row]
            place = in_order.index(box)
            if place > 0:
                event = END if box.queued else START
                found.append(Met(ORDER, row, in_order[place - 1], event))
        return sorted(found, key=lambda met: -met.clock)

    def contradicts(self, row: int, what: str, need: Need) -> bool:
        """Whether a box of that kind did not wait.

        A copy waits before it starts. Others may wait after: a clock may be read before bar.sync
        holds the warp.
        """
        copies = self.rows[row].who == PRODUCER
        return any(
            met.clock > (box.start if copies else box.end)
            for box in self._boxes.get((row, what), {}).values()
            if (met := self._meet(need, box)) is not None
        )

    def _meet(self, need: Need, box: Box) -> Met | None:
        boxes = self._boxes.get((need.row, need.what), {})
        other = None if box.tile is None else boxes.get(self._index(box) - need.back)
        return other and Met(need.why, need.row, other, need.event)

    def _index(self, box: Box) -> int:
        """Of its tile in the record."""
        return (box.tile - self.first_tile) % self.tiles

    @cached_property
    def _in_order(self) -> list[list[Box]]:
        """Of each row, by time."""
        return [sorted(row.boxes, key=lambda box: box.start) for row in self.rows]

    @cached_property
    def _boxes(self) -> dict[tuple[int, str], dict[int, Box]]:
        """By row and kind, then by tile."""
        boxes: dict[tuple[int, str], dict[int, Box]] = {}
        for r, row in enumerate(self.rows):
            for box in row.boxes:
                if box.tile is not None:
                    boxes.setdefault((r, box.what), {})[self._index(box)] = box
        return boxes


@dataclass(frozen=True)
class Rule:
    """That boxes of a kind wait for others, in a step that has such a barrier."""

    why: str
    what: str
    on: str
    event: str
    whose: str = OWN  # the other box, if it is a consumer's
    # Tiles; TURN: one more for the first consumer, as a round begins with it. A tile's place in
    # shared memory is that of the tile so many before: as few as no sample contradicts.
    back: int | None = 0


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
    rules: tuple[Rule, ...]
    legend: tuple[tuple[str, str, int], ...]  # color, text and width
    notes: tuple[str, ...] = ()


_STORED, _ADDED = "dQ to shared memory", "dQ added"

_PLACE = "a free place in shared memory, by an empty barrier"
_THREAD = "the one thread that starts copies"
_ARRIVED = "the copy, by a full barrier; its arrival has no sample"
_TURN = "its turn, by a named barrier"
_DONE = "the product, by wgmma.wait_group"
_SAME = "what the same threads do before"
ORDER = "the product before, as a warpgroup's products follow one another"


def _forward() -> Look:
    k_color, softmax_color, v_color, _ = TINTS
    k_copy, v_copy = COPY.format("K"), COPY.format("V")
    return Look(
        copies={"K": ("start S", k_color), "V": ("start PV", v_color)},
        products={"S": k_color, "PV": v_color},
        rows={"softmax": (Span("softmax", ("end S",), "end softmax", softmax_color),)},
        rules=(
            Rule(_PLACE, k_copy, "S", END, EACH, None),
            Rule(_THREAD, k_copy, v_copy, START, back=2),
            Rule(_PLACE, v_copy, "PV", END, EACH, None),
            Rule(_THREAD, v_copy, k_copy, START, back=-1),
            Rule(_ARRIVED, "S", k_copy, START),
            # In its turn a consumer starts S of a tile and PV of the one before.
            Rule(_TURN, "S", "S", START, TURN),
            Rule(_TURN, "S", "PV", START, TURN, 1),
            Rule(_SAME, "S", "softmax", END, back=1),
            Rule(_SAME, "S", "PV", END, back=2),
            Rule(_DONE, "softmax", "S", END),
            Rule(_ARRIVED, "PV", v_copy, START),
            Rule(_TURN, "PV", "S", START, TURN, -1),
            Rule(_TURN, "PV", "PV", START, TURN),
            Rule(_SAME, "PV", "softmax", END),
            Rule(_SAME, "PV", "PV", END, back=1),
            Rule(_DONE, OUTPUT, "PV", END),
        ),
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
    q_copy, dout_copy = COPY.format("Q"), COPY.format("dO")
    return Look(
        copies={"Q": ("start S", q_color), "dO": ("start dP", dout_color)},
        products={"S": q_color, "dP": dout_color, "dV": v_color, "dK": k_color, "dQ": dq_color},
        rows={
            "P, dS, dQ": (
                Span("P", ("end S", "start dP"), "end P", p_color),
                Span("dS", ("end P", "end dP"), "end dS", ds_color),
                Span(_STORED, ("end dQ",), "dQ stored", dq_color),
            ),
            "adds dQ": (Span(_ADDED, ("dQ full",), "dQ read", dq_color),),
        },
        rules=(
            Rule(_PLACE, q_copy, "dK", END, EACH, None),
            Rule(_THREAD, q_copy, dout_copy, START, back=1),
            Rule(_PLACE, dout_copy, "dV", END, EACH, None),
            Rule(_THREAD, dout_copy, q_copy, START),
            Rule(_ARRIVED, "S", q_copy, START),
            Rule(_SAME, "S", "dK", END, back=1),
            Rule(_ARRIVED, "dP", dout_copy, START),
            Rule(_DONE, "P", "S", END),
            Rule(_SAME, "P", "dP", START),
            Rule(_SAME, "dS", "P", END),
            Rule(_DONE, "dS", "dP", END),
            Rule(_SAME, "dV", "dS", END),
            # A turn is over once S and dP of the next tile have been started.
            Rule(_TURN, "dV", "dP", START, TURN, -1),
            Rule("dS of all the block's keys, by a barrier", "dQ", "dS", END, EACH),
            Rule(_SAME, "dK", "dS", END),
            Rule(_DONE, _STORED, "dQ", END),
            Rule("the free place of dQ, by a named barrier", _STORED, _ADDED, END, back=1),
            Rule("dQ in shared memory, by a named barrier", _ADDED, _STORED, END),
        ),
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
    rows.append(Row(TENSOR_CORES, "", busy, {}))
    pipeline = Pipeline(
        rows=tuple(rows),
        window=(starts[first], starts[first + _events(record).shown]),
        period=median(later - earlier for earlier, later in pairwise(starts)),
        clocks_a_product=needed,
        tiles=len(starts),
        first_tile=_numbers(record)[0],
    )
    return _with_needs(pipeline, look.rules)


def _with_needs(pipeline: Pipeline, rules: Sequence[Rule]) -> Pipeline:
    """The same, with what its rows wait for: a step has no wait that a sample contradicts."""

    def hold(needs: Iterator[tuple[int, str, Need]]) -> bool:
        return not any(pipeline.contradicts(*each) for each in needs)

    kept: list[Rule] = []
    for rule in rules:
        if rule.back is None:
            places = (replace(rule, back=back) for back in range(1, pipeline.tiles))
            kept += [place for place in places if hold(_needs_of(pipeline, place))][:1]
        elif hold(_needs_of(pipeline, rule)):
            kept.append(rule)
    found = [each for rule in kept for each in _needs_of(pipeline, rule)]
    rows = [
        replace(
            row,
            needs={
                what: tuple(need for at, of, need in found if (at, of) == (r, what))
                for what in dict.fromkeys(of for at, of, _ in found if at == r)
            },
        )
        for r, row in enumerate(pipeline.rows)
    ]
    return replace(pipeline, rows=tuple(rows))


def _needs_of(pipeline: Pipeline, rule: Rule) -> Iterator[tuple[int, str, Need]]:
    """Row, what waits there, and the need, of each row that has boxes of the rule's kind."""
    rows = {(row.who, box.what): r for r, row in enumerate(pipeline.rows) for box in row.boxes}
    consumers = [who for who, what in rows if what == rule.on and who != PRODUCER]
    for (who, what), r in rows.items():
        if what != rule.what:
            continue
        if (PRODUCER, rule.on) in rows:
            others = [(PRODUCER, rule.back)]
        elif rule.whose == EACH:
            others = [(consumer, rule.back) for consumer in consumers]
        elif rule.whose == TURN:
            place = consumers.index(who)
            others = [(consumers[place - 1], rule.back + (place == 0))]
        else:
            others = [(who, rule.back)]
        for other, back in others:
            yield r, what, Need(rule.why, rows[other, rule.on], rule.on, back, rule.event)


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
        rows.append(Row(PRODUCER, f"copies {what}", boxes, {}))
    return rows


def _consumer_rows(
    who: str,
    clocks: dict[str, list[int]],
    outputs: Sequence[dict],
    look: Look,
    numbers: list[int],
) -> list[Row]:
    products = [
        replace(box, queued=box.start - issued)
        for what, intervals in _products(clocks, look).items()
        for issued, box in zip(
            clocks[f"start {what}"],
            _boxes(what, intervals, look.products[what], numbers),
            strict=True,
        )
    ]
    rows = [Row(who, "products", tuple(products), {}, in_order=True)]
    for title, spans in look.rows.items():
        boxes = [
            box
            for span in spans
            for box in _boxes(span.what, _intervals(clocks, span), span.color, numbers)
        ]
        rows.append(Row(who, title, tuple(boxes), {}))
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
