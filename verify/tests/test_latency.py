"""What small calls cost: how it is measured, its record and its table."""

from __future__ import annotations

import re
from functools import partial
from itertools import groupby, islice, repeat
from time import perf_counter

import pytest
import torch

from common import UsageError
from common.bench import latency, trial
from common.bench.peers import Peer
from common.catalog import all_steps
from common.operation import FORWARD
from common.operator import highest_step
from common.record_schema import LATENCY_RECORD, find_error
from common.records import read_record, write_record
from common.report import tables
from common.report.record_set import RecordSet, load_record_set
from common.runtime.cpu import CpuBackend
from common.runtime.gpu import GpuBackend
from verify.cases import BF16, Case, Shape
from verify.reference import attention_reference
from verify.tests.fake_records import fake_latency

NEWEST = [step for step in all_steps() if step.operation == FORWARD][-1]
TINY = Case("tiny", Shape(1, 2, 2, 33, 33, 64), BF16, causal=True)
SHORT = Case("short", Shape(1, 2, 2, 1, 7, 64), BF16)


@pytest.fixture
def record_set(tmp_path):
    """Loads the record set of a project with a record of small calls, changed as given."""

    def load(**changes) -> RecordSet:
        folder = tmp_path / "profiles" / "h200"
        write_record(folder / "latency.json", fake_latency(NEWEST) | changes)
        return load_record_set(folder, tmp_path)

    return load


@pytest.fixture
def without_a_gpu(monkeypatch):
    """One of two peers is there, with a given error; calls are made but not timed."""

    def load(error, operation, inputs, *, causal, without):
        assert (operation, without) == (FORWARD, ("sdpa_math",))
        o, _ = attention_reference(*inputs, causal=causal, softmax_scale=TINY.scale)
        peer = Peer(lambda: o + error, "torch")
        return {"sdpa_flash": peer, "flash_attention_3": "not installed"}

    def time_interleaved(calls, *, rounds, sleep_cycles):
        return {name: [call() is None or 0.002] * rounds for name, call in calls.items()}

    monkeypatch.setattr(trial, "peak_memory", lambda call: (call(), 0))
    monkeypatch.setattr(latency, "device_state", lambda: "not collected")
    monkeypatch.setattr(latency, "time_interleaved", time_interleaved)
    monkeypatch.setattr(latency, "BURSTS", 1)
    monkeypatch.setattr(latency, "CALLS", 2)
    monkeypatch.setattr(latency, "PAUSE_S", 0.001)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return lambda error: monkeypatch.setattr(latency, "load", partial(load, error))


def test_measured_cell(without_a_gpu):
    without_a_gpu(error=0.0)
    cell = latency.measure_cell(CpuBackend(), NEWEST, TINY)
    record = fake_latency(NEWEST) | {"cells": [cell]}
    assert find_error(record, LATENCY_RECORD) is None
    assert cell["device_us"] == {name: [2.0] * 100 for name in (NEWEST.name, "sdpa_flash")}
    assert cell["host_us"].keys() == {NEWEST.name, "sdpa_flash"}
    assert all([len(b) for b in bursts] == [2] for bursts in cell["host_us"].values())
    assert cell["missing"] == {"flash_attention_3": "not installed"}


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_a_wrong_call_is_not_timed(without_a_gpu, error):
    without_a_gpu(error)
    with pytest.raises(UsageError, match=r"sdpa_flash is wrong on tiny: an error of .* in o"):
        latency.measure_cell(CpuBackend(), NEWEST, TINY)


