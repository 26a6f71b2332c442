"""How attention over several GPUs is measured: make bench GPUS=2."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from common import commands
from common.__main__ import main
from common.bench import kernel_trace, sharded
from common.bench.cells import read_unfinished
from common.bench.kernel_trace import EXCHANGE, Interval, hidden_share
from common.bench.sharded import (
    ONE_GPU,
    Attention,
    _load_kernels,
    _outcome,
    _seconds,
    _timeline,
)
from common.operation import BACKWARD, FORWARD
from common.paths import ROOT
from common.problem import SHARDED
from common.record_schema import RING, SHARDED_RECORD, find_error
from common.records import gpus_folder, read_record, write_record
from common.report.derived import ULYSSES


def interval(what: str, start_ms: float, end_ms: float) -> Interval:
    return Interval(what, int(start_ms * 1e6), int(end_ms * 1e6))


@pytest.mark.parametrize(
    ("others", "hidden"),
    [
        ([], 0.0),
        ([("attention", 0, 10)], 1.0),
        ([("attention", 3, 10)], 0.5),
        ([("attention", 0, 2), ("merge", 1, 3)], 0.5),  # at the same time: counted once
        ([("attention", 0, 2), ("sum", 4, 9)], 0.5),
        ([("attention", 6, 9)], 0.0),
    ],
)
def test_an_exchange_is_hidden_while_something_is_computed(others, hidden):
    kernels = [interval(EXCHANGE, 1, 5), *(interval(*other) for other in others)]
    assert hidden_share(kernels) == (4.0, pytest.approx(hidden))


def test_exchanges_that_overlap_are_one():
    kernels = [interval(EXCHANGE, 0, 4), interval(EXCHANGE, 2, 6), interval("attention", 0, 3)]
    assert hidden_share(kernels) == (6.0, pytest.approx(0.5))


class Event:
    """Of the profiler."""

    def __init__(self, name: str, device: str = "CUDA") -> None:
        self._name, self._device = name, device

    def name(self) -> str:
        return self._name

    def device_type(self):
        return getattr(torch.profiler.DeviceType, self._device)

    def start_ns(self) -> int:
        return 100 * len(self._name)

    def duration_ns(self) -> int:
        return 7


def test_kernels_are_told_from_what_the_profiler_notes_beside_them(monkeypatch):
    names = {
        "ncclDevKernel_SendRecv(x)": EXCHANGE,
        "ncclDevKernel_AllReduce_Sum(x)": None,
        "nccl:coalesced": None,
        "attention_forward": "attention",
        "merge_kernel": "merge",
        "at::native::elementwise_kernel<8>": "sum",
        "Memset (Device)": None,
        "at::cuda::spin_kernel(long)": None,
    }
    events = [Event(name) for name in names] + [Event("cuLaunchKernelEx", "CPU")]

    class Profile:
        def __init__(self, activities) -> None:
            self.profiler = self.kineto_results = self

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def events(self):
            return events

    monkeypatch.setattr(kernel_trace, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kernels = kernel_trace.trace_kernels(lambda: None)
    found = sorted((len(name) * 100, what) for name, what in names.items() if what)
    assert [(kernel.start, kernel.what) for kernel in kernels] == found
    assert {kernel.end - kernel.start for kernel in kernels} == {7}


def test_a_timeline_begins_with_the_first_kernel_of_any_rank():
    ranks = [[interval("attention", 2, 3)], [interval("attention", 1, 4)]]
    first, second = _timeline(ranks)
    assert first == [{"what": "attention", "start_us": 1000.0, "end_us": 2000.0}]
    assert second == [{"what": "attention", "start_us": 0.0, "end_us": 3000.0}]


def test_a_single_sample_is_its_own_median():
    outcome = _outcome([4.0], flops=8e9)
    assert outcome["time_ms"] == outcome["time_p25_ms"] == outcome["time_p75_ms"] == 4.0
    assert outcome["tflops"] == pytest.approx(2.0)
    assert outcome["samples_ms"] == [4.0]


def test_the_longest_calls_are_known_beforehand():
    problem = SHARDED["h16_causal_1048576"]
    assert 8 < _seconds(FORWARD, problem, 1) < 10
    assert _seconds(BACKWARD, problem, 2) == pytest.approx(1.25 * _seconds(FORWARD, problem, 1))


def test_an_interrupted_run_goes_on_where_it_began_alike(tmp_path):
    path, begun = tmp_path / "sharded.json", {"device": "NVIDIA H200", "sharded": {"a": "1"}}
    assert read_unfinished(path, begun) is None
    record = {**begun, "cells": [{"name": "h16_32768"}], "timelines": {}}
    write_record(path, record)
    assert read_unfinished(path, begun) == record
    assert read_unfinished(path, {**begun, "sharded": {"a": "2"}}) is None
    path.write_text('{"device": ')
    assert read_unfinished(path, begun) is None


@pytest.mark.parametrize("gpus", ["1", "3", "-2"])
def test_there_must_be_as_many_gpus(monkeypatch, capsys, gpus):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["bench", "--gpus", gpus]) == 2
    assert f"GPUS={gpus}: give a number of GPUs from 2 to 2" in capsys.readouterr().err


def test_a_run_that_fails_is_a_failure(monkeypatch):
    commands_run, settings = [], []

    def run(command, env):
        commands_run.append(command)
        settings.append(env["PYTORCH_CUDA_ALLOC_CONF"])
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(commands.subprocess, "run", run)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert main(["bench", "--gpus", "2"]) == 1
    assert " ".join(commands_run[0][1:]) == (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m common.bench.sharded"
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "one's own")
    assert main(["bench", "--gpus", "2"]) == 1
    assert settings == ["expandable_segments:True", "one's own"]


@pytest.mark.parametrize(
    ("name", "seq"), [("h64_131072", None), ("h16_1048576", 262144), ("h64_1048576", 131072)]
)
def test_kernels_of_long_calls_are_loaded_by_shorter_ones(monkeypatch, name, seq):
    loaded, calls = [], []

    def call(each, operation):
        calls.append((each.route, operation))
        if each.route == ULYSSES:
            raise RuntimeError("out of memory")

    def load(problem, route, stack):
        loaded.append(problem)
        found = {name: Attention(lambda: None, (), None, name, 2) for name in (RING, ULYSSES)}
        return found | {ONE_GPU: "takes too long"}

    monkeypatch.setattr(sharded.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(sharded, "_load", load)
    monkeypatch.setattr(Attention, "call", call)
    _load_kernels(SHARDED[name], "v12 and b10")
    assert [(problem.shape.seq_q, problem.shape.seq_k) for problem in loaded] == (
        [(seq, seq)] if seq else []
    )
    assert {problem.shape.heads for problem in loaded} <= {SHARDED[name].shape.heads}
    expected = [(each, operation) for operation in (FORWARD, BACKWARD) for each in (RING, ULYSSES)]
    assert calls == (expected if seq else [])


def test_the_folder_says_how_many_gpus():
    assert gpus_folder("NVIDIA H200", 2) == "h200x2"
    assert gpus_folder("NVIDIA H100 80GB HBM3", 8) == "h100x8"


SMALL = """
import sys
from pathlib import Path
from common.bench import sharded
from common.problem import Problem, Shape
sharded.PROFILES_DIR = sharded.BUILD_DIR = Path(sys.argv[1])
sharded.TIMELINE = "small_causal"
sharded.LOADING_S = 5e-6  # which the second one takes longer than
sharded.SHARDED = {
    "small_causal": Problem(Shape(1, 4, 2, 1030, 1030, 128), "bf16", True),
    "small": Problem(Shape(1, 2, 2, 2048, 2048, 128), "bf16"),
}
sharded.main()
"""


@pytest.mark.gpu
def test_two_gpus_are_measured(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("there are no 2 GPUs")
    script = tmp_path / "small.py"
    script.write_text(SMALL)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, script, tmp_path]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    (path,) = tmp_path.glob("*x2/sharded.json")
    record = read_record(path, SHARDED_RECORD)
    assert find_error(record, SHARDED_RECORD) is None
    assert [cell["name"] for cell in record["cells"]] == ["small_causal", "small"]
    for cell in record["cells"]:
        for operation in (FORWARD, BACKWARD):
            attentions = cell[operation.name]["attentions"]
            assert not [name for name, each in attentions.items() if "missing" in each]
            one_gpu = attentions["one_gpu"]
            assert one_gpu["slowest_gpu_ms"] > 0.9 * one_gpu["time_ms"]
            assert attentions["ring"]["differences"].keys() == (
                {"o"} if operation == FORWARD else {"dq", "dk", "dv"}
            )
    assert all(len(ranks) == 2 for ranks in record["timelines"].values())
