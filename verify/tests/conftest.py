from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from common import operator
from common.bench import cells, timing, trial
from common.bench.corpus import Corpus, read_text
from common.bench.peers import Peer
from common.bench.train import TINY_TEXT
from common.cache import Cache
from common.runtime.backend import Backend
from common.runtime.cpu import CpuBackend
from common.runtime.gpu import GpuBackend
from verify.reference import oracle_of
from verify.tests.page_under_test import render
from verify.tests.patch_samples import describe, parse_mutants

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSER_TIMEOUT_MS = 120_000  # for a slow machine with as many browsers as cores

torch.set_num_threads(1)  # pytest -n auto has as many processes as there are cores, and one more,
os.environ.setdefault("OMP_NUM_THREADS", "1")  # and so have the processes that tests start


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mutants",
        type=parse_mutants,
        default="all",
        metavar="all|sample|NUMBER",
        help="all mutants and experiments, or the sample whose turn it is, or sample NUMBER; "
        "default: all",
    )


@pytest.hookimpl(optionalhook=True)  # there may be no xdist
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: tests also wait, for a browser or ranks that wait for each other."""
    return (os.cpu_count() or 1) + 1


def pytest_report_header(config: pytest.Config) -> str:
    return describe(config.getoption("mutants"))


@pytest.fixture
def chosen_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The names of the steps that calls choose from here on, and whether for lengths."""
    chosen = []
    choose = operator._choose

    def spy(operation, inputs, causal, name, deterministic, lengths=None, **options):
        found = choose(operation, inputs, causal, name, deterministic, lengths, **options)
        chosen.append((found.step.name, lengths is not None))
        return found

    monkeypatch.setattr(operator, "_calls", Cache())  # nothing is chosen yet
    monkeypatch.setattr(operator, "_choose", spy)
    return chosen


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


def pytest_collection_finish() -> None:
    """What has been imported and collected stays: garbage is looked for elsewhere from here on."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture(scope="session")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page as the records, the steps and the scripts are now."""
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(render(), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    playwright_api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        if "CI" in os.environ:
            pytest.fail(f"no browser: install one of {', '.join(names)}")
        pytest.skip(f"no browser: none of {', '.join(names)}")
    with playwright_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=found)


@pytest.fixture
def open_page(browser: Browser, page_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens the page in a new window, whose options it takes; errors in the console fail the test.

    Motion is reduced unless told: a screen is then what it will be at once.
    """
    errors: list[str] = []
    contexts = []

    def open_(path: Path = page_path, width: int = 1280, height: int = 900, **options) -> Page:
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, **{"reduced_motion": "reduce", **options})
        context.set_default_timeout(BROWSER_TIMEOUT_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: m.type in ("error", "warning") and errors.append(m.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(path.as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not errors
