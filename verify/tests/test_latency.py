"""What small calls cost: how it is measured, its record and its table."""

from __future__ import annotations

import re
from functools import partial
from itertools import groupby, islice, repeat

import pytest
import torch

from common import UsageError
from common.bench import host, latency, trial
from common.bench.host import Host
from common.bench.peers import Peer
from common.catalog import all_steps
from common.operation import FORWARD
from common.operator import highest_step
from common.quiet import quiet_turns
from common.record_schema import CACHES, LATENCY_RECORD, SDPA, find_error
from common.records import read_record, write_record
from common.report import rows, tables
from common.report.record_set import RecordSet, load_record_set
from common.runtime.cpu import CpuBackend
from common.runtime.gpu import GpuBackend
from common.step import Step
from verify.cases import BF16, Case, Shape
from verify.reference import attention_reference
from verify.tests.fake_records import fake_latency

NEWEST = [step for step in all_steps() if step.operation == FORWARD][-1]
V01, V02, V03 = all_steps()[:3]
TINY = Case("tiny", Shape(1, 2, 2, 33, 33, 64), BF16, causal=True)
SHORT = Case("short", Shape(1, 2, 2, 1, 7, 64), BF16)
LONGER = Case("longer", Shape(1, 2, 2, 1, 9, 64), BF16)


@pytest.fixture
def record_set(tmp_path):
    """Loads the record set of a project with a record of small calls, changed as given."""

    def load(**changes) -> RecordSet:
        folder = tmp_path / "profiles" / "h200"
        write_record(folder / "latency.json", fake_latency(NEWEST) | changes)
        return load_record_set(folder, tmp_path)

    return load


class FakeHost(Host):
    """Its loop has these rates in turn, and always the last one from there on."""

    def __init__(self, *rates: float) -> None:
        super().__init__()
        self.rates = list(rates)

    def run_loop(self) -> float:
        rate = self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]
        self.fastest_loop_rate = max(self.fastest_loop_rate, rate)
        return rate


@pytest.fixture
def short_turns(monkeypatch) -> None:
    """Two calls a turn, until two turns were quiet; five at most."""
    monkeypatch.setattr(host, "CALLS", 2)
    monkeypatch.setattr(latency, "CALLS", 2)
    monkeypatch.setattr(host, "QUIET_TURNS", 2)
    monkeypatch.setattr(host, "MAX_TURNS", 5)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.fixture
def without_a_gpu(monkeypatch, short_turns):
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
    return lambda error: monkeypatch.setattr(latency, "load", partial(load, error))


def test_measured_cell(without_a_gpu):
    without_a_gpu(error=0.0)
    cell = latency.measure_cell(CpuBackend(), NEWEST, TINY, FakeHost(9.0))
    record = fake_latency(NEWEST) | {"cells": [cell]}
    assert find_error(record, LATENCY_RECORD) is None
    assert cell["device_us"] == {name: [2.0] * 100 for name in (NEWEST.name, "sdpa_flash")}
    assert cell["host_us"].keys() == {NEWEST.name, "sdpa_flash"}
    assert all([len(b) for b in bursts] == [2, 2] for bursts in cell["host_us"].values())
    assert cell["missing"] == {"flash_attention_3": "not installed"}


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_a_wrong_call_is_not_timed(without_a_gpu, error):
    without_a_gpu(error)
    with pytest.raises(UsageError, match=r"sdpa_flash is wrong on tiny: an error of .* in o"):
        latency.measure_cell(CpuBackend(), NEWEST, TINY, FakeHost(9.0))


@pytest.mark.parametrize(
    ("rates", "turns"),
    [
        ([9.0], 2),
        ([9.0, 7.1, 7.1, 9.0], 5),  # before the second, fourth and fifth turn, after the third
        ([9.0, 7.2], 2),
        ([7.1, 9.0], 3),
        ([7.1, 7.1, 9.0], 4),  # the first one was quiet until the loop was seen to run faster
        ([9.0, 7.1], 5),  # never
    ],
)
def test_calls_are_timed_until_the_host_was_quiet(short_turns, rates, turns):
    calls = []
    names = ("first", "second")
    timed = FakeHost(*rates).time({name: (calls.append, repeat((name,))) for name in names})
    assert len(timed["loop_rates"]) == 1 + turns
    for name in names:
        assert [len(burst) for burst in timed["host_us"][name]] == [2] * turns
        assert min(map(min, timed["host_us"][name])) > 0
        assert calls.count(name) == 2 * (1 + turns), "and a warm-up that does not count"
    assert [name for name, _ in groupby(calls)] == list(names) * (1 + turns), "they take turns"


