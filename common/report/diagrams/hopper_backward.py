"""The diagrams of backward by wgmma: where the five products find their operands, and how."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from .backward import ROW_COLOR
from .fragments import wgmma_d
from .svg import (
    BANK_COLORS,
    INK,
    MUTED,
    NONE,
    SMALL,
    TINTS,
    TITLE,
    Drawing,
    Point,
    interval,
)

# b05 at head_dim 128.
HEAD_DIM, BLOCK_M, BLOCK_N, DQ_COLUMNS = 128, 64, 128, 64
GROUP_KEYS, WARP_KEYS = 64, 16  # of a warpgroup, and of a warp
STEP = 1  # of the steps of 16 in a product, the one that is outlined
SHARED, REGISTERS, GLOBAL, _ = TINTS  # where a matrix lies


def figures() -> dict[str, Drawing]:
    """The drawings by the names of their files."""
    return {
        "backward_products": _backward_products(),
        "backward_operands": _backward_operands(),
    }


# ---- where operands lie


@dataclass(frozen=True)
class Block:
    """What a warpgroup reads or computes of a matrix, and where that lies."""

    name: str
    rows: int
    columns: int
    place: str


@dataclass(frozen=True)
class Product:
    """result = a b, or += a b if it adds. Drawn with a's left side and the middle of all three."""

    result: Block
    a: Block
    b: Block
    adds: bool
    left: float
    middle: float

    def bytes_read(self) -> int:
        """From shared memory, by wgmma."""
        return sum(2 * x.rows * x.columns for x in (self.a, self.b) if x.place == SHARED)


def _product(
    result: str, a: Block, b: Block, left: float, middle: float, *, adds: bool = False
) -> Product:
    return Product(Block(result, a.rows, b.columns, REGISTERS), a, b, adds, left, middle)


PRODUCTS = (
    _product(
        "S^T",
        Block("K", GROUP_KEYS, HEAD_DIM, SHARED),
        Block("Q^T", HEAD_DIM, BLOCK_M, SHARED),
        18,
        126,
    ),
    _product(
        "dP^T",
        Block("V", GROUP_KEYS, HEAD_DIM, SHARED),
        Block("dO^T", HEAD_DIM, BLOCK_M, SHARED),
        18,
        270,
    ),
    _product(
        "dV",
        Block("P^T", GROUP_KEYS, BLOCK_M, REGISTERS),
        Block("dO", BLOCK_M, HEAD_DIM, SHARED),
        452,
        126,
        adds=True,
    ),
    _product(
        "dK",
        Block("dS^T", GROUP_KEYS, BLOCK_M, REGISTERS),
        Block("Q", BLOCK_M, HEAD_DIM, SHARED),
        452,
        270,
        adds=True,
    ),
    _product(
        "dQ",
        Block("dS", BLOCK_M, BLOCK_N, SHARED),
        Block("K", BLOCK_N, DQ_COLUMNS, SHARED),
        18,
        418,
    ),
)
PIXELS, GAP = 0.75, 26  # of an element; between two blocks


def corners(one: Product) -> dict[str, Point]:
    """The upper left corners of a, b and the result."""
    found, x = {}, one.left
    for role in ("a", "b", "result"):
        block: Block = getattr(one, role)
        found[role] = x, one.middle - block.rows * PIXELS / 2
        x += block.columns * PIXELS + GAP
    return found


