"""wgmma: the CPU twins compute what a GPU does, land as late as they may, and report misuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.paths import ROOT
from common.runtime.cpu import CpuBackend, SimtError
from common.step import Step, read_step
from verify.tests.small_kernels import (
    Fault,
    expect_report,
    run,
    write_faults,
    write_scenarios,
    write_step,
)

BF16, FP16 = torch.bfloat16, torch.float16

# ---- what a product is, for every size and layout

BLOCKS, M, K, N = 128, 64, 32, 256


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_products(make_backend, dtype):
    """A block of verify/instructions/wgmma.cu multiplies A and B of one size in one layout."""
    backend = make_backend()
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, rows, N, generator=rng).to(dtype) for rows in (BLOCKS * 8, M, M))
    lse = torch.full((BLOCKS, M, N), torch.nan, device=backend.device)
    step = read_step(ROOT / "verify" / "instructions" / "wgmma.cu")
    inputs = [x.to(backend.device) for x in (q, k, v)]
    o = torch.empty_like(inputs[0])
    backend.launch(step, *inputs, o, lse, causal=False, softmax_scale=1.0)

    block = np.arange(BLOCKS)
    size = 16 + 16 * (block % 16)
    accumulate = (block + block // 16 + block // 64) % 2
    a, b, c = (x.double().numpy() for x in (q.view(BLOCKS, M, K), k[0, 0, :K], v[0, 0]))
    c = c * accumulate[:, None, None]
    used = np.arange(N) < size[:, None, None]
    error = np.abs(lse.cpu().double().numpy() - (c + a @ b))
    # 33 terms in any order, in each of which a hardware may cut off instead of rounding.
    allowed = 33 * 2.0**-23 * (np.abs(c) + np.abs(a) @ np.abs(b))
    wrong = np.unique(np.nonzero(used & ~(error <= allowed))[0])
    assert not wrong.size, f"blocks {wrong}"


# ---- when a product lands, and what is reported

LAYOUT = "alignas(1024) Element a[64][64], b[64][64]; Element after[8];"
Q = torch.zeros(1, 1, 2, 8, dtype=BF16)

# A and B have rows of 128 bytes, swizzled; all elements are 1, so a product adds 16 to all of D.
SETUP = """
    using T = Element;
    float d[8][4] = {}, e[8][4] = {};
    uint32_t frag[4];
    for (uint32_t& x : frag) x = cvt_rn_x2<T>(1, 1);
    const auto fill = [&](T (&tile)[64][64], float x) {
        for (int i = t; t < 128 && i < 64 * 64; i += 128) tile[i / 64][i % 64] = from_float<T>(x);
    };
    fill(smem.a, 1);
    fill(smem.b, 1);
    fence_proxy_async();
    __syncthreads();
    const auto describe = [](const T* tile) {
        return matrix_descriptor<SWIZZLE_128B>(tile, 0, 1024);
    };
    [[maybe_unused]] const uint64_t a = describe(smem.a[0]), b = describe(smem.b[0]);
    const auto product = [&](float (&d)[8][4], bool accumulate = true) {
        wgmma_m64nNk16<T, K_MAJOR, K_MAJOR>(d, a, b, accumulate);
    };
    [[maybe_unused]] const auto frag_product = [&](float (&d)[8][4]) {
        wgmma_m64nNk16<T, K_MAJOR>(d, frag, b, true);
    };
    [[maybe_unused]] const auto commit = [] { wgmma_commit_group(); };
    if (block) return;
