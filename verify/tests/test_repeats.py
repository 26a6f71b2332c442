"""A step whose blocks send each other what they compute gives the same bits each time.

A block that reads what has not arrived, or that is sent something too early, is wrong once in
hundreds of calls: the checker's two would not show it.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from common import attention

CALLS = 300


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "heads"), [(320, 6), (512, 4), (576, 4), (768, 4), (1024, 2)])
@pytest.mark.parametrize("step", ["v15", "b12"])
def test_repeats_all_bits(step: str, head_dim: int, heads: int, causal: bool) -> None:
    rng = torch.Generator("cuda").manual_seed(0)
    shape = (4, heads, 4096, head_dim)
    *qkv, dout = (
        torch.randn(shape, generator=rng, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    if step == "v15":
        compute = partial(attention, *qkv, causal=causal, step=step, return_lse=True)
    else:
        o = attention(*(t.requires_grad_() for t in qkv), causal=causal, backward_step=step)
        compute = partial(torch.autograd.grad, o, qkv, dout, retain_graph=True)
    expected = compute()
    others = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(CALLS):
        others += sum((a != b).any() for a, b in zip(compute(), expected, strict=True))
    assert others.item() == 0
