"""Lengths and windows in the public calls: what they accept, refuse, compute and tell a backend,
and their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import autograd, func
from torch._dynamo.exc import TorchRuntimeError
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from common import UsageError, attention, attention_varlen, cache
from common import operator as op
from common.catalog import all_steps, find_step
from common.lengths import UNLIMITED, Lengths
from common.operation import BACKWARD, FORWARD
from common.runtime import driver
from common.runtime.cpu import CpuBackend
from common.runtime.launch import LaunchDescriptor

BF16 = torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS, BACKWARD_STEPS = (
    [step.name for step in all_steps() if step.takes_lengths and step.operation == operation]
    for operation in (FORWARD, BACKWARD)
)
# Those that are taken where nothing else is asked for.
STEP = STEPS[-1]
BACKWARD_STEP = [name for name in BACKWARD_STEPS if not find_step(name).only_left_over][-1]
LEFT_OVER_STEP = BACKWARD_STEPS[-1]


def int32(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def normal(*shape: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng).to(device, BF16)


def packed(device: str = "cpu", **overrides) -> dict[str, torch.Tensor]:
    """What attention_varlen() takes, of four sequences: the third one has no queries, the last one
    no keys.
    """
    tensors = {
        "q": normal(45, 4, 64, device=device),
        "k": normal(83, 2, 64, device=device, seed=1),
        "v": normal(83, 2, 64, device=device, seed=2),
        "cu_seqlens_q": int32(0, 37, 42, 42, 45, device=device),
        "cu_seqlens_k": int32(0, 70, 79, 83, 83, device=device),
    }
    return tensors | overrides


def batched(device: str = "cpu", **overrides) -> dict[str, torch.Tensor]:
    """What attention() takes."""
    tensors = {
        "q": normal(2, 4, 21, 64, device=device),
        "k": normal(2, 2, 70, 64, device=device, seed=1),
        "v": normal(2, 2, 70, 64, device=device, seed=2),
    }
    return tensors | overrides


def differentiable(inputs: dict[str, torch.Tensor], names: str = "qkv") -> dict[str, torch.Tensor]:
    """The same, of which these require grad."""
    return inputs | {name: inputs[name].detach().requires_grad_() for name in names}


def differentiate(function: Callable, inputs: dict[str, torch.Tensor], dout=None) -> tuple:
    """The gradients of q, k and v, which require grad."""
    o = function(**inputs)
    dout = normal(*o.shape, device=o.device, seed=3) if dout is None else dout
    return autograd.grad(o, [inputs[name] for name in "qkv"], dout.to(o.dtype))


def reference(q, k, v, causal: bool = False, window: tuple[int, int] | None = None):
    """o and lse of one sequence, [seq, heads, head_dim], in float64, with all scores at once."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], dim=0) for t in (k, v))
    seq_q, seq_k = q.shape[1], k.shape[1]
    left, right = window or (-1, -1)
    after = torch.arange(seq_k) - (torch.arange(seq_q)[:, None] + seq_k - seq_q)
    hidden = torch.zeros(seq_q, seq_k, dtype=torch.bool)
    if left >= 0:
        hidden |= after < -left
    if causal or right >= 0:
        hidden |= after > (0 if causal else right)
    some = (~hidden).any(-1, keepdim=True)
    scores = q @ k.mT * q.shape[2] ** -0.5
    # Where all is hidden, nothing is masked: of a softmax of none there are no derivatives.
    o = (scores.masked_fill(hidden & some, -torch.inf).softmax(-1) * some) @ v
    return o.transpose(0, 1), scores.masked_fill(hidden, -torch.inf).logsumexp(-1)


def packed_reference(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k=None, **mask):
    """What attention_varlen() returns, on the CPU."""
    q, k, v = q.cpu(), k.cpu(), v.cpu()
    outputs = []
    for i, (queries, keys) in enumerate(zip(cut(cu_seqlens_q), cut(cu_seqlens_k), strict=True)):
        if seqused_k is not None:
            keys = slice(keys.start, keys.start + int(seqused_k[i]))
        outputs.append(reference(q[queries], k[keys], v[keys], **mask))
    o, lse = zip(*outputs, strict=True)
    return torch.cat(o), torch.cat(lse, dim=1)


def batched_reference(q, k, v, seqused_k=None, **mask):
    """What attention() returns, on the CPU."""
    q, k, v = (t.cpu().transpose(1, 2) for t in (q, k, v))
    used = [k.shape[1]] * q.shape[0] if seqused_k is None else seqused_k.tolist()
    outputs = [reference(q[i], k[i, :n], v[i, :n], **mask) for i, n in enumerate(used)]
    o, lse = zip(*outputs, strict=True)
    return torch.stack(o).transpose(1, 2), torch.stack(lse)


def cut(starts: torch.Tensor) -> list[slice]:
    return [slice(*pair) for pair in pairwise(starts.tolist())]


def assert_right(function: Callable, formula: Callable, inputs: dict[str, torch.Tensor]) -> None:
    """Outputs and gradients are those of the formula."""
    inputs = differentiable(inputs)
    leaves = [inputs[name] for name in "qkv"]
    (o, lse), (expected_o, expected_lse) = function(**inputs), formula(**inputs)
    assert (o.shape, o.dtype, o.stride()) == (leaves[0].shape, BF16, leaves[0].stride())
    assert (lse.shape, lse.dtype) == (expected_lse.shape, torch.float32)
    assert (o.double().cpu() - expected_o).abs().max() < 0.02
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=0, atol=1e-4)
    dout = normal(*o.shape, seed=3)
    found = [t.cpu() for t in autograd.grad(o, leaves, dout.to(o.device))]
    # Of a call without any key, the formula's o depends on no input.
    expected = autograd.grad(expected_o, leaves, dout.double(), materialize_grads=True)
    expected = [t.cpu() for t in expected]
    assert_close(found, expected)
    dq, dk, dv = found
    unseen = (expected[2] == 0).all(-1)
    assert not dk[unseen].any()
    assert not dv[unseen].any()
    blind = lse.cpu() == -torch.inf
    assert not dq[blind.T if dq.dim() == 3 else blind].any()


def assert_close(found, expected) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y.to(x.dtype), rtol=0.05, atol=0.05)


def assert_equal_but_for_order(found, expected) -> None:
    """Of gradients by a step whose sum of dq is in any order."""
    torch.testing.assert_close(found[0], expected[0], rtol=2**-6, atol=2**-8)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])


