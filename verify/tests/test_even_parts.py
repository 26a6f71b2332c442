"""v17 cuts few work tiles into even parts of their keys: which there are, and what comes of them.

On the checker's few multiprocessors it cuts next to nothing. Calls that it does cut are here, with
the mutants that only these reject: verify/mutants/even_parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest
import torch

from common.catalog import find_step
from common.problem import Shape
from common.runtime.cpu import CpuBackend
from common.step import Step
from verify.accuracy import repeated
from verify.case import Case
from verify.check import check_case, launch
from verify.inputs import rising_logits, walks
from verify.layouts import packed, padded, transposed
from verify.tests.more_multiprocessors import (
    Call,
    OnMoreMultiprocessors,
    ask_schedule,
    write_schedule,
)

STEP = find_step("v17")
BF16, FP16 = torch.bfloat16, torch.float16

# ---- which parts there are, and whose

BLOCK_M, BLOCK_N = 192, 128  # of a head_dim of 8
MAX_PARTS = 3 * 144  # for which there is room: three rounds of as many blocks as there can be


@dataclass(frozen=True)
class Sizes:
    multiprocessors: int
    tiles: int  # of keys; all but the last are whole
    heads: int = 1
    kv_heads: int = 1
    batch: int = 1
    seq_q: int = BLOCK_M
    causal: bool = False

    @property
    def seq_k(self) -> int:
        return self.tiles * BLOCK_N - 50

    @property
    def q_blocks(self) -> int:
        """Of a head."""
        return -(-self.seq_q // BLOCK_M)

    @property
    def num_work(self) -> int:
        return self.batch * self.heads * self.q_blocks

    @property
    def blocks(self) -> int:
        """Of the grid: no more than there are tiles of keys of all work tiles."""
        return min(self.num_work * self.tiles, self.multiprocessors)

    def __str__(self) -> str:
        heads = f"{self.batch}x{self.heads}of{self.kv_heads}"
        mask = "_causal" if self.causal else ""
        return f"on_{self.multiprocessors}_{heads}x{self.seq_q}x{self.tiles}_tiles{mask}"


# Sizes, and the number of parts of a work tile: that with which all rounds take least, where one
# takes its parts' tiles and 2 more, and the merge 4.
NUM_PARTS = [
    (Sizes(132, 64, 32, 8), 4),  # 22 in a round; 24 in two, of 8 parts, and 28 in three
    (Sizes(132, 64, 64, 8), 2),  # 38; 40 in two rounds, of 4 parts
    (Sizes(132, 64, 16, 8), 8),
    (Sizes(132, 64, 8, 8), 16),
    (Sizes(132, 64, 48, 8), 5),  # 38 in a round, of 2 parts; 34 in two; and in three, of 8
    (Sizes(132, 64, 128, 8), 1),  # 66; with a round for a second part it would be 72
    (Sizes(132, 64, 132), 1),
    (Sizes(132, 64, 133), 2),  # 106 in three rounds; 132 in two, of whole work tiles
    (Sizes(132, 64, 140, 7), 2),
    (Sizes(132, 64, 198), 2),  # three full rounds
    (Sizes(132, 64, 199), 1),
    (Sizes(132, 13, 140, 7), 1),  # 30; 31 in three rounds
    (Sizes(132, 14, 140, 7), 2),  # 31; 32 in two, of whole work tiles
    (Sizes(132, 64, 397), 1),  # four rounds
    (Sizes(132, 64, 119), 1),  # 66 in a round with 13 idle blocks; 72 in two, of halves
    (Sizes(132, 1, 140), 1),  # nothing to cut
    (Sizes(132, 1), 1),
    (Sizes(132, 5), 1),  # 7, whole or in 5 parts
    (Sizes(132, 6), 6),  # 7, and 8 whole
    (Sizes(132, 132), 132),
    (Sizes(132, 1000), 132),  # of 8 tiles; 7 of the parts have none
    (Sizes(1, 1000), 1),
    (Sizes(1, 64, 7, 7), 1),
    (Sizes(2, 9), 1),  # 11, whole or in halves
    (Sizes(2, 10), 2),
    (Sizes(2, 14, 3, 3), 2),  # each block has three halves
    (Sizes(3, 50, 2), 3),  # two full rounds
    (Sizes(144, 1000), 144),
    (Sizes(144, 1000, 100), 4),  # 760 in three rounds, with room for 432 parts
    (Sizes(144, 1000, 108, 12), 4),  # as many as these
    # Work tiles of several heads of keys, batches and blocks of queries.
    (Sizes(40, 9, 6, 2, 2), 3),
    (Sizes(70, 9, 6, 2, 2, 65), 5),
    (Sizes(70, 40, 6, 2, 3, 300), 5),
    (Sizes(132, 40, 4, 2, 2, 600), 4),
    # Of as many tiles as the last one has; the first ones have fewer, down to one.
    (Sizes(70, 7, 2, 1, 1, 800, causal=True), 7),
    (Sizes(24, 7, 2, 1, 1, 800, causal=True), 1),
    (Sizes(132, 20, 2, 2, 1, 2500, causal=True), 4),
    (Sizes(132, 20, 6, 2, 2, 193, causal=True), 5),
]

# Each block leaves how many parts it has, the schedule's
# parts, group_work and num_parts, the first part of the work tile that has the block's number, and
# struct WorkTile of each of its own parts.
WIDTH = 5 + 7 * 8
SCHEDULE = f"""
    const Schedule schedule(shape, parts_of_each(shape));
    float* const to = p.lse + {WIDTH} * block;
    to[1] = schedule.parts, to[2] = schedule.group_work, to[3] = schedule.num_parts;
    to[4] = schedule.first_part(block).part;
    int count = 0;
    for (int i = block; i < schedule.num_parts; i += gridDim.x) {{
        const WorkTile work = schedule.at(i);
        float* const part = to + 5 + 7 * count++;
        part[0] = work.q_start, part[1] = work.head, part[2] = work.batch;
        part[3] = work.first, part[4] = work.end, part[5] = work.part, part[6] = work.last;
    }}
    to[0] = count;