def _backward_products() -> Drawing:
    """Each product of a tile: its blocks to scale, in the color of their place."""
    drawing = Drawing(552)
    title = f"A warpgroup of b05: {GROUP_KEYS} keys, {BLOCK_M} queries, head_dim {HEAD_DIM}"
    drawing.text(18, 22, title, TITLE, bold=True)
    x = 452
    for color, place, width in (
        (REGISTERS, "registers", 78),
        (SHARED, "shared memory", 104),
        (GLOBAL, "global memory", 104),
    ):
        drawing.cell(x, 11, width, 22, color, place)
        x += width + 12
    for one in PRODUCTS:
        _equation(drawing, one)
    s, dp, dv, dk, dq = PRODUCTS
    _elementwise(drawing, s, dv, "P = 2^(S − lse)")
    _elementwise(drawing, dp, dk, "dS = P * (dP − δ)")
    middle = (right_of(s) + dv.left) / 2
    drawing.line(middle, s.middle + 26, middle, dp.middle - 26, arrow=True)
    drawing.text(middle - 6, (s.middle + dp.middle) / 2, "P in fp32", SMALL, anchor="end")
    _rows(drawing, dv.left - 34, s.middle, dp.middle)
    _to_dq(drawing, dk, dq)
    _to_sums(drawing, dq)
    total = sum(one.bytes_read() for one in PRODUCTS)
    drawing.notes(
        506,
        f"The wgmma of a tile read {total // 1024} KiB of shared memory in each warpgroup. With "
        f"P^T and dS^T in shared memory, too, they would read {(total + saved()) // 1024} KiB,",
        "and P would have to be stored like dS. dV and dK stay in registers until the last tile; "
        "dQ of the tile leaves after each.",
    )
    return drawing


def saved() -> int:
    """Bytes of the operands A that wgmma does not read from shared memory."""
    return sum(2 * one.a.rows * one.a.columns for one in PRODUCTS if one.a.place == REGISTERS)


def right_of(one: Product) -> float:
    """The right side of its result."""
    return corners(one)["result"][0] + one.result.columns * PIXELS


def _equation(drawing: Drawing, one: Product) -> None:
    places = corners(one)
    for role, (x, y) in places.items():
        block: Block = getattr(one, role)
        _block(drawing, x, y, block)
    for role, between in (("b", "·"), ("result", "→")):
        x = places[role][0] - GAP / 2
        drawing.text(x, one.middle, between, TITLE, anchor="middle")
    top = one.middle - HEAD_DIM * PIXELS / 2 - 10
    formula = f"{one.result.name} {'+=' if one.adds else '='} {one.a.name} {one.b.name}"
    drawing.text(one.left, top, formula, bold=True)
    read = f"reads {one.bytes_read() // 1024} KiB"
    drawing.text(places["result"][0], top, read, SMALL, MUTED)


def _block(drawing: Drawing, x: float, y: float, block: Block) -> None:
    width, height = block.columns * PIXELS, block.rows * PIXELS
    drawing.box(x, y, width, height, block.place)
    drawing.text(x + width / 2, y + height / 2, block.name, bold=True, anchor="middle")
    shape = f"{block.rows} × {block.columns}"
    drawing.text(x + width / 2, y + height + 10, shape, SMALL, MUTED, anchor="middle")


def _elementwise(drawing: Drawing, one: Product, other: Product, formula: str) -> None:
    """From a result to the operand A of another product."""
    left, right = right_of(one), other.left
    drawing.line(left + 4, one.middle, right - 3, one.middle, arrow=True)
    drawing.text((left + right) / 2, one.middle - 13, formula, SMALL, anchor="middle")
    drawing.text((left + right) / 2, one.middle + 13, "cvt_rn_x2", SMALL, anchor="middle")


def _rows(drawing: Drawing, x: float, above: float, below: float) -> None:
    """lse and delta, on their way to where they are subtracted."""
    middle = (above + below) / 2
    drawing.cell(x - 22, middle - 11, 44, 22, SHARED, "lse, δ")
    drawing.line(x, middle - 13, x, above + 4, arrow=True)
    drawing.line(x, middle + 13, x, below - 4, arrow=True)


def _to_dq(drawing: Drawing, one: Product, dq: Product) -> None:
    """One operand's registers, stored: the half of another's operand."""
    x, y = one.left + one.a.columns * PIXELS / 2, one.middle + one.a.rows * PIXELS / 2 + 20
    turn = y + 28
    end = dq.left + dq.a.columns * PIXELS - 14, dq.middle - dq.a.rows * PIXELS / 2 - 3
    drawing.curve([(x, y), (x, turn), (end[0], turn), end], arrow=True)
    drawing.text(x - 8, turn - 11, "stmatrix, by both warpgroups", SMALL, anchor="end")