MASKS = [
    {},
    {"causal": True},
    {"window": (11, 3)},
    {"window": (11, -1), "causal": True},
    {"window": [0, np.int64(40)]},
    {"window": (-1, 7)},
    {"window": (2**40, 0)},
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seqused_k", [None, (64, 0, 4, 0)])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_packed_sequences_are_each_by_itself(mask, seqused_k, device: str) -> None:
    inputs = packed(device)
    if seqused_k:
        inputs["seqused_k"] = int32(*seqused_k, device=device)
    function = partial(attention_varlen, **mask, return_lse=True)
    assert_right(function, partial(packed_reference, **mask), inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seqused_k", [None, (33, 70)])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_batch_with_lengths_or_a_window(mask, seqused_k, device: str) -> None:
    inputs = batched(device)
    if seqused_k:
        inputs["seqused_k"] = int32(*seqused_k, device=device)
    function = partial(attention, **mask, return_lse=True)
    assert_right(function, partial(batched_reference, **mask), inputs)


def test_the_steps_for_lengths_compute_ordinary_attention_where_told_to() -> None:
    inputs = differentiable(batched())
    pinned = partial(attention, causal=True, step=STEP, backward_step=BACKWARD_STEP)
    expected = attention(**inputs, causal=True)
    torch.testing.assert_close(pinned(**inputs), expected, atol=2**-8, rtol=2**-7)
    assert_close(
        differentiate(pinned, inputs), differentiate(partial(attention, causal=True), inputs)
    )


class FakeBackend:
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, tuple, Lengths | None]] = []

    def refusal(self, step, spec) -> None:
        return None

    def descriptor(self, step, spec) -> LaunchDescriptor:
        return LaunchDescriptor(alignment=1)

    def prepare(self, step, spec):
        def call(tensors, scalars, lengths=None):
            self.calls.append((step.name, tuple(tensors), tuple(scalars), lengths))
            return []

        return call


@pytest.fixture
def fake(monkeypatch) -> FakeBackend:
    backend = FakeBackend()
    monkeypatch.setattr(op, "_calls", cache.Cache())
    monkeypatch.setattr(op, "_backends", {torch.device("cpu"): backend})
    return backend


@pytest.mark.parametrize(
    ("options", "causal", "sides"),
    [
        ({"window": (3, 4)}, False, (3, 4)),
        ({"window": (3, -1)}, False, (3, UNLIMITED)),
        ({"window": (-1, 4)}, False, (UNLIMITED, 4)),
        ({"window": (3, 4), "causal": True}, True, (3, 0)),
        ({"window": (3, 0)}, True, (3, 0)),
        ({"window": (0, 2**31)}, False, (0, UNLIMITED)),
    ],
    ids=str,
)
def test_what_a_backend_is_told_of_a_window(options, causal, sides, fake, monkeypatch) -> None:
    causals = []
    specialization = op.specialization

    def spy(inputs, causal):
        causals.append(causal)
        return specialization(inputs, causal)

    monkeypatch.setattr(op, "specialization", spy)
    attention(**batched(), **options)
    attention_varlen(**packed(), **options)
    for name, _, scalars, lengths in fake.calls:
        assert (name, scalars, lengths[3:]) == (STEP, (0.125,), sides)
    assert set(causals) == {causal}


@pytest.mark.parametrize(
    ("options", "causal"),
    [
        ({}, False),
        ({"window": (-1, -1)}, False),
        ({"window": (-1, -1), "causal": True}, True),
        ({"window": [-1, 5], "causal": True}, True),
        ({"window": (-1, 0)}, True),
    ],
    ids=str,
)
def test_what_is_no_window_is_an_ordinary_call(options, causal, monkeypatch) -> None:
    """With a step of the backward ladder."""
    calls = []
    monkeypatch.setattr(
        "common.functional.forward", lambda *given: calls.append(given) or given[:2]
    )
    monkeypatch.setattr("common.functional.forward_lengths", None)
    attention(**batched(), **options, backward_step="b01")
    ((*_, given_causal, _, _, backward_step, _),) = calls
    assert (given_causal, backward_step) == (causal, "b01")


def test_packed_tensors_are_not_copied(fake) -> None:
    qkv = normal(45, 8, 64)
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    cu_seqlens = int32(0, 45)
    o, lse = attention_varlen(
        q, k, v, cu_seqlens, cu_seqlens, causal=True, softmax_scale=0.5, return_lse=True
    )
    ((name, tensors, scalars, lengths),) = fake.calls
    assert (name, scalars, lengths[3:]) == (STEP, (0.5,), (UNLIMITED, 0))
    assert lengths.cu_seqlens_q is lengths.cu_seqlens_k is cu_seqlens
    assert lengths.seqused_k is None
    for t, given in zip(tensors, (q, k, v, o), strict=False):
        assert t.data_ptr() == given.data_ptr()
        assert t.shape == (1, given.shape[1], 45, 64)
        assert t.stride()[1:] == given.transpose(0, 1).stride()
    assert tensors[4].data_ptr() == lse.data_ptr()
    assert (tensors[4].shape, lse.shape) == ((1, 4, 45), (4, 45))
    assert tensors[4].is_contiguous()
    assert lse.is_contiguous()
    assert o.stride() == torch.empty_like(q).stride()


def test_gradients_of_packed_tensors_are_not_copied(fake) -> None:
    """But for a gradient of o that no step can read."""
    qkv = normal(45, 8, 64).requires_grad_()
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    cu_seqlens = int32(0, 45)
    o, lse = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, window=(3, 5), return_lse=True)
    dout = normal(45, 4, 64, seed=3)
    given = q, k, v, o, lse, dout
    gradients = autograd.grad(o, (q, k, v), dout, retain_graph=True)
    autograd.grad(o.sum(), (q, k, v))
    for (name, tensors, scalars, lengths), copied in zip(fake.calls[1:], (None, 5), strict=True):
        assert (name, scalars, lengths[3:]) == (BACKWARD_STEP, (0.125,), (3, 5))
        assert lengths.cu_seqlens_q is lengths.cu_seqlens_k is cu_seqlens
        assert lengths.seqused_k is None
        for i, (t, original) in enumerate(zip(tensors[:6], given, strict=True)):
            axes = (4, 45) if original is lse else (original.shape[1], 45, 64)
            assert t.shape == (1, *axes)
            assert (t.data_ptr() == original.data_ptr()) == (i != copied)
        assert tensors[5].stride(-1) == 1
    for t, original, gradient in zip(fake.calls[1][1][6:], given, gradients, strict=False):
        assert t.data_ptr() == gradient.data_ptr()
        assert t.shape == (1, original.shape[1], 45, 64)
        assert gradient.stride() == torch.empty_like(original).stride()


