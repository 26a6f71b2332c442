"""The diagrams of backward: its products, who owns what, three ways to dQ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from .svg import (
    ACCENT,
    BANK_COLORS,
    EMPTY,
    MUTED,
    NORMAL,
    SMALL,
    TINTS,
    TITLE,
    Drawing,
    Point,
    darker,
    text_width,
)

Q_COLOR, K_COLOR, V_COLOR, O_COLOR = TINTS
ROW_COLOR = BANK_COLORS[3]  # of lse and delta

# b03 and b04 at head_dim 128.
HEAD_DIM, DKV_QUERIES = 128, 64
BLOCK_M, BLOCK_N = 64, 128

# Three ways to dQ, in units of one product: blocks of keys, and as many tiles of queries.
BLOCKS = 4
ADD, ROUND = 0.8, 2
LATE = ((0.4, 0, 0.7, 0.1), (0, 0.6, 0, 1.1), (0.9, 0.1, 0, 0.5), (0.2, 0.1, 0.6, 0.1))
TIME_LEFT, UNIT = 78, 17  # pixels


def figures() -> dict[str, Drawing]:
    """The drawings by the names of their files."""
    return {
        "backward_dag": _backward_dag(),
        "backward_owners": _backward_owners(),
        "dq_three_ways": _dq_three_ways(),
    }


# ---- what is computed from what

OF_QUERIES, OF_KEYS, ROWS, SCORES = "seq_q, head_dim", "seq_k, head_dim", "seq_q", "seq_q, seq_k"


@dataclass(frozen=True)
class Quantity:
    """What it is computed from, how, and where it is drawn."""

    shape: str
    color: str
    left: float
    top: float
    width: float
    height: float
    formula: str = ""
    inputs: tuple[str, ...] = ()
    product: int = 0  # its number, of those on the tensor cores


GRAPH = {
    "Q": Quantity(OF_QUERIES, Q_COLOR, 18, 104, 112, 44),
    "K": Quantity(OF_KEYS, K_COLOR, 18, 156, 112, 44),
    "V": Quantity(OF_KEYS, V_COLOR, 18, 264, 112, 44),
    "dO": Quantity(OF_QUERIES, O_COLOR, 18, 316, 112, 44),
    "O": Quantity(OF_QUERIES, O_COLOR, 18, 412, 112, 44),
    "lse": Quantity(ROWS, ROW_COLOR, 404, 42, 88, 42),
    "S": Quantity(SCORES, EMPTY, 204, 104, 96, 96, "scale Q K^T", ("Q", "K"), 1),
    "P": Quantity(SCORES, EMPTY, 400, 104, 96, 96, "exp(S − lse)", ("S", "lse")),
    "dP": Quantity(SCORES, EMPTY, 204, 264, 96, 96, "dO V^T", ("dO", "V"), 2),
    "delta": Quantity(ROWS, ROW_COLOR, 392, 394, 112, 62, "rowsum(dO * O)", ("dO", "O")),
    "dS": Quantity(SCORES, EMPTY, 400, 264, 96, 96, "P * (dP − delta)", ("P", "dP", "delta")),
    "dV": Quantity(OF_KEYS, V_COLOR, 692, 121, 120, 62, "P^T dO", ("P", "dO"), 3),
    "dK": Quantity(OF_KEYS, K_COLOR, 692, 243, 120, 62, "scale dS^T Q", ("dS", "Q"), 4),
    "dQ": Quantity(OF_QUERIES, Q_COLOR, 692, 319, 120, 62, "scale dS K", ("dS", "K"), 5),
}
AGAIN = {("dO", "dV"): 144, ("Q", "dK"): 266, ("K", "dQ"): 366}  # y of inputs drawn a second time
AGAIN_LEFT, AGAIN_WIDTH = 592, 48


def arrows() -> dict[tuple[str, str], list[Point]]:
    """From a quantity to one that is computed from it."""

    def along(y: float, one: str, other: str) -> list[Point]:
        return [(GRAPH[one].left + GRAPH[one].width, y), (GRAPH[other].left, y)]

    found: dict[tuple[str, str], list[Point]] = {
        ("lse", "P"): [(448, 84), (448, 104)],
        ("P", "dS"): [(448, 200), (448, 264)],
        ("delta", "dS"): [(448, 394), (448, 360)],
        ("dO", "delta"): [(130, 350), (164, 350), (164, 410), (392, 410)],
    }
    for y, one, other in (
        (126, "Q", "S"),
        (178, "K", "S"),
        (152, "S", "P"),
        (286, "V", "dP"),
        (332, "dO", "dP"),
        (312, "dP", "dS"),
        (434, "O", "delta"),
        (170, "P", "dV"),
        (292, "dS", "dK"),
        (342, "dS", "dQ"),
    ):
        found[one, other] = along(y, one, other)
    for (one, other), y in AGAIN.items():
        found[one, other] = [(AGAIN_LEFT + AGAIN_WIDTH, y), (GRAPH[other].left, y)]
    return found


def _backward_dag() -> Drawing:
    """From Q, K, V, O, dO and lse to dQ, dK and dV."""
    drawing = Drawing(532)
    drawing.text(18, 22, "The five products of backward", TITLE, bold=True)
    drawing.text(18, 82, "in global memory", bold=True)
    drawing.text(204, 82, "only a tile at a time", bold=True)
    drawing.text(692, 82, "in global memory", bold=True)
    for path in arrows().values():
        drawing.curve(path, arrow=True)
    for name, one in GRAPH.items():
        drawing.box(one.left, one.top, one.width, one.height, one.color)
        middle = one.left + one.width / 2, one.top + one.height / 2
        lines = (name, one.formula, f"[{one.shape}]") if one.formula else (name, f"[{one.shape}]")
        for n, line in enumerate(lines):
            y = middle[1] + 18 * (n - (len(lines) - 1) / 2)
            size = SMALL if n else NORMAL
            drawing.text(middle[0], y, line, size, anchor="middle", bold=n == 0)
        if one.product:
            drawing.cell(one.left, one.top, 18, 17, ACCENT, f"{one.product}")
    for (name, _), y in AGAIN.items():
        drawing.cell(AGAIN_LEFT, y - 12, AGAIN_WIDTH, 24, GRAPH[name].color, name)
    drawing.notes(
        490,
        "Red: the products. Grey: matrices [seq_q, seq_k], of which a block has a tile at a time "
        "and global memory nothing.",
        "Yellow: one float a query, in global memory. Forward has left lse; delta is computed "
        "first, by a kernel of its own.",
    )
    return drawing


# ---- who owns what

SIDE, SCALE = 256, 0.4375  # queries and keys that are drawn; pixels of one
PANEL_WIDTH, TOP, BAR = 200, 134, 16  # of a panel; of S; how thick a matrix beside S is


@dataclass(frozen=True)
class Kernel:
    """Which part of S a block takes, and what it computes of it, at head_dim 128."""

    step: str
    name: str
    owns_queries: bool
    own: int  # queries or keys of a block
    tile: int  # of what it takes one after another
    products: tuple[str, ...]
    registers: str  # what stays there until the last tile
    adds_dq: bool = False


KERNELS = (
    Kernel("v07", "attention_forward", True, 128, 64, ("S", "O"), "O, m, l"),
    Kernel("b03", "attention_dq", True, 128, 32, ("S", "dP", "dQ"), "dQ"),
    Kernel("b03", "attention_dk_dv", False, 64, DKV_QUERIES, ("S", "dV", "dP", "dK"), "dK, dV"),
    Kernel(
        "b04",
        "attention_backward",
        False,
        BLOCK_N,
        BLOCK_M,
        ("S", "dP", "dV", "dK", "dQ"),
        "dK, dV",
        adds_dq=True,
    ),
)


def _backward_owners() -> Drawing:
    """S as in forward, in rows of tiles, and in columns of tiles."""
    drawing = Drawing(432)
    title = f"Who owns what of S [{SIDE} queries, {SIDE} keys], at head_dim {HEAD_DIM}"
    drawing.text(18, 22, title, TITLE, bold=True)
    for n, kernel in enumerate(KERNELS):
        _owner(drawing, 18 + PANEL_WIDTH * n, kernel)
    drawing.notes(
        392,
        "A color is one block's, and numbers are the order in which the block takes its tiles. "
        "Above S and at its left are the inputs, below",
        "and at its right the outputs; grey inputs are read by every block. The narrow bar beside "
        "Q, dO is lse, delta.",
    )
    return drawing


def _owner(drawing: Drawing, left: float, kernel: Kernel) -> None:
    """One kernel's S with its inputs and outputs beside it."""
    owned, others = "queries", "keys"
    if not kernel.owns_queries:
        owned, others = others, owned
    drawing.text(left, 52, f"{kernel.step}: {kernel.name}", bold=True)
    drawing.text(left, 72, f"a block owns {kernel.own} {owned}", color=MUTED)

    x, size = left + 40, SIDE * SCALE
    own, tile = kernel.own * SCALE, kernel.tile * SCALE
    blocks, tiles = range(SIDE // kernel.own), range(SIDE // kernel.tile)
    for block, n in product(blocks, tiles):
        if kernel.owns_queries:
            place = x + n * tile, TOP + block * own, tile, own
        else:
            place = x + block * own, TOP + n * tile, own, tile
        drawing.cell(*place, TINTS[block], f"{n}")

    owners, readers = [TINTS[block] for block in blocks], [EMPTY for _ in tiles]
    right, below = x + size + 12, TOP + size + 8
    _across(drawing, x, TOP - BAR - 8, readers if kernel.owns_queries else owners)
    drawing.text(x + size / 2, TOP - BAR - 18, "K, V", SMALL, anchor="middle")
    of_queries = owners if kernel.owns_queries else readers
    _down(drawing, left, BAR, of_queries)
    backward = "O" not in kernel.products
    drawing.text(left, TOP - 10, "Q, dO" if backward else "Q", SMALL)
    if backward:
        _down(drawing, left + BAR, 6, of_queries)
    if kernel.owns_queries:
        _down(drawing, right, BAR, owners)
        drawing.text(right, TOP - 10, "dQ" if backward else "O", SMALL)
    else:
        _across(drawing, x, below, owners)
        drawing.text(x + size / 2, below + BAR + 10, "dK, dV", SMALL, anchor="middle")
    if kernel.adds_dq:
        for block, color in enumerate(owners):
            width = BAR / len(owners)
            _down(drawing, right + block * width, width, [color for _ in tiles])
        for n in tiles:
            y = TOP + (n + 0.5) * tile
            drawing.line(right - 11, y, right - 1, y, arrow=True)
        drawing.text(right, TOP - 10, "dQ", SMALL)

    lines = [
        f"takes {kernel.tile} {others} at a time",
        f"{len(kernel.products)} products: {', '.join(kernel.products)}",
        f"in registers to the end: {kernel.registers}",
    ]
    if kernel.adds_dq:
        lines.append("after each tile, added up: dQ")
    for n, line in enumerate(lines):
        drawing.text(left, TOP + size + 56 + 18 * n, line)


def _across(drawing: Drawing, x: float, y: float, colors: Sequence[str]) -> None:
    """A matrix with a row for each key, beside S: its parts side by side."""
    width = SIDE * SCALE / len(colors)
    for n, color in enumerate(colors):
        drawing.box(x + n * width, y, width, BAR, color)


def _down(drawing: Drawing, x: float, width: float, colors: Sequence[str]) -> None:
    """A matrix with a row for each query, beside S: its parts below each other."""
    height = SIDE * SCALE / len(colors)
    for n, color in enumerate(colors):
        drawing.box(x, TOP + n * height, width, height, color)


# ---- three ways to dQ


@dataclass(frozen=True)
class Work:
    """What a block does from one time to another: to a tile, of queries unless of keys."""

    what: str  # "dq", "dk_dv", "both", "wait", "add" or "round"
    block: int
    tile: int
    start: float
    end: float


def by_owners() -> list[Work]:
    """b03: a block of queries adds up its dQ over the keys; then a block of keys, dK and dV."""
    done = []
    for block, late in enumerate(LATE):
        time = 0.0
        for tile in range(BLOCKS):
            start = time + late[tile]
            time = start + 3
            done.append(Work("dq", block, tile, start, time))
    begin = max(work.end for work in done)
    for block, tile in product(range(BLOCKS), repeat=2):
        start = begin + 4 * tile
        done.append(Work("dk_dv", block, tile, start, start + 4))
    return done


def by_reductions(*, in_order: bool) -> list[Work]:
    """A block of keys adds to each tile of dQ: as soon as it can, or after the block before it."""
    done: list[Work] = []
    added: dict[tuple[int, int], float] = {}  # when, by block and tile
    for block, late in enumerate(LATE):
        time = 0.0
        for tile in range(BLOCKS):
            start = time + late[tile]
            ready = start + 5
            done.append(Work("both", block, tile, start, ready))
            turn = max(ready, added.get((block - 1, tile), 0.0)) if in_order else ready
            if turn > ready:
                done.append(Work("wait", block, tile, ready, turn))
            time = added[block, tile] = turn + ADD
            done.append(Work("add", block, tile, turn, time))
    end = max(added.values())
    done += [Work("round", block, block, end, end + ROUND) for block in range(BLOCKS)]
    return done


def terms(done: Sequence[Work]) -> list[list[int]]:
    """Of each tile of dQ, the blocks of keys in the order in which their terms are added."""
    found: list[list[int]] = [[] for _ in range(BLOCKS)]
    for work in sorted(done, key=lambda one: one.start):
        if work.what == "dq":
            found[work.block].append(work.tile)
        elif work.what == "add":
            found[work.tile].append(work.block)
    return found


def _dq_three_ways() -> Drawing:
    """Who adds what when, in one run."""
    drawing = Drawing(594)
    title = f"dQ in three ways: {BLOCKS} blocks of keys, {BLOCKS} tiles of queries"
    drawing.text(18, 22, title, TITLE, bold=True)
    drawing.text(634, 22, "terms of dQ, first to last", bold=True)
    same, other = "the same bits in every run", "other bits in another run"
    for y, name, done, bits in (
        (54, "A kernel of its own, as in b03: 7 products", by_owners(), same),
        (
            220,
            "Reductions in any order, as in b04: 5 products",
            by_reductions(in_order=False),
            other,
        ),
        (
            386,
            "Reductions in a fixed order, as in FlashAttention-3's deterministic mode: 5 products",
            by_reductions(in_order=True),
            same,
        ),
    ):
        drawing.text(634, y + 22, bits, SMALL, MUTED)
        drawing.text(18, y, name, bold=True)
        _kernels_of(drawing, y + 22, done)
        for block in range(BLOCKS):
            drawing.text(18, y + 45 + 24 * block, f"block {block}")
        for work in done:
            _span(drawing, y + 34 + 24 * work.block, work)
        for tile, blocks in enumerate(terms(done)):
            top = y + 34 + 24 * tile
            drawing.text(634, top + 11, f"dQ {tile}")
            for n, block in enumerate(blocks):
                drawing.cell(676 + 34 * n, top, 34, 22, TINTS[block], f"{block}")
    drawing.notes(
        552,
        "Color: the block of keys that a term of dQ comes from. + adds it, in fp32, in global "
        "memory; in b03 terms meet in registers.",
        "Schematic: a product is one unit of time. Gaps are delays, the same in all three; grey "
        "is to wait for one's turn, or to round dQ.",
    )
    return drawing


def _kernels_of(drawing: Drawing, y: float, done: Sequence[Work]) -> None:
    """The name of each kernel above the place where it begins."""
    names = {
        "dq": "attention_dq: block n owns queries n",
        "dk_dv": "attention_dk_dv: block n owns keys n",
        "both": "attention_backward: block n owns keys n",
    }
    for what, name in names.items():
        starts = [work.start for work in done if work.what == what]
        if starts:
            drawing.text(TIME_LEFT + min(starts) * UNIT, y, name, SMALL, MUTED)


def _span(drawing: Drawing, y: float, work: Work) -> None:
    x, width = TIME_LEFT + work.start * UNIT, (work.end - work.start) * UNIT
    color, text = {
        "dq": (TINTS[work.tile], f"keys {work.tile}"),
        "dk_dv": (TINTS[work.block], f"queries {work.tile}"),
        "both": (TINTS[work.block], f"queries {work.tile}"),
        "wait": (EMPTY, "wait"),
        "add": (darker(TINTS[work.block]), "+"),
        "round": (EMPTY, "round"),
    }[work.what]
    text = text if text_width(text, SMALL) < width else ""
    drawing.cell(x, y, width, 22, color, text)
