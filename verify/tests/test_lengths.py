"""Lengths and windows in the public calls: what they compute, by which step, and from what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import autograd

from common import UsageError, attention, attention_varlen, cache
from common import operator as op
from common.catalog import find_step
from common.lengths import UNLIMITED, Lengths
from common.operation import FORWARD
from common.runtime import driver
from common.runtime.cpu import CpuBackend
from common.runtime.launch import LaunchDescriptor
from verify.tests.lengths_calls import (
    BACKWARD_STEP,
    BF16,
    DEVICES,
    STEP,
    STEPS,
    assert_close,
    assert_equal_but_for_order,
    batched,
    batched_reference,
    differentiable,
    differentiate,
    int32,
    normal,
    packed,
    packed_reference,
)


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


def test_gradients_of_wide_heads() -> None:
    """Which b11 does not take."""
    inputs = {name: normal(9, 1, 256, seed=seed) for seed, name in enumerate("qkv")}
    inputs |= {"cu_seqlens_q": int32(0, 4, 9), "cu_seqlens_k": int32(0, 7, 9)}
    assert_right(partial(attention_varlen, return_lse=True), packed_reference, inputs)


def test_the_steps_for_lengths_compute_ordinary_attention_where_told_to() -> None:
    inputs = differentiable(batched())
    pinned = partial(attention, causal=True, step=STEP, backward_step=BACKWARD_STEP)
    expected = attention(**inputs, causal=True)
    torch.testing.assert_close(pinned(**inputs), expected, atol=2**-8, rtol=2**-7)
    assert_close(
        differentiate(pinned, inputs), differentiate(partial(attention, causal=True), inputs)
    )


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
