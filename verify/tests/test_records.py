"""Records: written whole or not at all, read with care, and tied to the source they measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.bench.timing import summarize
from common.catalog import all_steps
from common.record_schema import STATIC_RECORD
from common.records import (
    SCHEMA,
    gpu_folder,
    is_stale,
    read_grid,
    read_records,
    write_atomically,
    write_record,
)
from common.step import read_step
from verify.tests.fake_records import fake_grid, fake_record, fake_static_record

STEP = all_steps()[0]


@pytest.mark.parametrize(
    ("device", "folder"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "geforce_rtx_4090"),
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
    assert read_records(tmp_path / "h200") == {"v01": record}


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"schema": 1',
        "[]",
        json.dumps({"schema": SCHEMA + 1}),
        json.dumps({"schema": SCHEMA, "step": "v02"}),
    ],
)
def test_unreadable_record_is_named_and_skipped(tmp_path, capsys, content):
    write_record(tmp_path / "v01.json", fake_record(STEP))
    (tmp_path / "v02.json").write_text(content)
    assert list(read_records(tmp_path)) == ["v01"]
    assert "v02.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("time_ms", "abc", "time_ms cannot be 'abc'"),
        ("time_ms", 0, "time_ms cannot be 0"),
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
def test_malformed_record_is_named_with_what_is_wrong(tmp_path, capsys, path, value, told):
    record = fake_record(STEP)
    *parents, last = path.split(".")
    node = record
    for key in parents:
        node = node[key]
    node[last] = value
    write_record(tmp_path / "v01.json", record)
    assert read_records(tmp_path) == {}
    message = capsys.readouterr().err
    assert "v01.json" in message
    assert told in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"banks": None}, "banks cannot be None"),
        ({"banks": [{"operation": "ldmatrix_x4"}]}, "banks cannot be"),
        ({"compiled": {"toolkit": "1.0"}}, "compiled cannot be"),
        ({"shape": {}}, "shape has no"),
    ],
)
def test_malformed_static_record_is_named_with_what_is_wrong(tmp_path, capsys, change, told):
    record = fake_static_record(STEP)
    write_record(tmp_path / "v01.json", record)
    assert read_records(tmp_path, STATIC_RECORD) == {"v01": record}
    write_record(tmp_path / "v01.json", record | change)
    assert read_records(tmp_path, STATIC_RECORD) == {}
    assert told in capsys.readouterr().err


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
def test_malformed_grid_is_named_with_what_is_wrong(tmp_path, capsys, change, told):
    record = fake_grid(STEP)
    write_record(tmp_path / "grid.json", record)
    assert read_grid(tmp_path) == record
    assert read_records(tmp_path) == {}  # it is no step's
    assert not capsys.readouterr().err
    node = record if change.keys() <= record.keys() else record["cells"][0]
    node |= change
    write_record(tmp_path / "grid.json", record)
    assert read_grid(tmp_path) is None
    message = capsys.readouterr().err
    assert "grid.json" in message
    assert told in message
    assert len(message.splitlines()) == 1


def test_record_of_other_code_is_stale(tmp_path):
    record = fake_record(STEP)
    path = tmp_path / STEP.path.name
    path.write_text(STEP.path.read_text() + "// one more comment\n")
    assert not is_stale(record, read_step(path))
    path.write_text(STEP.path.read_text() + "constexpr int ONE_MORE = 1;\n")
    assert is_stale(record, read_step(path))
