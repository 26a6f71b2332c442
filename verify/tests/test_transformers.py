"""attn_implementation="attention_worklog": tiny models against SDPA, padded and with windows."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

import common.transformers as integration
from common import UsageError
from verify.tests import transformers_fixtures as fixtures
from verify.tests.transformers_compared import compare, compare_logits, error, logits_and_gradients
from verify.tests.transformers_models import (
    MODELS,
    ON_CPU,
    TOKENS,
    WINDOWED,
    WITH_LENGTHS,
    as_,
    bert,
    build,
    cases,
    llama,
    make_inputs,
    mistral,
    modernbert,
    padding_mask,
    ragged_batch,
    random_tokens,
    transformers,
)

registered, calls, packed_calls = fixtures.registered, fixtures.calls, fixtures.packed_calls


@pytest.mark.parametrize(("name", "device", "dtype"), cases(list(MODELS)))
def test_logits_and_gradients(name: str, device: str, dtype: torch.dtype, calls) -> None:
    compare(name, make_inputs(name, device), device, dtype)
    assert calls
    if name.startswith(("llama", "gemma")):
        assert {k.shape[1] for _, k, _ in calls} == {1}, "kv_heads are kept"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("name", "device", "dtype"), cases(["llama64", "bert"]))
def test_padded_batch(
    name: str, side: str, device: str, dtype: torch.dtype, calls, packed_calls
) -> None:
    inputs = {"input_ids": random_tokens(), "attention_mask": padding_mask(side)}
    compare(name, inputs, device, dtype)
    if dtype == torch.float32:  # of which no step takes lengths
        assert {k.shape[2] for _, k, _ in calls} == {TOKENS - 7, TOKENS, TOKENS - 1}
    else:
        assert packed_calls
        assert not calls


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama64", "bert", "mistral"])
@pytest.mark.parametrize(("device", "dtype"), WITH_LENGTHS)
def test_a_ragged_batch_is_one_call(
    name: str, side: str, device: str, dtype: torch.dtype, calls, packed_calls
) -> None:
    inputs = ragged_batch(side)
    assert len(set(inputs["attention_mask"].sum(-1).tolist())) == 4
    compare_logits((MODELS | WINDOWED)[name], inputs, device, dtype)
    assert len(packed_calls) == 2, "one for each layer"
    assert not calls


@pytest.mark.parametrize("name", ["llama64", "mistral"])
@pytest.mark.parametrize(("device", "dtype"), WITH_LENGTHS)
def test_gradients_of_a_ragged_batch(
    name: str, device: str, dtype: torch.dtype, calls, packed_calls
) -> None:
    compare(name, ragged_batch("left"), device, dtype)
    assert len(packed_calls) == 2, "one for each layer"
    assert not calls


@pytest.mark.gpu
def test_the_host_waits_for_no_packed_call(packed_calls) -> None:
    """Nor for the lengths to be on the GPU."""
    tokens = padding_mask("left").bool().cuda()
    causal = transformers.masking_utils.causal_mask_function
    given = {"batch_size": 3, "q_length": TOKENS, "kv_length": TOKENS, "device": "cuda"}
    q = torch.randn(3, 2, TOKENS, 64, device="cuda", dtype=torch.bfloat16)
    masks = [
        integration.make_mask(**given, mask_function=causal, attention_mask=tokens)
        for _ in range(2)
    ]
    module = torch.nn.Module()
    integration.attention_forward(module, q, q, q, masks[0])  # the kernels are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        integration.attention_forward(module, q, q, q, masks[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(packed_calls) == 2


@pytest.mark.parametrize("side", ["no padding", "left", "right"])
@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize(("device", "dtype"), WITH_LENGTHS)
def test_sliding_windows(
    name: str, side: str, device: str, dtype: torch.dtype, calls, packed_calls
) -> None:
    inputs = {"input_ids": random_tokens()}
    if side != "no padding":
        inputs["attention_mask"] = padding_mask(side)
    compare_logits(WINDOWED[name], inputs, device, dtype)
    assert (len(calls), len(packed_calls)) == ((2, 0) if side == "no padding" else (0, 2))


def test_a_wrong_window_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wider(left: int, right: int, **given):
        mask = integration.make_mask(**given)
        mask.window = (mask.window[0] + left, mask.window[1] + right)
        return mask

    for make, sides in ((mistral, (1, 0)), (mistral, (-1, 0)), (modernbert, (0, -1))):
        make_mask = partial(wider, *sides)
        transformers.AttentionMaskInterface.register(integration.NAME, make_mask)
        with pytest.raises(AssertionError):
            compare_logits(make, ragged_batch("left"), "cpu", torch.bfloat16)


def wrong_scale(q, k, v, *, causal, softmax_scale):
    return torch.ops.attention_worklog.forward(q, k, v, causal, 1.01 * softmax_scale, None)[0]


def without_the_mask(q, k, v, *, causal, softmax_scale):
    return torch.ops.attention_worklog.forward(q, k, v, False, softmax_scale, None)[0]


def wrong_head(q, k, v, *, causal, softmax_scale):
    k = k.roll(1, dims=1)
    return torch.ops.attention_worklog.forward(q, k, v, causal, softmax_scale, None)[0]


@pytest.mark.parametrize("wrong", [wrong_scale, without_the_mask, wrong_head])
def test_a_wrong_attention_is_seen(wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    def make():
        return llama(num_attention_heads=4, num_key_value_heads=2)

    monkeypatch.setitem(MODELS, "llama64", make)
    compare("llama64", make_inputs("llama64"), *ON_CPU.values)
    monkeypatch.setattr(integration, "attention", wrong)
    with pytest.raises(AssertionError):
        compare("llama64", make_inputs("llama64"), *ON_CPU.values)


def ignore(mask, **given):
    return None


def one_key_more(mask, **given):
    """Each sequence's keys begin one earlier."""
    mask.segments = tuple(
        integration.Segment(s.sequences, s.queries, slice(max(s.keys.start - 1, 0), s.keys.stop))
        for s in mask.segments
    )
    return mask


