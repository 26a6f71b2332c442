"""The timer and the peers, most of it on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from common.bench.peers import Peer, _sdpa, load
from common.bench.timing import time_interleaved
from verify.reference import attention_reference


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seq_q", [64, 24])
@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_mask_ends_with_the_last_key(causal, seq_q, kv_heads):
    q, k, v = (
        torch.randn(2, heads, seq, 32, generator=torch.Generator().manual_seed(seq))
        for heads, seq in ((4, seq_q), (kv_heads, 64), (kv_heads, 64))
    )
    expected, _ = attention_reference(q, k, v, causal=causal, softmax_scale=32**-0.5)
    peer = _sdpa(SDPBackend.MATH, "math", q, k, v, causal)
    assert (peer.forward() - expected).abs().max() < 1e-5


@pytest.mark.gpu
def test_timer_tells_long_from_short():
    x = torch.randn(4096, 4096, device="cuda")
    calls = {"once": lambda: x @ x, "four times": lambda: [x @ x for _ in range(4)]}
    samples = time_interleaved(calls, rounds=5, warmup=1)
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys(calls, 5)
    assert 2 * max(samples["once"]) < min(samples["four times"])


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seq_q", [256, 96])
@pytest.mark.parametrize("causal", [False, True])
def test_peers_compute_attention(causal, seq_q, kv_heads):
    q, k, v = (
        torch.randn(2, heads, seq, 128, device="cuda", dtype=torch.bfloat16)
        for heads, seq in ((4, seq_q), (kv_heads, 256), (kv_heads, 256))
    )
    expected, _ = attention_reference(q, k, v, causal=causal, softmax_scale=128**-0.5)
    peers = load(q, k, v, causal=causal)
    assert list(peers) == ["sdpa_math", "sdpa_flash", "sdpa_cudnn", "flash_attention_3"]
    for peer in peers.values():
        if isinstance(peer, Peer):
            assert (peer.forward() - expected).abs().max() < 0.02
        else:
            assert peer  # says why it is missing
