"""Large head_dim: cells, how they are measured, their record, its table and figures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from common import commands
from common.bench import grid, large_head_dim, peers
from common.bench.large_head_dim import cases_of, chosen_steps
from common.bench.peers import Peer, load_for_large_head_dim
from common.catalog import all_steps, find_step
from common.errors import UsageError
from common.operation import BACKWARD, FORWARD, OPERATIONS, Operation
from common.problem import GRID, LARGE_HEAD_DIMS, TOKENS, Shape
from common.record_schema import LARGE_HEAD_DIM_RECORD, find_error
from common.records import large_head_dim_file, read_record, write_record
from common.report import large_head_dim_table, rows
from common.report.derived import (
    LARGE_HEAD_DIM_FIGURES,
    large_head_dim_figures,
    large_ratios,
    ratios_to_256,
)
from common.report.expressions import evaluate
from common.report.markdown import REQUIRED_TABLES, render
from common.report.record_set import RecordSet, load_record_set
from common.runtime.gpu import GpuBackend
from verify.cases import BF16, Case
from verify.reference import attention_reference
from verify.tests.fake_records import fake_grid, fake_large_head_dim

STEP, NARROW = chosen_steps(all_steps(), FORWARD)
COLUMNS = ["N 4096", "N 16384", "N 4096, causal", "N 16384, causal"]
TINY = Case("tiny", Shape(1, 2, 2, 96, 96, 320), BF16, causal=True)
PEERS = ["sdpa_math", "sdpa_efficient", "sdpa_cudnn", "flash_attention_3"]


# ---- cells


def test_cells():
    assert len(LARGE_HEAD_DIMS) == 9 * 2 * 2
    heads = {192: 10, 256: 8, 320: 6, 384: 5, 512: 4, 576: 3, 768: 2, 1024: 2}
    own = set()
    for name, problem in LARGE_HEAD_DIMS.items():
        shape = problem.shape
        assert shape.batch * shape.seq_q == TOKENS
        assert shape.seq_k == shape.seq_q
        assert shape.heads == shape.kv_heads == heads[shape.head_dim]
        mask = "_causal" if problem.causal else ""
        of_v = ""
        if shape.v_head_dim != shape.head_dim:
            own.add((shape.head_dim, shape.v_head_dim))
            of_v = f"_v{shape.v_head_dim}"
        assert name == f"d{shape.head_dim}{of_v}{mask}_{shape.seq_q}"
        assert problem.dtype == "bf16"
    assert own == {(192, 128), (576, 512)}
    for name in ("d256_4096", "d256_causal_16384"):
        assert LARGE_HEAD_DIMS[name] == GRID[name]
    for operation in OPERATIONS.values():
        cases = cases_of(operation)
        assert [case.name for case in cases] == list(LARGE_HEAD_DIMS)
        assert {case.operation for case in cases} == {operation}


def test_steps():
    assert STEP.only_large_head_dim
    assert NARROW.is_candidate()
    assert (STEP.operation, NARROW.operation) == (FORWARD, FORWARD)
    older = replace(STEP, name="v00")
    assert chosen_steps([older, *all_steps()], FORWARD) == (STEP, older, NARROW)
    with pytest.raises(UsageError, match="there is no forward step for large head_dim"):
        chosen_steps([NARROW], FORWARD)
    narrower = replace(NARROW, limits=replace(NARROW.limits, highest_head_dim=128))
    told = r"there is no forward step that attention\(\) takes at head_dim 256"
    for others in ([STEP], [STEP, narrower]):
        with pytest.raises(UsageError, match=told):
            chosen_steps(others, FORWARD)


def test_steps_of_gradients():
    """b10, which attention() takes up to 128, is no step for 256; two are for large head_dim."""
    *large, narrow = chosen_steps(all_steps(), BACKWARD)
    assert [step.name for step in large] == ["b13", "b12"]
    assert all(step.only_large_head_dim for step in large)
    assert narrow.is_candidate()
    assert {step.operation for step in (*large, narrow)} == {BACKWARD}
    assert narrow.limits.highest_head_dim == 256


# ---- peers


def test_peers(monkeypatch):
    """On the CPU torch has its unfused code only."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rng = torch.Generator().manual_seed(0)

    def no_library():
        raise ImportError("no library")

    monkeypatch.setattr(peers, "_find_flash_attention_3", no_library)
    for head_dim, v_head_dim in ((320, 320), (576, 512)):
        shape = Shape(1, 2, 2, 8, 8, head_dim, v_head_dim)
        q, k, v = (torch.randn(size, generator=rng) for size in (shape.q, shape.kv, shape.v))
        found = load_for_large_head_dim(FORWARD, (q, k, v), causal=True)
        assert list(found) == PEERS
        assert found["flash_attention_3"] == "no library"
        math = found["sdpa_math"]
        assert isinstance(math, Peer)
        o, _ = attention_reference(q, k, v, causal=True, softmax_scale=head_dim**-0.5)
        assert torch.allclose(math.call().double(), o, atol=1e-5)
    dout, lse = torch.randn(o.shape, generator=rng), torch.zeros(1, 2, 8)
    found = load_for_large_head_dim(BACKWARD, (q, k, v, o.float(), lse, dout), causal=True)
    assert list(found) == PEERS
    assert isinstance(found["sdpa_math"], Peer)
    assert [gradient.shape for gradient in found["sdpa_math"].call()] == [
        q.shape,
        k.shape,
        v.shape,
    ]
    assert peers._sdpa_route(peers.SDPBackend.EFFICIENT_ATTENTION).endswith(", memory-efficient")


