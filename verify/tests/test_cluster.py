"""Clusters: what blocks bring each other, on a GPU and on the CPU, where misuse is reported."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from common.paths import ROOT
from common.runtime import cpu
from common.runtime.backend import Backend
from common.runtime.cpu import CpuBackend, SimtError
from common.step import Step, read_step
from verify.tests.small_kernels import Fault, expect_report, run, write_faults, write_step

INSTRUCTIONS = ROOT / "verify" / "instructions" / "cluster.cu"
THREADS, ROUNDS, ROWS, HEAD_DIM = 64, 7, 3, 64
BLOCKS = 6


def exchange(backend: Backend, source: Path = INSTRUCTIONS) -> bool:
    """Whether each block of verify/instructions/cluster.cu gets what it should."""
    bits = torch.arange(1, 1 + (BLOCKS + ROWS) * HEAD_DIM, dtype=torch.int16)
    k = bits.view(torch.bfloat16).view(1, 1, -1, HEAD_DIM).to(backend.device)
    q = torch.zeros(1, 1, BLOCKS, HEAD_DIM, dtype=torch.bfloat16, device=backend.device)
    columns = (ROUNDS + 5) * THREADS + 2 * ROWS * HEAD_DIM // 2
    lse = torch.full((BLOCKS, columns), torch.nan, device=backend.device)
    step = read_step(source)
    backend.launch(step, q, k, k, torch.empty_like(q), lse, causal=False, softmax_scale=1.0)

    expected = []
    for block in range(BLOCKS):
        other, thread = block ^ 1, torch.arange(THREADS) ^ 1
        copied = [1000.0 * other + 100 * r + thread for r in range(ROUNDS)]
        stored = -1.0 - 1000 * other - thread
        given = 1000 * other + 4 * (torch.arange(THREADS)[:, None] ^ 2) + torch.arange(4) + 0.5
        first = block - block % 2
        boxes = [bits.view(-1, HEAD_DIM)[i : i + ROWS].flatten() for i in (first, first + 1)]
        found = torch.cat(boxes).view(torch.float32)
        expected.append(torch.cat([stored, *copied, given.flatten(), found]))
    # As integers: 16-bit numbers side by side may be any float, NaN too.
    return torch.equal(lse.cpu().view(torch.int32), torch.stack(expected).view(torch.int32))


def test_what_blocks_exchange(make_backend):
    assert exchange(make_backend())


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_order(monkeypatch, workers):
    monkeypatch.setattr(cpu, "_num_cores", lambda: workers)
    assert all(exchange(CpuBackend(seed)) for seed in range(8))


@dataclass(frozen=True)
class Mistake:
    name: str
    old: str  # in the kernel, once
    new: str
    report: str  # a regular expression; empty where the results are wrong in one of two runs


EMPTY = "mbarrier_arrive_cluster_relaxed(smem.empty[stage], peer);"
TOLD = "mbarrier_arrive_cluster(smem.told, peer);"
READ = "out[thread] = smem.other[stage][thread ^ 1];"
MISTAKES = [
    Mistake(
        "no_barrier_at_the_beginning",
        "cluster_arrive();\n    cluster_wait();  // both",
        "__syncthreads();  // both",
        "mbarrier not initialized .* in block ., and a cluster barrier|"
        "data race .*: reads byte .* of rank .'s shared memory, where thread 0 has written",
    ),
    Mistake(
        "no_barrier_at_the_end",
        "    cluster_arrive();\n    cluster_wait();  // the other block has read",
        "    // the other block has read",
        "block ends before an arrival .*: thread .* of rank . arrives at one of its mbarriers|"
        "access to a block that has ended .*: mbarrier_arrive_cluster_relaxed",
    ),
    Mistake(
        "no_fence_mbarrier_init",
        "fence_mbarrier_init();",
        "",
        "missing fence_mbarrier_init .*: cp_async_bulk_tensor_load_multicast",
    ),
    Mistake(
        "no_wait_for_empty",
        "wait_for(smem.empty[stage], (phase + 1) % 2);",
        "",
        "data race .*: writes byte .* of rank .'s shared memory, where thread .* has read",
    ),
    Mistake(
        "wrong_parity_of_empty",
        "(phase + 1) % 2",
        "phase % 2",
        r"deadlock .*, as in all of its cluster\nblock .: no thread can go on(.|\n)*\nblock .: no",
    ),
    Mistake(
        "empty_before_it_is_read",
        f"{READ}\n        __syncwarp();  // all lanes have read\n"
        f"        if (thread % 32 == 0) {EMPTY}",
        f"if (thread % 32 == 0) {EMPTY}\n        __syncwarp();\n        {READ}",
        "data race .*: writes byte .* of rank .'s shared memory, where thread .* has read",
    ),
    Mistake(
        "one_lane_has_read",
        "__syncwarp();  // all lanes have read",
        "",
        "data race .*: writes byte .* of rank .'s shared memory, where thread .* has read",
    ),
    Mistake(
        "too_few_bytes",
        "sizeof(smem.other[stage]))",
        "sizeof(smem.other[stage]) - 16)",
        "more bytes than announced .* over by 16 bytes",
    ),
    Mistake(
        "too_many_bytes",
        "sizeof(smem.other[stage]))",
        "sizeof(smem.other[stage]) + 16)",
        "deadlock (.|\n)* still expects 16 bytes: no copy is on its way",
    ),
    Mistake("copy_to_itself", "smem.full[stage], peer)", "smem.full[stage], rank)", "deadlock"),
    Mistake(
        "empty_told_to_itself",
        "smem.empty[stage], peer)",
        "smem.empty[stage], rank)",
        "data race .*: writes byte .* of rank .'s shared memory, where thread .* has read",
    ),
    Mistake(
        "no_such_rank",
        "smem.empty[stage], peer)",
        "smem.empty[stage], 2)",
        "wrong rank .*: mbarrier_arrive_cluster_relaxed .* takes .*, 0 to 1, not 2",
    ),
    Mistake(
        "no_fence_proxy_async",
        "fence_proxy_async();",
        "",
        "missing fence_proxy_async .*: cp_async_bulk_cluster .* reads byte",
    ),
    Mistake(
        "copied_before_it_is_complete",
        "__syncthreads();  // `own`",
        "// `own`",
        "data race .*: reads byte .* of shared memory, which thread .* has written",
    ),
    Mistake(
        "overwritten_before_it_has_landed",
        "wait_for(smem.full[stage], phase % 2);",
        "__syncthreads();\n smem.own[stage][thread] = 5;\n fence_proxy_async();\n"
        "wait_for(smem.full[stage], phase % 2);",
        "",
    ),
    Mistake(
        "stored_and_told_relaxed",
        TOLD,
        TOLD.replace("cluster", "cluster_relaxed"),
        "data race between blocks .*: reads what block . has written",
    ),
    Mistake(
        "stored_and_waited_for_in_the_block",
        "mbarrier_try_wait_parity_cluster",
        "mbarrier_try_wait_parity",
        "data race between blocks .*: reads what block . has written",
    ),
    Mistake("given_to_itself", "smem.all_given, peer)", "smem.all_given, rank)", ""),
    Mistake(
        "too_few_bytes_given",
        "sizeof(smem.given))",
        "sizeof(smem.given) - 16)",
        "more bytes than announced .* over by 16 bytes|block ends with a load in flight|"
        "block ends in the middle of an mbarrier's phase .* 16 bytes not announced|"
        "data race .*: writes byte .* of rank .'s shared memory, where thread .* has read",
    ),
    Mistake(
        "loaded_to_itself",
        "smem.boxes,\n                                            3)",
        "smem.boxes,\n                                            1 << rank)",
        "deadlock (.|\n)*, still expects 384 bytes: no copy is on its way",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_found(tmp_path, mistake):
    text = INSTRUCTIONS.read_text()
    assert text.count(mistake.old) == 1
    wrong = tmp_path / "cluster.cu"
    wrong.write_text(text.replace(mistake.old, mistake.new))
    for seed in range(4):
        if mistake.report:
            with pytest.raises(SimtError, match=rf"^cluster \(d64_bf16\): (?:{mistake.report})"):
                exchange(CpuBackend(seed), wrong)
        else:
            assert not (exchange(CpuBackend(seed), wrong) and exchange(CpuBackend(seed + 1), wrong))


GLOBALS = '#include "slices.cuh"'
LAYOUT = """
    alignas(128) float source[32];
    alignas(128) float copied[32];
    Mbarrier full, never;