"""


CALLED = [sizes for sizes, _ in NUM_PARTS]


@pytest.fixture(scope="module")
def schedule(tmp_path_factory):
    return write_schedule(tmp_path_factory.mktemp("schedule"), STEP, SCHEDULE, CALLED)


@dataclass(frozen=True)
class Part:
    """struct WorkTile."""

    q_start: int
    head: int
    batch: int
    first: int
    end: int
    number: int
    last: int


@pytest.mark.parametrize(("sizes", "num_parts"), NUM_PARTS, ids=str)
def test_parts(schedule, sizes, num_parts):
    check_parts(schedule, sizes, num_parts)


def check_schedule(step: Step) -> None:
    with TemporaryDirectory() as folder:
        schedule = write_schedule(Path(folder), step, SCHEDULE, CALLED)
        for sizes, num_parts in NUM_PARTS:
            check_parts(schedule, sizes, num_parts)


def check_parts(schedule: Step, sizes: Sizes, num_parts: int) -> None:
    blocks = ask_schedule(schedule, sizes, CALLED.index(sizes), WIDTH)
    (parts, group_work, total), *others = (block[1:4] for block in blocks)
    assert all(other == [parts, group_work, total] for other in others)
    assert parts == num_parts

    # Each block has every gridDim.x-th, and knows which is its last.
    computed = {}
    for block, (count, _, _, _, _, *numbers) in enumerate(blocks):
        own = [Part(*numbers[7 * n : 7 * n + 7]) for n in range(count)]
        assert [part.number for part in own] == list(range(block, total, sizes.blocks))
        assert [part.last for part in own] == [0] * (count - 1) + [1] * (count > 0)
        computed |= {part.number: part for part in own}
    in_order = [computed[number] for number in range(total)]
    assert parts == 1 or total <= MAX_PARTS

    # The parts of a work tile are group_work apart: each tile of keys is in one of them, in order.
    num_work = sizes.num_work
    assert total == num_work * parts
    first_parts = [part for part in in_order if part.first == 0]
    assert [block[4] for block in blocks[:num_work]] == [
        part.number for part in first_parts[: sizes.blocks]
    ]
    rows = {}
    for first in first_parts:
        of_work = in_order[first.number : first.number + parts * group_work : group_work]
        assert len(of_work) == parts
        place = (first.batch, first.head, first.q_start)
        assert {(part.batch, part.head, part.q_start) for part in of_work} == {place}
        assert place not in rows
        tiles = expected_tiles(sizes, first.q_start)
        lengths = [part.end - part.first for part in of_work if part.first < tiles]
        assert of_work[0].first == 0
        assert all(after.first == part.end for part, after in pairwise(of_work[: len(lengths)]))
        assert of_work[len(lengths) - 1].end == tiles
        assert len(set(lengths[:-1])) <= 1  # the last may be shorter
        assert max(lengths) == -(-tiles // parts)
        # One of those that are left without tiles has one that no row sees.
        assert all(part.end - part.first == 1 for part in of_work[len(lengths) :])
        rows[place] = len(of_work)
    assert len(rows) == num_work

    # Those that are at work side by side have the same keys, until another part or head begins.
    for part, after in pairwise(in_order):
        if part.number // group_work == after.number // group_work:
            group = sizes.heads // sizes.kv_heads
            assert (part.batch, part.head // group) == (after.batch, after.head // group)
            if not sizes.causal:
                assert (part.first, part.end) == (after.first, after.end)


def expected_tiles(sizes: Sizes, q_start: int) -> int:
    """What the last row of a work tile sees, in tiles of keys, but at least one."""
    groups = -(-sizes.seq_q // 64)
    last_row = q_start + 64 * -(-groups // sizes.q_blocks) - 1
    assert last_row < sizes.seq_q + 15
    seen = sizes.seq_k
    if sizes.causal:
        seen = min(seen, last_row + sizes.seq_k - sizes.seq_q + 1)
    return max(1, -(-seen // BLOCK_N))


# ---- what comes of them


CALLS = {
    call.case.name: call
    for call in (
        # 3 parts each of 12 work tiles, of heads, key heads and batches; 4 blocks have none.
        Call(
            Case(
                "groups",
                Shape(2, 6, 2, 21, 1100, 64),
                BF16,
                layouts=(transposed, padded, packed, padded),
            ),
            40,
        ),
        # 9 parts of a row, for which the merge goes round three times, and m that rises with each.
        Call(Case("nine_parts", Shape(1, 2, 1, 45, 1100, 64), BF16, inputs=rising_logits), 20),
        Call(
            Case("nine_falling", Shape(1, 1, 1, 45, 1100, 64), BF16, inputs=walks(-40, -5, 250)), 20
        ),
        Call(Case("nine_walks", Shape(1, 2, 2, 70, 1100, 40), FP16, inputs=walks(2, 25)), 20),
        # 2 parts each of 7 work tiles, in three rounds of 5 blocks. The last block has two parts.
        Call(Case("three_rounds", Shape(1, 7, 7, 20, 1750, 64), BF16), 5),
        Call(Case("three_rounds_256", Shape(1, 7, 1, 20, 870, 256), FP16), 5),
        Call(Case("three_rounds_128", Shape(1, 7, 7, 70, 1750, 128), FP16, inputs=walks(2, 25)), 5),
        # 7 parts of 10 work tiles that have 1 tile to 7; the first rows see no key.
        Call(Case("fewer_tiles", Shape(1, 2, 1, 800, 780, 64), BF16, causal=True), 70),
        Call(Case("fewer_tiles_128", Shape(1, 2, 2, 500, 880, 128), BF16, causal=True), 60),
        # Both, and the next part follows on one that has a single tile, or none.
        Call(Case("causal_rounds_256", Shape(1, 1, 1, 870, 870, 256), BF16, causal=True), 5),
        # Parts of several tiles of which the last are hidden from the first warpgroups.
        Call(Case("hidden_tiles", Shape(1, 1, 1, 250, 2300, 64), FP16, causal=True), 9),
        Call(Case("hidden_tiles_256", Shape(1, 2, 1, 193, 1250, 256), BF16, causal=True), 12),
        # A part of a single tile, which the last warpgroup alone sees, and by one key.
        Call(Case("hidden_part", Shape(1, 1, 1, 192, 2305, 64), BF16, causal=True), 9),
        # A warpgroup whose rows are before the first one, and parts that have fewer tiles than it
        # can pass over.
        Call(Case("spare_group_parts", Shape(1, 2, 1, 260, 1300, 64), BF16), 16),
        Call(Case("spare_group_short", Shape(1, 1, 1, 260, 1000, 64), BF16), 16),
        # Columns of which the merge's last thread has fewer.
        Call(Case("columns_8", Shape(1, 2, 2, 193, 1000, 8), FP16), 40),
        Call(Case("columns_40", Shape(1, 2, 1, 65, 1000, 40), BF16), 40),
        Call(Case("columns_136", Shape(1, 2, 2, 70, 650, 136), BF16), 40),
        Call(Case("columns_256", Shape(1, 2, 1, 65, 700, 256), BF16, causal=True), 40),
        # 5 parts each of 30 work tiles: more than there are blocks.
        Call(Case("many_parts", Shape(1, 30, 30, 20, 3150, 8), BF16), 80),
    )
}


def test_the_grid_decides_the_bits():
    check_grids(STEP)


def check_grids(step: Step) -> None:
    """The last bits of 9 parts are not those of 3, nor of a whole work tile; all are right."""
    case = Case("grids", Shape(1, 2, 1, 45, 1100, 64), BF16)
    inputs = case.make("cpu")
    outputs = {}
    for multiprocessors in (1, 6, 20):
        backend = CpuBackend()
        backend.multiprocessors = multiprocessors
        assert check_case(step, case, [backend]).passed
        outputs[multiprocessors], errors = launch(step, case, backend, inputs)
        assert errors == []
    for one, other in ((1, 6), (6, 20), (1, 20)):
        for got, other_got in zip(outputs[one], outputs[other], strict=True):
            assert repeated("output", got, other_got) != []


# ---- the calls, and with one thing wrong


class TestCalls(OnMoreMultiprocessors):
    step = STEP
    calls = CALLS
    tests: ClassVar = {"schedule": check_schedule, "grids": check_grids}
    folder = "even_parts"