def test_a_repeated_call_chooses_nothing(fake, monkeypatch) -> None:
    used = int32(33, 70)
    differentiate(attention_varlen, differentiable(packed()))
    differentiate(partial(attention, window=(3, 4)), differentiable(batched()))
    monkeypatch.setattr(op, "_choose", None)
    differentiate(partial(attention_varlen, window=(5, 1)), differentiable(packed()))
    differentiate(partial(attention, seqused_k=used), differentiable(batched()))
    assert [lengths.seqused_k for *_, lengths in fake.calls] == 6 * [None] + 2 * [used]
    assert [name for name, *_ in fake.calls] == 4 * [STEP, BACKWARD_STEP]


def test_few_queries_with_lengths_have_a_step_of_their_own(fake) -> None:
    few, many = STEPS[::-1]
    for rows in (64, 65):  # of two heads, which share keys: 128, and more
        q = normal(2, 4, rows, 64)
        attention(**batched(q=q), window=(3, 4))
        attention(**batched(q=q), seqused_k=int32(33, 70))
    for more in (0, 1):  # queries than 64 for each of four sequences
        cu_seqlens_q = int32(0, 1, 1, 200, 256 + more)
        attention_varlen(**packed(q=normal(256 + more, 4, 64), cu_seqlens_q=cu_seqlens_q))
    assert [name for name, *_ in fake.calls] == [few, few, many, many, few, many]


def test_steps_for_lengths_are_chosen_for_them_alone(monkeypatch) -> None:
    first = find_step("v01")
    lengths = replace(first, name="v98", takes_lengths=True)
    inputs = tuple(batched().values())
    for steps in ((first, lengths), (lengths, first)):
        monkeypatch.setattr(op, "all_steps", lambda steps=steps: steps)
        for given, expected in ((None, first), (Lengths(), lengths)):
            found = op.highest_step(CpuBackend(), FORWARD, inputs, False, lengths=given)
            assert found is expected
    monkeypatch.setattr(op, "all_steps", lambda: (first,))
    with pytest.raises(UsageError, match="there is no step of forward for lengths and windows"):
        op.highest_step(CpuBackend(), FORWARD, inputs, False, lengths=Lengths())


def test_a_step_for_what_is_left_is_chosen_last(monkeypatch) -> None:
    """However high it is; and first where the others give other bits each time."""
    first = find_step("v01")
    lengths = replace(first, name="v97", takes_lengths=True)
    left = replace(lengths, name="v98", only_left_over=True)
    inputs = tuple(batched().values())

    def found(*steps, **options):
        monkeypatch.setattr(op, "all_steps", lambda: steps)
        return op.highest_step(CpuBackend(), FORWARD, inputs, False, lengths=Lengths(), **options)

    assert found(lengths, left) is lengths
    assert found(first, left) is left
    unordered = replace(lengths, unordered=("o",))
    assert found(unordered, left) is unordered
    assert found(unordered, left, deterministic=True) is left


# What is given to attention() beside or instead of batched().
BAD_BATCH = {
    "a number": ({"window": 4}, r"window must be a pair \(left, right\), not int"),
    "one side": ({"window": (4,)}, r"window must be a pair \(left, right\), not 1 numbers"),
    "a float": ({"window": (4.0, 0)}, "window must be two ints, not one of type float"),
    "a bool": ({"window": (4, True)}, "window must be two ints, not one of type bool"),
    "a low side": (
        {"window": (-2, 0)},
        r"window must be two ints from -1 \(no limit\) up, not -2",
    ),
    "a list": ({"seqused_k": [1, 2]}, "seqused_k must be a torch tensor, not list"),
    "dtype": (
        {"seqused_k": int32(1, 2).long()},
        r"seqused_k must be int32, not torch.int64: pass seqused_k.int\(\)",
    ),
    "axes": (
        {"seqused_k": int32(1, 2)[None]},
        r"seqused_k must be \[sequences\], not of shape \[1, 2\]",
    ),
    "stride": (
        {"seqused_k": int32(1, 2, 3)[::2]},
        r"seqused_k must be contiguous, its stride is 2: pass seqused_k.contiguous\(\)",
    ),
    "device": (
        {"seqused_k": int32(1, 2).to("meta")},
        "seqused_k must be on the device of q, cpu, not on meta",
    ),
    "size": (
        {"seqused_k": int32(1, 2, 3)},
        r"seqused_k must be of shape \[2\], a length for each sequence, not \[3\]",
    ),
    "too many keys": (
        {"seqused_k": int32(70, 71)},
        r"seqused_k must be from 0 to the keys of a sequence: seqused_k\[1\] is 71, and "
        "sequence 1 has 70",
    ),
    "less than none": ({"seqused_k": int32(-1, 3)}, r"seqused_k\[0\] is -1, and sequence 0 has 70"),
    "heads": (
        {"window": (1, 1), "q": normal(2, 3, 21, 64)},
        r"heads \(3\) must be a multiple of kv_heads \(2\)",
    ),
    "batch": (
        {"seqused_k": int32(1), "q": normal(1, 4, 21, 64)},
        "must have the same batch and head_dim",
    ),
    "q's axes": (
        {"window": (1, 1), "q": normal(4, 21, 64)},
        r"q must be \[batch, heads, seq, head_dim\], not of shape \[4, 21, 64\]",
    ),
    "float32": (
        {"window": (1, 1), **{name: t.float() for name, t in batched().items()}},
        f"no step can run these inputs: {STEP} takes bf16, fp16, not fp32",
    ),
    "an older step": (
        {"window": (1, 1), "step": "v07"},
        f"v07 takes no window: the steps that do are {', '.join(STEPS)}",
    ),
    "an older step, of lengths": (
        {"seqused_k": int32(1, 2), "window": (-1, 1), "step": "v07"},
        f"v07 takes no seqused_k and no window: the steps that do are {', '.join(STEPS)}",
    ),
    "no step": ({"window": (1, 1), "step": "v99"}, "no step 'v99'; the steps are v01, v02"),
    "an older backward step": (
        {"window": (1, 1), "backward_step": "b01"},
        f"b01 takes no window: the steps that do are {', '.join(BACKWARD_STEPS)}",
    ),
    "a forward step as a backward step": (
        {"seqused_k": int32(1, 2), "backward_step": STEP},
        f"{STEP} computes forward, not backward: the steps of backward are b01",
    ),
    "a backward step that repeats no bits": (
        {"window": (1, 1), "backward_step": BACKWARD_STEP, "deterministic": True},
        f"{BACKWARD_STEP} does not repeat the bits of dq, and deterministic=True or",
    ),
    "packed": ({"cu_seqlens_q": int32(0, 2)}, "no cu_seqlens_q: attention_varlen.. takes packed"),
    "flash_attn's window": ({"window_size": (1, 1)}, "no window_size: say window=, likewise"),
    "flash_attn's cache": ({"cache_seqlens": int32(1, 2)}, "no cache_seqlens: say seqused_k="),
    "flash_attn's softcap": ({"softcap": 0.0}, "no softcap: logits are not capped"),
    "flash_attn's biases": ({"alibi_slopes": None}, "no alibi_slopes: there are no biases"),
    "flash_attn's lse": ({"return_attn_probs": True}, "no return_attn_probs: say return_lse="),
}

