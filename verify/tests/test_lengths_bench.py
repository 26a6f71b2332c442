"""Packed sequences, windows and caches: cells, how they are measured, their record and table."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import varlen

from common import commands
from common.bench import comparison, lengths, peers, resumed, timing
from common.bench.peers import Peer, load_with_lengths
from common.catalog import all_steps, find_step
from common.errors import UsageError
from common.lengths import UNLIMITED, Lengths
from common.operation import BACKWARD, FORWARD, Operation
from common.problem import GROUPS, LENGTHS, LENGTHS_BACKWARD, Sequences, Shape
from common.record_schema import LENGTHS_RECORD, find_error
from common.records import read_record, write_record
from common.report import lengths_table, rows
from common.report.derived import (
    LENGTHS_FIGURES,
    fastest_peer,
    lengths_figures,
    lengths_ratios,
    padded_ratios,
)
from common.report.expressions import evaluate
from common.report.markdown import REQUIRED_TABLES, render
from common.report.record_set import RecordSet, load_record_set
from common.runtime.gpu import GpuBackend
from verify.lengths import CaseLengths
from verify.reference import attention_reference, gradients_reference, oracle_of
from verify.tests.fake_records import fake_lengths

V01, V02 = all_steps()[:2]
B01, B02 = [step for step in all_steps() if step.operation == BACKWARD][:2]
WITH_LENGTHS = {
    FORWARD: [find_step("v16"), find_step("v14")],
    BACKWARD: [find_step("b11"), find_step("b14")],
}
PADDING = {FORWARD: "v12", BACKWARD: "b10"}
# In place of the steps that a cell is measured with.
CHOSEN = {
    FORWARD: lengths.Chosen([V02], V01, V02),
    BACKWARD: lengths.Chosen([B02], B01, V02),
}
OPERATIONS = pytest.mark.parametrize("operation", [FORWARD, BACKWARD], ids=["forward", "backward"])
RAGGED = Sequences("3 of 1 to 9", (4, 1, 9), (4, 1, 9), 4, 2, 64)
CAUSAL = replace(RAGGED, causal=True)
WINDOW = replace(RAGGED, window=(2, 3))
SLIDING = replace(CAUSAL, window=(3, UNLIMITED))
EQUAL = replace(RAGGED, seqlens_q=(5, 5), seqlens_k=(7, 7))
BATCH = replace(EQUAL, packed=False, window=(2, 0))
CACHE = replace(EQUAL, packed=False, causal=True, seqused_k=(5, 7))  # of few queries
NO_END = (UNLIMITED, UNLIMITED)
find_flash_attention_3 = peers._find_flash_attention_3


# ---- cells


def test_cells():
    assert 70 <= len(LENGTHS) <= 80
    groups = [sequences.group for sequences in LENGTHS.values()]
    assert {group: groups.count(group) for group in GROUPS} == {
        "packed": 36,
        "windows": 16,
        "caches": 4,
        "decoding": 24,
    }
    for name, each in LENGTHS.items():
        assert each.dtype == "bf16"
        assert name.startswith(f"d{each.head_dim}_h{each.heads}")
        assert name.endswith("_causal") == each.causal
        assert not each.seqused_k or len(each.seqused_k) == len(each.seqlens_k)
    assert {(each.head_dim, each.heads, each.kv_heads) for each in LENGTHS.values()} == {
        (64, 32, 32),
        (128, 16, 16),
        (128, 32, 8),
        (256, 8, 8),
    }
    # Drawn anew, they would not be those that were measured.
    assert LENGTHS["d64_h32_ragged"].seqlens_q[:4] == (650, 2431, 3571, 3386)
    assert LENGTHS["d128_h16_caches_causal"].seqused_k[:3] == (6369, 7697, 4699)
    assert LENGTHS["d64_h32_decode_64_causal"].seqused_k[:3] == (2481, 2972, 2230)
    assert (
        LENGTHS["d256_h8_decode_8_causal"].seqused_k == LENGTHS["d256_h8_caches_causal"].seqused_k
    )
    assert LENGTHS["d128_h32_kv8_decode_8_of_4_causal"].shape == Shape(8, 32, 8, 4, 8192, 128)
    assert LENGTHS["d128_h32_kv8_4x4096"].shape == Shape(1, 32, 8, 16384, 16384, 128)
    assert LENGTHS["d256_h8_caches_causal"].shape == Shape(8, 8, 8, 1024, 8192, 256)
    assert LENGTHS["d64_h32_window_1023_causal"].window == (1023, UNLIMITED)
    groups = [sequences.group for sequences in LENGTHS_BACKWARD.values()]
    assert (groups.count("packed"), groups.count("windows"), len(groups)) == (36, 16, 52)
    assert all(LENGTHS[name] is each for name, each in LENGTHS_BACKWARD.items())


def count_visible(sequences: Sequences) -> int:
    left, right = sequences.window
    total = 0
    for seq_q, seq_k in zip(
        sequences.seqlens_q, sequences.seqused_k or sequences.seqlens_k, strict=True
    ):
        for i in range(seq_q):
            own = i + seq_k - seq_q
            last = own + (min(right, 0) if sequences.causal else right)
            total += sum(own - left <= j <= last for j in range(seq_k))
    return total


def test_visible_pairs():
    assert RAGGED.visible == 16 + 1 + 81
    assert CAUSAL.visible == 10 + 1 + 45
    assert LENGTHS["d128_h16_1x16384_causal"].visible == 16384 * 16385 // 2
    assert WINDOW.flops(2) == 4 * 4 * 64 * WINDOW.visible
    assert WINDOW.flops(5) == 2.5 * WINDOW.flops(2)
    for each in (WINDOW, SLIDING, EQUAL, BATCH, CACHE):
        assert each.visible == count_visible(each)
    rng = random.Random(0)
    for _ in range(300):
        seqlens_q, seqlens_k = (tuple(rng.randint(0, 9) for _ in range(3)) for _ in range(2))
        window = tuple(rng.choice((UNLIMITED, 0, 1, 4, 20)) for _ in range(2))
        causal = rng.random() < 0.5
        each = Sequences("", seqlens_q, seqlens_k, 1, 1, 64, causal=causal, window=window)
        assert each.visible == count_visible(each), each


def test_what_a_record_says_of_sequences():
    assert SLIDING.as_record() == {
        "title": "3 of 1 to 9",
        "group": "windows",
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "causal": True,
        "packed": True,
        "visible": SLIDING.visible,
        "window": [3, None],
        "sequences": 3,
        "are_equal": False,
        "queries": 14,
        "keys": 14,
        "most_queries": 9,
        "most_keys": 9,
    }
    of_cache = CACHE.as_record()
    assert (of_cache["group"], of_cache["keys"], of_cache["most_keys"]) == ("decoding", 12, 7)


def test_cases():
    case = lengths.case_of("ragged", SLIDING)
    assert case.shape == Shape(1, 4, 2, 14, 14, 64)
    assert case.lengths == CaseLengths((4, 1, 9), (4, 1, 9), None, 3, UNLIMITED)
    case = lengths.case_of("cache", CACHE, BACKWARD)
    assert (case.operation, case.shape, case.causal) == (BACKWARD, Shape(2, 4, 2, 5, 7, 64), True)
    assert case.lengths == CaseLengths(None, None, (5, 7), *NO_END)


@OPERATIONS
def test_steps(operation):
    chosen = lengths.chosen_steps(all_steps(), operation)
    assert chosen.steps == WITH_LENGTHS[operation]
    assert chosen.padding.name == PADDING[operation]
    assert chosen.saving.name == "v14"


def test_no_steps():
    told = "nothing to measure: there is no forward step that takes lengths"
    with pytest.raises(UsageError, match=told):
        lengths.chosen_steps([V01], FORWARD)
    told = r"there is no forward step that attention\(\) takes without"
    with pytest.raises(UsageError, match=told):
        lengths.chosen_steps(WITH_LENGTHS[FORWARD], FORWARD)
    with pytest.raises(UsageError, match="there is no backward step that takes lengths"):
        lengths.chosen_steps([B01, *WITH_LENGTHS[FORWARD]], BACKWARD)
    with pytest.raises(UsageError, match="there is no forward step that takes lengths"):
        lengths.chosen_steps([B01, *WITH_LENGTHS[BACKWARD]], BACKWARD)


# ---- peers


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


def test_difference_of_rows():
    """As many rows of a head as are told are compared as one; the last ones may be fewer."""
    expected = torch.ones(2, 3, 70, 16)
    other = expected.clone()
    other[1, 2, 4, 0] += 2.0
    assert comparison.difference_of(other, expected) == pytest.approx(0.5)
    assert comparison.difference_of(other, expected, 64) == pytest.approx(0.5 / 8)
    other[0, 0, 69, 0] += 2.0
    assert comparison.difference_of(other, expected, 64) == pytest.approx(0.5 / 6**0.5)
    assert comparison.difference_of(expected, expected, 64) == 0.0


# ---- measuring


class TorchBackend:
    """A stand-in for the GPU: what a step adds to the last row of an output of the reference, by
    default the first one.
    """

    device = torch.device("cpu")

    def __init__(self, output: int = 0, **errors: float) -> None:
        self.output, self.errors = output, errors

    def launch(self, step, *tensors, **arguments):
        inputs = tensors[: len(step.operation.inputs)]
        outputs = tensors[len(inputs) :]
        pairs = zip(step.operation.operands, tensors, strict=True)
        assert all(operand.strided or tensor.is_contiguous() for operand, tensor in pairs)
        computed = oracle_of(step.operation)(*inputs, **arguments)
        for output, found in zip(outputs, computed, strict=True):
            output.copy_(found)
        if step.name in self.errors:
            outputs[self.output][-1, -1, -1] += self.errors[step.name]

    def refusal(self, step, spec):
        return None


@pytest.fixture
def timed(monkeypatch) -> list[dict]:
    """Every call takes 100 ms, varlen_attn 200; FlashAttention-3 is there where it is to be."""
    calls_timed = []

    def load_with_lengths(operation, inputs, given, *, causal, longest):
        scale = inputs[0].shape[-1] ** -0.5
        arguments = {"causal": causal, "softmax_scale": scale, "lengths": given}
        outputs = oracle_of(operation)(*inputs, **arguments)
        found = outputs[0] if operation == FORWARD else outputs
        return {"flash_attention_3": "no such shape", "varlen_attn": Peer(lambda: found, "fake")}

    def time_interleaved(calls, *, rounds, warmup, sleep_cycles):
        calls_timed.append({"names": list(calls), "rounds": rounds, "warmup": warmup})
        return {name: [200.0 if name == "varlen_attn" else 100.0] * rounds for name in calls}

    monkeypatch.setattr(lengths, "load_with_lengths", load_with_lengths)
    monkeypatch.setattr(timing, "device_state", lambda: "not collected")
    monkeypatch.setattr(timing, "time_interleaved", time_interleaved)
    return calls_timed


def measure(
    sequences: Sequences, operation: Operation = FORWARD, output: int = 0, **errors: float
) -> dict:
    case = lengths.case_of("tiny", sequences, operation)
    backend = TorchBackend(output, **errors)
    return lengths.measure_cell(backend, CHOSEN[operation], case, sequences)


def with_cell(cell: dict) -> dict:
    return fake_lengths(V02, V01) | {"cells": [cell]}


@OPERATIONS
def test_inputs(operation):
    case = lengths.case_of("tiny", CAUSAL, operation)
    inputs = lengths.make_inputs(TorchBackend(), V02, case)
    assert len(inputs) == len(operation.inputs)
    for operand, x in zip(operation.inputs, inputs, strict=True):
        assert (x.transpose(1, 2) if operand.strided else x).is_contiguous()
        assert x.dtype == (torch.bfloat16 if operand.strided else torch.float32)
    if operation == BACKWARD:
        saved = attention_reference(*inputs[:3], **case.arguments)
        for x, expected in zip(inputs[3:5], saved, strict=True):
            torch.testing.assert_close(x, expected.to(x.dtype))
        assert not torch.equal(inputs[5], inputs[0])


def test_measured_cell(timed):
    cell = measure(CAUSAL)
    assert find_error(with_cell(cell), LENGTHS_RECORD) is None
    assert (cell["name"], cell["title"], cell["group"]) == ("tiny", "3 of 1 to 9", "packed")
    attentions = cell["attentions"]
    assert list(attentions) == ["v02", "flash_attention_3", "varlen_attn", "padded_v01"]
    assert attentions["flash_attention_3"] == {"missing": "no such shape"}
    ours = attentions["v02"]
    assert ours["tflops"] == pytest.approx(CAUSAL.flops(2) / 100e-3 / 1e12)
    assert (ours["time_ms"], ours["difference"]) == (100.0, 0.0)
    assert 0 <= attentions["padded_v01"]["difference"] < 0.01
    assert cell["routes"] == {"varlen_attn": "fake"}
    assert cell["slow"] == ["varlen_attn"]
    fast = ["v02", "padded_v01"]
    assert timed == [
        {"names": [*fast[:1], "varlen_attn", *fast[1:]], "rounds": 3, "warmup": 0},
        {"names": fast, "rounds": 10, "warmup": 3},
        {"names": ["varlen_attn"], "rounds": 10, "warmup": 3},
    ]


def test_measured_cell_of_backward(timed):
    cell = measure(CAUSAL, BACKWARD)
    record = fake_lengths(B02, B01) | {"cells": [cell]}
    assert find_error(record, LENGTHS_RECORD) is None
    attentions = cell["attentions"]
    assert list(attentions) == ["b02", "flash_attention_3", "varlen_attn", "padded_b01"]
    ours = attentions["b02"]
    assert ours["tflops"] == pytest.approx(CAUSAL.flops(5) / 100e-3 / 1e12)
    assert (ours["time_ms"], ours["difference"]) == (100.0, 0.0)
    assert 0 < attentions["varlen_attn"]["difference"] < 0.01  # it has not been rounded to bf16
    assert 0 <= attentions["padded_b01"]["difference"] < 0.01
    assert cell["slow"] == ["varlen_attn"]


@pytest.mark.parametrize(
    ("sequences", "padded"),
    [(RAGGED, False), (EQUAL, True), (SLIDING, False), (BATCH, False)],
)
def test_padding_of_backward(timed, sequences, padded):
    attentions = measure(sequences, BACKWARD)["attentions"]
    assert ("padded_b01" in attentions) == padded
    assert "padded_b01" not in attentions or attentions["padded_b01"]["difference"] < 0.01


@pytest.mark.parametrize(
    ("sequences", "padded"),
    [(RAGGED, False), (EQUAL, True), (SLIDING, False), (BATCH, False), (CACHE, False)],
)
def test_padding_is_measured_where_it_changes_nothing(timed, sequences, padded):
    cell = measure(sequences)
    assert find_error(with_cell(cell), LENGTHS_RECORD) is None
    assert ("padded_v01" in cell["attentions"]) == padded
    assert "padded_v01" not in cell["attentions"] or (
        cell["attentions"]["padded_v01"]["difference"] < 0.01
    )


def test_a_batch_that_is_too_large_is_not_padded(timed, monkeypatch):
    bytes_padded = 2 * 3 * 9 * 64 * (2 * 4 + 2 * 2)
    monkeypatch.setattr(lengths, "MOST_PADDED_BYTES", bytes_padded)
    assert "missing" not in measure(CAUSAL)["attentions"]["padded_v01"]
    monkeypatch.setattr(lengths, "MOST_PADDED_BYTES", bytes_padded - 1)
    missing = measure(CAUSAL)["attentions"]["padded_v01"]
    assert missing == {"missing": "the padded batch takes 0 GB"}
    # o, dout and three gradients more.
    monkeypatch.setattr(lengths, "MOST_PADDED_BYTES", 2 * bytes_padded)
    assert "missing" not in measure(CAUSAL, BACKWARD)["attentions"]["padded_b01"]
    monkeypatch.setattr(lengths, "MOST_PADDED_BYTES", 2 * bytes_padded - 1)
    assert "missing" in measure(CAUSAL, BACKWARD)["attentions"]["padded_b01"]


def test_steps_that_take_other_head_dims_are_left_out(timed, monkeypatch):
    """And so is the padded batch, where the step for it does not take the cell's."""
    narrow = replace(V02.limits, highest_head_dim=32)
    steps = [replace(V02, limits=narrow), replace(V02, name="v03")]
    monkeypatch.setitem(CHOSEN, FORWARD, lengths.Chosen(steps, replace(V01, limits=narrow), V02))
    attentions = measure(CAUSAL)["attentions"]
    assert list(attentions) == ["v03", "flash_attention_3", "varlen_attn", "padded_v01"]
    told = "takes head_dim 8 to 32 in multiples of 8, not 64"
    assert attentions["padded_v01"] == {"missing": told}


