"""Generation in transformers, on caches that grow and static ones, against SDPA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import common.transformers as integration
from verify.tests import transformers_fixtures as fixtures
from verify.tests.transformers_compared import (
    STATIC,
    compare_generation,
    compare_parts,
    error,
    generate,
)
from verify.tests.transformers_models import (
    MODELS,
    MODELS_OF_GPU,
    NEW_TOKENS,
    ON_CPU,
    ON_GPU,
    TOKENS,
    WINDOW,
    WINDOWED,
    WITH_CACHE,
    WITH_LENGTHS,
    as_,
    build,
    cases,
    gemma3,
    gpt2,
    llama,
    make_inputs,
    mistral,
    padding_mask,
    ragged_batch,
    random_tokens,
    transformers,
    whisper,
)

registered, calls, packed_calls = fixtures.registered, fixtures.calls, fixtures.packed_calls


@pytest.mark.parametrize("side", ["no padding", "left"])
@pytest.mark.parametrize(("name", "device", "dtype"), cases(WITH_CACHE))
def test_generation(
    name: str, side: str, device: str, dtype: torch.dtype, calls, packed_calls
) -> None:
    if name == "whisper" and side == "left":
        pytest.skip("its decoder is given no padding")
    inputs = make_inputs(name)
    if side == "left":
        inputs["attention_mask"] = padding_mask(side)
    compare_generation((MODELS | MODELS_OF_GPU)[name], inputs, device, dtype)
    if side == "left" and dtype != torch.float32:
        assert len(packed_calls) == 2 * NEW_TOKENS
        assert not calls
    else:
        assert {q.shape[2] for q, _, _ in calls} >= {1, TOKENS}
        assert not packed_calls


@pytest.mark.parametrize(("device", "dtype"), WITH_LENGTHS)
def test_few_queries_copy_no_cache(device: str, dtype: torch.dtype, packed_calls) -> None:
    def make():
        return llama(num_attention_heads=4, num_key_value_heads=2)

    compare_generation(make, ragged_batch("left"), device, dtype)
    decoding = [(q, k) for q, k, _ in packed_calls if len(q) == 4 * 2]
    assert len(decoding) == 2 * (NEW_TOKENS - 1)
    for q, k in decoding:
        assert (q.shape[1], k.shape[1]) == (2, 1)
        assert k._is_view()


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize(("device", "dtype"), WITH_LENGTHS)
def test_generation_with_a_window(
    name: str, device: str, dtype: torch.dtype, calls, packed_calls
) -> None:
    """Sliding layers of the cache keep a window of keys, full ones all."""
    inputs = {"input_ids": random_tokens()}
    compare_generation(WINDOWED[name], inputs, device, dtype)
    sliding = {k.shape[2] for q, k, _ in calls if q.shape[2] == 1}
    full = {TOKENS + 1, TOKENS + 2} if name == "gemma3" else set()
    assert sliding == {WINDOW} | full
    assert not packed_calls
    calls.clear()
    inputs["attention_mask"] = padding_mask("left")
    compare_generation(WINDOWED[name], inputs, device, dtype)
    # What has slid out of the window is padding, too: then there is nothing to pack.
    assert len(calls) + len(packed_calls) == 2 * NEW_TOKENS
    assert {q.shape[2] for q, _, _ in calls} == {1}


@pytest.mark.parametrize(
    ("make", "device", "dtype"),
    [
        pytest.param(make, *device.values, id=f"{make.__name__}-{device.id}", marks=device.marks)
        for make, devices in ((llama, [ON_CPU, *ON_GPU]), (mistral, WITH_LENGTHS))
        for device in devices
    ],
)
def test_queries_go_on_from_a_cache(make, device: str, dtype: torch.dtype, calls) -> None:
    """Fewer queries than keys: the mask ends at the last of both, with padding and without."""
    ids = random_tokens().to(device)
    for mask in (None, padding_mask("left").to(device)):

        def second_half(attention: str, dtype: torch.dtype, mask=mask) -> Tensor:
            model = as_(build(make, device), attention, dtype)
            first = model(ids[:, :12], attention_mask=None if mask is None else mask[:, :12])
            past = first.past_key_values
            return model(ids[:, 12:], attention_mask=mask, past_key_values=past).logits.double()

        with torch.no_grad():
            exact = second_half("sdpa", torch.float64)
            ours, sdpa = second_half(integration.NAME, dtype), second_half("sdpa", dtype)
        assert error(ours, exact) <= 2 * error(sdpa, exact)
    keys = TOKENS if make is llama else TOKENS - 12 + WINDOW - 1
    assert (TOKENS - 12, keys) in {(q.shape[2], k.shape[2]) for q, k, _ in calls}


def multi_head():
    return llama(num_key_value_heads=2)


ON_STATIC_CACHE = {"llama64": llama, "multi-head": multi_head, "gpt2": gpt2, "whisper": whisper}
ON_STATIC_CACHE |= {"mistral": mistral, "gemma3": gemma3}


@pytest.mark.parametrize("side", ["no padding", "left"])
@pytest.mark.parametrize("name", ON_STATIC_CACHE)
@pytest.mark.parametrize(("device", "dtype"), WITH_LENGTHS)
def test_generation_on_a_static_cache(
    name: str, side: str, device: str, dtype: torch.dtype, calls, packed_calls
) -> None:
    """Each call for a new token is given all of the cache, however much of it is written."""
    inputs = make_inputs(name)
    if side == "left":
        if name == "whisper":
            pytest.skip("its decoder is given no padding")
        inputs["attention_mask"] = padding_mask(side)
    compare_generation(ON_STATIC_CACHE[name], inputs, device, dtype, **STATIC)
    reserved = TOKENS + NEW_TOKENS - 1
    keys = {"mistral": [WINDOW] * 2, "gemma3": [WINDOW, reserved], "whisper": [reserved, 26]}
    if side == "left":  # packed: for each head of keys, as there are fewer queries
        assert {q.shape[2] for q, _, _ in calls} <= {TOKENS}
        found = [len(k) // len(q) for q, k, _ in packed_calls if len(q) <= 3 * 2]
    else:
        assert not packed_calls
        found = [k.shape[2] for q, k, _ in calls if q.shape[2] == 1]
    assert found == keys.get(name, [reserved] * 2) * (NEW_TOKENS - 1)


@pytest.mark.parametrize("tokens", [WINDOW - 2, WINDOW - 1])
@pytest.mark.parametrize(("device", "dtype"), WITH_LENGTHS)
def test_a_static_window_that_is_not_full(
    tokens: int, device: str, dtype: torch.dtype, calls
) -> None:
    inputs = {"input_ids": random_tokens()[:, :tokens]}
    compare_generation(mistral, inputs, device, dtype, **STATIC)
    assert {k.shape[2] for q, k, _ in calls if q.shape[2] == 1} == {WINDOW}


@pytest.mark.parametrize("side", ["no padding", "left"])
@pytest.mark.parametrize(("make", "step"), [(llama, "v16"), (multi_head, "v14")])
def test_the_step_of_a_static_cache(make, step: str, side: str, chosen_steps) -> None:
    """As few_with() says: these caches are short, but heads that share keys are few queries."""
    inputs = {"input_ids": random_tokens()}
    if side == "left":
        inputs["attention_mask"] = padding_mask(side)[:1].expand(3, -1)  # no lengths in the prompt
    generate(as_(build(make), integration.NAME, torch.bfloat16), inputs, **STATIC)
    assert {name for name, with_lengths in chosen_steps if with_lengths} == {step}


@pytest.mark.parametrize("side", ["no padding", "left"])
@pytest.mark.parametrize(
    "parts", [[1] * 8, [12, 5, 3], [17, 1, 1, 1]], ids=["tokens", "several", "prompt"]
)
@pytest.mark.parametrize("make", [llama, multi_head, mistral, gemma3])
def test_parts_of_a_sequence_on_a_static_cache(make, parts: list[int], side: str) -> None:
    compare_parts(make, torch.bfloat16, parts, side)


@pytest.mark.parametrize("side", ["no padding", "left"])
def test_parts_where_no_step_takes_lengths(side: str, calls) -> None:
    """The host waits for the length, so that it can slice the keys."""
    compare_parts(llama, torch.float32, [12, 5, 3], side)
    assert {k.shape[2] for q, k, _ in calls} >= {12, 17, 20}


def static_mask(
    q_length: int,
    written: int | Tensor,
    tokens: Tensor | None = None,
    device: str = "cpu",
    **options,
) -> Tensor:
    """make_mask()'s, of new queries on a static cache with that many keys before them."""
    given = {"batch_size": 3, "q_length": q_length, "kv_length": TOKENS, "device": device}
    given |= {"mask_function": transformers.masking_utils.causal_mask_function}
    given |= {"q_offset": torch.as_tensor(written, device=device), "attention_mask": tokens}
    given |= {"allow_is_causal_skip": q_length > 1}
    return integration.make_mask(**given | options)


