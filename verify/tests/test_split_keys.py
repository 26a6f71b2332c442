"""v13 shares the keys of few queries out among blocks: which are whose, and what comes of it.

On the checker's few multiprocessors a work tile has few parts. Calls with many are here, with the
mutants that only these reject: verify/mutants/split_keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest
import torch

from common.catalog import find_step
from common.problem import Shape
from common.step import Step
from verify.case import Case
from verify.inputs import walks
from verify.layouts import packed, padded, transposed
from verify.tests.more_multiprocessors import (
    Call,
    OnMoreMultiprocessors,
    ask_schedule,
    check_bounds,
    segments,
    write_schedule,
)

STEP = find_step("v13")
BF16, FP16 = torch.bfloat16, torch.float16

# ---- which tiles are whose

BLOCK_N = 128  # of a head_dim of 8
MOST_TILES = 2**24 - 1  # of a seq_k of 32 bits


@dataclass(frozen=True)
class Sizes:
    """Of up to 128 rows that share a head of keys: one work tile."""

    blocks: int  # that there is room for: one on each multiprocessor
    kv_heads: int  # or work tiles
    tiles: int  # of keys
    batch: int = 1
    group: int = 1
    seq_q: int = 1
    causal: bool = False

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def seq_k(self) -> int:
        return self.tiles * BLOCK_N

    @property
    def launched(self) -> int:
        """How many blocks can have a share: no more than there are tiles of all work tiles."""
        return min(self.blocks, self.kv_heads * self.tiles)

    def __str__(self) -> str:
        rows = f"{self.group}x{self.seq_q}_rows"
        return f"{self.blocks}_blocks_{self.kv_heads}x{self.tiles}_tiles_{rows}"


# Sizes, and how many blocks share the tiles out; or None where whole work tiles are dealt out, as
# these have work for nine tenths of the blocks of all rounds, or cannot be cut.
SHARING = [
    (Sizes(132, 132, 64), None),
    (Sizes(132, 140, 64), 132),  # 124 of 264 would be idle; 7 cuts lie between work tiles
    (Sizes(132, 237, 64), 132),
    (Sizes(132, 238, 64), None),  # 26 of 264 are
    (Sizes(132, 512, 8), None),  # in 4 rounds of which the last is not full
    (Sizes(10, 17, 64), 10),
    (Sizes(10, 18, 64), None),
    (Sizes(2, 3, 5), 2),
    (Sizes(2, 9, 11), None),
    (Sizes(1, 7, 3), None),
    (Sizes(1, 1, 1), None),
    # As many parts of each, which are nine tenths of the blocks.
    (Sizes(132, 8, 64), 128),
    (Sizes(132, 64, 64), 128),
    (Sizes(132, 128, 64), None),
    (Sizes(132, 119, 64), None),
    (Sizes(132, 118, 64), 132),  # 14 of 132 blocks would be idle
    (Sizes(132, 100, 64), 132),  # 32 blocks would be idle
    (Sizes(132, 40, 64), 120),
    (Sizes(132, 39, 64), 132),  # 117
    (Sizes(10, 9, 9), None),
    (Sizes(20, 8, 9), 20),
    (Sizes(20, 9, 9), 18),
    # Of lengths that are no multiple of the parts.
    (Sizes(132, 8, 63), 128),
    (Sizes(132, 8, 17), 128),
    (Sizes(132, 64, 5), 128),
    (Sizes(132, 1, 133), 132),
    (Sizes(10, 3, 10), 9),
    (Sizes(20, 9, 7), 18),
    (Sizes(144, 1, MOST_TILES), 144),
    # Of a single tile: nothing to cut, however many blocks are idle.
    (Sizes(132, 1, 1), None),
    (Sizes(132, 100, 1), None),
    (Sizes(132, 133, 1), None),
    (Sizes(132, 140, 1), None),
    # No more blocks than there are tiles, and all of them busy.
    (Sizes(132, 8, 3), 24),
    (Sizes(132, 39, 3), 117),
    (Sizes(132, 66, 2), 132),
    # Hardly fewer blocks than tiles.
    (Sizes(132, 100, 2), 132),
    (Sizes(132, 39, 4), 132),
    (Sizes(132, 70, 2), 132),
    # On as many multiprocessors as there can be.
    (Sizes(144, 1, 1000), 144),
    (Sizes(144, 72, 1000), 144),
    (Sizes(144, 144, 9), None),
    (Sizes(144, 150, 9), 144),
    # All shares are equal where they are long, from 400 tiles on, unless as many parts of each work
    # tile keep all blocks busy.
    (Sizes(132, 8, 6599), 128),
    (Sizes(132, 8, 6600), 132),
    (Sizes(20, 9, 888), 18),  # these parts are longer, of 444 tiles
    (Sizes(20, 9, 889), 20),
    (Sizes(132, 66, 799), 132),
    (Sizes(132, 66, 801), 132),  # they do
    (Sizes(132, 1, 52801), 132),
    (Sizes(144, 16, 4001), 144),
    # Up to 64 rows, of one head or of several.
    (Sizes(132, 8, 6600, seq_q=64), 132),
    (Sizes(132, 8, 6600, seq_q=65), 128),
    (Sizes(132, 8, 6600, group=64), 132),
    (Sizes(132, 8, 6600, group=65), 128),
    (Sizes(132, 8, 6600, group=32, seq_q=2), 132),
    (Sizes(132, 8, 6600, group=33, seq_q=2), 128),
    (Sizes(132, 8, 13200, seq_q=128), 128),
    (Sizes(132, 66, 801, seq_q=65), 132),
    # Whole work tiles are dealt out, however long.
    (Sizes(132, 132, 400), None),
    (Sizes(132, 119, 9000), None),
    (Sizes(10, 18, 1000), None),
    # As many tiles as 32 bits can count. And more: none are cut, though 31 of 288 blocks are idle.
    (Sizes(144, 256, MOST_TILES), 144),
    (Sizes(144, 257, MOST_TILES), None),
]
CALLED = [sizes for sizes, _ in SHARING]

# Each block leaves how many segments it has, and whether whole work tiles are dealt out; and of
# each segment the work tile, its tiles, whether it goes on and is whole, and, if it is not, the
# first and the last block that have some of the work tile.
MOST_SEGMENTS = 20
WIDTH = 2 + 7 * MOST_SEGMENTS
SCHEDULE = f"""
    const Schedule schedule(shape);
    const Share share(schedule, block);
    float* to = p.lse + {WIDTH} * block;
    *to++ = share.count, *to++ = schedule.is_whole;
    for (int i = 0; i < share.count && i < {MOST_SEGMENTS}; ++i) {{
        const Segment segment = share.at(i);
        const uint32_t work = segment.kv_head;
        *to++ = work, *to++ = segment.first, *to++ = segment.end;
        *to++ = segment.kind == GOES_ON, *to++ = segment.is_whole;
        *to++ = segment.is_whole ? block : schedule.first_block(work);
        *to++ = segment.is_whole ? block : schedule.last_block(work);
    }}
