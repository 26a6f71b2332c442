"""The grid of shapes: its cells, how they are measured, and how their record is shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.bench import cells, grid, timing
from common.catalog import all_steps
from common.errors import UsageError
from common.operation import BACKWARD, FORWARD, OPERATIONS, Operation
from common.problem import GRID, GRID_OVER_LENGTHS, HIDDEN, TOKENS, Specialization
from common.record_schema import FA3_DETERMINISTIC, GRID_RECORD, cell_form, find_error
from common.records import read_record, write_record
from common.report import plots, tables
from common.report.expressions import evaluate
from common.report.record_set import RecordSet, load_record_set
from common.runtime.gpu import GpuBackend
from common.step import FEW_QUERIES
from verify.cases import BF16, Case, Shape, find_cases
from verify.reference import oracle_of
from verify.tests.drawings import clashes, dots, texts
from verify.tests.fake_records import fake_grid

V01, V02, V03 = all_steps()[:3]
B01, B02 = [step for step in all_steps() if step.operation == BACKWARD][:2]
TINY = Case("tiny", Shape(1, 2, 2, 96, 96, 64), BF16, causal=True)
CELLS = grid.cases_of(FORWARD)
CELL = cell_form(FORWARD)


@pytest.fixture
def record_set(tmp_path):
    """Loads the record set of a project whose grid has v01 and v02, changed as told.

    previous is the record of the run before. The grid of the backward ladder has b01 and b02.
    """

    def load(previous: dict | None = None, **changes) -> RecordSet:
        folder = tmp_path / "profiles" / "h200"
        write_record(folder / "grid.json", fake_grid(V01, V02) | changes)
        write_record(folder / "grid_backward.json", fake_grid(B01, B02))
        if previous:
            write_record(folder / "grid_previous.json", previous)
        return load_record_set(folder, tmp_path)

    return load


def grid_table(record_set: RecordSet, operation: Operation = FORWARD) -> str:
    return tables.grid(record_set.of(operation))


def test_cells():
    cells = {case.name: case.shape for case in CELLS}
    assert len(cells) == len(CELLS) == 37
    shared = {name: shape for name, shape in cells.items() if name.startswith("gqa")}
    assert len(GRID_OVER_LENGTHS) == 22
    for name in GRID_OVER_LENGTHS.keys() - shared.keys():
        shape = cells[name]
        assert shape.batch * shape.seq_q == shape.batch * shape.seq_k == TOKENS
        assert shape.heads * shape.head_dim == shape.kv_heads * shape.head_dim == HIDDEN
    assert cells["d128_4096"] == cells["d128_causal_4096"] == find_cases(["headline"])[0].shape
    assert shared == {
        "gqa_4096": Shape(1, 64, 8, 4096, 4096, 128),
        "gqa_16384": Shape(1, 64, 8, 16384, 16384, 128),
        "gqa_causal_4096": Shape(1, 64, 8, 4096, 4096, 128),
        "gqa_causal_16384": Shape(1, 64, 8, 16384, 16384, 128),
    }
    assert {name: cells[name] for name in GRID.keys() - GRID_OVER_LENGTHS.keys()} == {
        **{
            f"d{head_dim}{mask}_4096": Shape(batch, heads, heads, 4096, 4096, head_dim)
            for batch, heads, head_dim in ((8, 16, 72), (4, 25, 80), (4, 21, 96), (4, 10, 192))
            for mask in ("", "_causal")
        },
        "vit_197": Shape(16, 12, 12, 197, 197, 64),
        "vit_577": Shape(16, 12, 12, 577, 577, 64),
        "whisper_1500": Shape(8, 20, 20, 1500, 1500, 64),
        "cross_attention_77": Shape(8, 10, 10, 4096, 77, 64),
        "flux_4608": Shape(1, 24, 24, 4608, 4608, 128),
        "encoder_2048": Shape(1, 16, 16, 2048, 2048, 64),
        "prefill_causal_32768": Shape(1, 64, 8, 1024, 32768, 128),
    }
    for case in CELLS:
        assert case.causal == ("causal" in case.name)


def test_cells_of_backward():
    """Some of forward's, under the same names: inputs of the same shapes."""
    cells = grid.cases_of(BACKWARD)
    assert [case.name for case in cells] == [
        *GRID_OVER_LENGTHS,
        *(f"d{head_dim}{mask}_4096" for head_dim in (96, 192) for mask in ("", "_causal")),
    ]
    for case in cells:
        assert (case.operation, case.problem) == (BACKWARD, GRID[case.name])


