"""Packed sequences, windows and caches: the cells, what they show, their cases and steps."""

from __future__ import annotations

import random

import pytest

from common.bench import lengths
from common.catalog import all_steps
from common.errors import UsageError
from common.lengths import UNLIMITED
from common.operation import BACKWARD, FORWARD
from common.problem import GROUPS, LENGTHS, LENGTHS_BACKWARD, Sequences, Shape
from verify.lengths import CaseLengths
from verify.tests.lengths_measured import (
    B01,
    BATCH,
    CACHE,
    CAUSAL,
    EQUAL,
    OPERATIONS,
    PADDING,
    RAGGED,
    SLIDING,
    V01,
    WINDOW,
    WITH_LENGTHS,
)

NO_END = (UNLIMITED, UNLIMITED)


def test_cells():
    assert 70 <= len(LENGTHS) <= 80
    groups = [sequences.group for sequences in LENGTHS.values()]
    assert {group: groups.count(group) for group in GROUPS} == {
        "packed": 36,
        "windows": 16,
        "caches": 4,
        "decoding": 24,
    }
    for name, each in LENGTHS.items():
        assert each.dtype == "bf16"
        assert name.startswith(f"d{each.head_dim}_h{each.heads}")
        assert name.endswith("_causal") == each.causal
        assert not each.seqused_k or len(each.seqused_k) == len(each.seqlens_k)
    assert {(each.head_dim, each.heads, each.kv_heads) for each in LENGTHS.values()} == {
        (64, 32, 32),
        (128, 16, 16),
        (128, 32, 8),
        (256, 8, 8),
    }
    # Drawn anew, they would not be those that were measured.
    assert LENGTHS["d64_h32_ragged"].seqlens_q[:4] == (650, 2431, 3571, 3386)
    assert LENGTHS["d128_h16_caches_causal"].seqused_k[:3] == (6369, 7697, 4699)
    assert LENGTHS["d64_h32_decode_64_causal"].seqused_k[:3] == (2481, 2972, 2230)
    assert (
        LENGTHS["d256_h8_decode_8_causal"].seqused_k == LENGTHS["d256_h8_caches_causal"].seqused_k
    )
    assert LENGTHS["d128_h32_kv8_decode_8_of_4_causal"].shape == Shape(8, 32, 8, 4, 8192, 128)
    assert LENGTHS["d128_h32_kv8_4x4096"].shape == Shape(1, 32, 8, 16384, 16384, 128)
    assert LENGTHS["d256_h8_caches_causal"].shape == Shape(8, 8, 8, 1024, 8192, 256)
    assert LENGTHS["d64_h32_window_1023_causal"].window == (1023, UNLIMITED)
    groups = [sequences.group for sequences in LENGTHS_BACKWARD.values()]
    assert (groups.count("packed"), groups.count("windows"), len(groups)) == (36, 16, 52)
    assert all(LENGTHS[name] is each for name, each in LENGTHS_BACKWARD.items())


def count_visible(sequences: Sequences) -> int:
    left, right = sequences.window
    total = 0
    for seq_q, seq_k in zip(
        sequences.seqlens_q, sequences.seqused_k or sequences.seqlens_k, strict=True
    ):
        for i in range(seq_q):
            own = i + seq_k - seq_q
            last = own + (min(right, 0) if sequences.causal else right)
            total += sum(own - left <= j <= last for j in range(seq_k))
    return total


def test_visible_pairs():
    assert RAGGED.visible == 16 + 1 + 81
    assert CAUSAL.visible == 10 + 1 + 45
    assert LENGTHS["d128_h16_1x16384_causal"].visible == 16384 * 16385 // 2
    assert WINDOW.flops(2) == 4 * 4 * 64 * WINDOW.visible
    assert WINDOW.flops(5) == 2.5 * WINDOW.flops(2)
    for each in (WINDOW, SLIDING, EQUAL, BATCH, CACHE):
        assert each.visible == count_visible(each)
    rng = random.Random(0)
    for _ in range(300):
        seqlens_q, seqlens_k = (tuple(rng.randint(0, 9) for _ in range(3)) for _ in range(2))
        window = tuple(rng.choice((UNLIMITED, 0, 1, 4, 20)) for _ in range(2))
        causal = rng.random() < 0.5
        each = Sequences("", seqlens_q, seqlens_k, 1, 1, 64, causal=causal, window=window)
        assert each.visible == count_visible(each), each


def test_what_a_record_says_of_sequences():
    assert SLIDING.as_record() == {
        "title": "3 of 1 to 9",
        "group": "windows",
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "causal": True,
        "packed": True,
        "visible": SLIDING.visible,
        "window": [3, None],
        "sequences": 3,
        "are_equal": False,
        "queries": 14,
        "keys": 14,
        "most_queries": 9,
        "most_keys": 9,
    }
    of_cache = CACHE.as_record()
    assert (of_cache["group"], of_cache["keys"], of_cache["most_keys"]) == ("decoding", 12, 7)


def test_cases():
    case = lengths.case_of("ragged", SLIDING)
    assert case.shape == Shape(1, 4, 2, 14, 14, 64)
    assert case.lengths == CaseLengths((4, 1, 9), (4, 1, 9), None, 3, UNLIMITED)
    case = lengths.case_of("cache", CACHE, BACKWARD)
    assert (case.operation, case.shape, case.causal) == (BACKWARD, Shape(2, 4, 2, 5, 7, 64), True)
    assert case.lengths == CaseLengths(None, None, (5, 7), *NO_END)


@OPERATIONS
def test_steps(operation):
    chosen = lengths.chosen_steps(all_steps(), operation)
    assert chosen.steps == WITH_LENGTHS[operation]
    assert chosen.padding.name == PADDING[operation]
    assert chosen.saving.name == "v14"


def test_no_steps():
    told = "nothing to measure: there is no forward step that takes lengths"
    with pytest.raises(UsageError, match=told):
        lengths.chosen_steps([V01], FORWARD)
    told = r"there is no forward step that attention\(\) takes without"
    with pytest.raises(UsageError, match=told):
        lengths.chosen_steps(WITH_LENGTHS[FORWARD], FORWARD)
    with pytest.raises(UsageError, match="there is no backward step that takes lengths"):
        lengths.chosen_steps([B01, *WITH_LENGTHS[FORWARD]], BACKWARD)
    with pytest.raises(UsageError, match="there is no forward step that takes lengths"):
        lengths.chosen_steps([B01, *WITH_LENGTHS[BACKWARD]], BACKWARD)
