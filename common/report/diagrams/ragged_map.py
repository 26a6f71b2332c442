"""The diagram of v14: a copy that ends with a sequence, and the tiles of keys of a window."""

from __future__ import annotations

from .svg import ACCENT, EMPTY, MUTED, NONE, RED, SMALL, TINTS, TITLE, Drawing

# Left: a packed tensor's rows, and a tile of the sequence in the middle.
STARTS = 0, 160, 480, 720  # of the sequences, and the end
ROWS = STARTS[-1]
TILE = 128  # rows
END = STARTS[2]  # of the sequence
FIRST = STARTS[1] + (END - STARTS[1]) // TILE * TILE  # row of its last tile
SEQUENCE_COLORS = TINTS[0], TINTS[1], TINTS[3]

# Right: a work tile and its tiles of keys, which count from k_start on. A query sees its own key
# and so many before it.
WINDOW_LEFT = 448
BLOCK_M = BLOCK_N = 128
WARPS, WARP_ROWS, WARPGROUP_ROWS = 8, 16, 64
CLEAR, MASKED, PASSED = TINTS[1], TINTS[2], EMPTY

TOP, SCALE = 92, 0.235  # pixels: where the map begins, and of a row
CELL_WIDTH, CELL_HEIGHT = 46, 25
LEFT, STRIP = 462, 39
GRID, GRID_TOP = 543, 152
NOTES = 452


def coordinate(row: int, end: int) -> int:
    """x, where a copy begins in this row of a sequence that ends before row `end`."""
    return ROWS - end + row


def row_of(x: int, end: int) -> int:
    """The tensor's row that a map's element is in."""
    return x + end - ROWS


