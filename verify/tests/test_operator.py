"""The operator behind attention(): what torch checks of it, compiles and traces; what it keeps."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import TorchRuntimeError
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from common import UsageError, attention, cache
from common import operator as op
from common.catalog import all_steps
from common.paths import ROOT
from common.runtime.launch import LaunchDescriptor
from common.step import FEW_QUERIES, FEW_ROWS, FEWEST_ROWS
from verify.cases import BF16
from verify.layouts import contiguous, padded, transposed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OLDEST = all_steps()[0]


def overlapping(shape, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row begins one element after the one before: no output can have this layout."""
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


def make_backward_inputs(device: str = "cpu", layout=contiguous) -> tuple[torch.Tensor, ...]:
    """q, k and v of make_inputs, o and lse of them, and a gradient of o in that layout."""
    inputs = make_inputs(device, layout)
    o, lse = op.forward(*inputs, False, None, None)
    return *inputs, o, lse, make_inputs(device, layout)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [contiguous, transposed, padded])
def test_opcheck(layout, device: str) -> None:
    torch.library.opcheck(op.forward, (*make_inputs(device, layout), True, None, None))
    torch.library.opcheck(op.forward, (*make_inputs(device, layout), False, 0.5, OLDEST.name))
    torch.library.opcheck(
        op.backward, (*make_backward_inputs(device, layout), False, None, None, False)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [contiguous, transposed, padded])
def test_opcheck_with_gradients(layout, device: str) -> None:
    inputs = [t.requires_grad_() for t in make_inputs(device, layout)]
    torch.library.opcheck(op.forward, (*inputs, True, None, None, "b01", True))
    # Only its first derivative is missing, which the test left out would take.
    torch.library.opcheck(
        op.backward,
        (*inputs, *make_backward_inputs(device, layout)[3:], False, 0.5, "b01", True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [contiguous, transposed, padded, overlapping])
def test_the_fakes_lie_like_the_real_ones(layout, device: str) -> None:
    inputs = make_backward_inputs(device, layout)
    for operator, arguments in (
        (op.forward, (*inputs[:3], False, None, None)),
        (op.backward, (*inputs, False, None, None, False)),
        (op.backward, (*inputs[:5], inputs[5].mT.contiguous().mT, False, None, None, False)),
    ):
        with FakeTensorMode() as mode:
            fakes = operator(
                *(mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in arguments)
            )
        for fake, real in zip(fakes, operator(*arguments), strict=True):
            assert (fake.shape, fake.stride()) == (real.shape, real.stride())
            assert (fake.dtype, fake.device) == (real.dtype, real.device)


@pytest.mark.parametrize("layout", [contiguous, transposed, padded])
def test_where_v_has_a_head_dim_of_its_own(layout) -> None:
    """The fakes and torch.compile know o's shape and strides, and torch.vmap maps it."""
    q, k, v = make_inputs(layout=layout)
    v = torch.cat((v, v[..., :32]), -1)
    o, lse = op.forward(q, k, v, True, None, None)
    assert (o.shape, lse.shape) == ((1, 2, 9, 96), (1, 2, 9))
    with FakeTensorMode() as mode:
        fake, _ = op.forward(*map(mode.from_tensor, (q, k, v)), True, None, None)
    meta, _ = op.forward(*(t.to("meta") for t in (q, k, v)), True, None, None)
    assert fake.shape == meta.shape == o.shape
    assert fake.stride() == o.stride()
    torch.library.opcheck(op.forward, (q, k, v, True, None, None))
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    found = compiled(q, k, v, causal=True)
    assert torch.equal(found, o)
    assert found.stride() == o.stride()
    mapped = torch.vmap(lambda v: attention(q, k, v, causal=True))(torch.stack((v, v)))
    assert torch.equal(mapped, torch.stack((o, o)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("compiler", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)]
)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("axis", range(4))
def test_vmap_adds_to_the_batch(axis: int, device: str) -> None:
    q, k, v = make_inputs(device)
    queries = torch.stack([q, -q, 2 * q])
    expected = torch.stack([attention(x, k, v, causal=True) for x in queries])

    def call(x):
        return attention(x, k, v, causal=True)

    stored = queries.movedim(0, axis).contiguous()
    assert torch.equal(torch.vmap(call, in_dims=axis)(stored), expected)
    nested = torch.vmap(torch.vmap(call), out_dims=1)(queries[None])
    assert torch.equal(nested, expected[:, None])
    if axis == 0:
        torch.compiler.reset()
        compiled = torch.compile(torch.vmap(call), backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(queries), expected)


def test_vmap_over_all_inputs() -> None:
    inputs = [torch.stack([t, t.flip(2)]) for t in make_inputs()]
    o, lse = torch.vmap(lambda q, k, v: attention(q, k, v, return_lse=True))(*inputs)
    for place, single in enumerate(zip(*inputs, strict=True)):
        expected_o, expected_lse = attention(*single, return_lse=True)
        assert torch.equal(o[place], expected_o)
        assert torch.equal(lse[place], expected_lse)


def test_a_plain_call_does_not_go_through_the_dispatcher_twice(monkeypatch) -> None:
    inputs = make_inputs()
    expected = attention(*inputs)
    forward = op.forward
    monkeypatch.setattr(op, "forward", None)  # its redispatch
    assert torch.equal(forward(*inputs, False, None, None)[0], expected)
    with pytest.raises(AttributeError, match="redispatch"):
        forward(torch._neg_view(inputs[0]), *inputs[1:], False, None, None)


def test_a_lazy_negative_is_resolved() -> None:
    q, k, v = make_inputs()
    assert torch.equal(attention(torch._neg_view(q), k, v), attention(-q, k, v))


@pytest.mark.parametrize("layout", [contiguous, transposed, padded, overlapping])
def test_meta_tensors_give_meta_outputs(layout) -> None:
    inputs = make_inputs(layout=layout)
    metas = [torch.empty_strided(t.shape, t.stride(), dtype=BF16, device="meta") for t in inputs]
    outputs = attention(*metas, return_lse=True)
    for meta, real in zip(outputs, attention(*inputs, return_lse=True), strict=True):
        assert meta.device.type == "meta"
        assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)
    gradients = op.backward(*metas, *outputs, metas[0], False, None, None, False)
    expected = op.backward(*make_backward_inputs(layout=layout), False, None, None, False)
    for meta, real in zip(gradients, expected, strict=True):
        assert meta.device.type == "meta"
        assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)
    with pytest.raises(UsageError, match="must have the same batch and head_dim"):
        attention(metas[0][..., :32], *metas[1:])