@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_who_disagrees_with_the_others(timed, error):
    with pytest.raises(UsageError, match=r"v02 agrees with nobody on tiny: .*; varlen_attn: a row"):
        measure(CAUSAL, v02=error)
    cell = measure(CAUSAL, v01=error)
    assert cell["attentions"]["padded_v01"]["missing"].startswith("a row of its o differs by ")


@pytest.mark.parametrize("error", [1.0, float("nan")])
@pytest.mark.parametrize(("output", "name"), [(0, "dq"), (1, "dk"), (2, "dv")])
def test_who_disagrees_in_a_gradient(timed, output, name, error):
    told = rf"b02 agrees with nobody on tiny: .*; varlen_attn: a part of its {name} differs by "
    with pytest.raises(UsageError, match=told):
        measure(CAUSAL, BACKWARD, output, b02=error)
    # The last row of the padded batch is one of the longest sequence's.
    missing = measure(CAUSAL, BACKWARD, output, b01=error)["attentions"]["padded_b01"]["missing"]
    assert missing.startswith(f"a part of its {name} differs by ")


def test_a_lone_step_is_not_believed(timed, monkeypatch):
    nobody = dict.fromkeys(("flash_attention_3", "varlen_attn"), "not installed")
    monkeypatch.setattr(lengths, "load_with_lengths", lambda *_, **__: nobody)
    assert "missing" not in measure(CAUSAL)["attentions"]["padded_v01"]
    with pytest.raises(UsageError, match="v02 agrees with nobody on tiny: flash_attention_3: not"):
        measure(SLIDING)


