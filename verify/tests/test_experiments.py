"""Experiments compute what their steps do: one that is wrong by mistake has a time for nothing.

patch_samples.py says which of them run.
"""

from __future__ import annotations

import pytest

from common.patch import EXPERIMENTS_DIR, read_patch
from common.step import read_step
from verify.cases import find_cases
from verify.tests.on_cpu import on_cpu
from verify.tests.patch_samples import chosen

PATCHES = sorted(EXPERIMENTS_DIR.glob("*.patch"))
# The rows' maxima rise from tile to tile, by a little and by much.
RISING = "walks"
OTHER_CASES = {"v11_no_repair": "ragged"}  # wrong where m would have to be raised, as it says
ONLY_ON_A_GPU = {
    "v04_big_tiles": "more shared memory than the step's limits allow",
    "v11_clusters": "its clusters are PTX in the step, measured before cluster.cuh had wrappers",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_right:
        paths = chosen(PATCHES, metafunc.config.getoption("mutants"))
        metafunc.parametrize("path", paths, ids=[path.stem for path in paths])


def test_every_patch_applies():
    for path in PATCHES:
        read_patch(path).apply()


def test_right(path):
    if path.stem in ONLY_ON_A_GPU:
        pytest.skip(ONLY_ON_A_GPU[path.stem])
    step = read_step(read_patch(path).write())
    (case,) = find_cases([OTHER_CASES.get(path.stem, RISING)], step.operation)
    result = on_cpu(step, case)
    assert result.passed, str(result)