def test_flops_are_those_of_the_visible_half():
    full, causal = (FORWARD.flops(GRID[name]) for name in ("d128_4096", "d128_causal_4096"))
    assert full == 2 * causal == 4 * 4 * 16 * 4096**2 * 128


class TorchBackend:
    """A stand-in for the GPU: v03 refuses, the others add an error to what torch computes.

    To the elements of the first output at an index.
    """

    device = torch.device("cpu")

    def __init__(self, error: float = 0.0, where: tuple = (...,)):
        self.error, self.where = error, where

    def launch(self, step, *tensors, **arguments):
        if step is V03:
            raise UsageError("v03 takes head_dim 128")
        operation = step.operation
        inputs = tensors[: len(operation.inputs)]
        outputs = tensors[len(operation.inputs) :]
        for output, result in zip(outputs, oracle_of(operation)(*inputs, **arguments), strict=True):
            output.copy_(result)
        outputs[0][self.where] += self.error


def test_measured_cell(without_a_gpu):
    cell = grid.measure_shape(TorchBackend(), [V02, V03], TINY)
    assert find_error(cell, CELL) is None
    rate = 2 * 2 * 96**2 * 64 / 100e9
    assert cell["tflops"] == {
        "v02": pytest.approx(rate),
        "v03": {"missing": "v03 takes head_dim 128"},
        "sdpa_cudnn": {"missing": "no such shape"},
        "sdpa_flash": pytest.approx(rate),
    }
    samples = cell["samples_ms"]
    assert {name: len(row) for name, row in samples.items()} == {"v02": 15, "sdpa_flash": 15}
    assert cell["slow"] == []


def test_slow_ones_are_timed_apart(without_a_gpu, monkeypatch):
    """Rounds of 70 ms, and of 300 ms; neither counts its first 300 ms."""
    call_ms = {"v01": 300.0, "v02": 30.0, "sdpa_flash": 40.0}
    timed = []

    def time_interleaved(calls, *, rounds, warmup, sleep_cycles):
        timed.append((list(calls), rounds, warmup))
        return {name: [call_ms[name]] * rounds for name in calls}

    monkeypatch.setattr(timing, "time_interleaved", time_interleaved)
    cell = grid.measure_shape(TorchBackend(), [V01, V02], TINY)
    assert timed[1:] == [(["v02", "sdpa_flash"], 30, 5), (["v01"], 10, 3)]
    assert cell["slow"] == ["v01"]
    assert {name: samples[0] for name, samples in cell["samples_ms"].items()} == call_ms
    assert find_error(cell, CELL) is None


def test_measured_cell_of_backward(without_a_gpu):
    """Peers return all gradients here, and each is checked."""
    case = replace(TINY, operation=BACKWARD)
    cell = grid.measure_shape(TorchBackend(), [B01, B02], case)
    assert find_error(cell, cell_form(BACKWARD)) is None
    assert list(cell["tflops"]) == ["b01", "b02", "sdpa_cudnn", "sdpa_flash"]
    assert cell["tflops"]["b02"] == pytest.approx(5 * 2 * 96**2 * 64 / 100e9)
    assert list(cell["errors"]) == ["b01", "b02", "sdpa_flash"]
    assert all(list(errors) == ["dq", "dk", "dv"] for errors in cell["errors"].values())
    with pytest.raises(UsageError, match=r"b01 is wrong on tiny: an error of .* in dq"):
        grid.measure_shape(TorchBackend(0.1), [B01], case)


