"""The diagram of two consumers of backward: in step, as in b06, and in turn, as in b08."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .svg import EMPTY, RAMP, SMALL, TINTS, TITLE, Drawing, text_width

# Time, in products of one consumer.
PRODUCTS = 5  # of a tile
P, DS, STORE = 2.0, 1.6, 0.8
TILES, SHOWN = 3, 23.2

LEFT, UNIT, ROW = 116, 30, 22  # pixels: where time begins, one unit of it, and a row's height
BUSY_COLORS = RAMP[1], RAMP[3]


@dataclass(frozen=True)
class Span:
    """What a consumer does for a tile, from one time to another."""

    what: str
    tile: int
    start: float
    end: float


@dataclass(frozen=True)
class Consumer:
    """What it does besides products: P, dS and the store of dQ."""

    products: list[Span]
    others: list[Span]


@dataclass(frozen=True)
class Panel:
    """Where the rows of a schedule are: from above, others and products of consumer 0, the tensor
    cores, products and others of consumer 1.
    """

    top: float

    @property
    def others(self) -> tuple[float, float]:
        return self.top, self.top + 132

    @property
    def products(self) -> tuple[float, float]:
        return self.top + 26, self.top + 106

    @property
    def tensor(self) -> float:
        return self.top + 66


def figures() -> dict[str, Drawing]:
    """The drawings by the names of their files."""
    return {"backward_turns": _backward_turns()}


def in_step() -> list[Consumer]:
    """b06: both have the same products at the same time, each of which takes twice as long."""
    products, others = [], []
    start = 0.0
    for tile in range(TILES):
        s, dp = _in_a_row(("S", "dP"), (tile, tile), start, 2)
        p, ds = _elementwise(s, dp)
        dv, dq, dk = _in_a_row(("dV", "dQ", "dK"), (tile, tile, tile), ds.end, 2)
        products += [s, dp, dv, dq, dk]
        others += [p, ds, _store(dq)]
        start = dk.end
    return [Consumer(products, others), Consumer(products, others)]


def in_turn() -> list[Consumer]:
    """b08: a turn has dV and dK of a tile, dQ of the one before, S and dP of the next."""
    consumers = []
    for late in (0, PRODUCTS):
        products, others = [], []
        for tile in range(TILES + 1):
            start = 2 * PRODUCTS * (tile - 1) + late
            tiles = (tile, tile - 1, tile, tile + 1, tile + 1)
            turn = _in_a_row(("dV", "dQ", "dK", "S", "dP"), tiles, start, 1)
            _, dq, _, s, dp = turn
            products += turn
            others += [_store(dq), *_elementwise(s, dp)]
        consumers.append(Consumer(products, others))
    return consumers


def _in_a_row(names: Sequence[str], tiles: Sequence[int], start: float, each: float) -> list[Span]:
    """Products one after another."""
    return [
        Span(name, tile, start + n * each, start + (n + 1) * each)
        for n, (name, tile) in enumerate(zip(names, tiles, strict=True))
    ]


def _elementwise(s: Span, dp: Span) -> tuple[Span, Span]:
    """P as soon as S is there, dS as soon as dP is, too."""
    p = Span("P", s.tile, s.end, s.end + P)
    start = max(p.end, dp.end)
    return p, Span("dS", s.tile, start, start + DS)


def _store(dq: Span) -> Span:
    return Span("dQ", dq.tile, dq.end, dq.end + STORE)


def _backward_turns() -> Drawing:
    """Both schedules, one above the other."""
    drawing = Drawing(476)
    title = "Two consumers: in step, or one multiplies while the other computes P and dS"
    drawing.text(18, 22, title, TITLE, bold=True)
    b06, b08 = Panel(66), Panel(256)
    drawing.text(18, b06.top - 14, "b06: both wait for dS of each tile", bold=True)
    _consumers(drawing, b06, in_step())
    _barriers(drawing, b06)
    drawing.text(18, b08.top - 14, "b08: in turn, with dQ of the tile before", bold=True)
    _consumers(drawing, b08, in_turn())
    _turns(drawing, b08)
    drawing.notes(
        b08.top + 178,
        "Color and number: the tile. Inside are a consumer's products, outside P, dS and the store "
        "of dQ. Dashed: dS is there from both.",
        "Schematic: a product takes twice as long where both multiply. As long as P and dS take "
        "less than a turn, the tensor cores are busy.",
    )
    return drawing


def _consumers(drawing: Drawing, panel: Panel, consumers: Sequence[Consumer]) -> None:
    """What they do, and what of that the tensor cores do."""
    drawing.text(18, panel.tensor + ROW / 2, "tensor cores", bold=True)
    drawing.box(LEFT, panel.tensor, SHOWN * UNIT, ROW, EMPTY)
    for n, consumer in enumerate(consumers):
        rows = panel.others[n], panel.products[n]
        drawing.text(18, (sum(rows) + ROW) / 2, f"consumer {n}", bold=True)
        for y, spans in zip(rows, (consumer.others, consumer.products), strict=True):
            for span in spans:
                text = f"{span.what} {span.tile}"
                _box(drawing, y, ROW, span.start, span.end, TINTS[span.tile % len(TINTS)], text)
        for span in consumer.products:
            height = ROW / (span.end - span.start)
            y = panel.tensor + n * (ROW - height)
            _box(drawing, y, height, span.start, span.end, BUSY_COLORS[n], "")


def _box(
    drawing: Drawing, y: float, height: float, start: float, end: float, color: str, text: str
) -> None:
    """As far as it is shown."""
    start, end = max(start, 0), min(end, SHOWN)
    if start < end:
        width = (end - start) * UNIT
        text = text if text_width(text, SMALL) < width else ""
        drawing.cell(LEFT + start * UNIT, y, width, height, color, text)


def _barriers(drawing: Drawing, panel: Panel) -> None:
    """Where b06's consumers wait for each other, and the tensor cores for both."""
    for span in in_step()[0].others:
        if span.what == "dS" and span.end < SHOWN:
            x = LEFT + span.end * UNIT
            drawing.line(x, panel.top - 6, x, panel.others[1] + ROW + 6, dashed=True)
            middle = LEFT + (span.start + span.end) / 2 * UNIT
            drawing.text(middle, panel.tensor + ROW / 2, "idle", SMALL, anchor="middle")


def _turns(drawing: Drawing, panel: Panel) -> None:
    """Where a consumer of b08 hands the tensor cores to the other."""
    ends = panel.products[0] + ROW + 3, panel.products[1] - 3
    for n, time in enumerate(range(PRODUCTS, int(SHOWN) + 1, PRODUCTS)):
        x = LEFT + time * UNIT
        drawing.line(x, ends[n % 2], x, ends[1 - n % 2], arrow=True)
        drawing.text(x + 5, ends[n % 2] + (7 if n % 2 == 0 else -7), "turn", SMALL)
