"""What a model computes, here and by SDPA, against float64: logits, gradients and generation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

import common.transformers as integration
from verify.tests.transformers_models import (
    MODELS,
    MODELS_OF_GPU,
    NEW_TOKENS,
    TOKENS,
    WINDOWED,
    as_,
    build,
    padding_mask,
    random_tokens,
    transformers,
)


def cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {key: t.to(dtype) if t.is_floating_point() else t for key, t in inputs.items()}


def logits_of_tokens(model, inputs: dict[str, Tensor]) -> Tensor:
    """Of all tokens that are no padding, in float64."""
    logits = model(**cast(inputs, model.dtype)).logits.double()
    if "attention_mask" in inputs:
        logits = logits[inputs["attention_mask"].bool()]
    return logits


def logits_and_gradients(model, inputs: dict[str, Tensor]) -> list[Tensor]:
    """logits_of_tokens(), and the parameters' gradients."""
    model.zero_grad()
    logits = logits_of_tokens(model, inputs)
    rng = torch.Generator().manual_seed(3)
    weights = torch.randn(logits.shape, generator=rng, dtype=torch.float64)
    (logits * weights.to(logits.device)).sum().backward()
    return [logits.detach()] + [
        parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None
    ]


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def assert_as_close_as_sdpa(ours: list[Tensor], sdpa: list[Tensor], exact: list[Tensor]) -> None:
    """Our logits, and our gradients together, are at most twice as far from float64's as SDPA's.

    Twice, since both round what they compute about as often, and each rounding can fall either way.
    """
    assert len(ours) == len(sdpa) == len(exact)
    for part in (slice(1), slice(1, None)):
        a, b, c = (torch.cat([t.flatten() for t in ts[part]]) for ts in (ours, sdpa, exact))
        assert error(a, c) <= 2 * error(b, c)


def compare(name: str, inputs: dict[str, Tensor], device: str, dtype: torch.dtype) -> None:
    make = (MODELS | MODELS_OF_GPU | WINDOWED)[name]
    inputs = {key: t.to(device) for key, t in inputs.items()}
    exact = logits_and_gradients(as_(build(make, device), "sdpa", torch.float64), inputs)
    sdpa = logits_and_gradients(as_(build(make, device), "sdpa", dtype), inputs)
    ours = logits_and_gradients(as_(build(make, device), integration.NAME, dtype), inputs)
    assert_as_close_as_sdpa(ours, sdpa, exact)


def compare_logits(
    make: Callable, inputs: dict[str, Tensor], device: str, dtype: torch.dtype
) -> None:
    """Likewise where no gradients are asked for."""
    inputs = {key: t.to(device) for key, t in inputs.items()}
    with torch.no_grad():
        exact = logits_of_tokens(as_(build(make, device), "sdpa", torch.float64), inputs)
        sdpa = logits_of_tokens(as_(build(make, device), "sdpa", dtype), inputs)
        ours = logits_of_tokens(as_(build(make, device), integration.NAME, dtype), inputs)
    assert error(ours, exact) <= 2 * error(sdpa, exact)


def generate(model, inputs: dict[str, Tensor], **options) -> tuple[Tensor, Tensor]:
    """Greedily, with a cache: tokens, and the logits they are chosen from, in float64."""
    result = model.generate(
        **cast(inputs, model.dtype),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return result.sequences[:, -NEW_TOKENS:], torch.stack(result.logits, 1).double()


def generation_error(model, exact, inputs: dict[str, Tensor], **options) -> tuple[Tensor, float]:
    """The tokens, and the error of their logits, where the other model is given these tokens."""
    tokens, logits = generate(model, inputs, **options)
    key = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    longer = inputs | {key: torch.cat([inputs[key], tokens], 1)}
    if "attention_mask" in inputs:
        ones = torch.ones_like(tokens)
        longer["attention_mask"] = torch.cat([inputs["attention_mask"], ones], 1)
        # generate() counts positions from a sequence's first token
        positions = longer["attention_mask"].cumsum(-1) - 1
        longer["position_ids"] = positions.clamp(min=0)
    with torch.no_grad():
        expected = exact(**cast(longer, exact.dtype)).logits[:, -NEW_TOKENS - 1 : -1]
    return tokens, error(logits, expected)


def compare_generation(
    make: Callable, inputs: dict[str, Tensor], device: str, dtype: torch.dtype, **options
) -> None:
    """generate() on a cache, as in compare_logits()."""
    inputs = {key: t.to(device) for key, t in inputs.items()}
    exact = as_(build(make, device), "sdpa", torch.float64)
    model = as_(build(make, device), "sdpa", dtype)
    expected, sdpa = generation_error(model, exact, inputs, **options)
    model = as_(build(make, device), integration.NAME, dtype)
    tokens, ours = generation_error(model, exact, inputs, **options)
    assert ours <= 2 * sdpa
    if dtype == torch.float32:
        assert torch.equal(tokens, expected)


STATIC = {"cache_implementation": "static", "disable_compile": True}


def logits_of_parts(
    make: Callable, attention: str, dtype: torch.dtype, parts: list[int], side: str, compile_=None
) -> Tensor:
    """Of all tokens that are no padding, given one part after the other, on a static cache."""
    model = as_(build(make), attention, dtype)
    cache = transformers.StaticCache(config=model.config, max_cache_len=TOKENS + 4)
    forward = compile_(model) if compile_ else model
    ids, tokens = random_tokens(), padding_mask(side).bool() if side == "left" else None
    logits = []
    for begin, end in pairwise(accumulate(parts, initial=0)):
        given = None if tokens is None else tokens[:, :end]
        with torch.no_grad():
            found = forward(ids[:, begin:end], attention_mask=given, past_key_values=cache).logits
        logits.append(found.double())
    logits = torch.cat(logits, 1)
    return logits if tokens is None else logits[tokens[:, : logits.shape[1]]]


def compare_parts(
    make: Callable, dtype: torch.dtype, parts: list[int], side: str, compile_=None
) -> None:
    exact = logits_of_parts(make, "sdpa", torch.float64, parts, side)
    sdpa = logits_of_parts(make, "sdpa", dtype, parts, side)
    ours = logits_of_parts(make, integration.NAME, dtype, parts, side, compile_)
    assert error(ours, exact) <= 2 * error(sdpa, exact)
