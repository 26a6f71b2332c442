"""Layouts: how a tensor of a case lies in memory.

A layout allocates a tensor [batch, heads, seq, head_dim] as a view of a larger one, filled with
NaN, and returns both: what is read outside the view shows as NaN, what is written there as a hole
in the NaN. far() says where it does not allocate the larger one.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

Layout = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def contiguous(shape: Sequence[int], **options) -> tuple[torch.Tensor, torch.Tensor]:
    storage = torch.full(tuple(shape), torch.nan, **options)
    return storage, storage


def transposed(shape: Sequence[int], **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored [batch, seq, heads, head_dim]."""
    batch, heads, seq, head_dim = shape
    storage, _ = contiguous((batch, seq, heads, head_dim), **options)
    return storage, storage.transpose(1, 2)


def packed(shape: Sequence[int], **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The middle one of three tensors stored [batch, seq, 3, heads, head_dim]."""
    batch, heads, seq, head_dim = shape
    storage, _ = contiguous((batch, seq, 3, heads, head_dim), **options)
    return storage, storage[:, :, 1].transpose(1, 2)


def padded(shape: Sequence[int], **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaps after each row, each head and each batch; rows stay 16-byte aligned."""
    batch, heads, seq, head_dim = shape
    storage, _ = contiguous((batch, heads + 1, seq + 2, head_dim + 8), **options)
    return storage, storage[:, :heads, :seq, :head_dim]


FAR = 2**32 + 2**24  # elements: 32 bits, with a sign or without, count only some way into the gap
MAP_NORESERVE = 0x4000  # Linux's; not every Python's mmap has it


def far(axis: int) -> Layout:
    """The axis is the outermost, and its last index lies FAR elements after its first.

    On a CPU the gaps take no memory: nobody touches them, since the SIMT runtime gets no gap of
    that size and reports every access to it. So the view is all of the storage that can be written.
    """

    def layout(
        shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        others = [1 if i == axis else n for i, n in enumerate(shape)]
        strides = [math.prod(others[i + 1 :]) for i in range(len(others))]
        strides[axis] = FAR // (shape[axis] - 1)
        size = FAR + math.prod(others)
        if torch.device(device).type == "cpu":
            view = _sparse(size, dtype).as_strided(shape, strides)
            return view.fill_(torch.nan), view
        storage, _ = contiguous((size,), dtype=dtype, device=device)
        return storage, storage.as_strided(shape, strides)

    return layout


def _sparse(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU that take memory only where they are written to, more than there is, too."""
    if sys.platform != "linux":
        return torch.empty(size, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    pages = mmap.mmap(-1, size * dtype.itemsize, flags=flags)
    with suppress(OSError):  # of a kernel without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)  # which would take 2 MiB a row
    return torch.frombuffer(pages, dtype=dtype)


def misaligned_rows(shape: Sequence[int], **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows start at multiples of 4 elements only: 8 bytes with 16-bit elements."""
    batch, heads, seq, head_dim = shape
    storage, _ = contiguous((batch, heads, seq, head_dim + 4), **options)
    return storage, storage[..., :head_dim]


def misaligned_start(shape: Sequence[int], **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous, but the first element lies 4 elements past the start of its storage."""
    storage, _ = contiguous((math.prod(shape) + 4,), **options)
    return storage, storage[4:].view(tuple(shape))


def expanded(shape: Sequence[int], **options) -> tuple[torch.Tensor, torch.Tensor]:
    """All heads are one: head stride 0. For inputs only."""
    batch, heads, seq, head_dim = shape
    storage, _ = contiguous((batch, 1, seq, head_dim), **options)
    return storage, storage.expand(-1, heads, -1, -1)


def expanded_rows(shape: Sequence[int], **options) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows are one, as in the gradient of a sum: the last stride alone is not 0. For inputs."""
    storage, _ = contiguous((1, 1, 1, shape[-1]), **options)
    return storage, storage.expand(*shape)
