"""The oracle against an independent formulation, torch, and what attention must satisfy."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from common.lengths import UNLIMITED, Lengths
from verify import reference
from verify.lengths import CaseLengths
from verify.reference import (
    attention_in_dtype,
    attention_reference,
    gradient_factors,
    gradient_terms,
    gradients_in_dtype,
    gradients_reference,
)

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


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_computed_one_by_one(causal):
    seqlens_q, seqlens_k = (5, 0, 3, 1, 9), (7, 4, 2, 0, 9)
    q, k, v = random_inputs(1, 4, 2, sum(seqlens_q), sum(seqlens_k), 8)
    lengths = CaseLengths(seqlens_q, seqlens_k).on("cpu")
    options = {"causal": causal, "softmax_scale": 0.4}
    o, lse = attention_reference(q, k, v, **options, lengths=lengths)
    assert (o[:, :, 8] == 0).all()  # of the sequence that has no keys
    assert lse[:, :, 8].isneginf().all()
    sequences = [x.split(seqlens_q, 2) for x in (q, o, lse)]
    sequences += [x.split(seqlens_k, 2) for x in (k, v)]
    for own_q, own_o, own_lse, own_k, own_v in zip(*sequences, strict=True):
        if own_k.shape[2] > 0:
            own = attention_reference(own_q, own_k, own_v, **options)
            assert_same((own_o, own_lse), own)


@pytest.mark.parametrize("attention", [attention_reference, attention_in_dtype])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_keys_that_are_not_there_do_no_harm(is_packed, causal, attention):
    used = (6, 0, 1)
    if is_packed:
        q, k, v = random_inputs(1, 4, 2, 9, 24, 8)
        lengths, starts = CaseLengths((3,) * 3, (8,) * 3, used), [(0, 8 * i) for i in range(3)]
    else:
        q, k, v = random_inputs(3, 4, 2, 3, 8, 8)
        lengths, starts = CaseLengths(seqused_k=used), [(i, 0) for i in range(3)]
    options = {"causal": causal, "softmax_scale": 0.4, "lengths": lengths.on("cpu")}
    expected = attention(q, k, v, **options)
    for (i, start), n in zip(starts, used, strict=True):
        k[i, :, start + n : start + 8] = v[i, :, start + n : start + 8] = torch.nan
    found = attention(q, k, v, **options)
    assert found[0].isfinite().all()
    assert all(map(torch.equal, found, expected))
    # The last query sees the last key that is there: the first batch by itself.
    first_q, first_k, first_v = q[:1, :, :3], k[:1, :, :6], v[:1, :, :6]
    own = attention(first_q, first_k, first_v, causal=causal, softmax_scale=0.4)
    assert_same([x[:1, :, :3] for x in found], own)


WINDOWS = [(0, 0), (2, 1), (0, 3), (3, UNLIMITED), (UNLIMITED, 2), (50, 60), (UNLIMITED - 1,) * 2]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(9, 9), (5, 12), (12, 5)])
def test_a_window_agrees_with_torch(seq_q, seq_k, window, causal):
    q, k, v = random_inputs(2, 4, 2, seq_q, seq_k, 16)
    left, right = window
    visible = torch.tensor(
        [
            [
                i + seq_k - seq_q - left <= j <= i + seq_k - seq_q + right
                and (not causal or j <= i + seq_k - seq_q)
                for j in range(seq_k)
            ]
            for i in range(seq_q)
        ]
    )
    lengths = Lengths(window_left=left, window_right=right)
    o, lse = attention_reference(q, k, v, causal=causal, softmax_scale=0.2, lengths=lengths)
    sees_something = visible.any(1)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(
        o[:, :, sees_something], expected[:, :, sees_something], rtol=1e-12, atol=1e-12
    )
    assert (o[:, :, ~sees_something] == 0).all()
    logits = 0.2 * q @ k.repeat_interleave(2, dim=1).mT
    masked = torch.where(visible, logits, -torch.inf)
    torch.testing.assert_close(lse, masked.logsumexp(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("left", [2, UNLIMITED])
def test_a_causal_mask_is_a_window(left):
    q, k, v = random_inputs(1, 2, 2, 7, 9, 8)
    of = [
        attention_reference(
            q,
            k,
            v,
            causal=causal,
            softmax_scale=0.4,
            lengths=Lengths(None, None, None, left, right),
        )
        for causal, right in [(True, UNLIMITED), (True, 5), (True, 0), (False, 0)]
    ]
    for o, lse in of[1:]:
        assert torch.equal(o, of[0][0])
        assert torch.equal(lse, of[0][1])


def test_chunks_do_not_change_the_result_of_packed_sequences(monkeypatch):
    q, k, v = random_inputs(1, 4, 2, 23, 19, 16)
    lengths = CaseLengths((3, 20), (10, 9), window_left=4, window_right=2).on("cpu")
    options = {"causal": False, "softmax_scale": 0.25, "lengths": lengths}
    whole = attention_reference(q, k, v, **options)
    monkeypatch.setattr(reference, "MAX_SCORES", 4 * 9)
    assert_same(attention_reference(q, k, v, **options), whole)


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


def backward_inputs(*shape: int, lengths: Lengths | None = None, **options):
    """q, k, v, o, lse, dout: o and lse by the oracle."""
    q, k, v = random_inputs(*shape)
    saved = attention_reference(q, k, v, **options, lengths=lengths)
    rng = torch.Generator().manual_seed(0)
    return q, k, v, *saved, torch.randn(q.shape, generator=rng, dtype=q.dtype)


@pytest.mark.parametrize("gradients", [gradients_reference, gradients_in_dtype])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(UNLIMITED, UNLIMITED), (2, 1)])
def test_the_gradients_of_packed_sequences_are_computed_one_by_one(window, causal, gradients):
    seqlens_q, seqlens_k = (5, 0, 3, 1, 9, 6), (7, 4, 2, 0, 9, 3)
    shape = (1, 4, 2, sum(seqlens_q), sum(seqlens_k), 8)
    lengths = CaseLengths(seqlens_q, seqlens_k, None, *window).on("cpu")
    options = {"causal": causal, "softmax_scale": 0.4}
    inputs = backward_inputs(*shape, lengths=lengths, **options)
    found = gradients(*inputs, **options, lengths=lengths)
    of_sequences = [
        x.split(seqlens, 2)
        for x, seqlens in zip(
            (*inputs, *found),
            (seqlens_q, seqlens_k, seqlens_k, *[seqlens_q] * 4, *[seqlens_k] * 2),
            strict=True,
        )
    ]
    window_alone = Lengths(window_left=window[0], window_right=window[1])
    for *own_inputs, dq, dk, dv in zip(*of_sequences, strict=True):
        if min(dq.shape[2], dk.shape[2]) == 0:  # without queries, or without keys
            assert all((x == 0).all() for x in (dq, dk, dv))
        else:
            own = gradients(*own_inputs, **options, lengths=window_alone)
            for a, b in zip((dq, dk, dv), own, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, check_dtype=False)


@pytest.mark.parametrize("gradients", [gradients_reference, gradients_in_dtype])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_gradients_of_keys_that_are_not_there_are_zero(is_packed, causal, gradients):
    used = (6, 0, 1)
    if is_packed:
        shape, lengths = (1, 4, 2, 9, 24, 8), CaseLengths((3,) * 3, (8,) * 3, used)
        starts = [(0, 8 * i) for i in range(3)]
    else:
        shape, lengths = (3, 4, 2, 3, 8, 8), CaseLengths(seqused_k=used)
        starts = [(i, 0) for i in range(3)]
    options = {"causal": causal, "softmax_scale": 0.4, "lengths": lengths.on("cpu")}
    inputs = backward_inputs(*shape, **options)
    expected = gradients(*inputs, **options)
    not_there = torch.zeros(shape[0], 2, shape[4], dtype=torch.bool)
    for (i, start), n in zip(starts, used, strict=True):
        not_there[i, :, start + n : start + 8] = True
    q, k, v, *others = inputs
    for x in (k, v):
        x[not_there] = torch.nan
    dq, dk, dv = found = gradients(q, k, v, *others, **options)
    assert all(map(torch.equal, found, expected))
    assert (dk[not_there] == 0).all()
    assert (dv[not_there] == 0).all()
    assert dq.isfinite().all()
    terms, errors = gradient_terms(q, k, v, *others, **options, p_error=1e-7, dp_error=1e-7)
    for gradient, term, error in zip(found, terms, errors, strict=True):
        assert ((gradient.abs() <= term * (1 + 1e-6) + 1e-14) & error.isfinite()).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [*WINDOWS, (UNLIMITED, UNLIMITED)])
def test_the_gradients_of_lengths_agree_with_torch(window, causal):
    """With one mask for all sequences, without the rows that see nothing: torch has NaN there."""
    lengths = CaseLengths((5, 0, 9, 2, 6), (7, 4, 12, 1, 3), (6, 4, 9, 0, 3), *window)
    options = {"causal": causal, "softmax_scale": 0.2, "lengths": lengths.on("cpu")}
    inputs = backward_inputs(1, 4, 2, 22, 27, 8, **options)
    visible = torch.zeros(22, 27, dtype=torch.bool)
    left, right = window[0], 0 if causal else window[1]
    starts_q, starts_k = (0, 5, 5, 14, 16), (0, 7, 11, 23, 24)
    for start_q, start_k, seq_q, seq_k in zip(
        starts_q, starts_k, lengths.seqlens_q, lengths.seqused_k, strict=True
    ):
        for i in range(seq_q):
            for j in range(seq_k):
                own = i + seq_k - seq_q
                visible[start_q + i, start_k + j] = own - left <= j <= own + right
    sees_something = visible.any(1)
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    rows, mask, dout = q[:, :, sees_something], visible[sees_something], inputs[5]
    o = scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=0.2, enable_gqa=True)
    expected = torch.autograd.grad(o, (q, k, v), dout[:, :, sees_something])
    found = gradients_reference(*inputs, **options)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)
    unseen = ~visible.any(0)
    assert (found[0][:, :, ~sees_something] == 0).all()
    assert all((x[:, :, unseen] == 0).all() for x in found[1:])


def test_chunks_do_not_change_the_gradients_of_packed_sequences(monkeypatch):
    lengths = CaseLengths((3, 20), (10, 9), window_left=4, window_right=2).on("cpu")
    options = {"causal": False, "softmax_scale": 0.25, "lengths": lengths}
    inputs = backward_inputs(1, 4, 2, 23, 19, 16, **options)
    whole = gradients_reference(*inputs, **options)
    monkeypatch.setattr(reference, "MAX_SCORES", 4 * 9)
    assert_same(gradients_reference(*inputs, **options), whole)


def test_gradients_are_scaled_by_sequence_and_head():
    dout, k = torch.full((1, 4, 6, 8), 1.0), torch.zeros(1, 2, 9, 8)
    dout[:, :2, :2], dout[:, 2:, :2], dout[:, :, 2:5] = 0.3, 5000.0, 0  # and 1 in the last sequence
    of_queries, of_keys = gradient_factors(
        dout, k, CaseLengths((2, 3, 1), (4, 0, 4), (3, 0, 4)).on("cpu")
    )
    of_all = 2.0**-13  # where there is no gradient, or no key
    assert of_queries[0, :, :, 0].tolist() == [
        *[[2, 2, of_all, of_all, of_all, 0.5]] * 2,
        *[[of_all, of_all, of_all, of_all, of_all, 0.5]] * 2,
    ]
    assert of_keys[0, :, :, 0].tolist() == [
        [2, 2, 2, of_all, 0.5, 0.5, 0.5, 0.5, of_all],
        [of_all] * 4 + [0.5] * 4 + [of_all],
    ]
    assert [x.tolist() for x in gradient_factors(dout, k, None)] == [[[[[of_all]]]]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_small_gradient_of_one_sequence_is_not_lost_beside_another(dtype):
    lengths = CaseLengths((30, 30), (40, 40)).on("cpu")
    options = {"causal": True, "softmax_scale": 0.125, "lengths": lengths}
    inputs = [x.to(dtype) for x in backward_inputs(1, 2, 2, 60, 80, 64, **options)]
    inputs[4] = inputs[4].float()
    small = gradients_in_dtype(*inputs, **options)
    inputs[5][:, :, 30:] *= 2**12
    inputs[5][:, :, :30] /= 2**8
    beside = gradients_in_dtype(*inputs, **options)
    for a, b, n in zip(small, beside, (30, 40, 40), strict=True):
        torch.testing.assert_close(a[:, :, :n], 2**8 * b[:, :, :n], rtol=1e-2, atol=1e-3)