@pytest.mark.parametrize(
    ("round_seconds", "rounds"), [(0.001, 30), (0.1, 30), (0.2, 15), (0.3, 10), (5.0, 10)]
)
def test_rounds_follow_from_the_time_of_one(round_seconds, rounds):
    assert cells.affordable_rounds(round_seconds) == rounds


@pytest.mark.parametrize("where", [(...,), (0, 0, 0, 0), (0, 1, 95, 63), (0, 0, slice(32, 48))])
@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_a_wrong_step_is_not_timed(without_a_gpu, error, where):
    with pytest.raises(UsageError, match="v02 is wrong on tiny"):
        grid.measure_shape(TorchBackend(error, where), [V02], TINY)


def test_no_step_is_no_cell(without_a_gpu):
    with pytest.raises(UsageError, match="v03 takes head_dim 128"):
        grid.measure_shape(TorchBackend(), [V03], TINY)


def test_everything_is_built_first():
    """Every step for every cell, but where its limits exclude the cell."""
    built = []
    backend = SimpleNamespace(build=lambda *job: built.append(job))
    narrow = replace(V02, limits=replace(V02.limits, highest_head_dim=128))
    cells.build_all(backend, [V01, narrow], CELLS)
    expected = [
        (step, Specialization(head_dim, "bf16", causal))
        for step in (V01, narrow)
        for head_dim in (64, 72, 80, 96, 128, 192, 256)
        for causal in (False, True)
        if step is not narrow or head_dim <= 128
    ]
    assert sorted(built, key=str) == sorted(expected, key=str)


def test_what_cannot_be_built_stops_the_grid():
    def build(step, spec):
        raise UsageError("nvcc cannot compile v01_naive.cu")

    with pytest.raises(UsageError, match="nvcc cannot compile"):
        cells.build_all(SimpleNamespace(build=build), [V01], CELLS)


def test_ceiling(monkeypatch):
    products = []

    def time_interleaved(calls):
        products.append(calls["matmul"]().shape)
        return {"matmul": [1.0, 2.0, 4.0]}

    monkeypatch.setattr(grid, "CEILING", 64)
    monkeypatch.setattr(grid, "time_interleaved", time_interleaved)
    ceiling = grid.measure_ceiling(torch.device("cpu"))
    assert ceiling == {
        "matmul": "64^3",
        "tflops": pytest.approx(2 * 64**3 / 2e9),
        "samples_ms": [1.0, 2.0, 4.0],
    }
    assert products == [(64, 64)]


def read_grid(path: Path) -> dict | None:
    return read_record(path, GRID_RECORD)


@pytest.fixture
def measured_grid(monkeypatch, tmp_path):
    """Writes a record of fake cells in tmp_path; returns its path."""
    monkeypatch.setitem(grid.FIRST_STEP, BACKWARD, "b02")
    fake = fake_grid(V01)
    monkeypatch.setattr(grid, "GpuBackend", lambda: SimpleNamespace(device="cuda"))
    monkeypatch.setattr(grid, "build_all", lambda *_: None)
    monkeypatch.setattr(grid, "measure_ceiling", lambda device: fake["ceiling"])
    monkeypatch.setattr(grid, "versions", lambda: {"device": "NVIDIA H200"})
    monkeypatch.setattr(
        grid,
        "measure_shape",
        lambda backend, steps, case: fake_grid(*steps)["cells"][0] | {"name": case.name},
    )
    monkeypatch.setattr(grid, "PROFILES_DIR", tmp_path)
    return lambda operation=FORWARD: grid.measure_grid(operation)


def test_record_of_the_grid(measured_grid, tmp_path):
    path = measured_grid()
    assert path == tmp_path / "h200" / "grid.json"
    record = read_grid(path)
    assert list(record["sources"]) == [step.name for step in cells.steps_from("v01")][3:]
    assert [cell["name"] for cell in record["cells"]] == [case.name for case in CELLS]
    assert record["ceiling"]["tflops"] == 800.0
    assert [file.name for file in path.parent.iterdir()] == ["grid.json"]


