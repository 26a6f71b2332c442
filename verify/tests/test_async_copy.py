"""cp.async: a copy lands in the wait that covers its group and no earlier; misuse is reported."""

from __future__ import annotations

import pytest
import torch

from common.runtime.cpu import CpuBackend, SimtError
from common.step import Step
from verify.tests.small_kernels import (
    Fault,
    expect_report,
    run,
    write_faults,
    write_scenarios,
    write_step,
)

INCLUDE = '#include "copy.cuh"'
TILES = "Element tiles[2][64][VEC];"
Q = torch.arange(1.0, 1025).half().view(1, 1, 16, 64)  # two tiles

# Each thread copies its row of two tiles, and writes to o what it then finds in a row of both.
BODY = """
    cp_async_cg(smem.tiles[0][t], p.q + t * VEC, true);
    {first_commit}
    cp_async_cg(smem.tiles[1][t], p.q + (64 + t) * VEC, true);
    {second_commit}
    {wait}
    const int row = {row};
    for (int tile = 0; tile < 2; ++tile)
        store_uint4(p.o + (64 * tile + row) * VEC, load_uint4(smem.tiles[tile][row]));
    cp_async_commit_group();
    cp_async_wait_group<0>();  // a thread must not exit with a copy in flight
"""
COMMIT = "cp_async_commit_group();"
WAIT = "cp_async_wait_group<{}>();".format
NEW, POISON = "new", "poison"


def body(wait: str, *, first_commit: str = COMMIT, second_commit: str = COMMIT, row="t") -> str:
    return BODY.format(wait=wait, first_commit=first_commit, second_commit=second_commit, row=row)


# What the two tiles then hold, by body.
LANDED = [
    (body(WAIT(0)), [NEW, NEW]),
    (body(WAIT(1)), [NEW, POISON]),
    (body(WAIT(2)), [POISON, POISON]),
    (body("__syncthreads();"), [POISON, POISON]),
    # A copy that is not committed belongs to the next group, or to none.
    (body(WAIT(0), first_commit=""), [NEW, NEW]),
    (body(WAIT(1), first_commit=""), [POISON, POISON]),
    (body(WAIT(0), second_commit=""), [NEW, POISON]),
    (body(WAIT(1), second_commit=""), [POISON, POISON]),
    # Empty groups count.
    (body(COMMIT + WAIT(1)), [NEW, NEW]),
    # What has landed stays; a later wait lands the rest.
    (body(WAIT(1) + WAIT(0)), [NEW, NEW]),
    # Another thread's copies: after its wait, and a barrier.
    (body(WAIT(0) + "__syncthreads();", row="(t + 40) % 64"), [NEW, NEW]),
]
TOO_EARLY = [
    body(f"if (t % 2) {WAIT(0)} __syncthreads();", row="t ^ 1"),
    body(WAIT(0), row="(t + 40) % 64"),
    body("__syncthreads();" + WAIT(0), row="(t + 40) % 64"),
]


@pytest.fixture(scope="module")
def copy_step(tmp_path_factory) -> Step:
    bodies = [body for body, _ in LANDED] + TOO_EARLY
    return write_scenarios(
        tmp_path_factory.mktemp("copy"),
        "copy",
        bodies,
        "    if (block) return;",
        threads=64,
        globals_=INCLUDE,
        layout=TILES,
    )


def run_copy(step: Step, scenario: int, seed: int) -> list[str]:
    """What the two tiles hold at the end."""
    o, _ = run(step, CpuBackend(seed), Q, scenario=scenario)
    tiles = []
    for tile, copied in zip(o.view(2, 64, 8), Q.view(2, 64, 8), strict=True):
        if torch.equal(tile, copied):
            tiles.append(NEW)
        else:
            assert tile.isnan().all()
            tiles.append(POISON)
    return tiles


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("scenario", range(len(LANDED)))
def test_copies_land_in_the_wait_for_their_group(copy_step, scenario, seed):
    _, landed = LANDED[scenario]
    assert run_copy(copy_step, scenario, seed) == landed


@pytest.mark.parametrize(
    "scenario", range(3), ids=["half of them", "no barrier", "barrier before the wait"]
)
def test_others_see_a_copy_only_after_wait_and_barrier(copy_step, scenario):
    for seed in range(4):
        with pytest.raises(SimtError, match="data race"):
            run_copy(copy_step, len(LANDED) + scenario, seed)


def test_what_is_between_issue_and_wait(tmp_path):
    """The destination is poison, whatever it was; the source is read in the wait, once."""
    step = write_step(
        tmp_path,
        "between",
        """
    if (block) return;
    Element* tile = smem.tiles[0][t];
    Element* source = p.o + t * VEC;
    for (int i = 0; i < VEC; ++i) tile[i] = source[i] = from_float<Element>(1);
    cp_async_cg(tile, source, true);
    p.lse[t] = to_float(tile[VEC - 1]);
    source[VEC - 1] = from_float<Element>(2);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    p.lse[64 + t] = to_float(tile[0]);
    p.lse[128 + t] = to_float(tile[VEC - 1]);
    tile[0] = from_float<Element>(3);
    cp_async_wait_group<0>();
    p.lse[192 + t] = to_float(tile[0]);
""",
        threads=64,
        globals_=INCLUDE,
        layout=TILES,
    )
    _, lse = run(step, CpuBackend(), Q, num_lse=256)
    issued, first, last, overwritten = lse.view(4, 64)
    assert issued.isnan().all()
    assert (first == 1).all()
    assert (last == 2).all()
    assert (overwritten == 3).all()


