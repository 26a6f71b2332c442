"""Operations as data: another one needs no line of the packer, the request or the planner."""

from __future__ import annotations

import ctypes
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from common.operation import BACKWARD, FORWARD, OPERATIONS, Operand, Operation, operation_of
from common.problem import DECODE, GRID, HEADLINE, LATENCY, Problem, Shape, Specialization
from common.record_schema import RECORD, find_error
from common.runtime.backend import empty_outputs, specialization
from common.runtime.launch import Box, Plan, descriptor_type, params_type, sizes_of
from common.runtime.pack import Packer, simt_encoder
from common.runtime.tensor_map import MapEncoder
from verify.reference import oracle_of, yardstick_of
from verify.tests.tensor_map_fields import TensorMapFields

Q, K = ("batch", "heads", "seq_q", "head_dim"), ("batch", "kv_heads", "seq_k", "head_dim")
GRADIENT_OF_Q = Operation(
    name="gradient of q",
    letter="x",
    suffix="_of_q",
    inputs=(
        Operand("q", Q),
        Operand("k", K),
        Operand("do", Q),
        Operand("delta", Q[:-1]),
    ),
    outputs=(Operand("dq", Q),),
    workspaces=2,
    scalars=("softmax_scale", "dropout"),
    products=3,
    v_products=1,
    oracle="attention_reference",
    yardstick="attention_in_dtype",
    headline=HEADLINE,
    grid=GRID,
)


def test_letters() -> None:
    assert operation_of("v04") is operation_of("v04_no_padding") is OPERATIONS["v"] is FORWARD
    assert operation_of("faults") is FORWARD
    assert {operation.letter for operation in OPERATIONS.values()} == OPERATIONS.keys()


def test_ladders_have_records_and_plots_of_their_own() -> None:
    assert [each.named("grid") for each in OPERATIONS.values()] == ["grid", "grid_backward"]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.name)
def test_oracle_and_yardstick_give_the_outputs(operation: Operation) -> None:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "seq_q": 3, "seq_k": 5}
    sizes |= {"head_dim": 8, "v_head_dim": 16}
    inputs = [torch.randn([sizes[axis] for axis in each.axes]) for each in operation.inputs]
    scalars = dict.fromkeys(operation.scalars, 0.5)
    for compute in (oracle_of(operation), yardstick_of(operation)):
        outputs = compute(*inputs, causal=False, **scalars)
        expected = empty_outputs(operation, inputs)
        assert [o.shape for o in outputs] == [e.shape for e in expected]


@pytest.mark.parametrize(
    ("seq_q", "seq_k", "scores"),
    [(40, 40, 800), (30, 50, 30 * 20 + 450), (50, 30, 450), (1, 50, 49.5), (50, 1, 0.5)],
)
def test_flops_are_those_of_the_products(seq_q: int, seq_k: int, scores: float) -> None:
    """A causal mask leaves half of a square and, where there are more keys, what is before it."""
    shape = Shape(2, 4, 2, seq_q, seq_k, 8)
    full, causal = Problem(shape, "bf16"), Problem(shape, "bf16", causal=True)
    assert FORWARD.flops(full) == 2 * 2 * (2 * 4 * seq_q * seq_k * 8)
    assert FORWARD.flops(causal) == 2 * 2 * (2 * 4 * scores * 8)
    assert GRADIENT_OF_Q.flops(causal) == 3 * 2 * (2 * 4 * scores * 8)
    of_v = Problem(replace(shape, v_head_dim=24), "bf16", causal=True)
    assert FORWARD.flops(of_v) == 2 * (2 * 4 * scores * (8 + 24))
    assert BACKWARD.flops(of_v) == 2 * (2 * 4 * scores * (3 * 8 + 2 * 24))


def test_flops_of_a_mask_are_those_of_the_visible_keys() -> None:
    """But for the diagonal, half of which the convention leaves out."""
    visible = torch.ones(30, 50).tril(diagonal=50 - 30).sum().item()
    flops = FORWARD.flops(Problem(Shape(1, 1, 1, 30, 50, 8), "bf16", causal=True))
    assert flops == 4 * 8 * (visible - 30 / 2)


def make_packer(operation: Operation, spec: Specialization, encoder: MapEncoder, **boxes: Box):
    """Of a step of the operation, with tensor maps that have these boxes."""
    step = SimpleNamespace(
        name="x01", operation=operation, takes_lengths=False, takes_divisors=False
    )
    descriptor = descriptor_type(operation)(alignment=16)
    for name, box in boxes.items():
        setattr(descriptor, f"{name}_box", box)
    return Packer(step, descriptor, Plan((), ()), [], spec, encoder)