# ---- measuring


@pytest.fixture
def measure_all(monkeypatch, tmp_path):
    """Writes a record of fake cells; returns its path, and what was built and measured.

    Of an operation, FORWARD if not told.
    """
    measured = []
    cells = {
        (operation, cell["name"]): cell
        for operation in OPERATIONS.values()
        for cell in fake_large_head_dim(*chosen_steps(all_steps(), operation)[-2:])["cells"]
    }
    backend = SimpleNamespace(device="cuda", refusal=lambda step, spec: None)

    def measure_shape(backend, steps, case, load_peers):
        assert load_peers is load_for_large_head_dim
        head_dims = case.shape.head_dim, case.shape.v_head_dim
        measured.append((head_dims, [step.name for step in steps]))
        return cells[case.operation, case.name]

    monkeypatch.setattr(large_head_dim, "GpuBackend", lambda: backend)
    monkeypatch.setattr(large_head_dim, "measure_shape", measure_shape)
    monkeypatch.setattr(grid, "build_all", lambda *_: None)
    monkeypatch.setattr(grid, "measure_ceiling", lambda device: fake_grid(STEP)["ceiling"])
    monkeypatch.setattr(grid, "versions", lambda: {"device": "NVIDIA H200"})
    monkeypatch.setattr(grid, "PROFILES_DIR", tmp_path)
    return lambda operation=FORWARD: (
        large_head_dim.measure_large_head_dim(operation),
        measured,
        backend,
    )


def test_record(measure_all, tmp_path):
    path, measured, _ = measure_all()
    assert path == tmp_path / "h200" / "large_head_dim.json"
    record = read_record(path, LARGE_HEAD_DIM_RECORD)
    assert list(record["sources"]) == [STEP.name, NARROW.name]
    assert [cell["name"] for cell in record["cells"]] == list(LARGE_HEAD_DIMS)
    assert len(measured) == len(LARGE_HEAD_DIMS)
    for head_dims, names in measured:
        assert names == ([STEP.name, NARROW.name] if head_dims == (256, 256) else [STEP.name])
    measure_all()
    assert path.with_name("large_head_dim_previous.json").exists()


def test_cells_of_several_steps(measure_all):
    """Each has all steps whose limits allow it; the first is the one that attention() takes."""
    first, second, narrow = (step.name for step in chosen_steps(all_steps(), BACKWARD))
    path, measured, _ = measure_all(BACKWARD)
    assert list(read_record(path, LARGE_HEAD_DIM_RECORD)["sources"]) == [first, second, narrow]
    some = {(256, 256): [first, second, narrow], (192, 128): [first, second]}
    assert len(measured) == len(LARGE_HEAD_DIMS)
    for head_dims, names in measured:
        assert names == some.get(head_dims, [second])