class Clock:
    """Stands still but for calls, and for a loop that reads it: that takes 1 us."""

    def __init__(self, monkeypatch) -> None:
        self.ns = 0
        monkeypatch.setattr(host, "perf_counter_ns", lambda: self.ns)
        monkeypatch.setattr(host, "perf_counter", self.read)

    def read(self) -> float:
        self.ns += 1000
        return self.ns / 1e9


def test_a_call_is_timed_without_its_arguments(short_turns, monkeypatch):
    clock, happened = Clock(monkeypatch), []

    def call(name, n) -> None:
        happened.append(name)
        clock.ns += 1500 * n

    def arguments(name):
        for n in range(1, 100):
            clock.ns += 10**6
            yield name, n

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("sync"))
    names = ("first", "second")
    timed = FakeHost(9.0).time({name: (call, arguments(name)) for name in names})
    for name in names:  # the warm-up took 1.5 and 3.0
        assert timed["host_us"][name] == [[4.5, 6.0], [7.5, 9.0]]
    turn = ["sync", "first", "first", "sync", "second", "second", "sync"]
    assert happened == turn * 3


def test_what_is_quiet_is_known_from_the_beginning(short_turns, monkeypatch):
    monkeypatch.setattr(host, "FIND_FASTEST_S", 1e-6)
    fake = FakeHost(9.0, 7.0)
    fake.find_fastest()
    assert len(fake.time({"call": (print, repeat(()))})["loop_rates"]) == 1 + 5


def test_the_loop_tells_its_rate_and_keeps_the_highest(monkeypatch):
    clock, real = Clock(monkeypatch), Host()
    assert real.run_loop() == pytest.approx(1.0, rel=1e-3)
    assert clock.ns == pytest.approx(1e9 * host.LOOP_S, rel=1e-3)
    assert real.fastest_loop_rate == pytest.approx(1.0, rel=1e-3)
    real.fastest_loop_rate = 0.5
    real.run_loop()
    assert real.fastest_loop_rate == pytest.approx(1.0, rel=1e-3)
    real.fastest_loop_rate = 2.0
    real.run_loop()
    assert real.fastest_loop_rate == 2.0


def test_the_fastest_is_looked_for_long_enough(monkeypatch):
    clock, real = Clock(monkeypatch), Host()
    real.find_fastest()
    assert clock.ns >= 1e9 * host.FIND_FASTEST_S


def test_quiet_turns():
    assert quiet_turns([8.0, 10.0, 9.0, 7.9, 10.0], 10.0) == [True, True, False, False]
    assert quiet_turns([8.0], 10.0) == []


def test_what_decodes_gets_a_key_more_at_each_call(monkeypatch, short_turns):
    asked = {}

    class Asking(Host):
        def time(self, calls):
            who = len(asked)  # one has one turn, the other two
            for call, arguments in calls.values():
                asked.setdefault(call, []).append(list(islice(arguments, 6)))
            turns = {name: [[1.0]] * (1 + who) for name in calls}
            return {"host_us": turns, "loop_rates": [9.0] * (2 + who)}

    monkeypatch.setattr(latency, "FIRST_KEYS", 3)
    monkeypatch.setattr(latency, "LAYERS", 2)
    monkeypatch.setattr(latency, "DECODED", LONGER)
    monkeypatch.setattr(trial, "peak_memory", lambda call: (call(), 0))
    decoding = latency.measure_decoding(NEWEST, *LONGER.make("cpu"), Asking())
    record = fake_latency(NEWEST) | {"decoding": decoding}
    assert find_error(record, LATENCY_RECORD) is None
    assert decoding[NEWEST.name]["keys"] == [5, 6], "a warm-up of two calls, then a turn of two"
    assert decoding["sdpa"]["keys"] == [5, 8]
    ours, sdpa = asked.values()
    for sliced, concatenated, layered, fixed in (ours, sdpa):
        assert [k.shape[2] for _, k, _ in sliced] == [3, 4, 5, 6, 7, 8]
        assert len({k.data_ptr() for _, k, _ in sliced}) == 1
        assert len({k.data_ptr() for _, k, _ in concatenated}) == 6
        assert all(map(torch.equal, (k for _, k, _ in sliced), (k for _, k, _ in concatenated)))
        assert [k.shape[2] for _, k, _ in layered] == [3, 3, 4, 4, 5, 5]
        assert len({k.data_ptr() for _, k, _ in layered}) == 2
        assert [k.shape[2] for _, k, _ in fixed] == [3] * 6