NAMES = list(LENGTHS)[:3]


@pytest.fixture
def measure_all(monkeypatch, tmp_path):
    """Measures three fake cells into tmp_path, as far as told; returns which were measured."""
    fake = fake_lengths(V02, V01)
    some = {name: LENGTHS[name] for name in NAMES}
    monkeypatch.setattr(lengths, "CELLS", dict.fromkeys((FORWARD, BACKWARD), some))
    monkeypatch.setattr(lengths, "GpuBackend", TorchBackend)
    monkeypatch.setattr(lengths, "build_all", lambda *_: None)
    monkeypatch.setattr(lengths, "versions", lambda: {"device": "NVIDIA H200"})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(resumed, "SAVE_SECONDS", -1.0)
    monkeypatch.setattr(resumed, "PROFILES_DIR", tmp_path / "profiles")
    monkeypatch.setattr(resumed, "BUILD_DIR", tmp_path / "build")

    def run(until: int = 3, operation: Operation = FORWARD) -> list[str]:
        measured = []

        def measure_cell(backend, chosen, case, sequences):
            if len(measured) == until:
                raise KeyboardInterrupt
            assert sequences is LENGTHS[case.name]
            assert case.operation == operation
            measured.append(case.name)
            return fake["cells"][0] | {"name": case.name}

        monkeypatch.setattr(lengths, "measure_cell", measure_cell)
        if until < 3:
            with pytest.raises(KeyboardInterrupt):
                lengths.measure_lengths(operation)
        else:
            path = tmp_path / "profiles/h200" / f"lengths{operation.suffix}.json"
            assert lengths.measure_lengths(operation) == path
        return measured

    return run


