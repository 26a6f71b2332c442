"""Bulk copies and reductions: what they bring and add, on a GPU and on the CPU, where misuse is
reported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from common.paths import ROOT
from common.runtime.backend import Backend
from common.runtime.cpu import CpuBackend
from common.step import Step, read_step
from verify.tests.small_kernels import Fault, expect_report, run, write_faults, write_step

INSTRUCTIONS = ROOT / "verify" / "instructions" / "bulk.cu"
FLOATS, HEAD_DIM = 256, 8


@dataclass(frozen=True)
class Moved:
    """Inputs and results of verify/instructions/bulk.cu."""

    numbers: torch.Tensor  # [FLOATS]
    places: list[tuple[int, int, int]]  # of each block: how many, from where, where to
    in_shared: torch.Tensor  # [blocks, FLOATS]
    sums: torch.Tensor  # [FLOATS]


def move(backend: Backend, blocks: int, source: Path = INSTRUCTIONS) -> Moved:
    rng = np.random.default_rng(0)
    places = [(FLOATS, 0, 0), (4, FLOATS - 4, 0)]  # the longest and the shortest
    while len(places) < blocks:
        floats = 4 * int(rng.integers(1, 33))  # few blocks bring the first and the last numbers
        places.append((floats, *(4 * rng.integers(0, (FLOATS - floats) // 4 + 1, 2)).tolist()))
    places = places[:blocks]
    q = torch.zeros(blocks, HEAD_DIM, dtype=torch.int16)
    q[:, :3] = torch.tensor(places)
    numbers = torch.from_numpy(rng.standard_normal(FLOATS, dtype=np.float32))
    q, k = (
        t.view(torch.bfloat16).view(1, 1, -1, HEAD_DIM).to(backend.device) for t in (q, numbers)
    )
    lse = torch.full((blocks + 1, FLOATS), torch.nan, device=backend.device)
    backend.launch(
        read_step(source), q, k, k, torch.empty_like(q), lse, causal=False, softmax_scale=1.0
    )
    *in_shared, sums = lse.cpu()
    return Moved(numbers, places, torch.stack(in_shared), sums)


@pytest.mark.parametrize("blocks", [1, 2, 500])
def test_what_is_copied_and_added(make_backend, blocks):
    """Nothing else changes, in shared memory or among the sums."""
    moved = move(make_backend(), blocks)
    terms = torch.zeros(blocks, FLOATS, dtype=torch.float64)
    for block, (floats, source, to) in enumerate(moved.places):
        expected = torch.full((FLOATS,), -1.0)
        expected[to : to + floats] = moved.numbers[source : source + floats]
        assert torch.equal(moved.in_shared[block], expected)
        terms[block, source : source + floats] = expected[to : to + floats] / (block + 3)
    allowed = 2.0**-24 * (terms != 0).sum(0) * terms.abs().sum(0)  # u for each addition
    assert ((moved.sums - terms.sum(0)).abs() <= allowed).all()


def test_order_is_drawn_from_the_seed():
    first, *others = (move(CpuBackend(seed), blocks=40).sums for seed in range(4))
    assert torch.equal(first, move(CpuBackend(0), blocks=40).sums)
    assert any(not torch.equal(first, other) for other in others)


WAIT = "    cp_async_bulk_wait_group_read<0>();\n"
FILL = "smem.terms[i] = 1e30f;\n"


def test_a_source_overwritten_too_early(tmp_path):
    """The reduction then adds what has overwritten it, though every barrier and fence is there."""
    text = INSTRUCTIONS.read_text()
    assert text.count(WAIT) == text.count(FILL) == 1
    late = f"fence_proxy_async();\n__syncthreads();\nif (threadIdx.x == 0) {{\n{WAIT}}}\n"
    wrong = tmp_path / "bulk.cu"
    wrong.write_text(text.replace(WAIT, "").replace(FILL, FILL + late))
    for seed in range(2):
        assert (move(CpuBackend(seed), 1, wrong).sums == 1e30).all()


GLOBALS = '#include "bulk.cuh"'
LAYOUT = """
    alignas(16) float source[64];
    alignas(16) float loaded[64];
    Mbarrier full, unfenced;
