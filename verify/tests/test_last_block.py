"""v18 shares the keys of few rows out among the rings of all blocks, one of which merges, and v20
does among the blocks: whose are which, and what comes of it.

On the checker's few multiprocessors a work tile has few parts. Calls of v18 with many are here,
with the mutants that only these, the tests of shares and a sanitizer reject:
verify/mutants/last_block. v20's are in test_own_keys.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest
import torch

from common.catalog import find_step
from common.problem import Shape
from common.step import Step
from verify.case import Case
from verify.inputs import graded, rising_logits, walks
from verify.layouts import packed, padded, transposed
from verify.tests.more_multiprocessors import (
    Call,
    OnMoreMultiprocessors,
    ask_schedule,
    check_bounds,
    write_schedule,
)

STEP = find_step("v18")
BF16, FP16 = torch.bfloat16, torch.float16

# ---- which tiles are whose, and who merges

RING_SHARE = 32  # tiles: shares for two rings have as many
MOST_TILES = 2**24 - 1  # of 128 keys, of a seq_k of 32 bits; floats count no more, one by one

# What the generated kernel below asks of a step.
RINGS = """
    constexpr uint32_t MOST_RINGS = MAX_RINGS;
    const uint32_t used_rings = schedule.rings;
    const auto share_of = [&](uint32_t ring) { return Share(schedule, ring); };
"""
NO_RINGS = """
    constexpr uint32_t MOST_RINGS = 1, used_rings = 1;
    const auto share_of = [&](uint32_t) { return Share(schedule); };
"""


@dataclass(frozen=True)
class Kind:
    """What shares depend on beside the call's sizes: a step and a head_dim."""

    step: str
    head_dim: int
    tile_rows: int  # of a work tile
    tile_keys: int
    max_rings: int  # of a block
    asks: str
    long_share: int  # shares of so many tiles are all equal, unless as many parts keep all busy
    rest_share: int  # and where whole work tiles follow, shares of so many
    keeps_neighbors: bool  # but there row tiles that share keys stay whole, if most are busy

    def __str__(self) -> str:
        return f"{self.step}-{self.head_dim}"


# A tile of K has 16 KB, or 32 where long_share is not the same.
V18 = Kind("v18", 64, 32, 128, 2, RINGS, 240, 240, True)
V20 = Kind("v20", 64, 16, 128, 1, NO_RINGS, 240, 6, False)
KINDS = (
    V18,
    replace(V18, head_dim=72, max_rings=1, long_share=120, rest_share=120),
    replace(V18, head_dim=256, max_rings=1, tile_keys=64),
    V20,
    replace(V20, head_dim=72, tile_keys=64),
    replace(V20, head_dim=256, tile_keys=64, long_share=120, rest_share=20),
)