@OPERATIONS
def test_record(measure_all, tmp_path, capsys, operation):
    assert measure_all(2, operation) == NAMES[:2]
    path = tmp_path / "profiles/h200" / f"lengths{operation.suffix}.json"
    assert not path.exists()
    assert measure_all(3, operation) == NAMES[2:]
    assert "going on after 2 of 3 cells" in capsys.readouterr().err
    record = read_record(path, LENGTHS_RECORD)
    assert [cell["name"] for cell in record["cells"]] == NAMES
    names = [step.name for step in WITH_LENGTHS[operation]]
    assert list(record["sources"]) == [*names, PADDING[operation]]
    assert record["dtype"] == "bf16"


@OPERATIONS
def test_a_step_that_does_not_run_here_is_one_clear_line(measure_all, monkeypatch, operation):
    told = "takes compute capability 9.0"
    monkeypatch.setattr(TorchBackend, "refusal", lambda *_: told)
    with pytest.raises(UsageError, match=rf"{WITH_LENGTHS[operation][0].name} {told}"):
        lengths.measure_lengths(operation)


def test_command(monkeypatch, tmp_path, capsys):
    """Both operations are measured, and their tables shown."""
    fakes = {FORWARD: fake_lengths(V02, V01), BACKWARD: fake_lengths(B02, B01)}

    def measure_lengths(operation):
        path = tmp_path / "profiles/h200" / f"lengths{operation.suffix}.json"
        write_record(path, fakes[operation])
        return path

    monkeypatch.setattr(lengths, "measure_lengths", measure_lengths)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    monkeypatch.setattr(commands, "_require_gpu", lambda: None)
    monkeypatch.setattr(commands, "_report_regenerated", lambda: None)
    assert commands.bench_lengths() == 0
    out = capsys.readouterr().out
    told = (
        "recorded profiles/h200/lengths.json",
        "TFLOP/s of v02 / ",
        "recorded profiles/h200/lengths_backward.json",
        "TFLOP/s of b02 / ",
    )
    places = [out.index(each) for each in told]
    assert places == sorted(places)


