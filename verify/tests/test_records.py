"""Records: written whole or not at all, read with care, and tied to the source they measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from common.bench.timing import summarize
from common.catalog import all_steps, find_step
from common.errors import UsageError
from common.paths import ROOT
from common.record_schema import EXPERIMENT_RECORD, GRID_RECORD, RECORD, STATIC_RECORD
from common.records import (
    SCHEMA,
    gpu_folder,
    is_stale,
    read_record,
    read_records,
    read_replaced,
    write_atomically,
    write_record,
)
from common.step import read_step
from verify.tests.fake_records import fake_grid, fake_record, fake_static_record

STEP = all_steps()[0]
BACKWARD_STEP = find_step("b01")


@pytest.mark.parametrize(
    ("device", "folder"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "geforce_rtx_4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm4_80gb"),
        ("Tesla T4", "tesla_t4"),
    ],
)
def test_gpu_folder(device, folder):
    assert gpu_folder(device) == folder


def test_summary_of_samples():
    assert summarize([4.0, 1.0, 3.0, 2.0, 5.0]) == {
        "time_ms": 3.0,
        "time_p25_ms": 2.0,
        "time_p75_ms": 4.0,
    }
    assert summarize([1.0, 2.0])["time_ms"] == 1.5


def test_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "v01.json"
    write_atomically(path, "old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_record_survives_writing(tmp_path):
    record = fake_record(STEP)
    write_record(tmp_path / "h200" / "v01.json", record)
    assert read_records(tmp_path / "h200", RECORD) == {"v01": record}
    assert read_record(tmp_path / "h200/v01.json", RECORD) == record
    assert read_record(tmp_path / "h200/v02.json", RECORD) is None


def test_records_of_any_ladder_and_its_variants_are_found_by_their_names(tmp_path):
    steps = {"b01": BACKWARD_STEP, "v01": STEP, "v01_variant": STEP}
    for name, step in steps.items():
        write_record(tmp_path / f"{name}.json", fake_record(step) | {"step": name})
    for name in ("grid", "grid_backward", "latency", "V01", "v1", "1v01"):
        write_record(tmp_path / f"{name}.json", {})
    assert list(read_records(tmp_path, RECORD)) == list(steps)


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"schema": 1',
        "[]",
        json.dumps({"schema": SCHEMA + 1}),
        json.dumps({"schema": SCHEMA, "step": "v02"}),
        "[" * 100000,
    ],
)
def test_unreadable_record_is_named(tmp_path, capsys, content):
    write_record(tmp_path / "v01.json", fake_record(STEP))
    path = tmp_path / "v02.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"v02\.json"):
        read_records(tmp_path, RECORD)
    with pytest.raises(UsageError, match=r"v02\.json"):
        read_record(path, RECORD)
    assert read_replaced(path, RECORD) is None  # measuring again overwrites it
    assert "v02.json" in capsys.readouterr().err


def test_folder_in_place_of_a_record_is_named(tmp_path):
    (tmp_path / "v01.json").mkdir()
    with pytest.raises(UsageError, match=r"v01\.json: Is a directory"):
        read_records(tmp_path, RECORD)


def test_error_names_the_path_in_the_project():
    with pytest.raises(UsageError, match=r"malformed record profiles/h200/grid\.json: the record"):
        read_record(ROOT / "profiles/h200/grid.json", RECORD)


def assert_malformed(path: Path, form: dict, told: str) -> None:
    with pytest.raises(UsageError) as error:
        read_record(path, form)
    message = str(error.value)
    assert message.startswith(f"malformed record {path}: ")
    assert told in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("time_ms", "abc", "time_ms cannot be 'abc'"),
        ("time_ms", 0, "time_ms cannot be 0"),
        ("time_ms", True, "time_ms cannot be True"),
        ("shape.seq_q", 4096.5, "seq_q cannot be 4096.5"),
        ("time_ms", math.inf, "time_ms cannot be inf"),
        ("time_ms", math.nan, "time_ms cannot be nan"),
        ("resources", {}, "resources cannot be {}"),
        ("peers", None, "peers is None, not an object"),
        ("peers.sdpa_flash", {"route": "torch"}, "sdpa_flash cannot be"),
        ("peers.flash_attention_3.time_ms", None, "flash_attention_3 cannot be"),
        ("environment.after", {}, "after cannot be {}"),
        ("errors.o", None, "o cannot be None"),
        ("shape", {}, "shape has no"),
        ("step", "v77", "it is a record of v77"),
    ],
)
def test_malformed_record_is_named_with_what_is_wrong(tmp_path, path, value, told):
    record = fake_record(STEP)
    *parents, last = path.split(".")
    node = record
    for key in parents:
        node = node[key]
    node[last] = value
    write_record(tmp_path / "v01.json", record)
    assert_malformed(tmp_path / "v01.json", RECORD, told)


@pytest.mark.parametrize("output", ["dq", "dk", "dv"])
def test_record_of_backward_has_the_errors_of_all_gradients(tmp_path, output):
    record = fake_record(BACKWARD_STEP)
    del record["errors"][output]
    write_record(tmp_path / "b01.json", record)
    assert_malformed(tmp_path / "b01.json", RECORD, f"errors has no {output}")


def test_grid_has_the_errors_of_its_steps_operation(tmp_path):
    record = fake_grid(BACKWARD_STEP)
    path = tmp_path / "grid_backward.json"
    write_record(path, record)
    assert read_record(path, GRID_RECORD) == record
    write_record(path, record | {"cells": fake_grid(STEP)["cells"]})
    assert_malformed(path, GRID_RECORD, "cells cannot be")


def test_experiment_has_a_baseline(tmp_path):
    record = fake_record(STEP, baseline=STEP)
    write_record(tmp_path / "v01.json", record)
    assert read_records(tmp_path, EXPERIMENT_RECORD) == {"v01": record}
    write_record(tmp_path / "v01.json", record | {"baseline": None})
    assert_malformed(tmp_path / "v01.json", EXPERIMENT_RECORD, "baseline is None, not an object")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"banks": None}, "banks cannot be None"),
        ({"banks": [{"operation": "ldmatrix_x4"}]}, "banks cannot be"),
        ({"compiled": {"toolkit": "1.0"}}, "compiled cannot be"),
        ({"compiled": fake_static_record(STEP)["compiled"] | {"sass": {}}}, "compiled cannot be"),
        ({"shape": {}}, "shape has no"),
    ],
)
def test_malformed_static_record_is_named_with_what_is_wrong(tmp_path, change, told):
    record = fake_static_record(STEP)
    write_record(tmp_path / "v01.json", record)
    assert read_records(tmp_path, STATIC_RECORD) == {"v01": record}
    write_record(tmp_path / "v01.json", record | change)
    assert_malformed(tmp_path / "v01.json", STATIC_RECORD, told)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": 0}, "not a record of schema"),
        ({"device": None}, "device cannot be None"),
        ({"sources": {"v01": {}}}, "v01 has no"),
        ({"cells": []}, "cells cannot be []"),
        ({"cells": [{"name": "d64"}]}, "cells cannot be"),
        ({"tflops": {"v01": None}}, "cells cannot be"),
        ({"samples_ms": {}}, "cells cannot be"),
        ({"environment": {"before": "not collected"}}, "cells cannot be"),
    ],
)
def test_malformed_grid_is_named_with_what_is_wrong(tmp_path, change, told):
    record = fake_grid(STEP)
    write_record(tmp_path / "grid.json", record)
    assert read_record(tmp_path / "grid.json", GRID_RECORD) == record
    assert read_records(tmp_path, RECORD) == {}  # it is no step's
    node = record if change.keys() <= record.keys() else record["cells"][0]
    node |= change
    write_record(tmp_path / "grid.json", record)
    assert_malformed(tmp_path / "grid.json", GRID_RECORD, told)


def test_record_of_other_code_is_stale(tmp_path):
    record = fake_record(STEP)
    path = tmp_path / STEP.path.name
    path.write_text(STEP.path.read_text() + "// one more comment\n")
    assert not is_stale(record, read_step(path))
    path.write_text(STEP.path.read_text() + "constexpr int ONE_MORE = 1;\n")
    assert is_stale(record, read_step(path))
