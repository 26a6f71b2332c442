"""WMMA: the CPU twin computes what a GPU does, hides which lane holds what, and reports misuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from common.paths import ROOT
from common.runtime.backend import Backend
from common.runtime.cpu import CpuBackend
from common.step import Step, read_step
from verify.tests.small_kernels import Fault, expect_report, run, write_faults, write_step

BF16, FP16 = torch.bfloat16, torch.float16

# What one float32 operation is off by at most, as a share of its operands' magnitudes: also where,
# as in tensor cores, sums are cut off rather than rounded.
ULP = 2.0**-23


# ---- arithmetic


def results(q, k, v, s):
    """What verify/instructions/wmma.cu makes of q, k and v [32, 32], the last from its own s."""
    qv = q[:16] @ v[:, :16]
    return (
        q[:16] @ k[:16].T,
        qv,
        q[:, :16].T @ k[:16].T,
        q[:, :16].T @ v[:, :16],
        qv.T,
        s.T * (s.T + qv),
    )


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_arithmetic(make_backend: Callable[[], Backend], dtype: torch.dtype) -> None:
    backend = make_backend()
    rng = torch.Generator().manual_seed(0)
    # With gaps between rows, of pitches that keep the ends of the buffers aligned to 32 bytes.
    q, k, v = (
        torch.randn(1, 1, 32, pitch, generator=rng).to(backend.device, dtype)[..., :32]
        for pitch in (48, 80, 32)
    )
    lse = torch.full((6, 16, 16), torch.nan, device=backend.device)
    step = read_step(ROOT / "verify" / "instructions" / "wmma.cu")
    backend.launch(step, q, k, v, torch.empty_like(q), lse, causal=False, softmax_scale=1.0)

    computed = lse.double().cpu().numpy()
    inputs = [t[0, 0].double().cpu().numpy() for t in (q, k, v)] + [computed[0]]
    operations = 32 + 1 + 1  # the sum of the products, C, the scale
    bounds = [operations * ULP * terms for terms in results(*map(np.abs, inputs))]
    for got, exact, bound in zip(computed, results(*inputs), bounds, strict=True):
        assert (np.abs(got - exact) <= bound).all()


# ---- which lane holds which element


WMMA = """
#include "wmma.cuh"
using A = wmma::fragment<wmma::matrix_a, 16, 16, 16, Element, wmma::row_major>;
using ACol = wmma::fragment<wmma::matrix_a, 16, 16, 16, Element, wmma::col_major>;
using B = wmma::fragment<wmma::matrix_b, 16, 16, 16, Element, wmma::row_major>;
using BCol = wmma::fragment<wmma::matrix_b, 16, 16, 16, Element, wmma::col_major>;
using Accumulator = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;
"""
Q = torch.arange(256).view(1, 1, 1, 256)  # a matrix of numbers that both dtypes have


@pytest.mark.parametrize(("dtype", "copies"), [(BF16, 1), (FP16, 2)], ids=str)
def test_layout_is_nowhere_the_hardwares(tmp_path, dtype, copies):
    """A fragment holds what CUDA's does, each type of fragment in an order of its own."""
    step = write_step(
        tmp_path,
        "layout",
        """
    for (int i = 0; i < 8; ++i) p.lse[8 * t + i] = 8 * t + i;
    __syncwarp();
    float* result = p.lse + 256;
    result = dump<Accumulator>(result, p.lse, 16, wmma::mem_row_major);
    result = dump<A>(result, p.q, 16);
    result = dump<ACol>(result, p.q, 16);
    result = dump<B>(result, p.q, 16);
    result = dump<BCol>(result, p.q, 16);
""",
        threads=32,
        globals_=WMMA
        + """
template <typename Fragment, typename... Matrix>
__device__ float* dump(float* to, Matrix... matrix) {
    Fragment fragment;
    wmma::load_matrix_sync(fragment, matrix...);
    for (int i = 0; i < fragment.num_elements; ++i)
        to[fragment.num_elements * threadIdx.x + i] = to_float(fragment.x[i]);
    return to + 32 * fragment.num_elements;
}
""",
    )
    _, lse = run(step, CpuBackend(), Q.to(dtype), num_lse=256 * (2 + 4 * copies))
    held = lse.numpy().astype(int)
    fragments = [held[256:512], *np.split(held[512:], 4)]
    for of in fragments[2], fragments[4]:  # stored by columns
        of[:] = of % 16 * 16 + of // 16
    orders = [of.reshape(32, -1)[:, :8] for of in fragments]
    for of, num_copies in zip(fragments, [1] + 4 * [copies], strict=True):
        np.testing.assert_array_equal(np.sort(of), np.repeat(np.arange(256), num_copies))

    lane, i = np.indices((32, 8))
    hardware_row = lane // 4 + i // 2 % 2 * 8
    hardware_col = lane % 4 * 2 + i % 2 + i // 4 * 8
    orders.append(16 * hardware_row + hardware_col)
    for a, b in itertools.combinations(orders, 2):
        assert (a // 16 == b // 16).mean() < 0.2, "rows agree"
        assert (a % 16 == b % 16).mean() < 0.2, "columns agree"


# ---- order of accesses


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            """
    wmma::fill_fragment(acc, 1.0f);
    wmma::store_matrix_sync(p.lse, acc, 16, wmma::mem_row_major);
    BARRIER
    for (int i = t; i < 256; i += 32) p.lse[256 + i] = p.lse[i];
""",
            1,
        ),
        (
            """
    for (int i = t; i < 256; i += 32) p.lse[i] = 2;
    __syncwarp();
    wmma::load_matrix_sync(acc, p.lse, 16, wmma::mem_row_major);
    BARRIER
    for (int i = t; i < 256; i += 32) p.lse[i] = 3;
    wmma::store_matrix_sync(p.lse + 256, acc, 16, wmma::mem_row_major);
""",
            2,
        ),
        (
            """
    for (int i = t; i < 256; i += 32) p.lse[i] = 3;
    BARRIER
    wmma::load_matrix_sync(acc, p.lse, 16, wmma::mem_row_major);
    wmma::store_matrix_sync(p.lse + 256, acc, 16, wmma::mem_row_major);
""",
            3,
        ),
        (
            """
    wmma::fill_fragment(acc, 1.0f);
    for (int i = t; i < 256; i += 32) p.lse[i] = 4;
    __syncwarp();
    for (int i = t; i < 256; i += 32) p.lse[256 + i] = p.lse[255 - i];
    BARRIER
    wmma::store_matrix_sync(p.lse, acc, 16, wmma::mem_row_major);
""",
            4,
        ),
    ],
    ids=["after_store", "after_load", "before_load", "before_store"],
)
def test_other_lanes_need_a_barrier(tmp_path, body, expected):
    """It separates a matrix's load or store from other lanes' accesses before and after."""
    right = []
    for barrier in "__syncwarp();", "":
        text = "    Accumulator acc;" + body.replace("BARRIER", barrier)
        step = write_step(tmp_path, f"barrier{len(right)}", text, threads=32, globals_=WMMA)
        for seed in 0, 1:
            _, lse = run(step, CpuBackend(seed), Q.bfloat16(), num_lse=512)
            right.append(bool((lse[256:] == expected).all()))
    assert right == [True, True, False, False]


