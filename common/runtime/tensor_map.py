"""Tensor maps: what the tensor memory accelerator must know of a tensor, for both backends."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import UsageError
from .driver import bindings
from .launch import TENSOR_MAP_BYTES, Box, LaunchDescriptor, strides

ALIGNMENT = 16  # bytes that divide a tensor's address, its strides and a box's rows
MAX_BOX = 256  # elements along an axis
MAX_STRIDE = 1 << 40  # bytes, itself excluded
SWIZZLE_BYTES = (None, 32, 64, 128)  # the longest row of a box, by enum Swizzle
VALID_TENSOR_MAP = 0x70616D74  # as in common/runtime/simt/tensor_map.h

_DATA_TYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT32"}


@dataclass(frozen=True)
class TensorMap:
    """A tensor [batch, heads, seq, head_dim] and a box of it, which lies within one head."""

    address: int
    dtype: torch.dtype
    sizes: tuple[int, int, int, int]  # elements of a row, rows, heads, batches
    strides: tuple[int, int, int]  # bytes from row to row, head to head, batch to batch
    box_rows: int
    box_columns: int
    swizzle: int  # enum Swizzle


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


def tensor_maps(
    step_name: str, descriptor: LaunchDescriptor, tensors: Mapping[str, torch.Tensor]
) -> dict[str, TensorMap]:
    """The maps that a step's descriptor asks for, by the name of the tensor.

    Raises UsageError where the hardware can have no such map. Addresses and strides are aligned
    where check_alignment() has passed: a step that asks for maps must ask for that too.
    """
    maps = {}
    for name, t in tensors.items():
        box = getattr(descriptor, f"{name}_box")
        if not box.rows:
            continue
        if descriptor.alignment % ALIGNMENT:
            raise UsageError(
                f"{step_name} asks for a tensor map of {name} and for an alignment of "
                f"{descriptor.alignment} bytes: its alignment must be a multiple of {ALIGNMENT}"
            )
        _check_box(step_name, name, box, t.element_size())
        byte_strides = tuple(stride * t.element_size() for stride in reversed(strides(t)))
        if max(byte_strides) >= MAX_STRIDE:
            raise UsageError(
                f"{step_name} copies {name} by a tensor map, whose strides are below 2^40 bytes, "
                f"and {name} has one of {max(byte_strides)}: pass {name}.contiguous()"
            )
        maps[name] = TensorMap(
            t.data_ptr(),
            t.dtype,
            tuple(reversed(t.shape)),
            byte_strides,
            box.rows,
            box.columns,
            box.swizzle,
        )
    return maps


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


def encode_for_gpu(step_name: str, maps: dict[str, TensorMap]) -> dict[str, bytes]:
    """The hardware's bits. Needs a CUDA context; raises UsageError where the driver refuses."""
    driver = bindings()
    encoded = {}
    for name, map_ in maps.items():
        data_type = f"CU_TENSOR_MAP_DATA_TYPE_{_DATA_TYPES[map_.dtype]}"
        status, bits = driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, data_type),
            4,
            map_.address,
            [driver.cuuint64_t(size) for size in map_.sizes],
            [driver.cuuint64_t(stride) for stride in map_.strides],
            [driver.cuuint32_t(size) for size in (map_.box_columns, map_.box_rows, 1, 1)],
            [driver.cuuint32_t(1)] * 4,  # every element
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle(map_.swizzle),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise UsageError(
                f"{step_name} copies {name} by a tensor map, and the driver rejects one "
                f"({status.name}) of sizes {map_.sizes} with strides of {map_.strides} bytes: "
                f"pass {name}.contiguous()"
            )
        encoded[name] = ctypes.string_at(bits.getPtr(), TENSOR_MAP_BYTES)
    return encoded


def encode_for_cpu(maps: dict[str, TensorMap]) -> dict[str, bytes]:
    """The runtime's bits, without the addresses, which the program knows."""
    return {
        name: bytes(
            TensorMapFields(
                sizes=map_.sizes,
                strides=map_.strides,
                box_columns=map_.box_columns,
                box_rows=map_.box_rows,
                swizzle=map_.swizzle,
                valid=VALID_TENSOR_MAP,
                element_bytes=map_.dtype.itemsize,
            )
        ).ljust(TENSOR_MAP_BYTES, b"\0")
        for name, map_ in maps.items()
    }
