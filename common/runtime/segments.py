"""The parts of a tensor's storage that it occupies: all that the SIMT runtime gets of it."""

from __future__ import annotations

import numpy as np
import torch

POISON = -1  # all bits set, as in simt/memory.h: NaN in every dtype
# Bytes. Smaller gaps between rows are part of a segment, as poison; larger ones are left out, and
# the program traps where it accesses one.
LARGE_GAP = 1 << 24

_INTEGERS = {2: torch.int16, 4: torch.int32}


class SegmentedTensor:
    """A tensor's rows and the small gaps between them, as integers, poison at first.

    Without large gaps there is one segment, from the tensor's first element to its last.
    """

    def __init__(self, t: torch.Tensor) -> None:
        self._row = t.shape[-1]
        starts = np.zeros((), np.int64)  # each row's offset, in elements
        for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True):
            starts = starts[..., None] + stride * np.arange(size)
        in_order = np.unique(starts)
        is_large = np.diff(in_order) - self._row > LARGE_GAP // t.element_size()
        begins = in_order[np.r_[True, is_large]]
        sizes = in_order[np.r_[is_large, True]] + self._row - begins
        # Each segment's offset from the tensor's first byte, and its size.
        self.segments = np.stack([begins, sizes], axis=-1) * t.element_size()
        self.elements = np.full(sizes.sum(), POISON, f"i{t.element_size()}")  # one after another
        self._places = np.cumsum(sizes) - sizes  # each segment's offset in them
        self._left_out = begins - self._places  # elements before each segment
        segment = np.searchsorted(begins, starts, side="right") - 1
        self._rows = starts - self._left_out[segment]

    def copy_from(self, t: torch.Tensor) -> None:
        integers = t.detach().view(_INTEGERS[t.element_size()])
        _windows(self.elements, self._row)[self._rows] = integers.numpy()

    def copy_to(self, t: torch.Tensor) -> None:
        rows = _windows(self.elements, self._row)[self._rows]
        t.copy_(torch.from_numpy(rows).view(t.dtype))

    def written_gaps(self) -> np.ndarray:
        """Which elements between the rows are not poison, counted from the tensor's first."""
        gaps = self.elements.copy()
        _windows(gaps, self._row)[self._rows] = POISON
        written = np.flatnonzero(gaps != POISON)
        segment = np.searchsorted(self._places, written, side="right") - 1
        return written + self._left_out[segment]


def _windows(x: np.ndarray, size: int) -> np.ndarray:
    """Views of x[i : i + size] for all i; writing to them writes to x."""
    return np.lib.stride_tricks.sliding_window_view(x, size, writeable=True)
