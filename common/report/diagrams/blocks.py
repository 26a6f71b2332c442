"""The diagrams of what blocks do: which tiles are theirs, what is in one, and when it does what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from .svg import (
    BANK_COLORS,
    EMPTY,
    MUTED,
    RAMP,
    SMALL,
    TINTS,
    TITLE,
    Drawing,
    text_width,
)

BLOCKS, TILE = 6, 50  # of the square S: blocks and tiles a block; a tile's pixels

# v08 at head_dim 128.
BLOCK_M, BLOCK_N, HEAD_DIM, PANEL, NUM_STAGES = 128, 128, 128, 64, 2
ELEMENT_BYTES, MBARRIER_BYTES, ALIGNMENT = 2, 8, 1024

# Ping-pong scheduling in units of one product.
PERIOD, UNIT = 4, 53  # products a tile, of two consumers; pixels of one
SOFTMAX, COPY = 2.4, 1.6
SHOWN = 13
S_COLOR, SOFTMAX_COLOR, V_COLOR, _ = TINTS
BUSY_COLORS = RAMP[1], RAMP[3]

# The causal schedule, for fewer SMs than there are.
SMS, Q_BLOCKS, HEADS = 6, 6, 4

# Equal shares, likewise: SMs with one block each, work tiles, and tiles of keys of each.
SHARED_SMS, SHARED_WORK, KEY_TILES = 4, 7, 32
MAX_BLOCKS, MIN_SAVED_TILES = 144, 5  # as in v12
SHARE_LEFT, SHARE_HEIGHT, ROUND = 76, 28, 356  # pixels


def figures() -> dict[str, Drawing]:
    """The drawings by the names of their files."""
    return {
        "tiles_of_s": _tiles_of_s(),
        "v08_block": _v08_block(),
        "ping_pong": _ping_pong(),
        "causal_schedule": _causal_schedule(),
        "equal_shares": _equal_shares(),
    }


# ---- which block owns which tile


def _tiles_of_s() -> Drawing:
    """S without and with a causal mask: a row of tiles is one block's."""
    drawing = Drawing(470)
    drawing.text(18, 22, "S [seq_q, seq_k] of one head", TITLE, bold=True)
    for x, causal in ((96, False), (502, True)):
        y = 92
        drawing.text(x, 50, "causal mask" if causal else "no mask", bold=True)
        for n in range(BLOCKS):
            middle = (n + 0.5) * TILE
            drawing.text(x + middle, y - 11, f"{n}", SMALL, MUTED, anchor="middle")
            drawing.text(x - 10, y + middle, f"block {n}", anchor="end")
        drawing.text(x - 10, y - 11, "tile of K, V", SMALL, MUTED, anchor="end")
        for block in range(BLOCKS):
            for tile in range(BLOCKS):
                left, top = x + tile * TILE, y + block * TILE
                hidden = causal and tile > block
                drawing.box(left, top, TILE, TILE, EMPTY if hidden else TINTS[block % 4])
                diagonal = causal and tile == block
                if diagonal:
                    corners = ((left, top), (left + TILE, top), (left + TILE, top + TILE))
                    drawing.polygon(corners, EMPTY)
                if not hidden:
                    inset = TILE / 3 if diagonal else TILE / 2
                    at = left + inset, top + TILE - inset
                    drawing.text(*at, f"{tile}", anchor="middle")
    drawing.notes(
        420,
        "A block owns BLOCK_M rows of S, those of one color, and walks along them, one tile of "
        "BLOCK_N keys after another.",
        "Grey is hidden: of a tile on the diagonal S is computed, and then −∞ where it is hidden; "
        "the others are passed over.",
    )
    return drawing


# ---- v08's block


@dataclass(frozen=True)
class Place:
    """In shared memory."""

    name: str
    color: str
    start: int
    size: int


def shared_memory() -> list[Place]:
    """Of a block of v08: each panel of its tiles, and the mbarriers."""
    places = []
    start = 0
    tiles = [("Q, in the end O", BLOCK_M, TINTS[3])]
    tiles += [(f"K, stage {stage}", BLOCK_N, TINTS[0]) for stage in range(NUM_STAGES)]
    tiles += [(f"V, stage {stage}", BLOCK_N, TINTS[2]) for stage in range(NUM_STAGES)]
    for name, rows, color in tiles:
        for column in range(0, HEAD_DIM, PANEL):
            size = rows * PANEL * ELEMENT_BYTES
            text = f"{name}: d {column}–{column + PANEL - 1}"
            places.append(Place(text, color, start, size))
            start += size
    barriers = 1 + 2 * NUM_STAGES
    places.append(Place(f"{barriers} mbarriers", EMPTY, start, barriers * MBARRIER_BYTES))
    return places


