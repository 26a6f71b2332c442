"""The diagrams of the steps up to Ampere: fragments, ldmatrix, swizzles and buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .fragments import (
    CHUNK_BYTES,
    CHUNKS,
    a_fragment,
    b_fragment,
    bank_group,
    d_fragment,
    k_row,
    ldmatrix,
    ldmatrix_trans,
    padded,
    plain,
    swizzled,
    v_row,
    wavefronts,
)
from .svg import (
    BANK_COLORS,
    EMPTY,
    INK,
    LANE,
    MUTED,
    NONE,
    RED,
    SMALL,
    TINTS,
    TITLE,
    WIDTH,
    Drawing,
    Element,
    Matrix,
    lane_color,
    register_table,
)

READ_CHUNK = 2  # the chunk of each row that is read: an 8x8 matrix
COPY, COMPUTE = 70, 102  # width of a tile in pixels, not to scale
BUFFER_COLORS = (TINTS[0], TINTS[2])

RowOf = Callable[[int], Element]  # lane ->
ElementOf = Callable[[int, int], Element]  # lane, half ->
AddressOf = Callable[[int, int], int]  # row, chunk ->


def figures() -> dict[str, Drawing]:
    """The drawings by the names of their files."""
    return {
        "mma_m16n8k16": _mma(),
        "accumulator_to_a": _accumulator_to_a(),
        "ldmatrix": _ldmatrix(),
        "swizzle_banks": _swizzle_banks(),
        "async_timeline": _async_timeline(),
    }


def _a_pair(lane: int, register: int) -> list[Element]:
    """The elements in the halves of a[register]."""
    return [a_fragment(lane, register, half) for half in range(2)]


def _b_pair(lane: int, register: int) -> list[Element]:
    """The elements in the halves of b0 or b1."""
    return [b_fragment(lane, register, half) for half in range(2)]


def _d_pair(lane: int, pair: int) -> list[Element]:
    """The elements in d[2 pair] and d[2 pair + 1]."""
    return [d_fragment(lane, 2 * pair + i) for i in range(2)]


def _mma() -> Drawing:
    """A at the left, B above and D between them, as in a product on paper."""
    drawing = Drawing(764)
    left, right, top, bottom = 44, 540, 54, 432
    a = Matrix(drawing, left, bottom, 27, 20)
    b, d = (Matrix(drawing, right, y, 34, 20) for y in (top, bottom))
    for lane in range(32):
        color = lane_color(lane, lane % 4)
        for i in range(4):
            a.pair(*_a_pair(lane, i), color, f"T{lane} a{i}")
        for i in range(2):
            b.pair(*_b_pair(lane, i), color, f"T{lane}", f"b{i}")
            d.pair(*_d_pair(lane, i), color, f"T{lane} d{2 * i} d{2 * i + 1}")
    for title, matrix, columns, x, y in (
        ("A [16, 16]", a, 16, left, bottom),
        ("B [16, 8]", b, 8, right, top),
        ("D [16, 8]", d, 8, right, bottom),
    ):
        matrix.rows(16)
        matrix.columns(columns)
        drawing.text(x, y - 32, title, TITLE, bold=True)
    _lane_registers(drawing, left, top - 32)
    return drawing


def _lane_registers(drawing: Drawing, x: float, y: float) -> None:
    """The registers of lane LANE."""
    g, t = divmod(LANE, 4)

    def row(
        name: str, matrix: str, pair: list[Element], indices: Sequence[tuple[str, int]]
    ) -> tuple[str, list[str], str]:
        elements = [f"{matrix}[{i}, {j}]" for i, j in pair]
        formula = ", ".join(
            f"{index} + {at - value}" if at > value else index
            for (index, value), at in zip(indices, pair[0], strict=True)
        )
        return name, elements, f"from {matrix}[{formula}]"

    row_column = ("g", g), ("2t", 2 * t)
    inputs = [row(f"a{i}", "A", _a_pair(LANE, i), row_column) for i in range(4)]
    inputs += [row(f"b{i}", "B", _b_pair(LANE, i), row_column[::-1]) for i in range(2)]
    floats = [row(f"d{2 * i}, d{2 * i + 1}", "D", _d_pair(LANE, i), row_column) for i in range(2)]
    drawing.text(x, y, "D += A B", TITLE, bold=True)
    text = f"T{LANE} is lane {LANE} of a warp: g = lane / 4 = {g}, t = lane % 4 = {t}"
    drawing.text(x, y + 26, text)
    register_table(drawing, x, y + 54, 58, ("lower half", "upper half"), inputs)
    register_table(drawing, x, y + 230, 58, ("float", "float"), floats)
    drawing.text(x, y + 314, "Colour: t", color=MUTED)
    for i, tint in enumerate(TINTS):
        drawing.cell(x + 58 + 31 * i, y + 304, 31, 20, tint, f"{i}")


def _accumulator_to_a() -> Drawing:
    """Quarters of 16 columns of S beside the quarters of A that the same registers hold."""
    drawing = Drawing(440)
    for title, left, is_a in (
        ("S: two accumulators D [16, 8]", 44, False),
        ("P: one operand A [16, 16]", 482, True),
    ):
        drawing.text(left, 22, title, TITLE, bold=True)
        for quarter in range(4):
            right, lower = divmod(quarter, 2)
            x, y = left + right * 168, 80 + lower * 192
            matrix = Matrix(drawing, x, y, 20, 20)
            for lane in range(32):
                pair = _a_pair(lane, quarter) if is_a else _d_pair(lane, lower)
                inside = [(row % 8, column % 8) for row, column in pair]
                matrix.pair(*inside, lane_color(lane, quarter), f"T{lane}")
            if not lower:
                matrix.columns(8, 8 * right)
            if not right:
                matrix.rows(8, 8 * lower)
            tile = "s_acc[j / 8 + 1]" if right else "s_acc[j / 8]"
            name = f"a{quarter}" if is_a else f"{tile}: d{2 * lower}, d{2 * lower + 1}"
            drawing.text(x + 80, y - (12 if lower else 26), name, bold=True, anchor="middle")
    for y in (160, 352):
        drawing.text(411, y - 14, "cvt_rn_x2", SMALL, anchor="middle")
        drawing.line(382, y, 440, y, arrow=True)
    return drawing


def _ldmatrix() -> Drawing:
    """K and V in shared memory: which lane addresses a row, and which receives an element."""
    drawing = Drawing(862)
    for name, top, wrapper, product, row_of, element_of in (
        ("K", 22, "ldmatrix_x4", "S = Q K^T: B[d, key] = K[key, d]", k_row, ldmatrix),
        ("V", 452, "ldmatrix_x4_trans", "O += P V: B[key, d] = V[key, d]", v_row, ldmatrix_trans),
    ):
        drawing.text(18, top, f"{name} in shared memory, {wrapper}", TITLE, bold=True)
        _named_and_received(drawing, top + 64, row_of, element_of)
        _received_by_lane(drawing, 572, top + 64, name, row_of, element_of)
        drawing.text(572, top + 252, product)
    return drawing


def _named_and_received(drawing: Drawing, top: float, row_of: RowOf, element_of: ElementOf) -> None:
    """Four matrices of [16 keys, 16 d]: arrows from lanes that address, boxes of receiving ones."""
    drawing.text(36, top - 9, "key", SMALL, MUTED, anchor="end")
    for m in range(4):
        key, d = row_of(8 * m)
        x, y = 86 + d // 8 * 254, top + key // 8 * 180
        matrix = Matrix(drawing, x, y, 26, 19)
        for lane in range(32):
            pair = [element_of(lane, half) for half in range(2)]
            matrix.pair(*pair, lane_color(lane, lane % 4), f"T{lane}")
        for lane in range(8 * m, 8 * m + 8):
            row = row_of(lane)[0]
            middle = y + (row - key + 0.5) * 19
            style = {"color": RED, "bold": True} if lane == LANE else {}
            drawing.text(x - 18, middle, f"T{lane}", SMALL, anchor="end", **style)
            drawing.line(x - 16, middle, x - 3, middle, arrow=True)
            if not d:
                drawing.text(36, middle, f"{row}", SMALL, MUTED, anchor="end")
        if not key:
            matrix.columns(8, d)
        title = f"matrix {m}: keys {_range(key)}, d {_range(d)}"
        drawing.text(x + 104, y - (14 if key else 28), title, bold=True, anchor="middle")


def _received_by_lane(
    drawing: Drawing, x: float, y: float, name: str, row_of: RowOf, element_of: ElementOf
) -> None:
    """What lane LANE addresses and receives."""
    row, column = row_of(LANE)
    drawing.text(x, y + 10, f"T{LANE} gives the address of")
    drawing.cell(x + 150, y, 86, 20, EMPTY, f"{name}[{row}, {_range(column)}]")
    drawing.text(x, y + 42, f"T{LANE} receives")
    rows = []
    for m in range(4):
        key, d = row_of(8 * m)
        pair = (element_of(LANE, half) for half in range(2))
        elements = [f"{name}[{key + i}, {d + j}]" for i, j in pair]
        columns = f"keys {_range(key)}" if name == "K" else f"d {_range(d)}"
        rows.append((f"r{m}", elements, f"b{m % 2}, {columns}"))
    register_table(drawing, x, y + 66, 25, ("lower half", "upper half"), rows)


def _range(first: int) -> str:
    return f"{first}–{first + 7}"


def _swizzle_banks() -> Drawing:
    """Three tiles as they lie in memory, and the wavefronts that read an 8x8 matrix of each."""
    drawing = Drawing(528)
    x = 44
    for title, subtitle, address_of, chunks_a_row in (
        ("128 bytes a row", "chunk c at place c", plain, CHUNKS),
        ("144 bytes a row", "chunk c at place c, then padding", padded, CHUNKS + 1),
        ("128 bytes a row, swizzled", "chunk c at place c ^ (r % 8)", swizzled, CHUNKS),
    ):
        drawing.text(x, 22, title, TITLE, bold=True)
        drawing.text(x, 44, subtitle, color=MUTED)
        _memory(drawing, x, 62, address_of, chunks_a_row)
        _wavefronts(drawing, x, 270, address_of)
        x += 27 * chunks_a_row + 48
    for group, color in enumerate(BANK_COLORS):
        text = f"banks {4 * group}–{4 * group + 3}"
        drawing.cell(44 + 94 * group, 486, 94, 22, color, text)
    return drawing


def _memory(drawing: Drawing, x: float, y: float, address_of: AddressOf, chunks_a_row: int) -> None:
    """One line for each row of memory; the matrix that is read is outlined."""
    chunk_at = {address_of(row, chunk): chunk for row in range(8) for chunk in range(CHUNKS)}
    outlined = []
    for row in range(8):
        drawing.text(x - 6, y + 22 * row + 11, f"r{row}", SMALL, MUTED, anchor="end")
        for place in range(chunks_a_row):
            address = (row * chunks_a_row + place) * CHUNK_BYTES
            chunk = chunk_at.get(address)
            corner = x + 27 * place, y + 22 * row
            if chunk is None:
                drawing.cell(*corner, 27, 22, EMPTY, "pad")
            else:
                drawing.cell(*corner, 27, 22, BANK_COLORS[bank_group(address)], f"c{chunk}")
            if chunk == READ_CHUNK:
                outlined.append(corner)
    for left, top in outlined:
        drawing.box(left + 1, top + 1, 25, 20, NONE, INK, 2)


def _wavefronts(drawing: Drawing, x: float, y: float, address_of: AddressOf) -> None:
    """One line for each wavefront: the row whose chunk each group of four banks delivers."""
    served = wavefronts([address_of(row, READ_CHUNK) for row in range(8)])
    title = f"{len(served)} wavefront{'s' if len(served) > 1 else ''}"
    drawing.text(x, y, title, TITLE, bold=True)
    for n, row_at in enumerate(served):
        top = y + 16 + 22 * n
        drawing.text(x - 6, top + 11, f"{n + 1}", SMALL, MUTED, anchor="end")
        for group, color in enumerate(BANK_COLORS):
            left = x + 27 * group
            if group in row_at:
                drawing.cell(left, top, 27, 22, color, f"r{row_at[group]}")
            else:
                drawing.box(left, top, 27, 22, EMPTY)


def _async_timeline() -> Drawing:
    """The first tiles of a block: v06 copies or computes, v07 does both."""
    drawing = Drawing(340)
    x, tiles = 104, range(4)

    copies = [tile * (COPY + COMPUTE) for tile in tiles]
    computes = [copy + COPY for copy in copies]
    barriers = dict.fromkeys(copies, "1") | dict.fromkeys(computes, "2")
    drawing.text(18, 22, "v06, one buffer", TITLE, bold=True)
    _timeline(drawing, x, 62, {"copy": copies, "compute": computes}, barriers, buffers=1)
    serial_end = x + computes[-1] + COMPUTE

    computes = [COPY + tile * COMPUTE for tile in tiles]
    late = (COMPUTE - COPY) * 3 // 4  # a copy starts in the middle of the tile before
    copies = [0, *(compute + late for compute in computes[:-1])]
    barriers = dict.fromkeys(computes, "1, 2")
    drawing.text(18, 164, "v07, two buffers", TITLE, bold=True)
    _timeline(drawing, x, 204, {"cp.async": copies, "compute": computes}, barriers, buffers=2)
    end = x + computes[-1] + COMPUTE

    drawing.line(serial_end, 255, end + 4, 255, arrow=True)
    drawing.text((end + serial_end) / 2, 241, "the hidden copies", anchor="middle")
    for buffer, color in enumerate(BUFFER_COLORS):
        drawing.cell(18 + 70 * buffer, 304, 70, 20, color, f"buffer {buffer}")
    text = "Barriers: 1 = all have read the tile before, 2 = the tile is complete"
    drawing.text(178, 314, text, color=MUTED)
    drawing.text(WIDTH - 38, 314, "schematic, one block", color=MUTED, anchor="end")
    return drawing


def _timeline(
    drawing: Drawing,
    x: float,
    y: float,
    starts: dict[str, list[int]],
    barriers: dict[int, str],
    *,
    buffers: int,
) -> None:
    """A row of copies above a row of computations, given when those of each tile start."""
    for row, ((name, times), width) in enumerate(zip(starts.items(), (COPY, COMPUTE), strict=True)):
        top = y + 36 * row
        drawing.text(18, top + 15, name)
        for tile, time in enumerate(times):
            drawing.cell(x + time, top, width, 30, BUFFER_COLORS[tile % buffers], f"tile {tile}")
    for time, protects in barriers.items():
        drawing.line(x + time, y - 6, x + time, y + 72)
        drawing.text(x + time, y - 15, protects, SMALL, MUTED, anchor="middle")
