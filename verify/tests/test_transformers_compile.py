"""torch.compile of models in transformers: what is in its graphs, and how many there are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import common.transformers as integration
from common import operator
from verify.tests import transformers_fixtures as fixtures
from verify.tests.transformers_compared import STATIC, compare_parts, error, generate
from verify.tests.transformers_models import (
    as_,
    build,
    llama,
    mistral,
    padding_mask,
    random_tokens,
    transformers,
)

registered, calls, packed_calls = fixtures.registered, fixtures.calls, fixtures.packed_calls


def test_torch_compile(calls) -> None:
    """Without a mask the kernels are in the graph; a padding mask that is traced is SDPA's."""

    def make():
        return llama(num_hidden_layers=1)

    ids, mask = random_tokens(), padding_mask("left")
    expected = as_(build(make), "sdpa", torch.float32)(ids).logits
    padded = as_(build(make), "sdpa", torch.float32)(ids, attention_mask=mask).logits
    torch._dynamo.reset()
    model = as_(build(make), integration.NAME, torch.float32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    logits = compiled(ids).logits
    torch.testing.assert_close(logits, expected)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.warns(UserWarning, match="torch.compile traces it"):
        found = compiled(ids, attention_mask=mask).logits
    torch.testing.assert_close(found, padded)
    # Without a cache, what is traced is the mask of sequences that could be packed into one.
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected)
    torch._dynamo.reset()
    calls.clear()
    for layer in model.model.layers:  # the mask is made outside of what is compiled
        layer.compile(backend="aot_eager")
    found = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], padded[mask.bool()])


def test_torch_compile_of_layers_that_pack(calls, packed_calls) -> None:
    """With a mask made outside of what is compiled."""
    ids, mask = random_tokens(), padding_mask("left")
    model = as_(build(mistral), integration.NAME, torch.bfloat16)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        packed_calls.clear()
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        found = model(ids, attention_mask=mask).logits
    assert error(found.double(), expected.double()) < 0.01
    assert packed_calls
    assert not calls


def counting_backend() -> tuple[Callable, list[int]]:
    """A backend of torch.compile, and of each of its graphs how often it calls forward_lengths."""
    torch._dynamo.reset()
    calls = []
    backend = torch._dynamo.lookup_backend("aot_eager")

    def count(graph, inputs):
        targets = [node.target for node in graph.graph.nodes]
        calls.append(targets.count(operator.forward_lengths))
        return backend(graph, inputs)

    return count, calls


@pytest.mark.parametrize("parts", [[1] * 4, [12, 5, 3]], ids=["tokens", "several"])
def test_torch_compile_on_a_static_cache(parts: list[int]) -> None:
    """One graph has all tokens, but for the first, before which the cache is not allocated."""
    backend, calls = counting_backend()
    compile_ = partial(torch.compile, backend=backend, fullgraph=True)
    compare_parts(llama, torch.bfloat16, parts, "no padding", compile_)
    assert calls == [2] * 2 if parts[1] == 1 else set(calls) == {2}


@pytest.mark.parametrize(("make", "side"), [(llama, "left"), (mistral, "no padding")])
def test_what_torch_compile_cannot_know_of_a_static_mask(make, side: str, calls) -> None:
    """Padding, and a window: it cannot look into transformers' closures."""
    backend, _ = counting_backend()
    compile_ = partial(torch.compile, backend=backend, fullgraph=True)
    with pytest.warns(UserWarning, match="torch.compile traces it"):
        compare_parts(make, torch.bfloat16, [18, 1, 1], side, compile_)
    assert not calls


@pytest.mark.parametrize("side", ["no padding", "left"])
@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        pytest.param(llama, {}, 1, id="llama"),
        pytest.param(mistral, {}, 2, id="mistral"),  # as with SDPA
        pytest.param(llama, {"prefill_chunk_size": 8}, 3, id="prompt in chunks"),
    ],
)
def test_generation_with_a_compiled_model(
    make, options: dict[str, int], expected: int, side: str
) -> None:
    """As on a GPU, where generate() compiles it for a static cache: one graph has all tokens."""
    inputs = {"input_ids": random_tokens()}
    if side == "left":
        inputs["attention_mask"] = padding_mask(side)
    model = as_(build(make), integration.NAME, torch.bfloat16)
    tokens, logits = generate(model, inputs, **STATIC)
    backend, graphs = counting_backend()
    config = transformers.CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True
    options = options | {"cache_implementation": "static", "compile_config": config}
    found, found_logits = generate(model, inputs, **options)
    assert torch.equal(found, tokens)
    assert error(found_logits, logits) < 0.01
    assert graphs == [2] * expected
