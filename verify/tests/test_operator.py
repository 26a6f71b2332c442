"""The operator behind attention(): what torch checks of it, compiles and traces; what it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from common import UsageError, attention, cache
from common import operator as op
from common.catalog import all_steps
from verify.cases import BF16, contiguous, padded, transposed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OLDEST = all_steps()[0]


def overlapping(shape, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """A row begins one element after the row before: no output can lie like that."""
    storage = torch.zeros(shape[2] + shape[3], **options)
    return storage, storage.as_strided(shape, (0, 0, 1, 1))


def make_inputs(device: str = "cpu", layout=contiguous) -> tuple[torch.Tensor, ...]:
    """q [1, 2, 9, 64] in that layout, k and v [1, 1, 11, 64]."""
    torch.manual_seed(0)
    _, q = layout((1, 2, 9, 64), dtype=BF16, device=device)
    if layout is not overlapping:
        q.normal_()
    k, v = (torch.randn(1, 1, 11, 64, dtype=BF16, device=device) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [contiguous, transposed, padded])
def test_opcheck(layout, device: str) -> None:
    torch.library.opcheck(op.forward, (*make_inputs(device, layout), True, None, None))
    torch.library.opcheck(op.forward, (*make_inputs(device, layout), False, 0.5, OLDEST.name))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [contiguous, transposed, padded, overlapping])
def test_the_fake_lies_like_the_real_one(layout, device: str) -> None:
    inputs = make_inputs(device, layout)
    with FakeTensorMode() as mode:
        fakes = op.forward(*(mode.from_tensor(t) for t in inputs), False, None, None)
    for fake, real in zip(fakes, op.forward(*inputs, False, None, None), strict=True):
        assert (fake.shape, fake.stride()) == (real.shape, real.stride())
        assert (fake.dtype, fake.device) == (real.dtype, real.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(compiler: str, dynamic: bool, device: str) -> None:
    def model(q, k, v):
        o, lse = attention(2 * q, k, v, causal=True, return_lse=True)
        return o + 1, lse

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=compiler, dynamic=dynamic)
    for layout in (contiguous, transposed):
        inputs = make_inputs(device, layout)
        o, lse = compiled(*inputs)
        expected_o, expected_lse = model(*inputs)
        assert o.stride() == expected_o.stride()
        assert torch.equal(o, expected_o)
        assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("step", [OLDEST.name, OLDEST.path])
def test_compiles_with_a_step(step: str | Path) -> None:
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    inputs = make_inputs()
    assert torch.equal(compiled(*inputs, step=step), attention(*inputs, step=OLDEST.name))


@pytest.mark.gpu
def test_compiles_into_cuda_graphs() -> None:
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, mode="reduce-overhead")
    inputs = make_inputs("cuda")
    attention(*inputs)  # a step is not compiled while a graph is captured
    for _ in range(4):
        assert torch.equal(compiled(*inputs).clone(), attention(*inputs))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_gradients_are_refused(index: int) -> None:
    """Also to who calls the operator itself; not where none are computed."""
    inputs = [t.requires_grad_(place == index) for place, t in enumerate(make_inputs())]
    message = f"{'qkv'[index]} requires grad, and there is no backward: use torch.no_grad()"
    for call in (attention, lambda q, k, v: op.forward(q, k, v, False, None, None)):
        with pytest.raises(UsageError) as error:
            call(*inputs)
        assert str(error.value) == message
        with torch.no_grad():
            call(*inputs)
    torch.compiler.reset()
    compiled = torch.compile(attention, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=f"{'qkv'[index]} requires grad"):
        compiled(*inputs)
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), attention(*inputs))


def test_gradient_of_an_intermediate_is_refused() -> None:
    q, k, v = make_inputs()
    with pytest.raises(UsageError, match="v requires grad"):
        attention(q, k, v * torch.ones((), requires_grad=True))


def test_what_cannot_run_is_told_while_compiling() -> None:
    torch.compiler.reset()
    q, k, v = make_inputs()
    compiled = torch.compile(attention, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="must have the same dtype"):
        compiled(q, k.half(), v)


@pytest.fixture
def prepared(monkeypatch) -> list:
    """The steps that are looked up."""
    steps = []
    prepare = op._prepare
    monkeypatch.setattr(op, "_calls", cache.Cache())
    monkeypatch.setattr(op, "_prepare", lambda *given: steps.append(given[-1]) or prepare(*given))
    return steps


def test_a_repeated_call_looks_nothing_up(prepared, monkeypatch) -> None:
    q, k, v = make_inputs()
    for step in (None, OLDEST.name, str(OLDEST.path)):
        attention(q, k, v, step=step)
    monkeypatch.setattr("common.catalog.read_step", None)
    monkeypatch.setattr("common.operator.find_step", None)
    for step in (None, OLDEST.name, str(OLDEST.path)):
        attention(q, k, v, step=step)
        attention(q.clone(), k, v, step=step, softmax_scale=2.0)
    assert prepared == [None, OLDEST.name, str(OLDEST.path)]


def test_what_differs_is_looked_up(prepared) -> None:
    q, k, v = make_inputs()
    _, far = padded(q.shape, dtype=BF16)
    off = torch.empty(q.numel() + 1, dtype=BF16)[1:].view(q.shape)
    calls = [
        (q, k, v),
        (far.copy_(q), k, v),  # strides
        (off.copy_(q), k, v),  # not at a multiple of 16 bytes
        (q[:, :, 1:].contiguous(), k, v),  # a size
        (q, k[:, :, 1:].contiguous(), v[:, :, 1:].contiguous()),
        (q.half(), k.half(), v.half()),
        (q, k, v.transpose(1, 2).contiguous().transpose(1, 2).expand(1, 1, 11, 64)),
    ]
    for inputs in calls:
        attention(*inputs)
    assert len(prepared) == len(calls) - 1  # of the last, v lies as in the first
    attention(q, k, v, causal=True)
    assert len(prepared) == len(calls)


def test_a_bad_input_is_refused_each_time() -> None:
    q, k, v = make_inputs()
    for _ in range(2):
        with pytest.raises(UsageError, match="must have the same dtype"):
            attention(q, k, v.half())


def test_a_cache_drops_its_oldest(monkeypatch) -> None:
    monkeypatch.setattr(cache, "MAX_ENTRIES", 2)
    kept = cache.Cache()
    assert [kept.add(key, key.upper()) for key in "abb"] == ["A", "B", "B"]
    assert kept == {"a": "A", "b": "B"}
    kept.add("c", "C")
    assert kept == {"b": "B", "c": "C"}
