"""The diagram of v20: which warp has which rows and keys of S."""

from __future__ import annotations

from .last_block import USED, WARP_ROWS, WARPS
from .svg import BANK_COLORS, EMPTY, SMALL, TITLE, Drawing

KEYS = 128  # of a tile, up to head_dim 64
KEY, ROW = 2.6, 5.5  # pixels
LEFT = 18
RIGHT = LEFT + KEY * KEYS + 40  # where v20's begins


def figures() -> dict[str, Drawing]:
    """The drawing by the name of its file."""
    return {"own_keys": _own_keys()}


def keys_of(warp: int) -> range:
    """Those of a tile that a warp of v20 has."""
    quarter = KEYS // WARPS
    return range(quarter * warp, quarter * (warp + 1))


def _own_keys() -> Drawing:
    drawing = Drawing(500)
    drawing.text(18, 22, f"S of a work tile's rows and a tile's {KEYS} keys", TITLE, bold=True)
    y = 52
    drawing.text(LEFT, y, f"v18: {WARPS * WARP_ROWS} rows, by four warps together", bold=True)
    for warp in range(WARPS):
        top = y + 14 + ROW * WARP_ROWS * warp
        used = ROW * USED
        text = f"warp {warp}: up to {USED} rows, all keys"
        drawing.cell(LEFT, top, KEY * KEYS, used, BANK_COLORS[warp], text)
        drawing.cell(LEFT, top + used, KEY * KEYS, ROW * WARP_ROWS - used, EMPTY, "not read")
    drawing.text(RIGHT, y, f"v20: {WARP_ROWS} rows, by each warp alone", bold=True)
    for warp in range(WARPS):
        keys = keys_of(warp)
        left = RIGHT + KEY * keys.start
        height = ROW * WARP_ROWS
        drawing.cell(left, y + 14, KEY * len(keys), height, BANK_COLORS[warp], f"warp {warp}")
        ends = f"{keys.start}–{keys.stop - 1}"
        middle = left + KEY * len(keys) / 2
        drawing.text(middle, y + 26 + height, ends, SMALL, anchor="middle")
    drawing.text(RIGHT, y + 44 + ROW * WARP_ROWS, "keys", SMALL)
    drawing.notes(
        452,
        "Nothing of a row is another warp's in v18, and a row's m is known when its own warp has "
        "seen the tile.",
        "In v20 each warp has an m, l and O of all rows for its keys. They are merged when the "
        "work tile ends.",
    )
    return drawing
