"""How a sequence is cut: in zigzag order, so that a causal mask gives every rank the same work.

P ranks cut it into 2 P chunks, as long as torch.tensor_split makes them, and rank r holds chunks r
and 2 P - 1 - r, one of the first and one of the last:

    P = 4:   chunk   0  1  2  3  4  5  6  7
             rank    0  1  2  3  3  2  1  0

With a causal mask the queries of chunk c see c + 1 chunks, half of the last one; those of both
chunks of a rank together see 2 P + 1, whichever rank it is.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_lengths(seq: int, ranks: int) -> list[int]:
    """Of the 2 P chunks of a sequence: the first seq % (2 P) are one longer than the others."""
    whole, longer = divmod(seq, 2 * ranks)
    return [whole + (chunk < longer) for chunk in range(2 * ranks)]


def held_chunks(ranks: int, rank: int) -> tuple[int, int]:
    """The two chunks of a rank, in the order in which it holds them."""
    return rank, 2 * ranks - 1 - rank


def held_lengths(seq: int, ranks: int, rank: int) -> tuple[int, int]:
    """Of the two chunks of a rank; the second may be empty, and the first where seq < ranks."""
    lengths = chunk_lengths(seq, ranks)
    first, second = held_chunks(ranks, rank)
    return lengths[first], lengths[second]


def take_shard(x: Tensor, ranks: int, rank: int, dim: int) -> Tensor:
    """A rank's part of a whole sequence, which lies along dim."""
    chunks = x.tensor_split(2 * ranks, dim)
    return torch.cat([chunks[chunk] for chunk in held_chunks(ranks, rank)], dim)


def join_shards(shards: list[Tensor], dim: int) -> Tensor:
    """The whole sequence, of the parts of all ranks in order."""
    ranks, seq = len(shards), sum(shard.shape[dim] for shard in shards)
    chunks: dict[int, Tensor] = {}
    for rank, shard in enumerate(shards):
        parts = shard.split(held_lengths(seq, ranks, rank), dim)
        chunks.update(zip(held_chunks(ranks, rank), parts, strict=True))
    return torch.cat([chunks[chunk] for chunk in range(2 * ranks)], dim)
