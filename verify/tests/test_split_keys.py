"""v13 shares the keys of few queries out among blocks: which are whose, and what comes of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from common.catalog import find_step
from common.problem import Shape
from common.runtime.cpu import CpuBackend
from verify.accuracy import compare, expect
from verify.case import Case
from verify.check import launch
from verify.tests import small_kernels
from verify.tests.more_multiprocessors import write_beside

STEP = find_step("v13")

# ---- which tiles are whose


# A block a query; the scenario is 2048 works + tiles of each. Of each segment: the work tile, its
# tiles, and the first and the last block that have some of these tiles' work tile.
SCHEDULE = """
    if (t > 0) return;
    AttentionParams shape = p;
    shape.batch = shape.seq_q = 1;
    shape.heads = shape.kv_heads = int(p.softmax_scale) / 2048;
    shape.seq_k = int(p.softmax_scale) % 2048 * BLOCK_N;
    const Schedule schedule(shape, gridDim.x);
    const Share share(schedule, block);
    float* to = p.lse + 64 * block;
    *to++ = share.count;
    for (int i = 0; i < share.count; ++i) {
        const Segment segment = share.at(i);
        const uint32_t units = schedule.work_units, before = segment.kv_head * units;
        *to++ = segment.kv_head, *to++ = segment.first, *to++ = segment.end;
        *to++ = schedule.block_of(before), *to++ = schedule.block_of(before + units - 1);
    }
"""


@pytest.fixture(scope="module")
def schedule(tmp_path_factory):
    return write_beside(tmp_path_factory.mktemp("schedule"), STEP, "schedule", SCHEDULE)


@pytest.mark.parametrize(
    ("num_blocks", "num_works", "num_tiles", "cut_works"),
    [
        (132, 8, 64, 8),  # 16 parts of each
        (132, 8, 3, 8),  # fewer tiles than blocks
        (132, 1, 1, 0),
        (132, 64, 64, 64),  # 2 parts of each, on 128 blocks
        (132, 128, 64, 0),  # whole, on 128 blocks
        (132, 512, 8, 0),  # whole, in 4 rounds of which the last is not full
        (132, 100, 64, 100),  # in equal shares: of one part of each, 32 blocks would be idle
        (132, 140, 64, 124),  # likewise in two rounds; 7 cuts lie between work tiles
        (132, 140, 1, 0),
        (2, 3, 5, 1),
        (1, 7, 3, 0),
        (144, 1, 1000, 1),
        (150, 1, 1000, 1),  # more blocks than have a share
    ],
)
def test_shares_have_each_tile_once(schedule, num_blocks, num_works, num_tiles, cut_works):
    q = torch.zeros(1, 1, num_blocks, 8, dtype=torch.float16)
    scenario = 2048 * num_works + num_tiles
    _, lse = small_kernels.run(
        schedule, CpuBackend(), q, num_lse=64 * num_blocks, scenario=scenario
    )
    tiles: list[tuple[int, int]] = []
    blocks_of: dict[int, list[int]] = {}
    told: dict[int, set[tuple[int, int]]] = {}
    for block, (count, *numbers) in enumerate(lse.view(-1, 64).int().tolist()):
        for n in range(count):
            work, first, end, *blocks = numbers[5 * n : 5 * n + 5]
            tiles += [(work, tile) for tile in range(first, end)]
            blocks_of.setdefault(work, []).append(block)
            told.setdefault(work, set()).add(tuple(blocks))
    assert tiles == [(work, tile) for work in range(num_works) for tile in range(num_tiles)]
    for work, blocks in blocks_of.items():
        assert told[work] == {(blocks[0], blocks[-1])}
        assert all(after == before + 1 for before, after in pairwise(blocks))
    assert sum(len(blocks) > 1 for blocks in blocks_of.values()) == cut_works


# ---- what comes of it


@pytest.mark.parametrize(
    ("shape", "causal"),
    [
        (Shape(1, 2, 1, 1, 5000, 64), False),  # 40 parts of two rows, by 16 lanes
        (Shape(1, 2, 2, 3, 1500, 136), True),  # 16 and 24, by 4 lanes, twice
        (Shape(1, 9, 1, 8, 700, 40), True),  # two warpgroups, the second with 8 rows; by 2
    ],
)
def test_many_parts(shape, causal):
    """More blocks than the checker's grids have."""
    backend = CpuBackend()
    backend.multiprocessors = 40
    case = Case("many_parts", shape, torch.bfloat16, causal)
    inputs = case.make("cpu")
    outputs, errors = launch(STEP, case, backend, inputs)
    assert [*errors, *compare(case, expect(case, *inputs), outputs)[1]] == []
