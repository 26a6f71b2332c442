"""The problems of the backward ladder: all of forward's, and what only gradients can get wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from common.operation import BACKWARD
from common.problem import Shape
from verify.case import Case
from verify.gradients import (
    rows_of_all_sizes,
    saved_by_forward,
    saved_with_more_keys,
    scaled_gradient,
    zero_in_places,
)
from verify.inputs import Inputs, equal_keys, negative_logits, normal, one_hot
from verify.layouts import Layout, contiguous, expanded, expanded_rows, packed, padded, transposed

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def constant_values(case: Case, rng: torch.Generator) -> Inputs:
    """All rows of v are one: dP is delta everywhere, so that dq and dk are 0."""
    q, k, v = normal(case, rng)
    return q, k, v[:, :, :1].expand(case.shape.kv)


def saved_without(rows: slice):
    """o is 0 and lse -inf in these rows: a mask that is not known here has hidden their keys."""

    def saved(
        case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = saved_by_forward(case, q, k, v)
        o[:, :, rows], lse[:, :, rows] = 0, -torch.inf
        return o, lse

    return saved


def one_large_row(case: Case, rng: torch.Generator) -> torch.Tensor:
    """Normal, cut off; in one row of the last head larger by 2^28 than in all others, and negative.

    The factor that brings the others into fp16's range takes this one out of it.
    """
    dout = scaled_gradient(2.0**-16)(case, rng)
    row = dout[:, -1, -50]
    row[:] = -(2.0**28) * row.abs()
    return dout


def layouts_of(
    q: Layout = contiguous, k: Layout = contiguous, v: Layout = contiguous, o: Layout = contiguous
) -> tuple[Layout, ...]:
    """Of q, k, v, o, dout, dq, dk, dv: as forward's lie; an output cannot be expanded."""
    dk, dv = (contiguous if layout is expanded else layout for layout in (k, v))
    return (q, k, v, o, o, q, dk, dv)