@dataclass(frozen=True)
class Sizes:
    blocks: int  # that can run at once, one on each multiprocessor
    tiles: int  # of keys; all but the last are whole
    heads: int = 1
    kv_heads: int = 1
    batch: int = 1
    seq_q: int = 1
    causal: bool = False
    tile_rows: int = 32  # these are each kind's
    tile_keys: int = 128

    @property
    def seq_k(self) -> int:
        return self.tiles * self.tile_keys - 50

    @property
    def rows(self) -> int:
        return self.heads // self.kv_heads * self.seq_q

    @property
    def work_tiles(self) -> list[tuple[int, int, int]]:
        """(batch, key head, first row) of each, in order."""
        return [
            (batch, kv_head, first_row)
            for batch in range(self.batch)
            for kv_head in range(self.kv_heads)
            for first_row in range(0, self.rows, self.tile_rows)
        ]

    @property
    def launched(self) -> int:
        """Blocks: no more than there are tiles of all work tiles."""
        return min(self.blocks, len(self.work_tiles) * self.tiles)

    def visible_tiles(self, first_row: int) -> int:
        """Of the keys that a work tile's last row sees."""
        if not self.causal:
            return self.tiles
        last_row = min(first_row + self.tile_rows, self.rows) - 1
        last_query = last_row // (self.heads // self.kv_heads)
        return -(-max(0, last_query + self.seq_k - self.seq_q + 1) // self.tile_keys)

    def __str__(self) -> str:
        heads = f"{self.batch}x{self.heads}of{self.kv_heads}"
        mask = "_causal" if self.causal else ""
        return f"{self.blocks}_blocks_{heads}x{self.seq_q}x{self.tiles}_tiles{mask}"


# Each kind is asked about each: with one ring of a block, and with two; with work tiles of 32 rows,
# and of 16; with tiles of 128 keys, and of 64. What a comment counts is of one of these.
SIZES = [
    # Whole work tiles are dealt out where they keep nine tenths of all rounds busy.
    Sizes(132, 64, 133, 133),  # with one ring 131 of 264 would be idle,
    Sizes(132, 64, 237, 237),  # 27,
    Sizes(132, 64, 238, 238),  # 26
    Sizes(132, 64, 528, 528),
    Sizes(10, 64, 17, 17),
    Sizes(10, 64, 18, 18),
    Sizes(2, 11, 7, 7),
    Sizes(2, 11, 9, 9),
    Sizes(2, 11, 18, 18),
    Sizes(10, 5, 35, 35),  # with two 5 of 40
    Sizes(10, 5, 36, 36),
    Sizes(2, 5, 4, 4),
    Sizes(1, 1),
    # As many parts of each, which are nine tenths of the shares.
    Sizes(132, 64, 40, 40),
    Sizes(132, 64, 39, 39),
    Sizes(132, 64, 128, 128),
    Sizes(132, 64, 118, 118),
    Sizes(10, 9, 3, 3),
    Sizes(10, 9, 9, 9),
    Sizes(20, 9, 8, 8),
    Sizes(20, 9, 9, 9),
    Sizes(10, 80, 9, 9),
    Sizes(37, 9, 4, 4),
    # Of lengths that are no multiple of the parts.
    Sizes(132, 17, 8, 8),
    Sizes(132, 31, 32, 8),
    Sizes(132, 133),
    Sizes(132, 5, 64, 64),
    Sizes(10, 10, 3, 3),
    Sizes(132, 500, 41, 41),
    # Row tiles that share keys are dealt out whole, however long shares are,
    Sizes(10, 801, 36, 18, seq_q=17),
    Sizes(10, 801, 36, 18, seq_q=16),
    Sizes(10, 801, 36, 18, seq_q=9),
    Sizes(10, 801, 36, 18, seq_q=8),
    # but not if there are too few, or too many blocks would be idle.
    Sizes(10, 801, 18, 9, seq_q=17),
    Sizes(10, 801, 26, 13, seq_q=17),
    # There is enough for two rings, or just not.
    Sizes(132, 64, 132, 132),
    Sizes(132, 63, 132, 132),
    Sizes(132, 8448),
    Sizes(132, 8447),
    Sizes(1, 64),
    Sizes(1, 63),
    Sizes(3, 28, 7, 7),
    Sizes(3, 27, 7, 7),
    Sizes(10, 34, 19, 19),
    Sizes(10, 33, 19, 19),
    Sizes(132, 31, 264, 264),  # there is for whole work tiles
    Sizes(132, 31, 263, 263),
    # All shares are equal where they are long, from 240 tiles on: with two rings,
    Sizes(132, 792, 80, 80),
    Sizes(132, 791, 80, 80),
    Sizes(10, 267, 18, 18),
    Sizes(10, 266, 18, 18),
    Sizes(10, 534, 9, 9),  # as many parts
    Sizes(10, 533, 9, 9),
    Sizes(132, 600, 8, 8),  # a work tile is long, but no share
    # and with one,
    Sizes(132, 792, 40, 40),
    Sizes(132, 791, 40, 40),
    Sizes(10, 267, 9, 9),
    Sizes(10, 266, 9, 9),
    # or from 120.
    Sizes(132, 396, 40, 40),
    Sizes(132, 395, 40, 40),
    Sizes(10, 134, 9, 9),
    Sizes(10, 133, 9, 9),
    # But as many parts keep all busy.
    Sizes(20, 481, 10, 10),
    Sizes(132, 5001, 33, 33),
    # Before whole work tiles a rest is cut if its shares are long, from 240 tiles on with two rings
    Sizes(10, 299, 36, 36),
    Sizes(10, 300, 36, 36),  # just as many each
    Sizes(132, 266, 502, 502),
    Sizes(132, 267, 502, 502),
    # and with one,
    Sizes(10, 299, 18, 18),
    Sizes(10, 300, 18, 18),
    Sizes(132, 298, 238, 238),
    Sizes(132, 299, 238, 238),
    # from 120,
    Sizes(10, 149, 18, 18),
    Sizes(10, 150, 18, 18),
    Sizes(132, 149, 238, 238),
    Sizes(132, 150, 238, 238),
    # from 20,
    Sizes(10, 24, 18, 18),
    Sizes(10, 25, 18, 18),
    Sizes(132, 24, 238, 238),
    Sizes(132, 25, 238, 238),
    # and from 6,
    Sizes(10, 9, 36, 36),
    Sizes(10, 10, 36, 36),
    Sizes(10, 6, 19, 19),
    Sizes(10, 7, 19, 19),
    Sizes(132, 7, 238, 238),
    Sizes(132, 8, 238, 238),
    Sizes(10, 45, 40, 40),  # there is none
    # or if many blocks would be idle.
    Sizes(10, 3, 31, 31),  # of 3 tiles for 10 blocks
    Sizes(10, 9, 31, 31),
    Sizes(10, 64, 23, 23),
    Sizes(132, 900, 265, 265),
    Sizes(132, 2, 400, 400),
    Sizes(132, 60, 140, 20, seq_q=19),  # row tiles share keys
    # No more blocks than there are tiles: parts of one tile, or work tiles of one.
    Sizes(132, 3),
    Sizes(20, 4, 3, 3),
    Sizes(132, 3, 39, 39),
    Sizes(132, 1, 100, 100),
    # There are a few more tiles.
    Sizes(132, 4, 39, 39),
    Sizes(132, 2, 100, 100),
    # A rest of work tiles of one tile is not cut, however many blocks are idle.
    Sizes(132, 1, 140, 140),
    Sizes(10, 1, 25, 25),
    Sizes(10, 2, 25, 25),  # of two it is
    # As many blocks as there are at most.
    Sizes(144, 1000),
    Sizes(144, 1000, 72, 72),
    Sizes(144, 9, 144, 144),
    Sizes(144, 9, 150, 150),
    Sizes(144, 9, 288, 288),
    # More tiles than 32 bits can count, the first ones of these, and all that they can.
    Sizes(144, 2**23, 512, 512),
    Sizes(144, MOST_TILES, 256, 256),
    Sizes(144, MOST_TILES, 257, 257),
    Sizes(144, 2**25 - 2, 129, 129),  # whole work tiles, although there is none for some blocks
    Sizes(144, 2**25 - 2, 272, 272),
    Sizes(144, 2**25 - 2, 273, 273),
    Sizes(144, MOST_TILES, 289, 289),
    Sizes(144, MOST_TILES, 17, 17, 17),
    # As many parts, if 32 bits can count all tiles as often as there are parts of each.
    Sizes(144, MOST_TILES),
    Sizes(144, 14913080),
    Sizes(144, 14913081),  # with two rings these are too many
    Sizes(144, 29826432),
    # Work tiles of several batches, key heads and tiles of rows.
    Sizes(44, 9, 6, 2, 2, 21),
    Sizes(44, 9, 6, 2, 2, 11),
    Sizes(37, 9, 6, 2, 2, 10),
    Sizes(70, 9, 6, 2, 3, 65),
    Sizes(12, 5, 6, 2, 3, 65),
    Sizes(11, 5, 6, 2, 3, 65),
    Sizes(5, 9, 6, 2, 3, 65),
    # Of as many tiles as the last one has; the first ones see fewer, down to none.
    Sizes(70, 7, 2, 1, 1, 200, causal=True),
    Sizes(70, 3, 1, 1, 1, 500, causal=True),
    Sizes(10, 3, 1, 1, 1, 500, causal=True),
    Sizes(8, 3, 1, 1, 1, 500, causal=True),
    Sizes(132, 20, 2, 2, 1, 1000, causal=True),
    Sizes(132, 20, 6, 2, 2, 193, causal=True),
    Sizes(10, 20, 6, 2, 2, 193, causal=True),
]


def sizes_of(kind: Kind) -> list[Sizes]:
    its = [replace(x, tile_rows=kind.tile_rows, tile_keys=kind.tile_keys) for x in SIZES]
    return [sizes for sizes in its if sizes.seq_k < 2**31]


@dataclass(frozen=True)
class Sharing:
    rings: int  # of a block that have a share
    shares: int  # of all blocks
    cut_works: int  # so many work tiles are cut, and the others dealt out whole in turn
    parts: int = 0  # so many equal ones of each, or else all shares are as long, or one tile longer


def expected_sharing(sizes: Sizes, kind: Kind) -> Sharing:
    """As the steps say they do, by counting what is idle and how long shares are."""
    works, shares, rings = len(sizes.work_tiles), sizes.launched, 1
    max_rings = kind.max_rings
    all_tiles = works * sizes.tiles

    def is_even(shares: int) -> bool:
        idle = -works % shares  # in the last round
        return works >= shares and works >= 9 * idle

    if is_even(max_rings * shares) or all_tiles >= RING_SHARE * max_rings * shares:
        rings, shares = max_rings, max_rings * shares
    cut = works % shares
    if cut == 0 or sizes.tiles == 1 or cut * sizes.tiles >= 2**32:
        return Sharing(rings, shares, 0)
    if works > shares:
        is_long = cut * sizes.tiles >= kind.rest_share * shares
        share_keys = sizes.rows > sizes.tile_rows  # row tiles of a head of keys
        keeps = not is_long or (kind.keeps_neighbors and share_keys)
        return Sharing(rings, shares, 0 if is_even(shares) and keeps else cut)
    is_long = works * sizes.tiles >= kind.long_share * shares
    parts = shares // works
    idle = shares - works * parts
    are_equal = idle == 0 or (not is_long and 10 * idle <= shares)
    if are_equal and works * parts * sizes.tiles < 2**32:
        return Sharing(rings, works * parts, works, parts)
    return Sharing(rings, shares, works)


def expected_segments(sizes: Sizes, sharing: Sharing) -> list[tuple[int, int, int, int]]:
    """(share, work tile, first tile, end) of each, in the order of the shares, and of a block."""
    works, tiles, shares = len(sizes.work_tiles), sizes.tiles, sharing.shares
    cut = sharing.cut_works
    if parts := sharing.parts:
        cuts = [work * tiles + n * tiles // parts for work in range(cut) for n in range(parts)]
        cuts.append(cut * tiles)
    else:
        length, longer = divmod(cut * tiles, shares)
        cuts = [length * share + min(share, longer) for share in range(shares + 1)]
    segments = []
    for share, (begin, end) in enumerate(pairwise(cuts)):
        of_cut = [
            (share, work, max(begin - work * tiles, 0), min(end - work * tiles, tiles))
            for work in range(begin // tiles, -(-end // tiles))
        ]
        segments += reversed(of_cut)  # what goes on comes first
        segments += [(share, work, 0, tiles) for work in range(cut + share, works, shares)]
    return segments


# Each block leaves of each of its rings: how many have a share, the share's number, how many
# segments it has, whether it has parts to merge, the first share that has one of these, and struct
# Segment of each.
MOST_SEGMENTS = 20
WIDTH = 5 + 7 * MOST_SEGMENTS
SCHEDULE = f"""
    for (uint32_t ring = 0; ring < MOST_RINGS; ++ring) {{
        const Share share = share_of(ring);
        const bool merges = share.has_parts_to_merge();
        float* to = p.lse + {WIDTH} * (MOST_RINGS * block + ring);
        *to++ = used_rings, *to++ = share.index, *to++ = share.count, *to++ = merges;
        *to++ = merges ? schedule.first_share(share.first_work) : 0;
        for (uint32_t i = 0; i < share.count && i < {MOST_SEGMENTS}; ++i) {{
            const Segment segment = share.at(i);
            *to++ = segment.batch, *to++ = segment.kv_head, *to++ = segment.first_row;
            *to++ = segment.first, *to++ = segment.end;
            *to++ = segment.kind == GOES_ON, *to++ = segment.is_whole;
        }}
    }}
"""


def write_kind(folder: Path, step: Step, kind: Kind) -> Step:
    body = f"    const Schedule schedule(shape);{kind.asks}{SCHEDULE}"
    return write_schedule(folder, step, body, sizes_of(kind))


@dataclass(frozen=True)
class Segment:
    """The step's, and whose it is."""

    share: int
    work: int  # the work tile
    first: int
    end: int
    goes_on: bool
    is_whole: bool


@pytest.fixture(scope="module")
def schedule_of(tmp_path_factory) -> Callable[[Kind], Step]:
    return cache(
        lambda kind: write_kind(tmp_path_factory.mktemp("schedule"), find_step(kind.step), kind)
    )


@pytest.mark.parametrize(
    ("kind", "sizes"), [(kind, sizes) for kind in KINDS for sizes in sizes_of(kind)], ids=str
)
def test_shares(schedule_of, kind, sizes):
    check_shares(schedule_of(kind), kind, sizes)


def check_schedule(step: Step) -> None:
    """Of a step, or of a mutant of it."""
    for kind in KINDS:
        if step.name.startswith(kind.step):
            with TemporaryDirectory() as folder:
                schedule = write_kind(Path(folder), step, kind)
                for sizes in sizes_of(kind):
                    check_shares(schedule, kind, sizes)


# How long shares must be changes between these.
MOST_OF_FEW_COLUMNS = replace(V18, head_dim=128, max_rings=1, long_share=120, rest_share=120)
FEWEST_OF_MANY = replace(
    V18, head_dim=136, max_rings=1, tile_keys=64, long_share=320, rest_share=320
)


def check_columns(step: Step, kinds: Sequence[Kind]) -> None:
    """Shares, with numbers of columns between which what is long enough changes."""
    for kind in kinds:
        with TemporaryDirectory() as folder:
            schedule = write_kind(Path(folder), step, kind)
            for sizes in sizes_of(kind):
                check_shares(schedule, kind, sizes)


def check_shares(schedule: Step, kind: Kind, sizes: Sizes) -> None:
    max_rings = kind.max_rings
    sharing = expected_sharing(sizes, kind)
    work_tiles = sizes.work_tiles
    found: list[Segment] = []
    merges = {}  # share: the first one that has a part
    scenario = sizes_of(kind).index(sizes)
    blocks = ask_schedule(schedule, sizes, scenario, max_rings * WIDTH, kind.head_dim)
    for block, of_rings in enumerate(blocks[: sizes.launched]):
        for ring in range(max_rings):
            rings, share, count, has_parts, first_share, *numbers = of_rings[
                WIDTH * ring : WIDTH * (ring + 1)
            ]
            assert rings == sharing.rings
            if ring >= rings:
                assert (count, has_parts) == (0, False)
                continue
            assert share == block * rings + ring
            assert count <= MOST_SEGMENTS
            for n in range(count):
                *place, first, end, goes_on, whole = numbers[7 * n : 7 * n + 7]
                assert tuple(place) in work_tiles
                work = work_tiles.index(tuple(place))
                found.append(Segment(share, work, first, end, goes_on, whole))
            if has_parts:
                merges[share] = first_share

    expected = expected_segments(sizes, sharing)
    assert len(found) == len(expected)
    for segment, (share, work, first, end) in zip(found, expected, strict=True):
        assert (segment.share, segment.work, segment.first) == (share, work, first)
        assert segment.end == min(end, sizes.visible_tiles(work_tiles[work][2]))
        assert segment.goes_on == (end < sizes.tiles)
        assert segment.is_whole == (end - first == sizes.tiles)

    # Who has the last part of a work tile merges all, and no one else does.
    parts: dict[int, list[int]] = {}
    for share, work, *_ in expected:
        parts.setdefault(work, []).append(share)
    assert all(shares == list(range(shares[0], shares[-1] + 1)) for shares in parts.values())
    assert merges == {shares[-1]: shares[0] for shares in parts.values() if len(shares) > 1}


# ---- what comes of them


CALLS = {
    call.case.name: call
    for call in (
        # 20 parts of a row, in three rounds of the merge, and m that rises with each, or falls.
        Call(Case("rising", Shape(1, 1, 1, 21, 2500, 64), BF16, inputs=rising_logits), 20),
        Call(Case("falling", Shape(1, 1, 1, 21, 2500, 64), BF16, inputs=walks(-40, -5, 250)), 20),
        Call(Case("rising_256", Shape(1, 1, 1, 7, 1250, 256), FP16, inputs=rising_logits), 20),
        # 40 parts: more signals than a warp has lanes, and 8 lanes for the same columns.
        Call(Case("eight_lanes", Shape(1, 3, 1, 1, 5100, 8), FP16, inputs=walks(2, 25)), 40),
        Call(
            Case("eight_lanes_graded", Shape(1, 3, 1, 1, 5100, 8), BF16, inputs=graded(60, 60)), 40
        ),
        # Fewer lanes than there are parts for: in two rounds, and warps that have no whole rows.
        Call(Case("two_lanes", Shape(1, 8, 1, 1, 5100, 64), BF16, inputs=rising_logits), 40),
        Call(Case("four_lanes", Shape(1, 5, 1, 1, 5100, 40), BF16, inputs=walks(2, 25)), 40),
        Call(Case("lanes_136", Shape(1, 2, 1, 1, 2500, 136), FP16, inputs=walks(2, 25)), 40),
        # There are more than two places of four columns for each thread: then it merges up to four
        # of a row together, here once or twice, and four parts of each at a time.
        Call(Case("four_columns", Shape(1, 1, 1, 13, 600, 200), BF16, inputs=walks(2, 25)), 10),
        Call(Case("four_columns_72", Shape(1, 1, 1, 31, 700, 72), FP16, inputs=rising_logits), 6),
        Call(Case("four_columns_256", Shape(1, 1, 1, 20, 600, 256), BF16, inputs=walks(2, 25)), 10),
        # As many parts as there is room for where a block has one ring.
        Call(Case("most_parts", Shape(1, 1, 1, 2, 18500, 72), BF16), 144),
        # With two, more shares leave parts. Most rows see no key, which keeps it short.
        Call(Case("most_parts_of_rings", Shape(1, 1, 1, 15584, 1250, 8), BF16, causal=True), 76),
        # 258 parts, which all lanes of a warp do not load at once.
        Call(Case("all_lanes", Shape(1, 1, 1, 1, 1056700, 8), BF16, inputs=walks(2, 25)), 129),
        # Most shares end a work tile and begin the next, so that both rings of a block merge.
        Call(Case("two_rings", Shape(1, 5, 5, 3, 4950, 8), FP16, inputs=walks(2, 25)), 3),
        # Two parts each of 3 work tiles, which are those of a block's two rings.
        Call(Case("two_rings_parts", Shape(1, 3, 3, 20, 8200, 8), BF16, inputs=walks(2, 25)), 3),
        # Six rings have parts of 4 of 16 work tiles, and then two whole ones each.
        Call(Case("two_rings_rest", Shape(1, 16, 16, 3, 1500, 8), BF16, inputs=walks(2, 25)), 3),
        # 3 of 13 are cut: shares that end one and begin the next, before a whole one.
        Call(Case("rest", Shape(1, 13, 13, 7, 1400, 64), FP16, inputs=walks(2, 25)), 10),
        # 4 of 14 are, into two tiles each: two of 10 blocks have a whole one alone.
        Call(Case("rest_few_tiles", Shape(1, 14, 14, 16, 250, 72), BF16, inputs=walks(2, 25)), 10),
        # 9 parts each of 4 work tiles, of key heads and batches; one block has none.
        Call(
            Case(
                "groups",
                Shape(2, 6, 2, 10, 1200, 64),
                BF16,
                layouts=(transposed, padded, packed, padded),
            ),
            37,
        ),
        # 6 parts each of 3 work tiles, all but one of two tiles.
        Call(Case("uneven", Shape(1, 3, 3, 20, 1400, 64), BF16, inputs=walks(2, 25)), 20),
        Call(Case("uneven_heads", Shape(2, 4, 2, 40, 650, 256), FP16), 50),
        # As many parts of a work tile as there are tiles: no more blocks are launched.
        Call(Case("few_tiles", Shape(1, 6, 2, 5, 350, 64), BF16, inputs=walks(2, 25)), 11),
        # 16 parts of 3 work tiles, not as many of each: most blocks go on, or merge, or both.
        Call(Case("unequal", Shape(1, 3, 3, 20, 1400, 64), BF16, inputs=walks(2, 25)), 14),
        Call(Case("unequal_heads", Shape(2, 4, 2, 40, 700, 64), FP16), 17),
        # The first rows see no key, and the next ones not those of the last parts.
        Call(Case("hidden_parts", Shape(1, 1, 1, 300, 280, 64), BF16, causal=True), 30),
    )
}


# ---- the calls, and with one thing wrong


class TestCalls(OnMoreMultiprocessors):
    step = STEP
    calls = CALLS
    tests: ClassVar = {"schedule": check_schedule}
    checks: ClassVar = {
        "columns": partial(check_columns, kinds=(MOST_OF_FEW_COLUMNS, FEWEST_OF_MANY)),
        "bounds": partial(check_bounds, call=CALLS["four_columns"]),
    }
    folder = "last_block"
