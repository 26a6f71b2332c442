"""ldmatrix, mma.sync, cvt, ex2 and lg2: the CPU twins compute what a GPU does, and report misuse.

The layouts are written down here once more, from the tables of the PTX ISA.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from common.paths import ROOT
from common.runtime.backend import Backend
from common.runtime.cpu import CpuBackend, SimtError
from common.step import Step, read_step
from verify.tests.small_kernels import Fault, expect_report, run, write_faults, write_step

BF16, FP16 = torch.bfloat16, torch.float16

SPECIAL = [-np.inf, np.inf, np.nan, 0.0, -0.0, 1e-40, -126.0, -126.5, -150.0, 127.5, 128.0, -1e30]

# ---- what the instructions compute


@dataclass(frozen=True)
class Words:
    """Inputs and results of verify/instructions/mma.cu as 32-bit words [rows, registers, 32]."""

    dtype: torch.dtype
    a: np.ndarray
    b: np.ndarray
    lo_hi: np.ndarray
    c: np.ndarray
    plain: np.ndarray
    transposed: np.ndarray
    d: np.ndarray
    packed: np.ndarray
    power: np.ndarray
    log: np.ndarray

    def elements(self, words: np.ndarray) -> np.ndarray:
        """The two elements of each word as float64, the one in the lower half first."""
        halves = torch.from_numpy(words.copy().view(np.int16)).view(self.dtype)
        return halves.double().numpy().reshape(*words.shape, 2)


def make_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v [1, 1, rows, 256]: in the first row all elements of A differ, in the last ones there
    are infinities, NaN and subnormals."""
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(6, n, generator=rng).to(dtype) for n in (256, 128))
    a[0] = torch.arange(-128, 128)
    lo_hi = torch.randint(-(2**31), 2**31, (6, 64), generator=rng).int().view(torch.float32)
    lo_hi[:3] = torch.randn(3, 64, generator=rng)
    c = 20 * torch.randn(6, 128, generator=rng)
    c[4, : len(SPECIAL)] = torch.tensor(SPECIAL)
    a[5, 7], a[5, 100], b[5, 30], b[5, 77] = torch.inf, torch.nan, -torch.inf, 0
    k = torch.cat([b, lo_hi.view(dtype)], dim=1)
    return a[None, None], k[None, None], c.view(dtype)[None, None]


def run_words(backend: Backend, dtype: torch.dtype) -> Words:
    inputs = make_inputs(dtype)
    q, k, v = (x.to(backend.device) for x in inputs)
    lse = torch.zeros(6, 21, 32, device=backend.device)
    step = read_step(ROOT / "verify" / "instructions" / "mma.cu")
    backend.launch(step, q, k, v, torch.empty_like(q), lse, causal=False, softmax_scale=1.0)
    a, k_words, c = (x.view(torch.int32).view(6, -1, 32).numpy() for x in inputs)
    results = lse.cpu().view(torch.int32).numpy()
    parts = np.split(results, [4, 8, 12, 13, 17], axis=1)
    return Words(dtype, a, k_words[:, :2], k_words[:, 2:], c, *parts)


@pytest.fixture(scope="module", params=[BF16, FP16], ids=str)
def words(make_backend, request) -> Words:
    return run_words(make_backend(), request.param)


def test_ldmatrix(words):
    rows = words.a.view(np.int16).reshape(6, 32, 8)  # row i was stored by lane i
    matrices = rows[:, (5 * np.arange(32) + 3) % 32].reshape(6, 4, 8, 8)
    # Lane 4 r + c holds the elements 2 c and 2 c + 1 of row r.
    for loaded, expected in [
        (words.plain, matrices),
        (words.transposed, matrices.swapaxes(2, 3)),
    ]:
        np.testing.assert_array_equal(loaded.view(np.int16), expected.reshape(6, 4, 64))


def test_mma(words):
    # "Matrix fragments for mma.m16n8k16 with floating point type": element i of a lane's a, b or c.
    lane, i = np.arange(32)[:, None], np.arange(8)
    group, thread = lane // 4, lane % 4
    a_row = np.where((i < 2) | ((i >= 4) & (i < 6)), group, group + 8)
    a_col = thread * 2 + (i & 1) + np.where(i >= 4, 8, 0)
    i = i[:4]
    b_row = thread * 2 + (i & 1) + np.where(i >= 2, 8, 0)
    b_col = group + 0 * i
    c_row = np.where(i < 2, group, group + 8)
    c_col = thread * 2 + (i & 1)

    def by_lane(elements: np.ndarray) -> np.ndarray:  # [rows, registers, 32, 2]
        return elements.swapaxes(1, 2).reshape(6, 32, -1)

    a, b, c = np.full((6, 16, 16), np.nan), np.full((6, 16, 8), np.nan), np.zeros((6, 16, 8))
    a[:, a_row, a_col] = by_lane(words.elements(words.a))
    b[:, b_row, b_col] = by_lane(words.elements(words.b))
    c[:, c_row, c_col] = by_lane(words.c.view(np.float32))
    d = np.full((6, 16, 8), np.nan)
    d[:, c_row, c_col] = by_lane(words.d.view(np.float32))

    with np.errstate(invalid="ignore"):
        exact = c + a @ b
        terms = np.abs(c) + np.abs(a) @ np.abs(b)
    number = np.isfinite(exact)
    assert not number.all()
    np.testing.assert_array_equal(d[~number], exact[~number])
    # 17 terms in any order. Each product and each sum errs by at most 2^-23 of the terms'
    # magnitudes: a hardware that cuts off instead of rounding included.
    error = np.abs(d[number] - exact[number])
    assert (error <= 17 * 2.0**-23 * terms[number]).all()


