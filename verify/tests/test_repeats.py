"""Runs of a step that adds in any order: how far from one another the checker lets them be."""

from __future__ import annotations

import math

import pytest
import torch

from common.operation import BACKWARD
from verify.accuracy import expect, repeated
from verify.case import Case
from verify.cases import all_cases, find_cases
from verify.reference import backward_rows

ROUNDED = [
    case
    for case in all_cases(BACKWARD)
    if case.dtype in (torch.bfloat16, torch.float16) and not case.gpu_only
]
KEYS = 64  # of a block, which adds its part of dq


def parts_of_dq(case: Case, *inputs: torch.Tensor) -> torch.Tensor:
    """What each block of keys adds to dq, float32: [blocks, *dq.shape]."""
    blocks = math.ceil(case.shape.seq_k / KEYS)
    parts = torch.zeros(blocks, *inputs[0].shape)
    for rows in backward_rows(*inputs, dtype=torch.float32, **case.arguments):
        ds = rows.ds.to(case.dtype).float() * case.scale
        for part, its_ds, its_k in zip(parts, ds.split(KEYS, 1), rows.k.split(KEYS), strict=True):
            part[rows.at] = its_ds @ its_k
    return parts


def in_any_order(parts: torch.Tensor, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """The sum of the parts in an order of its own for each element, rounded."""
    order = torch.rand(parts.shape, generator=rng).argsort(0)
    total = torch.zeros(parts.shape[1:])
    for part in parts.gather(0, order):
        total += part
    return total.to(dtype)


@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.name)
def test_any_order_is_allowed(case):
    inputs = case.make(torch.device("cpu"), 0)
    parts = parts_of_dq(case, *inputs)
    allowance = expect(case, *inputs).reordered["dq"]
    rng = torch.Generator().manual_seed(0)
    # Each element has an order of its own, so that many elements need few sums.
    sums = min(20, 2 + 10**6 // parts.numel())
    first, *others = (in_any_order(parts, case.dtype, rng) for _ in range(sums))
    for other in others:
        assert not repeated("dq", first, other, allowance)


@pytest.mark.parametrize("name", ["ragged", "gqa", "causal", "walks"])
def test_a_lost_part_is_reported(name):
    (case,) = find_cases([name], BACKWARD)
    inputs = case.make(torch.device("cpu"), 0)
    parts = parts_of_dq(case, *inputs)
    allowance = expect(case, *inputs).reordered["dq"]
    for lost in range(len(parts)):
        rest = parts.clone()
        rest[lost] = 0
        assert repeated("dq", parts.sum(0).to(case.dtype), rest.sum(0).to(case.dtype), allowance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("first", "steps", "allowed"),
    [
        (1.0, 1, True),
        (1.0, 2, False),
        (1.0, -1, True),  # half as far, as the exponent changes
        (-3.0, 1, True),
        (-3.0, 2, False),
        (0.0, 1, True),  # the smallest subnormal
        (0.0, 2, False),
        (math.nan, 0, False),
        (math.inf, 0, True),
        (math.inf, -1, False),  # the largest finite number
    ],
)
def test_rounding_is_worth_one_place(dtype, first, steps, allowed):
    first = torch.tensor([first], dtype=dtype)
    second = (first.view(torch.int16) + steps).view(dtype)
    if math.isnan(first):
        second = first
    assert (not repeated("dq", first, second, torch.zeros(1))) == allowed


def test_an_infinity_is_not_the_other():
    infinity = torch.tensor([torch.inf], dtype=torch.float16)
    assert repeated("dq", infinity, -infinity, torch.zeros(1))


def test_the_allowance_is_added():
    first, second = (torch.tensor([x], dtype=torch.float16) for x in (1.0, 1.0 + 3 / 1024))
    assert repeated("dq", first, second, torch.tensor([1.5 / 1024]))
    assert not repeated("dq", first, second, torch.tensor([2.5 / 1024]))
