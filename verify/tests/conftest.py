from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from common.runtime.backend import Backend
from common.runtime.cpu import CpuBackend
from common.runtime.gpu import GpuBackend

torch.set_num_threads(1)  # pytest -n auto has a process for each core


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(
    scope="module",
    params=[
        lambda: CpuBackend(),
        lambda: CpuBackend(seed=1, sanitize=True),
        pytest.param(GpuBackend, marks=pytest.mark.gpu),
    ],
    ids=["cpu", "sanitized", "gpu"],
)
def make_backend(request) -> Callable[[], Backend]:
    """A backend, for tests that an instruction on the GPU and its CPU twin must both pass."""
    return request.param