"""
SETUP = """
    smem.source[t] = smem.source[32 + t] = 1;
    fence_proxy_async();
    if (t == 0) {
        mbarrier_init(smem.full, 1);
        fence_mbarrier_init();
        mbarrier_init(smem.unfenced, 1);
    }
    __syncthreads();
    [[maybe_unused]] const auto load = [&](const float* from) {
        mbarrier_arrive_expect_tx(smem.full, 256);
        cp_async_bulk_load(smem.loaded, from, 256, smem.full);
    };
    [[maybe_unused]] const auto wait = [&] {
        while (!mbarrier_try_wait_parity(smem.full, 0)) {
        }
    };
    [[maybe_unused]] const auto committed = [] {
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
    };
"""
SOURCE = {"threads": 32, "globals_": GLOBALS, "layout": LAYOUT}
Q = torch.arange(1.0, 65).view(1, 1, 1, 64)  # one block
EARLY_SEED, LATE_SEED = 0, 3  # of block 0


def test_a_load_is_poison_until_it_lands(tmp_path):
    body = """
    if (t == 0) load(p.q);
    for (int i = 0; i < 8; ++i) __syncwarp();
    p.lse[t] = smem.loaded[2 * t];
    wait();
    p.lse[32 + t] = smem.loaded[2 * t];