def test_another_operation_is_packed() -> None:
    q, k, do = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, 4, 3, 16)[..., :8]
    tensors = (q, k, do, torch.zeros(1, 4, 3), torch.zeros(1, 4, 3, 8))
    assert sizes_of(tensors) == (1, 4, 2, 3, 5, 0, 8, 6, 1)
    spec = specialization(tensors, causal=True)
    assert str(spec) == "d8_fp32_causal"
    packer = make_packer(GRADIENT_OF_Q, spec, simt_encoder(spec), do=Box(2, 4, 0))
    packed, blocks = packer(tensors, (0.5, 0.25))
    assert blocks == []
    params = params_type(GRADIENT_OF_Q).from_buffer_copy(packed)
    assert len(packed) == ctypes.sizeof(params)
    assert ctypes.sizeof(params) % 128 == 0
    fields = TensorMapFields.from_buffer_copy(params.do_map)
    assert (fields.address, fields.element_bytes) == (do.data_ptr(), 4)
    assert fields.lies() == ((8, 3, 4, 1), (64, 192, 0))
    assert (fields.box_rows, fields.box_columns) == (2, 4)
    assert bytes(params.k_map) == bytes(128)
    addresses = params.q, params.k, params.do, params.delta, params.dq
    assert addresses == tuple(t.data_ptr() for t in tensors)
    assert list(params.workspace) == [0, 0]
    assert (params.do_stride.head, params.do_stride.row) == (48, 16)
    assert (params.heads, params.kv_heads, params.seq_q, params.seq_k) == (4, 2, 3, 5)
    assert (params.softmax_scale, params.dropout) == (0.5, 0.25)
    assert not hasattr(params, "delta_stride")
    descriptor = descriptor_type(GRADIENT_OF_Q)
    assert descriptor.dq_box.offset - descriptor.q_box.offset == 3 * descriptor.q_box.size


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, do, delta, dq: (q[0:0], k, do, delta, dq),
        lambda q, k, do, delta, dq: (q[:, :3], k, do[:, :3], delta, dq[:, :3]),  # for 2 kv_heads
        lambda q, k, do, delta, dq: (q, k, do[:, :, 1:], delta, dq),
        lambda q, k, do, delta, dq: (q, k, do, delta, dq[:, :2]),
        lambda q, k, do, delta, dq: (q[..., :4], k, do, delta, dq),
        lambda q, k, do, delta, dq: (q, k.mT.contiguous().mT, do, delta, dq),
        lambda q, k, do, delta, dq: (q, torch.zeros(81)[1:].view(1, 2, 5, 8), do, delta, dq),
        lambda q, k, do, delta, dq: (q, k, torch.zeros(1, 4, 3, 9)[..., :8], delta, dq),
        lambda q, k, do, delta, dq: (q, k.expand(2, -1, -1, -1), do, delta, dq),
        lambda q, k, do, delta, dq: (q.expand(2**31, -1, -1, -1),) * 5,
    ],
    ids=[
        "empty",
        "heads",
        "rows",
        "output",
        "head_dim",
        "stride",
        "address",
        "gap",
        "batch",
        "2^31",
    ],
)
def test_what_does_not_fit_is_not_packed(change) -> None:
    good = [torch.zeros(1, 4, 3, 8) for _ in range(5)]
    good[1], good[3] = torch.zeros(1, 2, 5, 8), torch.zeros(1, 4, 3)
    spec = specialization(good, causal=True)
    packer = make_packer(GRADIENT_OF_Q, spec, simt_encoder(spec))
    assert packer(good, (0.5, 0.25)) is not None
    assert packer(change(*good), (0.5, 0.25)) is None