# ---- the record and its table


def load_fake(project: Path, **changes) -> RecordSet:
    """The record set of a project with such a record of v02 and v01, changed as told, and
    one of b02 and b01.
    """
    folder = project / "profiles" / "h200"
    write_record(folder / "lengths.json", fake_lengths(V02, V01) | changes)
    write_record(folder / "lengths_backward.json", fake_lengths(B02, B01))
    return load_record_set(folder, project)


@pytest.fixture
def record_set(tmp_path):
    """load_fake(), for one test."""
    return partial(load_fake, tmp_path)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory) -> RecordSet:
    """What load_fake() gives, for tests that only look at it."""
    return load_fake(tmp_path_factory.mktemp("project"))


def test_the_fake_records_are_some():
    for steps in ((V02, V01), (B02, B01)):
        assert find_error(fake_lengths(*steps), LENGTHS_RECORD) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"group": "none"},
        {"window": [1]},
        {"window": [-1, None]},
        {"visible": 0},
        {"slow": "v02"},
        {"attentions": {"v02": {}}},
    ],
)
def test_malformed_cells(changes):
    record = fake_lengths(V02, V01)
    record["cells"][0] |= changes
    assert find_error(record, LENGTHS_RECORD).startswith("the record: cells cannot be ")


def test_ratios():
    record = fake_lengths(V02, V01)
    ratios = lengths_ratios(record)
    assert len(ratios) == len(LENGTHS) - 1
    assert {ratios[name] for name in ("d64_h32_ragged", "d256_h8_4x4096_causal")} == {2.0}
    assert ratios["d128_h16_ragged_window_511_causal"] == 1.5
    assert ratios["d128_h32_kv8_caches_causal"] == 0.8
    assert {*lengths_ratios(record, "varlen_attn").values()} == {4.0}
    assert {*padded_ratios(record, equal=False).values()} == {3.0}
    assert {*padded_ratios(record, equal=True).values()} == {1.25}
    assert "d64_h32_one_long_causal" not in padded_ratios(record, equal=False)
    cell = record["cells"][0]
    assert fastest_peer(cell, record["sources"]) == "flash_attention_3"
    del cell["attentions"]["flash_attention_3"]
    assert fastest_peer(cell, record["sources"]) == "varlen_attn"
    del cell["attentions"]["varlen_attn"]
    assert fastest_peer(cell, record["sources"]) is None
    assert cell["name"] not in lengths_ratios(record)


