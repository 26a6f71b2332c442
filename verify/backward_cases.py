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
    saved_with_more_keys,
    scaled_gradient,
    zero_in_places,
)
from verify.inputs import Inputs, normal
from verify.layouts import Layout, contiguous, expanded, expanded_rows, packed, padded, transposed

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def constant_values(case: Case, rng: torch.Generator) -> Inputs:
    """All rows of v are one: dP is delta everywhere, so that dq and dk are 0."""
    q, k, v = normal(case, rng)
    return q, k, v[:, :, :1].expand(case.shape.kv)


def _layouts(
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
    # Query heads whose dk and dv are one.
    Case("gqa_8", Shape(2, 16, 2, 70, 90, 64), BF16),
    Case("gqa_8_causal", Shape(1, 8, 1, 133, 70, 128), BF16, causal=True),
    Case("gqa_4_fp16", Shape(1, 4, 1, 70, 200, 64), FP16, dout=rows_of_all_sizes),
    # The gradient of o.
    Case("dout_zero_in_places", Shape(1, 2, 1, 133, 140, 64), BF16, dout=zero_in_places),
    Case("dout_zero", Shape(1, 1, 1, 40, 70, 64), FP16, dout=scaled_gradient(0)),
    # dS alone is beyond fp16 here; and here below its normal numbers.
    Case("dout_huge", Shape(1, 8, 8, 9, 6, 64), FP16, dout=scaled_gradient(2.0**14)),
    Case("dout_tiny", Shape(1, 2, 2, 150, 200, 64), FP16, dout=scaled_gradient(2.0**-13)),
    Case("dout_of_all_sizes", Shape(1, 2, 2, 150, 200, 64), FP16, dout=rows_of_all_sizes),
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
)


def backward_cases(forward: Sequence[Case]) -> tuple[Case, ...]:
    """The backward cases: those of the forward ones, under the same names, then its own."""
    of_forward = (
        replace(case, operation=BACKWARD, layouts=_layouts(*case.layouts)) for case in forward
    )
    return (*of_forward, *(replace(case, operation=BACKWARD) for case in _OWN))
