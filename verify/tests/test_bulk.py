"""Bulk copies and reductions: what they bring and add, on a GPU and on the CPU, where misuse is
reported."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from common.paths import ROOT
from common.runtime.backend import Backend
from common.runtime.cpu import CpuBackend
from common.step import read_step

FLOATS, HEAD_DIM = 256, 8  # of verify/instructions/bulk.cu


@dataclass(frozen=True)
class Moved:
    """Inputs and results of verify/instructions/bulk.cu."""

    numbers: torch.Tensor  # [FLOATS]
    places: list[tuple[int, int, int]]  # of each block: how many, from where, where to
    in_shared: torch.Tensor  # [blocks, FLOATS]
    sums: torch.Tensor  # [FLOATS]


def move(backend: Backend, blocks: int) -> Moved:
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
    step = read_step(ROOT / "verify" / "instructions" / "bulk.cu")
    backend.launch(step, q, k, k, torch.empty_like(q), lse, causal=False, softmax_scale=1.0)
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