BAD_FOR_BACKWARD = {
    "lse's dtype": ("lse", lambda t: t.bfloat16(), "lse must be float32, not torch.bfloat16"),
    "lse's shape": (
        "lse",
        lambda t: t[..., 1:],
        r"lse must be of shape \[1, 2, 9\], not \[1, 2, 8",
    ),
    "o's shape": ("o", lambda t: t[:, :1], r"o must be of shape \[1, 2, 9, 64\], not \[1, 1, 9"),
    "o's last axis": ("o", lambda t: t.mT.contiguous().mT, "the last dimension of o must be"),
    "dout's dtype": (
        "dout",
        lambda t: t.half(),
        r"q, k, v, o and dout must have the same dtype: q torch\.bfloat16, .*dout torch\.float16",
    ),
    "devices": ("lse", lambda t: t.to("meta"), "q, k, v, o, lse and dout must have the same dev"),
}


@pytest.mark.parametrize("name", BAD_FOR_BACKWARD)
def test_what_cannot_be_of_one_forward_pass(name: str) -> None:
    changed, change, message = BAD_FOR_BACKWARD[name]
    names = ("q", "k", "v", "o", "lse", "dout")
    inputs = dict(zip(names, make_backward_inputs(), strict=True))
    inputs[changed] = change(inputs[changed])
    with pytest.raises(UsageError, match=message):
        op.backward(*inputs.values(), False, None, None, False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_as_sdpa_follows_it(dtype: torch.dtype, device: str) -> None:
    q, k, v = make_inputs(device)
    inputs = [(q.float(), k.float(), v.float()), (q.float(), k.half(), v), (q, k, v)]
    torch.compiler.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for mixed in inputs:
        expected = attention(*(t.to(dtype) for t in mixed))
        with torch.autocast(device, dtype=dtype):
            peer = scaled_dot_product_attention(*mixed, enable_gqa=True)
            found = attention(*mixed)
            assert found.dtype == peer.dtype == dtype
            assert torch.equal(found, expected)
            assert torch.equal(compiled(*mixed), expected)
    with torch.autocast(device, dtype=dtype, enabled=False):
        assert attention(*inputs[0]).dtype == torch.float32
    doubles = [t.double() for t in inputs[0]]
    with torch.autocast(device, dtype=dtype):
        assert scaled_dot_product_attention(*doubles, enable_gqa=True).dtype == torch.float64
        with pytest.raises(UsageError, match=r"not torch\.float64"):
            attention(*doubles)


def test_what_cannot_run_is_told_while_compiling() -> None:
    torch.compiler.reset()
    q, k, v = make_inputs()
    compiled = torch.compile(attention, backend="aot_eager")
    with pytest.raises(TorchRuntimeError, match="must have the same dtype"):
        compiled(q, k.half(), v)


@pytest.fixture
def prepared(monkeypatch) -> list:
    """The steps that are looked up."""
    steps = []
    choose = op._choose

    def spy(*given, as_they_lie):
        steps.append(given[3])
        return choose(*given, as_they_lie=as_they_lie)

    monkeypatch.setattr(op, "_calls", cache.Cache())
    monkeypatch.setattr(op, "_choose", spy)
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


def test_what_a_step_depends_on_is_looked_up(prepared) -> None:
    q, k, v = make_inputs()
    off = torch.empty(*q.shape[:3], q.shape[3] + 1, dtype=BF16)[..., :-1]
    _, far = transposed(q.shape, dtype=BF16)
    at_2 = torch.empty(q.numel() + 1, dtype=BF16)[1:].view(q.shape)
    calls = [
        (q, k, v),
        (off.copy_(q), k, v),  # rows that are not at multiples of 16 bytes, but of 2
        (q.half(), k.half(), v.half()),
        (q[..., :32].contiguous(), k[..., :32].contiguous(), v[..., :32].contiguous()),
        (q, k, v[..., :32].contiguous()),
    ]
    for inputs in calls:
        attention(*inputs)
    attention(q, k, v, causal=True)
    assert len(prepared) == len(calls) + 1
    longer = torch.cat([k, k], dim=2)
    for inputs in (
        (at_2.copy_(q), k, v),  # nor is the first row at one
        (far.copy_(q), k, v),  # other strides, but as good
        (q[:, :, :9], k, v),
        (q, longer, longer),
        (q.repeat(1, 2, 1, 1), k, v),
        (q, k, v.expand(1, *v.shape[1:])),
    ):
        attention(*inputs)
    assert len(prepared) == len(calls) + 1


def test_few_queries_and_rows_may_have_a_step_of_their_own(prepared, monkeypatch) -> None:
    few = {"v97": FEWEST_ROWS, "v98": FEW_QUERIES, "v99": FEW_ROWS}
    steps = OLDEST, *(replace(OLDEST, name=name, few=few) for name, few in few.items())
    monkeypatch.setattr(op, "all_steps", lambda: steps)
    monkeypatch.setattr("common.step.SHORT_ELEMENTS", 0)  # no keys are so few
    monkeypatch.setattr(op, "few_of", op.few_of.__wrapped__)  # nor does it remember that
    q, k, v = (t.repeat(133, 1, 1, 1) for t in make_inputs())  # two heads that share keys
    longer = q.repeat(1, 1, 8, 1)
    for some in (
        *(q, longer[:, :, :65], longer[:, :, :64], longer, longer[:, :1, :64]),
        *(q[:, :, :1], q[:, :1, :2]),
    ):
        o = attention(some, k, v)
        expected = scaled_dot_product_attention(some, k, v, enable_gqa=True)
        torch.testing.assert_close(o, expected, atol=2**-8, rtol=2**-7)
    assert [chosen.step.name for chosen in op._calls.values()] == ["v99", "v01", "v98", "v97"]
    assert len(prepared) == 4


def test_an_axis_of_size_1_has_no_stride(prepared) -> None:
    """A step that one call found may not be able to read the same strides of a longer axis."""
    k = torch.randn(1, 1, 9, 64, dtype=BF16)
    for rows in (1, 3):
        q = torch.randn(rows * 65, dtype=BF16).as_strided((1, 1, rows, 64), (65, 65, 65, 1))
        o = attention(q, k, k)
        expected = scaled_dot_product_attention(q, k, k)
        torch.testing.assert_close(o, expected, atol=2**-8, rtol=2**-7)
    assert len(prepared) == 2


def test_rows_that_few_steps_can_read_decide_for_no_others(prepared) -> None:
    """A step is chosen as if all rows were aligned, and another one for rows that are not."""
    q, k, v = make_inputs()
    off = torch.empty(*q.shape[:3], q.shape[3] + 1, dtype=BF16)[..., :-1].copy_(q)
    for inputs in ((off, k, v), (q, k, v), (off, k, v)):
        o = attention(*inputs)
        torch.testing.assert_close(o, attention(q, k, v, step=OLDEST.name), atol=2**-8, rtol=2**-7)
    newest, oldest, _ = (chosen.step.name for chosen in op._calls.values())
    assert (newest > oldest, oldest) == (True, OLDEST.name)
    for _ in range(2):
        with pytest.raises(UsageError, match=f"^{newest} reads 16 bytes at a time, and the stride"):
            attention(off, k, v, step=newest)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)),
        lambda q, k, v: (torch.cat([q, q]), k, v),
        lambda q, k, v: (q, k[:, :, :-1], v),
        lambda q, k, v: (q, k, v.repeat(1, 2, 1, 1)),
        lambda q, k, v: (q, k[:, :0], v[:, :0]),
        lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0]),
        lambda q, k, v: (q[:0], k[:0], v[:0]),
        lambda q, k, v: (q[:, :, :0], k, v),
        lambda q, k, v: (q, k[..., :32], v[..., :32]),
        lambda q, k, v: (q, k, v[..., :31]),
        lambda q, k, v: (q[0], k, v),
        lambda q, k, v: (q, k[0], v[None]),
        lambda q, k, v: (q, k.mT.contiguous().mT, v),
        lambda q, k, v: (q[:, :, :1].expand(-1, -1, 2**31, -1), k, v),
    ],
    ids=[
        "heads",
        "batch",
        "k's keys",
        "v's heads",
        "no heads of keys",
        "no heads",
        "no batch",
        "no queries",
        "head_dim",
        "v's head_dim",
        "3 axes",
        "3 and 5 axes",
        "stride",
        "2^31 queries",
    ],
)
def test_what_does_not_fit_is_told_as_at_the_first_call(change, prepared) -> None:
    good = make_inputs()
    bad = change(*good)
    with pytest.raises(UsageError) as first:
        attention(*bad)
    attention(*good)
    with pytest.raises(UsageError) as later:
        attention(*bad)
    assert str(later.value) == str(first.value)


