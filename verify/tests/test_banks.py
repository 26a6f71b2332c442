"""Bank conflicts: what the SIMT runtime counts for access patterns whose wavefronts are known."""

from __future__ import annotations

import pytest
import torch

from common.runtime import cpu
from common.runtime.cpu import CpuBackend, SharedAccess
from common.step import Step
from verify.tests.small_kernels import write_scenarios

# Rows 128 bytes apart, and 16 bytes more.
LAYOUT = """
    alignas(16) Element dense[32][64];
    Element padded[32][72];
    float floats[32][32];
    float rows[16][32], halves[16][32], columns[64][32];
"""

# What a warp executes; phases and wavefronts.
PATTERNS = [
    # Rows 128 bytes apart start in the same bank.
    ("ldmatrix_x4(r, smem.dense[t])", 4, 32),
    ("ldmatrix_x4_trans(r, smem.dense[t])", 4, 32),
    ("ldmatrix_x4(r, smem.padded[t])", 4, 4),
    ("ldmatrix_x4_trans(r, smem.padded[t] + 56)", 4, 4),
    ("ldmatrix_x4(r, &smem.dense[t][8 * (0 ^ t % 8)])", 4, 4),
    ("ldmatrix_x4(r, &smem.dense[t][8 * (5 ^ t % 8)])", 4, 4),
    ("ldmatrix_x4(r, &smem.dense[t][8 * (t % 4)])", 4, 8),
    ("ldmatrix_x4(r, smem.dense[0])", 4, 4),
    ("stmatrix_x4(smem.dense[t], r)", 4, 32),
    ("stmatrix_x4(&smem.dense[t][8 * (5 ^ t % 8)], r)", 4, 4),
    # 16 bytes a lane: 8 lanes a phase.
    ("load_float4(smem.floats[0])", 4, 4),
    ("load_float4(smem.floats[t / 8] + 4 * (t % 8))", 4, 4),
    ("load_float4(smem.floats[t / 8] + 4 * (7 - t % 8))", 4, 4),
    ("load_float4(smem.floats[t])", 4, 32),
    ("load_float4(smem.floats[t % 2])", 4, 8),
    ("load_float4(smem.floats[t % 2] + 4 * (t % 2))", 4, 4),
    ("load_float4(smem.floats[t / 8])", 4, 4),
    ("store_float4(smem.floats[t], {})", 4, 32),
    ("load_uint4(smem.dense[t])", 4, 32),
    ("store_uint4(smem.padded[t], {})", 4, 4),
    ("load_vector(x, smem.dense[t / 2])", 4, 16),
    ("store_vector(smem.padded[t], x)", 4, 4),
    ("cp_async_cg(smem.dense[t], p.q, true)", 4, 32),
    ("cp_async_cg(&smem.dense[t][8 * (t % 8)], nullptr, false)", 4, 4),
    # 8 bytes a lane: 16 lanes a phase.
    ("store_float4(smem.dense[t / 16] + 4 * (t % 16), {})", 2, 2),
    ("store_float4(smem.dense[t], {})", 2, 32),
    ("store_float4(smem.dense[t / 2] + 4 * (t % 2), {})", 2, 16),
    # Lanes that stay away.
    ("if (t < 8) load_float4(smem.floats[t])", 1, 8),
    ("if (t == 31) load_float4(smem.floats[t])", 1, 1),
    ("if (t % 8 == 0) load_float4(smem.floats[t])", 4, 4),
    ("if (t >= 4 && t < 20) load_float4(smem.floats[t])", 3, 16),
]
GLOBAL_ONLY = "load_uint4(p.q); store_uint4(p.o, {}); load_vector(x, p.q);"
# By two warps.
SEVERAL = """
    const auto load = [&](int row) { load_float4(smem.floats[row]); };
    for (int i = 0; i < 3; ++i) load(t % 32);
    if (t >= 32) load(0);
    const auto row = smem.rows[t / 8] + 4 * (t % 8), half = smem.halves[t / 4] + 4 * (t % 4);
    store_float4(row, {}); store_float4(half, {});
    store_float4(smem.columns[t], {});
"""


@pytest.fixture(scope="module")
def banks_step(tmp_path_factory) -> Step:
    land = "cp_async_commit_group(); cp_async_wait_group<0>();"  # what some patterns start
    patterns = [f"if (t < 32) {{ {pattern}; }} {land}" for pattern, *_ in PATTERNS]
    return write_scenarios(
        tmp_path_factory.mktemp("banks"),
        "banks",
        [*patterns, GLOBAL_ONLY, SEVERAL],
        "    uint32_t r[4];\n    float x[VEC] = {};",
        threads=64,
        globals_='#include "copy.cuh"\n#include "mma.cuh"',
        layout=LAYOUT,
    )


def count(step: Step, scenario: int, *, seed: int = 0, blocks: int = 1) -> list[SharedAccess]:
    q = torch.zeros(1, 1, blocks, 8, dtype=torch.bfloat16)
    return CpuBackend(seed).count_shared_accesses(
        step, q, q, q, causal=False, softmax_scale=scenario
    )


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern[0])
def test_known_patterns(banks_step, pattern):
    statement, ideal, wavefronts = pattern
    (access,) = count(banks_step, PATTERNS.index(pattern))
    assert access.operation in statement
    assert access.file == "banks.cu"
    assert statement in banks_step.path.read_text().splitlines()[access.line - 1]
    assert (access.accesses, access.ideal, access.wavefronts) == (1, ideal, wavefronts)


def test_global_memory_has_no_banks(banks_step):
    assert count(banks_step, len(PATTERNS)) == []


def test_accesses_add_up(banks_step, monkeypatch):
    """Over blocks and warps, by place in the source; whatever the order of the threads."""
    counts = []
    for num_cores, seed in [(1, 0), (1, 1), (2, 0), (2, 1)]:
        monkeypatch.setattr(cpu, "_num_cores", lambda n=num_cores: n)
        counts.append(count(banks_step, len(PATTERNS) + 1, seed=seed, blocks=5))
    load, store, column = counts[0]
    assert (load.operation, load.accesses, load.ideal) == ("load_float4", 35, 140)
    assert load.wavefronts == 5 * (2 * 3 * 32 + 4)
    assert (store.operation, store.accesses, store.ideal) == ("store_float4", 20, 80)
    assert store.wavefronts == 5 * 2 * (4 + 8)
    assert (column.operation, column.accesses, column.ideal) == ("store_float4", 10, 40)
    assert column.wavefronts == 10 * 32
    assert load.line < store.line < column.line
    assert all(other == counts[0] for other in counts)