def test_one_query_where_no_step_takes_lengths(calls) -> None:
    """SDPA's, of the keys that are there."""
    q, k, v = (torch.randn(3, 2, n, 64) for n in (1, TOKENS, TOKENS))
    module = torch.nn.Module()
    with pytest.warns(UserWarning, match="only the GPU knows how .* fp16, not fp32"):
        found, _ = integration.attention_forward(module, q, k, v, static_mask(1, 12))
    k, v = k[:, :, :13], v[:, :, :13]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    assert not calls


def test_no_static_mask_is_read() -> None:
    """A tensor without values has none that the host could wait for."""
    for q_length in (1, 4):
        mask = static_mask(q_length, 12, device="meta")
        q, k = (torch.empty(3, 2, n, 64, device="meta").bfloat16() for n in (q_length, TOKENS))
        o, _ = integration.attention_forward(torch.nn.Module(), q, k, k, mask)
        assert o.shape == (3, q_length, 2, 64)


@pytest.mark.gpu
def test_the_host_waits_for_no_static_cache(calls) -> None:
    q, k = (torch.randn(3, 2, n, 64, device="cuda").bfloat16() for n in (1, TOKENS))
    written, module = torch.tensor(12, device="cuda"), torch.nn.Module()
    given = {"q_length": 1, "written": written, "device": "cuda"}
    integration.attention_forward(module, q, k, k, static_mask(**given))  # the kernel is loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        integration.attention_forward(module, q, k, k, static_mask(**given))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(calls) == 2