"""
SETUP = """
    [[maybe_unused]] const int rank = cluster_rank(), peer = 1 - rank;
    smem.source[t] = block;
    fence_proxy_async();
    if (t == 0) {
        mbarrier_init(smem.full, 1);
        fence_mbarrier_init();
    }
    const auto cluster_sync = [] {
        cluster_arrive();
        cluster_wait();
    };
    cluster_sync();
    [[maybe_unused]] const auto copy = [&] {
        if (t == 0) cp_async_bulk_cluster(smem.copied, smem.source, 128, smem.full, peer);
    };
    [[maybe_unused]] const auto wait = [&] {
        if (t == 0) mbarrier_arrive_expect_tx(smem.full, 128);
        while (!mbarrier_try_wait_parity(smem.full, 0)) {
        }
    };
"""
SOURCE = {"threads": 32, "globals_": GLOBALS, "layout": LAYOUT}
EARLY_SEED, LATE_SEED = 0, 3  # of block 0


def in_clusters(step: Step, signature: str = "__cluster_dims__(2)") -> Step:
    """The step with this in the signature of its kernel, which is launched with two blocks."""
    text = step.path.read_text()
    step.path.write_text(text.replace("void test_kernel(", f"void {signature} test_kernel("))
    return step


@pytest.mark.parametrize(
    ("signature", "size"),
    [
        ("", 1),
        ("__launch_bounds__(48)", 1),
        ("__cluster_dims__(1)", 1),
        ("__cluster_dims__(2)", 2),
        ("__cluster_dims__(2, 1, 1)", 2),
        ("__cluster_dims__(2) __launch_bounds__(48, 1)", 2),
        ("__launch_bounds__(48, 1) __cluster_dims__(SIZE)", 2),
    ],
)
def test_cluster_dims(tmp_path, signature, size):
    others = """
