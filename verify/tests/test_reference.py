"""The oracle against an independent formulation, torch, and what attention must satisfy."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from verify import reference
from verify.reference import attention_in_dtype, attention_reference, gradients_reference

SHAPES = [  # batch, heads, kv_heads, seq_q, seq_k, head_dim
    (1, 1, 1, 1, 1, 8),
    (2, 4, 2, 5, 7, 8),
    (1, 3, 1, 9, 4, 16),
]


def random_inputs(batch, heads, kv_heads, seq_q, seq_k, head_dim, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seq_q * 1000 + seq_k)
    shapes = (batch, heads, seq_q, head_dim), *[(batch, kv_heads, seq_k, head_dim)] * 2
    return [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]


def one_key_at_a_time(q, k, v, causal: bool, scale: float):
    """The definition on Python's floats: correctly rounded sums, no maximum, no matrices."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k = k.shape[1:3]
    o = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            keys, values = (x[b, h // (heads // kv_heads)].tolist() for x in (k, v))
            for i in range(seq_q):
                query = q[b, h, i].tolist()
                visible = [j for j in range(seq_k) if not causal or seq_k - 1 - j >= seq_q - 1 - i]
                logits = [
                    math.fsum(x * y for x, y in zip(query, keys[j], strict=True)) for j in visible
                ]
                weights = [math.exp(scale * logit) for logit in logits]
                if visible:
                    total = math.fsum(weights)
                    lse[b, h, i] = math.log(total)
                    for d in range(head_dim):
                        terms = (w * values[j][d] for w, j in zip(weights, visible, strict=True))
                        o[b, h, i, d] = math.fsum(terms) / total
    return o, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_definition(shape, causal):
    q, k, v = random_inputs(*shape)
    o, lse = attention_reference(q, k, v, causal=causal, softmax_scale=0.4)
    expected_o, expected_lse = one_key_at_a_time(q, k, v, causal, 0.4)
    torch.testing.assert_close(o, expected_o, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 2, 33, 65, 64), (1, 2, 2, 50, 50, 40)])
def test_agrees_with_torch(shape, causal):
    q, k, v = random_inputs(*shape)
    seq_q, seq_k = shape[3:5]
    o, lse = attention_reference(q, k, v, causal=causal, softmax_scale=0.2)
    bottom_right = torch.ones(seq_q, seq_k, dtype=torch.bool).tril(seq_k - seq_q)
    mask = bottom_right if causal else None
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)
    logits = 0.2 * q @ k.repeat_interleave(shape[1] // shape[2], dim=1).mT
    if causal:
        logits = torch.where(bottom_right, logits, -torch.inf)
    torch.testing.assert_close(lse, torch.logsumexp(logits, -1), rtol=1e-12, atol=1e-12)


def test_rows_that_see_no_key_are_zero():
    q, k, v = random_inputs(1, 2, 2, 7, 3, 8)
    o, lse = attention_reference(q, k, v, causal=True, softmax_scale=1.0)
    assert (o[:, :, :4] == 0).all()
    assert lse[:, :, :4].isneginf().all()
    torch.testing.assert_close(o[:, :, 4], v[:, :, 0])  # this row sees the first key alone
    assert lse[:, :, 4:].isfinite().all()


def test_chunks_do_not_change_the_result(monkeypatch):
    q, k, v = random_inputs(2, 4, 2, 23, 9, 16)
    whole = attention_reference(q, k, v, causal=True, softmax_scale=0.25)
    monkeypatch.setattr(reference, "MAX_SCORES", 4 * 9)
    in_chunks = attention_reference(q, k, v, causal=True, softmax_scale=0.25)
    for a, b in zip(whole, in_chunks, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


def test_order_of_the_keys_does_not_matter():
    q, k, v = random_inputs(2, 4, 2, 6, 11, 16)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    before = attention_reference(q, k, v, causal=False, softmax_scale=0.25)
    after = attention_reference(q, k[:, :, order], v[:, :, order], causal=False, softmax_scale=0.25)
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_shifting_all_keys_shifts_only_lse():
    """Adding c to every key adds softmax_scale * q.c to a row's logits: only lse moves, by that."""
    q, k, v = random_inputs(1, 2, 2, 6, 11, 16)
    c = torch.full((16,), 30.0, dtype=torch.float64)
    before = attention_reference(q, k, v, causal=True, softmax_scale=0.25)
    after = attention_reference(q, k + c, v, causal=True, softmax_scale=0.25)
    torch.testing.assert_close(after[0], before[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after[1], before[1] + 0.25 * q @ c, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_yardstick_errs_by_its_dtype(dtype):
    """Its error is of the size of the unit roundoff: not float32 in disguise, not garbage."""
    q, k, v = random_inputs(1, 2, 1, 40, 60, 64, dtype)
    exact, _ = attention_reference(q, k, v, causal=True, softmax_scale=0.125)
    rounded, _ = attention_in_dtype(q, k, v, causal=True, softmax_scale=0.125)
    assert rounded.dtype == dtype
    relative = ((rounded - exact).norm() / exact.norm()).item()
    assert 0.1 < relative / (torch.finfo(dtype).eps / 2) < 10


class OfTheOracles(torch.autograd.Function):
    """attention_reference's o, whose gradients are those of gradients_reference."""

    @staticmethod
    def forward(ctx, q, k, v, causal, softmax_scale):
        ctx.arguments = {"causal": causal, "softmax_scale": softmax_scale}
        o, lse = attention_reference(q, k, v, **ctx.arguments)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, dout):
        return *gradients_reference(*ctx.saved_tensors, dout, **ctx.arguments), None, None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)  # in the last one, rows see no key
def test_the_gradients_are_those_of_the_oracle(shape, causal):
    inputs = [t.requires_grad_() for t in random_inputs(*shape)]
    torch.autograd.gradcheck(OfTheOracles.apply, (*inputs, causal, 0.4))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 2, 33, 65, 64), (1, 2, 2, 50, 50, 40)])
def test_the_gradients_agree_with_torch(shape, causal):
    q, k, v = (t.requires_grad_() for t in random_inputs(*shape))
    mask = torch.ones(shape[3:5], dtype=torch.bool).tril(shape[4] - shape[3]) if causal else None
    o = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2, enable_gqa=True)
    dout = torch.randn(o.shape, generator=torch.Generator().manual_seed(0), dtype=o.dtype)
    found = torch.autograd.grad(OfTheOracles.apply(q, k, v, causal, 0.2), (q, k, v), dout)
    expected = torch.autograd.grad(o, (q, k, v), dout)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)