def test_record_of_the_backward_grid_lies_beside_it(measured_grid):
    path = measured_grid()
    other = measured_grid(BACKWARD)
    assert other == path.with_name("grid_backward.json")
    record = read_grid(other)
    assert record["sources"].keys() == {step.name for step in cells.steps_from("b02")}
    assert [cell["name"] for cell in record["cells"]] == list(BACKWARD.grid)
    write_record(other, record | {"driver": "first"})
    measured_grid(BACKWARD)
    assert read_grid(path.with_name("grid_backward_previous.json"))["driver"] == "first"
    assert read_grid(path)["sources"].keys() == {step.name for step in cells.steps_from("v04")}


def test_every_ladder_has_a_first_step_in_its_grid():
    assert grid.FIRST_STEP.keys() == {*OPERATIONS.values()}
    for operation, name in grid.FIRST_STEP.items():
        steps = cells.steps_from(name)
        assert all(step.operation == operation and step.is_general for step in steps)
        assert any(not step.is_general for step in all_steps() if step.operation == operation)
    with pytest.raises(UsageError, match="there is no step from v99 on"):
        cells.steps_from("v99")


def test_a_run_before_of_the_same_sources_is_kept(measured_grid):
    path = measured_grid()
    previous = path.with_name("grid_previous.json")
    write_record(path, read_grid(path) | {"driver": "first"})
    measured_grid()
    assert read_grid(previous)["driver"] == "first"
    assert "driver" not in read_grid(path)
    measured_grid()
    assert "driver" not in read_grid(previous)  # of three, the last two


def test_a_run_before_of_other_sources_is_overwritten(measured_grid):
    path = measured_grid()
    measured_grid()
    record = read_grid(path)
    record["sources"]["v09"]["code_sha256"] = "0" * 64
    write_record(path, record)
    measured_grid()
    assert [file.name for file in path.parent.iterdir()] == ["grid.json"]
    assert read_grid(path)["sources"] != record["sources"]


def test_a_malformed_run_before_is_overwritten(measured_grid, capsys):
    path = measured_grid()
    path.write_text("{")
    measured_grid()
    assert f"warning: malformed record {path}" in capsys.readouterr().err
    assert [file.name for file in path.parent.iterdir()] == ["grid.json"]
    assert read_grid(path)


def test_table(record_set):
    text = grid_table(record_set())
    rates = "| 100 | 200 | missing | 160 | 640 | 0.312 × |"
    assert text.splitlines()[:4] == [
        "| Cell | head_dim | Mask | Batch × heads | Queries | Keys | v01 | v02 | sdpa_math | "
        "sdpa_flash | sdpa_cudnn | v02 / fastest peer |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| d64_4096 | 64 | none | 4 × 32 | 4096 | 4096 " + rates,
        "| d64_causal_4096 | 64 | causal | 4 × 32 | 4096 | 4096 " + rates,
    ]
    caption = text.splitlines()[-1]
    assert f"NVIDIA H200 in bf16; {tables.inputs(FORWARD)}; " in caption
    assert "Median of 3 interleaved rounds" in caption
    assert "throttle reasons after: none" in caption
    assert "In the run before" not in caption


def test_table_of_backward(record_set):
    text = grid_table(record_set(), BACKWARD)
    assert " | b01 | b02 | sdpa_math |" in text.splitlines()[0]
    assert "; q, k, v and dout normally distributed with variance 1" in text
    assert "as many queries as keys. FLOPs are 2.5 times forward's. Median of 3" in text
    assert "FLOPs" not in grid_table(record_set())


def cells_with(*rates: dict) -> list[dict]:
    """The fake cells with some rates of each changed."""
    cells = fake_grid(V01, V02)["cells"]
    return [
        cell | {"tflops": cell["tflops"] | changes}
        for cell, changes in zip(cells, rates, strict=True)
    ]


def ratios(text: str) -> list[str]:
    return [line.split("|")[-2].strip() for line in text.splitlines()[2:] if line[:1] == "|"]


