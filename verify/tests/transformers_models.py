"""Tiny models of transformers, their inputs, and the devices and dtypes they are tested on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

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


def padding_mask(side: str) -> Tensor:
    """[3, TOKENS]: 7 tokens of padding, none and 1."""
    mask = torch.ones(3, TOKENS, dtype=torch.int64)
    for row, padding in enumerate((7, 0, 1)):
        mask[row, slice(padding) if side == "left" else slice(TOKENS - padding, None)] = 0
    return mask


def ragged_batch(side: str) -> dict[str, Tensor]:
    """Four sequences of as many lengths."""
    mask = padding_mask(side)
    return {
        "input_ids": random_tokens(4),
        "attention_mask": torch.cat([mask, mask[:1] & mask[:1].roll(4, -1)]),
    }
