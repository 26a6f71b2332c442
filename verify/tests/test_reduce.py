"""Reductions in global memory: what they add, on a GPU and on the CPU, where misuse is reported."""

from __future__ import annotations

import pytest
import torch

from common.paths import ROOT
from common.runtime.cpu import CpuBackend
from common.step import read_step
from verify.tests.small_kernels import Fault, expect_report, run, write_faults, write_step

INCLUDE = '#include "reduce.cuh"'


@pytest.mark.parametrize("blocks", [1, 2, 1000])
def test_sums_of_all_blocks(make_backend, blocks):
    backend = make_backend()
    step = read_step(ROOT / "verify" / "instructions" / "reduce.cu")
    q = torch.zeros(1, 1, blocks, 8, dtype=torch.bfloat16, device=backend.device)
    lse = torch.full((64,), torch.nan, device=backend.device)
    backend.launch(step, q, q, q, q.clone(), lse, causal=False, softmax_scale=1.0)
    expected = blocks * (blocks + 1) / 6 + blocks
    # 2 u for each addition.
    assert (lse.cpu().double() - expected).abs().max() <= 2 * 2.0**-24 * 2 * blocks * expected


def sums(folder, body: str, seed: int, blocks: int = 40) -> torch.Tensor:
    step = write_step(folder, "little", body, threads=32, globals_=INCLUDE)
    lse = torch.zeros(32)
    q = torch.zeros(1, 1, blocks, 8)
    CpuBackend(seed).launch(step, q, q, q, q.clone(), lse, causal=False, softmax_scale=0)
    return lse


def test_order_is_drawn_from_the_seed(tmp_path):
    """So a step that claims bits is caught; the same seed gives the same ones."""
    body = "if (block == 0) p.lse[t] = 0; red_add(&p.lse[t], 1.0f / (32 * block + t + 1));"
    first, *others = (sums(tmp_path, body, seed) for seed in range(8))
    assert torch.equal(first, sums(tmp_path, body, 0))
    assert any(not torch.equal(first, other) for other in others)
    for other in others:
        torch.testing.assert_close(first, other, rtol=1e-5, atol=0)


def test_sum_is_there_when_the_launch_has_ended(tmp_path):
    body = "if (t == 0) { p.lse[0] = 1; red_add(&p.lse[0], 1); p.lse[1] = p.lse[0]; }"
    assert sums(tmp_path, body, 0, blocks=1)[:2].tolist() == [2, 1]


FAULTS = [
    Fault("shared", "red_add(&smem.first[t], 1);", r"reduction outside global memory .*red_add @"),
    Fault(
        "misaligned",
        "red_add(reinterpret_cast<float*>(reinterpret_cast<char*>(p.lse) + 2), 1);",
        r"misaligned .*red_add @",
    ),
    Fault("out_of_bounds", "red_add(p.lse + (1 << 20), 1);", r"out-of-bounds .* @"),
    Fault("read_only", "red_add(const_cast<float*>(reinterpret_cast<const float*>(p.q)), 1);", "@"),
]


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return write_faults(tmp_path_factory.mktemp("faults"), FAULTS, globals_=INCLUDE)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_report(faults, fault):
    expect_report(faults, FAULTS, fault)


def test_run_of_nothing_wrong(tmp_path):
    """What the faults' kernel does besides is no fault."""
    step = write_step(tmp_path, "little", "red_add(&scores[block], 1);", globals_=INCLUDE)
    run(step, CpuBackend())
