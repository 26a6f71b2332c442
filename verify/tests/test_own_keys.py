"""v20's calls with many parts. test_last_block.py has how it shares keys out.

On the checker's few multiprocessors a work tile has few parts. Calls with many are here, with the
mutants that only these, the tests of shares and a sanitizer reject: verify/mutants/own_keys.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch

from common.catalog import find_step
from common.problem import Shape
from verify.case import Case
from verify.inputs import graded, rising_logits, walks
from verify.layouts import packed, padded, transposed
from verify.tests.more_multiprocessors import Call, OnMoreMultiprocessors, check_bounds
from verify.tests.test_last_block import V20, check_columns, check_schedule

STEP = find_step("v20")
BF16, FP16 = torch.bfloat16, torch.float16

# ---- calls


CALLS = {
    call.case.name: call
    for call in (
        # 20 parts of a row, in three rounds of the merge, and m that rises with each, or falls.
        Call(Case("rising", Shape(1, 1, 1, 11, 2500, 64), BF16, inputs=rising_logits), 20),
        Call(Case("falling", Shape(1, 1, 1, 11, 2500, 64), BF16, inputs=walks(-40, -5, 250)), 20),
        Call(Case("rising_256", Shape(1, 1, 1, 7, 1250, 256), FP16, inputs=rising_logits), 20),
        # 40 parts: more signals than a warp has lanes, and 8 lanes for the same columns.
        Call(Case("eight_lanes", Shape(1, 3, 1, 1, 5100, 8), FP16, inputs=walks(2, 25)), 40),
        Call(
            Case("eight_lanes_graded", Shape(1, 3, 1, 1, 5100, 8), BF16, inputs=graded(60, 60)), 40
        ),
        # 144 parts, as many as there is room for, and all lanes of a warp for the same columns.
        Call(Case("all_lanes", Shape(1, 1, 1, 1, 18400, 8), BF16, inputs=walks(2, 25)), 144),
        # Fewer lanes than there are parts for: in rounds, and warps that have no whole rows.
        Call(Case("two_lanes", Shape(1, 8, 1, 1, 5100, 64), BF16, inputs=rising_logits), 40),
        Call(Case("four_lanes", Shape(1, 5, 1, 1, 5100, 40), BF16, inputs=walks(2, 25)), 40),
        Call(Case("lanes_136", Shape(1, 2, 1, 1, 2500, 136), FP16, inputs=walks(2, 25)), 40),
        # A thread merges four columns, and some threads then four more, but not whole warps of
        # them: of 10 parts in two rounds. Or there are more than twice four for each: then it
        # merges four times four of a row together, or three times where the row has no more, of
        # four parts at a time. Of the last warp half the lanes have none.
        Call(Case("two_columns", Shape(1, 1, 1, 15, 600, 88), BF16, inputs=rising_logits), 10),
        Call(Case("four_columns", Shape(1, 1, 1, 16, 600, 200), BF16, inputs=walks(2, 25)), 10),
        # As many of two rows.
        Call(Case("most_parts", Shape(1, 1, 1, 2, 9250, 72), BF16), 144),
        # 9 parts each of 4 work tiles, of key heads and batches; one block has none.
        Call(
            Case(
                "groups",
                Shape(2, 6, 2, 5, 1200, 64),
                BF16,
                layouts=(transposed, padded, packed, padded),
            ),
            37,
        ),
        # 6 parts each of 3 work tiles, all but one of two tiles.
        Call(Case("uneven", Shape(1, 3, 3, 13, 1400, 64), BF16, inputs=walks(2, 25)), 20),
        Call(Case("uneven_heads", Shape(2, 4, 2, 20, 650, 256), FP16), 50),
        # As many parts of a work tile as there are tiles: no more blocks are launched.
        Call(Case("few_tiles", Shape(1, 6, 2, 5, 350, 64), BF16, inputs=walks(2, 25)), 8),
        # 14 shares of 3 work tiles, not as many of each: most blocks go on, or merge, or both.
        Call(Case("unequal", Shape(1, 3, 3, 13, 1400, 64), BF16, inputs=walks(2, 25)), 14),
        Call(Case("unequal_heads", Shape(2, 4, 2, 20, 700, 64), FP16), 17),
        # The first rows see no key, and the next ones not those of the last parts.
        Call(Case("hidden_parts", Shape(1, 1, 1, 150, 140, 72), BF16, causal=True), 30),
        # Parts of work tiles none of whose rows sees a key, which are merged, too.
        Call(Case("hidden_works", Shape(1, 1, 1, 128, 65, 128), BF16, causal=True), 5),
        Call(Case("hidden_works_64", Shape(1, 1, 1, 256, 135, 64), BF16, causal=True), 3),
        # 20 parts of the first of 21 work tiles, merged by three warps while others are computed.
        # Four lanes have the same columns; or each thread merges four times four of a row, and then
        # of another one, of 10 parts.
        Call(Case("early_lanes", Shape(1, 21, 21, 1, 2500, 8), FP16, inputs=walks(2, 25)), 20),
        Call(Case("early_rows", Shape(1, 11, 11, 16, 600, 256), BF16, inputs=rising_logits), 10),
        # Some threads merge four columns once more, of 12 parts; or four times four, or three times
        # four, of 6.
        Call(Case("early_rounds", Shape(1, 13, 13, 13, 1500, 40), FP16, inputs=walks(2, 25)), 12),
        Call(Case("early_columns", Shape(1, 7, 7, 13, 350, 200), BF16, inputs=rising_logits), 6),
        # 3 of 23 are cut: shares that end one and begin the next, before two whole ones.
        Call(Case("early_uneven", Shape(1, 23, 23, 7, 1400, 64), BF16, inputs=walks(2, 25)), 10),
        # 7 of 17 are: the part that a share merges with its own is often there before this, as both
        # shares begin with one that goes on.
        Call(Case("early_both", Shape(1, 17, 17, 16, 300, 128), BF16, inputs=walks(2, 25)), 10),
        # 4 of 14 are, into two tiles each: two of 10 blocks have whole ones alone. The other part
        # is often there before the merging block's own.
        Call(Case("early_few_tiles", Shape(1, 14, 14, 16, 125, 128), FP16), 10),
        # 9 of 19 are, though whole ones would leave one block of 10 idle: shares are long.
        Call(Case("early_long", Shape(1, 19, 19, 3, 850, 64), BF16, inputs=walks(2, 25)), 10),
    )
}


# How long a rest must be changes between these.
MOST_OF_FEW_COLUMNS = replace(V20, head_dim=128, tile_keys=64)
FEWEST_OF_MANY = replace(V20, head_dim=136, tile_keys=64, long_share=160, rest_share=20)


# ---- the calls, and with one thing wrong


class TestCalls(OnMoreMultiprocessors):
    step = STEP
    calls = CALLS
    tests: ClassVar = {"schedule": check_schedule}
    checks: ClassVar = {
        "columns": partial(check_columns, kinds=(MOST_OF_FEW_COLUMNS, FEWEST_OF_MANY)),
        "bounds": partial(check_bounds, call=CALLS["four_columns"]),
    }
    folder = "own_keys"
