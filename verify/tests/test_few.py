"""Which few queries are whose: the rules by which attention() takes v13 and v16 to v20."""

from __future__ import annotations

import pytest
import torch

from common.lengths import Lengths
from common.step import (
    BLOCK_QUERIES,
    FEW_HEADS,
    FEW_PARTS,
    FEW_QUERIES,
    FEW_ROWS,
    FEW_WORK_TILES,
    FEWEST,
    FEWEST_ROWS,
    MERGED_ELEMENTS,
    MERGED_ROWS,
    TEAM_BLOCKS,
    TEAM_ROWS,
    TEAMS,
    THREE_WARPGROUPS_DIM,
    TILE_DIM,
    TILE_KEYS,
    TILE_ROWS,
    WARPGROUP_ROWS,
    are_few,
    are_few_keys,
    are_few_rows,
    are_of_few_heads,
    few_of,
    few_with,
)
from verify.tests.cpp_constants import constants


@pytest.mark.parametrize(
    ("shape", "few"),
    [
        # 128 rows that share keys, however many there are and how many heads.
        ((1, 64, 8, 16, 1), True),
        ((64, 64, 8, 16, 1024), True),
        ((64, 64, 8, 17, 1024), False),
        ((8, 32, 8, 32, 100), True),
        ((8, 32, 8, 33, 100), False),
        ((1, 128, 1, 1, 3), True),
        ((2, 129, 1, 1, 3), False),
        # Of 132 multiprocessors v14 keeps batch * heads busy, or twice as many from 129 queries on.
        ((1, 16, 16, 1, 873), False),
        ((1, 16, 16, 1, 874), True),
        ((1, 16, 16, 128, 874), True),
        ((1, 16, 16, 129, 874), False),
        ((1, 16, 16, 129, 1014), True),
        ((2, 16, 16, 1, 1013), False),
        ((2, 16, 16, 1, 1014), True),
        ((1, 99, 99, 1, 3071), False),
        ((1, 99, 99, 1, 3072), True),
        ((1, 100, 100, 1, 1 << 30), False),
        ((64, 16, 16, 1, 1 << 30), False),
    ],
)
def test_queries_are_few(shape, few):
    assert are_few(*shape) is few


# A batch, and heads of keys, each of whose work tiles 132 multiprocessors cut into so many parts.
CUT = [
    (1, 1, 132),
    (1, 8, 16),
    (2, 8, 8),
    (8, 8, 2),
    (1, 66, 2),
    (1, 67, 1),
    (64, 8, 1),  # more work tiles than multiprocessors
]


