"""Packs the parameter of a step's kernels, by pack.cpp, out of how the tensors of a call lie."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import NoReturn

import torch

from ..errors import UsageError
from ..lengths import Lengths
from ..operation import SIZES
from ..problem import Specialization
from ..step import Step
from .backend import DTYPES
from .build import compile_cached, host_compiler
from .launch import (
    Extent,
    LaunchDescriptor,
    LengthsParams,
    Plan,
    lengths_of,
    params_bytes,
    params_type,
    strides,
)
from .tensor_map import MAX_STRIDE, MapEncoder, checked_boxes

SOURCE = Path(__file__).with_name("pack.cpp")
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared"]
UNFIT = -1


class _Operand(ctypes.Structure):
    """struct Operand of pack.cpp."""

    _fields_ = [
        ("strided", ctypes.c_int32),
        ("axes", ctypes.c_int32 * 3),
        ("columns", ctypes.c_int32),
        ("box_rows", ctypes.c_int32),
        ("box_columns", ctypes.c_int32),
        ("swizzle", ctypes.c_int32),
    ]


class _Kernel(ctypes.Structure):
    """struct Kernel of pack.cpp."""

    _fields_ = [
        ("grid", Extent * 4),
        ("most_blocks", ctypes.c_int32),
        ("cluster", ctypes.c_int32),
    ]


class _Plan(ctypes.Structure):
    """struct Plan of pack.cpp."""

    _fields_ = [
        ("encode", ctypes.c_void_p),
        ("data_type", ctypes.c_int32),
        ("l2_promotion", ctypes.c_int32),
        ("l2_promotion_once", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("element_bytes", ctypes.c_int32),
        ("alignment", ctypes.c_int32),
        ("operands", ctypes.c_int32),
        ("workspaces", ctypes.c_int32),
        ("scalars", ctypes.c_int32),
        ("lengths_at", ctypes.c_int32),
        ("divisors_at", ctypes.c_int32),
        ("kernels", ctypes.c_int32),
        ("operand", _Operand * 9),
        ("kernel", _Kernel * 3),
    ]


@cache
def library() -> ctypes.CDLL:
    """pack.cpp, compiled. Raises UsageError where that fails."""
    built = compile_cached(host_compiler(), FLAGS, SOURCE, SOURCE.parent, "pack.so")
    return ctypes.CDLL(str(built.path))


def simt_encoder(spec: Specialization) -> MapEncoder:
    """Encodes what the SIMT runtime reads as a map: struct TensorMapFields of simt/tensor_map.h."""
    function = ctypes.cast(library().encode_for_simt, ctypes.c_void_p).value
    return MapEncoder(function, DTYPES[spec.dtype].itemsize, 0, 0, str)


class Packer:
    """Packs the parameter of a step's kernels, compiled for a specialization.

    clusters has the blocks of each kernel's clusters. Raises UsageError where the step asks for a
    tensor map that the hardware cannot have.
    """

    def __init__(
        self,
        step: Step,
        descriptor: LaunchDescriptor,
        plan: Plan,
        clusters: Sequence[int],
        spec: Specialization,
        encoder: MapEncoder,
    ) -> None:
        if step.takes_divisors:
            has_first = plan.kernels[0].name.encode() == descriptor.kernels[0].name
            assert has_first, "divisors are of the step's first kernel"
        operation = self._operation = step.operation
        self._step, self._encoder = step, encoder
        self._no_workspace = [0] * operation.workspaces
        operands = enumerate(operation.operands)
        self._strided = itemgetter(*[i for i, operand in operands if operand.strided])
        self._addresses = struct.Struct(f"{len(operation.operands) + operation.workspaces}q").pack
        self._layouts = struct.Struct(f"{8 * len(operation.strided)}q").pack
        self._scalars = struct.Struct(f"{len(operation.scalars)}d").pack
        self._params_bytes = params_bytes(step)
        self._plan = _Plan(
            encoder.function,
            encoder.data_type,
            encoder.l2_promotion,
            encoder.l2_promotion_once,
            max(spec.head_dim, spec.v_head_dim),
            DTYPES[spec.dtype].itemsize,
            descriptor.alignment,
            len(operation.operands),
            operation.workspaces,
            len(operation.scalars),
            ctypes.sizeof(params_type(operation)) if step.takes_lengths else 0,
            ctypes.sizeof(params_type(operation)) if step.takes_divisors else 0,
            len(plan.kernels),
        )
        boxes = checked_boxes(step, descriptor, DTYPES[spec.dtype])
        for operand, planned in zip(operation.operands, self._plan.operand, strict=False):
            planned.strided = operand.strided
            planned.axes[:] = [SIZES.index(axis) for axis in operand.axes[:3]]
            if operand.strided:
                planned.columns = getattr(spec, operand.axes[3])
            if box := boxes.get(operand.name):
                planned.box_rows, planned.box_columns = box.rows, box.columns
                planned.swizzle = box.swizzle
        for kernel, cluster, planned in zip(
            plan.kernels, clusters, self._plan.kernel, strict=False
        ):
            planned.grid[: len(kernel.axes)] = kernel.axes
            planned.most_blocks, planned.cluster = kernel.most_blocks, cluster
        self._plan_pointer = ctypes.byref(self._plan)

    def gather(
        self,
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[float],
        lengths: Lengths | None,
        workspace: Sequence[int],
    ) -> tuple:
        """The first arguments of pack.cpp's functions.

        The tensors are in the order of the operands, the workspaces at addresses, and a strided
        operand has four axes. Lengths are for a step that takes them.
        """
        lengths = lengths_of(self._step, lengths)
        addresses = [t.data_ptr() for t in tensors]
        addresses += workspace
        addresses += self._no_workspace[len(workspace) :]
        layouts = []
        for t in self._strided(tensors):
            layouts += t.shape
            layouts += t.stride()
        return (
            self._plan_pointer,
            self._addresses(*addresses),
            self._layouts(*layouts),
            self._scalars(*scalars),
            None if lengths is None else _pack(lengths, tensors),
        )

    def accepts(self, failure: int, tensors: Sequence[torch.Tensor]) -> bool:
        """What pack() has returned: False where the tensors do not fit together, or the step cannot
        read their rows. Raises UsageError where no tensor map can describe one.
        """
        if failure > 0:
            self._refuse(failure, tensors)
        return failure == 0

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[float],
        lengths: Lengths | None = None,
    ) -> tuple[bytes, list[int]] | None:
        """The parameter, without workspaces, and the number of each kernel's blocks.

        None where accepts() is False; raises as it does.
        """
        params = ctypes.create_string_buffer(self._params_bytes)
        blocks = (ctypes.c_int64 * self._plan.kernels)()
        failure = library().pack(*self.gather(tensors, scalars, lengths, ()), params, blocks)
        return (params.raw, blocks[:]) if self.accepts(failure, tensors) else None

    def _refuse(self, failure: int, tensors: Sequence[torch.Tensor]) -> NoReturn:
        index, status = failure % 256 - 1, failure // 256
        t, name = tensors[index], self._operation.operands[index].name
        byte_strides = [stride * t.itemsize for stride in strides(t)]
        told = f"{self._step.name} copies {name} by a tensor map, "
        if max(byte_strides) >= MAX_STRIDE:
            told += f"whose strides are below 2^40 bytes, and {name} has one of {max(byte_strides)}"
        else:
            told += (
                f"and the driver rejects one ({self._encoder.status_name(status)}) of shape "
                f"{list(t.shape)} with strides of {byte_strides} bytes"
            )
        raise UsageError(f"{told}: pass {name}.contiguous()")


def _pack(lengths: Lengths, tensors: Sequence[torch.Tensor]) -> bytes:
    """What a step that takes lengths gets of them."""
    addresses = [0 if t is None else t.data_ptr() for t in lengths[:3]]
    num_sequences = lengths.num_sequences(tensors[0].shape[0])
    return bytes(
        LengthsParams(*addresses, num_sequences, lengths.window_left, lengths.window_right)
    )