"""
INCLUDE = '#include "mma.cuh"\n#include "tma.cuh"\n#include "wgmma.cuh"'

# What is then in a lane's first elements of d and e, and what it must be.
LANDED = [
    ("wgmma_fence(d); product(d); commit(); wgmma_wait_group<0>(d);", 16, 0),
    ("wgmma_fence(d); product(d); product(d); commit(); wgmma_wait_group<0>(d);", 32, 0),
    ("wgmma_fence(d); product(d); product(d, false); commit(); wgmma_wait_group<0>(d);", 16, 0),
    ("wgmma_fence(d); frag_product(d); commit(); wgmma_wait_group<0>(d);", 16, 0),
    # Not before the wait, which counts groups.
    ("wgmma_fence(d); product(d); commit(); show(); wgmma_wait_group<0>();", None, 0),
    ("wgmma_fence(d); product(d); commit(); wgmma_wait_group<1>(); show(); "
     "wgmma_wait_group<0>();", None, 0),
    ("wgmma_fence(d); product(d); commit(); wgmma_fence(e); product(e); commit();"
     "wgmma_wait_group<1>(d); show(); wgmma_wait_group<0>();", 16, None),
    ("wgmma_fence(d); product(d); commit(); wgmma_fence(e); product(e); commit();"
     "wgmma_wait_group<0>(d, e);", 16, 16),
    # A product in no group does not land; it joins the next group.
    ("wgmma_fence(d); product(d); wgmma_wait_group<0>(); show(); commit();"
     "wgmma_wait_group<0>();", None, 0),
    # Empty groups count.
    ("wgmma_fence(d); product(d); commit(); commit(); wgmma_wait_group<1>(d);", 16, 0),
    # Groups that add to the same D: it lands with the last.
    ("wgmma_fence(d); product(d); commit(); wgmma_fence(d); product(d); commit();"
     "wgmma_wait_group<1>(); show(); wgmma_wait_group<0>();", None, 0),
    ("wgmma_fence(d); product(d); commit(); wgmma_fence(d); product(d); commit();"
     "wgmma_wait_group<1>(); wgmma_wait_group<0>(d);", 32, 0),
    # What comes before the fence is seen.
    ("for (auto& x : d) for (float& y : x) y = t; wgmma_fence(d); product(d); commit();"
     "wgmma_wait_group<0>(d); for (auto& x : d) for (float& y : x) y -= t;", 16, 0),
]  # fmt: skip


@pytest.fixture(scope="module")
def landing_step(tmp_path_factory) -> Step:
    """Writes d[0][0] and e[0][0] of 128 threads at the first show()."""
    setup = (
        SETUP
        + """
    bool shown = false;
    const auto show = [&] {
        if (!shown) p.lse[t] = d[0][0], p.lse[128 + t] = e[0][0];
        shown = true;
    };
"""
    )
    bodies = [body + " show();" for body, _, _ in LANDED]
    return write_scenarios(
        tmp_path_factory.mktemp("landing"),
        "landing",
        bodies,
        setup,
        threads=128,
        globals_=INCLUDE,
        layout=LAYOUT,
    )


@pytest.mark.parametrize("scenario", range(len(LANDED)))
def test_products_land_in_the_wait_for_their_group(landing_step, scenario):
    _, *expected = LANDED[scenario]
    for seed in range(3):
        _, lse = run(landing_step, CpuBackend(seed), Q, num_lse=256, scenario=scenario)
        for shown, value in zip(lse.view(2, 128), expected, strict=True):
            assert (shown.isnan() if value is None else shown == value).all()


RACE = "data race in kernel test_kernel"


def run_seeds(step: Step, count: int = 12) -> set[float | str]:
    """What seeds find in the first row of D, or report."""
    found = set()
    for seed in range(count):
        try:
            _, lse = run(step, CpuBackend(seed), Q, num_lse=128)
            found |= set(lse.tolist())
        except SimtError as error:
            found.add(RACE if RACE in str(error) else str(error))
    return found


@pytest.mark.parametrize(
    ("before", "after", "right"),
    [
        ("__syncthreads();", "__syncthreads();", True),
        ("", "__syncthreads();", False),
        ("__syncthreads();", "", False),
    ],
    ids=["right", "no barrier before", "no barrier after"],
)
def test_operands_stay_until_the_product_has_landed(tmp_path, before, after, right):
    """A missing barrier lets another warp write an operand before a warp issues its product, or
    between issue and wait."""
    body = (
        SETUP
        + f"""
    const auto put = [&](float x) {{
        for (int i = t % 32; t / 32 == 2 && i < 64; i += 32)
            for (T& element : smem.b[i]) element = from_float<T>(x);
        fence_proxy_async();
    }};
    put(2);
    {before}
    wgmma_fence(d);
    product(d);
    wgmma_commit_group();
    wgmma_wait_group<0>(d);
    {after}
    put(3);
    p.lse[t] = d[0][0];
