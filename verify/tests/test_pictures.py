"""Pictures: the heads look where they should, and errors are what they are called."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from pathlib import Path

import pytest
import torch

from common import commands
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
from common.step import Step, read_step
from verify.reference import gradients_reference
from verify.tests.fake_records import B_STEP, HEADS_STEP, V_STEP, fake_pictures

CELLS, EACH = pictures.CELLS, pictures.SEQ // pictures.CELLS


RIGHT_LSE = "row_max[r] * LN_2 + logf(sum);"  # of v04


def wrong_v04(folder: Path, lse: str) -> Step:
    """v04 with another lse."""
    source = find_step("v04").path.read_text(encoding="utf-8")
    assert source.count(RIGHT_LSE) == 1
    path = folder / "wrong.cu"
    path.write_text(source.replace(RIGHT_LSE, lse))
    return read_step(path)


@pytest.fixture(scope="module")
def record() -> dict:
    backend = CpuBackend()
    return pictures.measure_pictures(backend, pictures.chosen_steps(backend, []))


def heads_of(record: dict) -> dict[str, dict]:
    return {head["name"]: head for head in record["heads"]}


def test_the_steps_that_attention_takes_are_run(record) -> None:
    assert list(record["sources"]) == [HEADS_STEP.name, B_STEP.name]
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
    inputs = pictures.made_up()["local"]
    steps = wrong_v04(tmp_path, f"0.6931472f + {RIGHT_LSE}"), find_step("b02")
    found = pictures.measure_head(CpuBackend(), steps, "local", inputs, causal=False)
    expected = heads_of(record)["local"]
    assert sum(found["map"][5]) == pytest.approx(pictures.WHOLE / 2, rel=0.05)
    for output in ("dk", "dv"):
        assert found["errors"][output]["ours"]["nrmse"] > (
            100 * expected["errors"][output]["ours"]["nrmse"]
        )


def test_a_wrong_o_is_seen_where_it_is_wrong(record, monkeypatch) -> None:
    """Of which the last row is that of the row before."""
    run = pictures.run

    def wrong(backend, step, *inputs, **options):
        first, *others = run(backend, step, *inputs, **options)
        if step.operation == FORWARD:
            first[..., -1, :] = first[..., -2, :]
        return (first, *others)

    monkeypatch.setattr(pictures, "run", wrong)
    inputs = pictures.made_up()["local"]
    steps = find_step("v04"), find_step("b02")
    found = pictures.measure_head(CpuBackend(), steps, "local", inputs, causal=False)
    *groups, last = found["errors"]["o"]["ours"]["groups"]
    assert last > 100 * max(groups)
    assert found["map"] == heads_of(record)["local"]["map"]


def test_of_what_is_not_finite_there_is_no_picture(tmp_path) -> None:
    steps = wrong_v04(tmp_path, "logf(-1.0f);"), find_step("b02")
    inputs = pictures.made_up()["local"]
    with pytest.raises(UsageError, match=r"v04 gives .* not finite on the head 'local'"):
        pictures.measure_head(CpuBackend(), steps, "local", inputs, causal=False)


def test_a_step_can_be_chosen() -> None:
    backend = CpuBackend()
    assert [s.name for s in pictures.chosen_steps(backend, ["b06"])] == [HEADS_STEP.name, "b06"]
    assert [s.name for s in pictures.chosen_steps(backend, ["9", "b05"])] == ["v09", "b05"]
    with pytest.raises(UsageError, match=r"N='9 10' has two steps of one ladder"):
        pictures.chosen_steps(backend, ["9", "10"])


def test_table_and_plot(tmp_path) -> None:
    folder = tmp_path / "profiles" / "h200"
    write_record(folder / "pictures.json", fake_pictures(V_STEP, B_STEP))
    record_set = load_record_set(folder, tmp_path)
    text = tables.pictures(record_set)
    assert "| layer 0 | causal | 2.00e-03 / 4.00e-03 |" in text
    assert f"{V_STEP.name} and {B_STEP.name}" in text
    drawn = render_plots(record_set)
    assert {"pictures.svg", "pictures_dark.svg"} == set(drawn)
    assert drawn["pictures.svg"].count("<rect") > 5
    stale = fake_pictures(V_STEP, B_STEP)
    stale["sources"]["v12"] = {"code_sha256": "0"}
    write_record(folder / "pictures.json", stale)
    record_set = load_record_set(folder, tmp_path)
    assert "v12 (stale)" in tables.pictures(record_set)
    assert "v12 (stale)" in draw_pictures(record_set.pictures).svg(0)


def test_pictures_of_other_code_are_stale(tmp_path) -> None:
    path = tmp_path / "pictures.json"
    write_record(path, fake_pictures(V_STEP, B_STEP))
    assert not load_record_set(tmp_path, tmp_path).pictures.stale
    write_record(path, fake_pictures(V_STEP, B_STEP) | {"made_by": {"bench/pictures.py": "0"}})
    assert load_record_set(tmp_path, tmp_path).pictures.stale


def test_without_a_record(tmp_path) -> None:
    assert tables.pictures(load_record_set(tmp_path, tmp_path)) == "not measured"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda r: r.update(sources={"v12": {"code_sha256": "0"}}), "sources cannot be"),
        (lambda r: r.update(heads=[]), r"heads cannot be \[\]"),
        (lambda r: r.update(trained=3), "trained cannot be 3"),
        (lambda r: r.update(made_by=["0"]), "made_by is"),
        (lambda r: r.update(cells=None), "cells cannot be None"),
        (lambda r: r.update(cells=4), "heads cannot be"),  # of maps of 2
        (lambda r: r["heads"][1].update(seq=255), "heads cannot be"),
        (lambda r: r["heads"][1]["map"].pop(), "heads cannot be"),
        (lambda r: r["heads"][1]["map"][0].pop(), "heads cannot be"),
        (lambda r: r["heads"][1]["map"].__setitem__(0, [-1, 10_001]), "heads cannot be"),
        (lambda r: error_of(r).update(groups=[1e-3]), "heads cannot be"),
        (lambda r: error_of(r).update(groups=[1e-3, float("inf")]), "heads cannot be"),
        (lambda r: error_of(r).update(nrmse=float("nan")), "heads cannot be"),
        (lambda r: error_of(r).pop("median"), "heads cannot be"),
    ],
)
def test_a_malformed_record_is_named(tmp_path, change: Callable[[dict], object], told: str) -> None:
    malformed = deepcopy(fake_pictures(V_STEP, B_STEP))
    change(malformed)
    write_record(tmp_path / "pictures.json", malformed)
    with pytest.raises(UsageError, match=f"pictures.json: the record: {told}"):
        load_record_set(tmp_path, tmp_path)


def error_of(record: dict) -> dict:
    return record["heads"][1]["errors"]["dk"]["ours"]


@pytest.fixture
def folders(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """Those of records and of what is built."""
    profiles, build = tmp_path / "profiles", tmp_path / "build"
    monkeypatch.setattr(pictures, "PROFILES_DIR", profiles)
    monkeypatch.setattr(commands, "BUILD_DIR", build)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    return profiles, build


def drawn_by_the_command(names: list[str], build: Path, device: str, monkeypatch, capsys) -> str:
    """What the command says that records nothing; measuring is left out."""
    without_device = fake_pictures(V_STEP, B_STEP)
    del without_device["device"]
    monkeypatch.setattr(pictures, "measure_pictures", lambda *_: without_device)
    monkeypatch.setattr(commands, "_report_regenerated", lambda: pytest.fail("regenerated"))
    assert commands.pictures(names) == 0
    written = {path.name for path in build.glob("pictures/*")}
    assert written == {"pictures.json", "pictures.svg", "pictures_dark.svg"}
    assert device in (build / "pictures/pictures.svg").read_text()
    said = capsys.readouterr().out
    assert "| layer 0 | causal | 2.00e-03 / 4.00e-03 |" in said
    return said


def test_without_a_gpu_nothing_is_recorded(folders, monkeypatch, capsys) -> None:
    profiles, build = folders
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = drawn_by_the_command([], build, "SIMT runtime", monkeypatch, capsys)
    assert said.endswith("Nothing is recorded in profiles/, as there is no CUDA device.\n")
    assert not profiles.exists()


def test_other_steps_do_not_replace_the_record(folders, monkeypatch, capsys) -> None:
    profiles, build = folders
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(commands, "GpuBackend", CpuBackend)
    said = drawn_by_the_command(["v10"], build, "NVIDIA H200", monkeypatch, capsys)
    assert "as attention() takes other steps here" in said
    assert not profiles.exists()


def test_the_steps_that_attention_takes_are_recorded(folders, monkeypatch, capsys) -> None:
    """Also where they are named."""
    profiles, build = folders
    recorded = []

    def record_fake(_, steps):
        path = profiles / "h200/pictures.json"
        write_record(path, fake_pictures(*steps))
        recorded.append(steps)
        return path

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(commands, "GpuBackend", CpuBackend)
    monkeypatch.setattr(pictures, "record_pictures", record_fake)
    monkeypatch.setattr(commands, "_report_regenerated", lambda: None)
    for names in ([], [HEADS_STEP.name, B_STEP.name]):
        assert commands.pictures(names) == 0
    assert recorded == [(HEADS_STEP, B_STEP)] * 2
    assert not build.exists()
    assert f"{HEADS_STEP.name} and {B_STEP.name}" in capsys.readouterr().out


def test_an_interrupted_run_keeps_the_old_record(folders, record, monkeypatch) -> None:
    made_up = record["heads"][: len(pictures.made_up())]
    heads = iter(made_up)
    monkeypatch.setattr(pictures, "measure_head", lambda *_, **__: next(heads))
    monkeypatch.setattr(pictures, "versions", lambda: {"device": "NVIDIA H200"})
    path = pictures.record_pictures(CpuBackend(), (V_STEP, B_STEP))
    assert path == folders[0] / "h200/pictures.json"
    assert load_record_set(path.parent, folders[0]).pictures.record["heads"] == made_up
    old = path.read_bytes()
    measured = iter(made_up[:-1])

    def interrupted(*_, **__):
        try:
            return next(measured)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(pictures, "measure_head", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pictures.record_pictures(CpuBackend(), (V_STEP, B_STEP))
    assert path.read_bytes() == old
    assert list(path.parent.iterdir()) == [path]


def test_a_map_is_drawn_to_its_last_cell() -> None:
    drawing = draw_pictures(Whole(fake_pictures(V_STEP, B_STEP)))
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
