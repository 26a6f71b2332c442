"""The diagrams of v18: who merges the parts of a work tile, and where its rows are in a product."""

from __future__ import annotations

from .svg import BANK_COLORS, EMPTY, INK, MUTED, SMALL, TITLE, Drawing

BLOCKS, TILES = 4, 16  # that share a work tile; its tiles of keys
TILE, ROW, LEFT = 62, 22, 76  # pixels
# In tiles: a second kernel's start, what its threads find out before they load, and a merge.
STARTS, FINDS_OUT, MERGE, TAKES = 1.4, 1.0, 1.6, 0.8
WARPS, WARP_ROWS, USED = 4, 16, 8  # of a product; rows of a warp; and those that v18 uses
PRODUCT_ROW = 9.6  # pixels


def figures() -> dict[str, Drawing]:
    """The drawing by the name of its file."""
    return {"last_block": _last_block()}


def row_of_product(row: int) -> int:
    """v18's, of a work tile's row."""
    return row // USED * WARP_ROWS + row % USED


def _last_block() -> Drawing:
    drawing = Drawing(470)
    title = f"A work tile whose {TILES} tiles of keys {BLOCKS} blocks share"
    drawing.text(18, 22, title, TITLE, bold=True)
    y = 48
    drawing.text(18, y, "v13: a second kernel merges the parts, on all SMs", bold=True)
    end = _parts(drawing, y)
    drawing.line(end, y + 8, end, y + 12 + ROW * BLOCKS, dashed=True)
    for block in range(BLOCKS):
        x, top = end, y + 12 + ROW * block
        for length, color, text in (
            (STARTS, EMPTY, "starts"),
            (FINDS_OUT, EMPTY, "finds out"),
            (MERGE, BANK_COLORS[block], "merge"),
        ):
            drawing.cell(x, top, length * TILE, ROW, color, text)
            x += length * TILE
    y = 172
    drawing.text(18, y, "v18: the block with the last keys does", bold=True)
    end = _parts(drawing, y)
    top = y + 12 + ROW * (BLOCKS - 1)
    drawing.cell(end, top, TAKES * TILE, ROW, EMPTY, "signals")
    drawing.cell(end + TAKES * TILE, top, MERGE * TILE, ROW, BANK_COLORS[4], "merge")
    drawing.text(end + 10, y + 12 + ROW, "posted: the part is there", SMALL, MUTED)
    y = 296
    rows = WARPS * USED
    drawing.text(18, y, f"Where {rows} rows are in a product of {WARPS * WARP_ROWS}", bold=True)
    for warp in range(WARPS):
        x = LEFT + WARP_ROWS * PRODUCT_ROW * (warp + 0.5)
        drawing.text(x, y + 20, f"warp {warp}", SMALL, INK, anchor="middle")
    _rows(drawing, y + 30, "v13", {*range(rows)})
    _rows(drawing, y + 58, "v18", {row_of_product(row) for row in range(rows)})
    drawing.notes(
        402,
        "Time runs to the right. v13's SMs wait for the last block, and then for what the second "
        "kernel's first loads bring.",
        "In v18 a warp of the last block has waited since it had copied K and V. Rows 0–7 of a "
        "warp are registers of their own in each lane:",
        "in v13 two warps take the exponentials of all of theirs, in v18 four warps those of half.",
    )
    return drawing


def _parts(drawing: Drawing, y: float) -> float:
    """Each block's part of the tiles; returns where they end."""
    tiles = TILES // BLOCKS
    for block in range(BLOCKS):
        top = y + 12 + ROW * block
        drawing.text(18, top + ROW / 2, f"block {block}")
        for tile in range(tiles):
            text = f"{tiles * block + tile}"
            drawing.cell(LEFT + tile * TILE, top, TILE, ROW, BANK_COLORS[4], text)
    return LEFT + tiles * TILE


def _rows(drawing: Drawing, y: float, name: str, used: set[int]) -> None:
    drawing.text(18, y + ROW / 2, name)
    for row in range(WARPS * WARP_ROWS):
        color = BANK_COLORS[row // WARP_ROWS] if row in used else EMPTY
        drawing.cell(LEFT + row * PRODUCT_ROW, y, PRODUCT_ROW, ROW, color, "")