# What is given to attention_varlen() beside or instead of packed().
BAD_PACK = {
    "a list": ({"cu_seqlens_q": [0, 45]}, "cu_seqlens_q must be a torch tensor, not list"),
    "none": ({"cu_seqlens_k": None}, "cu_seqlens_k must be a torch tensor, not NoneType"),
    "q as a list": ({"q": [1.0]}, "q must be a torch tensor, not list"),
    "seqused_k as a list": ({"seqused_k": [1]}, "seqused_k must be a torch tensor, not list"),
    "causal": ({"causal": 1}, "causal must be True or False, not of type int"),
    "deterministic": ({"deterministic": "no"}, "deterministic must be True or False, not of type"),
    "scale": ({"softmax_scale": "1"}, "softmax_scale must be a number, not str"),
    "step": ({"step": 4}, "step must be a step's name or a path, not int"),
    "window": ({"window": "all"}, r"window must be a pair \(left, right\), not str"),
    "dtype": (
        {"cu_seqlens_q": int32(0, 37, 42, 42, 45).long()},
        r"cu_seqlens_q must be int32, not torch.int64: pass cu_seqlens_q.int\(\)",
    ),
    "axes": (
        {"cu_seqlens_k": int32(0, 83)[None]},
        r"cu_seqlens_k must be \[sequences \+ 1\], not of shape \[1, 2\]",
    ),
    "stride": (
        {"cu_seqlens_q": int32(0, 0, 45)[::2], "cu_seqlens_k": int32(0, 83)},
        r"cu_seqlens_q must be contiguous, its stride is 2",
    ),
    "device": (
        {"cu_seqlens_q": int32(0, 45).to("meta")},
        "cu_seqlens_q must be on the device of q, cpu, not on meta",
    ),
    "sizes": (
        {"cu_seqlens_q": int32(0, 45)},
        r"cu_seqlens_q and cu_seqlens_k must have the same shape, \[sequences \+ 1\], not \[2\] "
        r"and \[5\]",
    ),
    "no sequences": (
        {"cu_seqlens_q": int32(0), "cu_seqlens_k": int32(0)},
        r"cu_seqlens_q must be \[sequences \+ 1\], not of shape \[1\]: there are no sequences",
    ),
    "seqused_k's size": (
        {"seqused_k": int32(1, 2, 3)},
        r"seqused_k must be of shape \[4\], a length for each sequence, not \[3\]",
    ),
    "begin": (
        {"cu_seqlens_q": int32(1, 37, 42, 42, 45)},
        "cu_seqlens_q must begin with 0, not with 1",
    ),
    "end": (
        {"cu_seqlens_k": int32(0, 70, 79, 83, 84)},
        "cu_seqlens_k must end with 83, as k has rows, not with 84",
    ),
    "falls": (
        {"cu_seqlens_q": int32(0, 37, 43, 42, 45)},
        r"cu_seqlens_q must never fall: cu_seqlens_q\[2\] is 43, and cu_seqlens_q\[3\] is 42",
    ),
    "too many keys": (
        {"seqused_k": int32(70, 9, 5, 0)},
        r"seqused_k\[2\] is 5, and sequence 2 has 4",
    ),
    "a batch": (
        {"q": normal(1, 4, 45, 64)},
        r"q must be \[total, heads, head_dim\], not of shape \[1, 4, 45, 64\]",
    ),
    "no queries": (
        {"q": normal(0, 4, 64), "cu_seqlens_q": int32(0, 0, 0, 0, 0)},
        r"q is empty: shape \[0, 4, 64\]",
    ),
    "no keys": (
        {
            "k": normal(0, 2, 64),
            "v": normal(0, 2, 64),
            "cu_seqlens_k": int32(0, 0, 0, 0, 0),
        },
        r"k is empty: shape \[0, 2, 64\]",
    ),
    "k and v": (
        {"v": normal(82, 2, 64)},
        r"k and v must have the same shape but for head_dim, not \[83, 2, 64\] and \[82, 2, 64\]",
    ),
    "head_dim": (
        {"q": normal(45, 4, 32)},
        r"q \[45, 4, 32\] and k \[83, 2, 64\] must have the same head_dim",
    ),
    "heads": ({"q": normal(45, 3, 64)}, r"heads \(3\) must be a multiple of kv_heads \(2\)"),
    "dtypes": ({"k": normal(83, 2, 64).half()}, "same dtype: q torch.bfloat16, k torch.float16"),
    "devices": ({"k": normal(83, 2, 64).to("meta")}, "same device: q cpu, k meta, v cpu"),
    "last axis": (
        {"q": normal(45, 64, 4).mT},
        r"the last dimension of q must be contiguous, its stride is 4: pass q.contiguous\(\)",
    ),
    "alignment": (
        {"q": normal(45, 4, 65)[..., 1:]},
        f"no step can run these inputs: {STEP} reads 16 bytes at a time, and the",
    ),
    "alignment, for a step": (
        {"q": normal(45, 4, 65)[..., 1:], "step": STEP},
        f"{STEP} reads 16 bytes at a time, and the address of q is not a multiple of 16",
    ),
    "an older step": (
        {"step": "v12", "causal": True},
        f"v12 takes no cu_seqlens_q and no cu_seqlens_k: the steps that do are {', '.join(STEPS)}",
    ),
    "the longest": ({"max_seqlen_q": 37}, "no max_seqlen_q: leave it out, no step needs it"),
    "the longest keys": ({"max_seqlen_k": 70}, "no max_seqlen_k: leave it out, no step needs it"),
    "dropout": ({"dropout_p": 0.0}, r"attention_varlen\(\) takes no dropout_p: there is no drop"),
    "window_size": ({"window_size": (1, 1)}, "takes no window_size: say window=, likewise"),
    "pages": ({"block_table": None}, "takes no block_table: there is no paged cache"),
    "backward_step": (
        {"backward_step": 4},
        "backward_step must be a step's name or a path, not int",
    ),
    "an older backward step": (
        {"backward_step": "b01"},
        "b01 takes no cu_seqlens_q and no cu_seqlens_k: the steps that do are "
        + ", ".join(BACKWARD_STEPS),
    ),
}


@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    ("function", "make", "name"),
    [(attention, batched, name) for name in BAD_BATCH]
    + [(attention_varlen, packed, name) for name in BAD_PACK],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_bad_input_gets_one_clear_line(function, make, name, seen, monkeypatch) -> None:
    """Also after a good call, whose choice the same kind of inputs share."""
    bad, message = (BAD_BATCH if make is batched else BAD_PACK)[name]
    monkeypatch.setattr(op, "_calls", cache.Cache())
    if seen:
        good = {"window": (1, 1)} if make is batched else {}
        function(**make(), **good)
    with pytest.raises(UsageError, match=message) as error:
        function(**(make() | bad))
    assert "\n" not in str(error.value)


