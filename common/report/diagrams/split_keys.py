"""The diagram of v13: one query of each head, whose keys several heads share."""

from __future__ import annotations

from .svg import BANK_COLORS, EMPTY, INK, MUTED, SMALL, TITLE, Drawing

HEADS, SMS, TILES = 4, 8, 16  # of one sequence: heads that share keys; SMs; tiles of the keys
TILE, ROW, LEFT = 43, 22, 76  # pixels
MERGE = 1.5  # in tiles: as long as it takes to load and to merge some parts


def cut(block: int) -> int:
    """The first tile of a block's share, as Schedule.cut() has it for one work tile."""
    return TILES * block // SMS


def figures() -> dict[str, Drawing]:
    """The drawing by the name of its file."""
    return {"split_keys": _split_keys()}


def _split_keys() -> Drawing:
    drawing = Drawing(478)
    title = f"{HEADS} heads with one query each, on the same {TILES} tiles of keys, and {SMS} SMs"
    drawing.text(18, 22, title, TITLE, bold=True)
    y = 48
    drawing.text(18, y, "v12: a head is a work tile, and a work tile one block's", bold=True)
    for block in range(SMS):
        top = y + 12 + ROW * block
        drawing.text(18, top + ROW / 2, f"block {block}")
        if block < HEADS:
            text = f"head {block}: tiles 0–{TILES - 1}"
            drawing.cell(LEFT, top, TILES * TILE, ROW, BANK_COLORS[block], text)
        else:
            drawing.cell(LEFT, top, TILES * TILE, ROW, EMPTY, "nothing to do")
    y = 256
    drawing.text(
        18, y, "v13: the heads are rows of one work tile, and blocks share its keys", bold=True
    )
    end = LEFT + cut(1) * TILE
    for block in range(SMS):
        top, first, last = y + 12 + ROW * block, cut(block), cut(block + 1) - 1
        drawing.text(18, top + ROW / 2, f"block {block}")
        for tile in range(first, last + 1):
            x = LEFT + (tile - first) * TILE
            drawing.cell(x, top, TILE, ROW, BANK_COLORS[4], f"{tile}")
        if block < HEADS:
            drawing.cell(end, top, MERGE * TILE, ROW, BANK_COLORS[block], f"head {block}")
    drawing.line(end, y + 8, end, y + 12 + ROW * SMS, dashed=True)
    x, middle = end + MERGE * TILE + 12, y + 12 + ROW * HEADS / 2
    drawing.text(x, middle, f"attention_merge: a warp adds up the {SMS} parts of a row", SMALL, INK)
    drawing.text(end + 8, y + 12 + ROW * (HEADS + 0.5), "O, m and l of each part", SMALL, MUTED)
    drawing.notes(
        456,
        f"Time runs to the right. v12 reads each tile of K and V {HEADS} times, v13 once.",
    )
    return drawing