# ---- faults


# What a warp executes, and what the report says: a regular expression; @ stands for the statement's
# place. q has 256 elements, lse 384.
FAULTS = [
    Fault(
        "address",
        "load_matrix_sync(a, p.q + 8, 16);",
        "misaligned access .*: load_matrix_sync @ needs a multiple of 32 bytes, .* at byte 16 of q",
    ),
    Fault(
        "address_float",
        "store_matrix_sync(p.lse + 4, acc, 16, mem_row_major);",
        "misaligned access .*: store_matrix_sync @ needs a multiple of 32 .* at byte 16 of lse",
    ),
    Fault(
        "ldm",
        "load_matrix_sync(b, p.q, 20);",
        r"wrong ldm .*: load_matrix_sync @ .* a multiple of 8 elements \(16 bytes\), .*, not 20",
    ),
    Fault(
        "ldm_float",
        "load_matrix_sync(acc, p.lse, 18, mem_row_major);",
        r"wrong ldm .*: load_matrix_sync @ .* a multiple of 4 elements \(16 bytes\), .*, not 18",
    ),
    Fault(
        "ldm_repeats",
        "load_matrix_sync(acc, p.lse, 0, mem_col_major);",
        r"wrong ldm .*: load_matrix_sync @ .* at least 16, not 0",
    ),
    Fault(
        "ldm_too_large",
        "load_matrix_sync(a, p.q, 24);",
        r"out-of-bounds read .*: past the end of q .*\n  .* it passed: load_matrix_sync @",
    ),
    Fault(
        "store_past_end",
        "store_matrix_sync(p.lse + 256, acc, 16, mem_col_major);",
        r"out-of-bounds write .*: past the end of lse .*\n  .* it passed: store_matrix_sync @",
    ),
    Fault(
        "different_addresses",
        "load_matrix_sync(acc, p.lse + (t == 5 ? 16 : 0), 16, mem_row_major);",
        r"lanes name different matrices .*: load_matrix_sync @ .*"
        r"\n  lane 0: at byte 0 of lse \(1536 bytes\), ldm 16, row-major"
        r"\n  lane 5: at byte 64 of lse \(1536 bytes\), ldm 16, row-major",
    ),
    Fault(
        "different_ldm",
        "store_matrix_sync(p.lse, acc, t < 31 ? 16 : 24, mem_col_major);",
        r"different matrices .*: store_matrix_sync @ .*"
        r"\n  lane 0: at .* lse .*, ldm 16, column-major\n  lane 31: at .*, ldm 24, column-major",
    ),
    Fault(
        "different_layouts",
        "load_matrix_sync(acc, p.lse, 16, t ? mem_row_major : mem_col_major);",
        r"different matrices .*\n  lane 0: .*, column-major\n  lane 1: .*, row-major",
    ),
    Fault(
        "different_places",
        "if (t < 16) mma_sync(acc, a, b, acc); else load_matrix_sync(a, p.q, 16);",
        r"in different places .*\n  threads 0-15 wait at mma_sync @ .*"
        r"\n  threads 16-31 wait at load_matrix_sync @",
    ),
    Fault(
        "missing_lane",
        "if (t != 7) mma_sync(acc, a, b, acc);",
        r"exited .*\n  threads 0-6, 8-31 wait at mma_sync @ .*\n  thread 7 has exited",
    ),
]


@pytest.fixture(scope="module")
def faults_step(tmp_path_factory) -> Step:
    folder = tmp_path_factory.mktemp("wmma_faults")
    declarations = "    using namespace wmma;\n    A a;\n    B b;\n    Accumulator acc;"
    return write_faults(folder, FAULTS, declarations, threads=32, globals_=WMMA)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_reported(faults_step, fault):
    expect_report(faults_step, FAULTS, fault, q=Q.bfloat16(), num_lse=384)
