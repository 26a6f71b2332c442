"""A step whose blocks send each other what they compute gives the same bits each time.

A block that reads what has not arrived, or that is sent something too early, is wrong once in
hundreds of calls: the checker's two would not show it.
"""

from __future__ import annotations

import pytest
import torch

from common import attention

CALLS = 300


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "heads"), [(320, 6), (512, 4), (576, 4), (1024, 2)])
def test_v15_repeats_all_bits(head_dim, heads, causal) -> None:
    rng = torch.Generator("cuda").manual_seed(0)
    shape = (4, heads, 4096, head_dim)
    q, k, v = (
        torch.randn(shape, generator=rng, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    expected = attention(q, k, v, causal=causal, step="v15", return_lse=True)
    others = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(CALLS):
        found = attention(q, k, v, causal=causal, step="v15", return_lse=True)
        others += sum((a != b).any() for a, b in zip(found, expected, strict=True))
    assert others.item() == 0