_OWN = (
    # A tile of 64 queries and 128 keys, and one row of each more and less; 32 queries.
    Case("tall_tile", Shape(1, 1, 1, 64, 128, 64), BF16),
    Case("tall_one_more", Shape(1, 1, 1, 65, 129, 64), BF16),
    Case("tall_one_less", Shape(1, 1, 1, 63, 127, 64), BF16),
    Case("causal_tall_one_more", Shape(1, 1, 1, 129, 129, 64), BF16, causal=True),
    Case("causal_tall_one_less", Shape(1, 1, 1, 127, 191, 64), BF16, causal=True),
    # The first query of a tile sees all keys of a warp but the last, where it has its maximum.
    Case(
        "causal_one_less_one_hot", Shape(1, 4, 2, 130, 128, 64), BF16, causal=True, inputs=one_hot
    ),
    # The last of a warp's 16 keys is past the end; there P would be infinite.
    Case("one_less_negative_logits", Shape(1, 1, 1, 20, 31, 64), FP16, inputs=negative_logits),
    # Query heads whose dk and dv are one.
    Case("gqa_8", Shape(1, 16, 2, 70, 90, 64), BF16),
    Case("gqa_8_causal", Shape(1, 8, 1, 133, 70, 128), BF16, causal=True),
    Case("gqa_4_fp16", Shape(1, 4, 1, 70, 200, 64), FP16, dout=rows_of_all_sizes),
    # Above 128, dK and dV of 64 keys do not fit into a warpgroup's registers.
    Case("head_dim_96_gqa", Shape(1, 4, 2, 140, 200, 96), BF16, causal=True),
    Case("head_dim_192_gqa", Shape(1, 4, 2, 140, 200, 192), BF16),
    Case("head_dim_256_gqa", Shape(1, 4, 2, 135, 150, 256), BF16),
    Case(
        "head_dim_256_dout_of_all_sizes",
        Shape(1, 2, 1, 140, 130, 256),
        FP16,
        causal=True,
        dout=rows_of_all_sizes,
    ),
    # v's own head_dim, up to 256: one key, queries that see none, and keys that no query sees;
    # K and V in registers, or one of them, or none; a gradient as wide as a tile; dK and dV in one
    # warpgroup; tiles of 128 rows.
    Case("head_dim_192_128_gqa", Shape(1, 4, 2, 140, 200, 192, 128), BF16),
    Case("head_dim_192_128_equal_keys", Shape(1, 1, 1, 60, 300, 192, 128), BF16, inputs=equal_keys),
    Case(
        "head_dim_192_128_dout_of_all_sizes",
        Shape(1, 2, 1, 140, 130, 192, 128),
        FP16,
        causal=True,
        dout=rows_of_all_sizes,
    ),
    Case("head_dim_192_128_one_key", Shape(1, 2, 1, 133, 1, 192, 128), BF16, causal=True),
    Case("head_dim_192_128_short_k", Shape(1, 2, 1, 200, 40, 192, 128), BF16, causal=True),
    Case(
        "head_dim_192_128_keys_without_queries",
        Shape(1, 1, 1, 150, 280, 192, 128),
        BF16,
        causal=True,
        saved=saved_without(slice(75, None)),
    ),
    Case("head_dim_128_256_gqa", Shape(1, 4, 2, 70, 200, 128, 256), BF16, causal=True),
    Case("head_dim_256_184", Shape(1, 2, 1, 135, 330, 256, 184), BF16),
    Case("head_dim_152_248", Shape(1, 1, 1, 70, 150, 152, 248), FP16, causal=True),
    Case("head_dim_256_64", Shape(1, 1, 1, 70, 150, 256, 64), BF16),
    Case("head_dim_64_256", Shape(1, 1, 1, 70, 150, 64, 256), FP16, causal=True),
    Case("head_dim_136_64_gqa", Shape(1, 4, 2, 140, 270, 136, 64), BF16, causal=True),
    Case(
        "head_dim_64_136_strided",
        Shape(2, 2, 1, 79, 143, 64, 136),
        FP16,
        layouts=layouts_of(transposed, padded, packed, contiguous),
    ),
    Case("head_dim_72_24_gqa", Shape(1, 4, 2, 270, 300, 72, 24), BF16),
    Case("head_dim_24_72", Shape(1, 2, 1, 140, 270, 24, 72), BF16, causal=True),
    # Above 256, the blocks of a cluster have slices of the columns: rows that end one before a
    # multiple of 16, one key, one query, blocks of queries that see no key.
    Case(
        "head_dim_264_strided",
        Shape(2, 2, 1, 79, 143, 264),
        BF16,
        layouts=layouts_of(transposed, padded, packed, contiguous),
    ),
    Case("head_dim_264_one_key", Shape(1, 2, 1, 33, 1, 264), BF16),
    Case("head_dim_264_one_query", Shape(1, 4, 1, 1, 33, 264), BF16),
    Case("head_dim_272_short_k", Shape(1, 2, 1, 140, 40, 272), BF16, causal=True),
    Case(
        "head_dim_272_keys_without_queries",
        Shape(1, 1, 1, 79, 100, 272),
        BF16,
        causal=True,
        saved=saved_without(slice(40, None)),
    ),
    # P is the same in all rows: rounded for dS, too, it would be a bias of dq and dk.
    Case("head_dim_264_equal_keys", Shape(1, 1, 1, 60, 300, 264), BF16, inputs=equal_keys),
    Case(
        "head_dim_320_dout_of_all_sizes",
        Shape(1, 2, 1, 95, 100, 320),
        FP16,
        causal=True,
        dout=rows_of_all_sizes,
    ),
    # So many tiles of queries that dk and dv cannot be added up in 16 bits.
    Case("many_queries", Shape(1, 1, 1, 8300, 3, 64), BF16),
    # Persistent blocks go through the heads by 32 MB of Q, dO and dQ: here through two, then the
    # third. With a mask, the last queries alone see a key; of three blocks of keys, so that the
    # order of their sums is in the bits.
    Case("sections", Shape(1, 3, 3, 11000, 384, 128), FP16, causal=True, inputs=negative_logits),
    Case("sections_gpu", Shape(1, 20, 20, 4090, 4001, 64), BF16, causal=True, gpu_only=True),
    # Works that are no multiple of 2 blocks, or of 3, with enough tiles of queries to be shared out
    # all the same. They differ in heads, keys or batches, and are cut between the heads of a group.
    Case("query_shares", Shape(1, 24, 3, 600, 33, 64), BF16),
    Case("query_shares_fp16", Shape(1, 16, 2, 390, 140, 64), FP16, dout=rows_of_all_sizes),
    Case("query_shares_128", Shape(3, 8, 1, 300, 20, 128), BF16),
    # On 5 multiprocessors, too: the third block has the rest of a work, a whole one, and the
    # beginning of another.
    Case("query_shares_72", Shape(1, 17, 1, 80, 780, 72), FP16, dout=rows_of_all_sizes),
    # A few works more than a GPU has multiprocessors, and half as many again, of hardly more tiles
    # than are shared out.
    Case("query_shares_gpu_128", Shape(5, 28, 14, 700, 200, 128), BF16, gpu_only=True),
    Case(
        "query_shares_gpu",
        Shape(3, 26, 13, 2500, 600, 64),
        FP16,
        dout=rows_of_all_sizes,
        gpu_only=True,
    ),
    # The gradient of o.
    Case("dout_zero_in_places", Shape(1, 2, 1, 133, 140, 64), BF16, dout=zero_in_places),
    Case("dout_zero", Shape(1, 1, 1, 40, 70, 64), FP16, dout=scaled_gradient(0)),
    # dS alone is beyond fp16 here; and here below its normal numbers.
    Case(
        "dout_huge",
        Shape(1, 16, 16, 5, 5, 64),
        FP16,
        softmax_scale=1 / 16,
        dout=scaled_gradient(2.0**14),
    ),
    Case("dout_tiny", Shape(1, 2, 2, 150, 200, 64), FP16, dout=scaled_gradient(2.0**-13)),
    Case("dout_of_all_sizes", Shape(1, 2, 2, 150, 200, 64), FP16, dout=rows_of_all_sizes),
    # One query decides by what dS must be multiplied: not of the first head, tile or warp.
    Case("dout_one_large_row", Shape(1, 4, 2, 150, 12, 64), FP16, dout=one_large_row),
    Case("dout_one_large_row_late", Shape(1, 1, 1, 16500, 3, 16), FP16, dout=one_large_row),
    Case(
        "dout_expanded",
        Shape(2, 4, 2, 70, 45, 64),
        BF16,
        layouts=(contiguous,) * 4 + (expanded_rows,) + (contiguous,) * 3,
    ),
    Case(
        "dout_transposed",
        Shape(2, 4, 2, 70, 45, 64),
        FP16,
        layouts=(contiguous,) * 4 + (transposed,) + (contiguous,) * 3,
    ),
    Case(
        "dout_packed",
        Shape(2, 2, 2, 45, 70, 64),
        BF16,
        causal=True,
        layouts=(contiguous,) * 3 + (packed, packed, padded, packed, padded),
    ),
    # What is known to be 0, and o and lse that are not those of these keys alone.
    Case("constant_values", Shape(1, 2, 2, 130, 140, 64), BF16, inputs=constant_values),
    Case("constant_values_fp32", Shape(1, 1, 1, 40, 70, 64), FP32, inputs=constant_values),
    Case("more_keys", Shape(1, 2, 1, 140, 150, 64), BF16, saved=saved_with_more_keys),
    Case("more_keys_fp16", Shape(1, 1, 1, 70, 70, 64), FP16, saved=saved_with_more_keys),
    Case("more_keys_fp32", Shape(1, 1, 1, 50, 60, 64), FP32, saved=saved_with_more_keys),
    # Here -inf is in lse, and not the mask's.
    Case(
        "rows_without_keys",
        Shape(1, 2, 1, 70, 90, 64),
        BF16,
        saved=saved_without(slice(1, None, 3)),
    ),
    Case(
        "rows_without_keys_fp32",
        Shape(1, 1, 1, 40, 70, 64),
        FP32,
        saved=saved_without(slice(1, None, 3)),
    ),
    # Only these rows could see the last keys, whose gradients of 0 must be written.
    Case(
        "keys_without_queries",
        Shape(1, 2, 1, 150, 280, 64),
        BF16,
        causal=True,
        saved=saved_without(slice(75, None)),
    ),
    # 0 times a negative scale.
    Case(
        "negative_scale_short_k",
        Shape(1, 1, 1, 80, 40, 64),
        BF16,
        causal=True,
        softmax_scale=-0.125,
    ),
)