def test_outputs_that_no_step_wrote_are_gone_before_others_are_made(monkeypatch) -> None:
    """Where a step cannot read the rows, or the gradient, as they lie."""
    alive = []
    make = op.empty_outputs

    def spy(*given):
        assert not any(output() for output in alive)
        alive.clear()
        outputs = make(*given)
        alive.extend(map(weakref.ref, outputs))
        return outputs

    monkeypatch.setattr(op, "empty_outputs", spy)
    q, k, v = make_inputs()
    off = torch.empty(*q.shape[:3], q.shape[3] + 1, dtype=BF16)[..., :-1].copy_(q)
    for _ in range(2):
        attention(off, k, v)
    alive.clear()
    q, k, v, o, lse, _ = make_backward_inputs()
    alive.clear()
    for dout in (q.new_ones(()).expand_as(o), off):
        op.backward(q, k, v, o, lse, dout, False, None, None, False)


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
    assert [kept.add("b", "other"), kept.add("c", "other")] == ["B", "C"]  # the first one's
    assert kept == {"b": "B", "c": "C"}


def test_what_a_cache_drops_may_use_it(monkeypatch) -> None:
    """Destroying a value can run arbitrary code, garbage collection included."""
    monkeypatch.setattr(cache, "MAX_ENTRIES", 1)
    kept = cache.Cache()

    class Value:
        pass

    value = Value()
    ended = threading.Event()
    weakref.finalize(value, lambda: kept.add("from the destructor", 1) and ended.set())
    kept.add("a", value)
    del value
    thread = threading.Thread(target=kept.add, args=("b", 2), daemon=True)
    thread.start()
    assert ended.wait(10), "a deadlock"