def test_figures():
    record = fake_lengths(V02, V01)
    figures = lengths_figures(record)
    assert list(figures) == list(LENGTHS_FIGURES)
    assert figures == {
        "cells": 79,
        "mean": pytest.approx((2**35 * 1.5**16 * 0.8**4 * 1.2**24) ** (1 / 79)),
        "smallest": 0.8,
        "smallest_cell": "d64_h32_caches_causal",
        "slower": 4,
        "packed_cells": 35,
        "packed_mean": pytest.approx(2.0),
        "packed_smallest": 2.0,
        "packed_smallest_cell": "d64_h32_4x4096",
        "packed_slower": 0,
        "windows_cells": 16,
        "windows_mean": pytest.approx(1.5),
        "windows_smallest": 1.5,
        "windows_smallest_cell": "d64_h32_window_127_causal",
        "windows_slower": 0,
        "caches_cells": 4,
        "caches_mean": pytest.approx(0.8),
        "caches_smallest": 0.8,
        "caches_smallest_cell": "d64_h32_caches_causal",
        "caches_slower": 4,
        "decoding_cells": 24,
        "decoding_mean": pytest.approx(1.2),
        "decoding_smallest": pytest.approx(1.2),
        "decoding_smallest_cell": "d64_h32_decode_64_causal",
        "decoding_slower": 0,
        "over_padded": pytest.approx(3.0),
        "over_padded_equal": pytest.approx(1.25),
    }
    for cell in record["cells"]:
        cell["attentions"] = {"v02": cell["attentions"]["v02"]}
    backward = lengths_figures(fake_lengths(B02, B01))
    assert list(backward) == list(LENGTHS_FIGURES)
    assert (backward["cells"], backward["packed_cells"], backward["windows_cells"]) == (51, 35, 16)
    assert backward["mean"] == pytest.approx((2**35 * 1.5**16) ** (1 / 51))
    assert (backward["caches_cells"], backward["caches_mean"]) == (0, None)
    assert backward["over_padded"] == pytest.approx(3.0)
    alone = lengths_figures(record)
    assert (alone["cells"], alone["mean"], alone["windows_smallest"]) == (0, None, None)
    assert alone["over_padded"] is None


def test_rows(record_set):
    found = rows.lengths(record_set())
    assert len(found) == 24
    row = next(row for row in found if row["window"] == [1023, None])
    assert (row["causal"], row["group"]) == (True, "windows")
    by_heads = row["by_heads"]
    assert list(by_heads) == [
        "head_dim 64, 32 heads",
        "head_dim 128, 16 heads",
        "head_dim 128, 32/8 heads",
        "head_dim 256, 8 heads",
    ]
    flops = LENGTHS["d128_h16_window_1023_causal"].flops(2)
    assert by_heads["head_dim 128, 16 heads"] == {
        "step": pytest.approx(flops / 1e9),
        "peer": pytest.approx(flops / 1.5e9),
        "name": "flash_attention_3",
        "ratio": 1.5,
    }


def test_rows_of_backward(record_set):
    found = rows.lengths(record_set(), BACKWARD)
    assert len(found) == 17
    row = next(row for row in found if row["window"] == [1023, None])
    assert list(row["by_heads"]) == [
        "head_dim 64, 32 heads",
        "head_dim 128, 16 heads",
        "head_dim 128, 32/8 heads",
        "head_dim 256, 8 heads",
    ]
    rate = row["by_heads"]["head_dim 128, 16 heads"]["step"]
    assert rate == pytest.approx(LENGTHS["d128_h16_window_1023_causal"].flops(5) / 1e9)


def test_table_of_backward(record_set):
    lines = lengths_table.lengths(record_set(), BACKWARD).splitlines()
    assert lines[0].endswith("| head_dim 128, 32/8 heads | head_dim 256, 8 heads |")
    assert lines[2].startswith("| 4 of 4096 | none | 1374 / 687, **2.000 ×** | ")
    caption = lines[-1]
    for told in (
        "TFLOP/s of b02 / of the fastest peer, ",
        "whoever computes more. FLOPs are 2.5 times forward's. b02 over the fastest peer: ",
        "; packed: geometric mean of 35 cells 2.000 ×, ",
        "; with windows: geometric mean of 16 cells 1.500 ×, ",
        ". b02 over b01 of a batch of the packed ",
        "; q, k, v and dout normally distributed",
        ". All read q, k, v, o and dout where they lie: ",
    ):
        assert told in caption
    assert "on caches" not in caption


