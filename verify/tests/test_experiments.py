"""Experiments compute what their steps do: one that is wrong by mistake has a time for nothing."""

from __future__ import annotations

import pytest

from common.patch import EXPERIMENTS_DIR, read_patch
from common.step import read_step
from verify.cases import find_cases
from verify.tests.on_cpu import on_cpu

# The rows' maxima rise from tile to tile, by a little and by much.
RISING = "walks"
OTHER_CASES = {"v11_no_repair": "ragged"}  # wrong where m would have to be raised, as it says
ONLY_ON_A_GPU = {
    "v04_big_tiles": "more shared memory than the step's limits allow",
    "v11_clusters": "its clusters are PTX in the step, measured before cluster.cuh had wrappers",
}


@pytest.mark.parametrize(
    "path", sorted(EXPERIMENTS_DIR.glob("*.patch")), ids=lambda path: path.stem
)
def test_right(path):
    if path.stem in ONLY_ON_A_GPU:
        pytest.skip(ONLY_ON_A_GPU[path.stem])
    step = read_step(read_patch(path).write())
    (case,) = find_cases([OTHER_CASES.get(path.stem, RISING)], step.operation)
    result = on_cpu(step, case)
    assert result.passed, str(result)
