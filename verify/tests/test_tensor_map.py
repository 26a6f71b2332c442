"""Tensor maps: what they say of a tensor, what no map can say, and that the kernels get them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from common import attention
from common.catalog import find_step
from common.errors import UsageError
from common.operation import FORWARD
from common.runtime import tensor_map
from common.runtime.backend import specialization
from common.runtime.cpu import CpuBackend
from common.runtime.driver import bindings, call
from common.runtime.launch import (
    TENSOR_MAP_BYTES,
    Box,
    Plan,
    descriptor_type,
    params_type,
    strides,
)
from common.runtime.pack import Packer, simt_encoder
from common.runtime.tensor_map import MapEncoder, driver_encoder
from common.step import read_step
from verify.layouts import contiguous, expanded, packed, padded, transposed
from verify.tests.tensor_map_fields import VALID_TENSOR_MAP, TensorMapFields

NONE, B32, B64, B128 = range(4)  # enum Swizzle
RAGGED = "v14"  # its maps have five axes
BF16 = torch.bfloat16


def encode(
    t: torch.Tensor,
    box: Box,
    alignment: int = 16,
    encoder: Callable = simt_encoder,
    step: str = "v08",
) -> bytes:
    """The map of k that the step gets of t, if this is its box."""
    descriptor = descriptor_type(FORWARD)(alignment=alignment, k_box=box)
    spec = specialization([t], causal=False)
    packer = Packer(find_step(step), descriptor, Plan((), ()), [], spec, encoder(spec))
    batch, heads, _, head_dim = t.shape
    q = torch.empty(batch, heads, 1, head_dim, dtype=t.dtype, device=t.device)
    packed, _ = packer((q, t, t, q, q[..., 0]), [1.0])
    return bytes(params_type(FORWARD).from_buffer_copy(packed).k_map)


def fields_of(t: torch.Tensor, box: Box, step: str = "v08") -> TensorMapFields:
    bits = encode(t, box, step=step)
    assert len(bits) == TENSOR_MAP_BYTES
    return TensorMapFields.from_buffer_copy(bits)


LAYOUTS = [
    (contiguous, (128, 896, 2688)),
    (transposed, (384, 128, 2688)),
    (packed, (1152, 128, 8064)),
    (padded, (144, 1296, 5184)),
    (expanded, (128, 0, 896)),
]


@pytest.mark.parametrize(("layout", "byte_strides"), LAYOUTS)
def test_a_map_says_how_the_tensor_lies(layout, byte_strides) -> None:
    _, t = layout((2, 3, 7, 64), dtype=BF16)
    fields = fields_of(t, Box(16, 64, B128))
    assert fields.lies() == ((64, 7, 3, 2), byte_strides)
    assert (fields.begin, fields.axes) == (0, 4)
    assert (fields.box_rows, fields.box_columns, fields.swizzle) == (16, 64, B128)
    assert (fields.valid, fields.element_bytes) == (VALID_TENSOR_MAP, 2)


def test_strides_without_a_meaning_are_zero() -> None:
    t = torch.zeros(7 * 64, dtype=BF16).as_strided((1, 1, 7, 64), (3, 5, 64, 1))
    assert fields_of(t, Box(16, 64, B128)).lies()[1] == (128, 0, 0)


# ---- of steps that take lengths: ragged ones, whose fifth axis says where the rows end


@pytest.mark.parametrize(("layout", "byte_strides"), LAYOUTS)
def test_a_ragged_map_begins_as_many_rows_before_the_tensor(layout, byte_strides) -> None:
    _, t = layout((2, 3, 7, 64), dtype=BF16)
    fields = fields_of(t, Box(16, 64, B128), RAGGED)
    row_bytes = byte_strides[0]
    assert fields.lies() == ((64, 7, 3, 2, 8), (*byte_strides, row_bytes))
    assert (fields.begin, fields.axes) == (-7 * row_bytes, 5)
    assert fields.address == t.data_ptr() - 7 * row_bytes
    assert (fields.box_rows, fields.box_columns, fields.swizzle) == (16, 64, B128)
    assert (fields.valid, fields.element_bytes) == (VALID_TENSOR_MAP, 2)


def test_a_ragged_map_of_one_row_begins_there() -> None:
    """Its row stride has no meaning, and is 0."""
    _, t = padded((2, 3, 1, 64), dtype=BF16)
    fields = fields_of(t, Box(16, 64, B128), RAGGED)
    assert fields.lies() == ((64, 1, 3, 2, 2), (0, 432, 1728, 0))
    assert (fields.begin, fields.address) == (0, t.data_ptr())


def test_a_row_stride_of_a_terabyte_is_refused_in_a_ragged_map() -> None:
    t = torch.empty(0, dtype=BF16, device="meta").as_strided((1, 1, 2, 64), (0, 0, 2**39, 1))
    with pytest.raises(UsageError, match=r"v14 copies k .* k has one of 1099511627776: pass k"):
        encode(t, Box(16, 64, B128), step=RAGGED)


@pytest.mark.parametrize(
    ("box", "dtype"),
    [
        (Box(1, 8, NONE), BF16),
        (Box(256, 256, NONE), BF16),
        (Box(256, 256, NONE), torch.float32),
        (Box(64, 16, B32), BF16),
        (Box(64, 32, B64), BF16),
        (Box(64, 64, B128), torch.float16),
        (Box(64, 8, B128), BF16),
        (Box(64, 32, B128), torch.float32),
    ],
)
def test_boxes_at_the_limits(box: Box, dtype: torch.dtype) -> None:
    assert encode(torch.zeros(1, 1, 7, 64, dtype=dtype), box)


@pytest.mark.parametrize(
    ("box", "message"),
    [
        (Box(-1, 64, B128), "v08 asks for a k_box of -1 rows: it can have 1 to 256"),
        (Box(257, 64, B128), "v08 asks for a k_box of 257 rows: it can have 1 to 256"),
        (Box(16, 0, B128), "whose rows have 0 bytes: with its swizzle they can have 16 to 128"),
        (Box(16, 60, B128), "whose rows have 120 bytes: .* in multiples of 16"),
        (Box(16, 72, B128), "whose rows have 144 bytes: with its swizzle they can have 16 to 128"),
        (Box(16, 40, B64), "whose rows have 80 bytes: with its swizzle they can have 16 to 64"),
        (Box(16, 24, B32), "whose rows have 48 bytes: with its swizzle they can have 16 to 32"),
        (Box(16, 264, NONE), "whose rows have 528 bytes: with its swizzle they can have 16 to 512"),
    ],
)
def test_a_box_beyond_the_limits_is_refused(box: Box, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encode(torch.zeros(1, 1, 7, 64, dtype=BF16), box)


def test_a_step_with_a_map_must_ask_for_its_alignment() -> None:
    t = torch.zeros(1, 1, 7, 64, dtype=BF16)
    assert encode(t, Box(16, 64, B128), alignment=32)
    with pytest.raises(UsageError, match="alignment of 8 bytes: its alignment must be a multiple"):
        encode(t, Box(16, 64, B128), alignment=8)


def test_a_stride_of_a_terabyte_is_refused() -> None:
    def at(stride: int) -> torch.Tensor:
        return torch.empty(0, dtype=BF16, device="meta").as_strided(
            (2, 1, 7, 64), (stride, 0, 64, 1)
        )

    assert encode(at(2**39 - 8), Box(16, 64, B128))
    with pytest.raises(UsageError, match=r"k has one of 1099511627776: pass k.contiguous\(\)"):
        encode(at(2**39), Box(16, 64, B128))


def test_without_cuda_bindings_the_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    t = torch.zeros(1, 1, 7, 64, dtype=BF16)
    with pytest.raises(UsageError, match=r"cannot be imported .* pip install cuda-bindings"):
        encode(t, Box(16, 64, B128), encoder=driver_encoder)


def test_l2_fetches_what_the_encoder_is_told(monkeypatch) -> None:
    driver = MagicMock()
    monkeypatch.setattr(tensor_map, "bindings", lambda: driver)
    monkeypatch.setattr(tensor_map, "address", lambda name: 0)
    spec = specialization([torch.zeros(1, 1, 7, 64, dtype=BF16)], causal=False)
    promotions = driver.CUtensorMapL2promotion
    by_bytes = {
        64: promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
        128: promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        256: promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    }
    for told, (often, once) in (((), (256, 256)), ((128, 64), (128, 64)), ((256, 128), (256, 128))):
        encoder = driver_encoder(spec, *told)
        assert encoder.l2_promotion is by_bytes[often]
        assert encoder.l2_promotion_once is by_bytes[once]


def test_a_driver_that_is_too_old_is_named(monkeypatch) -> None:
    driver = MagicMock()
    driver.cuDriverGetVersion.return_value = 0, 12020
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    with pytest.raises(UsageError, match=r"driver is for CUDA 12\.2: install one for CUDA 12\.4"):
        bindings()
    driver.cuDriverGetVersion.return_value = 0, 12040
    assert bindings() is driver


def test_a_call_of_the_driver_that_fails_is_named(monkeypatch) -> None:
    driver = MagicMock()
    driver.cuFuncGetParamInfo.return_value = driver.CUresult.CUDA_SUCCESS, 128, 768
    driver.cuModuleLoad.return_value = (SimpleNamespace(name="CUDA_ERROR_INVALID_HANDLE"),)
    monkeypatch.setattr("common.runtime.driver.bindings", lambda: driver)
    assert call("cuFuncGetParamInfo", "function", 0) == (128, 768)
    with pytest.raises(RuntimeError, match="cuModuleLoad returned CUDA_ERROR_INVALID_HANDLE"):
        call("cuModuleLoad", b"a.cubin")


def test_what_the_driver_refuses_is_named() -> None:
    @ctypes.CFUNCTYPE(ctypes.c_int)
    def refuse() -> int:
        return 1

    def encoder(spec):
        return MapEncoder(ctypes.cast(refuse, ctypes.c_void_p).value, 0, 0, 0, "STATUS_{}".format)

    message = (
        r"v08 copies k by a tensor map, and the driver rejects one \(STATUS_1\) of shape "
        r"\[2, 1, 7, 64\] with strides of \[896, 0, 128\] bytes: pass k.contiguous\(\)"
    )
    t = torch.zeros(2, 1, 7, 64, dtype=BF16)
    with pytest.raises(UsageError, match=message):
        encode(t, Box(16, 64, B128), encoder=encoder)


STEP = """\
// maps -- tells what the runtime's tensor maps hold
// change: none
// why: none
// limits: bf16; head_dim 8-256 by 8; sm_90a
#include "attention.cuh"
#include "tensor_map.h"

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "test_kernel", .grid = {{BATCH, 1 << 20}}, .threads = 1}},
    .q_box = {16, 64, SWIZZLE_128B},
    .v_box = {32, 32, SWIZZLE_64B},
    .o_box = {64, 16, SWIZZLE_NONE},
};