def test_what_torch_reports_of_the_operator() -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k = packed().values()
    options = (None, -1, -1, False, None, None, None, False)
    for given, told in (
        ((cu_seqlens_q, None), "^cu_seqlens_q is given without cu_seqlens_k"),
        ((None, cu_seqlens_k), "^cu_seqlens_k is given without cu_seqlens_q"),
    ):
        with pytest.raises(UsageError, match=told):
            op.forward_lengths(q, k, v, *given, *options)
    with pytest.raises(UsageError, match="v07 takes no lengths or window: the steps that do are"):
        op.forward_lengths(*batched().values(), None, None, *options[:-3], "v07", None, False)


@pytest.mark.parametrize("function", [attention, attention_varlen])
def test_an_unknown_keyword_is_a_type_error(function) -> None:
    inputs = batched() if function is attention else packed()
    told = rf"{function.__name__}\(\) got an unexpected keyword argument 'chunk'"
    with pytest.raises(TypeError, match=told):
        function(**inputs, chunk=4)


# A call of each kind; what it is given, and what it computes in float64.
CALLS = {
    "packed": (
        partial(attention_varlen, causal=True),
        packed(),
        packed_reference,
        {"causal": True},
    ),
    "window": (partial(attention, window=(3, 3)), batched(), batched_reference, {"window": (3, 3)}),
    "seqused_k": (attention, batched(seqused_k=int32(70, 33)), batched_reference, {}),
}
calls = pytest.mark.parametrize("kind", CALLS)


@calls
def test_where_no_derivative_is_computed(kind: str) -> None:
    function, inputs, _, _ = CALLS[kind]
    expected = function(**inputs)
    assert not expected.requires_grad
    leaves = differentiable(inputs)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            found = function(**leaves)
        assert torch.equal(found, expected)
        assert not found.requires_grad
    q = leaves.pop("q").detach()
    with pytest.raises(UsageError, match=r"^q has a tangent, and there is no forward-mode deriv"):
        func.jvp(lambda q: function(q=q, **leaves), (q,), (q,))
    # What is not differentiated may be computed within it.
    scale = torch.tensor(2.0)
    found = func.grad(lambda scale: scale * function(**inputs).float().sum())(scale)
    assert torch.equal(found, expected.float().sum())


@pytest.mark.parametrize(
    ("kind", "names"), [("packed", "q"), ("packed", "kv"), ("window", "k"), ("seqused_k", "v")]
)
def test_only_what_requires_grad_gets_a_gradient(kind: str, names: str) -> None:
    function, inputs, _, _ = CALLS[kind]
    expected = dict(zip("qkv", differentiate(function, differentiable(inputs)), strict=True))
    inputs = differentiable(inputs, names)
    o = function(**inputs)
    with torch.no_grad():  # which is of what is recorded, and not of what was
        o.backward(normal(*o.shape, seed=3))
    found = {name: inputs[name].grad for name in "qkv"}
    for name in set("qkv") - set(names):
        assert found[name] is None
        found[name] = expected[name]
    assert_equal_but_for_order(list(found.values()), list(expected.values()))


def checkpointed(function: Callable, q: torch.Tensor) -> torch.Tensor:
    q = q.clone().requires_grad_()
    checkpoint(function, q, use_reentrant=False).backward()
    return q.grad


# The gradient of a function of q that returns a number, at q.
WAYS = {
    "grad": lambda f, q: func.grad(f)(q),
    "vjp": lambda f, q: func.vjp(f, q)[1](torch.ones((), dtype=torch.float64))[0],
    "functional.vjp": lambda f, q: autograd.functional.vjp(f, q)[1],
    "checkpoint": checkpointed,
    "grad of what grad does not see": lambda f, q: func.grad(
        lambda x: func.grad(lambda y: f(x) * y.double().mean())(q).double().sum()
    )(q),
}
# Ways that map over the call, which lengths do not allow.
MAPPED = {
    "jacrev": lambda f, q: func.jacrev(lambda x: torch.stack([f(x), f(2 * x)]))(q),
    "vmap of grad": lambda f, q: torch.vmap(func.grad(f))(torch.stack([q, -q])),
    "grad of vmap": lambda f, q: func.grad(lambda x: torch.vmap(f)(x).sum())(torch.stack([q, -q])),
}


def square_of(function: Callable, inputs: dict[str, torch.Tensor]) -> tuple[Callable, torch.Tensor]:
    """A function of q that returns a number, and q."""
    others = dict(inputs)
    q = others.pop("q")

    def square(q: torch.Tensor) -> torch.Tensor:
        o = function(q=q, **others)
        return (o[0] if isinstance(o, tuple) else o).double().square().sum()

    return square, q


@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in ("packed", "seqused_k") for way in WAYS]
    + [("window", way) for way in MAPPED],
)
def test_every_way_to_a_gradient(kind: str, way: str) -> None:
    function, inputs, formula, mask = CALLS[kind]
    differentiate = (WAYS | MAPPED)[way]
    found, expected = (
        differentiate(*square_of(each, inputs)) for each in (function, partial(formula, **mask))
    )
    assert found.dtype == BF16
    assert_close([found], [expected])


@pytest.mark.parametrize("way", MAPPED)
def test_torch_vmap_does_not_map_over_lengths_in_a_backward_pass(way: str) -> None:
    function, inputs, _, _ = CALLS["packed"]
    with pytest.raises(UsageError, match="no call with cu_seqlens_q and cu_seqlens_k: put all"):
        MAPPED[way](*square_of(function, inputs))


@calls
def test_a_second_derivative_is_refused_where_it_is_used(kind: str) -> None:
    function, inputs, _, _ = CALLS[kind]
    leaves = differentiable(inputs)
    o = function(**leaves)
    gradients = autograd.grad(
        o, [leaves[name] for name in "qkv"], normal(*o.shape, seed=3), create_graph=True
    )
    assert all(gradient.requires_grad for gradient in gradients)
    assert_equal_but_for_order(gradients, differentiate(function, leaves))
    with pytest.raises(UsageError, match=r"^a second derivative was asked for"):
        sum(gradient.sum() for gradient in gradients).backward()
    square, q = square_of(function, inputs)
    with pytest.raises(UsageError, match=r"^a second derivative was asked for"):
        func.grad(lambda q: func.grad(square)(q).sum())(q)


