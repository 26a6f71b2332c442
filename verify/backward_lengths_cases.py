"""The backward cases with lengths and windows: forward's, and what only gradients can get wrong.

A work is 128 keys of a sequence, counted from its first one, or 64 above 128 columns, and the tiles
of queries that see one of them. These are 128 queries, or 64 above 64 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from common.lengths import UNLIMITED
from common.operation import BACKWARD
from common.problem import Shape
from verify.backward_cases import layouts_of, one_large_row, saved_without
from verify.case import Case
from verify.gradients import sequences_of_all_sizes
from verify.inputs import one_hot_at_first_tiles, one_hot_next_to_tiles
from verify.layouts import contiguous, expanded_rows, packed, padded, transposed
from verify.lengths import CaseLengths
from verify.lengths_cases import few, packed_case, used_case

BF16, FP16 = torch.bfloat16, torch.float16

# Of a key that only the last query of the first tile sees, or the first one of the last tile, dv is
# wrong where the tile is left out; a key that one query alone does not see is wrong where it does.
_FIRST_TILES = {"inputs": one_hot_at_first_tiles}
_NEXT_TO_TILES = {"inputs": one_hot_next_to_tiles}

_OWN = (
    # The first key of a block is in view from the last query of a tile on, from one before it and
    # from one after it; its last key up to the first query of another, up to one before, one after.
    packed_case(
        "tiles_in_window",
        (1, 1),
        64,
        BF16,
        (260, 260, 260),
        (260, 259, 261),
        window=(129, 1),
        **_FIRST_TILES,
    ),
    packed_case(
        "tiles_in_window_128",
        (1, 1),
        128,
        BF16,
        (200, 200, 200),
        (199, 200, 201),
        window=(65, 65),
        **_FIRST_TILES,
    ),
    packed_case(
        "tiles_in_window_causal",
        (1, 1),
        128,
        BF16,
        (200, 200, 200),
        (200, 201, 202),
        window=(66, UNLIMITED),
        causal=True,
        **_FIRST_TILES,
    ),
    # A warp's 16 keys are all in view of a tile of queries; but for one key of one query; but two.
    packed_case(
        "warps_in_window",
        (1, 1),
        64,
        BF16,
        (150, 150, 260),
        (151, 149, 260),
        window=(142, 142),
        **_NEXT_TO_TILES,
    ),
    packed_case(
        "warps_in_window_128",
        (1, 1),
        128,
        BF16,
        (70, 70, 140),
        (69, 71, 140),
        window=(46, 46),
        **_NEXT_TO_TILES,
    ),
    packed_case(
        "warps_causal",
        (1, 1),
        64,
        BF16,
        (130, 130, 130),
        (143, 144, 145),
        causal=True,
        **_NEXT_TO_TILES,
    ),
    # No query sees a block of keys; all but its last one; all of it, and the next one's first one.
    packed_case(
        "keys_before_window",
        (1, 1),
        64,
        BF16,
        (3, 3, 3, 0, 2),
        (140, 141, 142, 260, 400),
        window=(10, UNLIMITED),
        **_FIRST_TILES,
    ),
    # The keys that are not there begin with a block of keys, one before it, one after it.
    packed_case(
        "keys_not_used",
        (1, 1),
        128,
        FP16,
        (2, 1, 40, 2, 0, 1),
        (260, 129, 260, 130, 140, 128),
        used=(130, 128, 127, 0, 3, 128),
        window=(1, UNLIMITED),
        causal=True,
    ),
    packed_case(
        "packed_no_queries",
        (2, 1),
        64,
        BF16,
        (0, 40, 0, 0, 3, 0),
        (300, 40, 0, 129, 128, 1),
    ),
    # By lse alone: the first sequence's last queries see nothing, and none of the second's does.
    packed_case(
        "rows_without_keys_used",
        (2, 1),
        64,
        BF16,
        (70, 40, 0),
        (90, 150, 10),
        used=(80, 140, 10),
        window=(40, UNLIMITED),
        causal=True,
        saved=saved_without(slice(61, None)),
    ),
    # Tiles of queries that end with a batch.
    used_case("used_tile", Shape(3, 2, 1, 128, 140, 64), BF16, (140, 128, 1), (100, 20)),
    # Of a warp's last 16 keys one is not used.
    used_case("used_tile_15", Shape(2, 1, 1, 16, 40, 64), BF16, (31, 40)),
    # What dS is multiplied by, of each sequence and head of k and v. Of 4 heads and 9 tiles one
    # row, which decides, is in the last ones.
    packed_case(
        "dout_of_sequences",
        (4, 2),
        64,
        FP16,
        (70, 3, 0, 130, 9, 30),
        (90, 129, 7, 20, 5, 40),
        dout=sequences_of_all_sizes,
    ),
    used_case(
        "dout_of_batches",
        Shape(3, 2, 2, 70, 150, 128),
        FP16,
        (150, 20, 129),
        (60, UNLIMITED),
        causal=True,
        dout=sequences_of_all_sizes,
    ),
    packed_case("dout_large_row_packed", (4, 1), 72, FP16, (30, 560), (10, 12), dout=one_large_row),
    # Heads of one group in several blocks of keys, which begin with another tile each.
    packed_case(
        "packed_gqa_4",
        (4, 1),
        64,
        FP16,
        (140, 30),
        (270, 140),
        window=(150, 100),
        dout=sequences_of_all_sizes,
    ),
    # More sequences than lanes, some without keys or queries.
    packed_case(
        "packed_33",
        (1, 1),
        8,
        BF16,
        [n % 8 for n in few(6, 33, 150)],
        [n % 13 if n % 3 == 0 else n * (n > 130) for n in few(7, 33, 140)],
        causal=True,
    ),
    # Works of many lengths, which are listed by length.
    packed_case("works_of_all_lengths", (1, 1), 8, BF16, (700, 20, 300), causal=True),
    packed_case(
        "works_in_window", (1, 1), 16, FP16, (500, 300, 40), (400, 600, 300), window=(300, 200)
    ),
    # The gradient of o lies as no other tensor does.
    packed_case(
        "packed_dout_expanded",
        (2, 1),
        64,
        BF16,
        (70, 130, 3),
        (45, 140, 20),
        window=(50, 50),
        layouts=(contiguous,) * 4 + (expanded_rows,) + (contiguous,) * 3,
    ),
    packed_case(
        "packed_dout_strided",
        (2, 2),
        128,
        BF16,
        (70, 3, 40),
        (45, 140, 20),
        causal=True,
        layouts=(contiguous,) * 3 + (packed, transposed, padded, packed, padded),
    ),
    # The ends of tiles and of keys once more, where a work is 64 keys.
    packed_case(
        "half_tiles_in_window",
        (1, 1),
        256,
        FP16,
        (200, 200, 200),
        (199, 200, 201),
        window=(65, 65),
    ),
    packed_case(
        "half_warps_in_window", (1, 1), 256, FP16, (150, 150, 200), (151, 149, 200), window=(78, 78)
    ),
    packed_case(
        "half_keys_not_used",
        (1, 1),
        256,
        FP16,
        (2, 1, 40, 2, 0, 1, 3),
        (130, 65, 130, 66, 70, 64, 140),
        used=(79, 64, 63, 0, 3, 64, 140),
        window=(1, UNLIMITED),
        causal=True,
    ),
    used_case("half_used", Shape(3, 2, 1, 70, 150, 256), FP16, (150, 20, 79), (100, 10)),
    packed_case("half_large_row", (4, 1), 256, FP16, (30, 200), (10, 12), dout=one_large_row),
    # Sixteen heads, then four.
    packed_case(
        "packed_sections_gpu",
        (20, 20),
        64,
        BF16,
        (3000, 90, 1000),
        (2900, 300, 801),
        causal=True,
        gpu_only=True,
    ),
    packed_case(
        "dout_of_sequences_gpu",
        (8, 2),
        128,
        FP16,
        (*few(8, 300, 300), 2000),
        causal=True,
        dout=sequences_of_all_sizes,
        gpu_only=True,
    ),
)

# Forward's own: sections of K and V, tiles of keys that begin with a window, S computed again, and
# how works of queries are listed.
_FORWARD_ONLY = {
    "packed_one_query",
    "packed_causal_alike",
    "used_sections",
    "used_section_of_one",
    "used_ends",
    "window_tile_one_more",
    "window_tile_one_less",
    "window_80_one_more",
    "window_80_one_less",
    "window_begins_tile",
    "window_hides_first",
    "packed_sudden",
    "packed_walks_far",
    "window_rising",
    "window_walks",
    "window_walks_far",
}


# Of these one head is enough, as others have more. The rest has at most half of what forward has.
_ONE_HEAD = {
    "packed_80",
    "packed_tile_ends",
    "packed_300",
    "packed_1100",
    "used_causal",
    "used_window",
    "window_causal_64",
    "window_right",
    "packed_window_left",
}


def _smaller(case: Case) -> dict:
    """Five products take longer than two, and each block of keys of a sequence is work, whether it
    has queries or not: here the SIMT runtime computes in a minute what b11 is checked on.
    """
    shape, lengths = case.shape, case.lengths
    if case.gpu_only:
        return {}
    if case.name in _ONE_HEAD:
        shape = replace(shape, heads=1, kv_heads=1)
    elif shape.heads > 3:
        shape = replace(shape, heads=shape.heads // 2, kv_heads=max(1, shape.kv_heads // 2))
    if case.name in ("packed_300", "packed_1100"):
        with_keys = {0, 1, 298, 299, 1023, 1024, 1099}
        seqlens_k = tuple(
            n if i in with_keys or i % 50 == 24 else 0 for i, n in enumerate(lengths.seqlens_k)
        )
        shape = replace(shape, seq_k=sum(seqlens_k))
        lengths = replace(lengths, seqlens_k=seqlens_k)
    if case.name.startswith("drawn_"):
        halves = [
            seqlens and tuple((n + 1) // 2 for n in seqlens)
            for seqlens in (lengths.seqlens_q, lengths.seqlens_k, lengths.seqused_k)
        ]
        shape = replace(shape, seq_q=sum(halves[0]), seq_k=sum(halves[1]))
        lengths = CaseLengths(*halves, lengths.window_left, lengths.window_right)
    return {"shape": shape, "lengths": lengths}


def backward_lengths_cases(forward: Sequence[Case]) -> tuple[Case, ...]:
    """Those of the forward ones, under the same names, then backward's own."""
    of_forward = (
        replace(case, operation=BACKWARD, layouts=layouts_of(*case.layouts), **_smaller(case))
        for case in forward
        if case.name not in _FORWARD_ONLY
    )
    return (*of_forward, *(replace(case, operation=BACKWARD) for case in _OWN))