"""


@pytest.fixture(scope="module")
def schedule(tmp_path_factory):
    return write_schedule(tmp_path_factory.mktemp("schedule"), STEP, SCHEDULE, CALLED)


@pytest.mark.parametrize(("sizes", "num_blocks"), SHARING, ids=str)
def test_shares(schedule, sizes, num_blocks):
    check_shares(schedule, sizes, num_blocks)


def check_schedule(step: Step) -> None:
    with TemporaryDirectory() as folder:
        schedule = write_schedule(Path(folder), step, SCHEDULE, CALLED)
        for sizes, num_blocks in SHARING:
            check_shares(schedule, sizes, num_blocks)


def check_shares(schedule: Step, sizes: Sizes, num_blocks: int | None) -> None:
    works, tiles = sizes.kv_heads, sizes.tiles
    found = []
    for block, (count, is_whole, *numbers) in enumerate(
        ask_schedule(schedule, sizes, CALLED.index(sizes), WIDTH)
    ):
        assert bool(is_whole) == (num_blocks is None)
        assert count <= MOST_SEGMENTS
        found += [(block, *numbers[7 * n : 7 * n + 7]) for n in range(count)]

    if num_blocks is None:
        # In turn.
        blocks = sizes.launched
        in_turn = [(block, work) for block in range(blocks) for work in range(block, works, blocks)]
        assert found == [
            (block, work, 0, tiles, False, True, block, block) for block, work in in_turn
        ]
        return
    assert num_blocks <= sizes.launched
    expected = segments(works, tiles, num_blocks)
    blocks_of = {
        work: [block for block, *_ in of] for work, of in groupby(expected, lambda part: part[1])
    }
    assert len(found) == len(expected)
    for segment, (block, work, first, end) in zip(found, expected, strict=True):
        kind = (end < tiles, end - first == tiles)
        assert segment == (block, work, first, end, *kind, blocks_of[work][0], blocks_of[work][-1])


@pytest.mark.parametrize(("works", "tiles", "parts"), [(8, 63, 16), (1, 133, 132), (9, 7, 2)])
def test_parts_of_a_work_tile(works, tiles, parts):
    """What v13 and v18 are compared with."""
    found = segments(works, tiles, works * parts)
    assert [block for block, *_ in found] == list(range(works * parts))  # none has two
    assert [(work, tile) for _, work, first, end in found for tile in range(first, end)] == [
        (work, tile) for work in range(works) for tile in range(tiles)
    ]
    assert {end - first for _, _, first, end in found} == {tiles // parts, tiles // parts + 1}


# ---- what comes of them


CALLS = {
    call.case.name: call
    for call in (
        # 40 parts of two rows, by 16 lanes of the merge.
        Call(Case("sixteen_lanes", Shape(1, 2, 1, 1, 5000, 64), BF16), 40),
        # 20 each of 2 work tiles, by 4 lanes, twice.
        Call(Case("four_lanes", Shape(1, 2, 2, 3, 1500, 136), BF16, causal=True), 40),
        # Two warpgroups, the second with 8 rows; by 2.
        Call(Case("two_lanes", Shape(1, 9, 1, 8, 700, 40), BF16), 40),
        # As many parts as there is room for.
        Call(Case("most_parts", Shape(1, 1, 1, 2, 18500, 8), BF16), 144),
        # 19 whole work tiles, in two rounds of which the last leaves one block idle: nobody merges.
        Call(Case("in_turn", Shape(1, 19, 19, 1, 200, 8), BF16), 10),
        # 8 parts each of 4 work tiles, of key heads and batches; one block has none.
        Call(
            Case(
                "groups",
                Shape(2, 6, 2, 10, 1100, 64),
                BF16,
                layouts=(transposed, padded, packed, padded),
            ),
            33,
        ),
        # 6 parts each of 3 work tiles, all but one of two tiles.
        Call(Case("uneven", Shape(1, 3, 3, 20, 1400, 64), BF16, inputs=walks(2, 25)), 20),
        # 6 parts each of 4 work tiles, of one tile or two; a work tile has two warpgroups.
        Call(Case("uneven_256", Shape(2, 2, 1, 70, 650, 256), FP16), 25),
        # As many parts of a work tile as there are tiles, and no more blocks.
        Call(Case("few_tiles", Shape(1, 6, 2, 5, 350, 64), BF16, inputs=walks(2, 25)), 11),
        # 16 parts of 3 work tiles, not as many of each.
        Call(Case("unequal", Shape(1, 3, 3, 20, 1400, 64), BF16, inputs=walks(2, 25)), 14),
        # Three places of Q for two warpgroups, one of which may be ahead: its rows see few keys.
        Call(Case("first_tiles", Shape(1, 8, 8, 350, 135, 256), BF16, causal=True), 2),
        # 2 parts each of 3 work tiles: a thread of the merge has 32 columns, but the last one 16.
        Call(Case("odd_columns", Shape(1, 3, 3, 20, 200, 40), BF16), 6),
    )
}


# ---- the calls, and with one thing wrong


class TestCalls(OnMoreMultiprocessors):
    step = STEP
    calls = CALLS
    tests: ClassVar = {"schedule": check_schedule}
    checks: ClassVar = {"bounds": partial(check_bounds, call=CALLS["odd_columns"])}
    folder = "split_keys"
