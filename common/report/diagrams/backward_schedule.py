"""The diagram of backward's causal schedule: whose work is longest, and who takes which when."""

from __future__ import annotations

from dataclasses import dataclass

from .blocks import by_free_sm, draw_bars
from .svg import EMPTY, MUTED, SMALL, TINTS, TITLE, Drawing

# For fewer SMs, blocks of keys and heads than there are.
SMS, K_BLOCKS, HEADS = 6, 6, 3

CELL = 36  # pixels of a tile of S


@dataclass(frozen=True)
class Work:
    """A block of keys of a head: the queries from its own on see it."""

    head: int
    k_block: int

    @property
    def tiles(self) -> int:
        """Of queries."""
        return K_BLOCKS - self.k_block


def figures() -> dict[str, Drawing]:
    """The drawings by the names of their files."""
    return {"backward_schedule": _backward_schedule()}


def as_they_come() -> list[list[Work]]:
    """b06, by SM: head by head."""
    numbered = [Work(head, k_block) for head in range(HEADS) for k_block in range(K_BLOCKS)]
    return by_free_sm(numbered, SMS)


def longest_first() -> list[list[Work]]:
    """b07 and b08, by SM: of a section of heads whichever work is the longest that is left."""
    works = [Work(head, k_block) for k_block in range(K_BLOCKS) for head in range(HEADS)]
    return by_free_sm(works, SMS)


def walk(k_block: int) -> list[int]:
    """The tiles of queries in the order in which b08 takes them for a block of keys: once around,
    the later half of the works upward.
    """
    tiles = list(range(k_block, K_BLOCKS))
    if k_block < K_BLOCKS / 2:
        tiles.reverse()
    start = k_block % len(tiles)
    return tiles[start:] + tiles[:start]


def _backward_schedule() -> Drawing:
    """The tiles of S by columns; then which works an SM takes, and when it has done them."""
    drawing = Drawing(392)
    title = f"A causal mask in backward: {HEADS} heads of {K_BLOCKS} blocks of keys, on {SMS} SMs"
    drawing.text(18, 22, title, TITLE, bold=True)

    left, top = 92, 92
    drawing.text(18, 50, "S of a head: a block keeps a column of keys", bold=True)
    drawing.text(18, top - 12, "keys", SMALL, MUTED)
    drawing.text(18, top + K_BLOCKS * CELL / 2, "queries", SMALL, MUTED)
    for k_block in range(K_BLOCKS):
        x, walked = left + k_block * CELL, walk(k_block)
        drawing.text(x + CELL / 2, top - 12, f"{k_block}", SMALL, MUTED, anchor="middle")
        for q_tile in range(K_BLOCKS):
            is_seen = q_tile in walked
            color, number = (TINTS[0], f"{walked.index(q_tile)}") if is_seen else (EMPTY, "")
            drawing.cell(x, top + q_tile * CELL, CELL, CELL, color, number)
        length = f"{Work(0, k_block).tiles}"
        drawing.text(x + CELL / 2, top + K_BLOCKS * CELL + 14, length, anchor="middle", bold=True)
    drawing.text(18, top + K_BLOCKS * CELL + 14, "tiles", SMALL, MUTED)

    for y, what, taken in (
        (50, "b06: in the order of the grid", as_they_come()),
        (200, "b07, b08: longest first", longest_first()),
    ):
        draw_bars(drawing, 400, y, what, taken)
    drawing.notes(
        354,
        "Color: the head. Length: the tiles of queries that see the keys. The first keys are seen "
        "by all; in forward the last queries see most.",
        "Numbers in S: the order in which b08 takes the tiles of a block, each block a step behind "
        "its neighbour, the later ones upward.",
    )
    return drawing