def test_threads_pack_at_the_same_time() -> None:
    """A thread that is in the middle of it finds nothing of another one's tensors."""
    barrier = threading.Barrier(2)

    @ctypes.CFUNCTYPE(
        ctypes.c_int,
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p),
        *[ctypes.c_void_p] * 4,
        *[ctypes.c_int] * 4,
    )
    def encode(place, data_type, rank, address, *_):
        ctypes.memmove(place, struct.pack("Q", address), 8)
        barrier.wait(10)
        return 0

    spec = Specialization(8, "bf16", causal=False)
    encoder = MapEncoder(ctypes.cast(encode, ctypes.c_void_p).value, 0, 0, 0, str)
    boxes = dict.fromkeys(("q", "k", "v", "o"), Box(16, 8, 0))
    packer = make_packer(FORWARD, spec, encoder, **boxes)

    def pack(tensors) -> bytes:
        return packer(tensors, [0.5])[0]

    calls = [
        [*torch.zeros(4, 1, 1, n, 8, dtype=torch.bfloat16), torch.zeros(1, 1, n)] for n in (3, 4)
    ]
    with ThreadPoolExecutor(2) as pool:
        found = map(params_type(FORWARD).from_buffer_copy, pool.map(pack, calls))
    for params, tensors in zip(found, calls, strict=True):
        for name, t in zip(("q", "k", "v", "o"), tensors[:4], strict=True):
            assert struct.unpack_from("Q", bytes(getattr(params, f"{name}_map"))) == (t.data_ptr(),)
            assert getattr(params, name) == t.data_ptr()
        assert params.seq_q == tensors[0].shape[2]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "seq_q", "told"),
    [(1, 1, 128, 3), (1, 1, 129, 2), (8, 2, 32, 3), (8, 2, 33, 2), (8, 8, 128, 3)],
)
def test_maps_are_for_keys_that_are_read_once_or_often(heads, kv_heads, seq_q, told) -> None:
    promotions = []

    @ctypes.CFUNCTYPE(
        ctypes.c_int,
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p),
        *[ctypes.c_void_p] * 4,
        *[ctypes.c_int] * 4,
    )
    def encode(place, data_type, rank, address, sizes, strides, box, steps, *enums):
        promotions.append(enums[2])
        return 0

    encoder = MapEncoder(ctypes.cast(encode, ctypes.c_void_p).value, 0, 2, 3, str)
    spec = Specialization(8, "bf16", causal=False)
    boxes = dict.fromkeys(("q", "k", "v", "o"), Box(16, 8, 0))
    q, k = (torch.zeros(2, count, seq_q, 8, dtype=torch.bfloat16) for count in (heads, kv_heads))
    lse = torch.zeros(2, heads, seq_q)
    assert make_packer(FORWARD, spec, encoder, **boxes)([q, k, k, q, lse], [0.5])
    assert promotions == [told] * 4


def test_outputs_lie_like_the_inputs_they_resemble() -> None:
    q = torch.zeros(1, 3, 4, 8, dtype=torch.bfloat16).transpose(1, 2)
    k = torch.zeros(1, 2, 5, 8, dtype=torch.bfloat16)
    (dq,) = empty_outputs(GRADIENT_OF_Q, (q, k, q, torch.zeros(1, 4, 3)))
    assert (dq.shape, dq.stride(), dq.dtype) == (q.shape, q.stride(), q.dtype)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_o_lies_like_q_with_as_many_columns_as_v(order: tuple[int, ...]) -> None:
    sizes = (2, 3, 4)
    storage = torch.zeros(*(sizes[axis] for axis in order), 16, dtype=torch.bfloat16)
    q = storage.permute(*(order.index(axis) for axis in range(3)), 3)
    assert q.shape == (2, 3, 4, 16)
    for columns in (16, 8, 24):
        o, lse = empty_outputs(FORWARD, (q, q, q.new_zeros(2, 3, 4, columns)))
        assert (o.shape, lse.shape) == ((2, 3, 4, columns), (2, 3, 4))
        assert o.stride() == (*(s // 16 * columns for s in q.stride()[:3]), 1)
        assert o._base is None
    o, _ = empty_outputs(FORWARD, (q[:, :1].expand(q.shape), q, q.new_zeros(2, 3, 4, 24)))
    assert o.stride(3) == 1
    assert o.permute(*sorted(range(4), key=o.stride, reverse=True)).is_contiguous()


def test_measured_problems() -> None:
    assert GRID["d128_4096"] == HEADLINE
    for problems in (GRID, LATENCY, DECODE):
        assert all(problem.dtype == "bf16" for problem in problems.values())
    assert HEADLINE.as_record()["dtype"] == "bf16"


def test_a_record_has_the_errors_of_its_operation(monkeypatch) -> None:
    assert RECORD.of({"step": "v04_no_padding"})["errors"].keys() == {"o", "lse"}
    monkeypatch.setitem(OPERATIONS, "x", GRADIENT_OF_Q)
    assert RECORD.of({"step": "x01"})["errors"].keys() == {"dq"}
    assert find_error({"step": "x01"}, RECORD).startswith("the record has no ")
