"""Pictures: the heads look where they should, and errors are what they are called."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from common.bench import pictures
from common.catalog import find_step
from common.errors import UsageError
from common.operation import BACKWARD, FORWARD
from common.record_schema import PICTURES_RECORD, find_error
from common.records import write_record
from common.report import tables
from common.report.pictures_plot import draw_pictures
from common.report.plots import render_plots
from common.report.record_set import Whole, load_record_set
from common.runtime.cpu import CpuBackend
from common.runtime.gpu import GpuBackend
from common.step import read_step
from verify.reference import gradients_reference
from verify.tests.fake_records import fake_pictures

V12, B08 = find_step("v12"), find_step("b08")
CELLS, EACH = pictures.CELLS, pictures.SEQ // pictures.CELLS


@pytest.fixture(scope="module")
def record() -> dict:
    backend = CpuBackend()
    return pictures.measure_pictures(backend, pictures.chosen_steps(backend, []))


def heads_of(record: dict) -> dict[str, dict]:
    return {head["name"]: head for head in record["heads"]}


def test_the_steps_that_attention_takes_are_run(record) -> None:
    assert list(record["sources"]) == ["v12", "b08"]
    assert find_error({"device": "a device", **record}, PICTURES_RECORD) is None


@pytest.mark.parametrize(
    ("name", "sees"),
    [
        ("local", lambda i, j: abs(i - j) <= 1),
        ("strided", lambda i, j: (i - j) % (pictures.PERIOD // EACH) == 0),
        ("anchor", lambda i, j: j == 0),
        ("blocks", lambda i, j: i // (pictures.BLOCK // EACH) == j // (pictures.BLOCK // EACH)),
    ],
)
def test_a_made_up_head_looks_where_it_should(record, name, sees) -> None:
    cells = heads_of(record)[name]["map"]
    seen = sum(cells[i][j] for i, j in product(range(CELLS), repeat=2) if sees(i, j))
    assert seen > 0.95 * CELLS * pictures.WHOLE


def test_all_of_a_querys_weight_is_in_the_map(record) -> None:
    for head in record["heads"]:
        for row in head["map"]:
            assert sum(row) == pytest.approx(pictures.WHOLE, abs=0.02 * pictures.WHOLE)


def test_trained_heads_are_causal(record) -> None:
    trained = [head for head in record["heads"] if head["causal"]]
    assert [head["name"] for head in trained] == [f"layer {n}" for n in range(6)]
    for head in trained:
        assert all(head["map"][i][j] == 0 for i in range(CELLS) for j in range(i + 1, CELLS))


def test_the_step_errs_as_torch_does(record) -> None:
    """Within a small factor: both round P and the outputs to bf16."""
    for head, output in product(record["heads"], pictures.OUTPUTS):
        ours, torch_ = (head["errors"][output][who] for who in ("ours", "sdpa"))
        assert 0 < ours["nrmse"] < 3 * torch_["nrmse"]
        assert ours["median"] <= ours["maximum"]
        groups = torch.tensor(ours["groups"])
        assert groups.square().mean().sqrt().item() == pytest.approx(ours["nrmse"], rel=1e-2)


def test_errors_are_those_of_float64() -> None:
    expected = torch.randn(1, 1, pictures.SEQ, 4, dtype=torch.float64)
    got = expected.clone()
    got[0, 0, -EACH:] += 0.5
    found = pictures.errors(got.float(), expected)
    assert found["maximum"] == pytest.approx(0.5, rel=1e-3)
    assert found["median"] < 1e-6
    rms = expected.square().mean().sqrt().item()
    assert found["groups"][-1] == pytest.approx(0.5 / rms, rel=1e-3)
    assert found["nrmse"] == pytest.approx(0.5 / rms / CELLS**0.5, rel=1e-3)


def test_gradients_are_the_oracles() -> None:
    q, k, v = (x[None].double() for x in pictures.made_up()["local"])
    dout = torch.randn_like(q)
    options = {"causal": False, "softmax_scale": 0.125}
    o, lse = pictures.attention_reference(q, k, v, **options)
    found = pictures.with_gradients(
        lambda *x: pictures.attention_reference(*x, **options)[0], q, k, v, dout
    )
    expected = (o, *gradients_reference(q, k, v, o, lse, dout, **options))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_wrong_kernel_is_seen(tmp_path, record) -> None:
    """Whose lse is too large by log 2: its rows have half the weight, its gradients half of P."""
    source = find_step("v04").path.read_text(encoding="utf-8")
    right = "row_max[r] * LN_2 + logf(sum);"
    assert source.count(right) == 1
    wrong = source.replace(right, f"0.6931472f + {right}")
    path = tmp_path / "wrong.cu"
    path.write_text(wrong)
    inputs = pictures.made_up()["local"]
    steps = read_step(path), find_step("b02")
    found = pictures.measure_head(CpuBackend(), steps, "local", inputs, causal=False)
    expected = heads_of(record)["local"]
    assert sum(found["map"][5]) == pytest.approx(pictures.WHOLE / 2, rel=0.05)
    for output in ("dk", "dv"):
        assert found["errors"][output]["ours"]["nrmse"] > (
            20 * expected["errors"][output]["ours"]["nrmse"]
        )


def test_a_step_can_be_chosen() -> None:
    backend = CpuBackend()
    assert [s.name for s in pictures.chosen_steps(backend, ["b06"])] == ["v12", "b06"]
    assert [s.name for s in pictures.chosen_steps(backend, ["9", "b05"])] == ["v09", "b05"]
    with pytest.raises(UsageError, match=r"N='9 10' has two steps of one ladder"):
        pictures.chosen_steps(backend, ["9", "10"])


def test_table_and_plot(tmp_path) -> None:
    folder = tmp_path / "profiles" / "h200"
    write_record(folder / "pictures.json", fake_pictures(V12, B08))
    record_set = load_record_set(folder, tmp_path)
    text = tables.pictures(record_set)
    assert "| layer 0 | causal | 2.00e-03 / 4.00e-03 |" in text
    assert "v12 and b08" in text
    drawn = render_plots(record_set)
    assert {"pictures.svg", "pictures_dark.svg"} == set(drawn)
    assert drawn["pictures.svg"].count("<rect") > 5
    stale = fake_pictures(V12, B08)
    stale["sources"]["v12"] = {"code_sha256": "0"}
    write_record(folder / "pictures.json", stale)
    record_set = load_record_set(folder, tmp_path)
    assert "v12 (stale)" in tables.pictures(record_set)
    assert "v12 (stale)" in draw_pictures(record_set.pictures).svg(0)


def test_without_a_record(tmp_path) -> None:
    assert tables.pictures(load_record_set(tmp_path, tmp_path)) == "not measured"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sources": {"v12": {"code_sha256": "0"}}}, "sources cannot be"),
        ({"heads": []}, r"heads cannot be \[\]"),
        ({"trained": 3}, "trained cannot be 3"),
    ],
)
def test_a_malformed_record_is_named(tmp_path, change, told) -> None:
    write_record(tmp_path / "pictures.json", fake_pictures(V12, B08) | change)
    with pytest.raises(UsageError, match=f"pictures.json: the record: {told}"):
        load_record_set(tmp_path, tmp_path)


def test_a_map_is_drawn_to_its_last_cell() -> None:
    drawing = draw_pictures(Whole(fake_pictures(V12, B08), stale=False))
    assert "local" in drawing.svg(0)
    assert "layer 0, causal" in drawing.svg(1)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    backend = GpuBackend()
    steps = pictures.chosen_steps(backend, [])
    assert [step.operation for step in steps] == [FORWARD, BACKWARD]
    record = pictures.measure_pictures(backend, steps)
    assert find_error({"device": "a device", **record}, PICTURES_RECORD) is None
    test_the_step_errs_as_torch_does(record)
