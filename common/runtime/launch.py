"""The host's side of launch.h: packs the parameter, evaluates the launch descriptor."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

from ..errors import UsageError

TENSOR_MAP_BYTES = 128


class _Strides(ctypes.Structure):
    _fields_ = [("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("row", ctypes.c_int64)]


_TensorMap = ctypes.c_uint8 * TENSOR_MAP_BYTES


class AttentionParams(ctypes.Structure):
    """struct AttentionParams; pointers are device addresses, strides count elements."""

    _fields_ = [
        ("q_map", _TensorMap),
        ("k_map", _TensorMap),
        ("v_map", _TensorMap),
        ("o_map", _TensorMap),
        ("q", ctypes.c_uint64),
        ("k", ctypes.c_uint64),
        ("v", ctypes.c_uint64),
        ("o", ctypes.c_uint64),
        ("lse", ctypes.c_uint64),
        ("workspace", ctypes.c_uint64 * 2),
        ("q_stride", _Strides),
        ("k_stride", _Strides),
        ("v_stride", _Strides),
        ("o_stride", _Strides),
        ("batch", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("seq_q", ctypes.c_int32),
        ("seq_k", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("_padding", ctypes.c_uint8 * 80),  # to a multiple of the alignment, 128
    ]


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
    """struct LaunchDescriptor, copied from the compiled module."""

    _fields_ = [
        ("alignment", ctypes.c_int32),
        ("kernels", _KernelLaunch * 3),
        ("workspace", _Workspace * 2),
        ("q_box", Box),
        ("k_box", Box),
        ("v_box", Box),
        ("o_box", Box),
    ]


@dataclass(frozen=True)
class Sizes:
    """The sizes of one problem, in the order of enum Size."""

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int

    @classmethod
    def of(cls, q, k) -> Sizes:
        """From q [batch, heads, seq_q, head_dim] and k [batch, kv_heads, seq_k, head_dim]."""
        return cls(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])

    def astuple(self) -> tuple[int, ...]:
        return (self.batch, self.heads, self.kv_heads, self.seq_q, self.seq_k)


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
    alignment: int


def evaluate(descriptor: LaunchDescriptor, sizes: Sizes, multiprocessors: int) -> Plan:
    """The launches of one problem on a device with so many multiprocessors.

    Raises UsageError for a descriptor that describes none.
    """
    size = sizes.astuple()
    if not descriptor.kernels[0].name or descriptor.alignment < 1:
        raise UsageError("the launch descriptor must name a kernel and an alignment of 1 or more")

    def blocks(kernel: _KernelLaunch) -> int:
        tiles = math.prod(-(-size[axis.size] // axis.tile) for axis in kernel.grid if axis.tile)
        return min(tiles, kernel.blocks_per_sm * multiprocessors or tiles)

    kernels = tuple(
        KernelPlan(
            name=kernel.name.decode(),
            blocks=blocks(kernel),
            threads=kernel.threads,
            smem_bytes=kernel.smem_bytes,
        )
        for kernel in descriptor.kernels
        if kernel.name
    )
    workspace_bytes = tuple(
        workspace.element_bytes
        * math.prod(
            -(-size[axis.size] // axis.tile) * axis.tile for axis in workspace.shape if axis.tile
        )
        for workspace in descriptor.workspace
        if workspace.element_bytes
    )
    return Plan(kernels, workspace_bytes, descriptor.alignment)


def strides(t) -> tuple[int, ...]:
    """Element strides of the axes before the last; 0 for an axis of size 1: it has no meaning."""
    return tuple(s if n > 1 else 0 for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True))


def check_alignment(step_name: str, alignment: int, **tensors) -> None:
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


def pack(
    q,
    k,
    v,
    o,
    maps: dict[str, bytes],
    addresses: dict[str, int],
    workspace: list[int],
    softmax_scale: float,
) -> AttentionParams:
    """AttentionParams of torch tensors that lie at the given addresses (keys q, k, v, o, lse).

    maps has the bits of the tensor maps that the step asks for, by the tensor's name.
    """
    return AttentionParams(
        **{f"{name}_map": _TensorMap.from_buffer_copy(map_) for name, map_ in maps.items()},
        **addresses,
        workspace=(ctypes.c_uint64 * 2)(*workspace),
        q_stride=_Strides(*strides(q)),
        k_stride=_Strides(*strides(k)),
        v_stride=_Strides(*strides(v)),
        o_stride=_Strides(*strides(o)),
        **vars(Sizes.of(q, k)),
        softmax_scale=softmax_scale,
    )
