"""The diagram of v17: work tiles that share keys, in v12's shares, whole, and in even parts."""

from __future__ import annotations

from .blocks import Piece, equal_shares, in_rounds
from .svg import BANK_COLORS, EMPTY, TITLE, Drawing

SMS, TILES = 8, 16  # of keys, for each work tile
MANY, SHARING = 15, 3  # work tiles; so many one after another look at the same keys
FEW, SHARING_FEW, PARTS = 4, 2, 2
TILE, ROW, LEFT = 19, 20, 76  # pixels
MERGE = 3  # in tiles


def figures() -> dict[str, Drawing]:
    """The drawing by the name of its file."""
    return {"even_parts": _even_parts()}


def parts_in_rounds(sharing: int, work: int, parts: int) -> list[list[Piece]]:
    """v17, by block, as Schedule.at() has it: of a head of keys, first the first part of all."""
    tiles = TILES // parts
    pieces = [
        Piece(head * sharing + each, part * tiles, (part + 1) * tiles)
        for head in range(work // sharing)
        for part in range(parts)
        for each in range(sharing)
    ]
    return [pieces[block::SMS] for block in range(SMS)]


def _even_parts() -> Drawing:
    drawing = Drawing(696)
    title = f"Work tiles of {TILES} tiles of keys on {SMS} SMs; those of one color share their keys"
    drawing.text(18, 22, title, TITLE, bold=True)
    shares = equal_shares(SMS, MANY, TILES, min_saved_tiles=0)
    _blocks(drawing, 50, f"v12, {MANY} work tiles: equal shares", shares, SHARING)
    what = f"v17, {MANY} work tiles: whole, as they fill two rounds"
    _blocks(drawing, 256, what, in_rounds(SMS, MANY, TILES), SHARING)
    parts = parts_in_rounds(SHARING_FEW, FEW, PARTS)
    what = f"v17, {FEW} work tiles: {PARTS} parts of each, and a merge"
    _blocks(drawing, 462, what, parts, SHARING_FEW, merge=True)
    drawing.notes(
        662,
        "Time runs to the right. In a cell: the work tile, and which tiles of its keys. In v12 "
        "blocks of one color are at different tiles",
        "at the same time, and each reads them from DRAM; in v17 they are at the same ones, and "
        "one reads them for all.",
    )
    return drawing


def _blocks(
    drawing: Drawing,
    y: float,
    what: str,
    taken: list[list[Piece]],
    sharing: int,
    merge: bool = False,
) -> None:
    """What each block computes, one piece after another."""
    drawing.text(18, y, what, bold=True)
    most = max(sum(piece.tiles for piece in pieces) for pieces in taken)
    for block, pieces in enumerate(taken):
        x, top = float(LEFT), y + 12 + ROW * block
        drawing.text(18, top + ROW / 2, f"block {block}")
        for piece in pieces:
            text = f"{piece.work}: {piece.first}–{piece.end - 1}"
            shown = text if piece.tiles > 2 else ""
            color = BANK_COLORS[piece.work // sharing]
            drawing.cell(x, top, piece.tiles * TILE, ROW, color, shown)
            x += piece.tiles * TILE
        end = LEFT + most * TILE
        if x < end:
            drawing.cell(x, top, end - x, ROW, EMPTY, "nothing to do" if end - x > 80 else "")
        if merge:
            drawing.cell(end, top, MERGE * TILE, ROW, BANK_COLORS[4], "merge")
