"""The diagram of v19: how the blocks of a team exchange their parts, and how large teams are."""

from __future__ import annotations

from .svg import BANK_COLORS, EMPTY, INK, NONE, SMALL, TINTS, TITLE, Drawing, interval

CLUSTER, CLUSTERS = 8, 14  # blocks, and how many clusters run at once
SMALLEST = 2  # team
ROWS, KEYS, COLUMNS = 64, 1024, 128  # of a work tile; its keys; head_dim
SHOWN = 1  # the block that everything is shown of

LEFT, PITCH = 112, 87  # pixels: of the blocks, side by side
STRIPE, STATE, INSET = 7.25, 10.5, 3
KEYS_TOP, PART_TOP, GOT_TOP, OUT_TOP = 54, 112, 222, 286
KEYS_HEIGHT, PART_HEIGHT, OUT_HEIGHT = 40, 44, 32
LANES_TOP, LANE = 11, 8  # of the ways from part to part, below the parts
SQUARE, TEAM_PITCH, TEAMS_TOP = 28, 266, 422


def figures() -> dict[str, Drawing]:
    """The drawing by the name of its file."""
    return {"cluster_merge": _cluster_merge()}


def team_size(work_tiles: int) -> int:
    """v19's: how many blocks share each of so many work tiles."""
    team = CLUSTER
    while team > SMALLEST and work_tiles * team > CLUSTERS * CLUSTER:
        team //= 2
    return team


def at_once(team: int) -> int:
    """How many teams of this size run at once."""
    return CLUSTERS * CLUSTER // team


def _cluster_merge() -> Drawing:
    drawing = Drawing(528)
    title = f"A work tile whose {KEYS} keys the {CLUSTER} blocks of a cluster share"
    drawing.text(18, 22, title, TITLE, bold=True)
    _labels(drawing, KEYS_TOP + KEYS_HEIGHT / 2, f"S: {ROWS} rows,", f"{KEYS} keys")
    _labels(drawing, PART_TOP + PART_HEIGHT / 2, "each block’s", "O, m and l")
    middle = (PART_TOP + PART_HEIGHT + GOT_TOP) / 2
    _labels(drawing, middle, "bulk copies,", "from shared", "memory to", "shared memory")
    _labels(drawing, GOT_TOP + PART_HEIGHT / 2, "what each", "block merges")
    _labels(drawing, OUT_TOP + OUT_HEIGHT / 2, f"o: {ROWS} rows,", f"{COLUMNS} columns")
    keys, columns = KEYS // CLUSTER, COLUMNS // CLUSTER
    for block in range(CLUSTER):
        x, color = LEFT + PITCH * block, BANK_COLORS[block]
        center = x + PITCH / 2
        drawing.text(center, 45, f"block {block}", anchor="middle", bold=block == SHOWN)
        text = interval(keys * block, keys)
        drawing.cell(x, KEYS_TOP, PITCH, KEYS_HEIGHT, EMPTY, text)
        drawing.line(center, KEYS_TOP + KEYS_HEIGHT + 2, center, PART_TOP - 3, arrow=True)
        _part(drawing, block, PART_TOP, BANK_COLORS)
        _part(drawing, block, GOT_TOP, [color] * CLUSTER)
        drawing.line(center, GOT_TOP + PART_HEIGHT + 3, center, OUT_TOP - 3, arrow=True)
        text = interval(columns * block, columns)
        drawing.cell(x, OUT_TOP, PITCH, OUT_HEIGHT, color, text)
    _exchange(drawing)
    drawing.box(LEFT + PITCH * SHOWN, OUT_TOP, PITCH, OUT_HEIGHT, NONE, INK, 2)
    drawing.notes(
        OUT_TOP + OUT_HEIGHT + 22,
        f"Arrows: block {SHOWN} gets stripe {SHOWN} of each other part, with m and l; dashed: of "
        "its own. Each other block gets its stripe likewise.",
        "v13’s parts go through L2 to a second kernel, v18’s through L2 to the last block, which "
        "merges alone. Here all merge.",
    )
    _teams(drawing)
    drawing.notes(506, "A square is a block, with its number in its team. A color is a work tile.")
    return drawing


def _labels(drawing: Drawing, middle: float, *lines: str) -> None:
    for n, line in enumerate(lines):
        drawing.text(18, middle + 15 * (n - (len(lines) - 1) / 2), line, SMALL)


def _stripe(block: int, stripe: int) -> float:
    """Where one of a block's stripes begins."""
    return LEFT + PITCH * block + INSET + STRIPE * stripe


def _part(drawing: Drawing, block: int, top: float, colors: list[str] | tuple[str, ...]) -> None:
    """A stripe of each color, then m and l."""
    for stripe, color in enumerate(colors):
        drawing.box(_stripe(block, stripe), top, STRIPE, PART_HEIGHT, color)
    for n, name in enumerate("ml"):
        x = _stripe(block, CLUSTER) + 2 + STATE * n
        drawing.cell(x, top, STATE, PART_HEIGHT, EMPTY, name)


def _exchange(drawing: Drawing) -> None:
    """The ways of the shown block's stripe from each part to where that block merges them."""
    start, end = PART_TOP + PART_HEIGHT, GOT_TOP - 2
    for block in range(CLUSTER):
        x, to = _stripe(block, SHOWN) + STRIPE / 2, _stripe(SHOWN, block) + STRIPE / 2
        drawing.box(_stripe(block, SHOWN), PART_TOP, STRIPE, PART_HEIGHT, NONE, INK, 2)
        if block == SHOWN:
            drawing.line(x, start + 2, x, end, dashed=True)
            continue
        # From farther away, farther down: so none crosses another.
        y = start + LANES_TOP + LANE * (abs(block - SHOWN) - 1)
        drawing.curve([(x, start + 2), (x, y), (to, y), (to, end)], arrow=True)
    width = STRIPE * CLUSTER + 2 + 2 * STATE
    drawing.box(_stripe(SHOWN, 0), GOT_TOP, width, PART_HEIGHT, NONE, INK, 2)


def _teams(drawing: Drawing) -> None:
    drawing.text(
        18,
        TEAMS_TOP - 24,
        f"{CLUSTERS} clusters at once: the more work tiles, the smaller the teams",
        bold=True,
    )
    first = 1
    for n in range(3):
        team = team_size(first)
        x, in_cluster, last = 18 + TEAM_PITCH * n, CLUSTER // team, at_once(team)
        drawing.text(x, TEAMS_TOP, f"{first}–{last} work tiles: {team} blocks for each", SMALL)
        for block in range(CLUSTER):
            color = TINTS[block // team]
            left = x + SQUARE * block
            drawing.cell(left, TEAMS_TOP + 12, SQUARE, SQUARE, color, f"{block % team}")
        text = "1 work tile" if in_cluster == 1 else f"{in_cluster} work tiles"
        drawing.text(x, TEAMS_TOP + SQUARE + 26, f"a cluster has {text}", SMALL)
        first = last + 1