def test_a_wrong_decoding_is_not_timed(monkeypatch):
    monkeypatch.setattr(latency, "DECODED", SHORT)
    monkeypatch.setattr(trial, "peak_memory", lambda call: (call(), 0))
    monkeypatch.setattr(latency, "attention", lambda q, k, v: q + 1)
    with pytest.raises(UsageError, match=rf"{NEWEST.name} is wrong on short"):
        latency.measure_decoding(NEWEST, *SHORT.make("cpu"), FakeHost(9.0))


def fake_of_several() -> dict:
    """attention() takes v01 and v02 for the cells, and v03 for decoding."""
    sources = {step.name: {"code_sha256": step.code_sha256} for step in (V01, V02, V03)}
    cells = [fake_latency(V01)["cells"][0], fake_latency(V02)["cells"][1]]
    decoding = fake_latency(V03)["decoding"]
    return fake_latency(V01) | {"sources": sources, "cells": cells, "decoding": decoding}


def test_each_call_may_take_another_step(record_set):
    records = record_set(**fake_of_several())
    assert [row["step"] for row in rows.latency(records)] == ["v01", "v02"]
    assert tables.latency(records).splitlines()[2:4] == [
        "| 128 | none | v01 | 5.0 / 19.5 (20.5) | 50.0 / 200.0 (200.5) | missing |",
        "| 128 | causal | v02 | 5.0 / 19.5 (20.5) | 50.0 / 200.0 (200.5) | missing |",
    ]
    assert tables.decoding(records).startswith("| Each call has | attention(), v03 | sdpa |")


def test_table_of_decoding(record_set):
    text = tables.decoding(record_set())
    assert text.splitlines()[:3] == [
        f"| Each call has | attention(), {NEWEST.name} | sdpa |",
        "| --- | ---: | ---: |",
        "| a key more, of a buffer for all | 30.0 (32.0) | never quiet (40.0) |",
    ]
    assert "the turns of calls in which the host was quiet (at least 0 in each row; in" in text
    assert "on 532 to 571 keys, by sdpa to 551." in text


def test_table(record_set):
    text = tables.latency(record_set())
    assert text.splitlines()[:4] == [
        "| N | Mask | Step | attention() | sdpa_flash | flash_attention_3 |",
        "| ---: | --- | --- | ---: | ---: | ---: |",
        f"| 128 | none | {NEWEST.name} | 5.0 / 19.5 (20.5) | 50.0 / 200.0 (200.5) | missing |",
        f"| 128 | causal | {NEWEST.name} | 5.0 / 19.5 (20.5) | 50.0 / 200.0 (200.5) | missing |",
    ]
    caption = text.splitlines()[-1]
    assert "Microseconds on the NVIDIA H200: of the device / of the host." in caption
    assert "median of 3 interleaved rounds" in caption
    assert "the turns of calls in which the host was quiet (at least 1 in each row; in" in caption
    assert "ran at 80% of its highest speed or more" in caption
    assert "throttle reasons after: none" in caption


def test_medians_are_of_all_calls_in_quiet_turns(record_set):
    cell, other = fake_latency(NEWEST)["cells"]
    cell["host_us"][NEWEST.name] = [[1.0, 2.0, 3.0, 4.0, 5.0], [90.0], [10.0, 30.0, 40.0]]
    cell["host_us"]["sdpa_flash"] = [[1.0]] * 3
    cell["loop_rates"] = [9.0, 10.0, 7.0, 9.0]
    quiet, *_ = rows.latency(record_set(cells=[cell]))
    assert (quiet["quiet_turns"], quiet["host_us"][rows.ATTENTION]) == (1, (3.0, 5.0))
    cell["loop_rates"] = [9.0, 9.0, 9.0, 7.0]
    both, one = rows.latency(record_set(cells=[cell, other]))
    assert (both["quiet_turns"], one["quiet_turns"]) == (2, 1)
    assert both["host_us"][rows.ATTENTION] == (3.5, 5.0)
    assert "(at least 1 in each row;" in tables.latency(record_set(cells=[cell, other]))


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