constexpr int SIZE = 2;
extern "C" __global__ void __cluster_dims__(4) __launch_bounds__(8) other(AttentionParams p) {}
"""
    source = {"globals_": GLOBALS + others}
    step = write_step(tmp_path, "dims", "p.lse[block] = cluster_rank();", **source)
    _, lse = run(in_clusters(step, signature), CpuBackend(), num_lse=2)
    assert lse.tolist() == [block % size for block in range(2)]


def test_the_grid_is_filled_up_to_whole_clusters(tmp_path):
    body = "p.lse[block] = gridDim.x;"
    step = in_clusters(
        write_step(tmp_path, "filled", body, globals_=GLOBALS), "__cluster_dims__(4)"
    )
    _, lse = run(step, CpuBackend(), num_lse=4)
    assert lse.tolist() == [4] * 4


@pytest.mark.parametrize(
    ("signature", "report"),
    [
        ("__cluster_dims__(16)", "has clusters of 16 x 1 x 1 blocks; .* must be 1 to 8"),
        ("__cluster_dims__(1, 2)", "has clusters of 1 x 2 x 1 blocks; .* must be 1 to 8"),
        ("__cluster_dims__(2) __launch_bounds__(32)", "48 threads; its __launch_bounds__ allow 32"),
        ("__launch_bounds__(32) __cluster_dims__(2)", "48 threads; its __launch_bounds__ allow 32"),
    ],
)
def test_a_launch_that_fails(tmp_path, signature, report):
    step = in_clusters(write_step(tmp_path, "dims", "", globals_=GLOBALS), signature)
    with pytest.raises(SimtError, match=f"kernel test_kernel .*{report}"):
        run(step, CpuBackend())


def test_order_is_drawn_from_the_seed(tmp_path):
    """Which thread of which block goes on; each reads the clock, which counts its readings."""
    body = """
    for (int i = 0; i < 8; ++i) {
        __syncthreads();
        p.lse[256 * block + 32 * i + t] = mov_clock64();
    }
