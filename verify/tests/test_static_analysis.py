"""What is known of a step without a GPU, and where a tool is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common import commands
from common.bench import static_analysis as static
from common.bench.static_analysis import static_path, static_record
from common.catalog import find_step
from common.errors import UsageError
from common.record_schema import RECORD, STATIC_RECORD, find_error
from common.records import read_record, read_records, write_record
from common.runtime.build import Build
from common.runtime.cpu import SimtError
from verify.tests.fake_records import fake_record, fake_static_record

V04 = find_step("v04")
LOG = """ptxas info    : Compiling entry function 'attention_forward' for 'sm_90'
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 99 registers, used 1 barriers
"""


@pytest.fixture
def without_nvcc(monkeypatch, tmp_path):
    """No nvcc, no GPU, and records in a folder of the test."""

    def missing():
        raise UsageError("no nvcc")

    monkeypatch.setattr(static, "nvcc", missing)
    monkeypatch.setattr(static, "PROFILES_DIR", tmp_path)
    monkeypatch.setattr(commands, "PROFILES_DIR", tmp_path)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    monkeypatch.setattr(commands, "regenerate", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_nvcc")
def test_without_nvcc_bank_conflicts_are_left(capsys):
    record = static_record(V04)
    assert record["compiled"] == "not collected"
    assert {place["operation"] for place in record["banks"]} == {"load_float4", "store_float4"}
    assert all(place["wavefronts"] >= place["ideal"] > 0 for place in record["banks"])
    assert capsys.readouterr().err == (
        "warning: registers and instructions were not collected: no nvcc\n"
    )
    write_record(static_path(V04), record)
    assert read_records(static_path(V04).parent, STATIC_RECORD) == {"v04": record}


@pytest.mark.usefixtures("without_nvcc")
def test_step_of_the_backward_ladder():
    """It is executed with the inputs of its operation."""
    b02 = find_step("b02")
    record = static_record(b02)
    assert find_error(record, STATIC_RECORD) is None
    assert {place["operation"] for place in record["banks"]} >= {"load_float4"}


@pytest.mark.usefixtures("without_nvcc")
def test_without_nvcc_what_it_said_of_this_source_is_kept():
    before = fake_static_record(V04)
    write_record(static_path(V04), before)
    assert static_record(V04)["compiled"] == before["compiled"]
    write_record(static_path(V04), before | {"code_sha256": "0" * 64})
    assert static_record(V04)["compiled"] == "not collected"


@pytest.mark.usefixtures("without_nvcc")
def test_malformed_record_is_replaced(capsys):
    path = static_path(V04)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert commands.profile(["v04"]) == 0
    assert f"warning: malformed record {path}" in capsys.readouterr().err
    assert read_record(path, STATIC_RECORD)["compiled"] == "not collected"


@pytest.mark.usefixtures("without_nvcc")
def test_without_nvdisasm_resources_are_left(monkeypatch, capsys):
    def missing(cubin):
        raise UsageError("no nvdisasm")

    monkeypatch.setattr(static, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(static, "toolkit_version", lambda: "1.0")
    monkeypatch.setattr(static, "build_cubin", lambda *_: Build(Path("v04.cubin"), LOG))
    monkeypatch.setattr(static, "count_instructions", missing)
    compiled = static_record(V04)["compiled"]
    assert compiled["sass"] == "not collected"
    assert compiled["resources"]["attention_forward"]["registers"] == 99
    assert compiled["resources"]["attention_forward"]["dynamic_smem"] > 0
    assert "instructions were not collected: no nvdisasm" in capsys.readouterr().err


def test_a_kernel_that_does_not_run_is_one_clear_line(monkeypatch):
    def fails(*_, **__):
        raise SimtError("v04: deadlock\nthread 0 waits\nthread 1 waits")

    monkeypatch.setattr(static.CpuBackend, "count_shared_accesses", fails)
    with pytest.raises(UsageError, match=r"^v04: deadlock$"):
        static.count_bank_conflicts(V04)


def test_only_steps_and_experiments_have_records():
    with pytest.raises(UsageError, match=r"v01_scale_twice is neither in steps/ nor in exper"):
        static_record(find_step("verify/mutants/v01_scale_twice.patch"))


@pytest.mark.usefixtures("without_nvcc")
def test_profile_of_an_experiment_has_a_record_of_its_own(tmp_path, capsys):
    assert commands.profile(["experiments/v04_no_padding.patch"]) == 0
    (path,) = tmp_path.rglob("*.json")
    record = read_records(path.parent, STATIC_RECORD)["v04_no_padding"]
    assert record["source"] == "experiments/v04_no_padding.patch"
    told = capsys.readouterr().out
    assert "recorded static/v04_no_padding.json" in told
    assert "| load_float4 |" in told
    assert "no CUDA device" in told


@pytest.fixture
def on_a_gpu(without_nvcc, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


@pytest.mark.usefixtures("on_a_gpu")
def test_counters_need_a_measurement():
    with pytest.raises(
        UsageError, match="v04 has no record of its present source: make step N=v04"
    ):
        commands.profile(["v04"])
    with pytest.raises(UsageError, match=r"v04_no_padding has no .*: make bench EXPERIMENTS=1"):
        commands.profile(["experiments/v04_no_padding.patch"])


@pytest.mark.usefixtures("on_a_gpu")
def test_counters_that_are_not_permitted_replace_none(monkeypatch, tmp_path, capsys):
    def counters_after(collected):
        monkeypatch.setattr(commands, "collect", lambda step: collected)
        assert commands.profile(["v04"]) == 0
        return read_record(tmp_path / "h200/v04.json", RECORD)["counters"]

    write_record(tmp_path / "h200/v04.json", fake_record(V04))
    assert counters_after("not collected: not permitted") == "not collected: not permitted"
    assert "counters are not collected: not permitted" in capsys.readouterr().err
    counted = {"attention_forward": {"cycles": 1.0}}
    assert counters_after(counted) == counted
    assert counters_after("not collected: not permitted") == counted
