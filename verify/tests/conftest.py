from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from common.bench import cells, timing, trial
from common.bench.corpus import Corpus, read_text
from common.bench.peers import Peer
from common.bench.train import TINY_TEXT
from common.runtime.backend import Backend
from common.runtime.cpu import CpuBackend
from common.runtime.gpu import GpuBackend
from verify.reference import oracle_of

torch.set_num_threads(1)  # pytest -n auto has a process for each core


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes 100 ms, and one of two peers is there."""

    def load(operation, inputs, *, causal, without):
        assert without == ("sdpa_math",)
        scale = inputs[0].shape[-1] ** -0.5
        outputs = oracle_of(operation)(*inputs, causal=causal, softmax_scale=scale)
        return {"sdpa_cudnn": "no such shape", "sdpa_flash": Peer(lambda: outputs, "torch")}

    monkeypatch.setattr(trial, "peak_memory", lambda call: (call(), 0))
    monkeypatch.setattr(cells, "load", load)
    monkeypatch.setattr(timing, "device_state", lambda: "not collected")

    def time_interleaved(calls, *, rounds, warmup, sleep_cycles):
        return {name: [100.0] * rounds for name in calls}

    monkeypatch.setattr(timing, "time_interleaved", time_interleaved)


@pytest.fixture
def tiny_corpus() -> Corpus:
    """TINY_TEXT, both to learn and held out, in the place of the repository's own text."""
    text = read_text([TINY_TEXT])
    return Corpus(text, text, files=1, sha256=64 * "0")


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
