"""The diagrams of a backward block's warps: b03's fragments, and the parts of b04's warps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

from .backward import BLOCK_M, BLOCK_N, DKV_QUERIES, HEAD_DIM, K_COLOR, ROW_COLOR, V_COLOR
from .fragments import a_fragment, d_fragment
from .svg import (
    ACCENT,
    BANK_COLORS,
    EMPTY,
    INK,
    LANE,
    MUTED,
    NONE,
    SMALL,
    TITLE,
    Drawing,
    Matrix,
    lane_color,
)

# b04 at head_dim 128.
NUM_WARPS, FRAGS = 8, 2
WARP_QUERIES, DKV_SPACING, DQ_SPACING = BLOCK_M // 2, 32, 64
WARP = 5  # the warp whose operands are shown


def figures() -> dict[str, Drawing]:
    """The drawings by the names of their files."""
    return {
        "backward_fragments": _backward_fragments(),
        "backward_warps": _backward_warps(),
    }


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
    drawing.notes(
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
    drawing.notes(
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
    drawing.notes(
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
