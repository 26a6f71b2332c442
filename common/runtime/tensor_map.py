"""Tensor maps: what the tensor memory accelerator must know of a tensor, for both backends."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ..errors import UsageError
from ..step import Step
from .driver import bindings
from .launch import TENSOR_MAP_BYTES, Box, LaunchDescriptor

ALIGNMENT = 16  # bytes that divide a tensor's address, its strides and a box's rows
MAX_BOX = 256  # elements along an axis
MAX_STRIDE = 1 << 40  # bytes, itself excluded
SWIZZLE_BYTES = (None, 32, 64, 128)  # the longest row of a box, by enum Swizzle
VALID_TENSOR_MAP = 0x70616D74  # as in common/runtime/simt/tensor_map.h

_DATA_TYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT32"}


class TensorMapFields(ctypes.Structure):
    """struct TensorMapFields of simt/tensor_map.h; the program fills in the address."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("sizes", ctypes.c_int32 * 4),
        ("strides", ctypes.c_int64 * 3),
        ("box_columns", ctypes.c_int32),
        ("box_rows", ctypes.c_int32),
        ("swizzle", ctypes.c_int32),
        ("valid", ctypes.c_int32),
        ("element_bytes", ctypes.c_int32),
    ]


class MapEncoder:
    """Makes the tensor maps of one operand of a step: tensors differ in where and how they lie.

    A tensor is [batch, heads, seq, head_dim], and the map's box lies within one head. Raises
    UsageError where the hardware can have no such box, or later no such map. Addresses and strides
    are aligned where check_alignment() passes, for the step must ask for that too.
    """

    def __init__(
        self, step_name: str, name: str, box: Box, alignment: int, dtype: torch.dtype
    ) -> None:
        if alignment % ALIGNMENT:
            raise UsageError(
                f"{step_name} asks for a tensor map of {name} and for an alignment of "
                f"{alignment} bytes: its alignment must be a multiple of {ALIGNMENT}"
            )
        _check_box(step_name, name, box, dtype.itemsize)
        self._step_name, self._name = step_name, name
        self._box, self._dtype = box, dtype

    def __call__(self, address: int, shape: Sequence[int], strides: Sequence[int]) -> bytes:
        """The bits of the map; strides are those of batch, head and row, in elements."""
        batch, head, row = (stride * self._dtype.itemsize for stride in strides)
        if batch >= MAX_STRIDE or head >= MAX_STRIDE or row >= MAX_STRIDE:
            raise UsageError(
                f"{self._step_name} copies {self._name} by a tensor map, whose strides are below "
                f"2^40 bytes, and {self._name} has one of {max(batch, head, row)}: pass "
                f"{self._name}.contiguous()"
            )
        batches, heads, rows, columns = shape
        return self._encode(address, (columns, rows, heads, batches), [row, head, batch])

    def _encode(self, address: int, sizes: tuple[int, ...], byte_strides: list[int]) -> bytes:
        """sizes and strides are those of the innermost axis first; its own stride is left out."""
        raise NotImplementedError


def map_encoders(
    encoder: type[MapEncoder],
    step: Step,
    descriptor: LaunchDescriptor,
    dtype: torch.dtype,
) -> dict[str, MapEncoder]:
    """Of each operand that the step's descriptor asks for a tensor map of, by its name."""
    boxes = {
        operand.name: getattr(descriptor, f"{operand.name}_box")
        for operand in step.operation.strided
    }
    return {
        name: encoder(step.name, name, box, descriptor.alignment, dtype)
        for name, box in boxes.items()
        if box.rows
    }


def _check_box(step_name: str, name: str, box: Box, element_bytes: int) -> None:
    if not 1 <= box.rows <= MAX_BOX:
        raise UsageError(
            f"{step_name} asks for a {name}_box of {box.rows} rows: it can have 1 to {MAX_BOX}"
        )
    row_bytes = box.columns * element_bytes
    longest = SWIZZLE_BYTES[box.swizzle] or MAX_BOX * element_bytes
    if not 1 <= row_bytes <= longest or row_bytes % ALIGNMENT:
        raise UsageError(
            f"{step_name} asks for a {name}_box whose rows have {row_bytes} bytes: with its "
            f"swizzle they can have {ALIGNMENT} to {longest}, in multiples of {ALIGNMENT}"
        )


class GpuMapEncoder(MapEncoder):
    """The hardware's bits. Needs a CUDA context."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        driver = self._driver = bindings()
        data_type = f"CU_TENSOR_MAP_DATA_TYPE_{_DATA_TYPES[self._dtype]}"
        self._data_type = getattr(driver.CUtensorMapDataType, data_type)
        box = self._box
        # All that follows the address, the sizes and the strides.
        self._constants = (
            [driver.cuuint32_t(size) for size in (box.columns, box.rows, 1, 1)],
            [driver.cuuint32_t(1)] * 4,  # every element
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle(box.swizzle),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros
        )

    def _encode(self, address: int, sizes: tuple[int, ...], byte_strides: list[int]) -> bytes:
        uint64 = self._driver.cuuint64_t
        status, bits = self._driver.cuTensorMapEncodeTiled(
            self._data_type,
            4,
            address,
            [uint64(size) for size in sizes],
            [uint64(stride) for stride in byte_strides],
            *self._constants,
        )
        if status:
            raise UsageError(
                f"{self._step_name} copies {self._name} by a tensor map, and the driver rejects "
                f"one ({status.name}) of sizes {sizes} with strides of {byte_strides} bytes: "
                f"pass {self._name}.contiguous()"
            )
        return ctypes.string_at(bits.getPtr(), TENSOR_MAP_BYTES)


class CpuMapEncoder(MapEncoder):
    """The runtime's bits, without the address, which the program knows."""

    def _encode(self, address: int, sizes: tuple[int, ...], byte_strides: list[int]) -> bytes:
        fields = TensorMapFields(
            sizes=sizes,
            strides=tuple(byte_strides),
            box_columns=self._box.columns,
            box_rows=self._box.rows,
            swizzle=self._box.swizzle,
            valid=VALID_TENSOR_MAP,
            element_bytes=self._dtype.itemsize,
        )
        return bytes(fields).ljust(TENSOR_MAP_BYTES, b"\0")
