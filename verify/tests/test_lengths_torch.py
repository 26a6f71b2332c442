"""Lengths and windows as torch has them: compiled, fake, mapped over, cast, in a CUDA graph."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import autograd
from torch._dynamo.exc import TorchRuntimeError
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from common import UsageError, attention, attention_varlen
from common import operator as op
from verify.tests.lengths_calls import (
    DEVICES,
    assert_close,
    assert_equal_but_for_order,
    backward_arguments,
    batched,
    differentiable,
    differentiate,
    int32,
    normal,
    operator_arguments,
    packed,
    packed_reference,
)

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


def test_a_plain_call_does_not_go_through_the_dispatcher_twice(monkeypatch) -> None:
    expected = attention_varlen(**packed())
    arguments = (*packed().values(), None, -1, -1, False, None, None, None, False)
    forward_lengths = op.forward_lengths
    monkeypatch.setattr(op, "forward_lengths", None)  # its redispatch
    assert torch.equal(forward_lengths(*arguments)[0], expected)


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