def test_ratio_to_the_fastest_peer(record_set):
    cells = cells_with({"v02": 640.0}, {"v02": 810.0})
    text = grid_table(record_set(cells=cells))
    assert ratios(text) == ["**1.000 ×**", "**1.266 ×**"]
    told = (
        "v02 over the fastest peer: geometric mean of 2 cells 1.125 ×, smallest 1.000 × (d64_4096)"
    )
    assert f"\n\n{told}. TFLOP/s on" in text
    # Never bold below 1, and no ratio without a peer or without the step.
    assert ratios(grid_table(record_set(cells=cells_with({"v02": 639.9}, {})))) == [
        "1.000 ×",
        "0.312 ×",
    ]
    gone = {"missing": "too long"}
    no_peer = {"sdpa_flash": gone, "sdpa_cudnn": gone}
    text = grid_table(record_set(cells=cells_with({"v01": gone, "v02": gone}, no_peer)))
    assert ratios(text) == ["", ""]
    assert "v02 over the fastest peer: not measured." in text


def test_ratio_is_of_the_step_that_attention_takes(record_set):
    gone = {"missing": "takes head_dim 8-128 by 8, not 256"}
    text = grid_table(record_set(cells=cells_with({"v01": 320.0, "v02": gone}, {"v02": 810.0})))
    assert ratios(text) == ["0.500 ×", "**1.266 ×**"]
    assert " | v02, v01 / fastest peer |" in text
    assert "\n\nv02, v01 over the fastest peer: geometric mean of 2 cells 0.795 ×, " in text

    records = record_set(cells=cells_with({"v01": 320.0, "v02": 640.0}, {"v02": 810.0}))
    steps = tuple(
        replace(
            step, only_deterministic=step.name == "v02", unordered=("o",) * (step.name == "v01")
        )
        for step in records.steps
    )
    ladder = replace(records, steps=steps).of(FORWARD)
    assert (ladder.taken(), ladder.taken(deterministic=True)) == (("v01",), ("v02",))
    assert ratios(tables.grid(ladder))[0] == "0.500 ×"
    steps = tuple(
        replace(step, few=FEW_QUERIES if step.name == "v02" else None) for step in records.steps
    )
    assert replace(records, steps=steps).of(FORWARD).taken() == ("v01",)


def test_steps_whose_bits_repeat_are_compared_with_such_a_peer(record_set):
    cells = cells_with(
        {"v02": 640.0, FA3_DETERMINISTIC: 320.0}, {"v02": 810.0, FA3_DETERMINISTIC: 405.0}
    )
    told = "v02, whose every bit repeats, over flash_attention_3_deterministic: geometric mean of 2"
    assert f"{told} cells 2.000 ×, smallest 2.000 × (" in grid_table(record_set(cells=cells))
    assert "bit repeats" not in grid_table(record_set())


def test_run_before_is_told_below_the_table(record_set):
    previous = fake_grid(V01, V02)
    previous["cells"] = cells_with({"v02": 320.0}, {"v02": 1280.0})
    text = grid_table(record_set(previous))
    assert ratios(text) == ["0.312 ×", "0.312 ×"]  # the newer one's
    assert (
        "In the run before, of the same sources: geometric mean of 2 cells 1.000 ×, "
        "smallest 0.500 × (d64_4096)."
    ) in text
    previous["sources"]["v02"]["code_sha256"] = "0" * 64
    assert "In the run before" not in grid_table(record_set(previous))


def test_shared_heads_and_rounds_are_told(record_set):
    cells = fake_grid(V01, V02)["cells"]
    cells[0] |= {"heads": 64, "kv_heads": 8}
    cells[1]["samples_ms"] = {"v01": [1.0] * 10}
    text = grid_table(record_set(cells=cells))
    assert "| 64 | none | 4 × 64/8 | 4096 | 4096 |" in text
    assert "Median of 3 to 10 interleaved rounds per cell, L2" in text


def test_rounds_apart_are_told(record_set):
    cells = fake_grid(V01, V02)["cells"]
    cells[0]["slow"] = ["v01"]
    text = grid_table(record_set(cells=cells))
    assert "interleaved rounds per cell, the slow ones apart, L2" in text