def test_lse_has_no_gradient() -> None:
    o, lse = attention_varlen(**differentiable(packed()), return_lse=True)
    assert o.requires_grad
    assert not lse.requires_grad


def test_lengths_must_stay_as_they_are_until_the_backward_pass() -> None:
    for name, inputs, function in (
        ("cu_seqlens_k", differentiable(packed()), attention_varlen),
        ("seqused_k", differentiable(batched(seqused_k=int32(3, 4))), attention),
    ):
        o = function(**inputs)
        inputs[name].add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()


@pytest.mark.parametrize(
    ("function", "make", "mask"),
    [(attention_varlen, packed, {}), (attention, batched, {"window": (3, 3)})],
)
def test_gradients_of_the_same_bits_each_time(
    function, make, mask, chosen_steps, monkeypatch
) -> None:
    """Whether the call asks for them, or torch is told to, another step computes them."""

    def gradients(**options) -> tuple:
        monkeypatch.setattr(op, "_calls", cache.Cache())  # nothing is chosen yet
        return differentiate(partial(function, **mask, **options), inputs)

    inputs = differentiable(make())
    any_bits, asked = gradients(), gradients(deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        told = gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    taken = [name for name, _ in chosen_steps if name in BACKWARD_STEPS]
    assert taken == [BACKWARD_STEP, LEFT_OVER_STEP, LEFT_OVER_STEP]
    assert all(torch.equal(x, y) for x, y in zip(asked, told, strict=True))
    assert_close(any_bits, [x.double() for x in asked])


def test_gradients_of_wide_heads() -> None:
    """Which b11 does not take."""
    inputs = {name: normal(9, 1, 256, seed=seed) for seed, name in enumerate("qkv")}
    inputs |= {"cu_seqlens_q": int32(0, 4, 9), "cu_seqlens_k": int32(0, 7, 9)}
    assert_right(partial(attention_varlen, return_lse=True), packed_reference, inputs)


GRADIENT_LAYOUTS = {
    "expanded": lambda t: t[:1, :1].expand(t.shape),
    "all strides 0": lambda t: t[:1, :1, :1].expand(t.shape),
    "padded": lambda t: torch.cat([t, t], dim=-1)[..., : t.shape[-1]],
    "by heads": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "by columns": lambda t: t.mT.contiguous().mT,
    "rows at odd addresses": lambda t: torch.cat([t, t[..., :1]], dim=-1)[..., : t.shape[-1]],
    "starts at 2 bytes": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS)
def test_the_gradient_of_o_may_lie_anyhow(layout: str) -> None:
    inputs = differentiable(packed())
    dout = GRADIENT_LAYOUTS[layout](normal(*inputs["q"].shape, seed=3))
    plain = dout.contiguous().clone()
    found, expected = (differentiate(attention_varlen, inputs, each) for each in (dout, plain))
    assert_equal_but_for_order(found, expected)


@pytest.mark.parametrize("layout", ["contiguous", "of q, k and v", "by heads"])
def test_gradients_lie_like_their_inputs(layout: str) -> None:
    """On the meta device, of fakes and of real tensors."""
    inputs = packed()
    inputs |= {name: LAYOUTS[layout](inputs[name]) for name in "qkv"}
    inputs = differentiable(inputs)
    expected = differentiate(attention_varlen, inputs)
    assert_close(expected, differentiate(lambda **given: packed_reference(**given)[0], inputs))
    for gradient, name in zip(expected, "qkv", strict=True):
        assert same_layout([gradient], [torch.empty_like(inputs[name])])
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(t) for name, t in inputs.items()}
        o = attention_varlen(**fakes)
        found = autograd.grad(o, [fakes[name] for name in "qkv"], torch.empty_like(o))
    assert same_layout(found, expected)
    metas = differentiable(
        {
            name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            for name, t in inputs.items()
        }
    )
    o = attention_varlen(**metas)
    found = autograd.grad(o, [metas[name] for name in "qkv"], torch.empty_like(o))
    assert same_layout(found, expected)
    assert {t.device.type for t in found} == {"meta"}


def test_outputs_computed_without_gradients_may_change_in_place() -> None:
    """Which autograd refuses of a view that was made so."""
    weight = torch.ones((), requires_grad=True)
    with torch.no_grad():
        outputs = attention_varlen(**packed(), return_lse=True)
    for t in outputs:
        t.mul_(weight)
        assert t.requires_grad


def test_vmap_adds_to_the_batch_where_there_is_only_a_window() -> None:
    q, k, v = batched().values()
    queries = torch.stack([q, -q], dim=1)
    o = torch.vmap(lambda q: attention(q, k, v, window=(3, 2)), in_dims=1)(queries)
    for i in range(2):
        assert torch.equal(o[i], attention(queries[:, i], k, v, window=(3, 2)))
    with pytest.raises(UsageError, match=r"^torch.vmap maps over no call with seqused_k: put all"):
        torch.vmap(lambda q: attention(q, k, v, seqused_k=int32(1, 2)))(queries.movedim(1, 0))
    inputs = packed()
    stacked = torch.stack([inputs.pop("q")] * 2)
    with pytest.raises(UsageError, match="no call with cu_seqlens_q and cu_seqlens_k: put all"):
        torch.vmap(lambda q: attention_varlen(q, **inputs))(stacked)


def operator_arguments(device: str) -> list[tuple]:
    """For op.forward_lengths: packed with all there is, and a batch with a window."""
    inputs = packed(device)
    used = int32(64, 9, 0, 0, device=device)
    return [
        (*inputs.values(), used, 5, -1, True, 0.5, STEP, None, False),
        (*batched(device).values(), None, None, None, 7, 3, False, None, None, None, True),
    ]


def backward_arguments(device: str) -> list[tuple]:
    """Likewise, for op.backward_lengths."""
    arguments = []
    for q, k, v, *options in operator_arguments(device):
        o, lse = op.forward_lengths(q, k, v, *options)
        *options, _, _, _ = options
        dout = normal(*o.shape, device=device, seed=3)
        arguments.append((q, k, v, o, lse, dout, *options, None, False))
    return arguments


# Of gradients: all but their derivatives, and torch.equal of dq's last bits.
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    for arguments in operator_arguments(device):
        torch.library.opcheck(op.forward_lengths, arguments)
    for arguments in backward_arguments(device):
        torch.library.opcheck(op.backward_lengths, arguments, test_utils=UTILITIES)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_with_gradients(device: str) -> None:
    (q, k, v, *options), _ = operator_arguments(device)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(op.forward_lengths, (*inputs, *options), atol=0.05, rtol=0.05)
    for q, k, v, *others in backward_arguments(device):
        inputs = [t.requires_grad_() for t in (q, k, v)]
        torch.library.opcheck(op.backward_lengths, (*inputs, *others), test_utils=UTILITIES)