def test_table(record_set):
    lines = lengths_table.lengths(record_set()).splitlines()
    assert lines[0] == (
        "| Sequences | Mask | head_dim 64, 32 heads | head_dim 128, 16 heads | "
        "head_dim 128, 32/8 heads | head_dim 256, 8 heads |"
    )
    assert lines[2] == (
        "| 4 of 4096 | none | 550 / 275, **2.000 ×** | 550 / 275, **2.000 ×** | "
        "1100 / 550, **2.000 ×** | 550 / 275, **2.000 ×** |"
    )
    firsts = [" | ".join(line.split(" | ")[:2]) for line in lines[2:26]]
    assert firsts[1] == "| 4 of 4096 | causal"
    assert "| 1000 of 1 to 100 | causal" in firsts
    assert firsts[12:] == [
        "| a batch of 1 of 16384 | causal, 127 before",
        "| a batch of 1 of 16384 | causal, 1023 before",
        "| a batch of 1 of 16384 | causal, 4095 before",
        "| a batch of 4 of 4096 | 256 before, 256 after",
        "| 16 of 100 to 4000 | causal, 511 before",
        "| a batch of 8 of 1024, on 1024 to 8192 keys | causal",
        "| a batch of 64 of 1, on 100 to 4096 keys | causal",
        "| a batch of 8 of 1, on 1024 to 8192 keys | causal",
        "| a batch of 8 of 4, on 1024 to 8192 keys | causal",
        "| a batch of 1 of 1, on 40000 of 131072 keys | causal",
        "| a batch of 1 of 16, on 16000 of 16384 keys | causal",
        "| a batch of 8 of 1, on 1024 to 8192 keys | causal, 1023 before",
    ]
    assert lines[19].endswith("405 / 507, 0.800 × |")
    one_long = next(line for line in lines if "| 1 of 30000" in line)
    assert one_long.endswith("×** |  |")  # the cell that was skipped
    caption = lines[-1]
    for told in (
        "TFLOP/s of v02 / of the fastest peer, ",
        "v02 over the fastest peer: geometric mean of 79 cells 1.542 ×, smallest 0.800 × (d64_h32_",
        "; packed: geometric mean of 35 cells 2.000 ×, ",
        "; with windows: geometric mean of 16 cells 1.500 ×, ",
        "; on caches: geometric mean of 4 cells 0.800 ×, ",
        "; of up to 16 queries: geometric mean of 24 cells 1.200 ×, ",
        ". That is flash_attention_3 in 79 cells. v02 over v01 of a batch of the packed ",
        "hides the padding: geometric mean of 8 cells 3.000 ×, ",
        "there is no padding: geometric mean of 12 cells 1.250 ×, ",
        "NVIDIA H200, bf16; q, k and v normally distributed",
        "Peers: flash_attention_3: fake. Median of 3 interleaved rounds per cell, L2 flushed",
        "Missing: padded_v01 in 4 of 79 cells: the padded batch takes 15 GB; varlen_attn in 28 of ",
        "1 cells do not fit into the device's memory. Before and after: SM clock 1000 → 1000",
    ):
        assert told in caption


def test_what_is_missing_in_a_table(record_set):
    record = fake_lengths(V02, V01)
    first, second, *_ = cells = record["cells"][:2]
    for name in ("flash_attention_3", "varlen_attn", "padded_v01"):
        first["attentions"][name] = {"missing": "not installed"}
    second["attentions"]["v02"] = {"missing": "it disagrees"}
    table = lengths_table.lengths(record_set(cells=cells, skipped={}))
    lines = table.splitlines()
    assert lines[2] == "| 4 of 4096 | none | 550 / missing |"
    assert lines[3] == "| 4 of 4096 | causal | missing / 137 |"
    assert "over the fastest peer: not measured. That is flash_attention_3 in 1 cells. " in table
    del cells[1]
    assert ". That is missing. " in lengths_table.lengths(record_set(cells=cells))