__global__ void test_kernel(const __grid_constant__ AttentionParams p) {
    float* told = p.lse;
    const auto tell = [&](const TensorMap& map, const Element* at, const Strides& stride) {
        const auto& fields = reinterpret_cast<const simt::TensorMapFields&>(map);
        *told++ = fields.valid == simt::VALID_TENSOR_MAP;
        *told++ = fields.valid && fields.address == reinterpret_cast<uintptr_t>(at);
        *told++ = fields.strides[0] == 2 * stride.row && fields.strides[1] == 2 * stride.head &&
                  fields.strides[2] == 2 * stride.batch;
        for (int axis = 0; axis < 4; ++axis) *told++ = fields.sizes[axis];
        *told++ = fields.box_rows;
        *told++ = fields.box_columns;
        *told++ = fields.swizzle;
        *told++ = fields.element_bytes;
    };
    tell(p.q_map, p.q, p.q_stride);
    tell(p.k_map, p.k, p.k_stride);
    tell(p.v_map, p.v, p.v_stride);
    tell(p.o_map, p.o, p.o_stride);
}
}
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_a_kernel_on_the_cpu_gets_the_maps(tmp_path, seed: int) -> None:
    path = tmp_path / "maps.cu"
    path.write_text(STEP)
    _, q = transposed((2, 4, 5, 64), dtype=BF16)
    _, k = contiguous((2, 2, 9, 64), dtype=BF16)
    _, v = expanded((2, 2, 9, 64), dtype=BF16)
    _, o = padded((2, 4, 5, 64), dtype=BF16)
    lse = torch.zeros(4, 11)
    backend = CpuBackend(seed)
    backend.launch(read_step(path), q, k, v, o, lse, causal=False, softmax_scale=1.0)
    assert lse.tolist() == [
        [True, True, True, 64, 5, 4, 2, 16, 64, B128, 2],
        [False, False, False, 0, 0, 0, 0, 0, 0, 0, 0],
        [True, True, True, 64, 9, 2, 2, 32, 32, B64, 2],
        [True, True, True, 64, 5, 4, 2, 64, 16, NONE, 2],
    ]


