"""The cases with lengths and windows, for the steps that take them beside those of verify/cases.py.

They need no other specializations than those have. A work tile is 64 to 192 queries of a sequence,
and its tiles of keys begin where its first query's window does. So the widths of windows and the
lengths of sequences decide where tiles of 64, 96 or 128 keys end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from common.lengths import UNLIMITED
from common.problem import Shape
from verify.case import Case
from verify.inputs import (
    deep_logits,
    large_logits,
    normal,
    one_hot_at_edges,
    rising_logits,
    sudden_logits,
    walks,
)
from verify.layouts import contiguous, far, packed, padded, transposed
from verify.lengths import CaseLengths

BF16, FP16 = torch.bfloat16, torch.float16
ALL_KEYS = (UNLIMITED, UNLIMITED)


def packed_case(
    name: str,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    seqlens_q: Sequence[int],
    seqlens_k: Sequence[int] | None = None,
    *,
    used: Sequence[int] | None = None,
    window: tuple[int, int] = ALL_KEYS,
    **options,
) -> Case:
    """heads: of q, and of k and v. Without seqlens_k there are as many keys as queries."""
    seqlens_q = tuple(seqlens_q)
    seqlens_k = seqlens_q if seqlens_k is None else tuple(seqlens_k)
    used = None if used is None else tuple(used)
    shape = Shape(1, *heads, sum(seqlens_q), sum(seqlens_k), head_dim)
    return Case(
        name, shape, dtype, lengths=CaseLengths(seqlens_q, seqlens_k, used, *window), **options
    )


def window_case(
    name: str, shape: Shape, dtype: torch.dtype, left: int, right: int = UNLIMITED, **options
) -> Case:
    lengths = CaseLengths(window_left=left, window_right=right)
    return Case(name, shape, dtype, lengths=lengths, **options)


def used_case(
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    used: tuple[int, ...],
    window: tuple[int, int] = ALL_KEYS,
    **options,
) -> Case:
    """Each batch is a sequence, and some of its keys are there."""
    return Case(name, shape, dtype, lengths=CaseLengths(None, None, used, *window), **options)


def few(seed: int, count: int, most: int) -> tuple[int, ...]:
    """Numbers from 1 to most."""
    rng = random.Random(seed)
    return tuple(rng.randint(1, most) for _ in range(count))


# A wrong row of v for a wrong key. Where one row alone is wrong, normal inputs always tell: by lse.
_AT_EDGES = {"inputs": one_hot_at_edges}
# Around the ends of tiles of 64, 96 and 128 keys.
_AROUND_TILES = tuple(tile + more for tile in (64, 96, 128) for more in (-1, 0, 1))

_PACKED = (
    # No queries, no keys, one token, several tiles; of the last sequence few queries have keys.
    packed_case(
        "packed_ragged",
        (4, 2),
        64,
        BF16,
        (37, 1, 0, 200, 5, 129, 0),
        (50, 330, 17, 131, 0, 1, 0),
    ),
    # Causal: more queries than keys, whose first ones see nothing, and fewer.
    packed_case(
        "packed_causal",
        (2, 1),
        64,
        BF16,
        (0, 70, 300, 1, 20, 3),
        (4, 200, 90, 1, 0, 3),
        causal=True,
    ),
    packed_case("packed_self", (4, 1), 128, BF16, (3, 130, 1, 290, 2), causal=True),
    packed_case("packed_one", (2, 1), 64, FP16, (140,), (300,)),
    packed_case("packed_80", (2, 2), 80, BF16, (5, 193, 96), (97, 192, 400)),
    packed_case("packed_72", (2, 1), 72, FP16, (31, 0, 200), (9, 96, 101), layouts=(padded,) * 4),
    packed_case("packed_136", (1, 1), 136, FP16, (130, 7), (200, 97), causal=True),
    packed_case("packed_256", (3, 3), 256, FP16, (66, 1, 100), (129, 64, 100), causal=True),
    # Sequences that end with a tile of keys, one key after it and one before; the same of queries.
    packed_case("packed_tile_ends", (2, 1), 64, BF16, (3,) * 9, _AROUND_TILES),
    packed_case(
        "packed_blocks",
        (1, 1),
        64,
        FP16,
        (64, 65, 128, 127, 192, 193, 191, 129),
        (70, 1, 3, 65, 40, 2, 129, 127),
    ),
    packed_case(
        "packed_causal_ends",
        (1, 1),
        128,
        BF16,
        (64, 65, 128, 127, 129, 130),
        _AROUND_TILES[3:],
        causal=True,
    ),
    # More sequences than threads of a block, or than 8 bits count; of 1,100 few have queries.
    packed_case("packed_300", (1, 1), 8, BF16, few(0, 300, 5), few(1, 300, 5), causal=True),
    packed_case(
        "packed_1100",
        (2, 1),
        16,
        FP16,
        [i % 3 + 1 if i % 50 == 24 or i in (0, 1023, 1024, 1099) else 0 for i in range(1100)],
        [i % 7 for i in range(1100)],
    ),
    # As projections leave them: [total, heads, head_dim], and k and v among three tensors.
    packed_case(
        "packed_transposed",
        (4, 2),
        64,
        BF16,
        (70, 9, 33),
        (40, 151, 1),
        layouts=(transposed,) * 4,
    ),
    packed_case(
        "packed_strided",
        (4, 2),
        128,
        BF16,
        (30, 131, 8),
        (60, 131, 200),
        causal=True,
        layouts=(transposed, packed, packed, padded),
    ),
    packed_case(
        "packed_far_rows", (1, 1), 64, BF16, (20, 1, 12), (3, 20, 10), layouts=(far(2),) * 4
    ),
    packed_case("packed_far_heads", (2, 2), 64, BF16, (9, 31), (45, 3), layouts=(far(1),) * 4),
    packed_case("packed_sudden", (3, 3), 64, BF16, (80, 200), (170, 260), inputs=sudden_logits),
    # S of a tile is computed again where P is lost: of these rows and keys, no others.
    packed_case(
        "packed_walks_far",
        (2, 1),
        64,
        BF16,
        (70, 3, 100),
        (300, 150, 260),
        inputs=walks(-60, 120, -220),
    ),
    packed_case("packed_zero_scale", (1, 1), 64, BF16, (40, 70), (130, 20), softmax_scale=0.0),
    # Few queries and many tiles of keys: warpgroups without queries pass over tiles.
    packed_case("packed_long", (1, 1), 64, BF16, (3, 70), (700, 600)),
    # As many work tiles as queries: no list of them is longer.
    packed_case("packed_one_query", (1, 1), 64, BF16, (1,) * 35, few(6, 35, 200)),
)

_USED = (
    used_case("used", Shape(4, 4, 2, 33, 200, 64), BF16, (200, 131, 0, 1)),
    used_case("used_ends", Shape(9, 1, 1, 3, 140, 64), BF16, _AROUND_TILES),
    # As where a model writes: few queries, the last ones of what is there.
    used_case(
        "used_causal",
        Shape(6, 4, 1, 7, 300, 128),
        BF16,
        (300, 128, 129, 3, 0, 7),
        causal=True,
        layouts=(transposed,) * 4,
    ),
    used_case("used_256", Shape(3, 2, 1, 40, 150, 256), FP16, (65, 150, 64), causal=True),
    used_case(
        "used_window",
        Shape(3, 2, 1, 140, 330, 64),
        BF16,
        (330, 201, 90),
        (70, 20),
        **_AT_EDGES,
    ),
    packed_case(
        "used_packed",
        (4, 2),
        64,
        FP16,
        (40, 0, 140, 1, 9),
        (100, 20, 300, 130, 90),
        used=(65, 20, 201, 0, 70),
    ),
    packed_case(
        "used_packed_causal",
        (2, 1),
        128,
        BF16,
        (40, 200, 1, 1),
        (160, 260, 30, 5),
        used=(140, 129, 29, 0),
        causal=True,
        **_AT_EDGES,
    ),
    packed_case(
        "used_walks_far",
        (2, 2),
        64,
        BF16,
        (70, 30),
        (330, 290),
        used=(301, 140),
        inputs=walks(-60, 120, -220),
        layouts=(contiguous, padded, transposed, contiguous),
    ),
    # As in a long cache: the keys of two of three heads, or of not even one, fit into 32 MiB.
    used_case("used_sections", Shape(2, 6, 3, 70, 24000, 64), BF16, (200, 131)),
    used_case("used_section_of_one", Shape(2, 2, 2, 20, 16500, 256), FP16, (100, 64), causal=True),
)

_WINDOWS = (
    window_case("window_left", Shape(1, 2, 1, 300, 300, 64), BF16, 50),
    window_case("window_right", Shape(2, 2, 2, 200, 330, 64), BF16, UNLIMITED, 40),
    window_case("window", Shape(1, 4, 2, 260, 390, 64), BF16, 100, 17, layouts=(transposed,) * 4),
    window_case("window_own_key", Shape(1, 2, 1, 200, 230, 64), FP16, 0, 0),
    # Keys before the query's own only, and after it only.
    window_case("window_last_keys", Shape(1, 1, 1, 200, 300, 128), BF16, 30, 0, **_AT_EDGES),
    window_case("window_next_keys", Shape(1, 1, 1, 200, 300, 128), BF16, 0, 30, **_AT_EDGES),
    window_case(
        "window_causal", Shape(1, 4, 2, 270, 290, 128), BF16, 100, causal=True, **_AT_EDGES
    ),
    window_case("window_causal_64", Shape(2, 2, 1, 400, 400, 64), BF16, 64, causal=True),
    # The causal mask hides what the window has on the right.
    window_case("window_causal_right", Shape(1, 1, 1, 140, 200, 64), BF16, 30, 50, causal=True),
    # Wider than all keys; sums of the numbers leave 32 bits.
    window_case("window_wide", Shape(1, 2, 1, 140, 300, 64), BF16, 1000, 1000),
    window_case("window_widest", Shape(1, 1, 1, 200, 130, 64), BF16, UNLIMITED - 1, UNLIMITED - 1),
    # 192 queries, and the first 64 of them, see tiles of 128 keys to the last key of one, one key
    # more, one less. Likewise of 80 columns, whose tiles have 96 keys, and of 256, with 64.
    window_case("window_tile", Shape(1, 1, 1, 384, 600, 64), BF16, 40, 24),
    window_case("window_tile_one_more", Shape(1, 1, 1, 384, 600, 64), BF16, 41, 24),
    window_case("window_tile_one_less", Shape(1, 1, 1, 384, 600, 64), BF16, 40, 23),
    window_case("window_80", Shape(1, 1, 1, 230, 500, 80), BF16, 0, 96),
    window_case("window_80_one_more", Shape(1, 1, 1, 230, 500, 80), BF16, 33, 32),
    window_case("window_80_one_less", Shape(1, 1, 1, 230, 500, 80), BF16, 31, 0),
    window_case("window_256", Shape(1, 1, 1, 170, 300, 256), FP16, 64, 0),
    window_case("window_256_one_more", Shape(1, 1, 1, 170, 300, 256), FP16, 32, 33),
    window_case("window_136_one_more", Shape(1, 1, 1, 150, 230, 136), FP16, 65, causal=True),
    # The last of a warp's 16 rows alone sees no key of the first tile, or all but its first key.
    window_case("window_begins_tile", Shape(1, 1, 1, 200, 300, 64), BF16, 115, 40),
    window_case("window_hides_first", Shape(1, 1, 1, 200, 300, 64), BF16, 114, 40),
    window_case("window_begins_tile_256", Shape(1, 1, 1, 100, 150, 256), FP16, 65, 30),
    window_case("window_hides_first_256", Shape(1, 1, 1, 100, 150, 256), FP16, 64, 30),
    # Whole blocks see nothing, and the first key comes into view in the middle of one.
    window_case("window_long_q", Shape(1, 2, 2, 500, 50, 64), BF16, 10, 20, **_AT_EDGES),
    window_case("window_long_q_128", Shape(1, 1, 1, 400, 9, 128), BF16, 3, causal=True),
    window_case("window_short_q", Shape(2, 4, 1, 5, 700, 128), BF16, 129, 2, **_AT_EDGES),
    # Rows whose first tile is hidden: m is set by a later one, where large logits, or such as lie
    # below what stands for -inf, would show another m. O += P V begins there, too.
    window_case(
        "window_large_logits", Shape(1, 1, 1, 380, 420, 64), BF16, 9, 5, inputs=large_logits
    ),
    window_case(
        "window_deep_logits", Shape(1, 1, 1, 260, 330, 64), BF16, 3, 40, inputs=deep_logits
    ),
    window_case(
        "window_rising", Shape(1, 1, 1, 200, 900, 64), BF16, 300, 100, inputs=rising_logits
    ),
    window_case("window_sudden", Shape(1, 3, 3, 260, 400, 256), FP16, 20, 70, inputs=sudden_logits),
    window_case("window_walks", Shape(1, 2, 1, 200, 520, 64), FP16, 150, 90, inputs=walks(2, 25)),
    window_case(
        "window_walks_far",
        Shape(1, 2, 2, 200, 520, 64),
        BF16,
        90,
        150,
        inputs=walks(-60, 120, -220),
    ),
    window_case(
        "window_negative_scale",
        Shape(1, 1, 1, 200, 250, 64),
        BF16,
        20,
        inputs=large_logits,
        softmax_scale=-0.125,
        causal=True,
    ),
    window_case("window_zero_scale", Shape(1, 1, 1, 230, 260, 64), BF16, 20, 3, softmax_scale=0.0),
    # In packed sequences: no window reaches into another one.
    packed_case(
        "packed_window",
        (4, 2),
        64,
        BF16,
        (200, 3, 0, 129, 70),
        (260, 1, 9, 40, 330),
        window=(40, 24),
        **_AT_EDGES,
    ),
    packed_case(
        "packed_window_left",
        (2, 1),
        128,
        BF16,
        (140, 20, 1, 300),
        window=(64, UNLIMITED),
        causal=True,
        layouts=(transposed,) * 4,
        **_AT_EDGES,
    ),
    packed_case(
        "packed_window_right",
        (1, 1),
        256,
        FP16,
        (100, 1, 140),
        (130, 64, 70),
        window=(UNLIMITED, 10),
    ),
    packed_case(
        "packed_window_used",
        (2, 1),
        64,
        BF16,
        (150, 30, 200),
        (300, 60, 200),
        used=(256, 0, 141),
        window=(30, 34),
        inputs=walks(-60, 120, -220),
        layouts=(transposed, packed, packed, transposed),
    ),
)

# Sizes that only a GPU can handle.
_ON_GPU = (
    packed_case(
        "packed_mix_gpu",
        (16, 4),
        128,
        BF16,
        (*few(2, 60, 3000), 9000, *few(3, 300, 40), 0, 1),
        causal=True,
        layouts=(transposed,) * 4,
        gpu_only=True,
    ),
    packed_case(
        "packed_window_gpu",
        (8, 2),
        64,
        BF16,
        (*few(4, 40, 3000), 0),
        (*few(5, 40, 3000), 500),
        used=(*(n // 2 for n in few(5, 40, 3000)), 500),
        window=(700, 300),
        gpu_only=True,
    ),
    window_case(
        "window_gpu", Shape(2, 8, 8, 8192, 8192, 128), BF16, 1024, causal=True, gpu_only=True
    ),
)


# What the drawn cases are compiled for: some of what the others are.
_DRAWN = ((64, BF16, False), (64, BF16, True), (128, BF16, True), (64, FP16, False))


def _drawn(seed: int) -> tuple[Case, ...]:
    """Small problems drawn from the seed, which no step can have been made for."""
    rng = random.Random(seed)
    cases = []
    for i, (head_dim, dtype, causal) in enumerate(_DRAWN):
        kv_heads = rng.randint(1, 2)
        heads = kv_heads * rng.randint(1, 2)
        # Shorter ones more often.
        seqlens_q, seqlens_k = (
            [int(330 * rng.random() ** 2) for _ in range(3)] + [rng.randint(1, 330)] for _ in "qk"
        )
        used = rng.choice((None, [rng.randint(0, seqlen) for seqlen in seqlens_k[:-1]] + [1]))
        window = (rng.choice((UNLIMITED, rng.randint(0, 200))) for _ in "lr")
        layouts = tuple(rng.choice((contiguous, transposed, packed, padded)) for _ in "qkvo")
        inputs = rng.choice((normal, one_hot_at_edges, large_logits, rising_logits))
        cases.append(
            packed_case(
                f"drawn_lengths_{i}",
                (heads, kv_heads),
                head_dim,
                dtype,
                seqlens_q,
                seqlens_k,
                used=used,
                window=tuple(window),
                causal=causal,
                inputs=inputs,
                layouts=layouts,
                softmax_scale=0.125,  # a power of two keeps the yardstick sharp for large logits
            )
        )
    return tuple(cases)


def lengths_cases(seed: int = 0) -> tuple[Case, ...]:
    return (*_PACKED, *_USED, *_WINDOWS, *_ON_GPU, *_drawn(seed))
