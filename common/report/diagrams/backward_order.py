"""The diagram of b09's order: when which block of keys adds to which tile of dQ, and who waits."""

from __future__ import annotations

from .svg import ACCENT, EMPTY, MUTED, SMALL, TINTS, TITLE, Drawing

# Of one head: blocks of keys, and tiles of as many queries.
BLOCKS = TILES = 6

FOLLOWED = 4  # the tile in another color
LEFT, STEP, ROW = 58, 52, 30  # pixels: where time begins, a step of it, and a row's height


def figures() -> dict[str, Drawing]:
    """The drawings by the names of their files."""
    return {"backward_order": _backward_order()}


def in_order(*, last_keys_first: bool) -> list[int]:
    """The blocks of keys as they are taken, and as they add to each tile that sees them."""
    return list(range(BLOCKS))[:: -1 if last_keys_first else 1]


def walk(block: int, *, last_keys_first: bool) -> list[int]:
    """The tiles that see a block, as it takes them: up from its first one, or down to it."""
    return list(range(block, TILES))[:: 1 if last_keys_first else -1]


def schedule(*, last_keys_first: bool) -> dict[int, dict[int, int]]:
    """By block, when it starts each tile of its walk. All blocks are there from step 0 on, and
    none starts a tile before the one in front of it in the order has ended it.
    """
    added = [0] * TILES  # when the terms so far are in the tile's sum
    starts: dict[int, dict[int, int]] = {}
    for block in in_order(last_keys_first=last_keys_first):
        time, starts[block] = 0, {}
        for tile in walk(block, last_keys_first=last_keys_first):
            starts[block][tile] = start = max(time, added[tile])
            time = added[tile] = start + 1
    return starts


def waits(starts: dict[int, int]) -> list[tuple[int, int]]:
    """When a block waits: from the end of one tile, or from step 0, to the start of the next."""
    begins = sorted(starts.values())
    ends = [0, *(begin + 1 for begin in begins[:-1])]
    return [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]


def _backward_order() -> Drawing:
    """Both orders, side by side."""
    drawing = Drawing(358)
    title = f"A causal mask: {BLOCKS} blocks of keys add to dQ of a head, to each tile in one order"
    drawing.text(18, 22, title, TITLE, bold=True)
    _panel(drawing, 18, "First keys first", "down from the last tile", last_keys_first=False)
    _panel(drawing, 436, "Last keys first", "up from the diagonal", last_keys_first=True)
    drawing.notes(
        294,
        "A row: a block of keys, on an SM of its own. A number: the tile of queries to whose dQ it "
        "adds in that step.",
        f"Red: tile {FOLLOWED}, which gets one term a step, from neighbour to neighbour. Where a "
        "row ends, the SM takes its next work.",
        "Schematic: as many queries in a tile as keys in a block. A block waits before it computes "
        "a tile, in b09 before it adds it.",
    )
    return drawing


def _panel(drawing: Drawing, x: float, order: str, route: str, *, last_keys_first: bool) -> None:
    """A row for each block, over time."""
    by_block = schedule(last_keys_first=last_keys_first)
    waited = sum(end - start for starts in by_block.values() for start, end in waits(starts))
    drawing.text(x, 50, f"{order}, {route}: {waited} steps of waiting", bold=True)
    left, top = x + LEFT, 92
    drawing.text(x, top - 12, "step", SMALL, MUTED)
    for time in range(1 + max(max(starts.values()) for starts in by_block.values())):
        drawing.text(left + (time + 0.5) * STEP, top - 12, f"{time}", SMALL, MUTED, anchor="middle")
    for block, starts in by_block.items():
        y = top + block * ROW
        drawing.text(x, y + ROW / 2, f"block {block}")
        for start, end in waits(starts):
            drawing.cell(left + start * STEP, y, (end - start) * STEP, ROW, EMPTY, "waits")
        for tile, start in starts.items():
            color = ACCENT if tile == FOLLOWED else TINTS[0]
            drawing.cell(left + start * STEP, y, STEP, ROW, color, f"{tile}")