def test_the_warm_up_does_not_count(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(latency, "PAUSE_S", 0.001)
    calls = []
    names = ("first", "second")
    start = perf_counter()
    times = latency.time_host({name: (calls.append, repeat((name,))) for name in names})
    assert perf_counter() - start > (1 + latency.BURSTS) * latency.PAUSE_S
    for name in names:
        assert [len(burst) for burst in times[name]] == [latency.CALLS] * latency.BURSTS
        assert calls.count(name) == (1 + latency.BURSTS) * latency.CALLS
        assert min(map(min, times[name])) > 0
    bursts = [name for name, _ in groupby(calls)]
    assert bursts == list(names) * (1 + latency.BURSTS), "they take turns"


def test_what_decodes_gets_a_key_more_at_each_call(monkeypatch):
    asked = {}

    def time_host(calls):
        for call, arguments in calls.values():
            asked.setdefault(call, []).append(list(islice(arguments, 4)))
        return {name: [[1.0]] for name in calls}

    monkeypatch.setattr(latency, "time_host", time_host)
    monkeypatch.setattr(latency, "FIRST_KEYS", 3)
    monkeypatch.setattr(latency, "LAYERS", 2)
    monkeypatch.setattr(latency, "DECODED", SHORT)
    monkeypatch.setattr(latency, "BURSTS", 1)
    monkeypatch.setattr(latency, "CALLS", 2)
    monkeypatch.setattr(trial, "peak_memory", lambda call: (call(), 0))
    decoding = latency.measure_decoding(NEWEST, *SHORT.make("cpu"))
    record = fake_latency(NEWEST) | {"decoding": decoding}
    assert find_error(record, LATENCY_RECORD) is None
    assert decoding["keys"] == [3, 6]
    ours, sdpa = asked.values()
    for sliced, concatenated, layered, fixed in (ours, sdpa):
        assert [k.shape[2] for _, k, _ in sliced] == [3, 4, 5, 6]
        assert len({k.data_ptr() for _, k, _ in sliced}) == 1
        assert len({k.data_ptr() for _, k, _ in concatenated}) == 4
        assert all(map(torch.equal, (k for _, k, _ in sliced), (k for _, k, _ in concatenated)))
        assert [k.shape[2] for _, k, _ in layered] == [3, 3, 4, 4]
        assert len({k.data_ptr() for _, k, _ in layered}) == 2
        assert [k.shape[2] for _, k, _ in fixed] == [3] * 4


def test_a_wrong_decoding_is_not_timed(monkeypatch):
    monkeypatch.setattr(latency, "DECODED", SHORT)
    monkeypatch.setattr(trial, "peak_memory", lambda call: (call(), 0))
    monkeypatch.setattr(latency, "attention", lambda q, k, v: q + 1)
    with pytest.raises(UsageError, match=rf"{NEWEST.name} is wrong on short"):
        latency.measure_decoding(NEWEST, *SHORT.make("cpu"))


def test_table_of_decoding(record_set):
    text = tables.decoding(record_set())
    assert text.splitlines()[:3] == [
        f"| Each call has | attention(), {NEWEST.name} | sdpa |",
        "| --- | ---: | ---: |",
        "| a key more, of a buffer for all | 32.0 (30.0) | 40.0 (40.0) |",
    ]
    assert "median of 4 calls (in brackets: of the fastest of 2 bursts" in text
    assert "on 512 to 731 keys" in text


def test_table(record_set):
    text = tables.latency(record_set())
    assert text.splitlines()[:4] == [
        f"| N | Mask | {NEWEST.name} | sdpa_flash | flash_attention_3 |",
        "| ---: | --- | ---: | ---: | ---: |",
        "| 128 | none | 5.0 / 20.5 (19.5) | 50.0 / 200.5 (200.0) | missing |",
        "| 128 | causal | 5.0 / 20.5 (19.5) | 50.0 / 200.5 (200.0) | missing |",
    ]
    caption = text.splitlines()[-1]
    assert "Microseconds on the NVIDIA H200: of the device / of the host." in caption
    assert "median of 3 interleaved rounds" in caption
    assert "median of 4 calls (in brackets: of the fastest of 2 bursts" in caption
    assert "throttle reasons after: none" in caption


@pytest.mark.parametrize(
    "changes",
    [
        {"host": {"common/operator.py": "0"}},
        {"sources": {NEWEST.name: {"code_sha256": "0"}}},
    ],
)
def test_what_has_changed_since_is_not_shown(record_set, changes):
    changed = record_set(**changes)
    assert tables.latency(changed) == tables.decoding(changed) == "stale"


def test_without_a_record(tmp_path):
    nothing = load_record_set(tmp_path, tmp_path)
    assert tables.latency(nothing) == tables.decoding(nothing) == "not measured"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sources": {}}, "sources cannot be {}"),
        ({"sources": {name: {"code_sha256": "0"} for name in "ab"}}, "sources cannot be {'a': "),
        ({"host_us": {}}, "cells cannot be"),
        ({"host_us": {NEWEST.name: [[1.0]]}}, "cells cannot be"),  # the peer's are gone
        ({"device_us": {NEWEST.name: [], "sdpa_flash": [1.0]}}, "cells cannot be"),
    ],
)
def test_malformed_record_is_named_with_what_is_wrong(record_set, change, told):
    if not change.keys() & {"sources"}:
        change = {"cells": [fake_latency(NEWEST)["cells"][0] | change]}
    with pytest.raises(UsageError, match=re.escape(f"latency.json: the record: {told}")):
        record_set(**change)


def test_record(monkeypatch, tmp_path):
    fake = fake_latency(NEWEST)
    monkeypatch.setattr(latency, "GpuBackend", CpuBackend)
    monkeypatch.setattr(latency, "versions", lambda: {"device": "NVIDIA H200"})
    monkeypatch.setattr(latency, "highest_step", lambda *_: NEWEST)
    monkeypatch.setattr(latency, "measure_cell", lambda *_: fake["cells"][0])
    monkeypatch.setattr(latency, "measure_decoding", lambda *_: fake["decoding"])
    monkeypatch.setattr(latency, "PROFILES_DIR", tmp_path)
    path = latency.measure_latency()
    assert path == tmp_path / "h200" / "latency.json"
    record = read_record(path, LATENCY_RECORD)
    assert record["sources"] == fake["sources"]
    assert len(record["cells"]) == len(latency.CELLS)


@pytest.mark.gpu
def test_tiny_cell_on_a_gpu():
    backend = GpuBackend()
    step = highest_step(backend, FORWARD, TINY.make(backend.device), TINY.causal)
    cell = latency.measure_cell(backend, step, TINY)
    assert find_error(fake_latency(step) | {"cells": [cell]}, LATENCY_RECORD) is None
    assert step.name in cell["device_us"]
    assert "sdpa_flash" in cell["host_us"]