def test_other_keys_than_queries(without_a_gpu, record_set):
    case = replace(TINY, shape=replace(TINY.shape, seq_q=40))
    cell = grid.measure_shape(TorchBackend(), [V02, V03], case)
    assert find_error(cell, CELL) is None
    assert cell["tflops"]["v02"] == pytest.approx(4 * 2 * (40 * 56 + 40**2 / 2) * 64 / 100e9)
    cell["environment"] = fake_grid(V01)["cells"][0]["environment"]
    text = grid_table(record_set(sources=fake_grid(V02)["sources"], cells=[cell]))
    assert "| tiny | 64 | causal | 1 × 2 | 40 | 96 |" in text


def test_table_tells_what_throttled_any_cell(record_set):
    cells = fake_grid(V01)["cells"]
    slow = cells[0]["environment"]["after"] | {"throttle_reasons": ["software power cap"]}
    cells[0]["environment"] = cells[0]["environment"] | {"after": slow}
    assert "throttle reasons after: software power cap." in grid_table(record_set(cells=cells))


def test_changed_step_is_called_stale(record_set):
    sources = fake_grid(V01, V02)["sources"]
    sources["v02"]["code_sha256"] = "0" * 64
    changed = record_set(sources=sources)
    assert "| v01 | v02 (stale) | sdpa_math |" in grid_table(changed)
    assert evaluate("grid.d64_4096.v02", changed) == "stale"
    assert evaluate("grid.d64_4096.v01", changed) == "100.0"


def test_without_a_record(tmp_path):
    nothing = load_record_set(tmp_path, tmp_path)
    assert grid_table(nothing) == "not measured"
    assert evaluate("grid.d64_4096.v01", nothing) == "not measured"
    assert plots.render_plots(nothing) == {}


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("grid.d64_4096.v01 : .0f", "100"),
        ("grid.d64_causal_4096.sdpa_flash", "160.0"),
        ("grid.d64_4096.v02 / grid.d64_4096.sdpa_flash : .0%", "125%"),
        ("grid.d64_4096.v02 / grid.d64_causal_4096.v02 : .1f", "not measured together"),
        ("grid.d64_4096.sdpa_math", "missing"),
        ("grid.d64_4096.v03", "not measured"),
        ("grid.gqa_16384.v02", "not measured"),
        ("grid.d64_4096.v02.error", "0.002"),
        ("grid.d64_causal_4096.v02.error : .1e", "2.0e-04"),
        ("grid.d64_4096.v02.error / grid.d64_causal_4096.sdpa_flash.error : .1f", "12.5"),
        ("grid.d64_4096.sdpa_math.error", "missing"),
        ("grid.gqa_16384.v02.error", "not measured"),
        ("grid_backward.d64_4096.b02 / grid_backward.d64_4096.sdpa_flash : .0%", "125%"),
        ("grid_backward.d64_4096.b02.error", "0.002"),
        ("grid_backward.d96_4096.b02", "not measured"),
    ],
)
def test_expression(record_set, expression, text):
    assert evaluate(expression, record_set()) == text


@pytest.mark.parametrize(
    "expression",
    [
        "grid",
        "grid.d64_4096",
        "grid.d64.v01",
        "grid.d64_4096.v99",
        "grid.d64_4096.v99.error",
        "grid.d64_4096.v01.time_ms",
        "grid.d64_4096.v01.error.o",
        "grid.d64_4096.b01",
        "grid_backward.d64_4096.v01",
        "grid_backward.vit_197.b01",
        "grid_forward.d64_4096.v01",
    ],
)
def test_expression_that_means_nothing(record_set, expression):
    with pytest.raises(UsageError):
        evaluate(expression, record_set())


@pytest.fixture
def whole_grid(record_set):
    """A record set of every cell: two steps close together, one far below, and a ceiling."""
    fake = fake_grid(V01, V02, V03)
    cells = [
        fake["cells"][0]
        | {
            "name": case.name,
            "heads": case.shape.heads,
            "kv_heads": case.shape.kv_heads,
            "seq": case.shape.seq_q,
            "head_dim": case.shape.head_dim,
            "causal": case.causal,
            "tflops": {"v01": 30.0, "v02": 690.0, "v03": 700.0, "sdpa_flash": 350.0},
        }
        for case in CELLS
    ]
    return record_set(sources=fake["sources"], cells=cells)


