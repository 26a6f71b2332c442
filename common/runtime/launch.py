"""The host's side of launch.h: packs the kernels' parameter, evaluates the launch descriptor."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ..errors import UsageError
from ..operation import SIZES, Operation

TENSOR_MAP_BYTES = 128
PARAMS_ALIGNMENT = 128


class _Strides(ctypes.Structure):
    _fields_ = [("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("row", ctypes.c_int64)]


_TensorMap = ctypes.c_uint8 * TENSOR_MAP_BYTES


@cache
def params_type(operation: Operation) -> type[ctypes.Structure]:
    """The struct that every kernel of the operation takes: AttentionParams for the forward one.

    Pointers are device addresses, strides count elements.
    """
    fields: list[tuple] = [(f"{operand.name}_map", _TensorMap) for operand in operation.strided]
    fields += [(operand.name, ctypes.c_uint64) for operand in operation.operands]
    fields += [("workspace", ctypes.c_uint64 * operation.workspaces)]
    fields += [(f"{operand.name}_stride", _Strides) for operand in operation.strided]
    fields += [(size, ctypes.c_int32) for size in SIZES]
    fields += [(scalar, ctypes.c_float) for scalar in operation.scalars]
    size = ctypes.sizeof(type("Unaligned", (ctypes.Structure,), {"_fields_": fields}))
    fields += [("_padding", ctypes.c_uint8 * (-size % PARAMS_ALIGNMENT))]
    return type("Params", (ctypes.Structure,), {"_fields_": fields})


class _Extent(ctypes.Structure):
    _fields_ = [("size", ctypes.c_int32), ("tile", ctypes.c_int32)]


class _KernelLaunch(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 48),
        ("grid", _Extent * 4),
        ("threads", ctypes.c_int32),
        ("smem_bytes", ctypes.c_int32),
        ("blocks_per_sm", ctypes.c_int32),
    ]


class _Workspace(ctypes.Structure):
    _fields_ = [("element_bytes", ctypes.c_int32), ("shape", _Extent * 4)]


class Box(ctypes.Structure):
    """struct Box; swizzle is enum Swizzle, rows 0 says that there is no tensor map."""

    _fields_ = [
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("swizzle", ctypes.c_int32),
    ]


class LaunchDescriptor(ctypes.Structure):
    """struct LaunchDescriptor but for what depends on the operation: its workspaces and boxes."""

    _fields_ = [
        ("alignment", ctypes.c_int32),
        ("kernels", _KernelLaunch * 3),
    ]


@cache
def descriptor_type(operation: Operation) -> type[LaunchDescriptor]:
    """struct LaunchDescriptor, copied from the compiled module: a box for each strided operand."""
    fields: list[tuple] = [("workspace", _Workspace * operation.workspaces)]
    fields += [(f"{operand.name}_box", Box) for operand in operation.strided]
    return type("Descriptor", (LaunchDescriptor,), {"_fields_": fields})


@dataclass(frozen=True)
class KernelPlan:
    """One launch: grid is (blocks, 1, 1)."""

    name: str
    blocks: int
    threads: int
    smem_bytes: int


@dataclass(frozen=True)
class Plan:
    """What to launch, in order, and the bytes of each workspace the step needs."""

    kernels: tuple[KernelPlan, ...]
    workspace_bytes: tuple[int, ...]


def sizes_of(operation: Operation, tensors: Sequence) -> dict[str, int]:
    """The sizes of a call by name, from its tensors; those after the inputs are ignored."""
    return {
        axis: size
        for operand, tensor in zip(operation.inputs, tensors, strict=False)
        for axis, size in zip(operand.axes, tensor.shape, strict=True)
    }


def evaluate(descriptor: LaunchDescriptor, sizes: Mapping[str, int], multiprocessors: int) -> Plan:
    """The launches of a call on a device with this many multiprocessors.

    Raises UsageError for an invalid descriptor.
    """
    if not descriptor.kernels[0].name or descriptor.alignment < 1:
        raise UsageError("the launch descriptor must name a kernel and an alignment of 1 or more")

    def tiles(axis: _Extent) -> int:
        return -(-sizes[SIZES[axis.size]] // axis.tile)

    def blocks(kernel: _KernelLaunch) -> int:
        all_tiles = math.prod(tiles(axis) for axis in kernel.grid if axis.tile)
        return min(all_tiles, kernel.blocks_per_sm * multiprocessors or all_tiles)

    kernels = tuple(
        KernelPlan(kernel.name.decode(), blocks(kernel), kernel.threads, kernel.smem_bytes)
        for kernel in descriptor.kernels
        if kernel.name
    )
    workspace_bytes = tuple(
        workspace.element_bytes
        * math.prod(tiles(axis) * axis.tile for axis in workspace.shape if axis.tile)
        for workspace in descriptor.workspace
        if workspace.element_bytes
    )
    return Plan(kernels, workspace_bytes)


def strides(t) -> tuple[int, ...]:
    """Element strides of the axes before the last; 0 for an axis of size 1: it has no meaning."""
    return tuple(s if n > 1 else 0 for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True))


def check_alignment(step_name: str, alignment: int, tensors: Mapping) -> None:
    """Raises UsageError unless each row of each tensor starts at a multiple of alignment bytes."""
    for name, t in tensors.items():
        for what, value in (
            ("address", t.data_ptr()),
            *((f"stride {s} of a dimension", s * t.element_size()) for s in strides(t)),
        ):
            if value % alignment:
                raise UsageError(
                    f"{step_name} reads {alignment} bytes at a time, and the {what} of {name} is "
                    f"not a multiple of {alignment} bytes: pass {name}.clone()"
                )


def strided_tensors(operation: Operation, tensors: Sequence) -> dict:
    """The strided tensors of a call, by name."""
    return {
        operand.name: tensor
        for operand, tensor in zip(operation.operands, tensors, strict=True)
        if operand.strided
    }


def pack(
    operation: Operation,
    tensors: Sequence,
    scalars: Sequence[float],
    maps: Mapping[str, bytes],
    addresses: Sequence[int],
    workspace: Sequence[int],
) -> bytes:
    """The kernels' parameter for tensors at these addresses, in the order of the operands.

    maps has the bits of the tensor maps that the step asks for, by the tensor's name.
    """
    sizes = sizes_of(operation, tensors)
    strided = strided_tensors(operation, tensors)
    names = (operand.name for operand in operation.operands)
    params = params_type(operation)(
        **{f"{name}_map": _TensorMap.from_buffer_copy(map_) for name, map_ in maps.items()},
        **dict(zip(names, addresses, strict=True)),
        workspace=(ctypes.c_uint64 * operation.workspaces)(*workspace),
        **{f"{name}_stride": _Strides(*strides(tensor)) for name, tensor in strided.items()},
        **{size: sizes[size] for size in SIZES},
        **dict(zip(operation.scalars, scalars, strict=True)),
    )
    return bytes(params)