def encoded_by_bindings(
    address: int, sizes: list[int], byte_strides: list[int], rows: int
) -> bytes:
    """The driver's map, from cuda-bindings."""
    driver = bindings()
    axes = len(sizes)
    status, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        axes,
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in byte_strides],
        [driver.cuuint32_t(size) for size in (64, rows, 1, 1, 1)[:axes]],
        [driver.cuuint32_t(1)] * axes,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    assert not status
    return ctypes.string_at(encoded.getPtr(), TENSOR_MAP_BYTES)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [contiguous, transposed, packed, padded, expanded])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_driver_takes_every_layout(layout, batch: int) -> None:
    """The bits are those that cuda-bindings get."""
    _, t = layout((batch, 3, 7, 64), dtype=BF16, device="cuda")
    sizes = [*reversed(t.shape)]
    byte_strides = [2 * stride for stride in reversed(strides(t))]
    for rows in (16, 32):
        expected = encoded_by_bindings(t.data_ptr(), sizes, byte_strides, rows)
        assert encode(t, Box(rows, 64, B128), encoder=driver_encoder) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [contiguous, transposed, packed, padded, expanded])
@pytest.mark.parametrize(("batch", "seq"), [(1, 7), (2, 7), (2, 1)])
def test_the_driver_takes_a_ragged_map_of_every_layout(layout, batch: int, seq: int) -> None:
    """It begins before the tensor, which may be the first in its memory."""
    _, t = layout((batch, 3, seq, 64), dtype=BF16, device="cuda")
    sizes = [*reversed(t.shape), seq + 1]
    byte_strides = [2 * stride for stride in reversed(strides(t))]
    byte_strides.append(byte_strides[0])
    begin = t.data_ptr() - seq * byte_strides[0]
    for rows in (16, 32):
        expected = encoded_by_bindings(begin, sizes, byte_strides, rows)
        found = encode(t, Box(rows, 64, B128), encoder=driver_encoder, step=RAGGED)
        assert found == expected


@pytest.mark.gpu
def test_a_new_thread_gets_maps() -> None:
    """It is in no CUDA context before its first call."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("v08 needs exactly sm_90a")
    q = torch.randn(1, 2, 33, 64, dtype=BF16, device="cuda")
    expected = attention(q, q, q, step="v08")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(attention, q, q, q, step="v08").result()
    assert torch.equal(found, expected)
