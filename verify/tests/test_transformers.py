"""attn_implementation="attention_worklog": tiny models against SDPA, and what falls back to it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

import common.transformers as integration
from common import UsageError, operator

transformers = pytest.importorskip("transformers", minversion="5.4")

VOCABULARY, TOKENS, NEW_TOKENS = 48, 20, 3
STD = 0.1  # of the weights, so that scores have a standard deviation of 1 and a mask or scale shows
SIZES = {"vocab_size": VOCABULARY, "initializer_range": STD}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA_SIZES = {"intermediate_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 1, **SIZES}

ON_CPU = pytest.param("cpu", torch.float32, id="cpu")
ON_GPU = [
    pytest.param("cuda", dtype, id=f"cuda-{name}", marks=pytest.mark.gpu)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
]
# Where there is a step for lengths and windows.
WITH_LENGTHS = [pytest.param("cpu", torch.bfloat16, id="cpu-bf16"), ON_GPU[1]]
WINDOW = 6


def llama(head_dim: int = 64, **options):
    sizes = {"hidden_size": 96, "num_attention_heads": 2, "head_dim": head_dim, **LLAMA_SIZES}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | options)))


def gemma():
    sizes = {"hidden_size": 96, "num_attention_heads": 2, "head_dim": 256, **LLAMA_SIZES}
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**sizes))


def mistral(window: int = WINDOW):
    sizes = {"hidden_size": 96, "num_attention_heads": 2, "head_dim": 64, **LLAMA_SIZES}
    config = transformers.MistralConfig(**sizes, sliding_window=window)
    return transformers.MistralForCausalLM(config)


def phi3():
    sizes = {"hidden_size": 128, "num_attention_heads": 2, **LLAMA_SIZES}
    return transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**sizes, **SPECIAL, sliding_window=WINDOW)
    )


MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


def qwen2():
    sizes = {"hidden_size": 128, "num_attention_heads": 2, **LLAMA_SIZES}
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**sizes, **MIXED, use_sliding_window=True)
    )


def gemma2(softcap: float | None = None):
    sizes = {"hidden_size": 96, "num_attention_heads": 2, "head_dim": 64, **LLAMA_SIZES}
    config = transformers.Gemma2Config(**sizes, **MIXED, attn_logit_softcapping=softcap)
    model = transformers.Gemma2ForCausalLM(config)
    model._supports_sdpa = softcap is None  # False says transformers, with one and without
    return model


def gemma3():
    sizes = {"hidden_size": 96, "num_attention_heads": 2, "head_dim": 64, **LLAMA_SIZES}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, **MIXED))


def gpt2():
    config = transformers.GPT2Config(
        n_embd=128, n_layer=2, n_head=2, n_positions=64, **SIZES, **SPECIAL
    )
    return transformers.GPT2LMHeadModel(config)


def bert():
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, **SIZES}
    return transformers.BertForMaskedLM(transformers.BertConfig(num_attention_heads=2, **sizes))


def modernbert():
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, **SIZES}
    special = SPECIAL | {"cls_token_id": 1, "sep_token_id": 2}
    layers = {"local_attention": WINDOW, "layer_types": MIXED["layer_types"]}
    return transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(num_attention_heads=2, **sizes, **special, **layers)
    )


def vit():
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    config = transformers.ViTConfig(**sizes, initializer_range=STD, num_labels=VOCABULARY)
    return transformers.ViTForImageClassification(config)


def whisper():
    layers = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    layers |= {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}
    config = transformers.WhisperConfig(
        d_model=128,
        num_mel_bins=8,
        max_source_positions=26,
        vocab_size=VOCABULARY,
        init_std=STD,
        begin_suppress_tokens=None,
        decoder_start_token_id=3,
        **SPECIAL,
        **layers,
    )
    return transformers.WhisperForConditionalGeneration(config)


# For each device what its backend can do in little time: on the CPU one head_dim.
MODELS = {"llama64": llama, "gpt2": gpt2, "bert": bert, "vit": vit, "whisper": whisper}
MODELS_OF_GPU = {"llama128": lambda: llama(128), "gemma256": gemma}
WITH_CACHE = ["llama64", "gpt2", "whisper"]
WINDOWED = {
    "mistral": mistral,
    "phi3": phi3,
    "qwen2": qwen2,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "modernbert": modernbert,
}


def cases(names: list[str]) -> list:
    """Each model on each device."""
    on_cpu = [pytest.param(name, *ON_CPU.values, id=f"{name}-cpu") for name in names]
    return on_cpu + [
        pytest.param(name, *device.values, id=f"{name}-{device.id}", marks=device.marks)
        for name in [*names, *(MODELS_OF_GPU if "llama64" in names else ())]
        for device in ON_GPU
    ]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every warning of ours is an error, unless a test expects it."""
    monkeypatch.setattr(integration, "_told", set())
    integration.register()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=integration.NAME)
        yield


