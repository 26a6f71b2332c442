"""Tensor maps: what the tensor memory accelerator must know of a tensor, for both backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import UsageError
from ..problem import Specialization
from ..step import Step
from .driver import address, bindings, status_name
from .launch import Box, LaunchDescriptor

ALIGNMENT = 16  # bytes that divide a tensor's address, its strides and a box's rows
MAX_BOX = 256  # elements along an axis
L2_FETCH_BYTES = (64, 128, 256)
MAX_STRIDE = 1 << 40  # bytes, itself excluded
SWIZZLE_BYTES = (None, 32, 64, 128)  # the longest row of a box, by enum Swizzle

_DATA_TYPES = {"bf16": "BFLOAT16", "fp16": "FLOAT16", "fp32": "FLOAT32"}


@dataclass(frozen=True)
class MapEncoder:
    """What pack.cpp encodes the tensor maps of a dtype with."""

    function: int  # the address of one like cuTensorMapEncodeTiled
    data_type: int
    l2_promotion: int
    l2_promotion_once: int  # where so few queries share keys that these are read once
    status_name: Callable[[int], str]


def driver_encoder(
    spec: Specialization,
    l2_fetch_bytes: int = L2_FETCH_BYTES[-1],
    l2_fetch_bytes_once: int = L2_FETCH_BYTES[-1],
) -> MapEncoder:
    """Encodes the hardware's bits: l2_fetch_bytes, one of L2_FETCH_BYTES, is what L2 fetches from
    memory at once, and l2_fetch_bytes_once where keys are read once. Needs a CUDA context.
    """
    driver = bindings()

    def promotion(num_bytes: int) -> int:
        return getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{num_bytes}B")

    return MapEncoder(
        address("cuTensorMapEncodeTiled"),
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_DATA_TYPES[spec.dtype]}"),
        promotion(l2_fetch_bytes),
        promotion(l2_fetch_bytes_once),
        status_name,
    )


def checked_boxes(step: Step, descriptor: LaunchDescriptor, dtype: torch.dtype) -> dict[str, Box]:
    """The box of each operand that the step asks for a tensor map of, by its name.

    A tensor is [batch, heads, seq, head_dim], and a box lies within one head. Raises UsageError
    where the hardware can have no such box.
    """
    boxes = {}
    for operand in step.operation.strided:
        box = getattr(descriptor, f"{operand.name}_box")
        if box.rows:
            if descriptor.alignment % ALIGNMENT:
                raise UsageError(
                    f"{step.name} asks for a tensor map of {operand.name} and for an alignment of "
                    f"{descriptor.alignment} bytes: its alignment must be a multiple of {ALIGNMENT}"
                )
            _check_box(step.name, operand.name, box, dtype.itemsize)
            boxes[operand.name] = box
    return boxes


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