"""
    step = write_step(tmp_path, "load", SETUP + body, **SOURCE)
    for seed, is_poison in (EARLY_SEED, False), (LATE_SEED, True):
        _, lse = run(step, CpuBackend(seed), Q, num_lse=64)
        before, after = lse.view(2, 32)
        assert before.isnan().all() == before.isnan().any() == is_poison
        assert torch.equal(after, Q.flatten()[::2])


LOAD, ADD = "cp_async_bulk_load @", "cp_reduce_async_bulk_add @"

# What 32 threads execute; q and lse have 64 floats.
FAULTS = [
    Fault(
        "load_from_misaligned",
        "cp_async_bulk_load(smem.loaded, p.q + 1, 16, smem.full);",
        f"misaligned access .*: {LOAD} needs a multiple of 16 bytes, .* at byte 4 of q",
    ),
    Fault(
        "load_to_misaligned",
        "cp_async_bulk_load(smem.loaded + 2, p.q, 16, smem.full);",
        f"misaligned access .*: {LOAD} needs a multiple of 16 bytes, .* at byte 264 of shared",
    ),
    Fault(
        "load_of_half_a_chunk",
        "cp_async_bulk_load(smem.loaded, p.q, 24, smem.full);",
        f"wrong number of bytes .*: {LOAD} takes a positive multiple of 16 bytes, not 24",
    ),
    Fault(
        "load_of_nothing",
        "cp_async_bulk_load(smem.loaded, p.q, 0, smem.full);",
        f"wrong number of bytes .*: {LOAD} takes a positive multiple of 16 bytes, not 0",
    ),
    Fault(
        "load_to_global",
        "cp_async_bulk_load(p.lse, p.q, 256, smem.full);",
        f"access outside shared memory .*: {LOAD} needs 256 bytes of the block's shared memory, "
        "not the address at byte 0 of lse",
    ),
    Fault(
        "load_past_the_end",
        "cp_async_bulk_load(smem.loaded + 60, p.q, 256, smem.full);",
        f"access outside shared memory .*: {LOAD} needs 256 bytes .* at byte 496 of shared memory",
    ),
    Fault(
        "load_from_shared",
        "cp_async_bulk_load(smem.loaded, smem.source, 256, smem.full);",
        f"access outside global memory .*: {LOAD} needs global memory, not the address at byte 0 "
        "of shared memory",
    ),
    Fault(
        "load_from_past_the_end",
        "cp_async_bulk_load(smem.loaded, p.q + 4, 256, smem.full);",
        r"out-of-bounds read .* @: past the end of q \(256 bytes\), at byte 256",
    ),
    Fault(
        "missing_fence_mbarrier_init",
        "if (t == 9) cp_async_bulk_load(smem.loaded, p.q, 256, smem.unfenced);",
        f"missing fence_mbarrier_init .*, thread 9: {LOAD} needs one of thread 0 after",
    ),
    Fault(
        "more_bytes_than_announced",
        "if (t == 0) { mbarrier_arrive_expect_tx(smem.full, 240);"
        "cp_async_bulk_load(smem.loaded, p.q, 256, smem.full); } wait();",
        f"more bytes than announced .*: {LOAD} ends phase 0 .* over by 16 bytes",
    ),
    Fault(
        "load_in_flight_at_the_end",
        "if (t == 0) load(p.q);",
        r"block ends with a load in flight .*: cp_async_bulk_load \(.*\) has not landed",
        seed=LATE_SEED,
    ),
    Fault(
        "written_and_loaded",
        "if (t == 1) smem.loaded[63] = 1; if (t == 0) load(p.q); wait();",
        "data race .* byte 508 of shared memory",
    ),
    Fault(
        "add_to_misaligned",
        "cp_reduce_async_bulk_add(p.lse + 3, smem.source, 16);",
        f"misaligned access .*: {ADD} needs a multiple of 16 bytes, .* at byte 12 of lse",
    ),
    Fault(
        "add_from_misaligned",
        "cp_reduce_async_bulk_add(p.lse, smem.source + 2, 16);",
        f"misaligned access .*: {ADD} needs a multiple of 16 bytes, .* at byte 8 of shared memory",
    ),
    Fault(
        "add_one_float",
        "cp_reduce_async_bulk_add(p.lse, smem.source, 4);",
        f"wrong number of bytes .*: {ADD} takes a positive multiple of 16 bytes, not 4",
    ),
    Fault(
        "add_from_global",
        "cp_reduce_async_bulk_add(p.lse, p.q, 256);",
        f"access outside shared memory .*: {ADD} needs 256 bytes of the block's shared memory, "
        "not the address at byte 0 of q",
    ),
    Fault(
        "add_to_shared",
        "cp_reduce_async_bulk_add(smem.loaded, smem.source, 256);",
        f"access outside global memory .*: {ADD} needs global memory, not the address at byte 256 "
        "of shared memory",
    ),
    Fault(
        "add_past_the_end",
        "cp_reduce_async_bulk_add(p.lse + 4, smem.source, 256);",
        r"out-of-bounds read .* @: past the end of lse \(256 bytes\), at byte 256",
    ),
    Fault(
        "add_to_input",
        "cp_reduce_async_bulk_add(const_cast<float*>(p.q), smem.source, 256);",
        "write to an input .* @: at byte 0 of q",
    ),
    Fault(
        "missing_fence_proxy_async",
        "smem.source[t] = 2; __syncthreads();"
        "if (t == 0) { cp_reduce_async_bulk_add(p.lse, smem.source, 256); committed(); }",
        f"missing fence_proxy_async .*, thread 0: {ADD} reads byte 2 of shared memory, written",
    ),
    Fault(
        "changed_before_the_wait",
        "if (t == 3) { cp_reduce_async_bulk_add(p.lse, smem.source, 256); smem.source[5] = 2;"
        "committed(); }",
        f"missing fence_proxy_async .*, thread 3: {ADD} reads byte 22 of shared memory, written",
    ),
    Fault(
        "overwritten_without_a_barrier",
        "if (t == 0) { cp_reduce_async_bulk_add(p.lse, smem.source, 256); committed(); }"
        "if (t == 1) smem.source[0] = 2;",
        "data race .* byte 0 of shared memory",
    ),
    Fault(
        "add_in_flight_at_exit",
        "if (t == 3) { cp_reduce_async_bulk_add(p.lse, smem.source, 256);"
        "cp_async_bulk_commit_group(); }",
        f"exit with a store in flight .*, thread 3: {ADD} may not have read shared memory yet",
    ),
]


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> Step:
    return write_faults(tmp_path_factory.mktemp("faults"), FAULTS, SETUP, **SOURCE)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_report(faults, fault):
    expect_report(faults, FAULTS, fault, q=Q, num_lse=64)