def spy_on(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """q, k and v of each call of that function."""
    seen = []
    real = getattr(integration, name)

    def spy(q, k, v, *lengths, **options):
        seen.append((q, k, v))
        return real(q, k, v, *lengths, **options)

    monkeypatch.setattr(integration, name, spy)
    return seen


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    return spy_on("attention", monkeypatch)


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    return spy_on("attention_varlen", monkeypatch)


def build(make: Callable, device: str = "cpu"):
    """The model in float64, from one seed, without dropout."""
    torch.manual_seed(0)
    return make().to(device, torch.float64).eval()


def as_(model, attention: str, dtype: torch.dtype):
    model.set_attn_implementation(attention)
    return model.to(dtype)


def random_tokens(batch: int = 3) -> Tensor:
    return torch.randint(4, VOCABULARY, (batch, TOKENS), generator=torch.Generator().manual_seed(1))


def make_inputs(name: str, device: str = "cpu") -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(2)
    inputs = {"input_ids": random_tokens()}
    if name == "vit":
        inputs = {"pixel_values": torch.randn(3, 3, 16, 16, generator=rng)}
    if name == "whisper":
        features = torch.randn(3, 8, 52, generator=rng)
        inputs = {"input_features": features, "decoder_input_ids": random_tokens()}
    return {key: t.to(device) for key, t in inputs.items()}


def cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {key: t.to(dtype) if t.is_floating_point() else t for key, t in inputs.items()}


def padding_mask(side: str) -> Tensor:
    """[3, TOKENS]: 7 tokens of padding, none and 1."""
    mask = torch.ones(3, TOKENS, dtype=torch.int64)
    for row, padding in enumerate((7, 0, 1)):
        mask[row, slice(padding) if side == "left" else slice(TOKENS - padding, None)] = 0
    return mask


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


def ragged_batch(side: str) -> dict[str, Tensor]:
    """Four sequences of as many lengths."""
    mask = padding_mask(side)
    return {
        "input_ids": random_tokens(4),
        "attention_mask": torch.cat([mask, mask[:1] & mask[:1].roll(4, -1)]),
    }


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


STATIC = {"cache_implementation": "static", "disable_compile": True}
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


def test_a_window_where_gradients_must_repeat(calls, chosen_steps, monkeypatch) -> None:
    """Then b11, which does not repeat dq, is not asked."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    compare("mistral", {"input_ids": random_tokens()}, *WITH_LENGTHS[0].values)
    assert calls
    assert ("b14", True) in chosen_steps
    assert ("b11", True) not in chosen_steps


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


def in_segments(mask) -> Tensor:
    """Which keys a query sees [batch, seq_q, seq_k], by one call for each segment."""
    shown = torch.zeros(mask.shape[0], *mask.shape[2:], dtype=torch.bool)
    begin = 0
    for segment in mask.segments:
        part = shown[begin : begin + segment.sequences, segment.queries, segment.keys]
        part[:] = window_of(*part.shape[1:], *segment.limits(mask.window))
        begin += segment.sequences
    return shown


def in_lengths(mask, groups: int) -> Tensor:
    """Likewise by one call for all: [groups * batch, seq_q, seq_k]."""
    batch, _, seq_q, seq_k = mask.shape
    batch *= groups
    shown = torch.zeros(batch * seq_q, batch * seq_k, dtype=torch.bool)
    ends_q, ends_k, used = (t.tolist() for t in mask.lengths(torch.device("cpu"), groups))
    for q, k, n in zip(pairwise(ends_q), pairwise(ends_k), used, strict=True):
        part = shown[slice(*q), k[0] : k[0] + n]
        part[:] = window_of(*part.shape, *mask.window)
    blocks = shown.view(batch, seq_q, batch, seq_k)
    assert blocks.sum() == blocks.diagonal(dim1=0, dim2=2).sum()
    return blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0)


def window_of(seq_q: int, seq_k: int, left: int, right: int) -> Tensor:
    """As attention() defines it."""
    distance = torch.arange(seq_k) - (torch.arange(seq_q)[:, None] + seq_k - seq_q)
    return ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))


def mask_functions() -> dict[str, Callable]:
    known = transformers.masking_utils
    causal = {f"causal {n}": known.sliding_window_causal_mask_function(n) for n in (1, 5, 16, 20)}
    both = {f"both {n}": known.sliding_window_bidirectional_mask_function(n) for n in (0, 3, 25)}
    left = known.and_masks(known.bidirectional_mask_function, known.sliding_window_overlay(4))
    return {
        "causal": known.causal_mask_function,
        "full": known.bidirectional_mask_function,
        "left": left,
        "chunk": known.chunked_causal_mask_function(20, torch.zeros(4, dtype=torch.int64)),
        **causal,
        **both,
    }


@pytest.mark.parametrize("side", ["no padding", "left", "right"])
@pytest.mark.parametrize(
    ("q_length", "kv_length", "q_offset", "kv_offset"),
    [(20, 20, 0, 0), (1, 20, 19, 0), (4, 20, 16, 0), (1, 5, 19, 15), (4, 8, 16, 12), (9, 20, 0, 0)],
    ids=["prefill", "decode", "go on", "decode in a window", "go on in a window", "static prefill"],
)
@pytest.mark.parametrize("name", mask_functions())
def test_what_a_mask_shows(
    name: str, q_length: int, kv_length: int, q_offset: int, kv_offset: int, side: str
) -> None:
    """To all queries that are no padding, by both ways to compute it, what SDPA's mask shows."""
    tokens = ragged_batch(side)["attention_mask"].bool() if side != "no padding" else None
    options = {"batch_size": 4, "q_length": q_length, "kv_length": kv_length}
    options |= {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": tokens}
    options |= {"mask_function": mask_functions()[name]}
    expected = transformers.masking_utils.sdpa_mask(**options, allow_is_causal_skip=False)[:, 0]
    mask = integration.make_mask(**options)
    if mask is None:
        causal = (-1, 0) if "causal" in name or name == "chunk" else (-1, -1)
        assert torch.equal(expected[0], window_of(q_length, kv_length, *causal))
        return
    if not isinstance(mask, integration.SegmentMask):
        assert name.startswith(("left", "both"))
        assert q_offset + q_length != kv_offset + kv_length
        assert torch.equal(mask[:, 0], expected)
        return
    rows = slice(q_offset, q_offset + q_length)
    is_token = torch.ones(4, q_length, dtype=torch.bool) if tokens is None else tokens[:, rows]
    twice = in_lengths(mask, 2).unflatten(0, (4, 2)).unbind(1)
    for shown in (in_segments(mask), in_lengths(mask, 1), *twice):
        assert torch.equal(shown[is_token], expected[is_token])
        if mask.window == integration.FULL:
            assert torch.equal(shown, expected)
        else:
            assert not shown[~is_token].any()


@pytest.mark.parametrize("side", ["no padding", "left"])
@pytest.mark.parametrize(
    ("q_length", "kv_length", "q_offset", "kv_offset"),
    [(1, 28, 19, 0), (4, 28, 16, 0), (20, 28, 0, 0), (1, 5, 19, 15), (1, 8, 4, 0)],
    ids=["decode", "go on", "prefill", "full window", "window"],
)
@pytest.mark.parametrize("name", ["causal", "causal 5", "chunk"])
def test_what_a_static_mask_shows(
    name: str, q_length: int, kv_length: int, q_offset: int, kv_offset: int, side: str
) -> None:
    """Likewise where a tensor says how long the cache is, whatever its shape."""
    tokens = None
    if side == "left":
        tokens = ragged_batch(side)["attention_mask"].bool()[:, : q_offset + q_length]
    options = {"batch_size": 4, "q_length": q_length, "kv_length": kv_length}
    options |= {"kv_offset": kv_offset, "attention_mask": tokens}
    function = mask_functions()[name]
    if name == "chunk":
        function = transformers.masking_utils.chunked_causal_mask_function(28, torch.zeros(4).int())
    options |= {"mask_function": function, "allow_is_causal_skip": False}
    expected = transformers.masking_utils.sdpa_mask(**options, q_offset=q_offset)[:, 0]
    rows = slice(q_offset, q_offset + q_length)
    is_token = torch.ones(4, q_length, dtype=torch.bool) if tokens is None else tokens[:, rows]
    for offset in (torch.tensor(q_offset), torch.tensor([q_offset])):
        mask = integration.make_mask(**options, q_offset=offset)
        assert isinstance(mask, integration.CacheMask)
        assert {t.dtype for t in (mask.stop, mask.start) if t is not None} == {torch.int32}
        found = [mask.dense()[:, 0], integration._in_segments(mask).dense()[:, 0]]
        found.append(in_segments(integration._in_segments(mask)))
        if tokens is None:
            assert mask.start is None
            assert mask.stop.tolist() == [q_offset + q_length - kv_offset] * 4
        else:
            found += [in_lengths(mask, 1), *in_lengths(mask, 2).unflatten(0, (4, 2)).unbind(1)]
        for shown in found:
            assert torch.equal(shown[is_token], expected[is_token])


def test_a_mask_is_the_tensor_that_it_stands_for() -> None:
    """Whatever operator reads it, it has the values of SDPA's mask."""
    given = {"batch_size": 3, "q_length": TOKENS, "kv_length": TOKENS}
    given |= {"attention_mask": padding_mask("left").bool()}
    given |= {"mask_function": transformers.masking_utils.causal_mask_function}
    mask = integration.make_mask(**given)
    expected = transformers.masking_utils.sdpa_mask(**given)
    assert isinstance(mask, integration.SegmentMask)
    assert (mask.shape, mask.dtype, mask.device) == (expected.shape, torch.bool, expected.device)
    assert mask.contiguous() is mask
    for found in (mask & True, mask[:, :, :, :5].clone(), mask.float()):
        assert type(found) is Tensor
    assert torch.equal(mask, expected)
    assert torch.equal(mask[:, :, 3:, :5], expected[:, :, 3:, :5])


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
