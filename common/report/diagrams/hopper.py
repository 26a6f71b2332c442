"""The diagrams of the steps for Hopper: descriptors, accumulators and mbarriers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

from .fragments import (
    CHUNK,
    CHUNKS,
    PANEL,
    ROW_BYTES,
    Descriptor,
    empty_phase,
    full_phase,
    in_tile,
    k_major,
    mn_major,
    parity,
    wgmma_d,
)
from .svg import (
    BANK_COLORS,
    EMPTY,
    INK,
    LANE,
    MUTED,
    NONE,
    SMALL,
    TINTS,
    TITLE,
    WIDTH,
    Drawing,
    Matrix,
    interval,
    lane_color,
    register_table,
)

KEYS, HEAD_DIM = 128, 128  # of a tile
STEP = 16  # first of the 16 elements along K that one wgmma reads
WARP, PAIR = 1, 1  # of the accumulator: a warp's tiles 2 PAIR and 2 PAIR + 1
USES = range(3)  # of a stage
NUM_STAGES, CONSUMER_WARPS = 2, 8
COPY, READ = 104, 120  # width of a tile in pixels, not to scale
PARITY_COLORS = (TINTS[1], TINTS[3])


def figures() -> dict[str, Drawing]:
    """The drawings by the names of their files."""
    return {
        "wgmma_descriptor": _wgmma_descriptor(),
        "wgmma_accumulator": _wgmma_accumulator(),
        "mbarrier_phases": _mbarrier_phases(),
    }


def _wgmma_descriptor() -> Drawing:
    """Tiles of K and V as TMA writes them, and what the descriptor of one wgmma selects."""
    drawing = Drawing(914)
    k, v = k_major(KEYS, STEP), mn_major(KEYS, STEP)

    drawing.text(18, 22, f"K, K_MAJOR: d {interval(STEP, 16)} of all keys", TITLE, bold=True)
    _tile(drawing, 90, k, KEYS, range(16))
    notes = (
        "S = Q K^T: B[d, key] = K[key, d]",
        f"The next 8 keys: stride, + {k.stride} bytes",
        f"The next 16 d: start + {k_major(KEYS, STEP + 16).start - k.start} bytes",
        f"The next {PANEL} d: start + {k_major(KEYS, STEP + PANEL).start - k.start} bytes",
    )
    _descriptor(drawing, 90, "k", k, notes)

    drawing.text(18, 460, f"V, MN_MAJOR: all d of keys {interval(STEP, 16)}", TITLE, bold=True)
    _tile(drawing, 528, v, HEAD_DIM, range(STEP, STEP + 16))
    notes = (
        "O += P V: B[key, d] = V[key, d]",
        f"The next 8 keys: stride, + {v.stride} bytes",
        f"The next {PANEL} d: leading, + {v.leading} bytes",
        f"The next 16 keys: start + {mn_major(KEYS, STEP + 16).start - v.start} bytes",
    )
    _descriptor(drawing, 528, "v", v, notes)

    for chunk, color in enumerate(BANK_COLORS):
        drawing.cell(62 + 26 * chunk, 884, 26, 20, color, f"c{chunk}")
    drawing.text(
        280, 894, "what one wgmma reads; chunk c of a row lies at place c ^ (key % 8)", color=MUTED
    )
    return drawing


def _tile(drawing: Drawing, y: float, operand: Descriptor, size: int, shown: range) -> None:
    """Two panels: a line for each row in `shown`, and one each for the rows before and after."""
    read = {operand.element(i, k) for i, k in product(range(size), range(16))}
    chunk_at = {
        in_tile(KEYS, row, column): column % PANEL // CHUNK
        for row, column in product(range(KEYS), range(0, HEAD_DIM, CHUNK))
    }
    blocks = [range(shown.start), *(range(row, row + 1) for row in shown), range(shown.stop, KEYS)]
    lefts = [62 + 234 * panel for panel in range(HEAD_DIM // PANEL)]
    tops = {}
    for line, rows in enumerate(filter(None, blocks)):
        top = tops[rows[0]] = y + 19 * line
        drawing.text(56, top + 9.5, interval(rows[0], len(rows)), SMALL, MUTED, anchor="end")
        for panel, x in enumerate(lefts):
            start = panel * KEYS * ROW_BYTES + rows[0] * ROW_BYTES
            places = range(start, start + ROW_BYTES, 2 * CHUNK)
            if len(rows) > 1:
                text = "likewise" if read.intersection(places) else "not read"
                drawing.cell(x, top, 26 * CHUNKS, 19, EMPTY, text)
                continue
            for n, address in enumerate(places):
                chunk = chunk_at[address]
                color = BANK_COLORS[chunk] if address in read else EMPTY
                drawing.cell(x + 26 * n, top, 26, 19, color, f"c{chunk}")
    drawing.text(56, y - 12, "key", SMALL, MUTED, anchor="end")
    for panel, x in enumerate(lefts):
        title = f"panel {panel}: d {interval(PANEL * panel, PANEL)}"
        drawing.text(x + 13 * CHUNKS, y - 12, title, bold=True, anchor="middle")
    next_panel = in_tile(KEYS, 0, PANEL) - in_tile(KEYS, 0, 0)
    drawing.line(lefts[0], y - 28, lefts[1], y - 28, arrow=True)
    drawing.text(sum(lefts) / 2, y - 37, f"+ {next_panel}", SMALL, anchor="middle")
    next_eight = in_tile(KEYS, shown[8], 0) - in_tile(KEYS, shown[0], 0)
    right = lefts[-1] + 26 * CHUNKS + 8
    drawing.line(right, tops[shown[0]], right, tops[shown[8]], arrow=True)
    middle = (tops[shown[0]] + tops[shown[8]]) / 2
    drawing.text(right + 6, middle, f"+ {next_eight}", SMALL)


def _descriptor(
    drawing: Drawing, y: float, tile: str, operand: Descriptor, notes: Sequence[str]
) -> None:
    """The fields of an operand in the tile, and how its neighbours are found."""
    x = 588
    drawing.text(x, y + 10, "matrix_descriptor", bold=True)
    drawing.text(x, y + 34, "bits", SMALL, MUTED)
    drawing.text(x + 90, y + 34, "value", SMALL, MUTED, anchor="middle")
    meanings = {
        "start": "start / 16",
        "leading": "leading / 16" if operand.leading else "leading: unused",
        "stride": "stride / 16",
        "swizzle": "swizzle: 128 B",
    }
    for n, (name, (first, last, value)) in enumerate(operand.fields().items()):
        top = y + 45 + 23 * n
        drawing.text(x, top + 10, f"{first}–{last}", bold=True)
        text = f"{tile} / 16 + {value}" if name == "start" else f"{value}"
        drawing.cell(x + 48, top, 84, 20, EMPTY, text)
        drawing.text(x + 139, top + 10, meanings[name], color=MUTED)
    for n, note in enumerate(notes):
        drawing.text(x, y + 162 + 22 * n, note)


def _wgmma_accumulator() -> Drawing:
    """Who holds D [64, N]: all of it in boxes [8, 8], and 16 columns of one warp."""
    drawing = Drawing(462)
    _warpgroup(drawing, 96, 80)
    _two_tiles(drawing, 452, 80)

    def row(quarter: int) -> tuple[str, list[str], str]:
        tile, lower = 2 * PAIR + quarter // 2, quarter % 2
        elements = [f"P[{i}, {j}]" for i, j in _pair(LANE, tile, lower)]
        source = f"s_acc[{tile}][{2 * lower}], s_acc[{tile}][{2 * lower + 1}]"
        return f"a{quarter}", elements, source

    text = f"T{LANE} of warp {WARP}: operand A of P V, keys {interval(16 * PAIR, 16)}"
    drawing.text(44, 324, text, bold=True)
    titles = ("lower half", "upper half")
    register_table(drawing, 44, 350, 30, titles, [row(quarter) for quarter in range(4)])
    return drawing


def _pair(lane: int, tile: int, lower: int) -> list[tuple[int, int]]:
    """The elements in d[tile][2 lower] and d[tile][2 lower + 1] of a lane of WARP."""
    return [wgmma_d(32 * WARP + lane, tile, 2 * lower + i) for i in range(2)]


def _warpgroup(drawing: Drawing, x: float, y: float) -> None:
    """A box for each 8 x 8 elements, coloured by the registers that hold them."""
    drawing.text(44, 22, f"S [64, {KEYS}] of a warpgroup", TITLE, bold=True)
    drawing.text(44, 44, "8 columns in s_acc[n], lane = 4 (row % 8) + column % 8 / 2", color=MUTED)
    drawing.text(x - 8, y - 9, "n", SMALL, MUTED, anchor="end")
    for warp, tile, lower in product(range(4), range(KEYS // 8), range(2)):
        row, column = wgmma_d(32 * warp, tile, 2 * lower)
        left, top = x + column * 2.25, y + row * 3.25
        drawing.box(left, top, 18, 26, TINTS[tile % 2 * 2 + lower])
        if row == 0:
            drawing.text(left + 9, y - 9, f"{tile}", SMALL, MUTED, anchor="middle")
        if column == lower == 0:
            drawing.text(x - 8, top + 17, f"warp {warp}", anchor="end")
            drawing.text(x - 8, top + 34, interval(row, 16), SMALL, MUTED, anchor="end")
    row, column = wgmma_d(32 * WARP, 2 * PAIR, 0)
    drawing.box(x + column * 2.25, y + row * 3.25, 36, 52, NONE, INK, 2)


def _two_tiles(drawing: Drawing, x: float, y: float) -> None:
    """The quarters of 16 columns, each of which is a register of A in the next product."""
    title = f"Outlined: warp {WARP}, n = {2 * PAIR} and {2 * PAIR + 1}"
    drawing.text(x, 22, title, TITLE, bold=True)
    for quarter in range(4):
        right, lower = divmod(quarter, 2)
        tile = 2 * PAIR + right
        left, top = x + right * 184, y + lower * 192
        matrix = Matrix(drawing, left, top, 22, 20)
        first_row, first_column = _pair(0, tile, lower)[0]
        for lane in range(32):
            pair = [(i - first_row, j - first_column) for i, j in _pair(lane, tile, lower)]
            matrix.pair(*pair, lane_color(lane, quarter), f"T{lane}")
        if not lower:
            matrix.columns(8, first_column)
        if not right:
            matrix.rows(8, first_row)
        name = f"s_acc[{tile}][{2 * lower}], [{2 * lower + 1}]: a{quarter}"
        drawing.text(left + 88, top - (12 if lower else 26), name, bold=True, anchor="middle")


def _mbarrier_phases() -> Drawing:
    """The first tiles of a stage: who waits for which phase of its two barriers."""
    drawing = Drawing(386)
    x, y = 104, 62
    filled = [x + use * (COPY + READ) for use in USES]  # from then on
    full = [time + COPY for time in filled]
    empty = [time + READ for time in full]
    drawing.text(18, 22, "A stage of K and its two mbarriers", TITLE, bold=True)
    drawing.text(WIDTH - 38, 22, "schematic, one stage", color=MUTED, anchor="end")

    marks = dict.fromkeys(filled, "1") | dict.fromkeys(full, "2")
    marks |= {time: f"3, {marks[time]}" if time in marks else "3" for time in empty}
    for time, mark in marks.items():
        drawing.line(time, y - 6, time, y + 216)
        drawing.text(time, y - 15, mark, SMALL, MUTED, anchor="middle")

    producer, tma, full_top, consumers, empty_top = tops = range(y, y + 5 * 46, 46)
    names = ("producer", "TMA", "full", "consumers", "empty")
    for name, top in zip(names, tops, strict=True):
        drawing.text(18, top + 13, name, bold=name in ("full", "empty"))
    for use in USES:
        tile = f"tile {NUM_STAGES * use}"
        wait = f"try_wait(full, {parity(full_phase(use))})"
        drawing.cell(filled[use], tma, COPY, 26, TINTS[0], tile)
        drawing.cell(filled[use], consumers, COPY, 26, EMPTY, wait)
        drawing.cell(full[use], consumers, READ, 26, TINTS[0], tile)
        if use + 1 in USES:
            wait = f"try_wait(empty, {parity(empty_phase(use + 1))})"
            drawing.cell(filled[use], producer, COPY + READ, 26, EMPTY, wait)
        for n in range(4):
            time = filled[use] + COPY * (n + 1) / 4
            drawing.line(time, tma + 28, time, full_top - 1, arrow=True)
        for n in range(CONSUMER_WARPS):
            time = empty[use] - 10 * (CONSUMER_WARPS - 1 - n)
            drawing.line(time, consumers + 28, time, empty_top - 1, arrow=True)
    _phases(drawing, full_top, [x, *full, empty[-1]])
    _phases(drawing, empty_top, [x, *empty])

    tile_bytes = KEYS * HEAD_DIM * 2
    first = empty_phase(0)
    drawing.notes(
        308,
        f"1 The stage is empty: the producer arrives at full, announces {tile_bytes} bytes and "
        "starts the copy.",
        "2 All bytes have landed: a phase of full ends, and the next begins.",
        f"3 The last of {CONSUMER_WARPS} consumer warps has arrived: a phase of empty ends.",
        f"The producer's first wait names parity {parity(first)}, that of phase {first}, "
        "which counts as completed.",
    )
    return drawing


def _phases(drawing: Drawing, y: float, times: Sequence[float]) -> None:
    """A box for each phase of a barrier, between two times."""
    for phase, (begin, end) in enumerate(pairwise(times)):
        color = PARITY_COLORS[parity(phase)]
        drawing.cell(begin, y, end - begin, 26, color, f"phase {phase}: parity {parity(phase)}")