@pytest.mark.gpu
def test_no_padding_mask_is_read_while_a_graph_is_captured() -> None:
    tokens = padding_mask("left").bool().cuda()
    written = torch.tensor(TOKENS - 1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        mask = static_mask(1, written, tokens, "cuda")
    assert "while a CUDA graph is captured" in mask.reason


def test_holes_on_a_static_cache() -> None:
    """Of a prompt with padding behind it, as soon as a token follows."""
    tokens = torch.cat([padding_mask("right"), torch.ones(3, 1, dtype=torch.int64)], 1).bool()
    mask = static_mask(1, TOKENS, tokens, kv_length=TOKENS + 4)
    assert mask.reason == "a sequence's padding mask has holes"
    expected = torch.nn.functional.pad(tokens, (0, 3))[:, None, None]
    assert torch.equal(mask, expected)


def newest_hidden(mask):
    return integration.CacheMask(mask.shape, mask.stop - 1, mask.start, mask.window)


def padding_shown(mask):
    return integration.CacheMask(mask.shape, mask.stop, mask.start * 0, mask.window)


@pytest.mark.parametrize(
    ("wrong", "side"),
    [(newest_hidden, "no padding"), (newest_hidden, "left"), (padding_shown, "left")],
)
def test_a_wrong_static_mask_is_seen(wrong, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_mask(**given):
        mask = integration.make_mask(**given)
        return wrong(mask) if isinstance(mask, integration.CacheMask) else mask

    transformers.AttentionMaskInterface.register(integration.NAME, make_mask)
    with pytest.raises(AssertionError):
        compare_parts(llama, torch.bfloat16, [17, 1, 1, 1], side)
