"""What the SIMT runtime reads as a tensor map."""

from __future__ import annotations

import ctypes

VALID_TENSOR_MAP = 0x70616D74


class TensorMapFields(ctypes.Structure):
    """struct TensorMapFields of simt/tensor_map.h."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("begin", ctypes.c_int64),
        ("axes", ctypes.c_int32),
        ("sizes", ctypes.c_int32 * 5),
        ("strides", ctypes.c_int64 * 4),
        ("box_columns", ctypes.c_int32),
        ("box_rows", ctypes.c_int32),
        ("swizzle", ctypes.c_int32),
        ("valid", ctypes.c_int32),
        ("element_bytes", ctypes.c_int32),
    ]

    def lies(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes and the strides of its axes."""
        return tuple(self.sizes[: self.axes]), tuple(self.strides[: self.axes - 1])