def _to_sums(drawing: Drawing, dq: Product) -> None:
    """Both warpgroups' columns, and their way to the sums over all keys."""
    staged = Block("dQ", BLOCK_M, HEAD_DIM, SHARED)
    sums = Block("dQ", BLOCK_M, HEAD_DIM, GLOBAL)
    y, width = dq.middle - BLOCK_M * PIXELS / 2, HEAD_DIM * PIXELS
    left, x = right_of(dq), 452
    for block, lines in (
        (staged, ("store_float4,", "by both warpgroups")),
        (sums, ("one bulk reduction:", "adds in fp32")),
    ):
        drawing.line(left + 4, dq.middle, x - 3, dq.middle, arrow=True)
        for n, line in enumerate(lines):
            at = (left + x) / 2, dq.middle - 13 + 26 * n
            drawing.text(*at, line, SMALL, anchor="middle")
        _block(drawing, x, y, block)
        left, x = x + width, 812 - width


# ---- how operands are laid out

LEFT, RIGHT = 100, 404  # of the matrices
TILE_WIDTH, HALF_HEIGHT = 24, 14  # of 8 rows and 8 columns of an accumulator
STEP_GAP = 24  # between operands
ROW_HEIGHT, COLUMN_WIDTH = 16, 32  # of a warp's 16 keys, stored and transposed
RESULT = 722


def _backward_operands() -> Drawing:
    """P^T and dS^T as registers hold them and as dV and dK take them; dS as it is stored."""
    drawing = Drawing(600)
    _accumulators(drawing, 112)
    _stored(drawing, 394)
    drawing.notes(
        552,
        "Outlined: what one step of 16 takes, queries for dV and dK, and keys for dQ. The colors "
        "above are registers: those of an accumulator",
        "are those of operand A. Below they are warps: dQ adds up over all keys, of which a warp "
        "has 16; so dS goes through shared memory.",
    )
    return drawing