"""
    source = {"threads": 32, "globals_": GLOBALS + '\n#include "clock.cuh"'}
    step = in_clusters(write_step(tmp_path, "order", body, **source))

    def block_by_block(seed: int) -> list[int]:
        _, lse = run(step, CpuBackend(seed), num_lse=512)
        return (lse.argsort() // 256).tolist()

    orders = [block_by_block(seed) for seed in range(12)]
    assert orders[0] == block_by_block(0)
    switches = [sum(a != b for a, b in pairwise(order)) for order in orders]
    assert min(switches) == 1  # one block first, then the other
    assert max(switches) > 100
    assert len({tuple(order) for order in orders}) > 3


def test_a_copy_is_poison_until_it_lands(tmp_path):
    """The source may be overwritten until then, and the copy brings what it finds."""
    body = """
    copy();
    cluster_sync();
    p.lse[64 * block + t] = smem.copied[t];
    smem.source[t] = 10 + block;
    cluster_sync();
    wait();
    p.lse[64 * block + 32 + t] = smem.copied[t];
    cluster_sync();
"""
    step = in_clusters(write_step(tmp_path, "copy", SETUP + body, **SOURCE))
    for seed, is_late in (EARLY_SEED, False), (LATE_SEED, True):
        _, lse = run(step, CpuBackend(seed), num_lse=128)
        before, after = lse.view(2, 2, 32)[0]  # of block 0
        assert before.isnan().all() == before.isnan().any() == is_late
        assert (after == (11 if is_late else 1)).all()


def test_threads_that_have_exited_hold_nobody_up(tmp_path):
    body = """
    cluster_sync();
    if (t % 3 == block) return;
    cluster_sync();
    if (t % 3 == 2) cluster_sync();  // the others exit meanwhile
    p.lse[32 * block + t] = 1;
"""
    step = in_clusters(write_step(tmp_path, "exit", SETUP + body, **SOURCE))
    expected = torch.ones(2, 32)
    expected[0, ::3] = expected[1, 1::3] = torch.nan
    for seed in range(4):
        written = run(step, CpuBackend(seed), num_lse=64)[1].view(2, 32)
        torch.testing.assert_close(written, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_signals_within_clusters_and_between_them(tmp_path, size):
    """Each block of 8 waits for the next one, the last for nobody."""
    body = """
    if (t >= 32) return;
    Signal* const signals = static_cast<Signal*>(p.workspace[0]);
    float* const sums = p.lse;
    if (block < 7) take_signal(signals[block]);
    if (t == 0) sums[block] = 1 + (block < 7 ? sums[block + 1] : 0);
    if (block > 0) post_signal(signals[block - 1]);
