"""The diagrams of backward: its products, who owns what, three ways to dQ, a block's warps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from .fragments import a_fragment, d_fragment
from .svg import (
    ACCENT,
    BANK_COLORS,
    EMPTY,
    INK,
    LANE,
    MUTED,
    NONE,
    NORMAL,
    SMALL,
    TINTS,
    TITLE,
    Drawing,
    Matrix,
    Point,
    darker,
    lane_color,
    text_width,
)

Q_COLOR, K_COLOR, V_COLOR, O_COLOR = TINTS
ROW_COLOR = BANK_COLORS[3]  # of lse and delta

# b03 and b04 at head_dim 128.
HEAD_DIM, DKV_QUERIES = 128, 64
BLOCK_M, BLOCK_N, NUM_WARPS, FRAGS = 64, 128, 8, 2
WARP_QUERIES, DKV_SPACING, DQ_SPACING = BLOCK_M // 2, 32, 64
WARP = 5  # the warp whose operands are shown

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
        "backward_fragments": _backward_fragments(),
        "backward_warps": _backward_warps(),
    }


def _notes(drawing: Drawing, y: float, *notes: str) -> None:
    for n, note in enumerate(notes):
        drawing.text(18, y + 20 * n, note, color=MUTED)


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
    _notes(
        drawing,
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
    _notes(
        drawing,
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
    _notes(
        drawing,
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


# ---- b03's fragments


def _backward_fragments() -> Drawing:
    """A warp's registers from S^T to dS^T, and two accumulators as an operand."""
    drawing = Drawing(776)
    title = f"attention_dk_dv of b03: a warp's accumulators [16 keys, {DKV_QUERIES} queries]"
    drawing.text(18, 22, title, TITLE, bold=True)
    _chain(drawing)
    _transposed_operand(drawing, 318)
    return drawing


def _chain(drawing: Drawing) -> None:
    """What s_acc and dp_acc hold one after another."""
    s, p, ds = (112, 140), (336, 168), (612, 200)  # left, width
    product_y, s_y, dp_y, height = 50, 122, 192, 30
    for y, name in ((product_y, "products"), (s_y, "s_acc[0]"), (dp_y, "dp_acc[0]")):
        drawing.text(18, y + height / 2, name, bold=True)
    drawing.cell(*_at(s, s_y), height, EMPTY, "S^T = K Q^T")
    drawing.cell(*_at(p, s_y), height, EMPTY, "P^T = 2^(S^T − lse)")
    drawing.cell(*_at(ds, s_y), height, EMPTY, "dS^T = P^T * (dP^T − delta)")
    drawing.cell(*_at(p, dp_y), height, EMPTY, "dP^T = V dO^T")
    drawing.cell(*_at(p, product_y), height, V_COLOR, "dV += P^T dO")
    drawing.cell(*_at(ds, product_y), height, K_COLOR, "dK += dS^T Q")
    middle = s_y + height / 2
    for one, other in pairwise((s, p, ds)):
        drawing.line(sum(one) + 4, middle, other[0] - 3, middle, arrow=True)
        x = (sum(one) + other[0]) / 2
        drawing.text(x, middle - 12, "in place", SMALL, MUTED, anchor="middle")
    for left, width in (p, ds):
        x = left + width / 2
        drawing.line(x, s_y - 3, x, product_y + height + 3, arrow=True)
        y = (s_y + product_y + height) / 2
        drawing.text(x - 8, y, "operand A: cvt_rn_x2", SMALL, anchor="end")
    x, y = ds[0] + ds[1] / 2, dp_y + height / 2
    drawing.curve([(sum(p) + 4, y), (x, y), (x, s_y + height + 3)], arrow=True)
    _notes(
        drawing,
        248,
        "The second operand of each product comes from shared memory: rows of Q or dO for S^T and "
        "dP^T, by ldmatrix_x4,",
        "and the same rows for dV and dK, by ldmatrix_x4_trans.",
    )


def _at(place: tuple[float, float], y: float) -> tuple[float, float, float]:
    return place[0], y, place[1]