@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
@pytest.mark.parametrize(("batch", "kv_heads", "parts"), CUT)
def test_rows_are_few(batch, kv_heads, parts, head_dim):
    """One work tile's, and no parts, or not too many or too large ones for one block to merge."""
    most = TILE_ROWS
    if parts > 1:
        merged = MERGED_ELEMENTS if parts <= FEW_PARTS else MERGED_ELEMENTS // 2
        most = min(most, merged // (head_dim * parts))
    for rows in range(1, TILE_ROWS + 2):
        few = rows <= most
        assert are_few_rows(batch, kv_heads, kv_heads, rows, head_dim) is few
        assert are_few_rows(batch, rows * kv_heads, kv_heads, 1, head_dim) is few


@pytest.mark.parametrize(("batch", "kv_heads", "parts"), [cut for cut in CUT if cut[2] > 1])
def test_what_one_block_merges(monkeypatch, batch, kv_heads, parts):
    """Rows that are more are still few queries, whose parts another kernel merges."""
    shape = batch, 6 * kv_heads, kv_heads, 5  # 30 rows
    elements = 30 * 72 * parts * (1 if parts <= FEW_PARTS else 2)
    for most, few in ((elements, FEW_ROWS), (elements - 1, FEW_QUERIES)):
        monkeypatch.setattr("common.step.MERGED_ELEMENTS", most)
        assert are_few_rows(*shape, 72) is (few == FEW_ROWS)
        assert few_of.__wrapped__(*shape, 1 << 20, 72, False) == few


# Up to and above which work tiles have rows for three warpgroups.
WIDTHS = THREE_WARPGROUPS_DIM, THREE_WARPGROUPS_DIM + 8


def test_sizes_of_the_rules_are_the_steps():
    v18, v19 = constants("v18", TILE_DIM), constants("v19")
    assert (v18["TILE_ROWS"], v18["BLOCK_N"]) == (TILE_ROWS, TILE_KEYS)
    assert constants("v20", TILE_DIM)["TILE_ROWS"] == FEWEST
    blocks = v19["CLUSTERS"] * v19["CLUSTER"]
    assert (TEAM_ROWS, TEAMS[0], TEAM_BLOCKS) == (v19["BLOCK_M"], v19["CLUSTER"], blocks)
    v13 = constants("v13", 64)
    assert (v13["BLOCK_M"], v13["BLOCK_M"] * v13["CONSUMERS"]) == (WARPGROUP_ROWS, MERGED_ROWS)
    for step in ("v12", "v17"):
        rows = [constants(step, head_dim)["BLOCK_M"] for head_dim in WIDTHS]
        assert rows == [3 * BLOCK_QUERIES // 2, BLOCK_QUERIES]


@pytest.mark.parametrize(
    ("shape", "few"),
    [
        # A tile of keys for each of the work tiles, of 32 rows, that 132 multiprocessors have.
        ((1, 32, 32, 1, 128, 128), True),
        ((1, 32, 32, 1, 129, 128), False),
        ((1, 32, 32, 1, 128, 136), False),
        ((66, 2, 2, 32, 1, 64), True),
        ((66, 2, 2, 33, 1, 64), False),
        ((66, 32, 2, 2, 1, 64), True),
        ((66, 34, 2, 2, 1, 64), False),
        ((67, 2, 2, 1, 1, 64), False),
        ((1, 32, 8, 132, 128, 64), False),
        ((1, 32, 8, 128, 128, 64), True),
        # 1024 keys, where 119 or more work tiles keep nine tenths of the multiprocessors busy.
        ((1, 32, 8, 128, 1024, 128), True),
        ((1, 32, 8, 128, 1025, 128), False),
        ((17, 7, 7, 32, 1024, 64), True),
        ((2, 59, 59, 32, 1024, 64), False),
        ((1, 33, 33, 128, 1024, 64), True),
        ((1, 133, 133, 32, 1024, 64), False),
        # With a larger head_dim only of more than 64 queries.
        ((1, 44, 44, 65, 1024, 256), True),
        ((1, 44, 44, 65, 1025, 256), False),
        ((1, 66, 66, 64, 1024, 256), False),
        ((1, 66, 66, 64, 1024, 128), True),
    ],
)
def test_keys_are_few(shape, few):
    assert are_few_keys(*shape) is few
    _, heads, kv_heads, seq_q, *_ = shape
    rows = FEWEST_ROWS if heads // kv_heads * seq_q <= FEWEST else FEW_ROWS
    if few:
        for causal in (False, True):
            assert few_of(*shape, causal) == rows


@pytest.mark.parametrize(
    ("shape", "few"),
    [
        # 56 work tiles of 64 rows at most, as each has two blocks then, or 28, or 14.
        ((7, 64, 8, 8, 256, 128), True),
        ((7, 64, 8, 9, 256, 128), False),
        ((7, 64, 8, 8, 1, 8), True),
        ((57, 1, 1, 1, 1, 128), False),
        # With a larger head_dim two blocks, not four, must have more than two tiles of keys.
        ((7, 64, 8, 8, 256, 136), False),
        ((7, 64, 8, 8, 257, 136), True),
        ((7, 32, 4, 8, 256, 136), True),
        # And 1024 at most.
        ((7, 64, 8, 8, 1024, 136), True),
        ((7, 64, 8, 8, 1025, 136), False),
        ((7, 32, 4, 8, 1025, 136), True),
        # So few rows are v20's, unless no block has more than a tile of keys, or than two, of teams
        # of eight.
        ((7, 64, 8, 1, 256, 128), True),
        ((7, 64, 8, 1, 257, 128), False),
        ((2, 14, 14, 1, 512, 128), True),
        ((2, 14, 14, 1, 513, 128), False),
        ((2, 14, 14, 9, 513, 128), True),
        ((1, 14, 14, 1, 2048, 128), True),
        ((1, 14, 14, 1, 2049, 128), False),
        ((1, 14, 14, 8, 2049, 128), False),
        ((1, 14, 14, 9, 2049, 128), True),
        # Up to 16 rows are v20's, or v18's, where teams are smaller and each block has more than
        # two tiles.
        ((1, 16, 16, 16, 1024, 128), True),
        ((1, 16, 16, 16, 1025, 128), False),
        ((1, 16, 16, 17, 1025, 128), True),
        ((1, 14, 14, 16, 2049, 128), True),
        # With up to 64 columns 32 rows are, with more than two tiles.
        ((1, 14, 14, 32, 2048, 64), True),
        ((1, 14, 14, 32, 2049, 64), False),
        ((1, 14, 14, 33, 2049, 64), True),
        ((1, 14, 14, 32, 8192, 64), False),
        ((1, 14, 14, 32, 8193, 64), True),
        ((1, 14, 14, 17, 2049, 72), True),
        ((2, 14, 14, 17, 1024, 64), True),
        ((2, 14, 14, 17, 1025, 64), False),
        # But not those of which v20 would have too large parts.
        ((1, 8, 1, 1, 1025, 128), True),
        # 8 of 132 multiprocessors, 64 and 112 are at work.
        ((1, 1, 1, 64, 4598, 128), True),
        ((1, 1, 1, 64, 4599, 128), False),
        ((1, 64, 8, 8, 8385, 128), True),
        ((1, 64, 8, 8, 8386, 128), False),
        ((1, 28, 28, 64, 14256, 128), True),
        ((1, 28, 28, 64, 14257, 128), False),
        ((7, 64, 8, 8, 7128, 128), True),
        ((7, 64, 8, 8, 7129, 128), False),
        # With a larger head_dim the others may be idle for less long.
        ((1, 64, 8, 8, 6211, 136), True),
        ((1, 64, 8, 8, 6212, 136), False),
        # More than 128 rows share keys: 1024 of these are a block's.
        ((1, 4, 4, 129, 8192, 128), True),
        ((1, 4, 4, 129, 8193, 128), False),
        ((1, 28, 28, 128, 2049, 128), True),
        ((1, 14, 14, 256, 2048, 128), True),
        ((1, 14, 14, 256, 2049, 128), False),
    ],
)
def test_heads_are_few(shape, few):
    assert are_of_few_heads(*shape) is few
    if few and not are_few_keys(*shape):
        for causal in (False, True):
            assert few_of(*shape, causal) == FEW_HEADS


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_k", [1, 1 << 30])
def test_rows_are_few_for_any_keys(seq_k, causal):
    more = FEWEST_ROWS if seq_k == 1 else FEW_ROWS
    for heads, seq_q in ((8, TILE_ROWS), (16, TILE_ROWS // 2), (8 * TILE_ROWS, 1)):
        assert few_of(64, heads, 8, seq_q, seq_k, 64, causal) == more
    for heads, seq_q in ((8, FEWEST), (16, FEWEST // 2), (8 * FEWEST, 1)):
        assert few_of(64, heads, 8, seq_q, seq_k, 64, causal) == FEWEST_ROWS
    assert few_of(64, 8, 8, FEWEST + 1, seq_k, 64, causal) == more
    # One row more, and heads share keys, or do not.
    assert few_of(64, 8 * (TILE_ROWS + 1), 8, 1, seq_k, 64, causal) == FEW_QUERIES
    few = FEW_WORK_TILES if seq_k == 1 and not causal else None  # in four full rounds
    assert few_of(64, 8, 8, TILE_ROWS + 1, seq_k, 64, causal) == few


@pytest.mark.parametrize(
    ("shape", "is_short"),
    [
        # 2^19 elements of a head's K, and 2^23 of all.
        ((2, 64, 8, 4, 8192, 64), True),
        ((2, 64, 8, 4, 8193, 64), False),
        ((1, 64, 8, 4, 8192, 64), True),
        ((1, 64, 8, 4, 16384, 64), False),
        ((8, 64, 8, 4, 2048, 64), True),
        ((8, 64, 8, 4, 2049, 64), False),
        # With more columns 2^21, and no more than 66 heads.
        ((8, 64, 8, 4, 256, 128), True),
        ((8, 64, 8, 4, 257, 128), False),
        ((8, 64, 8, 4, 455, 72), True),
        ((8, 64, 8, 4, 456, 72), False),
        ((2, 33, 33, 17, 128, 248), True),
        ((1, 67, 67, 17, 65, 256), False),
        ((8, 64, 8, 4, 1024, 128), False),
        ((64, 16, 16, 17, 128, 64), True),
        ((64, 16, 16, 17, 129, 64), False),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_of_few_keys_more_rows_are_few(shape, is_short, causal):
    assert few_of(*shape, causal) == (FEWEST_ROWS if is_short else FEW_ROWS)


@pytest.mark.parametrize(
    ("shape", "few"),
    [
        # More than 8 rows of more than 192 columns, and 2^28 elements of K.
        ((64, 32, 8, 4, 2048, 256), FEW_ROWS),
        ((64, 32, 8, 4, 2049, 256), FEWEST_ROWS),
        ((64, 16, 8, 4, 2048, 256), FEWEST_ROWS),
        ((64, 24, 8, 3, 2048, 200), FEW_ROWS),
        ((64, 32, 8, 4, 2048, 192), FEWEST_ROWS),
        # A full round of heads that share no keys, 8192 at least, of more than 128 columns.
        ((8, 16, 16, 9, 8192, 256), None),
        ((8, 16, 16, 32, 8192, 136), None),
        ((8, 16, 16, 16, 8191, 256), FEW_ROWS),
        ((8, 16, 16, 8, 8192, 256), FEWEST_ROWS),
        ((8, 16, 16, 16, 8192, 128), FEWEST_ROWS),
        ((8, 32, 16, 16, 8192, 256), FEW_ROWS),  # two heads each
        ((1, 119, 119, 16, 16384, 256), None),
        ((1, 118, 118, 16, 8192, 256), FEW_ROWS),  # not nine tenths of a round
        ((1, 238, 238, 16, 16384, 256), FEWEST_ROWS),  # two rounds
    ],
)
def test_wide_rows_are_few(shape, few):
    assert few_of(*shape, False) == few
    if few is None:  # with a causal mask v12 shares nothing out
        assert few_of(*shape, True) in (FEWEST_ROWS, FEW_ROWS)


@pytest.mark.parametrize("shape", [(0, 2, 1), (1, 0, 1), (1, 2, 0), (0, 0, 0)])
def test_what_an_empty_call_has_few_of_is_no_error(shape):
    """It is asked before the call is refused."""
    few_of(*shape, 9, 11, 64, False)


@pytest.mark.parametrize(
    ("shape", "few"),
    [
        # 32 heads on 8, 128 queries of each: 32 work tiles, whose keys are worth cutting.
        ((1, 32, 8, 128, 1268, 128, False), FEW_WORK_TILES),
        ((1, 32, 32, 192, 1268, 64, True), FEW_WORK_TILES),
        ((1, 32, 8, 128, 1267, 256, False), None),
        # 128 rows share keys, or more.
        ((1, 32, 8, 32, 131072, 128, False), FEW_QUERIES),
        ((1, 16, 16, 128, 131072, 128, False), FEW_QUERIES),
        ((1, 16, 16, 129, 131072, 128, False), FEW_WORK_TILES),
        # With a larger head_dim more than 64 of heads that share nothing, fewer than 2^22 elements.
        ((1, 16, 16, 128, 16383, 256, False), FEW_WORK_TILES),
        ((1, 16, 16, 128, 16384, 256, False), FEW_QUERIES),
        ((1, 16, 16, 65, 8192, 136, True), FEW_WORK_TILES),
        ((1, 16, 16, 65, 8192, 128, True), FEW_QUERIES),
        ((1, 16, 16, 64, 8192, 256, False), FEW_QUERIES),
        ((1, 32, 16, 64, 8192, 256, False), FEW_QUERIES),
        ((2, 16, 16, 128, 1928, 136, False), FEW_WORK_TILES),
        ((2, 16, 16, 128, 1927, 136, False), FEW_QUERIES),
        # More, but together the heads have fewer work tiles: 16, 24 and 32, where 32 are alone.
        ((1, 32, 8, 33, 131072, 128, False), FEW_QUERIES),
        ((1, 32, 8, 96, 131072, 128, True), FEW_QUERIES),
        ((1, 32, 8, 97, 131072, 128, False), FEW_WORK_TILES),
        # Half as many, and 2048 keys.
        ((8, 32, 8, 48, 2048, 128, True), FEW_QUERIES),
        ((8, 32, 8, 48, 2047, 128, True), None),
        ((8, 32, 8, 65, 2049, 128, False), None),  # 192 and 256
        ((8, 32, 8, 65, 2048, 128, True), None),
        # With fewer keys, if they are 128 rows at most, and more than a round of v12's.
        ((4, 64, 8, 16, 1025, 128, False), FEW_QUERIES),
        ((4, 32, 8, 32, 1025, 128, True), None),
        ((4, 32, 8, 32, 2048, 128, False), FEW_QUERIES),
        ((5, 32, 8, 32, 1025, 128, False), FEW_QUERIES),
        # Or if a round of v13's is three of v12's, at least.
        ((8, 64, 8, 32, 512, 128, False), FEW_QUERIES),
        ((4, 64, 8, 32, 512, 128, True), None),
        ((9, 64, 8, 32, 512, 128, False), None),  # two are five
        # All multiprocessors are busy; but of a causal mask's two rounds a quarter is empty.
        ((1, 24, 24, 768, 3380, 128, True), FEW_WORK_TILES),
        ((1, 24, 24, 768, 3379, 128, True), None),
        ((1, 24, 24, 768, 131072, 128, False), None),
        ((1, 33, 33, 768, 8192, 128, True), FEW_WORK_TILES),
        ((1, 67, 67, 384, 8192, 128, True), None),
        # Not with square masks, whose short work tiles fill what the long ones leave.
        ((1, 24, 24, 768, 3071, 128, True), None),
        ((1, 16, 16, 2048, 8192, 64, True), FEW_WORK_TILES),
        ((1, 16, 16, 2048, 8191, 64, True), None),
        ((1, 5, 5, 4096, 4096, 128, True), None),
        ((1, 3, 3, 8192, 8192, 128, True), None),
        ((1, 7, 7, 4096, 4096, 64, True), None),
        # More than 128 rows, of which packing saves no quarter of the work tiles.
        ((1, 5, 1, 3900, 3900, 128, True), None),
        ((1, 4, 1, 700, 16384, 128, False), FEW_WORK_TILES),  # 22 and 24
        # 192 rows are one work tile up to head_dim 96: 96, and not 192 in two rounds.
        ((3, 32, 32, 160, 3520, 64, True), FEW_WORK_TILES),
        ((3, 32, 32, 160, 3519, 64, True), None),
        ((5, 28, 28, 128, 3271, 128, True), FEW_QUERIES),
        ((5, 28, 28, 128, 3270, 128, True), None),
        ((5, 28, 28, 128, 131072, 128, False), None),
        # One to four rounds that are nine tenths full, of 2048 keys at most.
        ((4, 32, 8, 128, 2048, 128, False), FEW_WORK_TILES),
        ((4, 32, 8, 128, 2049, 128, False), None),
        ((4, 32, 8, 128, 2048, 128, True), None),
        ((4, 32, 8, 128, 1, 128, False), FEW_WORK_TILES),
        ((1, 236, 118, 65, 2048, 128, False), None),  # 236 of 264
        ((1, 238, 119, 65, 2048, 128, False), FEW_WORK_TILES),
        ((1, 118, 59, 128, 2048, 128, False), None),
        ((1, 119, 17, 128, 2048, 128, False), FEW_WORK_TILES),
        ((1, 134, 67, 128, 2048, 128, False), None),
        ((1, 475, 95, 128, 2048, 128, False), None),
        ((1, 476, 119, 128, 2048, 128, False), FEW_WORK_TILES),
        ((1, 528, 88, 128, 2048, 128, False), FEW_WORK_TILES),
        ((1, 528, 88, 128, 2049, 128, False), None),
        ((1, 594, 99, 128, 2048, 128, False), None),  # five
        ((1, 660, 110, 128, 2048, 128, False), None),
        # Also of heads that share no keys, unless three warpgroups compute a work tile.
        ((8, 16, 16, 128, 2048, 64, False), FEW_WORK_TILES),
        ((8, 16, 16, 128, 2049, 64, False), None),
        ((8, 16, 16, 128, 2048, 64, True), None),
        ((8, 16, 16, 129, 2048, 64, False), None),
        ((1, 132, 132, 128, 2048, 96, False), FEW_WORK_TILES),
        ((1, 132, 132, 129, 2048, 96, False), None),
        ((1, 132, 132, 129, 2048, 104, False), FEW_WORK_TILES),  # two work tiles a head
        ((1, 66, 66, 192, 2048, 104, False), FEW_WORK_TILES),
        ((1, 132, 132, 192, 2048, 96, False), None),
        # Of up to 512 queries.
        ((1, 32, 32, 512, 1024, 128, False), FEW_WORK_TILES),
        ((1, 32, 32, 513, 1024, 128, False), None),
        ((1, 16, 16, 1024, 1024, 128, False), None),
        # Of rows that v13 would pack those for which even v12 is faster than it.
        ((4, 32, 8, 32, 2047, 128, False), FEW_WORK_TILES),
        ((4, 64, 8, 32, 512, 128, False), FEW_WORK_TILES),  # one round, and two
        ((5, 64, 8, 32, 512, 128, False), FEW_QUERIES),  # three
        ((8, 32, 8, 65, 2048, 128, False), FEW_WORK_TILES),  # 192 and 256
        ((8, 32, 8, 64, 2048, 128, False), FEW_QUERIES),  # 128
        # 128 rows at most in full rounds of work tiles that share no keys.
        ((64, 16, 16, 128, 2048, 128, False), FEW_WORK_TILES),
        ((64, 16, 16, 128, 2047, 128, False), None),
        ((64, 16, 16, 128, 32767, 128, False), FEW_WORK_TILES),
        ((64, 16, 16, 128, 32768, 128, False), None),
        ((64, 16, 16, 128, 2048, 128, True), None),
        ((64, 16, 16, 128, 131072, 96, False), None),
        ((8, 16, 16, 128, 131072, 128, False), None),  # one
        # A work tile for three warpgroups with 128 queries, or more.
        ((1, 32, 8, 128, 4096, 64, False), FEW_QUERIES),
        ((1, 32, 8, 128, 4097, 64, False), FEW_WORK_TILES),
        ((1, 32, 32, 129, 4096, 64, False), FEW_WORK_TILES),
        ((1, 32, 8, 128, 4096, 104, False), FEW_WORK_TILES),
        ((5, 28, 7, 128, 3400, 64, True), FEW_QUERIES),
        ((5, 28, 7, 128, 4097, 64, True), FEW_WORK_TILES),
        # 99 work tiles at most, of 128 queries, or up to head_dim 96 of 192.
        ((1, 33, 11, 384, 131072, 128, False), FEW_WORK_TILES),
        ((1, 33, 11, 385, 131072, 128, True), None),
        ((1, 33, 11, 576, 131072, 96, False), FEW_WORK_TILES),
        ((1, 33, 11, 577, 131072, 96, False), None),
        # More, in up to four rounds that are nine tenths full.
        ((8, 32, 8, 128, 8192, 128, False), FEW_WORK_TILES),
        ((8, 32, 8, 128, 8191, 128, False), None),
        ((8, 32, 8, 128, 4096, 256, False), FEW_WORK_TILES),
        ((8, 32, 8, 128, 131072, 128, True), None),
        ((8, 32, 8, 128, 131072, 96, False), FEW_WORK_TILES),
        ((8, 32, 8, 192, 131072, 96, False), None),
        ((8, 64, 8, 128, 8192, 128, False), FEW_WORK_TILES),
        ((1, 237, 79, 128, 131072, 128, False), None),
        ((1, 240, 80, 128, 131072, 128, False), FEW_WORK_TILES),
        ((1, 528, 88, 128, 131072, 128, False), FEW_WORK_TILES),
        ((1, 530, 106, 128, 131072, 128, False), None),
        ((1, 132, 11, 128, 131072, 128, False), None),  # one round: v12 cuts nothing
        ((4, 16, 16, 4096, 4096, 128, False), None),
    ],
)
def test_what_a_call_has_few_of(shape, few):
    assert few_of(*shape) == few


STARTS = torch.zeros(9, dtype=torch.int32)  # of 8 sequences
USED = Lengths(seqused_k=STARTS[:8])


@pytest.mark.parametrize(
    ("lengths", "shape", "few"),
    [
        # A batch's sequences have their own sizes.
        (USED, (8, 32, 8, 32, 100), True),
        (USED, (8, 32, 8, 33, 100), False),
        # Packed ones share the tensors' rows: 32 queries each, and 33.
        (Lengths(STARTS, STARTS), (1, 32, 8, 256, 800), True),
        (Lengths(STARTS, STARTS), (1, 32, 8, 257, 800), False),
        # Where heads share no keys, from 2048 keys on.
        (USED, (8, 16, 16, 128, 2048), True),
        (USED, (8, 16, 16, 129, 2048), False),
        (USED, (8, 16, 16, 128, 2047), False),
        (Lengths(STARTS, STARTS), (1, 16, 16, 128, 8 * 2047 + 1), True),
        # A window without lengths: none can be longer than others.
        (Lengths(window_left=100), (8, 16, 16, 1, 1 << 30), False),
        # And with: as fast as v14.
        (USED._replace(window_left=9, window_right=0), (8, 16, 16, 1, 2048), True),
        # What a window hides does not keep multiprocessors busy.
        (Lengths(window_left=872, window_right=0), (1, 16, 16, 1, 1 << 30), False),
        (Lengths(window_left=873, window_right=0), (1, 16, 16, 1, 1 << 30), True),
    ],
)
def test_queries_are_few_with_lengths(lengths, shape, few):
    assert few_with(lengths, *shape) == (FEW_QUERIES if few else None)