def shared_memory_bytes() -> int:
    """All of it, in whole periods of the swizzle."""
    last = shared_memory()[-1]
    return -(-(last.start + last.size) // ALIGNMENT) * ALIGNMENT


def _v08_block() -> Drawing:
    """A block at work on stage 0 while stage 1 is filled."""
    drawing = Drawing(424)
    title = f"A block of v08: {BLOCK_M} queries, tiles of {BLOCK_N} keys, head_dim {HEAD_DIM}"
    drawing.text(18, 22, title, TITLE, bold=True)
    top, row = 82, 26
    places = shared_memory()

    left, width = 286, 184
    drawing.text(left + width / 2, 50, "shared memory", bold=True, anchor="middle")
    kib = f"{shared_memory_bytes() // 1024} KiB"
    drawing.text(left + width / 2, 67, kib, SMALL, MUTED, anchor="middle")
    for n, place in enumerate(places):
        y = top + n * row
        drawing.cell(left, y, width, row, place.color, place.name)
        drawing.text(left - 6, y + 9, f"{place.start // 1024}", SMALL, MUTED, anchor="end")

    def middle(first: int, count: int = 2) -> float:
        """Of some places."""
        return top + (first + count / 2) * row

    q, k, v = 0, 2, 2 + 2 * NUM_STAGES
    drawing.text(18, 50, "global memory", bold=True)
    sources = (("Q", q, TINTS[3]), ("K", k + 2, TINTS[0]), ("V", v + 2, TINTS[2]))
    for name, place, color in sources:
        y = middle(place)
        drawing.cell(18, y - 18, 76, 36, color, f"{name} of a head")
        drawing.line(98, y, left - 28, y, arrow=True)
        text = "TMA, once" if name == "Q" else "TMA, stage 1"
        drawing.text(98, y - 11, text, SMALL)
    drawing.text(98, middle(q) + 12, "and O back, at the end", SMALL, MUTED)
    y = middle(k, 2)
    drawing.text(18, y - 9, "Thread 0 asks for boxes of", SMALL, MUTED)
    drawing.text(18, y + 7, f"[{BLOCK_N} rows, {PANEL} columns]", SMALL, MUTED)

    right, warp = 606, 32
    drawing.text(right, 50, "two warpgroups", bold=True)
    drawing.text(right, 67, "S, P and O in registers", SMALL, MUTED)
    for group in range(2):
        y = top + group * (4 * warp + 14)
        for n in range(4):
            first = 64 * group + 16 * n
            text = f"warp {4 * group + n}: rows {first}–{first + 15}"
            drawing.cell(right, y + n * warp, 206, warp, TINTS[1], text)
    bracket = right - 10
    bottom = top + 8 * warp + 14
    drawing.curve([(right - 4, top), (bracket, top), (bracket, bottom), (right - 4, bottom)])
    drawing.text((left + width + bracket) / 2, 67, "wgmma", bold=True, anchor="middle")
    for place, text in (
        (q, "S = Q K^T reads Q"),
        (k, "and K, stage 0"),
        (v, "O += P V: V, stage 0"),
    ):
        y = middle(place)
        drawing.line(left + width + 6, y, bracket - 3, y, arrow=True)
        drawing.text(left + width + 8, y - 11, text, SMALL)
    drawing.notes(
        388,
        "All warps compute on stage 0 while the copy engine fills stage 1; then they meet at a "
        "barrier, and the stages change places.",
        "Numbers: where a panel begins, in KiB. Each panel has rows of 128 bytes, swizzled.",
    )
    return drawing


# ---- ping-pong scheduling


@dataclass(frozen=True)
class Span:
    """From one time to another, in units of a product."""

    start: float
    end: float
    tile: int


@dataclass(frozen=True)
class Consumer:
    """Its products and softmaxes of some tiles."""

    s: list[Span]
    softmax: list[Span]
    pv: list[Span]


def consumers() -> list[Consumer]:
    """Each starts S of a tile and O += P V of the tile before, half a period after the other."""
    found = []
    for turn in range(2):
        tiles = range(SHOWN // PERIOD + 3)
        starts = [PERIOD * (tile - 1) + 2 * turn for tile in tiles]
        s = [Span(at, at + 1, tile) for tile, at in zip(tiles, starts, strict=True)]
        pv = [Span(at + 1, at + 2, tile - 1) for tile, at in zip(tiles, starts, strict=True)]
        softmax = [Span(one.end, one.end + SOFTMAX, one.tile) for one in s]
        found.append(Consumer(s, softmax, pv))
    return found


def copies() -> tuple[list[Span], list[Span]]:
    """K and V of each tile, as soon as both consumers have read the tile whose stage it takes.

    That O += P V is done a consumer sees after its softmax.
    """
    last = consumers()[-1]
    k = [Span(s.end, s.end + COPY, s.tile + NUM_STAGES) for s in last.s]
    v = [
        Span(softmax.end, softmax.end + COPY, pv.tile + NUM_STAGES)
        for softmax, pv in zip(last.softmax, last.pv, strict=True)
    ]
    return k, v


def _ping_pong() -> Drawing:
    """A producer, and two consumers that take turns at the tensor cores between them."""
    drawing = Drawing(446)
    title = "Ping-pong scheduling: one consumer multiplies, the other computes its softmax"
    drawing.text(18, 22, title, TITLE, bold=True)
    left, height = 116, 28

    def spans(y: float, found: list[Span], color: str, name: str, height: int = height) -> None:
        for span in found:
            start, end = max(span.start, 0), min(span.end, SHOWN)
            if start < end:
                width = (end - start) * UNIT
                text = f"{name}{span.tile}"
                text = text if text_width(text, SMALL) < width else ""
                drawing.cell(left + start * UNIT, y, width, height, color, text)

    k, v = copies()
    drawing.text(18, 62, "producer", bold=True)
    spans(48, k, S_COLOR, "copy K ", 22)
    spans(72, v, V_COLOR, "copy V ", 22)
    turns = range(0, SHOWN + 1, 2)
    tensor = 214
    for n, (consumer, softmax, products) in enumerate(
        zip(consumers(), (118, 312), (150, 280), strict=True)
    ):
        drawing.text(18, (softmax + products + height) / 2, f"consumer {n}", bold=True)
        spans(softmax, consumer.softmax, SOFTMAX_COLOR, "softmax ")
        spans(products, consumer.s, S_COLOR, "S ")
        spans(products, consumer.pv, V_COLOR, "P V ")
        color = BUSY_COLORS[n]
        for one in consumer.s:
            start, end = max(one.start, 0), min(one.start + 2, SHOWN)
            if start < end:
                text = f"consumer {n}" if end - start > 1 else ""
                x, width = left + start * UNIT, (end - start) * UNIT
                drawing.cell(x, tensor, width, height + 4, color, text)
    drawing.text(18, tensor + 16, "tensor cores", bold=True)
    for n, time in enumerate(turns[1:]):
        x = left + time * UNIT
        ends = (150 + height + 4, 280 - 4)
        drawing.line(x, ends[n % 2], x, ends[1 - n % 2], arrow=True)
        if time + 1 < SHOWN:
            drawing.text(x + 5, ends[0] + 9 if n % 2 == 0 else ends[1] - 9, "turn", SMALL, MUTED)
    drawing.notes(
        376,
        "A consumer starts S of its next tile and O += P V of the last, then passes the turn: the "
        "other's products come next.",
        "A softmax waits for its S only. It runs under its own consumer's O += P V and under both "
        "of the other's products.",
        "Schematic: a product is one unit. As long as a softmax takes less than three, the tensor "
        "cores never pause.",
    )
    return drawing


# ---- the causal schedule


class Work(Protocol):
    """What an SM does at a time, and how long that takes."""

    head: int

    @property
    def tiles(self) -> int: ...


@dataclass(frozen=True)
class WorkTile:
    """A block of queries of a head: it sees as many tiles of keys as its number, and one more."""

    head: int
    q_block: int

    @property
    def tiles(self) -> int:
        return self.q_block + 1


def rounds() -> list[list[WorkTile]]:
    """v10: a work tile for every SM, from long to short in one round, the reverse in the next."""
    found = []
    for head in range(HEADS):
        work_tiles = [WorkTile(head, q_block) for q_block in range(Q_BLOCKS)]
        downwards = (HEADS - 1 - head) % 2 == 0  # the last one is
        found.append(work_tiles[::-1] if downwards else work_tiles)
    return found


def as_they_come() -> list[list[WorkTile]]:
    """v09, by SM: blocks in the order of their numbers."""
    numbered = [WorkTile(head, q_block) for head in range(HEADS) for q_block in range(Q_BLOCKS)]
    return by_free_sm(numbered, SMS)


def by_free_sm(works: Iterable[Work], sms: int) -> list[list[Work]]:
    """Each work on the SM that is free first."""
    taken: list[list[Work]] = [[] for _ in range(sms)]
    for work in works:
        min(taken, key=tiles).append(work)
    return taken


def tiles(works: Iterable[Work]) -> int:
    return sum(work.tiles for work in works)


def _causal_schedule() -> Drawing:
    """Which work tiles an SM takes, and when it has done them."""
    drawing = Drawing(384)
    title = f"A causal mask: {HEADS} heads of {Q_BLOCKS} blocks of queries, on {SMS} SMs"
    drawing.text(18, 22, title, TITLE, bold=True)

    width, height, line, left, top = 46, 28, 56, 84, 92
    drawing.text(18, 50, "v10: the work tiles of each round, by length", bold=True)
    for sm in range(SMS):
        middle = left + (sm + 0.5) * width
        drawing.text(middle, top - 12, f"SM {sm}", SMALL, MUTED, anchor="middle")
    snake: list[tuple[float, float]] = []
    for n, work_tiles in enumerate(rounds()):
        y = top + n * line
        drawing.text(18, y + height / 2, f"round {n}")
        for sm, work in enumerate(work_tiles):
            text = f"{work.tiles}"
            drawing.cell(left + sm * width, y, width, height, TINTS[work.head], text)
        ends = (left - 10, left + SMS * width + 10)
        below = y + height + 10
        snake += [(end, below) for end in (ends if work_tiles[0].q_block == 0 else ends[::-1])]
    drawing.curve(snake, arrow=True)
    text = "The arrow goes from short to long, a round from left to right, the next one back."
    drawing.text(18, top + HEADS * line + 16, text, color=MUTED)
    text = "Color: the head. Length: the tiles of K and V that the queries of a work tile see."
    drawing.text(18, top + HEADS * line + 36, text, color=MUTED)

    by_sm = [[work_tiles[sm] for work_tiles in rounds()] for sm in range(SMS)]
    for y, what, taken in (
        (50, "v09: in the order of the grid", as_they_come()),
        (196, "v10", by_sm),
    ):
        draw_bars(drawing, 430, y, what, taken)
    return drawing


def draw_bars(drawing: Drawing, x: float, y: float, what: str, taken: list[list[Work]]) -> None:
    """What each SM does one after another."""
    unit, row = 19, 17
    most = max(map(tiles, taken))
    drawing.text(x, y, f"{what}: done after the time of {most} tiles", bold=True)
    for sm, works in enumerate(taken):
        left, top = x + 46, y + 16 + row * sm
        drawing.text(x, top + row / 2, f"SM {sm}", SMALL, MUTED)
        for work in works:
            width = work.tiles * unit
            drawing.cell(left, top, width, row, TINTS[work.head], f"{work.tiles}")
            left += width
    end = x + 46 + most * unit
    drawing.line(end, y + 12, end, y + 20 + row * len(taken), dashed=True)


# ---- equal shares


@dataclass(frozen=True)
class Piece:
    """The tiles of keys of a work tile of which a block computes S."""

    work: int
    first: int
    end: int

    @property
    def tiles(self) -> int:
        return self.end - self.first


def in_rounds(blocks: int, num_work: int, num_tiles: int) -> list[list[Piece]]:
    """v11 without a mask, by block: each takes one work tile in a round."""
    return [
        [Piece(work, 0, num_tiles) for work in range(block, num_work, blocks)]
        for block in range(blocks)
    ]


def equal_shares(
    blocks: int, num_work: int, num_tiles: int, min_saved_tiles: int = MIN_SAVED_TILES
) -> list[list[Piece]]:
    """v12 without a mask, by block, in the order of time: as by Schedule's constructor and at();
    and b10, whose blocks must save more tiles.

    A rest begins at the tile after the beginning's last one. (In v12 its `first` is that last one:
    P is handed over, and O += P V of it is left to the next block.)
    """
    full_rounds, left = divmod(num_work, blocks)
    saved = (blocks - left) * num_tiles
    if left == 0 or blocks > MAX_BLOCKS or saved < min_saved_tiles * blocks:
        return in_rounds(blocks, num_work, num_tiles)
    rounds = full_rounds - 1

    def cut(block: int) -> tuple[int, int]:
        """Where its share begins: work tiles before it, and tiles of the next."""
        work_tiles, part = divmod(block * (blocks + left), blocks)
        return rounds * blocks + work_tiles, num_tiles * part // blocks

    shares = []
    for block in range(blocks):
        (first_work, first_tile), (end_work, end_tile) = cut(block), cut(block + 1)
        pieces = [Piece(block + n * blocks, 0, num_tiles) for n in range(rounds)]
        pieces += [Piece(end_work, 0, end_tile)] if end_tile else []
        pieces += [Piece(work, 0, num_tiles) for work in range(end_work - 1, first_work - 1, -1)]
        if first_tile:  # of the last one, which the block before has begun
            pieces[-1] = Piece(first_work, first_tile, num_tiles)
        shares.append(pieces)
    return shares


def _equal_shares() -> Drawing:
    """The same work tiles in rounds, and in shares that end within one."""
    drawing = Drawing(506)
    sizes = SHARED_SMS, SHARED_WORK, KEY_TILES
    title = f"No mask: {SHARED_WORK} work tiles of {KEY_TILES} tiles of keys, on {SHARED_SMS} SMs"
    drawing.text(18, 22, title, TITLE, bold=True)
    y, line, bottom = 218, 54, 440  # of the lower panel
    _shares(drawing, 52, SHARE_HEIGHT, bottom, "v11: a work tile in each round", in_rounds(*sizes))
    shares = equal_shares(*sizes)
    spans = _shares(drawing, y, line, bottom, "v12: equal shares", shares)
    for block, pieces in enumerate(shares[:-1]):
        work, x, top = pieces[0].work, SHARE_LEFT, y + 20 + line * block + SHARE_HEIGHT
        begun, goes_on = spans[block][work].end, spans[block + 1][work].start
        points = [(begun, top + 1), (begun, top + 18), (goes_on, top + 18), (goes_on, top + 25)]
        drawing.curve([(x + at * ROUND, down) for at, down in points], arrow=True)
        text = "O, P, m, l in global memory"
        drawing.text(x + begun * ROUND + 7, top + 9, text, SMALL, MUTED)
    drawing.notes(
        464,
        "Color and number: the work tile. Time runs to the right, and all work tiles take equally "
        "long.",
        "Where a share ends within a work tile, its block computes that part first; the next block "
        "computes the rest, last.",
    )
    return drawing


def _shares(
    drawing: Drawing, y: float, line: float, bottom: float, what: str, taken: list[list[Piece]]
) -> list[dict[int, Span]]:
    """What each block does one after another. Returns when, in rounds, by work tile."""
    drawing.text(18, y, what, bold=True)
    rounds = max(sum(piece.tiles for piece in pieces) for pieces in taken) / KEY_TILES
    end = SHARE_LEFT + rounds * ROUND
    spans: list[dict[int, Span]] = []
    for block, pieces in enumerate(taken):
        at, top = 0.0, y + 20 + line * block
        drawing.text(18, top + SHARE_HEIGHT / 2, f"block {block}")
        spans.append({})
        for piece in pieces:
            span = spans[-1][piece.work] = Span(at, at + piece.tiles / KEY_TILES, piece.work)
            x, width = SHARE_LEFT + at * ROUND, (span.end - at) * ROUND
            is_part = piece.tiles < KEY_TILES
            text = f": tiles {piece.first}–{piece.end - 1}" if is_part else ""
            color = BANK_COLORS[piece.work]
            drawing.cell(x, top, width, SHARE_HEIGHT, color, f"{piece.work}{text}")
            at = span.end
        x = SHARE_LEFT + at * ROUND
        if x < end:
            drawing.cell(x, top, end - x, SHARE_HEIGHT, EMPTY, "nothing to do")
    drawing.line(end, y + 12, end, bottom, dashed=True)
    drawing.text(end, y, f"{rounds:g} rounds", anchor="middle")
    return spans