@pytest.mark.parametrize("wrong", [ignore, one_key_more])
@pytest.mark.parametrize("name", ["llama64", "bert"])
def test_a_wrong_padding_mask_is_seen(name: str, wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_mask(**given):
        return wrong(integration.make_mask(**given), **given)

    inputs = {"input_ids": random_tokens(), "attention_mask": padding_mask("left")}
    transformers.AttentionMaskInterface.register(integration.NAME, make_mask)
    with pytest.raises(AssertionError):
        compare(name, inputs, *ON_CPU.values)


def test_a_window_where_gradients_must_repeat(calls, chosen_steps, monkeypatch) -> None:
    """Then b11, which does not repeat dq, is not asked."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    compare("mistral", {"input_ids": random_tokens()}, *WITH_LENGTHS[0].values)
    assert calls
    assert ("b14", True) in chosen_steps
    assert ("b11", True) not in chosen_steps


def test_v_of_a_head_dim_of_its_own(calls) -> None:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, d, generator=rng).bfloat16() for d in (72, 72, 40))
    module = torch.nn.Module()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    found, _ = integration.attention_forward(module, q, k, v, None, is_causal=False)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, atol=2**-6, rtol=2**-6)
    for t in (q, k, v):
        t.requires_grad_()
    found, _ = integration.attention_forward(module, q, k, v, None, is_causal=False)
    assert len(calls) == 2
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    dout = torch.randn(found.shape, generator=rng).bfloat16()
    gradients = (torch.autograd.grad(o, (q, k, v), dout) for o in (found, expected))
    for gradient, other in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, other, atol=2**-5, rtol=2**-5)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    """What is computed again has the same mask: the same bits."""
    inputs = {"input_ids": random_tokens(), "attention_mask": padding_mask("left")}
    model = as_(build(llama), integration.NAME, torch.float32)
    expected = logits_and_gradients(model, inputs)
    options = {"use_reentrant": reentrant}
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    found = logits_and_gradients(model, inputs)
    assert all(map(torch.equal, found, expected))


def test_a_window_as_long_as_the_sequence_is_none(calls) -> None:
    exact, sdpa, ours = (
        as_(build(lambda: mistral(TOKENS)), attention, dtype)(random_tokens()).logits.double()
        for attention, dtype in (
            ("sdpa", torch.float64),
            ("sdpa", torch.float32),
            (integration.NAME, torch.float32),
        )
    )
    assert error(ours, exact) <= 2 * error(sdpa, exact)
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_without_tokens(dtype: torch.dtype, packed_calls) -> None:
    """SDPA gives 0 where there is no key."""
    mask = padding_mask("left")
    mask[2] = 0
    for make in (llama, bert):
        compare_logits(make, {"input_ids": random_tokens(), "attention_mask": mask}, "cpu", dtype)
        with torch.no_grad():
            model = as_(build(make), integration.NAME, dtype)
            assert model(random_tokens(), attention_mask=mask).logits.isfinite().all()
    assert len(packed_calls) == (8 if dtype == torch.bfloat16 else 0)


@pytest.mark.parametrize("version", ["4.57.6", "5.3.0"])
def test_an_old_transformers(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(UsageError) as raised:
        integration.register()
    assert str(raised.value) == (
        f"register() needs transformers 5.4 or later, not {version}: "
        "pip install 'transformers>=5.4'"
    )


def test_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError) as raised:
        integration.register()
    assert str(raised.value) == (
        "register() needs transformers, which cannot be imported (import of transformers halted; "
        "None in sys.modules): pip install 'transformers>=5.4'"
    )
