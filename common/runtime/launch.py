"""The host's side of launch.h: the kernels' parameter and the launch descriptor."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ..errors import UsageError
from ..lengths import Lengths
from ..operation import SIZES, Operation
from ..step import Step
from ..text import listed

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


PADDED_Q, MOST_TILE_ROWS = len(SIZES), 128  # as in lengths.h
COLUMNS = len(SIZES) + 1  # as in slices.cuh
GROUP_ROWS = len(SIZES) + 2  # as in group_rows.cuh
SPLIT_KEYS = len(SIZES) + 3  # as in divisors.h


class LengthsParams(ctypes.Structure):
    """struct Lengths of lengths.h: what kernels that take lengths take beyond params_type."""

    _fields_ = [
        ("cu_seqlens_q", ctypes.c_uint64),
        ("cu_seqlens_k", ctypes.c_uint64),
        ("seqused_k", ctypes.c_uint64),
        ("sequences", ctypes.c_int32),
        ("window_left", ctypes.c_int32),
        ("window_right", ctypes.c_int32),
    ]


class Divisor(ctypes.Structure):
    """struct Divisor of divisors.h."""

    _fields_ = [("value", ctypes.c_uint32), ("inverse", ctypes.c_uint32)]


class DivisorsParams(ctypes.Structure):
    """struct Divisors of divisors.h: what kernels that take divisors take beyond params_type."""

    _fields_ = [
        ("tiles", Divisor * 4),
        ("works", Divisor),
        ("blocks", Divisor),
        ("group", Divisor),
        ("split_keys", ctypes.c_int32),
    ]


def params_bytes(step: Step) -> int:
    """The size of the struct that the step's kernels take."""
    takes_more = step.takes_lengths or step.takes_divisors
    return ctypes.sizeof(params_type(step.operation)) + PARAMS_ALIGNMENT * takes_more


class Extent(ctypes.Structure):
    """struct Extent; size is enum Size."""

    _fields_ = [("size", ctypes.c_int32), ("tile", ctypes.c_int32)]


class _KernelLaunch(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 48),
        ("grid", Extent * 4),
        ("threads", ctypes.c_int32),
        ("smem_bytes", ctypes.c_int32),
        ("blocks_per_sm", ctypes.c_int32),
    ]


class _Workspace(ctypes.Structure):
    _fields_ = [("element_bytes", ctypes.c_int32), ("shape", Extent * 4)]


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

    def num_tiles(self, sizes: Sequence[int]) -> int:
        tiles = 1
        for size, tile in self.axes:
            tiles *= -(-sizes[size] // tile)
        return tiles


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

    def workspace_bytes(self, sizes: Sequence[int]) -> list[int]:
        """Of each workspace; 0 where the step is given none."""
        return [
            workspace.num_bytes(sizes) if workspace.axes or self._blocks_hand_over(sizes) else 0
            for workspace in self.workspaces
        ]

    def _blocks_hand_over(self, sizes: Sequence[int]) -> bool:
        """Whether blocks may leave each other something: persistent ones, of several tiles."""
        any_persistent = False
        for kernel in self.kernels:
            if kernel.most_blocks:
                if kernel.num_tiles(sizes) > kernel.most_blocks:
                    return True
                any_persistent = True
        return not any_persistent


def read_plan(step: Step, descriptor: LaunchDescriptor, multiprocessors: int) -> Plan:
    """The plan of a step on a device with this many multiprocessors.

    Raises UsageError for an invalid descriptor.
    """
    known = [*range(len(SIZES)), COLUMNS, GROUP_ROWS]
    known += [PADDED_Q] * step.takes_lengths + [SPLIT_KEYS] * step.takes_divisors
    alignment = descriptor.alignment
    if any(extent.size == SPLIT_KEYS for extent in descriptor.kernels[0].grid):
        raise UsageError(
            f"the launch descriptor's first kernel has an axis of size {SPLIT_KEYS}, SPLIT_KEYS, "
            "which is found out from it: leave that to the next ones"
        )
    if not descriptor.kernels[0].name or alignment < 1 or alignment & (alignment - 1):
        raise UsageError(
            "the launch descriptor must name a kernel and an alignment that is a power of 2"
        )

    def axes(extents: Iterable[Extent]) -> Axes:
        found = tuple((extent.size, extent.tile) for extent in extents if extent.tile)
        for size, tile in found:
            if size not in known or tile < 0:
                raise UsageError(
                    f"the launch descriptor has an axis of size {size} in tiles of {tile}: a size "
                    f"is one of {listed(map(str, sorted(known)))}, and a tile is positive"
                )
        return found

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


def sizes_of(tensors: Sequence, lengths: Lengths | None = None) -> tuple[int, ...]:
    """The sizes of a call in the order of SIZES, from its q and k; PADDED_Q, 0 without lengths;
    COLUMNS, from its q and v; GROUP_ROWS; and SPLIT_KEYS, 1: where it is 0 less is needed.
    """
    batch, heads, seq_q, head_dim = tensors[0].shape
    _, kv_heads, seq_k, _ = tensors[1].shape
    padded = padded_queries(batch, seq_q, lengths.num_sequences(batch)) if lengths else 0
    columns = max(head_dim, tensors[2].shape[3])
    group_rows = heads // max(1, kv_heads) * seq_q  # what is refused later may have none
    return batch, heads, kv_heads, seq_q, seq_k, padded, columns, group_rows, 1


def lengths_of(step: Step, given: Lengths | None) -> Lengths | None:
    """What the step gets: where it takes lengths, those of ordinary batches if none are given."""
    return (given or Lengths()) if step.takes_lengths else None


def padded_queries(batch: int, seq_q: int, num_sequences: int) -> int:
    """The size PADDED_Q of lengths.h."""
    return batch * seq_q + MOST_TILE_ROWS * num_sequences


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
