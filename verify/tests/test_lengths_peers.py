"""The peers of packed sequences, windows and caches: what each of them is given, and computes."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import varlen

from common.bench import comparison, lengths, peers
from common.bench.peers import Peer, load_with_lengths
from common.lengths import UNLIMITED, Lengths
from common.operation import BACKWARD, FORWARD, Operation
from common.problem import Sequences
from verify.reference import attention_reference, gradients_reference, oracle_of
from verify.tests.lengths_measured import (
    BATCH,
    CACHE,
    CAUSAL,
    EQUAL,
    OPERATIONS,
    RAGGED,
    SLIDING,
    V02,
    WINDOW,
)
from verify.tests.torch_backend import TorchBackend

find_flash_attention_3 = peers._find_flash_attention_3


def expected_of(sequences: Sequences, operation: Operation = FORWARD):
    """Inputs as a cell's, its lengths, and the outputs."""
    case = lengths.case_of("tiny", sequences, operation)
    inputs = lengths.make_inputs(TorchBackend(), V02, case)
    outputs = oracle_of(operation)(*inputs, **case.arguments)
    return inputs, case.arguments["lengths"], outputs


def load(sequences: Sequences, operation: Operation = FORWARD):
    inputs, given, outputs = expected_of(sequences, operation)
    longest = (max(sequences.seqlens_q), max(sequences.seqlens_k))
    causal = sequences.causal
    return load_with_lengths(operation, inputs, given, causal=causal, longest=longest), outputs


def arguments_of(q, cu_seqlens_q, cu_seqlens_k, seqused_k, causal, window_size) -> dict:
    sides = (UNLIMITED if side == -1 else side for side in window_size)
    given = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, *sides)
    return {"causal": causal, "softmax_scale": q.shape[-1] ** -0.5, "lengths": given}


def heads_first(*tensors):
    """[total, heads, head_dim], as they lie, to [1, heads, total, head_dim]."""
    assert all(x.is_contiguous() for x in tensors)
    return [x.transpose(0, 1)[None] for x in tensors]


def packed_attention(q, k, v, *lengths_and_mask):
    """What the libraries compute, of tensors [total, heads, head_dim]."""
    arguments = arguments_of(q, *lengths_and_mask)
    o, _ = attention_reference(*heads_first(q, k, v), **arguments)
    return o[0].transpose(0, 1)


def packed_gradients(dout, q, k, v, o, lse, *lengths_and_mask):
    """Likewise, lse [heads, total]."""
    arguments = arguments_of(q, *lengths_and_mask)
    q, k, v, o, dout = heads_first(q, k, v, o, dout)
    assert lse.is_contiguous()
    found = gradients_reference(q, k, v, o, lse[None], dout, **arguments)
    return [x[0].transpose(0, 1) for x in found]


def starts_of(*tensors):
    """cu_seqlens of a batch [batch, seq, heads, head_dim]."""
    return [torch.arange(len(x) + 1, dtype=torch.int32) * x.shape[1] for x in tensors]


def starts_given(packed: dict):
    """cu_seqlens where sequences are packed."""
    longest = tuple(
        packed[f"cu_seqlens_{x}"].diff().max().item() == packed[f"max_seqlen_{x}"] for x in "qk"
    )
    assert longest == (True, True)
    assert len(packed) == 4
    return packed["cu_seqlens_q"], packed["cu_seqlens_k"]


class PackedAttention(torch.autograd.Function):
    """packed_attention() with its gradients."""

    @staticmethod
    def forward(ctx, q, k, v, *lengths_and_mask):
        heads = heads_first(q, k, v)
        o, lse = attention_reference(*heads, **arguments_of(q, *lengths_and_mask))
        o = o[0].transpose(0, 1).to(q.dtype).contiguous()
        ctx.save_for_backward(q, k, v, o, lse[0])
        ctx.lengths_and_mask = lengths_and_mask
        return o

    @staticmethod
    def backward(ctx, dout):
        q, *_ = ctx.saved_tensors
        found = packed_gradients(dout, *ctx.saved_tensors, *ctx.lengths_and_mask)
        return *(x.to(q.dtype) for x in found), *[None] * len(ctx.lengths_and_mask)