def test_a_step_that_does_not_run_here_is_one_clear_line(measure_all):
    _, _, backend = measure_all()
    backend.refusal = lambda step, spec: "needs sm_90"
    with pytest.raises(UsageError, match=f"^{STEP.name} needs sm_90$"):
        measure_all()


def test_measured_cell(without_a_gpu):
    """The peers are those that the caller loads; o is checked before anything is timed."""
    oracle = {}

    class TorchBackend:
        device = torch.device("cpu")

        def launch(self, step, q, k, v, o, lse, **arguments):
            for output, result in zip(
                (o, lse), attention_reference(q, k, v, **arguments), strict=True
            ):
                output.copy_(result)
            oracle["o"] = o

    def load_peers(operation, inputs, *, causal):
        assert causal
        return {"sdpa_math": "out of memory", "sdpa_efficient": Peer(lambda: oracle["o"], "torch")}

    backend = TorchBackend()
    v02 = find_step("v02")
    cell = grid.measure_shape(backend, [v02], TINY, load_peers)
    rate = pytest.approx(2 * 2 * 96**2 * 320 / 100e9)
    assert cell["tflops"] == {
        "v02": rate,
        "sdpa_math": {"missing": "out of memory"},
        "sdpa_efficient": rate,
    }
    assert cell["routes"] == {"sdpa_efficient": "torch"}
    assert "v_head_dim" not in cell
    with pytest.raises(UsageError, match=r"sdpa_efficient is wrong on tiny: an error of .* in o"):
        grid.measure_shape(
            backend,
            [v02],
            TINY,
            lambda *_, causal: {"sdpa_efficient": Peer(lambda: oracle["o"] + 0.1, "torch")},
        )


def test_command(monkeypatch, tmp_path, capsys):
    def measure(operation: Operation):
        path = tmp_path / "profiles/h200" / large_head_dim_file(operation)
        write_record(path, fake_large_head_dim(*chosen_steps(all_steps(), operation)[-2:]))
        return path

    monkeypatch.setattr(large_head_dim, "measure_large_head_dim", measure)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    monkeypatch.setattr(commands, "_require_gpu", lambda: None)
    monkeypatch.setattr(commands, "_report_regenerated", lambda: None)
    assert commands.bench_large_head_dim() == 0
    out = capsys.readouterr().out
    assert out.startswith("recorded profiles/h200/large_head_dim.json\n| head_dim | Step |")
    assert "recorded profiles/h200/large_head_dim_backward.json\n| head_dim | Step |" in out


# ---- the record and its table


@pytest.fixture
def record_set(tmp_path):
    """Loads the record set of a project with such a record, changed as told.

    previous is the record of the run before.
    """

    def load(previous: dict | None = None, **changes) -> RecordSet:
        folder = tmp_path / "profiles" / "h200"
        write_record(folder / "large_head_dim.json", fake_large_head_dim(STEP, NARROW) | changes)
        if previous:
            write_record(folder / "large_head_dim_previous.json", previous)
        return load_record_set(folder, tmp_path)

    return load


def test_form():
    record = fake_large_head_dim(STEP, NARROW)
    assert find_error(record, LARGE_HEAD_DIM_RECORD) is None
    assert find_error(record | {"sources": fake_grid(STEP)["sources"]}, LARGE_HEAD_DIM_RECORD)
    without = [{key: cell[key] for key in cell if key != "routes"} for cell in record["cells"]]
    assert find_error(record | {"cells": without}, LARGE_HEAD_DIM_RECORD)


def several_steps() -> tuple[dict, str]:
    """A record of gradients in which a newer step, which takes 256 columns at most, is twice as
    fast as the first one there; and its name.
    """
    newer, step, narrow = chosen_steps(all_steps(), BACKWARD)
    record = fake_large_head_dim(step, narrow)
    hashes = {newer.name: {"code_sha256": newer.code_sha256}}
    record["sources"] = hashes | record["sources"]
    for cell in record["cells"]:
        if cell["head_dim"] <= 256:
            cell["tflops"] = {newer.name: 2 * cell["tflops"][step.name]} | cell["tflops"]
    return record, newer.name