def test_a_table_is_shown_if_its_own_step_is_what_it_was(record_set):
    """Small calls and decoding may be of different steps."""
    record = record_set().latency.record
    decoding = {
        V01.name if who == NEWEST.name else who: each for who, each in record["decoding"].items()
    }
    now = {each.name: {"code_sha256": each.code_sha256} for each in (NEWEST, V01)}
    changed = {"code_sha256": "0"}
    small = record_set(decoding=decoding, sources=now | {NEWEST.name: changed})
    assert tables.latency(small) == "stale"
    assert tables.decoding(small).startswith("| Each call has | attention(), v01 |")
    later = record_set(decoding=decoding, sources=now | {V01.name: changed})
    assert tables.latency(later) == tables.latency(record_set(decoding=decoding, sources=now))
    assert tables.decoding(later) == "stale"


def test_without_a_record(tmp_path):
    nothing = load_record_set(tmp_path, tmp_path)
    assert tables.latency(nothing) == tables.decoding(nothing) == "not measured"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sources": {}}, "sources cannot be {}"),
        ({"sources": {"v01": {"code_sha256": "0"}, "v02": {}}}, "sources cannot be {'v01': "),
        ({"host_us": {}}, "cells cannot be"),
        ({"host_us": {NEWEST.name: [[1.0]] * 2}}, "cells cannot be"),  # the peer's are gone
        ({"loop_rates": [9.0, 9.0]}, "cells cannot be"),  # of one turn
        ({"device_us": {NEWEST.name: [], "sdpa_flash": [1.0]}}, "cells cannot be"),
    ],
)
def test_malformed_record_is_named_with_what_is_wrong(record_set, change, told):
    if not change.keys() & {"sources"}:
        change = {"cells": [fake_latency(NEWEST)["cells"][0] | change]}
    with pytest.raises(UsageError, match=re.escape(f"latency.json: the record: {told}")):
        record_set(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"host_us": {cache: [[1.0]] for cache in CACHES[1:]}},
        {"loop_rates": [9.0]},
        {"keys": []},
    ],
)
def test_malformed_decoding_is_named(record_set, change):
    decoding = fake_latency(NEWEST)["decoding"]
    decoding["sdpa"] |= change
    with pytest.raises(UsageError, match="the record: decoding cannot be"):
        record_set(decoding=decoding)


def test_record(monkeypatch, tmp_path):
    fake = fake_of_several()
    monkeypatch.setattr(latency, "GpuBackend", CpuBackend)
    monkeypatch.setattr(latency, "versions", lambda: {"device": "NVIDIA H200"})

    def highest_step(backend, operation, inputs, causal) -> Step:
        return V03 if inputs[0].shape[2] == 1 else (V01, V02)[causal]

    def measure_cell(backend, step, case, host) -> dict:
        assert step is (V01, V02)[case.causal]
        host.fastest_loop_rate = 1e6
        return fake["cells"][case.causal]

    def measure_decoding(step, *_) -> dict:
        return {who: fake["decoding"][who] for who in (step.name, SDPA)}

    monkeypatch.setattr(latency, "highest_step", highest_step)
    monkeypatch.setattr(latency, "measure_cell", measure_cell)
    monkeypatch.setattr(latency, "measure_decoding", measure_decoding)
    monkeypatch.setattr(latency, "PROFILES_DIR", tmp_path)
    monkeypatch.setattr(host, "FIND_FASTEST_S", 0.01)
    path = latency.measure_latency()
    assert path == tmp_path / "h200" / "latency.json"
    record = read_record(path, LATENCY_RECORD)
    assert record["sources"] == fake["sources"]
    assert list(record["decoding"]) == ["v03", SDPA]
    assert len(record["cells"]) == len(latency.CELLS)
    for cell, case in zip(record["cells"], latency.CELLS, strict=True):
        assert ("v02" if case.causal else "v01") in cell["device_us"]
    assert record["fastest_loop_rate"] == 1e6


@pytest.mark.gpu
def test_tiny_cell_on_a_gpu():
    backend = GpuBackend()
    step = highest_step(backend, FORWARD, TINY.make(backend.device), TINY.causal)
    cell = latency.measure_cell(backend, step, TINY, Host())
    assert find_error(fake_latency(step) | {"cells": [cell]}, LATENCY_RECORD) is None
    assert step.name in cell["device_us"]
    assert "sdpa_flash" in cell["host_us"]