def _transposed_operand(drawing: Drawing, y: float) -> None:
    """Quarters of 16 columns of P^T or dS^T, and of A, that the same registers hold."""
    left, operand_left, top, cell, height = 82, 490, y + 72, 20, 18
    title = "P^T or dS^T [16 keys, 16 queries]: two accumulators"
    drawing.text(left, y, title, TITLE, bold=True)
    drawing.text(operand_left, y, "The same: one operand A [16, 16]", TITLE, bold=True)
    drawing.text(left - 6, top - 28, "lse, delta", SMALL, anchor="end")
    drawing.text(left - 6, top - 9, "query", SMALL, MUTED, anchor="end")
    for is_a, quarter in product((False, True), range(4)):
        right, lower = divmod(quarter, 2)
        x = (operand_left if is_a else left) + right * (8 * cell + 8)
        corner = x, top + lower * (8 * height + 30)
        matrix = Matrix(drawing, *corner, cell, height)
        for lane in range(32):
            pair = fragment_pair(lane, quarter, is_a=is_a)
            inside = [(key % 8, query % 8) for key, query in pair]
            matrix.pair(*inside, lane_color(lane, quarter), f"T{lane}")
            if not is_a and not lower and lane % 4 == lane:
                mine = lane == LANE % 4
                place = x + inside[0][1] * cell, top - 36, 2 * cell, 16
                drawing.box(*place, ACCENT if mine else ROW_COLOR)
        if not lower:
            matrix.columns(8, 8 * right)
        if not right:
            matrix.rows(8, 8 * lower)
        registers = f"s_acc[0][{right}]: d{2 * lower}, d{2 * lower + 1}"
        above = 14 if lower else 27 if is_a else 49
        name = f"a{quarter}" if is_a else registers
        drawing.text(x + 4 * cell, corner[1] - above, name, bold=True, anchor="middle")
    for lower in range(2):
        middle = top + lower * (8 * height + 30) + 4 * height
        drawing.line(420, middle, 460, middle, arrow=True)
        drawing.text(440, middle - 14, "cvt_rn_x2", SMALL, anchor="middle")
    _notes(
        drawing,
        top + 16 * height + 56,
        "In forward an accumulator's rows are queries; here they are keys, and a lane reads lse "
        "and delta of its columns from shared",
        f"memory: T{LANE} those in red. The next 16 queries are s_acc[0][2] and s_acc[0][3], for "
        "the next product.",
    )


def fragment_pair(lane: int, quarter: int, *, is_a: bool) -> list[tuple[int, int]]:
    """(key, query) of a lane's two elements: of a[quarter], or of what becomes it."""
    if is_a:
        return [a_fragment(lane, quarter, half) for half in range(2)]
    tile, lower = divmod(quarter, 2)
    places = [d_fragment(lane, 2 * lower + i) for i in range(2)]
    return [(row, 8 * tile + column) for row, column in places]


# ---- b04's warps

PIXELS = 1.75  # of an element
Part = tuple[int, int, int, int]  # first row and column, rows and columns


