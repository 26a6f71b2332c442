"""Kernels that start early: what they wait for on a GPU and on the CPU, and reports of misuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.errors import UsageError
from common.paths import ROOT
from common.runtime.cpu import CpuBackend, SimtError
from common.runtime.gpu import GpuBackend
from common.step import Step, read_step
from verify.tests.small_kernels import (
    Fault,
    expect_report,
    run,
    write_faults,
    write_scenarios,
    write_step,
)

THREADS = 64
STEP = read_step(ROOT / "verify" / "instructions" / "dependent_launch.cu")


def make_q(backend, blocks: int, seed: int) -> torch.Tensor:
    """Integers that bf16 holds."""
    q = torch.randint(100, (1, 1, blocks, 8), generator=torch.Generator().manual_seed(seed))
    return q.to(torch.bfloat16).to(backend.device)


def launch(backend, q: torch.Tensor) -> torch.Tensor:
    lse = torch.full((q.shape[2], THREADS), torch.nan, device=backend.device)
    backend.launch(STEP, q, q, q, q.clone(), lse, causal=False, softmax_scale=1.0)
    return lse


def expected(q: torch.Tensor) -> torch.Tensor:
    """lse of verify/instructions/dependent_launch.cu."""
    own = q[0, 0, :, :1].float().cpu()
    first = 2 * torch.arange(float(THREADS)) + own
    second = 2 * first.flip(0, 1) + own
    return second.flip(0, 1) + first + own


@pytest.mark.parametrize("blocks", [1, 40])
def test_numbers_pass_through_three_kernels(make_backend, blocks):
    backend = make_backend()
    for seed in range(3):  # a workspace of the call before has other numbers
        q = make_q(backend, blocks, seed)
        assert torch.equal(launch(backend, q).cpu(), expected(q))


@pytest.mark.gpu
def test_on_another_stream():
    backend = GpuBackend()
    launch(backend, make_q(backend, 40, seed=0))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for seed in range(3):
        with torch.cuda.stream(stream):
            q = make_q(backend, 40, seed)
            lse = launch(backend, q)
        stream.synchronize()
        assert torch.equal(lse.cpu(), expected(q))


@pytest.mark.gpu
def test_in_a_captured_cuda_graph():
    backend = GpuBackend()
    q = make_q(backend, 40, seed=0)
    launch(backend, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lse = launch(backend, q)
    for seed in range(3):
        q.copy_(make_q(backend, 40, seed))
        lse.zero_()
        graph.replay()
        assert torch.equal(lse.cpu(), expected(q))


# ---- on the GPU it starts early indeed

START_EARLY = "\n__constant__ int32_t kernels_start_early = 1;"
OVERLAP = """
#include "clock.cuh"
#include "dependent_launch.cuh"

// Tells in lse[1] whether the kernel behind has written lse[0] meanwhile, or in a second at most.
extern "C" __global__ void front(const __grid_constant__ AttentionParams p) {
    griddepcontrol_launch_dependents();
    const volatile float& written = p.lse[0];
    const int64_t end = mov_clock64() + (int64_t{1} << 31);
    while (written == 0 && mov_clock64() < end) {
    }
    p.lse[1] = written;
}
"""
FRONT = '{.name = "front", .grid = {{SEQ_Q, 1}}, .threads = 1},'


@pytest.mark.gpu
def test_it_starts_before_the_kernel_in_front_has_ended(tmp_path):
    """By a write that a step must not make."""
    backend = GpuBackend()
    step = write_step(
        tmp_path,
        "overlap",
        "p.lse[0] = 1; griddepcontrol_wait();",
        threads=1,
        globals_=OVERLAP + START_EARLY,
        in_front=FRONT,
    )
    step = replace(step, limits=STEP.limits)
    q = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16, device=backend.device)
    for _ in range(2):
        lse = torch.zeros(2, device=backend.device)
        backend.launch(step, q, q, q, q.clone(), lse, causal=False, softmax_scale=1.0)
    assert lse.tolist() == [1, 1]


# ---- what the CPU reports

NUM_LSE = 512
SOURCE = {
    "threads": THREADS,
    "globals_": """
#include "bulk.cuh"
#include "copy.cuh"
#include "dependent_launch.cuh"
#include "reduce.cuh"
#include "signal.cuh"
#include "ticket.cuh"
#include "tma.cuh"

