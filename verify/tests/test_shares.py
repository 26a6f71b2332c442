"""v12 shares work tiles out among blocks: which are whose, and that no bit differs from v11's."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from common.catalog import find_step
from common.problem import Shape
from common.report.diagrams import blocks
from common.runtime.backend import empty_outputs, run
from common.runtime.cpu import CpuBackend
from common.step import Step
from verify.cases import find_cases
from verify.tests import small_kernels
from verify.tests.small_kernels import write_step

V11, V12 = find_step("v11"), find_step("v12")

# ---- which tiles of keys are whose, as the worklog's diagram has it


SHARED = [  # blocks, work tiles, tiles of keys
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
def test_equal_shares_have_each_tile_of_keys_once(sizes):
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


# A block a query; the scenario is 2048 work tiles + tiles of keys.
SCHEDULE = """
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
        *to++ = work.head, *to++ = work.first + rest, *to++ = work.end;
    }
"""


@pytest.fixture(scope="module")
def schedule(tmp_path_factory) -> Step:
    """All of v12, but for its launch descriptor."""
    source = V12.path.read_text()
    globals_ = f"#define launch_descriptor v12s\n{source}\n#undef launch_descriptor"
    folder = tmp_path_factory.mktemp("schedule")
    return write_step(folder, "schedule", SCHEDULE, globals_=globals_, layout="int nothing;")


@pytest.mark.parametrize("sizes", [*SHARED, *NOT_SHARED])
def test_equal_shares_are_v12s(schedule, sizes):
    num_blocks, num_work, num_tiles = sizes
    q = torch.zeros(1, 1, num_blocks, 8, dtype=torch.float16)
    scenario = 2048 * num_work + num_tiles
    _, lse = small_kernels.run(
        schedule, CpuBackend(), q, num_lse=64 * num_blocks, scenario=scenario
    )
    for pieces, (count, *numbers) in zip(
        blocks.equal_shares(*sizes), lse.view(-1, 64).int().tolist(), strict=True
    ):
        assert pieces == [blocks.Piece(*numbers[3 * n : 3 * n + 3]) for n in range(count)]


# ---- what they compute


# On 4 multiprocessors 6 work tiles are shares of one and a half: every other share ends with one.
@pytest.mark.parametrize(
    ("name", "shape", "multiprocessors"),
    [
        ("shares_walks", Shape(1, 7, 7, 20, 1400, 64), 3),
        ("shares_walks_far", Shape(1, 6, 2, 20, 1400, 64), 4),
        ("shares_128", Shape(1, 13, 13, 20, 1400, 128), 9),
        ("shares_one_tile", Shape(1, 6, 6, 20, 890, 64), 5),
    ],
)
def test_bits_are_v11s(name: str, shape: Shape, multiprocessors: int) -> None:
    (case,) = find_cases([name])
    case = replace(case, shape=shape)
    inputs = case.make("cpu")
    backend = CpuBackend(0)
    backend.multiprocessors = multiprocessors
    expected, found = (run(backend, step, *inputs, **case.arguments) for step in (V11, V12))
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_workspaces_are_used_again() -> None:
    """Call after call, in a CUDA graph, and on two streams at once."""
    from common.runtime.gpu import GpuBackend

    backend = GpuBackend()
    (case,) = find_cases(["shares_gpu"])
    inputs = case.make(backend.device)
    expected = run(backend, V11, *inputs, **case.arguments)

    def assert_right(outputs: list[torch.Tensor]) -> None:
        torch.cuda.synchronize()
        for a, b in zip(expected, outputs, strict=True):
            assert torch.equal(a, b)

    for _ in range(20):
        assert_right(run(backend, V12, *inputs, **case.arguments))

    outputs = empty_outputs(V12.operation, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.launch(V12, *inputs, *outputs, **case.arguments)
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
                results.append(run(backend, V12, *inputs, **case.arguments))
    for result in results:
        assert_right(result)