class FakeBackend:
    """Takes long to initialize, as a CUDA context does, and owns what it loads."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        time.sleep(0.2)

    def refusal(self, step, spec) -> None:
        return None

    def descriptor(self, step, spec) -> LaunchDescriptor:
        return LaunchDescriptor(alignment=1)

    def prepare(self, step, spec) -> Callable:
        return lambda tensors, scalars, lengths: tensors[3].fill_(id(self) % 251)


@pytest.fixture
def fake_backend(monkeypatch) -> type[FakeBackend]:
    monkeypatch.setattr(op, "_calls", cache.Cache())
    monkeypatch.setattr(op, "_backends", {})
    monkeypatch.setattr("common.runtime.cpu.CpuBackend", FakeBackend)
    monkeypatch.setattr(FakeBackend, "made", 0)
    return FakeBackend


def test_threads_whose_first_calls_meet_share_a_backend(fake_backend) -> None:
    inputs = make_inputs()
    barrier = threading.Barrier(8)

    def call(_) -> torch.Tensor:
        barrier.wait(10)
        return attention(*inputs)

    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(call, range(8)))
    assert fake_backend.made == 1
    assert all(torch.equal(o, outputs[0]) for o in outputs)


def test_a_backend_outlives_the_calls_that_are_kept(fake_backend, monkeypatch) -> None:
    """Another one would load everything again."""
    monkeypatch.setattr(cache, "MAX_ENTRIES", 1)
    q, k, v = make_inputs()
    attention(q, k, v)
    (backend,) = map(weakref.ref, op._backends.values())
    attention(q, k, v, causal=True)
    assert len(op._calls) == 1
    op._calls.clear()
    gc.collect()
    assert backend() is not None
    attention(q, k, v)
    assert fake_backend.made == 1


THREADS = """
import gc, sys, threading
import torch
from common import attention, cache, operator
cache.MAX_ENTRIES = 2
device, count = sys.argv[1], 4
barrier = threading.Barrier(count)
inputs = [torch.randn(1, 2, 3, d, device=device) for d in (8, 16, 24, 32)]
outputs = [[] for _ in range(count)]

