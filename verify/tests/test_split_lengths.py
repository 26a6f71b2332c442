"""v16 shares out the keys of sequences: with many blocks, and where a unit is several tiles."""

from __future__ import annotations

import pytest
import torch

from common.catalog import find_step
from common.runtime.cpu import CpuBackend
from common.step import read_step
from verify.accuracy import compare, expect
from verify.check import launch
from verify.lengths_cases import packed_case

STEP = find_step("v16")
BF16 = torch.bfloat16
MOST_UNITS = "MOST_UNITS = UINT32_MAX;"


def errors_of(step, case, multiprocessors):
    backend = CpuBackend()
    backend.multiprocessors = multiprocessors
    inputs = case.make("cpu")
    outputs, errors = launch(step, case, backend, inputs)
    return [*errors, *compare(case, expect(case, *inputs), outputs)[1]]


@pytest.mark.parametrize(
    "case",
    [
        packed_case("one", (2, 1), 64, BF16, (1,), (5000,)),  # 40 parts of two rows, by 16 lanes
        packed_case("one_much_longer", (2, 1), 64, BF16, (1, 2, 0, 1), (40, 2600, 9, 300)),
        packed_case("two_warpgroups", (9, 1), 64, BF16, (8, 1), (700, 1500), causal=True),
        packed_case("window", (4, 2), 64, BF16, (3, 2), (3000, 900), window=(1500, 0)),
    ],
    ids=lambda case: case.name,
)
def test_many_parts(case):
    """More blocks than the checker's grids have."""
    assert errors_of(STEP, case, 40) == []


# A sequence of n keys has ceil(n / 128) tiles.
@pytest.mark.parametrize(
    ("most_units", "seqlens_k"),
    [
        (40, (1300, *(50,) * 35)),  # shift 1: units of 6 + 35 are too many, 2: of 3 + 35 are not
        (7, (1300, 900, 200)),  # 11 + 8 + 2, 6 + 4 + 1, 3 + 2 + 1: shift 2
        (4, (1300, 900, 200)),  # 2 + 1 + 1: shift 3
        (11, (1300, 900, 200)),  # shift 1
    ],
)
@pytest.mark.parametrize("multiprocessors", [3, 40])
def test_units_of_several_tiles(tmp_path, most_units, seqlens_k, multiprocessors):
    source = STEP.path.read_text(encoding="utf-8")
    assert source.count(MOST_UNITS) == 1
    path = tmp_path / STEP.path.name
    path.write_text(source.replace(MOST_UNITS, f"MOST_UNITS = {most_units};"), encoding="utf-8")
    case = packed_case("units", (1, 1), 64, BF16, (1,) * len(seqlens_k), seqlens_k)
    assert errors_of(read_step(path), case, multiprocessors) == []
