"""Races between blocks in global memory: signals order accesses, reductions need no order."""

from __future__ import annotations

from dataclasses import replace

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

BLOCKS, THREADS, NUM_LSE = 3, 64, 512
GLOBALS = """
#include "bulk.cuh"
#include "copy.cuh"
#include "reduce.cuh"
#include "signal.cuh"
#include "wmma.cuh"
#define SIGNAL(i) (*reinterpret_cast<Signal*>(p.o + 8 * (i)))
"""
LAYOUT = "alignas(128) Element box[64]; Mbarrier full;"
BOXES = ".q_box = {8, 8, SWIZZLE_NONE}, .o_box = {8, 8, SWIZZLE_NONE},"
SOURCE = {"threads": THREADS, "globals_": GLOBALS, "layout": LAYOUT, "boxes": BOXES}
SETUP = """
    [[maybe_unused]] wmma::Accumulator c;
    [[maybe_unused]] float* const row = p.lse + 64 * block;
    [[maybe_unused]] float* const last_row = p.lse + 64 * (gridDim.x - 1);
"""

NO_RACE = {
    "elements side by side": "p.o[block + 3 * t % 9] = p.q[0];",
    "rows of one's own": "row[t] = t; row[t] += 1; row[63 - t] = row[t ^ 1];",
    "all read the inputs": "row[t] = to_float(p.q[t % 8]) + to_float(p.k[0]);",
    "all add to one sum": "red_add(p.lse, 1); red_add(&p.lse[t], 2);",
    "all add in bulk to one sum": """
        red_add(&p.lse[t], 2);
        if (t < 2) {
            cp_reduce_async_bulk_add(p.lse, reinterpret_cast<const float*>(smem.box), 128);
            cp_async_bulk_commit_group();
            cp_async_bulk_wait_group_read<0>();
        }
    """,
    "rows of one's own, and a sum": "row[t] = 1; red_add(&p.lse[192 + t], 1);",
    "a signal": """
        if (block == 0) { p.lse[t] = 1; __syncthreads(); if (t < 32) post_signal(SIGNAL(0)); }
        if (block == 1 && t < 32) { take_signal(SIGNAL(0)); p.lse[64 - t] += p.lse[t]; }
    """,
    "a signal of a signal": """
        if (block == 2 && t < 32) { p.lse[t] = 1; post_signal(SIGNAL(0)); }
        if (block == 1 && t < 32) { take_signal(SIGNAL(0)); post_signal(SIGNAL(1)); }
        if (block == 0 && t < 32) { take_signal(SIGNAL(1)); p.lse[31 - t] = p.lse[t]; }
    """,
    "a signal after the read": """
        if (block == 1 && t < 32) { row[t] = last_row[t]; post_signal(SIGNAL(0)); }
        if (block == 0 && t < 32) { take_signal(SIGNAL(0)); last_row[t] = 1; }
    """,
    "a signal of each that has read": """
        if (block > 0 && t < 32) { row[t] = p.lse[t]; post_signal(SIGNAL(block)); }
        if (block == 0 && t < 32) {
            take_signal(SIGNAL(1));
            take_signal(SIGNAL(2));
            p.lse[t] = 1;
        }
    """,
    "there and back": """
        if (block == 0 && t < 32) {
            p.lse[t] = 1;
            post_signal(SIGNAL(0));
            take_signal(SIGNAL(1));
            p.lse[t] += 1;
        }
        if (block == 1 && t < 32) { take_signal(SIGNAL(0)); p.lse[t] += 1; post_signal(SIGNAL(1)); }
    """,
}  # fmt: skip

RACE = r"data race between blocks in kernel test_kernel, block \d, thread \d+ @: "
WRITES = RACE + r"writes what block \d has written @, at byte \d+ of {}, and no signal orders"
READS = RACE + r"reads what block \d has written @, at byte \d+ of {}, and no signal orders"
# Of a read and a write by different blocks, whichever comes first.
EITHER = RACE + (
    r"(reads what block \d has written|writes what block \d has read) @, at byte \d+ of {}, "
    "and no signal orders"
)
LSE, OUT, SCORES = r"lse \(2048 bytes\)", r"o \(48 bytes\)", r"workspace\[0\] \(\d+ bytes\)"