def work(mine):
    barrier.wait(60)
    for t in inputs:
        mine.append(attention(t, t, t, step="v01"))
        gc.collect()
    if device == "cuda":
        torch.cuda.current_stream().synchronize()

def start(mine):
    if device == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            work(mine)
    else:
        work(mine)

torch.zeros(1, device=device).cpu()  # the inputs are there for all streams
threads = [threading.Thread(target=start, args=(mine,)) for mine in outputs]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(operator._backends) == 1 and len(operator._calls) == 2
for mine in outputs:
    for t, o in zip(inputs, mine, strict=True):
        expected = torch.nn.functional.scaled_dot_product_attention(t, t, t)
        torch.testing.assert_close(o, expected)
"""


@pytest.mark.parametrize("device", DEVICES)
def test_threads_drop_calls_of_one_another(device: str) -> None:
    """In a separate process, so that all that it prints is seen."""
    command = [sys.executable, "-c", THREADS, device]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_backend_that_cannot_be_made_is_tried_again(fake_backend, monkeypatch) -> None:
    inputs = make_inputs()
    with monkeypatch.context() as broken:
        broken.setattr("common.runtime.cpu.CpuBackend", None)
        with pytest.raises(TypeError):
            attention(*inputs)
    attention(*inputs)
    assert fake_backend.made == 1


def test_an_empty_catalog_is_named(fake_backend, monkeypatch) -> None:
    monkeypatch.setattr(op, "all_steps", lambda: ())
    with pytest.raises(UsageError, match=r"^there is no step of forward in .*steps: restore"):
        attention(*make_inputs())