BAD_FOR_BACKWARD = {
    "lse's dtype": ("lse", lambda t: t.bfloat16(), "lse must be float32, not torch.bfloat16"),
    "lse's shape": ("lse", lambda t: t.T, r"lse must be of shape \[4, 45\], not \[45, 4\]"),
    "o's shape": ("o", lambda t: t[1:], r"o must be of shape \[45, 4, 64\], not \[44, 4, 64\]"),
    "o's axes": ("o", lambda t: t[None], r"o must be of shape \[45, 4, 64\], not \[1, 45"),
    "dout's axes": ("dout", lambda t: t[0], r"dout must be of shape \[45, 4, 64\], not \[4, 64\]"),
    "o's last axis": ("o", lambda t: t.mT.contiguous().mT, "the last dimension of o must be"),
    "dout's dtype": (
        "dout",
        lambda t: t.half(),
        r"q, k, v, o and dout must have the same dtype: q torch\.bfloat16, .*dout torch\.float16",
    ),
    "devices": ("lse", lambda t: t.to("meta"), "q, k, v, o, lse and dout must have the same dev"),
    "k's axes": ("k", lambda t: t[None], r"k must be \[total, heads, head_dim\], not of shape"),
    "lengths": ("cu_seqlens_k", lambda t: t.long(), "cu_seqlens_k must be int32, not torch.int64"),
    "lengths' values": ("cu_seqlens_q", lambda t: t - 1, "cu_seqlens_q must begin with 0, not wi"),
}


@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("name", BAD_FOR_BACKWARD)
def test_what_cannot_be_of_one_forward_pass(name: str, seen: bool, monkeypatch) -> None:
    changed, change, message = BAD_FOR_BACKWARD[name]
    monkeypatch.setattr(op, "_calls", cache.Cache())
    arguments, _ = backward_arguments("cpu")
    names = ("q", "k", "v", "o", "lse", "dout", "cu_seqlens_q", "cu_seqlens_k")
    inputs = dict(zip(names, arguments, strict=False))
    options = arguments[len(names) :]
    if seen:
        op.backward_lengths(*inputs.values(), *options)
    inputs[changed] = change(inputs[changed])
    with pytest.raises(UsageError, match=message):
        op.backward_lengths(*inputs.values(), *options)