def test_zero_fill_reads_nothing(tmp_path):
    step = write_step(
        tmp_path,
        "zeros",
        """
    if (block) return;
    Element* tile = smem.tiles[0][t];
    for (int i = 0; i < VEC; ++i) tile[i] = from_float<Element>(1);
    cp_async_cg(tile, t % 2 ? nullptr : p.q + (1 << 20), false);
    cp_async_commit_group();
    for (int i = 0; i < VEC; ++i) p.lse[t * VEC + i] = to_float(tile[i]);
    cp_async_wait_group<0>();
    for (int i = 0; i < VEC; ++i) p.lse[(64 + t) * VEC + i] = to_float(tile[i]);
""",
        threads=64,
        globals_=INCLUDE,
        layout=TILES,
    )
    _, lse = run(step, CpuBackend(), Q, num_lse=1024)
    assert lse[:512].isnan().all()
    assert (lse[512:] == 0).all()


def test_threads_run_far_ahead_of_one_that_has_started_a_copy(tmp_path):
    """Some seeds let warp 1 finish its rounds first; others let warp 0 go on at once. The rounds
    are counted in global memory, where no race is reported."""
    step = write_step(
        tmp_path,
        "ahead",
        """
    if (block) return;
    if (t == 0) scores[0] = 0;
    __syncthreads();
    if (t < 32) {
        cp_async_cg(smem.tile[t], p.q, true);
        if (t == 0) p.lse[0] = scores[0];
        cp_async_commit_group();
        cp_async_wait_group<0>();
    } else {
        for (int i = 0; i < 50; ++i) {
            __syncwarp();
            if (t == 32) ++scores[0];
        }
    }
""",
        threads=64,
        globals_=INCLUDE,
        layout="Element tile[32][VEC];",
    )
    rounds = {run(step, CpuBackend(seed), Q)[1].item() for seed in range(20)}
    assert {0, 50} <= rounds


# q and shared memory are 2048 bytes each.
FAULTS = [
    Fault(
        "misaligned_destination",
        "if (t == 3) cp_async_cg(smem.tiles[0][t] + 4, p.q, true);",
        r"misaligned access .*, thread 3: cp_async_cg @ needs a multiple of 16 bytes, "
        "not the address at byte 56 of shared memory",
    ),
    Fault(
        "misaligned_source",
        "if (t == 3) cp_async_cg(smem.tiles[0][t], p.q + 1, t == 0);",
        r"misaligned access .*, thread 3: cp_async_cg @ .* at byte 2 of q",
    ),
    Fault(
        "destination_in_global",
        "cp_async_cg(p.o, p.q, true);",
        r"access outside shared memory .*: cp_async_cg @ needs 16 bytes of the block's shared "
        r"memory, not the address at byte 0 of o",
    ),
    Fault(
        "destination_past_end",
        "cp_async_cg(smem.tiles[2][1], p.q, true);",
        r"outside shared memory .* past the end of shared memory \(2048 bytes\), at byte 2064",
    ),
    Fault(
        "source_past_end",
        "if (t == 5) cp_async_cg(smem.tiles[0][t], p.q + 1024, true);\n__syncthreads();",
        r"out-of-bounds read .*, thread 5 @: past the end of q \(2048 bytes\), at byte 2048",
    ),
    Fault(
        "source_null",
        "cp_async_cg(smem.tiles[0][t], nullptr, true);",
        "out-of-bounds read .* @: through a null pointer",
    ),
    Fault(
        "exit_in_flight",
        "cp_async_cg(smem.tiles[0][t], p.q, true); cp_async_commit_group();",
        r"exit with a copy in flight .*, thread \d+: cp_async_cg @ may land in shared memory after",
    ),
    Fault(
        "exit_with_zeros_in_flight",
        "if (t == 5) cp_async_cg(smem.tiles[0][t], nullptr, false);",
        r"exit with a copy in flight .*, thread 5: cp_async_cg @",
    ),
    Fault(
        "exit_with_the_last_group_in_flight",
        "for (int i = 0; i < 2; ++i) {\ncp_async_cg(smem.tiles[i][t], p.q, true);"
        "cp_async_commit_group(); } cp_async_wait_group<1>();",
        r"exit with a copy in flight .*: cp_async_cg \(faults.cu:\d+\)",
    ),
    Fault(
        "misaligned_uint4",
        "store_uint4(smem.tiles[0][t] + 1, load_uint4(p.q));",
        "misaligned access .*: store_uint4 @ .* shared memory",
    ),
]


@pytest.fixture(scope="module")
def faults_step(tmp_path_factory) -> Step:
    folder = tmp_path_factory.mktemp("copy_faults")
    return write_faults(folder, FAULTS, threads=64, globals_=INCLUDE, layout=TILES)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_reported(faults_step, fault):
    expect_report(faults_step, FAULTS, fault, q=Q)