def _accumulators(drawing: Drawing, y: float) -> None:
    """A warpgroup's S^T or dP^T, and the four operands that it becomes."""
    steps = BLOCK_M // 16
    title = f"S^T, dP^T [{GROUP_KEYS} keys, {BLOCK_M} queries] of a warpgroup"
    drawing.text(18, 22, title, TITLE, bold=True)
    drawing.text(18, 43, "accumulators: 8 queries in s_acc[n], dp_acc[n]", color=MUTED)
    drawing.text(RIGHT, 22, "P^T, dS^T: the same registers, in pairs of 16 bits", TITLE, bold=True)
    drawing.text(RIGHT, 43, f"operands A of dV and dK, one for each of {steps} steps", color=MUTED)
    drawing.text(LEFT - 8, y - 27, "lse, δ", SMALL, anchor="end")
    drawing.text(LEFT - 8, y - 9, "n", SMALL, MUTED, anchor="end")
    for tile in range(BLOCK_M // 8):
        x = LEFT + tile * TILE_WIDTH
        drawing.box(x, y - 34, TILE_WIDTH, 14, ROW_COLOR)
        drawing.text(x + TILE_WIDTH / 2, y - 9, f"{tile}", SMALL, MUTED, anchor="middle")
    lefts = [step_left(step) for step in range(steps)]
    for warp, tile, lower in product(range(4), range(BLOCK_M // 8), range(2)):
        key, query = wgmma_d(32 * warp, tile, 2 * lower)
        top, color = y + key // 8 * HALF_HEIGHT, TINTS[tile % 2 * 2 + lower]
        drawing.box(LEFT + query // 8 * TILE_WIDTH, top, TILE_WIDTH, HALF_HEIGHT, color)
        left = lefts[tile // 2] + tile % 2 * TILE_WIDTH
        drawing.cell(left, top, TILE_WIDTH, HALF_HEIGHT, color, f"a{tile % 2 * 2 + lower}")
        if tile == lower == 0:
            drawing.text(LEFT - 8, top + 7, f"warp {warp}", anchor="end")
            drawing.text(LEFT - 8, top + 21, interval(key, WARP_KEYS), SMALL, MUTED, anchor="end")
    height = GROUP_KEYS // 8 * HALF_HEIGHT
    for left in (LEFT + 2 * STEP * TILE_WIDTH, lefts[STEP]):
        drawing.box(left, y, 2 * TILE_WIDTH, height, NONE, INK, 2)
    middle = y + height / 2
    end = LEFT + BLOCK_M // 8 * TILE_WIDTH
    drawing.line(end + 8, middle, RIGHT - 8, middle, arrow=True)
    drawing.text((end + RIGHT) / 2, middle - 13, "cvt_rn_x2", SMALL, anchor="middle")
    for step, left in enumerate(lefts):
        drawing.text(left + TILE_WIDTH, y - 9, f"p_frag[{step}]", SMALL, MUTED, anchor="middle")
        x = left + TILE_WIDTH
        drawing.line(x, y + height + 26, x, y + height + 3, arrow=True)
        place = left - 10, y + height + 28, 2 * TILE_WIDTH + 20, 34
        drawing.box(*place, SHARED)
        drawing.text(x, place[1] + 10, "dO, Q", SMALL, anchor="middle")
        drawing.text(x, place[1] + 24, interval(16 * step, 16), SMALL, anchor="middle")
    drawing.text(lefts[-1] + 2 * TILE_WIDTH + 20, y + height + 38, "operands B:", SMALL, MUTED)
    drawing.text(lefts[-1] + 2 * TILE_WIDTH + 20, y + height + 52, "rows, queries", SMALL, MUTED)


def step_left(step: int) -> float:
    """The left side of the operand A of a step."""
    return RIGHT + step * (2 * TILE_WIDTH + STEP_GAP)


def _stored(drawing: Drawing, y: float) -> None:
    """dS^T of both warpgroups, and its transpose as operand A of dQ."""
    drawing.text(18, y - 70, "dS^T in shared memory, as stmatrix stores it", TITLE, bold=True)
    text = f"a row of 128 bytes for each key: {BLOCK_M} queries, swizzled"
    drawing.text(18, y - 49, text, color=MUTED)
    drawing.text(RIGHT, y - 70, "dS: the same bytes, MN_MAJOR", TITLE, bold=True)
    text = f"operands A of dQ [{BLOCK_M} queries, {WARP_KEYS} keys], in {BLOCK_N // 16} steps"
    drawing.text(RIGHT, y - 49, text, color=MUTED)
    width, height = BLOCK_M // 8 * TILE_WIDTH, len(BANK_COLORS) * ROW_HEIGHT
    drawing.text(LEFT - 8, y - 9, "keys", SMALL, MUTED, anchor="end")
    for warp, color in enumerate(BANK_COLORS):
        top, left = y + warp * ROW_HEIGHT, RIGHT + warp * COLUMN_WIDTH
        drawing.cell(LEFT, top, width, ROW_HEIGHT, color, f"warp {warp}")
        keys = interval(warp * WARP_KEYS, WARP_KEYS)
        drawing.text(LEFT - 8, top + ROW_HEIGHT / 2, keys, SMALL, MUTED, anchor="end")
        drawing.cell(left, y, COLUMN_WIDTH, height, color, f"{warp}")
        middle = left + COLUMN_WIDTH / 2
        drawing.text(middle, y - 9, f"{warp * WARP_KEYS}–", SMALL, MUTED, anchor="middle")
    drawing.box(LEFT, y + STEP * ROW_HEIGHT, width, ROW_HEIGHT, NONE, INK, 2)
    drawing.box(RIGHT + STEP * COLUMN_WIDTH, y, COLUMN_WIDTH, height, NONE, INK, 2)
    middle = y + height / 2
    drawing.line(LEFT + width + 8, middle, RIGHT - 8, middle, arrow=True)
    drawing.text((LEFT + width + RIGHT) / 2, middle - 13, "transposed", SMALL, anchor="middle")
    end = RIGHT + len(BANK_COLORS) * COLUMN_WIDTH
    drawing.line(end + 8, middle, RESULT - 6, middle, arrow=True)
    drawing.text((end + RESULT) / 2, middle - 13, "· K", SMALL, anchor="middle")
    drawing.text(RESULT, y - 9, "dQ of warpgroup", SMALL, MUTED)
    for group in range(2):
        d = interval(DQ_COLUMNS * group, DQ_COLUMNS)
        top = y + group * height / 2
        drawing.cell(RESULT, top, 812 - RESULT, height / 2, REGISTERS, f"{group}: d {d}")