# Five products take longer than two: what has many heads, work tiles or keys is cut down here, so
# that the SIMT runtime checks b01 to b04 in four minutes.
_SMALLER = {
    # With a mask, of the queries beyond 16 bits the last ones alone see a key.
    "queries_66000": {"shape": Shape(1, 1, 1, 66000, 3, 8), "dtype": BF16, "causal": True},
    "single_query": {"shape": Shape(2, 2, 1, 1, 777, 64)},
    "long": {"shape": Shape(1, 1, 1, 21, 2099, 128)},
    "wide_tiles": {"shape": Shape(1, 2, 1, 192, 400, 64)},
    "sudden_logits": {"shape": Shape(1, 3, 3, 140, 300, 64)},
    "sudden_logits_causal": {"shape": Shape(1, 3, 3, 250, 270, 64)},
    "causal_whole_tiles": {"shape": Shape(1, 1, 1, 448, 448, 64)},
    "many_works": {"shape": Shape(1, 9, 9, 33, 100, 8)},
    "sudden_in_late_heads": {"shape": Shape(1, 9, 9, 33, 200, 8)},
    "many_blocks": {"shape": Shape(1, 2, 1, 700, 140, 8)},
    "rounds": {"shape": Shape(1, 2, 1, 130, 300, 80)},
    "spare_group": {"shape": Shape(1, 2, 2, 260, 300, 64)},
    "shares": {"shape": Shape(1, 2, 2, 20, 900, 64)},
    "shares_walks": {"shape": Shape(1, 2, 2, 20, 900, 64)},
    "shares_walks_far": {"shape": Shape(1, 2, 1, 20, 900, 64)},
    "shares_spare_group": {"shape": Shape(1, 1, 1, 260, 500, 64)},
    "shares_one_tile": {"shape": Shape(1, 2, 2, 20, 890, 64)},
    "shares_128": {"shape": Shape(1, 1, 1, 70, 700, 128)},
    "shares_256": {"shape": Shape(1, 1, 1, 70, 400, 256)},
    "sink": {"shape": Shape(1, 1, 1, 21, 4099, 64)},
    "walks_far_strided": {"shape": Shape(2, 2, 1, 35, 330, 72)},
    # 776 times an integer is not exact in bf16: large logits would make any P pass.
    "head_dim_776": {"inputs": normal, "softmax_scale": None},
}


def _smaller(case: Case) -> dict:
    if case.name.startswith("drawn_"):
        shape = case.shape
        seq_q, seq_k = (1 + seq // 3 for seq in (shape.seq_q, shape.seq_k))
        return {"shape": replace(shape, batch=min(2, shape.batch), seq_q=seq_q, seq_k=seq_k)}
    return _SMALLER.get(case.name, {})


def backward_cases(forward: Sequence[Case]) -> tuple[Case, ...]:
    """The backward cases: those of the forward ones, under the same names, then its own."""
    of_forward = (
        replace(case, operation=BACKWARD, layouts=layouts_of(*case.layouts), **_smaller(case))
        for case in forward
    )
    return (*of_forward, *(replace(case, operation=BACKWARD) for case in _OWN))