def num_tiles() -> int:
    return -(-(WINDOW_LEFT + BLOCK_M) // BLOCK_N)


def clear_tiles(warp: int) -> range:
    """The tiles of which a warp masks nothing, as load_q() of v14 has them."""
    first, last = warp * WARP_ROWS, (warp + 1) * WARP_ROWS - 1
    begin = 0 if last == 0 else last // BLOCK_N + 1
    return range(begin, (first + WINDOW_LEFT + 1) // BLOCK_N)


def group_tiles(warp: int) -> int:
    """How many tiles the rows of the warp's warpgroup see."""
    last = warp * WARP_ROWS // WARPGROUP_ROWS * WARPGROUP_ROWS + WARPGROUP_ROWS - 1
    return -(-(last + WINDOW_LEFT + 1) // BLOCK_N)


def figures() -> dict[str, Drawing]:
    """The drawing by the name of its file."""
    drawing = Drawing(512)
    _ragged_map(drawing)
    _window(drawing)
    return {"ragged_map": drawing}


def _ragged_map(drawing: Drawing) -> None:
    def y(row: float) -> float:
        return TOP + SCALE * (row + ROWS)

    drawing.text(18, 22, "A map whose rows end where a copy says", TITLE, bold=True)
    tensor, width, first_bar, distance, bar = 54, 84, 196, 92, 44
    middle = tensor + width / 2
    drawing.text(middle, 50, "the tensor’s rows", SMALL, anchor="middle")
    drawing.text(first_bar - 14, 50, f"the map’s, x = 0 … {ROWS - 1}, in copies with", SMALL)
    drawing.text(tensor - 6, y(-ROWS) + 5, f"−{ROWS}", SMALL, MUTED, anchor="end")
    for row in STARTS:
        drawing.text(tensor - 6, y(row), f"{row}", SMALL, MUTED, anchor="end")
    for side in (tensor, tensor + width):
        drawing.line(side, y(-ROWS), side, y(0), MUTED, dashed=True)
    drawing.line(tensor, y(-ROWS), tensor + width, y(-ROWS), MUTED)
    for n, line in enumerate(("the map", "begins", f"{ROWS} rows", "before")):
        drawing.text(middle, y(-ROWS) + 14 + 15 * n, line, SMALL, MUTED, anchor="middle")
    for n, color in enumerate(SEQUENCE_COLORS):
        top, height = y(STARTS[n]), SCALE * (STARTS[n + 1] - STARTS[n])
        drawing.cell(tensor, top, width, height, color, f"sequence {n}")
    for n, end in enumerate((0, END, ROWS)):
        x = first_bar + distance * n
        drawing.text(x + bar / 2, 74, f"end = {end}", SMALL, bold=end == END, anchor="middle")
        drawing.box(x, y(end - ROWS), bar, SCALE * (ROWS - end), EMPTY)
        for color, start, stop in zip(SEQUENCE_COLORS, STARTS, STARTS[1:], strict=False):
            if start < end:
                drawing.box(x, y(start), bar, SCALE * (min(stop, end) - start), color)
        for at in (0, ROWS):
            place = y(row_of(at, end)) + (5 if at == 0 else -5)
            drawing.text(x - 5, place, f"x = {at}", SMALL, MUTED, anchor="end")
    # The tile: those of its rows that there are, and the others.
    x = first_bar + distance
    _hatch(drawing, x, y(END), bar, SCALE * (FIRST + TILE - END))
    for left, of in ((tensor, width), (x, bar)):
        drawing.box(left, y(FIRST), of, SCALE * TILE, NONE, ACCENT, 2)
    for row in (FIRST, FIRST + TILE):
        drawing.line(tensor + width, y(row), x, y(row), ACCENT, dashed=True)
    drawing.text(x - 5, y(FIRST) - 8, f"x = {coordinate(FIRST, END)}", SMALL, anchor="end")
    drawing.text(tensor + width + 6, y(FIRST + TILE / 2), f"tile of {TILE} rows", SMALL)
    drawing.text(x + bar + 5, y(END + (FIRST + TILE - END) / 2), "zeros", SMALL)
    drawing.notes(
        NOTES,
        f"Element (x, end) of the map is in the tensor’s row x + end − {ROWS}.",
        f"The tile from row {FIRST} on: x = rows − end + row = {ROWS} − {END} + {FIRST}.",
        f"From x = {ROWS} on a load gives zeros, and a store writes nothing.",
    )


def _window(drawing: Drawing) -> None:
    def x(key: float) -> float:
        return GRID + CELL_WIDTH * key / BLOCK_N

    def y(row: float) -> float:
        return GRID_TOP + CELL_HEIGHT * row / WARP_ROWS

    drawing.text(LEFT, 22, "The tiles of keys of a work tile, with a window", TITLE, bold=True)
    drawing.text(LEFT, 50, f"{BLOCK_M} queries, causal, window_left = {WINDOW_LEFT}", SMALL)
    tiles, bottom = num_tiles(), y(BLOCK_M)
    drawing.text(
        GRID + 6, GRID_TOP - 66, "k_start, where the tiles begin: the first key seen", SMALL
    )
    drawing.line(GRID, GRID_TOP - 72, GRID, GRID_TOP - 2, arrow=True)
    for tile in range(tiles):
        middle = x((tile + 0.5) * BLOCK_N)
        drawing.text(middle, GRID_TOP - 10, f"tile {tile}", SMALL, MUTED, anchor="middle")
    for warp in range(WARPS):
        drawing.text(LEFT, y((warp + 0.5) * WARP_ROWS), f"warp {warp}", SMALL, MUTED)
        for tile in range(tiles):
            fill = MASKED
            if tile in clear_tiles(warp):
                fill = CLEAR
            elif tile >= group_tiles(warp):
                fill = PASSED
            drawing.box(x(tile * BLOCK_N), y(warp * WARP_ROWS), CELL_WIDTH, CELL_HEIGHT, fill)
    # The first key of a row, and the one behind its last.
    for key, name in ((0, "first key seen"), (WINDOW_LEFT + 1, "own key")):
        drawing.line(x(key), GRID_TOP, x(key + BLOCK_M), bottom, ACCENT, 2)
        drawing.text(x(key + BLOCK_M), bottom + 10, name, SMALL, RED, anchor="middle")
    for start in (GRID - STRIP, x(tiles * BLOCK_N)):
        for row in (0, BLOCK_M):
            drawing.line(start, y(row), start + STRIP, y(row), MUTED, dashed=True)
        for n, word in enumerate(("not", "loaded")):
            middle = y(BLOCK_M / 2) + 14 * n - 7
            drawing.text(start + STRIP / 2, middle, word, SMALL, MUTED, anchor="middle")
    for warp, place, below in ((0, GRID_TOP - 24, -12), (WARPS - 1, bottom + 26, 12)):
        clear = clear_tiles(warp)
        begin, end = x(clear.start * BLOCK_N), x(clear.stop * BLOCK_N)
        drawing.line(begin, place, end, place)
        for edge in (begin, end):
            drawing.line(edge, place - 4, edge, place + 4)
        told = f"warp {warp}: clear_begin = {clear.start}, clear_end = {clear.stop}"
        drawing.text(GRID + 6, place + below, told, SMALL)
    legend = (
        (CLEAR, "nothing to mask: clear_begin to before clear_end"),
        (MASKED, "to mask: where the window begins or ends"),
        (PASSED, "hidden from the whole warpgroup: passed over"),
    )
    for n, (fill, text) in enumerate(legend):
        drawing.box(LEFT, NOTES - 6 + 20 * n, 14, 12, fill)
        drawing.text(LEFT + 22, NOTES + 20 * n, text)


def _hatch(drawing: Drawing, x: float, y: float, width: float, height: float) -> None:
    """Slanted lines in a box."""
    for start in range(6, int(width + height), 6):
        from_x, to_x = max(0, start - height), min(start, width)
        drawing.line(x + from_x, y + start - from_x, x + to_x, y + start - to_x, MUTED)
