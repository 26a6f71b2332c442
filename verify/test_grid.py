"""The grid of shapes: its cells, how they are measured, and how their record is shown."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from common import grid, measure, tables
from common.errors import UsageError
from common.gpu import GpuBackend
from common.lookup import evaluate
from common.peers import Peer
from common.profile import Profile, load_profile
from common.record import read_grid, write_record
from common.record_form import CELL, problem
from common.step import all_steps
from verify.cases import BF16, Case, Shape, find_cases
from verify.made_up import made_up_grid
from verify.reference import attention_reference

V01, V02, V03 = all_steps()[:3]
TINY = Case("tiny", Shape(1, 2, 2, 96, 96, 64), BF16, causal=True)


@pytest.fixture
def profile(tmp_path):
    """Loads the profile of a project whose grid has v01 and v02, changed as told."""

    def load(**changes) -> Profile:
        folder = tmp_path / "profiles" / "h200"
        write_record(folder / "grid.json", made_up_grid(V01, V02) | changes)
        return load_profile(folder, tmp_path)

    return load


def test_cells():
    names = [case.name for case in grid.CELLS]
    assert len(names) == len(set(names))
    for case in grid.CELLS:
        shape = case.shape
        assert shape.batch * shape.seq_q == grid.TOKENS
        assert shape.heads * shape.head_dim == grid.HIDDEN
    cells = {case.name: case.shape for case in grid.CELLS}
    assert cells["d128"] == cells["d128_causal"] == find_cases(["headline"])[0].shape


def test_flops_are_those_of_the_visible_half():
    case = {case.name: case for case in grid.CELLS}
    assert measure.flops(case["d128"]) == 2 * measure.flops(case["d128_causal"])
    assert measure.flops(case["d128"]) == 4 * 4 * 16 * 4096**2 * 128


class TorchBackend:
    """A stand-in for the GPU: v03 refuses, the others add an error to what torch computes."""

    device = torch.device("cpu")

    def __init__(self, error: float = 0.0):
        self.error = error

    def forward(self, step, q, k, v, o, lse, *, causal, softmax_scale):
        if step is V03:
            raise UsageError("v03 takes head_dim 128")
        result = attention_reference(q, k, v, causal=causal, softmax_scale=softmax_scale)
        o.copy_(result[0] + self.error)
        lse.copy_(result[1])


@pytest.fixture
def without_a_gpu(monkeypatch):
    """Every call takes 2 ms, and one of two peers is there."""

    def load(q, k, v, *, causal):
        o, _ = attention_reference(q, k, v, causal=causal, softmax_scale=TINY.scale)
        return {"sdpa_math": "out of memory", "sdpa_flash": Peer(lambda: o, "torch")}

    monkeypatch.setattr(measure, "_peak_memory", lambda call: (call(), 0))
    monkeypatch.setattr(grid, "load", load)
    monkeypatch.setattr(grid, "device_state", lambda: "not collected")
    monkeypatch.setattr(grid, "time_interleaved", lambda calls: {name: [2.0] * 3 for name in calls})


def test_measured_cell(without_a_gpu):
    cell = grid.measure_cell(TorchBackend(), [V02, V03], TINY)
    assert problem(cell, CELL) is None
    rate = 2 * 2 * 96**2 * 64 / 2e9
    assert cell["tflops"] == {
        "v02": pytest.approx(rate),
        "v03": {"missing": "v03 takes head_dim 128"},
        "sdpa_math": {"missing": "out of memory"},
        "sdpa_flash": pytest.approx(rate),
    }
    assert cell["samples_ms"].keys() == {"v02", "sdpa_flash"}


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_a_wrong_step_is_not_timed(without_a_gpu, error):
    with pytest.raises(UsageError, match="v02 is wrong on tiny"):
        grid.measure_cell(TorchBackend(error), [V02], TINY)


def test_no_step_is_no_cell(without_a_gpu):
    with pytest.raises(UsageError, match="v03 takes head_dim 128"):
        grid.measure_cell(TorchBackend(), [V03], TINY)


def test_record_of_the_grid(monkeypatch, tmp_path):
    made_up = made_up_grid(*grid.grid_steps())
    named = {"device": "NVIDIA H200"}
    monkeypatch.setattr(grid, "GpuBackend", SimpleNamespace)
    monkeypatch.setattr(grid, "versions", lambda: named)
    monkeypatch.setattr(grid, "measure_cell", lambda *_: made_up["cells"][0])
    monkeypatch.setattr(grid, "PROFILES_DIR", tmp_path)
    path = grid.measure_grid()
    assert path == tmp_path / "h200" / "grid.json"
    record = read_grid(path.parent)
    assert record["sources"] == made_up["sources"]
    assert len(record["cells"]) == len(grid.CELLS)


def test_table(profile):
    text = tables.grid(profile())
    assert text.splitlines()[:4] == [
        "| head_dim | Mask | Batch × heads × N | v01 | v02 | sdpa_math | sdpa_flash | sdpa_cudnn |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| 64 | none | 4 × 32 × 4096 | 100 | 200 | missing | 160 (**1.25 ×**) | 640 (0.31 ×) |",
        "| 64 | causal | 4 × 32 × 4096 | 100 | 200 | missing | 160 (**1.25 ×**) | 640 (0.31 ×) |",
    ]
    caption = text.splitlines()[-1]
    assert "NVIDIA H200 in bf16" in caption
    assert "Median of 3 interleaved rounds" in caption
    assert "v02's rate over the peer's" in caption
    assert "throttle reasons after: none" in caption


def test_table_tells_what_throttled_any_cell(profile):
    cells = made_up_grid(V01)["cells"]
    slow = cells[0]["environment"]["after"] | {"throttle_reasons": ["software power cap"]}
    cells[0]["environment"] = cells[0]["environment"] | {"after": slow}
    assert "throttle reasons after: software power cap." in tables.grid(profile(cells=cells))


def test_changed_step_is_called_stale(profile):
    sources = made_up_grid(V01, V02)["sources"]
    sources["v02"]["source_sha256"] = "0" * 64
    changed = profile(sources=sources)
    assert "| v01 | v02 (stale) | sdpa_math |" in tables.grid(changed)
    assert evaluate("grid.d64.v02", changed) == "not measured since the source changed"
    assert evaluate("grid.d64.v01", changed) == "100.0"


def test_without_a_record(tmp_path):
    nothing = load_profile(tmp_path, tmp_path)
    assert tables.grid(nothing) == "not measured"
    assert evaluate("grid.d64.v01", nothing) == "not measured"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("grid.d64.v01 : .0f", "100"),
        ("grid.d64_causal.sdpa_flash", "160.0"),
        ("grid.d64.v02 / grid.d64.sdpa_flash : .0%", "125%"),
        ("grid.d64.v02 / grid.d64_causal.v02 : .1f", "not measured together"),
        ("grid.d64.sdpa_math", "missing"),
        ("grid.d64.v03", "not measured"),
    ],
)
def test_expression(profile, expression, text):
    assert evaluate(expression, profile()) == text


@pytest.mark.parametrize(
    "expression", ["grid", "grid.d64", "grid.d63.v01", "grid.d64.v99", "grid.d64.v01.time_ms"]
)
def test_expression_that_means_nothing(profile, expression):
    with pytest.raises(UsageError):
        evaluate(expression, profile())


@pytest.mark.gpu
def test_tiny_cell_on_a_gpu():
    cell = grid.measure_cell(GpuBackend(), grid.grid_steps(), TINY)
    assert problem(cell, CELL) is None
    assert isinstance(cell["tflops"]["v07"], float)
    assert isinstance(cell["tflops"]["sdpa_math"], float)