"""
    )
    step = write_step(tmp_path, "barriers", body, threads=128, globals_=INCLUDE, layout=LAYOUT)
    found = run_seeds(step)
    assert found == {32.0} if right else RACE in found
    assert found <= {16.0, 32.0, 48.0, RACE}


# What 128 threads, or 160, execute.
DO = "wgmma_fence(d); "
END = " commit(); wgmma_wait_group<0>(d);"
OPERAND = "wgmma_m64nNk16<T, K_MAJOR, K_MAJOR>(d, a, {}, true);".format
FAULTS = [
    Fault("no_fence", "product(d);", "missing wgmma_fence .*: wgmma_m64nNk16 .*each group"),
    Fault(
        "no_fence_since_the_group",
        DO + "product(d); commit(); product(d);" + END,
        "missing wgmma_fence",
    ),
    Fault(
        "exit",
        DO + "product(d); commit();",
        r"exit with a wgmma in flight .*: wgmma_m64nNk16 .* has not landed: call",
    ),
    Fault("exit_uncommitted", DO + "product(d); wgmma_wait_group<0>();", "exit with a wgmma"),
    Fault(
        "d_written",
        DO + "product(d); commit(); if (t == 70) d[3][1] = 5; wgmma_wait_group<0>(d);",
        r"write to registers of a wgmma in flight .*: thread 70 has changed D of wgmma_m64nNk16",
    ),
    Fault(
        "d_scaled",
        DO + "product(d); commit(); if (t == 70) d[3][1] *= 5; wgmma_wait_group<0>(d);",
        "thread 70 has changed D of",
    ),
    Fault(
        "a_written",
        DO + "frag_product(d); commit(); if (t == 33) frag[2] = 0; wgmma_wait_group<0>(d);",
        "write to registers .*: thread 33 has changed A of wgmma_m64nNk16",
    ),
    Fault(
        "wait_names_d_in_flight",
        DO + "product(d); commit(); wgmma_wait_group<1>(e, d);",
        r"registers of a wgmma in flight .*: wgmma_wait_group @ with .* names registers of "
        r"wgmma_m64nNk16 \(",
    ),
    Fault(
        "wait_names_a_in_flight",
        DO + "frag_product(d); commit(); uint32_t (&all)[1][4] = "
        "reinterpret_cast<uint32_t (&)[1][4]>(frag); wgmma_wait_group<1>(all);",
        "registers of a wgmma in flight",
    ),
    Fault(
        "lanes_disagree",
        DO + "wgmma_m64nNk16<T, K_MAJOR, K_MAJOR>(d, a, t == 5 ? a : b, true);" + END,
        r"threads disagree .*: wgmma_m64nNk16 @ with mask 0xffffffff\n"
        r"  thread 0: N = 64, A 0x4000004000000000, B 0x4000004000000200, accumulate 1\n"
        r"  thread 5: .* B 0x4000004000000000, accumulate 1",
    ),
    Fault(
        "warps_disagree",
        DO + "wgmma_m64nNk16<T, K_MAJOR>(d, frag, b, t < 64);" + END,
        r"threads disagree .*: wgmma_m64nNk16 @\n"
        r"  thread 0: N = 64, B 0x\d+, accumulate 1\n  thread 64: .* accumulate 0",
    ),
    Fault(
        "divergent",
        DO + "if (t < 96) product(d);",
        r"barrier divergence .*\n  threads 0-95 wait at wgmma_m64nNk16 \(faults.cu:\d+\)\n"
        r"  threads 96-127 have exited",
    ),
    Fault(
        "half_a_warp",
        DO + "if (t < 16 || t >= 32) product(d);",
        r"lane that has exited .*\n  threads 0-15 wait at wgmma_m64nNk16 .* mask 0xffffffff",
    ),
    Fault("fence_divergent", "if (t % 2) wgmma_fence(d);", "lane that has exited"),
    Fault("commit_divergent", "if (t % 2) commit();", "lane that has exited"),
    Fault("wait_divergent", "if (t % 2) wgmma_wait_group<0>();", "lane that has exited"),
    # Descriptors.
    Fault(
        "misaligned_address",
        "describe(&smem.a[0][t == 9]);",
        r"misaligned access .*, thread 9: matrix_descriptor \(faults.cu:\d+\) needs a multiple of "
        "16 bytes, not the address at byte 2 of shared",
    ),
    Fault("global", "describe(p.q);", "access outside shared memory .*: matrix_descriptor .*of q"),
    Fault(
        "leading_bytes",
        "matrix_descriptor<SWIZZLE_NONE>(smem.a[0], 24, 0);",
        "wrong distance .*: matrix_descriptor @ needs multiples of 16 bytes below 262144, not 24",
    ),
    Fault("stride_bytes", "matrix_descriptor<SWIZZLE_NONE>(smem.a[0], 0, 1 << 18);", "not 262144"),
    Fault("negative", "matrix_descriptor<SWIZZLE_NONE>(smem.a[0], -16, 0);", "not -16"),
    Fault(
        "base_offset",
        DO + OPERAND("b | uint64_t(1) << 49") + END,
        r"unsupported descriptor .*: wgmma_m64nNk16 @, operand B at byte 8192 of shared memory, "
        "is 0x4002004000000200: only",
    ),
    Fault("unknown_bits", DO + OPERAND("b | 1 << 14") + END, "unsupported descriptor"),
    Fault(
        "misaligned_pattern",
        DO + OPERAND("describe(smem.b[1])") + END,
        r"misaligned descriptor .*: wgmma_m64nNk16 @, operand B at byte 8320 of shared memory, "
        "must start in the first 128 bytes of a multiple of 1024",
    ),
    Fault(
        "misaligned_64",
        DO + OPERAND("matrix_descriptor<SWIZZLE_64B>(smem.b[0] + 32, 0, 512)") + END,
        "first 64 bytes of a multiple of 512",
    ),
    Fault(
        "misaligned_32",
        DO + OPERAND("matrix_descriptor<SWIZZLE_32B>(smem.b[1], 0, 256)") + END,
        "first 32 bytes of a multiple of 256",
    ),
    Fault(
        "past_the_row",
        DO + OPERAND("describe(&smem.b[0][56])") + END,
        r"operand past the end of its row .*, operand B at byte 8304 of shared memory, takes 32 "
        "bytes of each row from its byte 112 on; a row has 128",
    ),
    Fault(
        "past_the_row_mn",
        DO + "wgmma_m64nNk16<T, MN_MAJOR, K_MAJOR>(d, describe(&smem.a[0][8]), b, true);" + END,
        "operand A at byte 16 of shared memory, takes 128 bytes of each row from its byte 16 on",
    ),
    Fault(
        "outside",
        DO + OPERAND("describe(smem.b[16])") + END,
        r"operand outside shared memory .*, operand B at byte 10240 of shared memory, reaches to "
        r"byte \d+ of 17408",
    ),
    Fault(
        "overwritten",
        DO + "product(d); commit(); __syncthreads(); fill(smem.b, 2); fence_proxy_async();"
        "__syncthreads(); wgmma_wait_group<0>(d);",
        r"write to an operand of a wgmma in flight .*, operand B at byte 8192 of shared memory, "
        "has changed before the wgmma has landed",
    ),
    # Landed for all warps, since each has come to the next product, which does not order memory.
    Fault(
        "overwritten_after_the_wait",
        DO + "product(d);" + END + "wgmma_fence(e);"
        "wgmma_m64nNk16<T, K_MAJOR>(e, frag, a, true); commit(); fill(smem.b, 2);"
        "wgmma_wait_group<0>(e);",
        r"data race .*: writes byte \d+ of shared memory, which warp \d has read \(faults.cu:\d+\)",
    ),
    Fault(
        "no_proxy_fence",
        "fill(smem.b, 1.5f); __syncthreads(); " + DO + "product(d);" + END,
        r"missing fence_proxy_async .*: wgmma_m64nNk16 \(faults.cu:\d+\) reads byte \d+",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def faults_step(tmp_path_factory) -> Step:
    return write_faults(
        tmp_path_factory.mktemp("wgmma_faults"),
        FAULTS,
        SETUP,
        threads=128,
        globals_=INCLUDE,
        layout=LAYOUT,
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_reported(faults_step, fault):
    expect_report(faults_step, FAULTS, fault, q=Q)


NOT_WHOLE = [
    Fault(
        "not_whole",
        "wgmma_fence(d); product(d); wgmma_commit_group(); wgmma_wait_group<0>(d);",
        r"warpgroup that is not whole .*, thread 1(2[89]|[345]\d): wgmma_m64nNk16 .*, which needs "
        "128 threads; those from 128 on are 32",
    )
]


def test_a_warpgroup_must_be_whole(tmp_path):
    step = write_faults(tmp_path, NOT_WHOLE, SETUP, threads=160, globals_=INCLUDE, layout=LAYOUT)
    expect_report(step, NOT_WHOLE, NOT_WHOLE[0], q=Q)