def same_layout(found, expected) -> bool:
    return all(
        (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        for a, b in zip(found, expected, strict=True)
    )


LAYOUTS = {
    "contiguous": lambda q: q,
    "of q, k and v": lambda q: torch.cat([q, q], dim=1)[:, : q.shape[1]],
    "by heads": lambda q: q.transpose(0, 1).contiguous().transpose(0, 1),
    "overlapping": lambda q: q.new_zeros(1000).as_strided(q.shape, (8, 0, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fakes_and_meta_tensors_lie_like_the_real_ones(layout: str) -> None:
    inputs = packed()
    inputs["q"] = LAYOUTS[layout](inputs["q"])
    outputs = attention_varlen(**inputs, return_lse=True)
    if layout != "overlapping":
        assert outputs[0].stride() == torch.empty_like(inputs["q"]).stride()
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(t) for name, t in inputs.items()}
        assert same_layout(attention_varlen(**fakes, return_lse=True), outputs)
    metas = {
        name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        for name, t in inputs.items()
    }
    found = attention_varlen(**metas, return_lse=True)
    assert same_layout(found, outputs)
    assert {t.device.type for t in found} == {"meta"}
    metas["cu_seqlens_q"] = metas["cu_seqlens_q"][1:]
    with pytest.raises(UsageError, match="cu_seqlens_q and cu_seqlens_k must have the same shape"):
        attention_varlen(**metas)


def test_meta_tensors_of_a_batch() -> None:
    metas = {name: t.to("meta") for name, t in batched().items()}
    found = attention(**metas, window=(3, 3), return_lse=True)
    assert same_layout(found, attention(**batched(), window=(3, 3), return_lse=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic: bool, device: str) -> None:
    """What inductor makes of it, test_compiles_with_gradients tells."""

    def model(inputs, seqused_k, window):
        inputs = inputs | {"q": 2 * inputs["q"]}
        o, lse = attention_varlen(
            **inputs, seqused_k=seqused_k, window=window, causal=True, return_lse=True
        )
        return o + 1, lse

    def of_a_batch(inputs, seqused_k, window):
        return attention(**inputs, seqused_k=seqused_k, window=window)

    torch.compiler.reset()
    options = {"fullgraph": True, "backend": "aot_eager", "dynamic": dynamic}
    compiled = torch.compile(model, **options)
    fewer = packed(device)  # the first three sequences
    fewer["q"] = fewer["q"][:42]
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        fewer[name] = fewer[name][:4]
    used = int32(64, 9, 0, 0, device=device)
    for inputs, seqused_k, window in (
        (packed(device), used, (40, -1)),
        (packed(device), used, (30, 2)),
        (fewer, used[:3], (40, -1)),
    ):
        o, lse = compiled(inputs, seqused_k, window)
        expected_o, expected_lse = model(inputs, seqused_k, window)
        assert o.stride() == expected_o.stride()
        assert torch.equal(o, expected_o)
        assert torch.equal(lse, expected_lse)
    compiled = torch.compile(of_a_batch, **options)
    for used, window in ((None, (3, 3)), (int32(4, 70, device=device), None), (None, (-1, -1))):
        o = compiled(batched(device), used, window)
        assert torch.equal(o, of_a_batch(batched(device), used, window))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("compiler", "dynamic"), [("aot_eager", True), ("inductor", False)])
def test_compiles_with_gradients(compiler: str, dynamic: bool, device: str) -> None:
    def model(q, **others):
        o, lse = attention_varlen(2 * q, **others, causal=True, window=(40, -1), return_lse=True)
        return o.flatten(1).relu(), lse

    def of_a_batch(q, **others):
        return attention(2 * q, **others, window=(3, 3))

    torch.compiler.reset()
    options = {"fullgraph": True, "backend": compiler, "dynamic": dynamic}
    compiled = torch.compile(model, **options)
    layout = LAYOUTS["of q, k and v"]
    inputs = packed(device, seqused_k=int32(64, 9, 0, 0, device=device))
    for make in (lambda t: t, layout):
        leaves = differentiable(inputs | {name: make(inputs[name]) for name in "qkv"})
        assert not compiled(**leaves)[1].requires_grad
        found, expected = (
            differentiate(lambda each=each, **given: each(**given)[0], leaves)
            for each in (compiled, model)
        )
        assert_equal_but_for_order(found, expected)
        assert same_layout(found, expected)
    leaves = differentiable(batched(device, seqused_k=int32(70, 4, device=device)))
    found = differentiate(torch.compile(of_a_batch, **options), leaves)
    assert_equal_but_for_order(found, differentiate(of_a_batch, leaves))


@pytest.mark.parametrize("way", ["grad", "vjp"])
def test_a_compiled_gradient(way: str) -> None:
    function, inputs, _, _ = CALLS["packed"]
    square, q = square_of(function, inputs)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: WAYS[way](square, x), backend="aot_eager")
    assert_close([compiled(q)], [WAYS[way](square, q)])


def test_a_compiled_backward_pass() -> None:
    inputs = differentiable(packed())
    expected = differentiate(attention_varlen, inputs, torch.ones_like(inputs["q"]))

    def train() -> None:
        attention_varlen(**inputs).sum().backward()

    torch.compiler.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(train, backend="aot_eager")()
    assert_equal_but_for_order([inputs[name].grad for name in "qkv"], expected)


def test_what_cannot_run_is_told_while_compiling() -> None:
    torch.compiler.reset()
    compiled = torch.compile(attention_varlen, backend="aot_eager")
    inputs = packed()
    inputs["cu_seqlens_k"] = inputs["cu_seqlens_k"].long()
    with pytest.raises(TorchRuntimeError, match="cu_seqlens_k must be int32"):
        compiled(**inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, device: str) -> None:
    inputs = packed(device)
    cast = {name: t if name.startswith("cu") else t.to(dtype) for name, t in inputs.items()}
    expected = attention_varlen(**cast)
    mixed = inputs | {"q": inputs["q"].float(), "k": inputs["k"].half()}
    torch.compiler.reset()
    compiled = torch.compile(attention_varlen, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, dtype=dtype):
        for function in (attention_varlen, compiled):
            o = function(**mixed)
            assert o.dtype == dtype
            assert torch.equal(o, expected)
    gradients = differentiate(attention_varlen, differentiable(cast))
    mixed["v"] = mixed["v"].float()
    leaves = differentiable(mixed)
    for function in (attention_varlen, compiled):
        with torch.autocast(device, dtype=dtype):
            o = function(**leaves)
        found = autograd.grad(
            o, [leaves[name] for name in "qkv"], normal(*o.shape, device=device, seed=3).to(dtype)
        )
        assert [t.dtype for t in found] == [mixed[name].dtype for name in "qkv"]
        assert_equal_but_for_order([t.to(dtype) for t in found], gradients)


def test_a_plain_call_does_not_go_through_the_dispatcher_twice(monkeypatch) -> None:
    expected = attention_varlen(**packed())
    arguments = (*packed().values(), None, -1, -1, False, None, None, None, False)
    forward_lengths = op.forward_lengths
    monkeypatch.setattr(op, "forward_lengths", None)  # its redispatch
    assert torch.equal(forward_lengths(*arguments)[0], expected)


@pytest.fixture
def map_alone() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Copies a tensor to the first bytes of mapped memory: at those before them a GPU stops."""
    cuda, ranges = driver.bindings(), []
    torch.zeros((), device="cuda")  # makes the context
    placed = cuda.CUmemAllocationProp()
    placed.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    placed.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    placed.location.id = torch.cuda.current_device()
    access = cuda.CUmemAccessDesc()
    access.location = placed.location
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    page = driver.call("cuMemGetAllocationGranularity", placed, least)

    def copy(t: torch.Tensor) -> torch.Tensor:
        pages = -(-t.nbytes // page) * page
        start = int(driver.call("cuMemAddressReserve", 2 * pages, 0, 0, 0))
        memory = driver.call("cuMemCreate", pages, placed, 0)
        driver.call("cuMemMap", start + pages, pages, 0, memory, 0)
        driver.call("cuMemSetAccess", start + pages, pages, [access], 1)
        ranges.append((start, pages, memory))
        of_bytes = {"shape": (t.nbytes,), "typestr": "|u1", "data": (start + pages, False)}
        array = SimpleNamespace(__cuda_array_interface__=of_bytes | {"version": 3})
        return torch.as_tensor(array, device="cuda").view(t.dtype).view(t.shape).copy_(t)

    yield copy
    torch.cuda.synchronize()
    for start, pages, memory in ranges:
        driver.call("cuMemUnmap", start + pages, pages)
        driver.call("cuMemRelease", memory)
        driver.call("cuMemAddressFree", start, 2 * pages)


@pytest.mark.gpu
def test_nothing_need_be_mapped_before_a_tensor(map_alone) -> None:
    """Tensor maps of such steps begin there, and a load that is wholly outside would read it."""
    inputs = differentiable(packed("cuda"))
    dout = normal(45, 4, 64, device="cuda", seed=3)
    window = partial(attention_varlen, window=(30, 4))
    expected = window(**inputs), *differentiate(window, inputs, dout)
    alone = inputs | {name: map_alone(inputs[name].detach()).requires_grad_() for name in "qkv"}
    found = window(**alone), *differentiate(window, alone, map_alone(dout))
    assert torch.equal(found[0], expected[0])
    assert_equal_but_for_order(found[1:], expected[1:])


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for() -> None:
    used = int32(64, 9, 0, 0, device="cuda")
    inputs = differentiable(packed("cuda", seqused_k=used))
    leaves = [inputs[name] for name in "qkv"]
    function = partial(attention_varlen, causal=True, window=(20, 0))
    dout = normal(45, 4, 64, device="cuda", seed=3)
    expected = function(**inputs), *differentiate(function, inputs, dout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        o = function(**inputs)
        gradients = autograd.grad(o, leaves, dout)
        assert not torch.cuda.current_stream().query(), "the host waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(o, expected[0])
    assert_equal_but_for_order(gradients, expected[1:])


@pytest.mark.gpu
def test_a_cuda_graph_reads_the_lengths_anew() -> None:
    inputs = differentiable(batched("cuda"))
    leaves = [inputs[name] for name in "qkv"]
    used = int32(70, 70, device="cuda")
    dout = normal(2, 4, 21, 64, device="cuda", seed=3)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # as torch asks for: its warm-up is on a side stream
        differentiate(attention, inputs | {"seqused_k": used}, dout)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(**inputs, seqused_k=used)
        gradients = autograd.grad(o, leaves, dout)
    for lengths in ((70, 70), (3, 40), (0, 1)):
        used.copy_(int32(*lengths))
        graph.replay()
        given = inputs | {"seqused_k": used.clone()}
        assert torch.equal(o, attention(**given))
        assert_equal_but_for_order(gradients, differentiate(attention, given, dout))
        q, k, v = (t[1:] for t in leaves)
        there = slice(lengths[1])
        expected = scaled_dot_product_attention(q, k[:, :, there], v[:, :, there], enable_gqa=True)
        torch.testing.assert_close(o[1:], expected, atol=2**-7, rtol=2**-6)