def test_tables_without_numbers(record_set, tmp_path):
    nothing = load_record_set(tmp_path / "profiles/h100", tmp_path)
    assert lengths_table.lengths(nothing) == "not measured"
    sources = {name: {"code_sha256": "0" * 64} for name in ("v02", "v01")}
    assert lengths_table.lengths(nothing, BACKWARD) == "not measured"
    changed = record_set(sources=sources)
    assert lengths_table.lengths(changed) == "stale"
    assert evaluate("lengths.mean", changed) == "stale"
    assert evaluate("lengths_backward.packed_mean : .1f", changed) == "2.0"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("lengths.mean : .3f", "1.542"),
        ("lengths.packed_mean : .3f", "2.000"),
        ("lengths.windows_smallest : .1f", "1.5"),
        ("lengths.smallest_cell", "d64_h32_caches_causal"),
        ("lengths.cells - lengths.slower : .0f", "75"),
        ("lengths.over_padded : .1f", "3.0"),
        ("h200 lengths.mean : .3f", "1.542"),
        ("h100 lengths.mean : .3f", "not measured"),
        ("lengths.d128_h16_ragged.v02.time_ms : .1f", "1.0"),
        ("lengths.d128_h16_4x4096.v02.tflops : .0f", "550"),
        (
            "lengths.d128_h16_ragged.varlen_attn.time_ms / lengths.d128_h16_ragged.v02.time_ms",
            "4.0",
        ),
        ("lengths.d128_h16_ragged_causal.padded_v01.time_ms : .1f", "3.0"),
        ("lengths.d128_h16_caches_causal.varlen_attn.time_ms : .1f", "missing"),
        ("lengths.d256_h8_one_long.v02.time_ms : .1f", "not measured"),
        ("lengths_backward.mean : .3f", "1.827"),
        ("lengths_backward.smallest : .1f", "1.5"),
        ("lengths_backward.smallest_cell", "d64_h32_window_127_causal"),
        ("lengths_backward.caches_mean : .1f", "not measured"),
        ("lengths_backward.d128_h16_4x4096.b02.tflops : .0f", "1374"),
        ("lengths_backward.d128_h16_ragged_causal.padded_b01.time_ms : .1f", "3.0"),
        ("lengths_backward.d256_h8_one_long.b02.time_ms : .1f", "not measured"),
        ("h100 lengths_backward.mean : .3f", "not measured"),
    ],
)
def test_expression(unchanged, expression, text):
    assert evaluate(expression, unchanged) == text


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("lengths", "does not read like 'lengths.mean' or 'lengths.d128_h16_ragged.v14.tflops'"),
        ("lengths.rong", "no 'rong'; there are cells, mean, smallest"),
        ("lengths.rong.v02.time_ms", "no 'rong'; there are d64_h32_4x4096, "),
        ("lengths.d128_h16_ragged.v03.time_ms", "no 'v03'; there are v02, flash_attention_3, "),
        ("lengths.d128_h16_ragged.v02.rong", "no 'rong'; there are time_ms, "),
        ("lengths_backward", "'lengths_backward.mean' or 'lengths_backward.d128_h16_ragged.b11.t"),
        ("lengths_backward.d256_h8_caches.b02.time_ms", "no 'd256_h8_caches'; there are d64_"),
    ],
)
def test_expression_that_means_nothing(unchanged, expression, told):
    with pytest.raises(UsageError) as error:
        evaluate(expression, unchanged)
    assert told in str(error.value)


def test_markers(record_set, tmp_path, monkeypatch):
    monkeypatch.setitem(REQUIRED_TABLES, "text.md", ())
    loaded, path = record_set(), tmp_path / "text.md"
    markers = (
        "table: lengths",
        "table: lengths h100",
        "= lengths.mean : .2f",
        "table: lengths_backward",
        "table: lengths_backward h100",
        "= lengths_backward.mean : .2f",
    )
    path.write_text("".join(f"<!-- {marker} --><!-- end -->" for marker in markers))
    filled = render(path, loaded, []).split("<!-- end -->")
    assert [text.split(" -->")[1].strip() for text in filled[:-1]] == [
        lengths_table.lengths(loaded),
        "not measured",
        "1.54",
        lengths_table.lengths(loaded, BACKWARD),
        "not measured",
        "1.83",
    ]


SMALL = {
    FORWARD: ("d64_h32_tiny_causal", "d128_h16_window_256_256", "d128_h16_caches_causal"),
    BACKWARD: ("d64_h32_tiny_causal", "d128_h16_window_256_256", "d256_h8_ragged_causal"),
}


@pytest.mark.gpu
@OPERATIONS
def test_small_cells_on_a_gpu(monkeypatch, tmp_path, operation):
    names, chosen = SMALL[operation], lengths.chosen_steps(all_steps(), operation)
    step, first = chosen.steps[0], lengths.case_of("", LENGTHS[names[0]], operation)
    if refusal := GpuBackend().refusal(step, first.specialization):
        pytest.skip(f"{step.name} {refusal}")
    for name in names[1:]:
        _, missing = peers_of(LENGTHS[name], chosen, operation)
        if len(missing) == 2:
            pytest.skip(f"no peer for {name}: {missing}")
    monkeypatch.setitem(lengths.CELLS, operation, {name: LENGTHS[name] for name in names})
    monkeypatch.setattr(resumed, "PROFILES_DIR", tmp_path)
    monkeypatch.setattr(resumed, "BUILD_DIR", tmp_path)
    record = read_record(lengths.measure_lengths(operation), LENGTHS_RECORD)
    assert [cell["name"] for cell in record["cells"]] == list(names)
    for cell in record["cells"]:
        assert "missing" not in cell["attentions"][chosen.steps[-1].name]
    padded = record["cells"][0]["attentions"][f"padded_{PADDING[operation]}"]
    assert 0 <= padded["difference"] < comparison.MOST_DIFFERENCE


def peers_of(
    sequences: Sequences, chosen: lengths.Chosen, operation: Operation
) -> tuple[list[str], list[str]]:
    """Who is there, and who is missing, on a GPU."""
    case = lengths.case_of("", sequences, operation)
    inputs = lengths.make_inputs(GpuBackend(), chosen.saving, case)
    longest = (max(sequences.seqlens_q), max(sequences.seqlens_k))
    given = case.arguments_on("cuda")["lengths"]
    found = load_with_lengths(operation, inputs, given, causal=case.causal, longest=longest)
    there = [name for name, peer in found.items() if isinstance(peer, Peer)]
    return there, [name for name in found if name not in there]