def test_plot(whole_grid):
    """A row for each shape and a panel for each mask, with a dot for each step."""
    svg = plots.render_plots(whole_grid)["grid.svg"]
    assert not clashes(svg)
    found = [text.text for text in texts(svg)]
    shapes = [text for text in found if text.count("×") == 2 and text[0].isdigit()]
    assert len(shapes) == len({(case.shape.seq_q, case.shape) for case in CELLS})
    assert "4 × 64/8 × 16384" in shapes
    assert found.count("2.00 ×") == len(CELLS)
    assert {"v01", "v02", "v03", "sdpa_flash", "measured ceiling: product of 8192^3"} <= {*found}
    rows: dict[float, list[float]] = {}
    for x, y, _ in dots(svg):
        rows.setdefault(y, []).append(x)
    legend, *shown = rows.values()
    assert len(legend) == 3
    assert len(shown) == len(shapes)
    for row in shown:
        assert len(row) % 3 == 0  # one mask, or both
        for slow, fast, fastest in zip(row[::3], row[1::3], row[2::3], strict=True):
            assert fast - slow == pytest.approx(66 * (fastest - fast), rel=0.05)  # 30, 690, 700


def test_plot_of_backward(record_set):
    plotted = plots.render_plots(record_set())
    svg = plotted["grid_backward.svg"]
    assert not clashes(svg)
    found = [text.text for text in texts(svg)]
    assert found[0].startswith("NVIDIA H200, backward, bf16: ")
    assert {"b01", "b02", "sdpa_flash", "b02 / fastest"} <= {*found}
    assert texts(plotted["grid.svg"])[0].text.startswith("NVIDIA H200, bf16: ")


def test_plot_follows_from_its_record(whole_grid):
    whole = whole_grid.cells["grid"]

    def plot(**changes) -> str:
        changed = replace(whole_grid, cells={"grid": replace(whole, **changes)})
        return plots.render_plots(changed)["grid.svg"]

    svg = plot()
    assert plot() == svg
    record = whole.record
    assert plot(record=record | {"ceiling": record["ceiling"] | {"tflops": 801.0}}) != svg
    assert "v02 (stale)" in plot(stale=frozenset({"v02"}))


def test_plot_leaves_out_what_is_missing(record_set):
    cells = cells_with({"v01": {"missing": "too wide"}}, {})
    svg = plots.render_plots(record_set(cells=cells))["grid.svg"]
    colors = [color for _, _, color in dots(svg)]
    assert colors == ["ramp6", "ramp7", "ramp7", "ramp6", "ramp7"]  # the legend, then the cells


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_tiny_cell_on_a_gpu(kv_heads):
    case = replace(TINY, shape=replace(TINY.shape, kv_heads=kv_heads))
    cell = grid.measure_shape(GpuBackend(), cells.steps_from(grid.FIRST_STEP[FORWARD]), case)
    assert find_error(cell, CELL) is None
    assert isinstance(cell["tflops"]["v07"], float)
    assert isinstance(cell["tflops"]["sdpa_flash"], float)
    assert "sdpa_math" not in cell["tflops"]


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_tiny_cell_of_backward_on_a_gpu(kv_heads):
    case = replace(TINY, operation=BACKWARD, shape=replace(TINY.shape, kv_heads=kv_heads))
    steps = cells.steps_from("b01")
    cell = grid.measure_shape(GpuBackend(), steps, case)
    assert find_error(cell, cell_form(BACKWARD)) is None
    assert isinstance(cell["tflops"]["b01"], float)
    assert isinstance(cell["tflops"]["sdpa_flash"], float)


@pytest.mark.gpu
def test_ceiling_on_a_gpu(monkeypatch):
    monkeypatch.setattr(grid, "CEILING", 1024)
    assert grid.measure_ceiling(torch.device("cuda"))["tflops"] > 0