@pytest.fixture
def libraries(monkeypatch):
    """FlashAttention-3's operator and varlen_attn of some version, on the CPU."""

    def fwd(
        q,
        k,
        v,
        *,
        is_causal,
        window_size_left,
        window_size_right,
        seqused_k=None,
        num_splits=1,
        **packed,
    ):
        window = (window_size_left, window_size_right)
        assert (num_splits == 0) == (seqused_k is not None)
        if not packed:
            flat = [x.flatten(0, 1) for x in (q, k, v)]
            o = packed_attention(*flat, *starts_of(q, k), seqused_k, is_causal, window)
            return o.unflatten(0, q.shape[:2]), None
        return packed_attention(q, k, v, *starts_given(packed), seqused_k, is_causal, window), None

    def bwd(
        dout,
        q,
        k,
        v,
        o,
        lse,
        *,
        dq,
        dk,
        dv,
        is_causal,
        deterministic,
        window_size_left,
        window_size_right,
        **packed,
    ):
        window = (window_size_left, window_size_right)
        assert not deterministic
        assert lse.dtype == torch.float32
        if packed:
            mask = (*starts_given(packed), None, is_causal, window)
            found = packed_gradients(dout, q, k, v, o, lse, *mask)
        else:
            flat = [x.flatten(0, 1) for x in (dout, q, k, v, o)]
            assert lse.shape == (*q.shape[:1], q.shape[2], q.shape[1])
            mask = (*starts_of(q, k), None, is_causal, window)
            found = packed_gradients(*flat, lse.transpose(0, 1).flatten(1, 2), *mask)
        for x, gradient in zip((dq, dk, dv), found, strict=True):
            x.copy_(gradient.view(x.shape) if packed else gradient.unflatten(0, x.shape[:2]))

    def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        assert (cu_seq_q.dtype, cu_seq_k.dtype) == (torch.int32, torch.int32)
        longest = tuple(x.diff().max().item() for x in (cu_seq_q, cu_seq_k))
        assert longest == (max_q, max_k)
        return PackedAttention.apply(q, k, v, cu_seq_q, cu_seq_k, None, False, window_size)

    ops = SimpleNamespace(flash_attn_3=SimpleNamespace(fwd=fwd, bwd=bwd))
    monkeypatch.setattr(torch, "ops", ops)
    monkeypatch.setattr(peers, "_find_flash_attention_3", lambda: peers._registered_ops("fake"))
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize("sequences", [RAGGED, CAUSAL, WINDOW, SLIDING, EQUAL, BATCH, CACHE])
def test_peers_compute_the_same(libraries, sequences):
    found, (o, _) = load(sequences)
    assert list(found) == ["flash_attention_3", "varlen_attn"]
    if sequences is CACHE:
        assert found.pop("varlen_attn").endswith("'s varlen_attn has no seqused_k")
    for peer in found.values():
        assert isinstance(peer, Peer), peer
        assert comparison.difference_of(peer.call(), o) < 0.005
    assert found["flash_attention_3"].route == "fake"


@pytest.mark.parametrize("sequences", [RAGGED, CAUSAL, WINDOW, SLIDING, EQUAL, BATCH])
def test_peers_compute_the_same_gradients(libraries, sequences):
    found, gradients = load(sequences, BACKWARD)
    assert list(found) == ["flash_attention_3", "varlen_attn"]
    for peer in found.values():
        assert isinstance(peer, Peer), peer
        outputs = peer.call()
        assert [x.shape for x in outputs] == [x.shape for x in gradients]
        for x, expected in zip(outputs, gradients, strict=True):
            assert comparison.difference_of(x, expected, 64) < 0.01


@OPERATIONS
def test_missing_peers(monkeypatch, operation):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.delenv("FLASH_ATTN_3_LIB", raising=False)
    found, _ = load(RAGGED, operation)
    assert list(found) == ["flash_attention_3", "varlen_attn"]
    assert all(isinstance(peer, str) for peer in found.values()), found


def test_flash_attn_interface(monkeypatch, libraries):
    """Each kind of lengths has a function there."""
    called = []

    def function(name):
        def call(q, k, v, **options):
            called.append((name, {key for key, each in options.items() if each is not None}))
            assert options["window_size"] == (-1, 0)
            return q, None  # as versions do that return lse, too

        return call

    names = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
    module = SimpleNamespace(**{name: function(name) for name in names})
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.delenv("FLASH_ATTN_3_LIB", raising=False)
    library = find_flash_attention_3()
    always = {"causal", "window_size"}
    packed = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    for sequences, name, options in (
        (CAUSAL, "flash_attn_varlen_func", packed),
        (replace(CACHE, seqused_k=None), "flash_attn_func", set()),
        (CACHE, "flash_attn_with_kvcache", {"cache_seqlens"}),
    ):
        inputs, given, _ = expected_of(sequences)
        tensors = [x.transpose(1, 2) for x in inputs]
        with_lengths = peers._WithLengths(given, True, (9, 9))
        o = library.with_lengths(*tensors, with_lengths)
        assert o is tensors[0]
        assert called.pop() == (name, always | options)


def test_gradients_of_flash_attn_interface(monkeypatch, libraries):
    """By autograd, of the function for these lengths."""

    def flash_attn_varlen_func(q, k, v, *, causal, window_size, seqused_k, **packed):
        starts = starts_given(packed)
        return PackedAttention.apply(q, k, v, *starts, seqused_k, causal, window_size)

    module = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(peers, "_find_flash_attention_3", find_flash_attention_3)
    monkeypatch.delenv("FLASH_ATTN_3_LIB", raising=False)
    found, gradients = load(SLIDING, BACKWARD)
    peer = found["flash_attention_3"]
    assert isinstance(peer, Peer), peer
    assert peer.route == "flash_attn_interface"
    for x, expected in zip(peer.call(), gradients, strict=True):
        assert comparison.difference_of(x, expected, 64) < 0.01