"""
    source = {"globals_": GLOBALS + '\n#include "signal.cuh"'}
    step = in_clusters(write_step(tmp_path, "signals", body, **source), f"__cluster_dims__({size})")
    step.path.write_text(step.path.read_text().replace(".element_bytes = 4", ".element_bytes = 8"))
    for seed in range(4):
        _, lse = run(step, CpuBackend(seed), torch.zeros(1, 1, 8, 8), num_lse=8)
        assert lse.tolist() == [8 - block for block in range(8)]


ARRIVE, COPY = "mbarrier_arrive_cluster @", "cp_async_bulk_cluster @"

# What both blocks of a cluster execute, with 32 threads each.
FAULTS = [
    Fault(
        "arrive_twice",
        "if (t == 5) cluster_arrive(); cluster_sync();",
        r"cluster_arrive twice .*, thread 5: cluster_arrive \(.*\) follows cluster_arrive @ with",
    ),
    Fault(
        "wait_without_arrive",
        "if (t == 5) cluster_wait();",
        "cluster_wait without cluster_arrive .*, thread 5: cluster_wait @ needs one before",
    ),
    Fault(
        "exit_without_wait",
        "cluster_arrive();",
        "exit without cluster_wait .*: cluster_arrive @ has no cluster_wait after it",
    ),
    Fault(
        "one_block_at_the_barrier",
        "if (rank == 0) cluster_sync(); else wait();",
        r"deadlock .*, block 0, as in all of its cluster\nblock 0: no thread can go on\n"
        r"  threads 0-31 wait at cluster_wait .*\nblock 1: no thread can go on\n"
        r"  threads 0-31 wait at mbarrier_try_wait_parity .*\n"
        r"  the mbarrier at byte 256 of shared memory \(initialized",
    ),
    Fault(
        "negative_rank",
        "mbarrier_arrive_cluster(smem.full, -1);",
        f"wrong rank .*: {ARRIVE} takes the rank of a block of the cluster, 0 to 1, not -1",
    ),
    Fault(
        "not_initialized",
        "mbarrier_arrive_cluster(smem.never, peer);",
        f"mbarrier not initialized .*: {ARRIVE} needs an mbarrier_init before, of byte 264 of "
        "shared memory in block ., and a cluster barrier between the two",
    ),
    Fault(
        "initialized_too_late",
        "if (t == 0) { mbarrier_init(smem.never, 1); __syncwarp(1);"
        "mbarrier_arrive_cluster(smem.never, peer); }",
        "not initialized .* byte 264 .* in block .|data race .* byte 264 of rank .'s shared memory",
    ),
    Fault(
        "too_many_arrivals",
        "if (rank == 0 && t == 0) mbarrier_arrive_expect_tx(smem.full, 16); cluster_sync();"
        "if (rank == 1 && t == 7) mbarrier_arrive_cluster(smem.full, peer);",
        f"too many arrivals .*, block 1, thread 7: {ARRIVE} is arrival 2 in a phase of 1 of the "
        "mbarrier at byte 256 of shared memory in block 0 ",
    ),
    Fault(
        "arrival_before_the_end",
        "if (t == 3) mbarrier_arrive_cluster(smem.full, peer);",
        "block ends before an arrival .*: thread 3 of rank . arrives at one of its mbarriers "
        rf"\(faults.cu:\d+\)|access to a block that has ended .*, thread 3: {ARRIVE} reaches into",
    ),
    Fault(
        "copy_to_misaligned",
        "cp_async_bulk_cluster(smem.copied + 1, smem.source, 16, smem.full, peer);",
        f"misaligned access .*: {COPY} needs a multiple of 16 bytes, .* at byte 132 of shared",
    ),
    Fault(
        "copy_from_misaligned",
        "cp_async_bulk_cluster(smem.copied, smem.source + 1, 16, smem.full, peer);",
        f"misaligned access .*: {COPY} needs a multiple of 16 bytes, .* at byte 4 of shared",
    ),
    Fault(
        "copy_of_half_a_chunk",
        "cp_async_bulk_cluster(smem.copied, smem.source, 8, smem.full, peer);",
        f"wrong number of bytes .*: {COPY} takes a positive multiple of 16 bytes, not 8",
    ),
    Fault(
        "copy_from_global",
        "cp_async_bulk_cluster(smem.copied, p.q, 16, smem.full, peer);",
        f"access outside shared memory .*: {COPY} needs 16 bytes .* at byte 0 of q",
    ),
    Fault(
        "copy_to_global",
        "cp_async_bulk_cluster(p.lse, smem.source, 16, smem.full, peer);",
        f"access outside shared memory .*: {COPY} needs 16 bytes .* at byte 0 of lse",
    ),
    Fault(
        "copy_not_fenced",
        "if (t == 0) smem.source[3] = 5; copy();",
        r"missing fence_proxy_async .*: cp_async_bulk_cluster \(.*\) reads byte 1. of shared",
    ),
    Fault(
        "copy_to_what_is_read",
        "smem.copied[t] = 0; copy(); wait(); cluster_sync();",
        "data race .*: writes byte .* of rank .'s shared memory, where thread .* has written|"
        r"data race .*: writes byte .* of shared memory, which thread 0 has written",
    ),
    Fault(
        "copy_to_where_nobody_waits",
        "copy(); cluster_sync();",
        r"block ends with a load in flight .*: cp_async_bulk_cluster \(.*\) has not landed",
        seed=LATE_SEED,
    ),
    Fault(
        "copy_from_a_block_that_ends",
        "if (rank == 1) copy(); else wait();",
        r"block ends before a copy .*, block 1: cp_async_bulk_cluster \(.*\) to rank 0 reads its "
        "shared memory, and nothing orders the wait",
    ),
    Fault(
        "multicast_to_nobody",
        "cp_async_bulk_tensor_load_multicast(smem.copied, p.k_map, 0, 0, 0, 0, smem.full, 0);",
        "wrong ranks .*: cp_async_bulk_tensor_load_multicast @ takes a bit for each rank of the "
        "cluster, 0x1 to 0x3, not 0x0",
    ),
    Fault(
        "multicast_to_too_many",
        "cp_async_bulk_tensor_load_multicast(smem.copied, p.k_map, 0, 0, 0, 0, smem.full, 5);",
        "wrong ranks .*: cp_async_bulk_tensor_load_multicast @ .* 0x1 to 0x3, not 0x5",
    ),
]


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> Step:
    folder = tmp_path_factory.mktemp("cluster_faults")
    boxes = ".k_box = {1, HEAD_DIM, SWIZZLE_NONE},"
    return in_clusters(write_faults(folder, FAULTS, SETUP, boxes=boxes, **SOURCE))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_report(faults, fault):
    expect_report(faults, FAULTS, fault, num_lse=32)


# ---- st_async

STORE_SOURCE = SOURCE | {"layout": LAYOUT + "    alignas(16) float stored[32][4];\n"}
STORE_SETUP = f"""{SETUP}
    [[maybe_unused]] const auto store = [&](int row, int to) {{
        const float x = 100 * block + 4 * t;
        st_async(smem.stored[row], make_float4(x, x + 1, x + 2, x + 3), smem.full, to);
    }};
    [[maybe_unused]] const auto wait_for_bytes = [&](int bytes) {{
        if (t == 0) mbarrier_arrive_expect_tx(smem.full, bytes);
        while (!mbarrier_try_wait_parity(smem.full, 0)) {{
        }}
    }};