extern "C" __global__ void front(const __grid_constant__ AttentionParams p) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    p.lse[NUM_LSE - 1 - blockIdx.x] = 1;
}
""".replace("NUM_LSE", str(NUM_LSE)),
    "layout": "alignas(128) Element box[64]; alignas(16) float terms[4]; Mbarrier full;",
    "boxes": ".q_box = {8, 8, SWIZZLE_NONE}, .o_box = {8, 8, SWIZZLE_NONE},",
    "in_front": FRONT,
}
EARLY_SOURCE = SOURCE | {"globals_": SOURCE["globals_"] + START_EARLY}
SETUP = """
    float* const row = p.lse + 64 * block;
    if (t < 4) smem.terms[t] = 1;
    fence_proxy_async();
    if (t == 0) {
        mbarrier_init(smem.full, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    const auto load = [&](const TensorMap& map) {
        mbarrier_arrive_expect_tx(smem.full, sizeof(smem.box));
        cp_async_bulk_tensor_load(smem.box, map, 0, 0, 0, 0, smem.full);
    };
    const auto load_bytes = [&](const void* from) {
        mbarrier_arrive_expect_tx(smem.full, 16);
        cp_async_bulk_load(smem.box, from, 16, smem.full);
    };
    const auto wait_for_load = [&] {
        while (!mbarrier_try_wait_parity(smem.full, 0)) {
        }
    };
    const auto copy = [&](const Element* from) {
        cp_async_cg(smem.box, from, true);
        cp_async_commit_group();
    };
    const auto wait_for_stores = [] {
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    };
"""

RIGHT = {
    "every thread waits": "griddepcontrol_wait(); row[t] = t;",
    "inputs are read before": """
        const float q = to_float(p.q[t % 8]);
        griddepcontrol_wait();
        row[t] = q;
    """,
    "inputs are copied before": """
        if (t == 0) { copy(p.q); cp_async_wait_group<0>(); }
        griddepcontrol_wait();
    """,
    "inputs are loaded before": """
        if (t == 0) { load(p.q_map); wait_for_load(); }
        griddepcontrol_wait();
    """,
    "bytes of inputs are loaded before": """
        if (t == 0) { load_bytes(p.q); wait_for_load(); }
        griddepcontrol_wait();
    """,
    "bytes are loaded and added": """
        griddepcontrol_wait();
        if (t == 0) {
            load_bytes(row);
            cp_reduce_async_bulk_add(&p.lse[400], smem.terms, sizeof(smem.terms));
            wait_for_stores();
            wait_for_load();
        }
    """,
    "a thread waits for the block": """
        if (t == 40) griddepcontrol_wait();
        __syncthreads();
        row[t] = t;
    """,
    "a lane waits for its warp": """
        if (t % 32 == 5) griddepcontrol_wait();
        __syncwarp();
        row[t] = t;
    """,
    "a warp waits for another one": """
        if (t == 40) {
            griddepcontrol_wait();
            load(p.o_map);
        } else if (t < 32) {
            wait_for_load();
            row[t] = t;
        }
    """,
    "it writes after others may start": """
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        row[t] = t;
        red_add(&p.lse[400 + t], 1);
    """,
}

EARLY = r"access before griddepcontrol_wait in kernel test_kernel, block \d, thread \d+ @: "
READS = (
    EARLY + r"reads at byte \d+ of {} \(\d+ bytes\), which the kernels in front may still write;"
)
WRITES = EARLY + r"writes at byte \d+ of {} \(\d+ bytes\), which .* may still read or write;"
READS_IN_SETUP = READS.replace("@", r"\(faults.cu:\d+\)")

# What two blocks of 64 threads execute.
FAULTS = [
    Fault("an output is read", "scores[0] = row[t]; griddepcontrol_wait();", READS.format("lse")),
    Fault("an output is written", "row[t] = 1; griddepcontrol_wait();", WRITES.format("lse")),
    Fault(
        "a workspace is read",
        "const float x = scores[block]; griddepcontrol_wait(); row[t] = x;",
        READS.format(r"workspace\[0\]"),
    ),
    Fault(
        "a workspace is written",
        "if (t == 3) scores[block] = 1; griddepcontrol_wait();",
        WRITES.format(r"workspace\[0\]"),
    ),
    Fault(
        "16 bytes are written",
        "if (t < 16) store_float4(row + 4 * t, float4{}); griddepcontrol_wait();",
        WRITES.format("lse"),
    ),
    Fault("a sum is added to", "red_add(&row[t], 1); griddepcontrol_wait();", WRITES.format("lse")),
    Fault(
        "a signal is posted",
        "if (t < 32) post_signal(*reinterpret_cast<Signal*>(row)); griddepcontrol_wait();",
        WRITES.format("lse"),
    ),
    Fault(
        "a ticket is taken",
        "if (t == 0) take_ticket(reinterpret_cast<int*>(row)); griddepcontrol_wait();",
        WRITES.format("lse"),
    ),
    Fault(
        "cp.async starts too early",
        "if (t == 0) { copy(p.o); griddepcontrol_wait(); cp_async_wait_group<0>(); }",
        READS_IN_SETUP.format("o"),
    ),
    Fault(
        "a load starts too early",
        "if (t == 0) load(p.o_map); griddepcontrol_wait(); wait_for_load();",
        READS_IN_SETUP.format("o"),
    ),
    Fault(
        "a store starts too early",
        "if (t == 0) cp_async_bulk_tensor_store(p.o_map, 0, block, 0, 0, smem.box); "
        "griddepcontrol_wait(); wait_for_stores();",
        WRITES.format("o"),
    ),
    Fault(
        "a load of bytes starts too early",
        "if (t == 0) load_bytes(row); griddepcontrol_wait(); wait_for_load();",
        READS_IN_SETUP.format("lse"),
    ),
    Fault(
        "a bulk reduction starts too early",
        "if (t == 0) cp_reduce_async_bulk_add(row, smem.terms, 16); "
        "griddepcontrol_wait(); wait_for_stores();",
        WRITES.format("lse"),
    ),
    Fault(
        "no barrier after another thread's wait",
        "if (t == 0) griddepcontrol_wait(); else if (t == 40) row[t] = 1;",
        WRITES.format("lse"),
    ),
    Fault(
        "a shuffle after another lane's wait",
        "if (t == 0) griddepcontrol_wait(); const int one = __shfl_sync(0xffffffff, 1, 0); "
        "if (t == 5) row[t] = one;",
        WRITES.format("lse"),
    ),
    Fault(
        "another block waits",
        "if (block == 0) griddepcontrol_wait(); row[t] = 1;",
        WRITES.format("lse").replace(r"block \d", "block 1"),
    ),
    Fault(
        "a block does not wait",
        "if (block == 0) griddepcontrol_wait();",
        r"block ends without griddepcontrol_wait in kernel test_kernel, block 1: ",
    ),
]  # fmt: skip

Q = torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def right(tmp_path_factory) -> Step:
    folder = tmp_path_factory.mktemp("waits")
    return write_scenarios(folder, "waits", list(RIGHT.values()), SETUP, **EARLY_SOURCE)


@pytest.mark.parametrize("name", RIGHT)
def test_what_comes_after_the_wait_is_right(right, name):
    for seed in range(6):
        backend = CpuBackend(seed)
        backend.calls = 2
        run(right, backend, Q, num_lse=NUM_LSE, scenario=list(RIGHT).index(name))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory) -> Step:
    return write_faults(tmp_path_factory.mktemp("faults"), FAULTS, SETUP, **EARLY_SOURCE)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_reported_in_every_order(wrong, fault, seed):
    expect_report(wrong, FAULTS, replace(fault, seed=seed), q=Q, num_lse=NUM_LSE)


def test_a_wait_counts_for_its_own_block(tmp_path):
    """Not for those that the same worker runs after it."""
    body = "if (block != 50) griddepcontrol_wait();"
    step = write_step(tmp_path, "one_does_not", body, **EARLY_SOURCE)
    q = torch.zeros(1, 1, 100, 8, dtype=torch.bfloat16)
    for seed in range(4):
        with pytest.raises(SimtError, match=r"without griddepcontrol_wait .* block 50:"):
            run(step, CpuBackend(seed), q, num_lse=NUM_LSE)


# ---- kernels_start_early


def run_with(folder, defined: str) -> None:
    """Runs a kernel that does not wait before it writes."""
    source = SOURCE | {"globals_": SOURCE["globals_"] + defined}
    step = write_step(folder, "ordinary", SETUP + "row[t] = 1; griddepcontrol_wait();", **source)
    run(step, CpuBackend(), Q, num_lse=NUM_LSE)


@pytest.mark.parametrize("defined", ["", START_EARLY.replace("1", "0")])
def test_a_wait_for_nothing_is_legal(tmp_path, defined):
    """A kernel that does not start early accesses what it likes, and may wait."""
    run_with(tmp_path, defined)


def test_another_value_is_reported(tmp_path):
    with pytest.raises(SimtError, match=r"^ordinary .*: kernels_start_early is 2: make it 0 or 1$"):
        run_with(tmp_path, START_EARLY.replace("1", "2"))


def test_another_type_does_not_compile(tmp_path):
    with pytest.raises(UsageError, match=r"cannot compile ordinary\.cu: .* kernels_start_early"):
        run_with(tmp_path, START_EARLY.replace("int32_t", "int64_t"))
