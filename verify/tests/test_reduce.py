"""Reductions in global memory: what they add, on a GPU and on the CPU, where misuse is reported."""

from __future__ import annotations

import pytest
import torch

from common.paths import ROOT
from common.runtime.cpu import CpuBackend
from common.step import read_step
from verify.tests.small_kernels import Fault, expect_report, run, write_faults, write_step

INCLUDE = '#include "reduce.cuh"\n#include "reduce_vector.cuh"'
WIDTHS = ("reduce", "reduce_vector")


def sums(backend, width: str, blocks: int) -> torch.Tensor:
    """What the kernel of this name in verify/instructions has added up."""
    step = read_step(ROOT / "verify" / "instructions" / f"{width}.cu")
    q = torch.zeros(1, 1, blocks, 8, dtype=torch.bfloat16, device=backend.device)
    lse = torch.full((64,), torch.nan, device=backend.device)
    backend.launch(step, q, q, q, q.clone(), lse, causal=False, softmax_scale=1.0)
    return lse.cpu()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("blocks", [1, 2, 1000])
def test_sums_of_all_blocks(make_backend, width, blocks):
    expected = blocks * (blocks + 1) / 6 + blocks
    error = sums(make_backend(), width, blocks).double() - expected
    assert error.abs().max() <= 2 * 2.0**-24 * 2 * blocks * expected  # 2 u for each addition


@pytest.mark.parametrize("width", WIDTHS)
def test_order_is_drawn_from_the_seed(width):
    """So a step that claims bits is caught; the same seed gives the same ones."""
    first, *others = (sums(CpuBackend(seed), width, blocks=40) for seed in range(8))
    assert torch.equal(first, sums(CpuBackend(0), width, blocks=40))
    assert any(not torch.equal(first, other) for other in others)


FAULTS = [
    Fault("shared", "red_add(&smem.first[t], 1);", r"access outside global memory .*red_add @"),
    Fault(
        "misaligned",
        "red_add(reinterpret_cast<float*>(reinterpret_cast<char*>(p.lse) + 2), 1);",
        r"misaligned .*red_add @",
    ),
    Fault("out_of_bounds", "red_add(p.lse + (1 << 20), 1);", r"out-of-bounds .* @"),
    Fault(
        "vector_misaligned",
        "red_add_v4(p.lse + 1, make_float4(1, 1, 1, 1));",
        r"misaligned .*red_add_v4 @",
    ),
    Fault(
        "vector_out_of_bounds",
        "red_add_v4(p.lse + (1 << 20), make_float4(1, 1, 1, 1));",
        r"out-of-bounds .* @",
    ),
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
