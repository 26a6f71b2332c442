"""The timer and the peers, most of it on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from common.bench import peers, trial
from common.bench.attentions import forward_and_backward
from common.bench.peers import (
    Peer,
    _registered_ops,
    _sdpa,
    _sdpa_backward,
    find_differentiable,
    load,
)
from common.bench.timing import time_interleaved
from common.operation import BACKWARD, FORWARD
from verify.cases import Case, Shape
from verify.inputs import Inputs
from verify.reference import attention_reference, gradients_reference

PEERS = ["sdpa_math", "sdpa_flash", "sdpa_cudnn", "flash_attention_3"]
DETERMINISTIC = "flash_attention_3_deterministic"


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seq_q", [64, 24])
@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_mask_ends_with_the_last_key(causal, seq_q, kv_heads):
    q, k, v = (
        torch.randn(2, heads, seq, 32, generator=torch.Generator().manual_seed(seq))
        for heads, seq in ((4, seq_q), (kv_heads, 64), (kv_heads, 64))
    )
    expected, _ = attention_reference(q, k, v, causal=causal, softmax_scale=32**-0.5)
    peer = _sdpa(SDPBackend.MATH, q, k, v, causal=causal)
    assert (peer.call() - expected).abs().max() < 1e-5


def test_peers_of_many_keys_read_them_where_they_lie(monkeypatch):
    """FlashAttention-3 chooses itself into how many parts it splits them."""
    registered = RegisteredOps()
    monkeypatch.setattr(torch.ops, "flash_attn_3", registered, raising=False)
    monkeypatch.setattr(peers, "_find_flash_attention_3", lambda: _registered_ops("fake"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    q, k, v = Case("keys", Shape(2, 4, 2, 3, 64, 64), torch.float32).make("cpu")
    loaded = peers.load_splitting(q, k, v)
    assert [*loaded] == ["sdpa_cudnn", "flash_attention_3"]
    assert isinstance(loaded["sdpa_cudnn"], str)  # torch has none without a GPU
    peer = loaded["flash_attention_3"]
    expected, _ = attention_reference(q, k, v, causal=False, softmax_scale=64**-0.5)
    assert (peer.call() - expected).abs().max() < 1e-5
    assert registered.options == {"num_splits": 0}
    assert [x.data_ptr() for x in registered.taken] == [x.data_ptr() for x in (q, k, v)]


def make_backward(
    seq_q: int, kv_heads: int, device: str, dtype: torch.dtype, causal: bool
) -> tuple[Case, Inputs]:
    """A case of 64 keys in 4 query heads, and its inputs."""
    shape = Shape(2, 4, kv_heads, seq_q, 64, 64)
    case = Case("backward", shape, dtype, causal, operation=BACKWARD)
    return case, case.make(device)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seq_q", [64, 24])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_the_operation(causal, seq_q, kv_heads):
    case, inputs = make_backward(seq_q, kv_heads, "cpu", torch.float32, causal)
    peer = _sdpa_backward(SDPBackend.MATH, *inputs, causal=causal)
    for _ in range(2):  # what forward saved is kept
        for got, expected in zip(
            peer.call(), gradients_reference(*inputs, **case.arguments), strict=True
        ):
            assert (got - expected).abs().max() < 1e-4


def test_what_forward_has_saved_is_held(monkeypatch):
    """Beyond o and lse, which every peer is given."""
    _, inputs = make_backward(64, 4, "cpu", torch.float32, False)
    o, lse = inputs[3:5]
    allocated = iter([1000, 1000 + o.nbytes + lse.nbytes + 4096])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    peer = _sdpa_backward(SDPBackend.MATH, *inputs, causal=False)
    assert peer.held_bytes == 4096
    monkeypatch.setattr(trial, "peak_memory", lambda call: (call(), 100))
    oracle = gradients_reference(*inputs, causal=False, softmax_scale=64**-0.5)
    tried = trial.try_peers({"math": peer, "gone": "not installed"}, BACKWARD, oracle)
    assert list(tried) == ["math"]
    assert tried["math"].peak_memory_bytes == 4196
    assert list(tried["math"].errors) == ["dq", "dk", "dv"]


class RegisteredOps:
    """A stand-in for FlashAttention-3's operators, whose tensors are [batch, seq, heads, dim].

    Like those it takes no float32 but that of lse, where bf16 is asked of it.
    """

    def __init__(self, dtype=torch.float32):
        self.dtype = dtype

    def fwd(self, *inputs, is_causal, **options):
        self.taken, self.options = inputs, options
        assert {x.dtype for x in inputs} == {self.dtype}
        q, k, v = (x.transpose(1, 2) for x in inputs)
        o, lse = attention_reference(q, k, v, causal=is_causal, softmax_scale=q.shape[-1] ** -0.5)
        return [o.transpose(1, 2).to(self.dtype), lse.float(), torch.empty(0), torch.empty(0)]

    def bwd(self, *inputs, dq, dk, dv, is_causal, deterministic):
        self.deterministic = deterministic
        q, k, v, o, dout = (x.transpose(1, 2) for x in (*inputs[1:5], inputs[0]))
        gradients = gradients_reference(
            q, k, v, o, inputs[5], dout, causal=is_causal, softmax_scale=q.shape[-1] ** -0.5
        )
        for output, gradient in zip((dq, dk, dv), gradients, strict=True):
            output.copy_(gradient.transpose(1, 2))


@pytest.mark.parametrize("name", ["flash_attention_3", DETERMINISTIC])
def test_gradients_of_flash_attention_3_lie_as_the_operation_has_them(monkeypatch, name):
    registered = RegisteredOps()
    monkeypatch.setattr(torch.ops, "flash_attn_3", registered, raising=False)
    monkeypatch.setattr(peers, "_find_flash_attention_3", lambda: _registered_ops("fake"))
    case, inputs = make_backward(24, 2, "cpu", torch.float32, True)
    peer = peers.LOADERS[BACKWARD][name](*inputs, causal=True)
    assert (peer.route, peer.held_bytes) == ("fake", 0)
    for got, expected in zip(
        peer.call(), gradients_reference(*inputs, **case.arguments), strict=True
    ):
        assert (got - expected).abs().max() < 1e-5
    assert registered.deterministic == (name == DETERMINISTIC)


@pytest.mark.parametrize("name", ["sdpa_math", "flash_attention_3"])
def test_peers_are_differentiated_by_autograd(monkeypatch, name):
    monkeypatch.setattr(torch.ops, "flash_attn_3", RegisteredOps(), raising=False)
    monkeypatch.setattr(peers, "_find_flash_attention_3", lambda: _registered_ops("fake"))
    case, (q, k, v, *saved, dout) = make_backward(64, 2, "cpu", torch.float32, True)
    call, route = find_differentiable(name, case.shape, causal=True)
    assert route.startswith("fake" if name == "flash_attention_3" else "torch ")
    outputs = forward_and_backward(call, q, k, v, dout)
    gradients = gradients_reference(q, k, v, *saved, dout, **case.arguments)
    for got, expected in zip(outputs, (saved[0], *gradients), strict=True):
        assert got.shape == expected.shape
        assert (got - expected).abs().max() < 1e-4


def test_autocast_casts_what_flash_attention_3_gets(monkeypatch):
    """As it does for torch's SDPA; the gradients have the dtype of the inputs."""
    ops = RegisteredOps(torch.bfloat16)
    monkeypatch.setattr(torch.ops, "flash_attn_3", ops, raising=False)
    monkeypatch.setattr(peers, "_find_flash_attention_3", lambda: _registered_ops("fake"))
    case, (q, k, v, *_, dout) = make_backward(64, 2, "cpu", torch.float32, True)
    call, _ = find_differentiable("flash_attention_3", case.shape, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        o, *gradients = forward_and_backward(call, q, k, v, dout.bfloat16())
    assert o.dtype == torch.bfloat16
    assert {x.dtype for x in gradients} == {torch.float32}


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
    loaded = load(FORWARD, (q, k, v), causal=causal)
    assert list(loaded) == PEERS
    for peer in loaded.values():
        if isinstance(peer, Peer):
            assert (peer.call() - expected).abs().max() < 0.02
        else:
            assert peer  # says why it is missing


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seq_q", [1, 16])
def test_peers_of_many_keys_compute_attention(seq_q, kv_heads):
    case = Case("keys", Shape(2, 4, kv_heads, seq_q, 2048, 128), torch.bfloat16)
    inputs = case.make("cuda")
    expected, _ = attention_reference(*inputs, **case.arguments)
    for peer in peers.load_splitting(*inputs).values():
        if isinstance(peer, Peer):
            assert (peer.call() - expected).abs().max() < 0.02
        else:
            assert peer  # says why it is missing


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seq_q", [64, 24])
@pytest.mark.parametrize("causal", [False, True])
def test_peers_compute_gradients(causal, seq_q, kv_heads):
    case, inputs = make_backward(seq_q, kv_heads, "cuda", torch.bfloat16, causal)
    loaded = load(BACKWARD, inputs, causal=causal)
    assert list(loaded) == [*PEERS, DETERMINISTIC]
    oracle = gradients_reference(*inputs, **case.arguments)
    tried = trial.try_peers(loaded, BACKWARD, oracle)
    assert "sdpa_math" in tried
    for found in tried.values():
        assert list(found.errors) == ["dq", "dk", "dv"]
        assert max(found.errors.values()) < 0.1
    # The weights, at least.
    assert loaded["sdpa_math"].held_bytes >= 2 * 4 * seq_q * 64 * 2
