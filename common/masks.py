"""What attention() has to know of a model's mask, as tensors that stand for the mask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .lengths import UNLIMITED

Window = tuple[int, int]  # keys before and after its own that a query sees, UNLIMITED for all
FULL, CAUSAL = (UNLIMITED, UNLIMITED), (UNLIMITED, 0)


@dataclass(frozen=True)
class Segment:
    """Consecutive sequences of a batch, whose queries see no keys but these."""

    sequences: int
    queries: slice  # the others see no key
    keys: slice

    def limits(self, window: Window) -> Window:
        """The window as attention() takes it: -1 for a side that reaches beyond these keys."""
        first, last = (span.stop - span.start - 1 for span in (self.queries, self.keys))
        left, right = window
        return left if left < last else -1, right if right < first else -1


class LazyMask(Tensor):
    """A mask [batch, 1, seq_q, seq_k] whose values are made only where an operator reads them.

    dense() is the bool tensor that it stands for, True where a query sees a key. It is a tensor so
    that models can treat it as one.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(LazyMask, lambda mask: mask.dense(), (args, kwargs or {}))
        return operator(*args, **kwargs)


class SegmentMask(LazyMask):
    """One whose segments and window the host knows.

    In each segment the last query is at the last key, unless the window is FULL.
    """

    @staticmethod
    def __new__(cls, shape, device, segments, window, dense):
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.segments, mask.window, mask.dense = segments, window, dense
        # Whether it hides a key that a full or a causal mask would show.
        mask.is_window = any(s.limits(window) not in ((-1, -1), (-1, 0)) for s in segments)
        mask.lengths = cache(partial(_lengths, segments, *shape[2:]))
        return mask


def _lengths(
    segments: tuple[Segment, ...], seq_q: int, seq_k: int, device: torch.device, groups: int
) -> tuple[Tensor, ...]:
    """cu_seqlens_q, cu_seqlens_k and seqused_k of a batch whose rows are packed, each group of
    heads as sequences of its own.

    Each sequence is three: what it sees and is seen of it, and what lies before and behind that,
    whose queries have no keys. The host does not wait for the GPU.
    """
    spans = [segment for segment in segments for _ in range(segment.sequences * groups)]
    values = [0]
    for i, span in enumerate(spans):
        values += (i * seq_q + end for end in (span.queries.start, span.queries.stop, seq_q))
    values.append(0)
    for i, span in enumerate(spans):
        values += (i * seq_k + end for end in (span.keys.start, span.keys.stop, seq_k))
    for span in spans:
        values += (0, span.keys.stop - span.keys.start, 0)
    tensor = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    ends = 3 * len(spans) + 1
    return tensor.to(device, non_blocking=True).split([ends, ends, ends - 1])


class CacheMask(LazyMask):
    """One on a cache that is not full, where only the GPU knows how many keys have been written.

    Sequence i has the keys start[i] ... stop[i] - 1, and all up to the latter where there is no
    start. Its last query is at the last of them, and no query sees a key after its own. start and
    stop are int32 [batch]: torch.compile takes them as inputs of its graph, which is thus the same
    for all lengths.
    """

    @staticmethod
    def __new__(cls, shape, stop, start, window):
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=stop.device)
        mask.stop, mask.start, mask.window = stop, start, window
        mask.in_segments = None  # the SegmentMask that is the same, where one has been asked for
        return mask

    def __repr__(self) -> str:  # torch logs what it compiles, and there are no values yet
        return f"CacheMask({list(self.shape)}, window={self.window})"

    def _stable_hash_for_caching(self) -> str:  # torch's, of graphs that it has compiled
        return f"{self!r} on {self.device}, {'without' if self.start is None else 'with'} a start"

    def __tensor_flatten__(self):
        return ["stop"] if self.start is None else ["stop", "start"], self.window

    @staticmethod
    def __tensor_unflatten__(parts, window, shape, stride):
        return CacheMask(shape, parts["stop"], parts.get("start"), window)

    def dense(self) -> Tensor:
        _, _, seq_q, seq_k = self.shape
        keys = torch.arange(seq_k, device=self.device)
        queries = torch.arange(seq_q, device=self.device)[:, None]
        own = self.stop[:, None, None, None] + (queries - seq_q)
        shown = (keys <= own) & (keys >= own - self.window[0])
        return shown if self.start is None else shown & (keys >= self.start[:, None, None, None])

    def lengths(self, device: torch.device, groups: int) -> tuple[Tensor, ...]:
        """As a SegmentMask's, where there is a start.

        A sequence's keys reach to the next one's start: it has not written the last of them. Those
        before the first one's start are a sequence without queries.
        """
        _, _, seq_q, seq_k = self.shape
        start, stop = (
            t.to(device)[:, None].expand(-1, groups).flatten() for t in (self.start, self.stop)
        )
        counts = torch.arange(len(start) + 1, dtype=torch.int32, device=device)
        first = counts[:1]
        return (
            torch.cat([first, counts * seq_q]),
            torch.cat([first, start + counts[:-1] * seq_k, counts[-1:] * seq_k]),
            torch.cat([first, stop - start]),
        )
