"""v18 shares the keys of few rows out among blocks, one of which merges: whose are which, and what
comes of it.

On the checker's few multiprocessors a work tile has few parts. Calls with many are here, with the
mutants that only these reject: verify/mutants/last_block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from common.catalog import find_step
from common.paths import ROOT
from common.problem import Shape
from common.step import Step
from verify.case import Case
from verify.inputs import graded, rising_logits, walks
from verify.layouts import packed, padded, transposed
from verify.tests.more_multiprocessors import (
    Call,
    ask_schedule,
    check_applies,
    check_call,
    check_rejected,
    choose,
    segments,
    write_schedule,
)

STEP = find_step("v18")
BF16, FP16 = torch.bfloat16, torch.float16

# ---- which tiles are whose, and who merges

TILE_ROWS, BLOCK_N = 32, 128  # of a head_dim of 8
MAX_BLOCKS = 144
MOST_TILES = 2**24 - 1  # of a seq_k of 32 bits


@dataclass(frozen=True)
class Sizes:
    blocks: int
    tiles: int  # of keys; all but the last are whole
    heads: int = 1
    kv_heads: int = 1
    batch: int = 1
    seq_q: int = 1
    causal: bool = False

    @property
    def seq_k(self) -> int:
        return self.tiles * BLOCK_N - 50

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
            for first_row in range(0, self.rows, TILE_ROWS)
        ]

    def visible_tiles(self, first_row: int) -> int:
        """Of the keys that a work tile's last row sees."""
        if not self.causal:
            return self.tiles
        last_query = (min(first_row + TILE_ROWS, self.rows) - 1) // (self.heads // self.kv_heads)
        return -(-max(0, last_query + self.seq_k - self.seq_q + 1) // BLOCK_N)

    def __str__(self) -> str:
        heads = f"{self.batch}x{self.heads}of{self.kv_heads}"
        mask = "_causal" if self.causal else ""
        return f"{self.blocks}_blocks_{heads}x{self.seq_q}x{self.tiles}_tiles{mask}"


# Sizes, and how many blocks share the tiles out; or None where whole work tiles are dealt out, as
# these have work for nine tenths of the blocks of all rounds.
SHARING = [
    (Sizes(132, 64, 132, 132), None),
    (Sizes(132, 64, 133, 133), 132),  # 131 of 264 would be idle
    (Sizes(132, 64, 237, 237), 132),
    (Sizes(132, 64, 238, 238), None),  # 26 of 264 are
    (Sizes(10, 64, 17, 17), 10),
    (Sizes(10, 64, 18, 18), None),
    (Sizes(10, 64, 19, 19), None),
    (Sizes(2, 11, 7, 7), 2),
    (Sizes(2, 11, 9, 9), None),
    (Sizes(1, 64, 7, 7), None),
    (Sizes(1, 1), None),
    # As many parts of each, which are nine tenths of the blocks.
    (Sizes(132, 64, 32, 8), 128),
    (Sizes(132, 64, 40, 40), 120),
    (Sizes(132, 64, 41, 41), 123),
    (Sizes(132, 64, 39, 39), 132),  # 117
    (Sizes(132, 64, 128, 128), None),
    (Sizes(132, 64, 118, 118), 132),
    (Sizes(10, 9, 3, 3), 9),
    (Sizes(10, 9, 9, 9), None),
    (Sizes(20, 9, 8, 8), 20),
    (Sizes(20, 9, 9, 9), 18),
    (Sizes(37, 9, 4, 4), 36),
    # Of lengths that are no multiple of the parts.
    (Sizes(132, 63, 8, 8), 128),
    (Sizes(132, 17, 8, 8), 128),
    (Sizes(132, 31, 32, 8), 128),
    (Sizes(132, 133), 132),
    (Sizes(132, 5, 64, 64), 128),
    (Sizes(10, 10, 3, 3), 9),
    (Sizes(20, 7, 9, 9), 18),
    (Sizes(144, MOST_TILES), 144),
    # Or all, where each has 512 tiles: these are long.
    (Sizes(132, 528, 128, 128), 132),
    (Sizes(132, 527, 128, 128), None),
    (Sizes(132, 1056, 64, 64), 132),
    (Sizes(132, 1055, 64, 64), 128),
    (Sizes(10, 569, 9, 9), 10),
    (Sizes(10, 568, 9, 9), None),
    (Sizes(132, 5001, 33, 33), 132),
    (Sizes(132, 600, 8, 8), 128),
    # No more than there are tiles.
    (Sizes(132, 3), 3),
    (Sizes(132, 64), 64),
    (Sizes(20, 4, 3, 3), 12),
    (Sizes(132, 3, 39, 39), 117),  # as many parts are too few, and all that there are
    (Sizes(132, 4, 39, 39), 132),
    (Sizes(132, 1, 100, 100), 100),
    (Sizes(132, 2, 100, 100), 132),
    # There is room for the parts of no more.
    (Sizes(144, 1000), 144),
    (Sizes(150, 1000), 144),
    (Sizes(150, 1000, 72, 72), 144),
    (Sizes(150, 9, 144, 144), None),
    (Sizes(150, 9, 150, 150), 144),
    (Sizes(150, 9, 288, 288), None),
    # More tiles than 32 bits can count, and all that they can.
    (Sizes(150, MOST_TILES, 256, 256), 144),
    (Sizes(150, MOST_TILES, 289, 289), None),
    (Sizes(150, MOST_TILES, 17, 17, 17), None),
    # Work tiles of several batches, key heads and tiles of rows.
    (Sizes(44, 9, 6, 2, 2, 21), 40),
    (Sizes(44, 9, 6, 2, 2, 11), 40),
    (Sizes(37, 9, 6, 2, 2, 10), 36),
    (Sizes(70, 9, 6, 2, 3, 65), 70),
    (Sizes(12, 5, 6, 2, 3, 65), 12),
    (Sizes(11, 5, 6, 2, 3, 65), None),
    # Of as many tiles as the last one has; the first ones see fewer, down to none.
    (Sizes(70, 7, 2, 1, 1, 200, causal=True), 65),
    (Sizes(70, 3, 1, 1, 1, 500, causal=True), 48),
    (Sizes(10, 3, 1, 1, 1, 500, causal=True), 10),
    (Sizes(8, 3, 1, 1, 1, 500, causal=True), None),
    (Sizes(132, 20, 2, 2, 1, 1000, causal=True), 128),
    (Sizes(132, 20, 6, 2, 2, 193, causal=True), 132),
]

# Each block leaves how many segments it has, whether whole
# work tiles are dealt out, whether the block has parts to merge, the first block that has one of
# these, and struct Segment of each.
MOST_SEGMENTS = 20
WIDTH = 4 + 7 * MOST_SEGMENTS
SCHEDULE = f"""
    const Schedule schedule(shape, gridDim.x);
    const Share share(schedule, block);
    float* to = p.lse + {WIDTH} * block;
    *to++ = share.count, *to++ = schedule.is_whole, *to++ = share.has_parts_to_merge();
    *to++ = share.has_parts_to_merge() ? schedule.first_block(share.first_work) : 0;
    for (uint32_t i = 0; i < share.count && i < {MOST_SEGMENTS}; ++i) {{
        const Segment segment = share.at(i);
        *to++ = segment.batch, *to++ = segment.kv_head, *to++ = segment.first_row;
        *to++ = segment.first, *to++ = segment.end;
        *to++ = segment.kind == GOES_ON, *to++ = segment.is_whole;
    }}
"""


CALLED = [sizes for sizes, _ in SHARING]


@pytest.fixture(scope="module")
def schedule(tmp_path_factory):
    return write_schedule(tmp_path_factory.mktemp("schedule"), STEP, SCHEDULE, CALLED)


@dataclass(frozen=True)
class Segment:
    """The step's, and whose it is."""

    block: int
    work: int  # the work tile
    first: int
    end: int
    goes_on: bool
    is_whole: bool


@pytest.mark.parametrize(("sizes", "num_blocks"), SHARING, ids=str)
def test_shares(schedule, sizes, num_blocks):
    check_shares(schedule, sizes, num_blocks)


def check_schedule(step: Step) -> None:
    with TemporaryDirectory() as folder:
        schedule = write_schedule(Path(folder), step, SCHEDULE, CALLED)
        for sizes, num_blocks in SHARING:
            check_shares(schedule, sizes, num_blocks)


def check_shares(schedule: Step, sizes: Sizes, num_blocks: int | None) -> None:
    work_tiles = sizes.work_tiles
    shares: list[list[Segment]] = []
    merges = {}  # block: the first one that has a part
    for block, (count, is_whole, has_parts, first_block, *numbers) in enumerate(
        ask_schedule(schedule, sizes, CALLED.index(sizes), WIDTH)
    ):
        assert bool(is_whole) == (num_blocks is None)
        assert count <= MOST_SEGMENTS
        own = []
        for n in range(count):
            *place, first, end, goes_on, whole = numbers[7 * n : 7 * n + 7]
            assert tuple(place) in work_tiles
            own.append(Segment(block, work_tiles.index(tuple(place)), first, end, goes_on, whole))
        shares.append(own)
        if has_parts:
            merges[block] = first_block

    if num_blocks is None:
        # In turn.
        assert merges == {}
        blocks = min(sizes.blocks, MAX_BLOCKS)
        for block, own in enumerate(shares):
            in_turn = range(block, len(work_tiles), blocks) if block < blocks else ()
            assert [segment.work for segment in own] == list(in_turn)
            for segment in own:
                tiles = sizes.visible_tiles(work_tiles[segment.work][2])
                assert (segment.first, segment.end) == (0, tiles)
                assert (segment.goes_on, segment.is_whole) == (False, True)
        return

    expected = segments(len(work_tiles), sizes.tiles, num_blocks)
    found = [segment for own in shares for segment in own]
    assert len(found) == len(expected)
    for segment, (block, work, first, end) in zip(found, expected, strict=True):
        assert (segment.block, segment.work, segment.first) == (block, work, first)
        assert segment.end == min(end, sizes.visible_tiles(work_tiles[work][2]))
        assert segment.goes_on == (end < sizes.tiles)
        assert segment.is_whole == (end - first == sizes.tiles)

    # Who has the last part of a work tile merges all, and no one else does.
    parts = [[block for block, *_ in of] for _, of in groupby(expected, lambda part: part[1])]
    assert all(blocks == list(range(blocks[0], blocks[-1] + 1)) for blocks in parts)
    assert merges == {blocks[-1]: blocks[0] for blocks in parts if len(blocks) > 1}


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
        # As many parts as there is room for, on more multiprocessors.
        Call(Case("most_parts", Shape(1, 1, 1, 2, 18500, 8), BF16), 150),
        # Whole work tiles on these, in two rounds.
        Call(Case("most_blocks", Shape(1, 288, 288, 1, 100, 8), BF16), 150),
        # 9 parts each of 4 work tiles, of key heads and batches; one block has none.
        Call(
            Case(
                "groups",
                Shape(2, 6, 2, 10, 1100, 64),
                BF16,
                layouts=(transposed, padded, packed, padded),
            ),
            37,
        ),
        # 6 parts each of 3 work tiles, all but one of two tiles.
        Call(Case("uneven", Shape(1, 3, 3, 20, 1400, 64), BF16, inputs=walks(2, 25)), 20),
        Call(Case("uneven_heads", Shape(2, 4, 2, 40, 650, 256), FP16), 50),
        # As many parts of a work tile as there are tiles, and blocks that have none.
        Call(Case("few_tiles", Shape(1, 6, 2, 5, 350, 64), BF16, inputs=walks(2, 25)), 11),
        # 16 parts of 3 work tiles, not as many of each: most blocks go on, or merge, or both.
        Call(Case("unequal", Shape(1, 3, 3, 20, 1400, 64), BF16, inputs=walks(2, 25)), 14),
        Call(Case("unequal_heads", Shape(2, 4, 2, 40, 700, 64), FP16), 17),
        # The first rows see no key, and the next ones not those of the last parts.
        Call(Case("hidden_parts", Shape(1, 1, 1, 300, 280, 64), BF16, causal=True), 30),
    )
}


def test_call(name):
    result = check_call(STEP, CALLS[name])
    assert result.passed, str(result)


# ---- with one thing wrong


# Their cases are the calls above, and the test of all shares.
TESTS = {"schedule": check_schedule}
MUTANTS = sorted((ROOT / "verify" / "mutants" / "last_block").glob("*.patch"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function in (test_call, test_rejected):
        choose(metafunc, MUTANTS, CALLS)


def test_every_patch_applies():
    for path in MUTANTS:
        check_applies(path, CALLS, TESTS)


def test_rejected(path, monkeypatch):
    check_rejected(path, CALLS, TESTS, monkeypatch)
