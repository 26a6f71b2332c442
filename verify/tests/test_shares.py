"""v12 and b10 share works out among blocks: which tiles are whose, and what they compute.

v12 shares out work tiles, of which each has tiles of keys; b10 works of tiles of queries. v12 finds
v11's bits. b10's sums are b08's but for the order of their terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from common.catalog import find_step
from common.problem import Shape
from common.report.diagrams import blocks
from common.runtime.backend import Backend, empty_outputs, run
from common.runtime.cpu import CpuBackend
from common.step import Step
from verify.accuracy import expect, repeated
from verify.cases import find_cases
from verify.tests import small_kernels
from verify.tests.small_kernels import write_step

FROM = {"v12": "v11", "b10": "b08"}

# ---- which tiles are whose, as the worklog's diagram has it


SHARED = [  # blocks, works, tiles of each
    (blocks.SHARED_SMS, blocks.SHARED_WORK, blocks.KEY_TILES),
    *((132, num_work, num_tiles) for num_work in (133, 150, 200, 2048) for num_tiles in (64, 131)),
    (144, 145, 9),
    (132, 255, 1023),
    (4, 5, 11),
    (3, 8, 25),
    (2, 3, 10),
    (2, 3, 17),
    (132, 257, 95),
    (132, 263, 660),
    (5, 6, 7),  # a single tile is begun
    *((2, 3, num_tiles) for num_tiles in (39, 40)),  # b10 saves too little, and enough
    *((5, 7, num_tiles) for num_tiles in (33, 34)),
    (5, 11, 25),  # b10's walk through the last blocks of keys has gone around before the rest
]
NOT_SHARED = [
    (132, 2 * 132, 64),  # nothing is left
    (132, 132, 64),
    (2, 3, 9),  # too little is saved
    (132, 257, 94),
    (132, 263, 659),
    (145, 146, 64),  # too many blocks
]


@pytest.mark.parametrize("sizes", SHARED)
def test_equal_shares_have_each_tile_once(sizes):
    num_blocks, num_work, num_tiles = sizes
    shares = blocks.equal_shares(*sizes)
    assert len(shares) == num_blocks
    computed = [
        (piece.work, tile)
        for pieces in shares
        for piece in pieces
        for tile in range(piece.first, piece.end)
    ]
    assert len(computed) == num_work * num_tiles
    assert set(computed) == set(product(range(num_work), range(num_tiles)))


@pytest.mark.parametrize("sizes", SHARED)
def test_equal_shares_are_equal(sizes):
    num_blocks, num_work, num_tiles = sizes
    counts = [sum(piece.tiles for piece in pieces) for pieces in blocks.equal_shares(*sizes)]
    assert max(counts) - min(counts) <= 1
    in_rounds = -(-num_work // num_blocks) * num_tiles
    assert max(counts) < in_rounds


@pytest.mark.parametrize("sizes", SHARED)
def test_the_next_block_finishes_what_one_has_begun(sizes):
    """It comes after the rounds, last in the next, and is ready before that one asks for it."""
    num_blocks, num_work, num_tiles = sizes
    rounds = num_work // num_blocks - 1
    shares = blocks.equal_shares(*sizes)
    handed_over = 0
    for pieces, next_pieces in zip(shares, [*shares[1:], []], strict=True):
        assert all(piece.first == 0 for piece in pieces[:-1])
        begun = pieces[rounds]
        assert all(piece.end == num_tiles for piece in pieces if piece != begun)
        if begun.end < num_tiles:
            rest = next_pieces[-1]
            assert (rest.work, rest.first, rest.end) == (begun.work, begun.end, num_tiles)
            ready = sum(piece.tiles for piece in pieces[: rounds + 1])
            assert ready <= sum(piece.tiles for piece in next_pieces[:-1])
            handed_over += 1
    assert handed_over == sum(pieces[-1].first > 0 for pieces in shares) > 0


@pytest.mark.parametrize("sizes", NOT_SHARED)
def test_rounds_remain_where_little_is_to_be_saved(sizes):
    assert blocks.equal_shares(*sizes) == blocks.in_rounds(*sizes)


MIN_SAVED_TILES = {"v12": blocks.MIN_SAVED_TILES, "b10": 20}
# A block a query; the scenario is 2048 works + tiles of each. Of each piece: the work, the steps of
# its walk before the first tile, and tiles.
SCHEDULES = {
    "v12": """
    if (t > 0) return;
    AttentionParams shape = p;
    shape.batch = 1, shape.seq_q = BLOCK_M;
    shape.heads = int(p.softmax_scale) / 2048, shape.seq_k = int(p.softmax_scale) % 2048 * BLOCK_N;
    const Schedule schedule(shape);
    float* to = p.lse + 64 * block;
    *to++ = schedule.count;
    for (int i = 0; i < schedule.count; ++i) {
        const WorkTile work = schedule.at(i);
        // A rest begins with the tile whose P is handed over, S of which has been computed.
        const bool rest = i > 0 && schedule.at(i - 1).next == REST;
        *to++ = work.head, *to++ = work.first + rest, *to++ = work.end - work.first - rest;
    }
""",
    # Blocks take tickets in turn. Walks are downward, each from a tile later than those before it.
    "b10": """
    if (t > 0) return;
    BackwardParams shape = {};
    shape.batch = shape.heads = shape.kv_heads = 1;
    shape.seq_k = int(p.softmax_scale) / 2048 * BLOCK_N;
    shape.seq_q = int(p.softmax_scale) % 2048 * BLOCK_M;
    float* to = p.lse + 64 * block;
    float& count = *to++;
    int ticket = block, piece = 0;
    for (count = 0;; ++count) {
        const Work work = make_piece(shape, ticket, piece);
        if (work.num_tiles == 0) break;
        *to++ = work.first_key / BLOCK_N;
        *to++ = work.end_tile - 1 - work.start_tile, *to++ = work.num_tiles;
        piece = work.has_next ? piece + 1 : 0;
        if (piece == 0) ticket += gridDim.x;
    }