def test_several_steps(tmp_path):
    """The first that runs in a cell is compared with peers; each has a row, and is shown at 256."""
    record, newer = several_steps()
    _, step, narrow = record["sources"]
    assert find_error(record, LARGE_HEAD_DIM_RECORD) is None
    ratios = large_ratios(record)
    assert (ratios["d192_v128_4096"], ratios["d512_4096"]) == (400 / 100, 300 / 100)
    assert large_head_dim_figures(record)["over_256"] == pytest.approx((0.75 * 0.825) ** 0.5)
    folder = tmp_path / "profiles" / "h200"
    write_record(folder / "large_head_dim_backward.json", record)
    loaded = load_record_set(folder, tmp_path)
    found = rows.large_head_dim(loaded, BACKWARD)
    names = {}
    for row in found:
        names.setdefault((row["head_dim"], row["v_head_dim"]), []).append(row["step"])
    several = {(256, 256): [narrow, newer, step], (192, 128): [newer, step]}
    assert all(listed == several.get(head_dims, [step]) for head_dims, listed in names.items())
    of_256 = [row["by_column"]["N 4096"]["over_256"] for row in found[:3]]
    assert of_256 == [None, 400 / 400, 200 / 400]
    caption = large_head_dim_table.large_head_dim(loaded, BACKWARD).splitlines()[-1]
    assert f"{newer} and {step}'s TFLOP/s over those of {narrow}, " in caption
    assert f"{newer}, {step} over the fastest peer, above 256 and where v has its own" in caption


def test_ratios():
    record = fake_large_head_dim(STEP, NARROW)
    ratios = large_ratios(record)
    assert len(ratios) == 32
    assert not any(name.startswith("d256") for name in ratios)
    assert ratios["d192_v128_4096"] == 200 / 100
    assert ratios["d512_4096"] == 300 / 100
    assert ratios["d1024_causal_16384"] == 230 / 25
    of_256 = ratios_to_256(record, STEP.name)
    assert len(of_256) == 36
    assert (of_256["d256_4096"], of_256["d512_causal_16384"]) == (200 / 400, 330 / 400)


def test_figures():
    record = fake_large_head_dim(STEP, NARROW)
    figures = large_head_dim_figures(record)
    assert tuple(figures) == LARGE_HEAD_DIM_FIGURES
    # Of 8 head_dim, in 4 columns: 2, 8, 2.3 and 9.2, of 512 3, 12, 3.3 and 13.2.
    product = (2 * 8 * 2.3 * 9.2) ** 7 * 3 * 12 * 3.3 * 13.2
    assert figures == {
        "cells": 32,
        "mean": pytest.approx(product ** (1 / 32)),
        "smallest": 2.0,
        "smallest_cell": "d320_4096",
        "slower": 0,
        "over_256": pytest.approx((0.75 * 0.825) ** 0.5),
    }
    for cell in record["cells"]:
        cell["tflops"] = {STEP.name: {"missing": "too large"}, "sdpa_math": 1.0}
    nothing = dict.fromkeys(LARGE_HEAD_DIM_FIGURES) | {"cells": 0, "slower": 0}
    assert large_head_dim_figures(record) == nothing


def test_rows(record_set):
    found = rows.large_head_dim(record_set())
    assert [(row["head_dim"], row["v_head_dim"], row["step"]) for row in found] == [
        (256, 256, NARROW.name),
        *((head_dim, head_dim, STEP.name) for head_dim in (256, 320, 384, 512, 576, 768, 1024)),
        (192, 128, STEP.name),
        (576, 512, STEP.name),
    ]
    assert all(list(row["by_column"]) == COLUMNS for row in found)
    first, second, *_, last, _, _ = found
    fa3 = {"peer": 250.0, "name": "flash_attention_3"}
    assert first["by_column"]["N 4096"] == {"rate": 400.0, **fa3, "ratio": 1.6, "over_256": None}
    assert second["by_column"]["N 4096"] == {"rate": 200.0, **fa3, "ratio": 0.8, "over_256": 0.5}
    assert last["by_column"]["N 16384, causal"] == {
        "rate": 230.0,
        "peer": 25.0,
        "name": "sdpa_math",
        "ratio": 9.2,
        "over_256": 0.575,
    }


