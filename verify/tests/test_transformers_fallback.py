"""What a model in transformers has SDPA compute, with a warning, and what neither can."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import common.transformers as integration
from common import UsageError
from verify.tests import transformers_fixtures as fixtures
from verify.tests.transformers_compared import compare_logits
from verify.tests.transformers_models import (
    ON_CPU,
    TOKENS,
    as_,
    build,
    gemma2,
    llama,
    mistral,
    padding_mask,
    random_tokens,
)

registered, calls, packed_calls = fixtures.registered, fixtures.calls, fixtures.packed_calls

SHORT_WINDOW = "the window is shorter than the sequence, and"


def packed() -> dict[str, Tensor]:
    positions = torch.arange(TOKENS).remainder(12).expand(3, -1)
    return {"position_ids": positions, "use_cache": False}


def with_holes() -> dict[str, Tensor]:
    mask = padding_mask("left")
    mask[1, 5] = 0
    return {"attention_mask": mask}


def own_mask() -> dict[str, Tensor]:
    return {"attention_mask": torch.ones(3, 1, TOKENS, TOKENS, dtype=torch.bool).tril()}


@pytest.mark.parametrize(
    ("make", "dtype", "options", "reason"),
    [
        (llama, torch.float32, with_holes(), "a sequence's padding mask has holes"),
        (llama, torch.float32, packed(), "the mask is neither causal nor full"),
        (llama, torch.float32, own_mask(), "the mask is the model's own"),
        (llama, torch.float64, {}, "not torch.float64"),
        (llama, torch.float32, {"output_attentions": True}, "output_attentions"),
        (lambda: llama(20), torch.float32, {}, "8 to 1024 in multiples of 8, not 20, 20, 20"),
    ],
    ids=["holes", "packed", "own mask", "float64", "output_attentions", "head_dim"],
)
def test_what_falls_back(make, dtype: torch.dtype, options, reason: str, calls) -> None:
    """Two layers and two passes, one warning, and SDPA's own bits."""
    ids = random_tokens()
    expected = as_(build(make), "sdpa", dtype)(ids, **options).logits
    model = as_(build(make), integration.NAME, dtype)
    with pytest.warns(UserWarning, match=integration.NAME) as told:
        found = [model(ids, **options).logits for _ in range(2)]
    assert all(torch.equal(logits, expected) for logits in found)
    (warning,) = told
    assert reason in str(warning.message)
    assert not calls


def test_a_window_that_no_step_takes_falls_back(calls, packed_calls) -> None:
    """Where nothing else is amiss, packed sequences do not fall back."""
    inputs = {"input_ids": random_tokens(), "attention_mask": padding_mask("left")}
    with pytest.warns(UserWarning, match=f"{SHORT_WINDOW} no step can run.* fp16, not fp32"):
        compare_logits(mistral, inputs, *ON_CPU.values)
    assert not calls
    compare_logits(llama, inputs, *ON_CPU.values)
    assert len(calls) == 2 * 3
    assert not packed_calls


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, k, v: (q[:1], k, v), "the same batch"),
        (lambda q, k, v: (q, k.mT.contiguous().mT, v), "must be contiguous"),
        (lambda q, k, v: (q, k, v[..., :8]), r"no step can run .* bf16, fp16, not fp32"),
        (lambda q, k, v: (q, k, v[..., :4]), r"one head_dim, and v .*, not 64, 64, 4"),
    ],
    ids=["batch", "stride", "dtype for head_dim of v", "head_dim of v"],
)
def test_inputs_that_fall_back(change, reason: str, calls) -> None:
    q, k, v = change(*torch.randn(3, 2, 2, 5, 64).unbind())
    module = torch.nn.Module()
    with pytest.warns(UserWarning, match=reason):
        found, _ = integration.attention_forward(module, q, k, v, None, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    assert torch.equal(found, expected)
    assert not calls


def test_heads_so_large_that_not_every_dtype_has_a_step(calls) -> None:
    """It falls back before attention() could raise an error, and only then."""
    q, k, v = torch.randn(3, 1, 2, 5, 264, generator=torch.Generator().manual_seed(0)).unbind()
    module = torch.nn.Module()
    with pytest.warns(UserWarning, match=r"no step can run these inputs: .*bf16, fp16, not fp32"):
        in_fp32, _ = integration.attention_forward(module, q, k, v, None, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    assert torch.equal(in_fp32, expected)
    assert not calls
    half = [t.bfloat16().requires_grad_() for t in (q, k, v)]
    found, _ = integration.attention_forward(module, *half, None, is_causal=False)
    assert len(calls) == 1
    torch.testing.assert_close(found.float(), expected, atol=2**-6, rtol=2**-6)


def test_dropout_falls_back_in_training_only(calls) -> None:
    def logits(attention: str) -> Tensor:
        model = as_(build(lambda: llama(attention_dropout=0.5)), attention, torch.float32).train()
        torch.manual_seed(5)
        return model(random_tokens(), attention_mask=padding_mask("left")).logits

    with pytest.warns(
        UserWarning, match=r"there is no dropout, and the model asks for 0\.5"
    ) as told:
        assert torch.equal(logits(integration.NAME), logits("sdpa"))
    assert len(told) == 1
    assert not calls
    model = as_(build(lambda: llama(attention_dropout=0.5)), integration.NAME, torch.float32)
    model(random_tokens())
    assert len(calls) == 2


def test_what_sdpa_cannot_do_either() -> None:
    model = gemma2(50.0)
    model.set_attn_implementation(integration.NAME)
    message = (
        "the model caps its logits, as neither attention_worklog nor sdpa can: load it with "
        'attn_implementation="eager"'
    )
    with pytest.raises(UsageError) as raised:
        model(random_tokens())
    assert str(raised.value) == message