"""
STORED = torch.arange(128.0).view(32, 4)  # of block 0, by the thread that has stored it
SWAPPED = torch.arange(32) ^ 1


def test_stores_to_another_block(tmp_path):
    """All come, in whatever order, and the 16 bytes of each count where they go."""
    body = """
    store(t ^ 1, peer);
    wait_for_bytes(sizeof(smem.stored));
    for (int i = 0; i < 4; ++i) p.lse[128 * block + 4 * t + i] = smem.stored[t][i];
    cluster_sync();
"""
    step = in_clusters(write_step(tmp_path, "stores", STORE_SETUP + body, **STORE_SOURCE))
    for seed in range(8):
        _, lse = run(step, CpuBackend(seed), num_lse=256)
        stored = lse.view(2, 32, 4)
        assert torch.equal(stored, torch.stack([100 + STORED[SWAPPED], STORED[SWAPPED]]))


def test_a_store_to_the_own_block(tmp_path):
    body = """
    store(t, rank);
    wait_for_bytes(sizeof(smem.stored));
    for (int i = 0; i < 4; ++i) p.lse[128 * block + 4 * t + i] = smem.stored[t][i];
"""
    step = in_clusters(write_step(tmp_path, "own", STORE_SETUP + body, **STORE_SOURCE))
    _, lse = run(step, CpuBackend(), num_lse=256)
    assert torch.equal(lse.view(2, 32, 4), torch.stack([STORED, 100 + STORED]))


def test_a_store_is_poison_until_it_lands(tmp_path):
    """A cluster barrier does not say that it has landed. What it brings was in registers."""
    body = """
    smem.stored[t][0] = -1;
    cluster_sync();
    store(t, peer);
    cluster_sync();
    p.lse[64 * block + t] = smem.stored[t][0];
    cluster_sync();
    wait_for_bytes(sizeof(smem.stored));
    p.lse[64 * block + 32 + t] = smem.stored[t][0];
    cluster_sync();
