"""The problems that every step is checked on: seeded, each chosen for a mistake it would show.

A step is compiled for each (head_dim, dtype, causal), so the cases share eighteen of those; sizes
are small because the SIMT runtime executes them thread by thread. Tiles are 16 to 192 rows: the
lengths of the ragged cases are multiples of none. The steps on the tensor cores take no fp32: what
an fp32 case shows of the scalar steps, another one must show of them. Persistent steps run on 2
multiprocessors and on 3 (check.py adds other numbers), so that a block computes many work tiles.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from common.errors import UsageError
from common.operation import FORWARD, OPERATIONS, Operation
from common.problem import HEADLINE, Shape
from verify.backward_cases import backward_cases
from verify.backward_lengths_cases import backward_lengths_cases
from verify.case import Case
from verify.inputs import (
    constant,
    deep_logits,
    end_of_fp16,
    equal_keys,
    equal_logits_near_1000,
    first_key_sink,
    graded,
    large_logits,
    large_values,
    later_keys_larger,
    negative_logits,
    normal,
    normal_logits,
    one_hot,
    own_key,
    rising_logits,
    sink,
    staircase,
    subnormal_values,
    sudden_in_late_heads,
    sudden_logits,
    walks,
)
from verify.layouts import (
    contiguous,
    expanded,
    far,
    misaligned_rows,
    misaligned_start,
    packed,
    padded,
    transposed,
)
from verify.lengths_cases import lengths_cases

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = (
    # Lengths: one token, one key, one query, whole tiles, ragged ones.
    Case("tiles", Shape(1, 2, 2, 256, 256, 64), BF16),
    Case("ragged", Shape(1, 2, 2, 197, 331, 64), BF16),
    Case("single_token", Shape(1, 1, 1, 1, 1, 64), BF16),
    Case("single_key", Shape(2, 2, 2, 37, 1, 64), BF16),
    Case("single_query", Shape(2, 4, 2, 1, 777, 64), BF16),
    Case("long", Shape(1, 1, 1, 21, 4099, 128), BF16),
    # One tile of 128 queries and 64 keys, and one row of each more and less.
    Case("one_tile", Shape(1, 1, 1, 128, 64, 64), BF16),
    Case("one_more", Shape(1, 1, 1, 129, 65, 64), BF16),
    Case("one_less", Shape(1, 1, 1, 127, 63, 64), BF16),
    # The same for Hopper's tiles, of 192 queries and 128 keys.
    Case("wide_tile", Shape(1, 1, 1, 192, 128, 64), BF16),
    Case("wide_one_more", Shape(1, 1, 1, 193, 129, 64), BF16),
    Case("wide_one_less", Shape(1, 1, 1, 191, 127, 64), BF16),
    # A query in every row of the block, and enough tiles for their places to be filled again.
    Case("wide_tiles", Shape(1, 4, 2, 192, 400, 64), BF16),
    # 5 groups of 64 queries, where two blocks of 192 have room for 6.
    Case("spare_group", Shape(1, 2, 2, 260, 700, 64), BF16),
    Case("spare_group_one_tile", Shape(1, 2, 1, 260, 100, 64), BF16),
    Case("long_fp32", Shape(1, 1, 1, 20, 1100, 64), FP32),
    # More keys, and more queries, than 16 bits count.
    Case("queries_66000", Shape(1, 1, 1, 66000, 3, 16), FP16),
    Case("keys_66000", Shape(1, 1, 1, 1, 66000, 8), BF16, causal=True),
    # Causal: equal lengths, fewer queries than keys, more (the first rows see no key).
    Case("causal", Shape(1, 2, 2, 256, 256, 64), BF16, causal=True),
    Case("causal_ragged", Shape(3, 1, 1, 197, 197, 128), BF16, causal=True),
    Case("causal_short_q", Shape(1, 2, 1, 135, 350, 128), FP16, causal=True),
    Case("causal_short_k", Shape(1, 2, 2, 350, 135, 64), BF16, causal=True),
    Case("causal_short_k_fp32", Shape(1, 1, 1, 183, 19, 64), FP32, causal=True),
    Case("causal_one_query", Shape(1, 4, 1, 1, 330, 128), BF16, causal=True),
    Case("causal_one_key", Shape(1, 2, 2, 133, 1, 128), BF16, causal=True),
    # A warp's first query, whether it has 16, 32 or 64, sees all keys of a tile but the last.
    Case("causal_one_less", Shape(1, 1, 1, 129, 127, 64), BF16, causal=True),
    # The last query of a block, and of a warp, sees one key of its last tile.
    Case("causal_one_more", Shape(1, 1, 1, 256, 257, 64), BF16, causal=True),
    Case("causal_wide_one_less", Shape(1, 1, 1, 257, 255, 128), BF16, causal=True),
    # A whole block of Hopper's whose last query alone sees the first key of a tile: of 128 keys,
    # with 192 and with 128 queries, and of 80 keys.
    Case("causal_wide_one_more", Shape(1, 1, 1, 192, 257, 64), BF16, causal=True),
    Case("causal_128_one_more", Shape(1, 1, 1, 128, 129, 128), BF16, causal=True),
    Case("causal_80_one_more", Shape(1, 1, 1, 128, 161, 136), FP16, causal=True),
    # Hopper's block in the middle ends with a tile, and is neither the first nor the last of those
    # that a persistent block computes.
    Case("causal_whole_tiles", Shape(1, 2, 2, 448, 448, 64), BF16, causal=True),
    # Heads and strides.
    Case("gqa", Shape(1, 8, 2, 33, 45, 64), FP32),
    Case(
        "gqa_causal_padded", Shape(2, 4, 1, 141, 157, 128), BF16, causal=True, layouts=(padded,) * 4
    ),
    Case("gqa_transposed", Shape(3, 6, 2, 39, 50, 64), BF16, layouts=(transposed,) * 4),
    Case("packed", Shape(2, 2, 2, 45, 45, 64), FP16, layouts=(packed,) * 4),
    Case(
        "each_its_own",
        Shape(2, 4, 2, 43, 51, 64),
        BF16,
        layouts=(transposed, padded, packed, contiguous),
    ),
    Case(
        "each_another",
        Shape(2, 2, 2, 51, 43, 64),
        FP32,
        layouts=(contiguous, packed, transposed, padded),
    ),
    Case(
        "expanded",
        Shape(2, 4, 2, 35, 51, 64),
        BF16,
        layouts=(contiguous, expanded, expanded, contiguous),
    ),
    Case("padded", Shape(2, 2, 2, 51, 70, 64), FP32, layouts=(padded,) * 4),
    # More heads, and more batches, than 8 bits count.
    Case("heads_258", Shape(1, 258, 86, 1, 3, 8), BF16, causal=True),
    Case("batches_258", Shape(258, 1, 1, 1, 3, 8), BF16, causal=True),
    # Farther apart than 32 bits can count: batches, heads, rows, every 16th row of a tile, tiles.
    Case("far_batches", Shape(2, 2, 1, 33, 40, 64), BF16, layouts=(far(0),) * 4),
    Case("far_heads", Shape(1, 2, 2, 33, 40, 64), BF16, layouts=(far(1),) * 4),
    Case("far_rows", Shape(1, 1, 1, 2, 2, 64), BF16, layouts=(far(2),) * 4),
    Case("far_16_rows", Shape(1, 1, 1, 17, 17, 64), BF16, layouts=(far(2),) * 4),
    Case("far_tiles", Shape(1, 1, 1, 257, 257, 64), BF16, layouts=(far(2),) * 4),
    # Rows that are not aligned to 16 bytes.
    Case(
        "misaligned_rows",
        Shape(1, 2, 2, 35, 70, 64),
        BF16,
        layouts=(contiguous, misaligned_rows, contiguous, contiguous),
        may_refuse=True,
    ),
    Case(
        "misaligned_start",
        Shape(1, 2, 2, 35, 70, 64),
        BF16,
        layouts=(contiguous, contiguous, misaligned_start, contiguous),
        may_refuse=True,
    ),
    Case(
        "misaligned_output",
        Shape(1, 2, 2, 35, 70, 64),
        BF16,
        layouts=(contiguous, contiguous, contiguous, misaligned_rows),
        may_refuse=True,
    ),
    # Numbers.
    Case("large_logits", Shape(1, 2, 2, 140, 300, 64), BF16, inputs=large_logits),
    Case("large_logits_fp32", Shape(1, 2, 1, 50, 90, 64), FP32, inputs=large_logits),
    Case(
        "large_logits_causal", Shape(1, 1, 1, 165, 290, 64), BF16, causal=True, inputs=large_logits
    ),
    Case("negative_logits", Shape(1, 1, 1, 140, 350, 64), FP16, inputs=negative_logits),
    Case(
        "negative_logits_causal",
        Shape(1, 1, 1, 170, 170, 64),
        FP32,
        causal=True,
        inputs=negative_logits,
    ),
    Case("rising_logits", Shape(1, 1, 1, 140, 900, 64), BF16, inputs=rising_logits),
    Case("rising_logits_fp32", Shape(1, 2, 2, 135, 470, 64), FP32, inputs=rising_logits),
    Case("sudden_logits", Shape(1, 6, 6, 140, 300, 64), BF16, inputs=sudden_logits),
    Case(
        "sudden_logits_causal",
        Shape(1, 5, 5, 250, 270, 64),
        BF16,
        causal=True,
        inputs=sudden_logits,
    ),
    # More work tiles than a word has bits, for each of two blocks.
    Case("many_works", Shape(1, 66, 66, 33, 100, 8), BF16, causal=True),
    Case(
        "sudden_in_late_heads",
        Shape(1, 66, 66, 33, 200, 8),
        BF16,
        causal=True,
        inputs=sudden_in_late_heads,
    ),
    # More of them in one head than four rounds of blocks.
    Case("many_blocks", Shape(1, 2, 1, 2500, 140, 8), BF16, causal=True),
    # Several rounds, with jumps in some of them, without a mask.
    Case("rounds", Shape(2, 10, 5, 130, 300, 80), BF16, inputs=sudden_logits),
    # The same where Q is in registers and O leaves from its place in shared memory.
    Case("wide_rounds", Shape(2, 3, 3, 40, 140, 128), BF16),
    # Work tiles that are no multiple of the blocks, with enough keys to be shared out all the same.
    # In the walks m is raised before a work tile is handed over and after it, and S is lost.
    Case("shares", Shape(1, 7, 7, 20, 1400, 64), BF16),
    Case("shares_walks", Shape(1, 7, 7, 20, 1400, 64), FP16, inputs=walks(2, 25)),
    Case("shares_walks_far", Shape(1, 3, 1, 20, 1400, 64), BF16, inputs=walks(-60, 120, -220)),
    Case("shares_spare_group", Shape(1, 3, 3, 260, 1400, 64), BF16),
    # On 5 multiprocessors the first block begins a single tile of 7.
    Case("shares_one_tile", Shape(1, 6, 6, 20, 890, 64), FP16, inputs=walks(2, 25)),
    Case("shares_128", Shape(1, 3, 3, 70, 1400, 128), BF16),
    Case("shares_256", Shape(1, 3, 3, 70, 700, 256), FP16),
    # Where keys are split, 5 parts of each row on 5 multiprocessors: for one lane of the merge,
    # which takes 4 at once, and for two.
    Case("rising_256", Shape(1, 1, 1, 45, 330, 256), FP16, inputs=rising_logits),
    Case("one_query_8", Shape(1, 3, 1, 1, 700, 8), BF16, causal=True),
    Case(
        "staircase", Shape(1, 1, 1, 21, 4099, 64), BF16, inputs=staircase, softmax_scale=0.0018 / 64
    ),
    Case("sink", Shape(1, 2, 2, 21, 4099, 64), BF16, inputs=sink),
    Case("graded", Shape(1, 13, 13, 40, 300, 64), FP16, inputs=graded(12, 18)),
    Case(
        "end_of_fp16",
        Shape(1, 1, 1, 40, 300, 64),
        FP16,
        inputs=end_of_fp16,
        softmax_scale=math.log(2) / 4,
    ),
    Case("graded_huge_values", Shape(1, 7, 7, 40, 300, 64), BF16, inputs=graded(30, 90, 2.0**60)),
    # The maximum of a long row far above, and far behind, all that a part of a block has seen.
    Case("late_maximum", Shape(1, 1, 1, 21, 1100, 64), BF16, inputs=graded(280, 280)),
    # Rows that rise and fall in different tiles: by powers of two that P may take in float, and by
    # such that it may not; with a mask, with the strides of neither K nor V, with a negative scale.
    Case("walks", Shape(1, 2, 1, 70, 520, 64), FP16, inputs=walks(2, 25)),
    Case("walks_huge_values", Shape(1, 1, 1, 70, 520, 64), BF16, inputs=walks(4, 20, 0, 2.0**80)),
    Case("walks_tiny_values", Shape(1, 1, 1, 70, 520, 64), BF16, inputs=walks(4, 20, 0, 2.0**-60)),
    Case("walks_far", Shape(1, 2, 2, 70, 520, 64), BF16, inputs=walks(-60, 120, -220)),
    Case(
        "walks_far_causal",
        Shape(1, 2, 1, 210, 330, 64),
        BF16,
        causal=True,
        inputs=walks(-40, 120, -240),
    ),
    Case(
        "walks_far_strided",
        Shape(2, 4, 2, 35, 330, 72),
        FP16,
        inputs=walks(-40, 120, -240),
        layouts=(transposed, padded, packed, contiguous),
        softmax_scale=-0.125,
    ),
    Case(
        "walks_far_apart",
        Shape(1, 1, 1, 33, 257, 64),
        BF16,
        inputs=walks(-60, 120, -220),
        layouts=(far(2),) * 4,
    ),
    # Ordinary numbers, of which `make bench DIST=1` tells the speed.
    Case("normal_4", Shape(1, 1, 1, 200, 300, 64), FP16, inputs=normal_logits(4)),
    Case("normal_16", Shape(1, 1, 1, 200, 300, 64), BF16, inputs=normal_logits(16)),
    Case("later_keys_larger", Shape(1, 1, 1, 100, 400, 64), FP16, inputs=later_keys_larger),
    Case("own_key", Shape(1, 2, 1, 200, 300, 64), BF16, causal=True, inputs=own_key),
    Case("first_key_sink", Shape(1, 1, 1, 60, 300, 64), FP16, inputs=first_key_sink),
    # P = 1 / 300 is the same in all rows, so its rounding to bf16 is a bias of o.
    Case("equal_keys", Shape(1, 1, 1, 60, 300, 64), BF16, inputs=equal_keys),
    Case("deep_logits", Shape(1, 1, 1, 150, 170, 64), BF16, causal=True, inputs=deep_logits),
    Case("one_hot", Shape(1, 2, 2, 175, 340, 64), BF16, inputs=one_hot),
    Case("one_hot_causal", Shape(1, 2, 1, 290, 290, 64), BF16, causal=True, inputs=one_hot),
    Case("constant", Shape(1, 1, 1, 35, 350, 64), FP16, inputs=constant),
    Case("constant_causal", Shape(1, 1, 1, 175, 175, 64), FP32, causal=True, inputs=constant),
    Case("near_1000", Shape(1, 1, 1, 35, 350, 64), FP16, inputs=equal_logits_near_1000),
    Case("large_values", Shape(1, 1, 1, 45, 77, 64), FP16, inputs=large_values),
    Case("subnormal_values", Shape(1, 1, 1, 35, 41, 64), FP16, inputs=subnormal_values),
    Case("negative_scale", Shape(1, 1, 1, 40, 100, 64), FP16, softmax_scale=-0.3),
    Case(
        "negative_scale_causal",
        Shape(1, 1, 1, 100, 150, 64),
        BF16,
        causal=True,
        inputs=large_logits,
        softmax_scale=-0.125,
    ),
    Case("zero_scale", Shape(1, 1, 1, 150, 100, 64), BF16, causal=True, softmax_scale=0.0),
    # Head dimensions.
    Case("head_dim_8", Shape(2, 2, 2, 170, 190, 8), BF16, causal=True),
    Case("head_dim_8_fp32", Shape(2, 2, 2, 170, 190, 8), FP32, causal=True),
    Case("head_dim_16", Shape(2, 2, 1, 70, 150, 16), FP16),
    Case("head_dim_40", Shape(1, 2, 2, 135, 175, 40), BF16),
    Case("head_dim_48", Shape(1, 2, 2, 140, 170, 48), BF16, causal=True),
    Case("head_dim_72", Shape(1, 2, 1, 70, 139, 72), FP16),
    Case("head_dim_136", Shape(1, 1, 1, 135, 150, 136), FP16, causal=True),
    Case("head_dim_256", Shape(1, 3, 3, 145, 170, 256), FP16, causal=True, inputs=sudden_logits),
    Case("head_dim_256_fp32", Shape(1, 1, 1, 145, 170, 256), FP32, causal=True),
    Case("head_dim_264", Shape(1, 2, 1, 70, 150, 264), BF16),
    Case("head_dim_272", Shape(1, 1, 1, 70, 40, 272), BF16, causal=True),
    Case("head_dim_320", Shape(1, 2, 2, 126, 170, 320), FP16, causal=True, inputs=sudden_logits),
    Case(
        "head_dim_384",
        Shape(1, 4, 2, 40, 270, 384),
        BF16,
        inputs=walks(-60, 120, -220),
        softmax_scale=2.0**-5,  # so that logits are exact
    ),
    Case("head_dim_512", Shape(1, 2, 1, 135, 190, 512), BF16, causal=True),
    Case("head_dim_512_long", Shape(1, 1, 1, 10, 700, 512), FP16, inputs=walks(-60, 90)),
    Case("head_dim_576", Shape(1, 2, 2, 126, 190, 576), FP16, causal=True, inputs=sudden_logits),
    Case(
        "head_dim_776",
        Shape(1, 1, 1, 20, 133, 776),
        BF16,
        inputs=large_logits,
        softmax_scale=2.0**-5,
    ),
    Case("head_dim_832", Shape(2, 2, 1, 20, 70, 832), FP16, causal=True),
    Case("head_dim_1024", Shape(1, 2, 2, 70, 165, 1024), BF16, inputs=walks(-60, 120, -220)),
    # v has a head_dim of its own: in three slices, in one, and in two where a block has no columns
    # of K, or none of V; and in three whose last ones are short.
    Case("head_dim_576_512", Shape(1, 4, 2, 135, 190, 576, 512), BF16, causal=True),
    Case("head_dim_576_512_long", Shape(1, 1, 1, 10, 700, 576, 512), FP16, inputs=walks(-60, 90)),
    Case("head_dim_576_512_1_key", Shape(1, 2, 1, 70, 1, 576, 512), BF16, causal=True),
    Case(
        "head_dim_192_128",
        Shape(2, 4, 2, 141, 157, 192, 128),
        BF16,
        causal=True,
        layouts=(transposed, padded, packed, padded),
    ),
    Case("head_dim_128_192", Shape(1, 3, 3, 70, 270, 128, 192), FP16, inputs=sudden_logits),
    Case(
        "head_dim_64_512",
        Shape(1, 2, 2, 70, 165, 64, 512),
        BF16,
        inputs=walks(-60, 120, -220),
    ),
    Case(
        "head_dim_512_64",
        Shape(1, 2, 1, 150, 133, 512, 64),
        BF16,
        causal=True,
        inputs=large_logits,
        softmax_scale=2.0**-5,
    ),
    Case(
        "head_dim_264_520",
        Shape(1, 2, 1, 70, 150, 264, 520),
        FP16,
        layouts=(padded, transposed, padded, padded),
    ),
    # Sizes that only a GPU can handle.
    replace(Case.of("headline", HEADLINE), gpu_only=True),
    Case("headline_causal", Shape(2, 16, 4, 4096, 4096, 128), BF16, causal=True, gpu_only=True),
    Case("long_16k", Shape(1, 2, 1, 16384, 16381, 64), BF16, causal=True, gpu_only=True),
    # Several tiles of keys for each of several work tiles, of heads that share keys in pairs.
    Case("head_dim_512_heads", Shape(2, 24, 12, 300, 4000, 512), BF16, causal=True, gpu_only=True),
    # All heads share one of keys and values, as in MLA's decoding.
    Case("head_dim_576_512_heads", Shape(2, 16, 1, 300, 4000, 576, 512), BF16, gpu_only=True),
    # As many work tiles as a GPU has multiprocessors, and a few more.
    Case("shares_gpu", Shape(1, 140, 2, 20, 2100, 64), FP16, inputs=walks(2, 25), gpu_only=True),
    Case("shares_gpu_128", Shape(5, 30, 3, 70, 2100, 128), BF16, gpu_only=True),
    Case("shares_gpu_256", Shape(1, 135, 135, 70, 1100, 256), FP16, gpu_only=True),
    Case("many_scores", Shape(1, 33, 33, 8192, 8192, 64), BF16, gpu_only=True),  # over 2^31
    Case(
        "sudden_in_late_heads_gpu",
        Shape(1, 5280, 5280, 33, 200, 8),
        BF16,
        causal=True,
        inputs=sudden_in_late_heads,
        gpu_only=True,
    ),
    Case(
        "many_heads", Shape(5, 40, 8, 250, 513, 64), BF16, layouts=(transposed,) * 4, gpu_only=True
    ),
)


# What the drawn cases are compiled for: some of what CASES are. The scalar steps take all of them,
# the others those that are not fp32.
_DRAWN = (
    (64, BF16, False),
    (64, BF16, True),
    (128, BF16, False),
    (128, BF16, True),
    (64, FP16, False),
    (8, BF16, True),
    (64, FP32, False),
    (64, FP32, True),
)


def drawn_cases(seed: int) -> tuple[Case, ...]:
    """Small problems drawn from the seed, which no step can have been made for."""
    rng = random.Random(seed)
    cases = []
    for i, (head_dim, dtype, causal) in enumerate(_DRAWN):
        kv_heads = rng.randint(1, 3)
        heads = kv_heads * rng.randint(1, 2)
        lengths = rng.randint(1, 330), rng.randint(1, 330)
        shape = Shape(rng.randint(1, 3), heads, kv_heads, *lengths, head_dim)
        layouts = tuple(rng.choice((contiguous, transposed, packed, padded)) for _ in "qkvo")
        inputs = rng.choice((normal, normal, large_logits, rising_logits))
        cases.append(Case(f"drawn_{i}", shape, dtype, causal, inputs, layouts))
    return tuple(cases)


def all_cases(
    operation: Operation = FORWARD, seed: int = 0, lengths: bool = False
) -> tuple[Case, ...]:
    """The cases of one operation; one of another may have the same name.

    lengths: of a step that takes them. It has cases with lengths after those of all steps.
    """
    forward = CASES + drawn_cases(seed)
    if operation == FORWARD:
        return forward + lengths_cases(seed) if lengths else forward
    backward = backward_cases(forward)
    return backward + backward_lengths_cases(lengths_cases(seed)) if lengths else backward


def find_cases(
    names: Sequence[str], operation: Operation = FORWARD, seed: int = 0, lengths: bool = False
) -> tuple[Case, ...]:
    """Of all_cases() those of these names, in its order; of some names there may be none.

    Raises UsageError listing the names that there are for any step.
    """
    each = (all_cases(known, seed, lengths=True) for known in OPERATIONS.values())
    known = list(dict.fromkeys(case.name for cases in each for case in cases))
    for name in names:
        if name not in known:
            raise UsageError(f"no case '{name}'; the cases are {', '.join(known)}")
    return tuple(case for case in all_cases(operation, seed, lengths) if case.name in names)