""",
}


@pytest.fixture(scope="module", params=SCHEDULES)
def schedule(request, tmp_path_factory) -> tuple[str, Step]:
    """A step's name, and all of it but for what the runtime reads of it."""
    step = find_step(request.param)
    names = ("launch_descriptor", "kernels_start_early", "simt_step")
    lines = [f"#define {name} {name}_of_{step.name}" for name in names]
    lines += [step.path.read_text(), *(f"#undef {name}" for name in names)]
    folder = tmp_path_factory.mktemp("schedule")
    return step.name, write_step(
        folder, "schedule", SCHEDULES[step.name], globals_="\n".join(lines), layout="int nothing;"
    )


def walks(name: str, pieces: list[blocks.Piece], num_tiles: int) -> list[tuple[int, int, int]]:
    """What SCHEDULES' kernels say of a block's pieces.

    b10 begins each block of keys a tile later than the one before, and, between the beginning of a
    work and the rest of another, a whole one where that beginning ends: both go around.
    """
    if name == "v12":
        return [(piece.work, piece.first, piece.tiles) for piece in pieces]
    found = []
    for n, piece in enumerate(pieces):
        is_between = 0 < n < len(pieces) - 1 and pieces[n - 1].end < num_tiles
        late = pieces[n - 1].end if is_between else piece.first
        found.append((piece.work, (piece.work + late) % num_tiles, piece.tiles))
    return found


@pytest.mark.parametrize("sizes", [*SHARED, *NOT_SHARED])
def test_schedules_have_equal_shares(schedule, sizes):
    name, step = schedule
    num_blocks, num_work, num_tiles = sizes
    q = torch.zeros(1, 1, num_blocks, 8, dtype=torch.float16)
    scenario = 2048 * num_work + num_tiles
    _, lse = small_kernels.run(step, CpuBackend(), q, num_lse=64 * num_blocks, scenario=scenario)
    for pieces, (count, *numbers) in zip(
        blocks.equal_shares(*sizes, MIN_SAVED_TILES[name]),
        lse.view(-1, 64).int().tolist(),
        strict=True,
    ):
        found = [tuple(numbers[3 * n : 3 * n + 3]) for n in range(count)]
        assert found == walks(name, pieces, num_tiles)


# ---- what they compute


class SameSums:
    """A step in a case, and the bits that it must find; of sums in any order not the last ones."""

    def __init__(self, backend: Backend, name: str, case_name: str, **changes) -> None:
        self.backend, self.step = backend, find_step(name)
        (case,) = find_cases([case_name], self.step.operation)
        self.case = replace(case, **changes)
        self.inputs = self.case.make(backend.device)
        self.expected = self.run(find_step(FROM[name]))
        reordered = expect(self.case, *self.inputs).reordered
        self.allowances = {output: reordered[output] for output in self.step.unordered}

    def run(self, step: Step | None = None) -> list[torch.Tensor]:
        return run(self.backend, step or self.step, *self.inputs, **self.case.arguments)

    def check(self, outputs: Sequence[torch.Tensor]) -> None:
        for operand, a, b in zip(self.step.operation.outputs, self.expected, outputs, strict=True):
            assert not repeated(operand.name, a, b, self.allowances.get(operand.name))


# On 4 multiprocessors 6 works are shares of one and a half: every other share ends with one. On 5,
# of 7 works, the third share has a whole one between a beginning and a rest.
@pytest.mark.parametrize(
    ("step", "case", "shape", "multiprocessors"),
    [
        ("v12", "shares_walks", Shape(1, 7, 7, 20, 1400, 64), 3),
        ("v12", "shares_walks_far", Shape(1, 6, 2, 20, 1400, 64), 4),
        ("v12", "shares_128", Shape(1, 13, 13, 20, 1400, 128), 9),
        ("v12", "shares_one_tile", Shape(1, 6, 6, 20, 890, 64), 5),
        ("b10", "query_shares", Shape(1, 17, 1, 140, 880, 64), 5),
        ("b10", "query_shares_128", Shape(1, 10, 5, 860, 120, 128), 4),
    ],
)
def test_sums_are_the_same(step: str, case: str, shape: Shape, multiprocessors: int) -> None:
    backend = CpuBackend(0)
    backend.multiprocessors = multiprocessors
    same = SameSums(backend, step, case, shape=shape)
    same.check(same.run())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("step", "case"),
    [("v12", "shares_gpu"), ("b10", "query_shares_gpu"), ("b10", "query_shares_gpu_128")],
)
def test_workspaces_are_used_again(step: str, case: str) -> None:
    """Call after call, in a CUDA graph, and on two streams at once."""
    from common.runtime.gpu import GpuBackend

    backend = GpuBackend()
    same = SameSums(backend, step, case)

    def assert_right(outputs: Sequence[torch.Tensor]) -> None:
        torch.cuda.synchronize()
        same.check(outputs)

    for _ in range(20):
        assert_right(same.run())

    outputs = empty_outputs(same.step.operation, same.inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.launch(same.step, *same.inputs, *outputs, **same.case.arguments)
    for _ in range(20):
        for output in outputs:
            output.zero_()
        graph.replay()
        assert_right(outputs)

    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    torch.cuda.synchronize()
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(same.run())
    for result in results:
        assert_right(result)