def test_cvt(words):
    lo_hi = torch.from_numpy(words.lo_hi.view(np.float32).copy())
    rounded = lo_hi.to(words.dtype).view(torch.int16)
    rounded[lo_hi.isnan()] = 0x7FFF
    np.testing.assert_array_equal(words.packed[:, 0].view(np.int16).reshape(6, 32, 2), rounded.mT)


def test_ex2(words):
    x, power = words.c.view(np.float32).astype(np.float64), words.power.view(np.float32)
    with np.errstate(over="ignore"):
        exact = np.exp2(x)
    exact[(exact < 2.0**-126) | np.isneginf(x)] = 0
    exact[exact >= 2.0**128] = np.inf
    np.testing.assert_allclose(power, exact, rtol=2.0**-21, atol=0)


def test_lg2(words):
    x, log = words.c.view(np.float32).astype(np.float64), words.log.view(np.float32)
    x[np.abs(x) < 2.0**-126] = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.log2(x)
    np.testing.assert_allclose(log, exact, rtol=2.0**-22, atol=2.0**-22)


# ---- who comes to an instruction


INCLUDE = '#include "mma.cuh"'
ROWS = "Element rows[33][8]; Element after;"
Q = torch.zeros(1, 1, 2, 8, dtype=BF16)


def test_writes_after_ldmatrix_need_a_barrier(tmp_path):
    """Without one, some lanes have yet to read what others overwrite."""
    for barrier in "__syncwarp();", "":
        body = f"""
    if (block) return;
    for (Element& x : smem.rows[t]) x = from_float<Element>(1);
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4_trans(r, smem.rows[t]);
    {barrier}
    for (Element& x : smem.rows[t]) x = from_float<Element>(2);
    for (int m = 0; m < 4; ++m) memcpy(p.lse + 32 * m + t, &r[m], sizeof(float));
"""
        step = write_step(tmp_path, "barrier", body, threads=32, globals_=INCLUDE, layout=ROWS)
        ones = torch.ones(256, dtype=BF16).view(torch.float32)
        for seed in range(3):
            if barrier:
                assert torch.equal(run(step, CpuBackend(seed), Q, num_lse=128)[1], ones)
            else:
                with pytest.raises(SimtError, match="data race"):
                    run(step, CpuBackend(seed), Q, num_lse=128)


# What 48 threads (a full warp and half of one) execute.
FAULTS = [
    Fault(
        "misaligned",
        "if (t < 32) ldmatrix_x4(r, &smem.rows[t][t == 5]);",
        r"misaligned access .*, thread 5: ldmatrix_x4 @ needs a multiple of 16 bytes, "
        r"not the address at byte 82 of shared memory",
    ),
    Fault(
        "global",
        "if (t < 32) ldmatrix_x4_trans(r, t == 9 ? p.q : smem.rows[t]);",
        r"access outside shared memory .*, thread 9: ldmatrix_x4_trans @ needs 16 bytes of the "
        r"block's shared memory, not the address at byte 0 of q \(32 bytes\)",
    ),
    Fault(
        "past_end",
        "if (t < 32) ldmatrix_x4(r, smem.rows[t == 31 ? 34 : t]);",
        r"outside shared memory .*, thread 31: .* past the end of shared memory \(530 bytes\)",
    ),
    Fault(
        "partly_past_end",
        "if (t < 32) ldmatrix_x4(r, smem.rows[t + 2]);",
        r"outside shared memory .*, thread 31: .* at byte 528 of shared memory \(530 bytes\)",
    ),
    Fault("null", "if (t < 32) ldmatrix_x4(r, nullptr);", "not the address through a null pointer"),
    Fault(
        "partial_warp",
        "if (t >= 32) mma_m16n8k16<bf16>(d, r, 0, 0);",
        r"do not exist .*: mma_m16n8k16 @ with mask 0xffffffff; the warp has 16 lanes",
    ),
    Fault(
        "partial_warp_ldmatrix",
        "if (t >= 32) ldmatrix_x4(r, smem.rows[0]);",
        "do not exist .*: ldmatrix_x4 @ .*; the warp has 16 lanes",
    ),
    Fault(
        "different_places",
        "if (t < 16) mma_m16n8k16<bf16>(d, r, 0, 0); else if (t < 32)\n"
        "mma_m16n8k16<bf16>(d, r, 0, 0);",
        r"different places .*\n  threads 0-15 wait at mma_m16n8k16 @ .*"
        r"\n  threads 16-31 wait at mma_m16n8k16 \(faults.cu:\d+\)",
    ),
    Fault(
        "different_instructions",
        "if (t < 16) ldmatrix_x4(r, smem.rows[t]); else if (t < 32) "
        "ldmatrix_x4_trans(r, smem.rows[t]);",
        r"different places .*\n  threads 0-15 wait at ldmatrix_x4 @ .*"
        r"\n  threads 16-31 wait at ldmatrix_x4_trans @",
    ),
    Fault(
        "missing_lane",
        "if (t < 31) mma_m16n8k16<fp16>(d, r, 0, 0);",
        r"lane that has exited .*\n  threads 0-30 wait at mma_m16n8k16 @",
    ),
]


@pytest.fixture(scope="module")
def faults_step(tmp_path_factory) -> Step:
    return write_faults(
        tmp_path_factory.mktemp("mma_faults"),
        FAULTS,
        "    uint32_t r[4] = {};\n    float d[4] = {};",
        globals_=INCLUDE,
        layout=ROWS,
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_reported(faults_step, fault):
    expect_report(faults_step, FAULTS, fault, q=Q)
