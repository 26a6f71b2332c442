"""A step whose blocks send each other what they compute gives the same bits each time.

A block that reads what has not arrived, or that is sent something too early, is wrong once in
hundreds of calls: the checker's two would not show it.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from common import attention
from common.problem import Shape

CALLS = 300


HEADS = {320: 6, 512: 4, 576: 4, 768: 4, 1024: 2}  # by head_dim


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("step", "head_dim", "v_head_dim", "heads"),
    [
        *((step, *(d, d), heads) for step in ("v15", "b12") for d, heads in HEADS.items()),
        *((step, *(d, v), 4) for step in ("v15", "b12") for d, v in ((576, 512), (64, 512))),
        *((step, 192, 128, 10) for step in ("v15", "b12")),
    ],
)
def test_repeats_all_bits(
    step: str, head_dim: int, v_head_dim: int, heads: int, causal: bool
) -> None:
    rng = torch.Generator("cuda").manual_seed(0)
    shape = Shape(4, heads, heads, 4096, 4096, head_dim, v_head_dim)
    *qkv, dout = (
        torch.randn(size, generator=rng, device="cuda", dtype=torch.bfloat16)
        for size in (shape.q, shape.kv, shape.v, shape.o)
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
