"""A step whose blocks send each other what they compute gives the same bits each time.

A block that reads what has not arrived, or that is sent something too early, is wrong once in
hundreds of calls: the checker's two would not show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch

from common import attention, attention_varlen
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
    assert _count_others(compute) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, (200, 100)])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_gradients_with_lengths_repeat_all_bits(head_dim: int, window: tuple | None) -> None:
    """Which block of b14 takes which work differs from call to call."""
    rng = torch.Generator("cuda").manual_seed(0)
    seqlens = torch.tensor([0, 1, 700, 0, 64, 3000, 129, 2048], dtype=torch.int32)
    cu_seqlens = seqlens.cumsum(0, dtype=torch.int32).cuda()
    total, heads = int(seqlens.sum()), 8

    def drawn(heads: int) -> torch.Tensor:
        size = total, heads, head_dim
        return torch.randn(size, generator=rng, device="cuda", dtype=torch.bfloat16)

    qkv = tuple(drawn(count).requires_grad_() for count in (heads, heads // 2, heads // 2))
    o = attention_varlen(*qkv, cu_seqlens, cu_seqlens, window=window, backward_step="b14")
    assert _count_others(partial(torch.autograd.grad, o, qkv, drawn(heads), retain_graph=True)) == 0


def _count_others(compute: Callable[[], Iterable[torch.Tensor]]) -> int:
    """How many outputs of CALLS calls have other bits than those of the first one."""
    expected = compute()
    others = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(CALLS):
        others += sum((a != b).any() for a, b in zip(compute(), expected, strict=True))
    return int(others.item())
