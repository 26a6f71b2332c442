"""Races in shared memory: each kind of barrier orders accesses; what only happens to does not."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch

from common.runtime.cpu import CpuBackend, SimtError
from common.step import Step
from verify.tests.small_kernels import run, write_scenarios, write_step

GLOBALS = """
#include "copy.cuh"
#include "mma.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#include "wmma.cuh"

struct Four { int i[5]; };
"""
LAYOUT = """
    alignas(128) Element tile[32][16];  // rows of 32 bytes
    float x[256];
    Element e[256];
    char bytes[256];
    Four four;
    Mbarrier full, empty;
"""
BOXES = ".o_box = {16, 8, SWIZZLE_NONE},"
SETUP = """
    if (block) return;
    [[maybe_unused]] const int lane = t % 32, warp = t / 32;
    [[maybe_unused]] const auto wait = [](Mbarrier& barrier, int parity) {
        while (!mbarrier_try_wait_parity(barrier, parity)) {
        }
    };
    [[maybe_unused]] const auto element = [](float x) { return from_float<Element>(x); };
    [[maybe_unused]] wmma::fragment<wmma::matrix_a, 16, 16, 16, Element, wmma::row_major> a;
    [[maybe_unused]] wmma::fragment<wmma::matrix_b, 16, 16, 16, Element, wmma::row_major> b;
    [[maybe_unused]] wmma::Accumulator c;
    wmma::fill_fragment(c, 1.0f);
    [[maybe_unused]] float d[4] = {};
    [[maybe_unused]] uint32_t r[4] = {};
    [[maybe_unused]] float v[VEC] = {};
    smem.x[t] = smem.x[128 + t] = t;
    smem.e[t] = smem.e[128 + t] = element(t);
    for (int i = 0; i < 16; ++i) if (t < 32) smem.tile[t][i] = element(1);
    if (t == 0) {
        mbarrier_init(smem.full, 1);
        mbarrier_init(smem.empty, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
"""
THREADS = 128

# Order the lanes' execution, but not their accesses to memory.
SHUFFLE = "__shfl_xor_sync(0xffffffff, t, 1);"
VOTE = "__any_sync(0xffffffff, t == 0);"
BALLOT = "__ballot_sync(0xffffffff, t == 0);"
MMA = "mma_m16n8k16<Element>(d, r, 0, 0);"
LDMATRIX = "ldmatrix_x4(r, smem.e + 8 * lane);"
WMMA = "wmma::mma_sync(c, a, b, c);"
SETMAXNREG = "setmaxnreg_inc<256>();"
NO_ORDER = ("", SHUFFLE, VOTE, BALLOT, MMA, LDMATRIX, WMMA, SETMAXNREG)


@dataclass(frozen=True)
class Pair:
    """Accesses on the lines marked A and B, and what in the place of ORDER orders them or not."""

    name: str
    body: str
    right: tuple[str, ...]
    wrong: tuple[str, ...] = ("",)


PAIRS = [
    Pair(
        "write and read in a warp",
        "smem.x[t] = 1;  // A\nORDER\np.lse[t] = smem.x[t ^ 1];  // B",
        (
            "__syncwarp();",
            "__syncwarp(3u << lane / 2 * 2);",
            "__syncthreads();",
            "bar_sync(1, 128);",
            "bar_sync(1 + warp, 32);",
        ),
        (*NO_ORDER, "bar_arrive(1 + warp, 64);", "__syncwarp(1u << lane);"),
    ),
    Pair(
        "read and write in a warp",
        "p.lse[t] = smem.x[t ^ 1];  // A\nORDER\nsmem.x[t] = 1;  // B",
        ("__syncwarp();", "__syncthreads();"),
        NO_ORDER,
    ),
    Pair(
        "write and write in a warp",
        "smem.x[t] = 1;  // A\nORDER\nsmem.x[t ^ 1] = 2;  // B",
        ("__syncwarp();",),
        ("", VOTE),
    ),
    Pair(
        "lanes of another mask",
        "smem.x[t] = 1;  // A\nORDER\np.lse[t] = smem.x[t ^ 16];  // B",
        ("__syncwarp(0x10001u << lane % 16);",),
        ("__syncwarp(lane < 16 ? 0xffff : 0xffff0000);",),
    ),
    Pair(
        "two warps",
        "smem.x[t] = 1;  // A\nORDER\np.lse[t] = smem.x[t ^ 32];  // B",
        ("__syncthreads();", "bar_sync(1 + t / 64, 64);", "bar_sync(1, 128);"),
        ("", "__syncwarp();", "bar_sync(1 + warp, 32);", SETMAXNREG),
    ),
    Pair(
        "a third warp",
        "if (warp == 0) smem.x[t] = 1;  // A\nORDER\nif (warp == 2) p.lse[t] = smem.x[lane];  // B",
        (
            "if (warp < 2) bar_sync(1, 64);\nif (warp == 1 || warp == 2) bar_sync(2, 64);",
            "if (warp == 0) bar_arrive(1, 64); else if (warp == 2) bar_sync(1, 64);",
        ),
        ("if (warp < 2) bar_sync(1, 64);\nif (warp > 1) bar_sync(2, 64);",),
    ),
    Pair(
        "what follows an arrive at a named barrier",
        "if (warp == 0) {\nbar_arrive(1, 64); smem.x[t] = 1;  // A\n} else if (warp == 1) {\n"
        "bar_sync(1, 64); p.lse[t] = smem.x[lane];  // B\n}",
        (),
    ),
    Pair(
        "mbarrier",
        "if (t == 0) {\nsmem.x[0] = 1;  // A\nmbarrier_arrive(smem.full);\n} else if (t == 32) {\n"
        "ORDER p.lse[t] = smem.x[0];  // B\n}",
        ("wait(smem.full, 0);",),
        ("", "wait(smem.empty, 1);"),
    ),
    Pair(
        "mbarrier that expects bytes",
        "if (t == 0) {\nsmem.x[0] = 1;  // A\nmbarrier_arrive_expect_tx(smem.full, 0);\n}\n"
        "if (t == 32) {\nORDER p.lse[t] = smem.x[0];  // B\n}",
        ("wait(smem.full, 0);",),
    ),
    Pair(
        "what follows an arrive at an mbarrier",
        "if (t == 0) {\nmbarrier_arrive(smem.full); smem.x[0] = 1;  // A\n} else if (t == 32) {\n"
        "wait(smem.full, 0); p.lse[t] = smem.x[0];  // B\n}",
        (),
    ),
    Pair(
        "another lane waits at the mbarrier",
        "if (t == 0) {\nsmem.x[0] = 1;  // A\nmbarrier_arrive(smem.full);\n}\n"
        "if (t == 32) wait(smem.full, 0);\nif (warp == 1) { ORDER }\n"
        "if (warp == 1) p.lse[t] = smem.x[0];  // B",
        ("__syncwarp();",),
        ("", VOTE),
    ),
    Pair(
        "an mbarrier's initialization",
        "if (t == 0) {\nMbarrier& m = reinterpret_cast<Mbarrier&>(smem.x);\n"
        "mbarrier_init(m, 1);  // A\n}\nORDER\nif (t == 1) {\n"
        "Mbarrier& m = reinterpret_cast<Mbarrier&>(smem.x);\nmbarrier_arrive(m);  // B\n}",
        ("__syncwarp();", "__syncthreads();"),
        (VOTE, SETMAXNREG),
    ),
    Pair(
        "an mbarrier's initialization and a wait",
        "if (t == 0) {\nMbarrier& m = reinterpret_cast<Mbarrier&>(smem.x);\n"
        "mbarrier_init(m, 1);  // A\n}\nORDER\nif (t == 32) {\n"
        "Mbarrier& m = reinterpret_cast<Mbarrier&>(smem.x);\n"
        "mbarrier_try_wait_parity(m, 1);  // B\n}",
        ("__syncthreads();",),
        (SETMAXNREG,),
    ),
    # Accesses of all kinds.
    Pair(
        "vectors of floats",
        "if (t == 1) store_float4(smem.x + 4, {});  // A\nORDER\n"
        "if (t == 2) load_float4(smem.x + 4);  // B",
        ("__syncwarp();",),
    ),
    Pair(
        "vectors of elements",
        "if (t == 1) store_vector(smem.e + 8, v);  // A\nORDER\n"
        "if (t == 2) load_vector(v, smem.e + 8);  // B",
        ("__syncwarp();",),
    ),
    Pair(
        "floats as elements",
        "if (t == 1) store_float4(smem.e + 8, {});  // A\nORDER\n"
        "if (t == 2) p.lse[t] = to_float(smem.e[11]);  // B",
        ("__syncwarp();",),
    ),
    Pair(
        "integers",
        "if (t == 1) store_uint4(smem.e + 8, {});  // A\nORDER\n"
        "if (t == 2) p.lse[t] = load_uint4(smem.e + 8).x;  // B",
        ("__syncwarp();",),
    ),
    Pair(
        "structures",
        "if (t == 1) smem.four = Four{{1, 2, 3, 4, t}};  // A\nORDER\n"
        "Four four;\nif (t == 2) four = smem.four;  // B\nif (t == 2) p.lse[0] = four.i[block];",
        ("__syncwarp();",),
    ),
    Pair(
        "a byte of an element",
        "if (t == 1) smem.x[1] = 2;  // A\nORDER\n"
        "if (t == 2) p.lse[0] = reinterpret_cast<char*>(smem.x)[7];  // B",
        ("__syncwarp();",),
    ),
    Pair(
        "cp.async",
        "if (t < 32) cp_async_cg(smem.e + 8 * lane, p.q, true);  // A\n"
        "cp_async_commit_group(); cp_async_wait_group<0>();\nORDER\n"
        "if (t < 32) p.lse[t] = to_float(smem.e[8 * (lane ^ 1)]);  // B",
        ("__syncwarp();",),
        ("", VOTE),
    ),
    # Instructions of a warp.
    Pair(
        "ldmatrix reads what lanes write",
        "if (t < 32) smem.tile[t][0] = element(2);  // A\nif (t < 32) { ORDER }\n"
        "if (t < 32) ldmatrix_x4(r, smem.tile[t]);  // B",
        ("__syncwarp();",),
    ),
    Pair(
        "lanes write what ldmatrix has read",
        "if (t < 32) ldmatrix_x4_trans(r, smem.tile[t]);  // A\nif (t < 32) { ORDER }\n"
        "if (t < 32) smem.tile[t][7] = element(2);  // B",
        ("__syncwarp();",),
        ("", VOTE, MMA),
    ),
    Pair(
        "lanes read what stmatrix writes",
        "if (t < 32) stmatrix_x4(smem.tile[t], r);  // A\nif (t < 32) { ORDER }\n"
        "if (t < 32) p.lse[t] = to_float(smem.tile[t][7]);  // B",
        ("__syncwarp();",),
        ("", VOTE),
    ),
    Pair(
        "load_matrix_sync reads what lanes write",
        "if (t < 32) smem.x[8 * t] = 2;  // A\nif (t < 32) { ORDER }\n"
        "if (t < 32) wmma::load_matrix_sync(c, smem.x, 16, wmma::mem_row_major);  // B",
        ("__syncwarp();",),
        ("", VOTE),
    ),
    Pair(
        "lanes write what load_matrix_sync has read",
        "if (t < 32) wmma::load_matrix_sync(c, smem.x, 16, wmma::mem_col_major);  // A\n"
        "if (t < 32) { ORDER }\nif (t < 32) smem.x[255 - t] = 2;  // B",
        ("__syncwarp();",),
        ("", WMMA),
    ),
    Pair(
        "lanes read what store_matrix_sync writes",
        "if (t < 32) wmma::store_matrix_sync(smem.x, c, 16, wmma::mem_row_major);  // A\n"
        "if (t < 32) { ORDER }\nif (t < 32) p.lse[t] = smem.x[255 - t];  // B",
        ("__syncwarp();",),
        ("", VOTE),
    ),
    # The thread that starts a TMA store counts as the one that reads.
    Pair(
        "a TMA store",
        "if (warp == 0) {\nsmem.tile[t][0] = element(1);  // A\nfence_proxy_async();\nORDER\n"
        "if (t == 0) {\ncp_async_bulk_tensor_store(p.o_map, 0, 0, 0, 0, smem.tile[0]);  // B\n"
        "cp_async_bulk_commit_group();\ncp_async_bulk_wait_group_read<0>();\n}\n}",
        ("__syncwarp();",),
        (VOTE, SHUFFLE),
    ),
    Pair(
        "what a TMA store may still read",
        "if (warp == 0) {\nfence_proxy_async();\n__syncwarp();\nif (t == 0) {\n"
        "cp_async_bulk_tensor_store(p.o_map, 0, 0, 0, 0, smem.tile[0]);  // A\n"
        "cp_async_bulk_commit_group();\ncp_async_bulk_wait_group_read<0>();\n}\nORDER\n"
        "smem.tile[t][0] = element(1);  // B\n}",
        ("__syncwarp();",),
        (VOTE,),
    ),
]

# No two of these accesses are to the same bytes, or both are reads, or one thread's, or a barrier
# further away orders them.
NO_RACE = {
    "neighbours of 16 bits": "smem.e[t] = element(1);\n__any_sync(0xffffffff, 1);\n"
    "smem.e[t] = element(to_float(smem.e[t]) + 1);",
    "neighbouring bytes": "smem.bytes[t] = 1;\n__any_sync(0xffffffff, 1);\n"
    "p.lse[t] = ++smem.bytes[t];",
    "all read": "p.lse[t] = smem.x[0] + to_float(smem.e[1]) + load_float4(smem.x + 4).x;",
    "one thread": "if (t == 1) smem.x[0] = 1;\nif (t == 1) p.lse[0] = smem.x[0];",
    "by way of another thread": "if (t == 0) smem.x[0] = 1;\n__syncwarp(3u << lane / 2 * 2);\n"
    "__syncwarp(lane % 3 == 1 ? 6u << lane / 3 * 3 : lane % 3 == 2 ? 6u << lane / 3 * 3 : "
    "1u << lane);\nif (t == 2) p.lse[0] = smem.x[0];",
    "by way of another mbarrier": "if (t == 0) { smem.x[0] = 1; mbarrier_arrive(smem.full); }\n"
    "if (t == 32) { wait(smem.full, 0); mbarrier_arrive(smem.empty); }\n"
    "if (t == 64) { wait(smem.empty, 0); p.lse[0] = smem.x[0]; }",
    "an accumulator goes back to its place": "for (int i = 0; i < 2 && t < 32; ++i) {\n"
    "wmma::load_matrix_sync(c, smem.x, 16, wmma::mem_row_major);\n"
    "wmma::store_matrix_sync(smem.x, c, 16, wmma::mem_row_major);\n}",
}


def bodies() -> list[str]:
    """The code of all scenarios: right ones, then wrong ones."""
    right = [pair.body.replace("ORDER", order) for pair in PAIRS for order in pair.right]
    wrong = [pair.body.replace("ORDER", order) for pair in PAIRS for order in pair.wrong]
    # Where scenarios end alike, clang++ would compile that once, for no line: the comments differ.
    return [
        f'{body}\nasm volatile("# {i}");'
        for i, body in enumerate([*right, *NO_RACE.values(), *wrong])
    ]


RIGHT = [f"{pair.name}: {order}" for pair in PAIRS for order in pair.right] + list(NO_RACE)
WRONG = [f"{pair.name}: {order}" for pair in PAIRS for order in pair.wrong]


@pytest.fixture(scope="module")
def races_step(tmp_path_factory) -> Step:
    return write_scenarios(
        tmp_path_factory.mktemp("races"),
        "races",
        bodies(),
        SETUP,
        threads=THREADS,
        globals_=GLOBALS,
        layout=LAYOUT,
        boxes=BOXES,
    )


def run_scenario(step: Step, scenario: int, seed: int) -> None:
    q = torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)
    run(step, CpuBackend(seed), q, num_lse=THREADS, scenario=scenario)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_ordered_is_no_race(races_step, name):
    for seed in range(4):
        run_scenario(races_step, RIGHT.index(name), seed)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_ordered_is_a_race(races_step, name):
    """It is reported in every order of threads, with the lines of both accesses."""
    scenario = len(RIGHT) + WRONG.index(name)
    lines = races_step.path.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"case {scenario}:"))
    last = next(i for i in range(first, len(lines)) if lines[i].endswith("break;"))
    marked = {i + 1 for i in range(first, last) if lines[i].endswith(("// A", "// B"))}
    for seed in range(4):
        with pytest.raises(SimtError) as error:
            run_scenario(races_step, scenario, seed)
        report = (
            r"races \(d8_bf16\): data race in kernel test_kernel, block 0, thread \d+ "
            r"\(races.cu:(\d+)\): (reads|writes) byte \d+ of shared memory, which (thread|warp) "
            r"\d+ has (read|written) \(races.cu:(\d+)\), and nothing between the two orders "
            r"memory, as (__syncwarp\(\) or __syncthreads\(\)|__syncthreads\(\), a named barrier "
            r"or an mbarrier) does; shuffles, votes and matrix instructions do not"
        )
        found = re.fullmatch(report, str(error.value))
        assert found, str(error.value)
        assert {int(found[1]), int(found[5])} == marked


def test_blocks_do_not_race(tmp_path):
    """Accesses after a block's last barrier do not race with the next block's either."""
    body = """
    smem.first[t] = t;
    __syncthreads();
    p.lse[32 * block + t] = smem.first[31 - t];
"""
    step = write_step(tmp_path, "blocks", body, threads=32)
    for seed in range(2):
        _, lse = run(step, CpuBackend(seed), torch.zeros(1, 1, 9, 8), num_lse=9 * 32)
        assert torch.equal(lse.view(9, 32), torch.arange(31.0, -1, -1).expand(9, 32))