def test_table(record_set):
    text = large_head_dim_table.large_head_dim(record_set())
    lines = text.splitlines()
    assert lines[:4] == [
        "| head_dim | Step | N 4096 | N 16384 | N 4096, causal | N 16384, causal |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
        f"| 256 | {NARROW.name} |" + " 400 / 250, **1.600 ×** |" * 4,
        f"| 256 | {STEP.name} |"
        + " 200 / 250, 0.800 × (0.500) |" * 2
        + " 230 / 250, 0.920 × (0.575) |" * 2,
    ]
    assert lines[6] == (
        f"| 512 | {STEP.name} | 300 / 100, **3.000 ×** (0.750) | 300 / 25, **12.000 ×** (0.750) | "
        "330 / 100, **3.300 ×** (0.825) | 330 / 25, **13.200 ×** (0.825) |"
    )
    assert [line.split(" | ")[0] for line in lines[10:12]] == ["| 192 / 128", "| 576 / 512"]
    caption = lines[-1]
    for told in (
        f"{STEP.name}'s TFLOP/s over those of {NARROW.name}, which attention() takes up to "
        "head_dim 256, at 256 in the same column; at 512: geometric mean of 4 cells 0.787 ×, "
        "smallest 0.750 × (d512_4096). Of several steps attention() takes the first.",
        f"{STEP.name} over the fastest peer, above 256 and where v has its own: geometric mean of "
        "32 cells ",
        "smallest 2.000 × (d320_4096). That is sdpa_efficient in 16 and sdpa_math in 16 cells.",
        " Two numbers are head_dim of q and k / of v. ",
        "16384 tokens in sequences of N, 2048 / head_dim heads, rounded down; ",
        "Peers: sdpa_math: torch, math; sdpa_efficient: torch. Missing: sdpa_math in 18 of 36 "
        "cells: out of memory; flash_attention_3 in 32 of 36 cells: head dimension at most 256; "
        "sdpa_efficient in 2 of 36 cells: too large. Median of 3 interleaved rounds per cell, "
        "the slow ones apart, L2",
    ):
        assert told in caption
    assert "In the run before" not in caption


def test_run_before(record_set):
    previous = fake_large_head_dim(STEP, NARROW)
    caption = large_head_dim_table.large_head_dim(record_set(previous)).splitlines()[-1]
    assert "In the run before, of the same sources: geometric mean of 32 cells " in caption


def test_what_is_missing_in_a_table(record_set):
    cells = fake_large_head_dim(STEP, NARROW)["cells"]
    for cell in cells:
        cell["tflops"] = {name: {"missing": "no"} for name in cell["tflops"]} | {STEP.name: 100.0}
    text = large_head_dim_table.large_head_dim(record_set(cells=cells[:1] + cells[5:]))
    assert f"| 256 | {NARROW.name} | missing / missing |  |  |  |" in text
    assert f"| 320 | {STEP.name} |  | 100 / missing |" in text
    assert "where v has its own: not measured. That is missing. " in text


