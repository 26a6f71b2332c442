"""The host's side of launch.h: packs the kernels' parameter, evaluates the launch descriptor."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ..cache import Cache
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


# The axes of a grid or a workspace: which of SIZES, and how many of it are a tile.
Axes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Kernel:
    """One launch of a step, of a grid (blocks, 1, 1)."""

    name: str
    axes: Axes
    threads: int
    smem_bytes: int
    most_blocks: int  # 0: as many as there are tiles

    def blocks(self, sizes: Sequence[int]) -> int:
        """How many, where the sizes are those of SIZES."""
        tiles = 1
        for size, tile in self.axes:
            tiles *= -(-sizes[size] // tile)
        return min(tiles, self.most_blocks or tiles)


@dataclass(frozen=True)
class Workspace:
    """Memory that a step asks for beside its outputs."""

    element_bytes: int
    axes: Axes

    def num_bytes(self, sizes: Sequence[int]) -> int:
        """How many, with every axis filled up to whole tiles."""
        elements = 1
        for size, tile in self.axes:
            elements *= -(-sizes[size] // tile) * tile
        return self.element_bytes * elements


@dataclass(frozen=True)
class Plan:
    """What a step launches, in order, and the workspaces that it needs."""

    kernels: tuple[Kernel, ...]
    workspaces: tuple[Workspace, ...]


def read_plan(descriptor: LaunchDescriptor, multiprocessors: int) -> Plan:
    """The plan of a step on a device with this many multiprocessors.

    Raises UsageError for an invalid descriptor.
    """
    alignment = descriptor.alignment
    if not descriptor.kernels[0].name or alignment < 1 or alignment & (alignment - 1):
        raise UsageError(
            "the launch descriptor must name a kernel and an alignment that is a power of 2"
        )

    def axes(extents: Iterable[_Extent]) -> Axes:
        return tuple((extent.size, extent.tile) for extent in extents if extent.tile)

    kernels = tuple(
        Kernel(
            kernel.name.decode(),
            axes(kernel.grid),
            kernel.threads,
            kernel.smem_bytes,
            kernel.blocks_per_sm * multiprocessors,
        )
        for kernel in descriptor.kernels
        if kernel.name
    )
    workspaces = tuple(
        Workspace(workspace.element_bytes, axes(workspace.shape))
        for workspace in descriptor.workspace
        if workspace.element_bytes
    )
    return Plan(kernels, workspaces)


def sizes_of(tensors: Sequence) -> tuple[int, ...]:
    """The sizes of a call in the order of SIZES, from its q and k."""
    batch, heads, seq_q, _ = tensors[0].shape
    _, kv_heads, seq_k, _ = tensors[1].shape
    return batch, heads, kv_heads, seq_q, seq_k


def strides(t) -> tuple[int, int, int]:
    """Element strides of batch, head and row; 0 for an axis of size 1: it has no meaning."""
    batch, head, row, _ = t.stride()
    batches, heads, rows, _ = t.shape
    return batch if batches > 1 else 0, head if heads > 1 else 0, row if rows > 1 else 0


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


_STRIDES = struct.Struct("<3q")

# The bits of a tensor map, of a tensor's address, shape and element strides.
EncodeMap = Callable[[int, Sequence[int], Sequence[int]], bytes]


class Packer:
    """Packs the parameter of a step's kernels: what is the same for each call is known before.

    encode_maps has, by the tensor's name, how to encode the maps that the step asks for. What the
    parameter says of a tensor is kept, as another call may have the same one: in decoding the
    allocator gives q and o the same addresses again.
    """

    def __init__(
        self,
        step_name: str,
        operation: Operation,
        alignment: int,
        encode_maps: Mapping[str, EncodeMap],
    ) -> None:
        self._step_name = step_name
        self._alignment = alignment
        self._no_workspace = [0] * operation.workspaces
        self._described = Cache()
        self._strided = [
            (index, operand.name, encode_maps.get(operand.name))
            for index, operand in enumerate(operation.operands)
            if operand.strided
        ]
        count = len(self._strided)
        fields = (
            f"<{f'{TENSOR_MAP_BYTES}s' * count}{len(operation.operands)}Q{operation.workspaces}Q"
            f"{f'{_STRIDES.size}s' * count}{len(SIZES)}i{len(operation.scalars)}f"
        )
        padding = ctypes.sizeof(params_type(operation)) - struct.calcsize(fields)
        self._format = struct.Struct(f"{fields}{padding}x")

    def __call__(
        self,
        tensors: Sequence,
        sizes: Sequence[int],
        scalars: Sequence[float],
        workspace: Sequence[int],
    ) -> bytes:
        """The parameter for tensors in the order of the operands, and workspaces at addresses.

        Raises UsageError where the step cannot take such tensors.
        """
        addresses = [t.data_ptr() for t in tensors]
        addresses += workspace
        addresses += self._no_workspace[len(workspace) :]
        maps, all_strides = [], []
        for index, name, encode in self._strided:
            t = tensors[index]
            key = index, addresses[index], t.shape, t.stride()
            described = self._described.get(key)
            if described is None:
                described = self._described.add(key, self._describe(name, t, encode))
            maps.append(described[0])
            all_strides.append(described[1])
        return self._format.pack(*maps, *addresses, *all_strides, *sizes, *scalars)

    def _describe(self, name: str, t, encode: EncodeMap | None) -> tuple[bytes, bytes]:
        """The bits of the tensor's map, if the step asks for one, and of its strides."""
        address, three = t.data_ptr(), strides(t)
        batch, head, row = three
        if (address | (batch | head | row) * t.itemsize) & (self._alignment - 1):
            check_alignment(self._step_name, self._alignment, {name: t})
        return encode(address, t.shape, three) if encode else b"", _STRIDES.pack(batch, head, row)