"""
    step = in_clusters(write_step(tmp_path, "late", STORE_SETUP + body, **STORE_SOURCE))
    late = []
    for seed in range(6):
        _, lse = run(step, CpuBackend(seed), num_lse=128)
        before, after = lse.view(2, 2, 32)[0]  # of block 0
        assert torch.equal(after, 100 + STORED[:, 0])
        assert (before.isnan() | (before == after)).all()
        late.append(before.isnan().sum().item())
    assert max(late) == 32
    assert min(late) < 32


STORE, NAMED = "st_async @", r"st_async \(faults.cu:\d+\)"  # the latter in `store`

# As above.
STORE_FAULTS = [
    Fault(
        "store_to_misaligned",
        "st_async(reinterpret_cast<float(&)[4]>(smem.stored[0][1]), float4(), smem.full, peer);",
        f"misaligned access .*: {STORE} needs a multiple of 16 bytes, .* at byte 276 of shared",
    ),
    Fault(
        "store_to_global",
        "st_async(reinterpret_cast<float(&)[4]>(*p.lse), float4(), smem.full, peer);",
        f"access outside shared memory .*: {STORE} needs 16 bytes .* at byte 0 of lse",
    ),
    Fault(
        "store_to_no_such_rank",
        "store(t, 2);",
        f"wrong rank .*: {NAMED} takes the rank of a block of the cluster, 0 to 1, not 2",
    ),
    Fault(
        "store_for_no_mbarrier",
        "st_async(smem.stored[t], float4(), smem.never, peer);",
        f"mbarrier not initialized .*: {STORE} needs an mbarrier_init before, of byte 264 of "
        "shared memory in block ., and a cluster barrier between the two",
    ),
    Fault(
        "store_for_an_mbarrier_not_fenced",
        "if (t == 7) mbarrier_init(smem.never, 1); cluster_sync();"
        "st_async(smem.stored[t], float4(), smem.never, peer);",
        f"missing fence_mbarrier_init .*: {STORE} needs one of thread 7 after it has initialized ",
    ),
    Fault(
        "store_over_what_is_read",
        "p.lse[32 * block + t] = smem.stored[t][0]; store(t, peer);",
        "data race .*: writes byte .* of rank .'s shared memory, where thread .* has read",
    ),
    Fault(
        "store_over_what_is_written",
        "smem.stored[t][1] = 0; store(t, peer);",
        "data race .*: writes byte .* of rank .'s shared memory, where thread .* has written",
    ),
    Fault(
        "stores_of_more_than_is_announced",
        "store(t, peer); wait_for_bytes(sizeof(smem.stored) - 16); cluster_sync();",
        "more bytes than announced .* over by 16 bytes|"
        "block ends in the middle of an mbarrier's phase .* 16 bytes not announced",
    ),
    Fault(
        "stores_of_less_than_is_announced",
        "if (t > 0) store(t, peer); wait_for_bytes(sizeof(smem.stored));",
        "deadlock (.|\n)* still expects 16 bytes: no copy is on its way",
    ),
    Fault(
        "store_to_where_nobody_waits",
        "if (rank == 1) store(t, peer); cluster_sync();",
        f"block ends with a load in flight .*: {NAMED} has not landed: wait for its mbarrier",
        seed=LATE_SEED,
    ),
    Fault(
        "store_that_nobody_announces",
        "store(t, peer); cluster_sync();",
        "block ends in the middle of an mbarrier's phase .* \\d+ bytes not announced",
    ),
    Fault(
        "store_to_a_block_that_ends",
        "if (rank == 1) store(t, peer);",
        f"access to a block that has ended .*: {NAMED} reaches into|"
        "block ends (with a load in flight|in the middle of an mbarrier's phase)",
    ),
]


@pytest.fixture(scope="module")
def store_faults(tmp_path_factory) -> Step:
    folder = tmp_path_factory.mktemp("store_faults")
    return in_clusters(write_faults(folder, STORE_FAULTS, STORE_SETUP, **STORE_SOURCE))


@pytest.mark.parametrize("fault", STORE_FAULTS, ids=lambda fault: fault.name)
def test_report_of_a_store(store_faults, fault):
    expect_report(store_faults, STORE_FAULTS, fault, num_lse=64)