# What three blocks of 64 threads execute. Reported whichever block is the first.
FAULTS = [
    Fault("all write", "p.lse[t] = block;", WRITES.format(LSE)),
    Fault("all write half a float", "p.o[t % 8] = p.q[0];", WRITES.format(OUT)),
    Fault("all write the same", "if (t == 5) scores[0] = 1;", WRITES.format(SCORES)),
    Fault("all add without red_add", "p.lse[t] += 1;", READS.format(LSE)),
    Fault("rows overlap", "for (int i = 0; i < 65; ++i) row[i] = 0;", WRITES.format(LSE)),
    Fault("stores of 16 bytes", "store_float4(row + 4 * t, float4{});", WRITES.format(LSE)),
    Fault(
        "a matrix of wmma",
        "if (t < 32) wmma::store_matrix_sync(p.lse + 16 * block, c, 16, wmma::mem_row_major);",
        WRITES.format(LSE),
    ),
    Fault(
        "a box of TMA",
        "if (t == 0) { cp_async_bulk_tensor_store(p.o_map, 0, block / 2, 0, 0, smem.box); "
        "cp_async_bulk_commit_group(); cp_async_bulk_wait_group<0>(); }",
        WRITES.format(OUT),
    ),
    Fault(
        "cp.async of what another block has written",
        "if (t) return; cp_async_cg(smem.box, p.o + 8 * ((block + 1) % 3), true); "
        "cp_async_commit_group(); cp_async_wait_group<0>(); p.o[8 * block] = p.q[0];",
        EITHER.format(OUT),
    ),
    Fault(
        "a bulk load of what another block has written",
        "if (t) return; mbarrier_init(smem.full, 1); fence_mbarrier_init(); "
        "mbarrier_arrive_expect_tx(smem.full, 16); "
        "cp_async_bulk_load(smem.box, p.o + 8 * ((block + 1) % 3), 16, smem.full); "
        "while (!mbarrier_try_wait_parity(smem.full, 0)) { } p.o[8 * block] = p.q[0];",
        EITHER.format(OUT).replace(r", thread \d+", r"(, thread \d+)?"),  # none when it lands
    ),
    Fault(
        "one reads what another writes",
        "if (t == 0) { if (block == 1) p.lse[1] = 1; else p.lse[2 + block] = p.lse[1]; }",
        EITHER.format(LSE),
    ),
    Fault(
        "one reads what another adds to",
        "if (t == 0) { if (block == 1) red_add(&p.lse[1], 1); if (block == 0) row[9] = p.lse[1]; }",
        RACE + r"(reads what block 1 has added to|adds to what block 0 has read) @, ",
    ),
    Fault(
        "a signal after the read that comes too early",
        "if (t < 32) { if (block == 0) { post_signal(SIGNAL(0)); row[t] = last_row[t]; } "
        "if (block == 1) { take_signal(SIGNAL(0)); last_row[t] = 2; } }",
        EITHER.format(LSE),
    ),
    Fault(
        "a signal that comes too early",
        "if (t < 32) { if (block == 0) { post_signal(SIGNAL(0)); p.lse[t] = 1; } "
        "if (block == 1) { take_signal(SIGNAL(0)); p.lse[t] = 2; } }",
        WRITES.format(LSE),
    ),
    Fault(
        "a signal of another block",
        "if (t < 32) { if (block == 0) post_signal(SIGNAL(0)); "
        "if (block == 1) take_signal(SIGNAL(0)); if (block) p.lse[t] = block; }",
        WRITES.format(LSE),
    ),
    Fault(
        "the sum is read",
        "if (block == 2) { red_add(last_row + t, 1); row[0] = last_row[t]; }",
        RACE + rf"reads what block 2 has added to @, at byte \d+ of {LSE}; the sum is there when",
    ),
    Fault(
        "the sum in bulk is read",
        "if (block == 2 && t == 0) { cp_reduce_async_bulk_add(last_row, "
        "reinterpret_cast<const float*>(smem.box), 16); cp_async_bulk_commit_group(); "
        "cp_async_bulk_wait_group<0>(); row[0] = last_row[3]; }",
        RACE + rf"reads what block 2 has added to @, at byte 524 of {LSE}; the sum is there when",
    ),
    Fault(
        "the sum is written",
        "if (block == 1) { red_add(row + t, 1); row[t] = 1; }",
        RACE + rf"writes what block 1 has added to @, at byte \d+ of {LSE}; the sum is there when",
    ),
    Fault(
        "one block sets the sum to 0",
        "if (block == 0) p.lse[t] = 0; __syncthreads(); red_add(&p.lse[t], 1);",
        RACE + r"(adds to what block 0 has written|writes what block \d has added to) @, ",
    ),
]  # fmt: skip

Q = torch.zeros(1, 1, BLOCKS, 8, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def right(tmp_path_factory) -> Step:
    folder = tmp_path_factory.mktemp("no_race")
    bodies = list(NO_RACE.values())
    return write_scenarios(folder, "no_race", bodies, SETUP, **SOURCE)


@pytest.mark.parametrize("name", NO_RACE)
def test_what_is_ordered_is_no_race(right, name):
    for seed in range(6):
        backend = CpuBackend(seed)
        backend.calls = 2
        run(right, backend, Q, num_lse=NUM_LSE, scenario=list(NO_RACE).index(name))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory) -> Step:
    return write_faults(tmp_path_factory.mktemp("races"), FAULTS, SETUP, **SOURCE)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_race_is_reported_in_every_order(wrong, fault, seed):
    expect_report(wrong, FAULTS, replace(fault, seed=seed), q=Q, num_lse=NUM_LSE)


def test_a_write_after_the_reads_of_two_blocks_is_found_in_another_order(tmp_path):
    """Remembered is the last read. Here one of two that read says so to the block that writes."""
    body = (
        "if (t >= 32) return; if (block < 2) row[t] = last_row[t]; "
        "if (block == 1) post_signal(SIGNAL(0)); "
        "if (block == 2) { take_signal(SIGNAL(0)); last_row[t] = 1; }"
    )
    step = write_scenarios(tmp_path, "late", [body], SETUP, **SOURCE)

    def found(seed: int) -> bool:
        try:
            run(step, CpuBackend(seed), Q, num_lse=NUM_LSE, scenario=0)
        except SimtError as error:
            return "data race between blocks" in str(error)
        return False

    assert {found(seed) for seed in range(12)} == {False, True}


def test_launches_are_ordered(tmp_path):
    """What one call has written the next one may add to."""
    step = write_step(tmp_path, "again", "scores[(block + gridDim.x) % gridDim.x] = t;")
    backend = CpuBackend()
    backend.calls = 3
    run(step, backend, Q)