def s_part(warp: int) -> list[Part]:
    """Of S^T and dP^T [BLOCK_N, BLOCK_M]."""
    return [(warp // 2 * 16 * FRAGS, warp % 2 * WARP_QUERIES, 16 * FRAGS, WARP_QUERIES)]


def dkv_parts(warp: int) -> list[Part]:
    """Of dK and dV [BLOCK_N, HEAD_DIM]."""
    columns = range(warp % 2 * 16, HEAD_DIM, DKV_SPACING)
    return [(warp // 2 * 16 * FRAGS, column, 16 * FRAGS, 16) for column in columns]


def dq_parts(warp: int) -> list[Part]:
    """Of dQ [BLOCK_M, HEAD_DIM]."""
    sharing = DQ_SPACING // 16
    columns = range(warp % sharing * 16, HEAD_DIM, DQ_SPACING)
    return [(warp // sharing * 16 * FRAGS, column, 16 * FRAGS, 16) for column in columns]


def operand_of_keys(warp: int) -> Part:
    """Of P^T and dS^T [BLOCK_N, BLOCK_M]: what the warp reads for its dV and dK."""
    return (dkv_parts(warp)[0][0], 0, 16 * FRAGS, BLOCK_M)


def operand_of_queries(warp: int) -> Part:
    """Of dS [BLOCK_M, BLOCK_N]: what the warp reads for its dQ."""
    return (dq_parts(warp)[0][0], 0, 16 * FRAGS, BLOCK_N)


def transposed(parts: Sequence[Part]) -> list[Part]:
    return [(column, row, columns, rows) for row, column, rows, columns in parts]


def _backward_warps() -> Drawing:
    """Who computes what of S^T, dP^T, dK, dV and dQ, and what a warp reads of P and dS."""
    drawing = Drawing(612)
    title = f"A tile of b04: {BLOCK_N} keys, {BLOCK_M} queries, head_dim {HEAD_DIM}"
    drawing.text(18, 22, title, TITLE, bold=True)
    top, below = 112, 430
    scores, stored, of_queries, gradients = 66, 318, 262, 588  # the left of each matrix
    keys, queries = BLOCK_N * PIXELS, BLOCK_M * PIXELS

    s_parts, dkv, dq, turned = (
        {warp: parts_of(warp) for warp in range(NUM_WARPS)}
        for parts_of in (s_part, dkv_parts, dq_parts, lambda warp: transposed(s_part(warp)))
    )
    of_keys, per_query = f"[{BLOCK_N} keys, {BLOCK_M} queries]", f"[{BLOCK_M} queries,"
    _parts(drawing, scores, top, s_parts, "S^T, dP^T", of_keys)
    _parts(drawing, stored, top, s_parts, "P^T, dS^T", "in shared memory")
    title = "dV += P^T dO, dK += dS^T Q"
    _parts(drawing, gradients, top, dkv, title, f"[{BLOCK_N} keys, {HEAD_DIM} d]")
    _parts(drawing, of_queries, below, turned, "dS", f"{per_query} {BLOCK_N} keys]")
    _parts(drawing, gradients, below, dq, "dQ += dS K", f"{per_query} {HEAD_DIM} d]")
    for x, y, part in (
        (stored, top, operand_of_keys(WARP)),
        (of_queries, below, operand_of_queries(WARP)),
    ):
        row, column, rows, columns = (n * PIXELS for n in part)
        drawing.box(x + column, y + row, columns, rows, NONE, INK, 2)

    row, _, rows, _ = (n * PIXELS for n in operand_of_keys(WARP))
    middle = top + row + rows / 2
    drawing.line(scores + queries + 6, middle, stored - 5, middle, arrow=True)
    drawing.text((scores + queries + stored) / 2, middle - 12, "store_operand", anchor="middle")
    drawing.line(stored + queries + 6, middle, gradients - 5, middle, arrow=True)
    x = (stored + queries + gradients) / 2
    drawing.text(x, middle - 12, "A: ldmatrix_x4", anchor="middle")
    x = stored + queries / 2
    drawing.line(x, top + keys + 6, x, below - 62, arrow=True)
    drawing.text(x + 8, top + keys + 16, "A: ldmatrix_x4_trans")
    row, _, rows, _ = (n * PIXELS for n in operand_of_queries(WARP))
    middle = below + row + rows / 2
    drawing.line(of_queries + keys + 6, middle, gradients - 5, middle, arrow=True)

    for n, text in enumerate(
        (
            "A number is the warp that",
            "computes the part.",
            f"Red: warp {WARP}. Outlined: its",
            "operands A, of which other",
            "warps compute parts.",
        )
    ):
        drawing.text(18, below + 16 + 20 * n, text, color=MUTED)
    _notes(
        drawing,
        below + queries + 28,
        f"A warp computes {WARP_QUERIES} queries of S^T and dP^T, but its dV and dK take all "
        f"{BLOCK_M}, and its dQ takes all {BLOCK_N} keys: hence shared memory.",
        "dV and dK stay in registers until the last tile, dQ is added to global memory after each.",
    )
    return drawing


def _parts(
    drawing: Drawing,
    x: float,
    y: float,
    parts: dict[int, list[Part]],
    title: str,
    shape: str,
) -> None:
    """A matrix in the colors of the warps, with the rows and columns at which parts begin."""
    width = max(part[1] + part[3] for found in parts.values() for part in found) * PIXELS
    drawing.text(x + width / 2, y - 46, title, bold=True, anchor="middle")
    drawing.text(x + width / 2, y - 29, shape, color=MUTED, anchor="middle")
    starts: tuple[set[int], set[int]] = (set(), set())
    for warp, found in parts.items():
        for row, column, rows, columns in found:
            color = ACCENT if warp == WARP else BANK_COLORS[warp]
            place = x + column * PIXELS, y + row * PIXELS, columns * PIXELS, rows * PIXELS
            drawing.cell(*place, color, f"{warp}")
            starts[0].add(row)
            starts[1].add(column)
    for row in sorted(starts[0]):
        drawing.text(x - 6, y + row * PIXELS + 8, f"{row}", SMALL, MUTED, anchor="end")
    for column in sorted(starts[1]):
        drawing.text(x + column * PIXELS + 2, y - 9, f"{column}", SMALL, MUTED)
