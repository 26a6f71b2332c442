"""A case's lengths and window as plain data, and the sequences that there are by them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from common.lengths import UNLIMITED, Lengths


@dataclass(frozen=True)
class CaseLengths:
    """What common.lengths.Lengths has, without tensors. With seqlens, sequences are packed."""

    seqlens_q: tuple[int, ...] | None = None
    seqlens_k: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED

    def on(self, device: torch.device | str) -> Lengths:
        def tensor(numbers):
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        def starts(seqlens):
            return None if seqlens is None else tensor([0, *accumulate(seqlens)])

        return Lengths(
            starts(self.seqlens_q),
            starts(self.seqlens_k),
            None if self.seqused_k is None else tensor(self.seqused_k),
            self.window_left,
            self.window_right,
        )


class Sequence(NamedTuple):
    """Where a sequence's queries are, and its keys, without those that are not there."""

    batch: int
    queries: slice
    keys: slice

    @property
    def seq_q(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def seq_k(self) -> int:
        return self.keys.stop - self.keys.start

    def own_keys(self, device: torch.device | str) -> torch.Tensor:
        """Of each query, the key in the middle of a window; 0 is the sequence's first one.

        The last query has the last key, and what is before the first key is negative.
        """
        return torch.arange(self.seq_k - self.seq_q, self.seq_k, device=device)


def window_of(lengths: Lengths, causal: bool) -> tuple[int, int]:
    """How far a query sees to the left and to the right of its own key."""
    return lengths.window_left, min(lengths.window_right, 0) if causal else lengths.window_right


def sequences_of(lengths: Lengths, batch: int, seq_q: int, seq_k: int) -> list[Sequence]:
    """The sequences of a call whose tensors have these sizes."""
    if lengths.cu_seqlens_q is None:
        places = [(i, (0, seq_q), (0, seq_k)) for i in range(batch)]
    else:
        starts = (lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist())
        places = [(0, q, k) for q, k in zip(*map(pairwise, starts), strict=True)]
    if lengths.seqused_k is None:
        used = [stop - start for _, _, (start, stop) in places]
    else:
        used = lengths.seqused_k.tolist()
    return [
        Sequence(i, slice(*q), slice(start, start + seqused))
        for (i, q, (start, _)), seqused in zip(places, used, strict=True)
    ]