def test_tables_without_numbers(record_set, tmp_path):
    nothing = load_record_set(tmp_path / "nothing", tmp_path)
    assert large_head_dim_table.large_head_dim(nothing) == "not measured"
    assert rows.large_head_dim(nothing) == []
    assert evaluate("large_head_dim.mean", nothing) == "not measured"
    for name in (STEP.name, NARROW.name):
        sources = fake_large_head_dim(STEP, NARROW)["sources"]
        sources[name] = {"code_sha256": "0" * 64}
        stale = record_set(sources=sources)
        assert large_head_dim_table.large_head_dim(stale) == "stale"
        assert rows.large_head_dim(stale) == []
        assert evaluate("large_head_dim.over_256", stale) == "stale"
        assert evaluate(f"large_head_dim.d256_4096.{name}", stale) == "stale"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("large_head_dim.cells : .0f", "32"),
        (f"large_head_dim.d576_v512_4096.{STEP.name} : .0f", "200"),
        ("large_head_dim.smallest : .2f", "2.00"),
        ("large_head_dim.smallest_cell", "d320_4096"),
        ("large_head_dim.over_256 : .3f", "0.787"),
        (f"large_head_dim.d512_causal_4096.{STEP.name} : .0f", "330"),
        (f"large_head_dim.d256_4096.{NARROW.name} : .0f", "400"),
        (
            f"large_head_dim.d512_4096.{STEP.name} / large_head_dim.d512_4096.sdpa_efficient : .1f",
            "3.0",
        ),
        (f"large_head_dim.d512_4096.{STEP.name}.error : .0e", "1e-03"),
        (f"large_head_dim.d512_4096.{NARROW.name}", "not measured"),
        ("large_head_dim.d512_4096.sdpa_math", "missing"),
    ],
)
def test_expression(record_set, expression, text):
    assert evaluate(expression, record_set()) == text


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("large_head_dim", "does not read like 'large_head_dim.d256_4096.v07'"),
        ("large_head_dim.median", "no 'median'; there are cells, mean, smallest"),
        (f"large_head_dim.d128_4096.{STEP.name}", "no 'd128_4096'"),
        ("large_head_dim.d512_4096.v99", "no 'v99'"),
        (f"large_head_dim.d512_4096.{STEP.name}.time_ms", "does not read like"),
    ],
)
def test_expression_that_means_nothing(record_set, expression, told):
    with pytest.raises(UsageError) as error:
        evaluate(expression, record_set())
    assert told in str(error.value)


def test_markers(record_set, tmp_path, monkeypatch):
    monkeypatch.setitem(REQUIRED_TABLES, "text.md", ())
    gradients = fake_large_head_dim(*chosen_steps(all_steps(), BACKWARD)[-2:])
    write_record(tmp_path / "profiles/h200/large_head_dim_backward.json", gradients)
    loaded, path = record_set(), tmp_path / "text.md"
    markers = (
        "table: large_head_dim",
        "table: large_head_dim h100",
        "= large_head_dim.over_256 : .2f",
        "= h100 large_head_dim.over_256 : .2f",
        "table: large_head_dim_backward",
        "= large_head_dim_backward.smallest_cell",
    )
    path.write_text("".join(f"<!-- {marker} --><!-- end -->" for marker in markers))
    filled = render(path, loaded, []).split("<!-- end -->")
    assert [text.split(" -->")[1].strip() for text in filled[:-1]] == [
        large_head_dim_table.large_head_dim(loaded),
        "not measured",
        "0.79",
        "not measured",
        large_head_dim_table.large_head_dim(loaded, BACKWARD),
        "d320_4096",
    ]


@pytest.mark.gpu
def test_small_cells_on_a_gpu(monkeypatch, tmp_path):
    shapes = {"d256_causal_512": (256, 256), "d320_causal_512": (320, 320)}
    shapes["d576_v512_causal_512"] = 576, 512
    cases = tuple(
        replace(TINY, name=name, shape=Shape(1, 2, 2, 512, 512, *head_dims))
        for name, head_dims in shapes.items()
    )
    if refusal := GpuBackend().refusal(STEP, cases[1].specialization):
        pytest.skip(f"{STEP.name} {refusal}")
    monkeypatch.setattr(large_head_dim, "cases_of", lambda _: cases)
    monkeypatch.setattr(grid, "PROFILES_DIR", tmp_path)
    monkeypatch.setattr(grid, "CEILING", 1024)
    record = read_record(large_head_dim.measure_large_head_dim(FORWARD), LARGE_HEAD_DIM_RECORD)
    at_256, *others = (cell["tflops"] for cell in record["cells"])
    assert list(at_256) == [STEP.name, NARROW.name, *PEERS]
    for wider in others:
        assert list(wider) == [STEP.name, *PEERS]
        for name in (STEP.name, "sdpa_math", "sdpa_efficient"):
            assert isinstance(wider[name], float)
        assert "missing" in wider["flash_attention_3"]
    assert [cell.get("v_head_dim") for cell in record["cells"]] == [None, None, 512]
