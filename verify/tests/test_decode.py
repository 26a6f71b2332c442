"""Few queries on many keys: the cells, how they are measured, their record and its table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.bench import comparison, decode, resumed, timing
from common.bench.device_state import POWER_CAP
from common.bench.peers import Peer
from common.catalog import all_steps
from common.errors import NotEnoughMemoryError, UsageError
from common.operation import FORWARD
from common.problem import DECODE
from common.record_schema import DECODE_RECORD, find_error
from common.records import read_record, write_record
from common.report import decode_table, rows
from common.report.derived import (
    DECODE_FIGURES,
    DECODE_STEP_FIGURES,
    copy_shares,
    decode_figures,
    decode_ratios,
    decode_step_figures,
)
from common.report.expressions import evaluate
from common.report.markdown import REQUIRED_TABLES, render
from common.report.record_set import RecordSet, Whole, load_record_set
from common.runtime.gpu import GpuBackend
from common.step import FEW_HEADS, FEW_QUERIES, FEW_ROWS, FEW_WORK_TILES, FEWEST_ROWS
from verify.cases import BF16, Case, Shape
from verify.reference import attention_reference
from verify.tests.fake_records import fake_decode

V01, V02 = all_steps()[:2]
STEPS = decode.decode_steps(all_steps())
NEWEST = STEPS[0]
TINY = Case("tiny", Shape(2, 4, 2, 3, 96, 64), BF16)
SMALLEST, LARGEST = "d64_b1_h32_kv8_q1_1024", "d256_b64_h16_kv16_q128_131072"


def test_cells():
    shapes = [problem.shape for problem in DECODE.values()]
    assert len(DECODE) == len({*shapes}) == 864
    assert DECODE[SMALLEST].shape == Shape(1, 32, 8, 1, 1024, 64)
    assert DECODE[LARGEST].shape == Shape(64, 16, 16, 128, 131072, 256)
    for key, values in {
        "batch": {1, 8, 64},
        "seq_q": {1, 4, 16, 128},
        "seq_k": {1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072},
        "head_dim": {64, 128, 256},
    }.items():
        assert {getattr(shape, key) for shape in shapes} == values
    assert {(s.heads, s.kv_heads) for s in shapes} == {(32, 8), (64, 8), (16, 16)}
    assert not any(problem.causal for problem in DECODE.values())


# ---- measuring


class TorchBackend:
    """A stand-in for the GPU: what a step adds to torch's results, or why it does not run."""

    device = torch.device("cpu")

    def __init__(self, **outcomes: float | UsageError) -> None:
        self.outcomes = outcomes

    def launch(self, step, *tensors, **arguments):
        outcome = self.outcomes.get(step.name, 0.0)
        if isinstance(outcome, Exception):
            raise outcome
        inputs, outputs = tensors[:3], tensors[3:]
        for output, found in zip(outputs, attention_reference(*inputs, **arguments), strict=True):
            output.copy_(found)
        outputs[0][-1, -1, -1] += outcome  # of one row

    def refusal(self, step, spec):
        return None


@pytest.fixture
def timed(monkeypatch) -> list[dict]:
    """Every call takes 10 ms, and one of two peers is there. Returns who was timed, and how."""
    calls_timed = []

    def load_splitting(*inputs):
        scale = inputs[0].shape[-1] ** -0.5
        o, _ = attention_reference(*inputs, causal=False, softmax_scale=scale)
        return {"sdpa_cudnn": "no such shape", "flash_attention_3": Peer(lambda: o, "fake")}

    def time_interleaved(calls, *, rounds, warmup, sleep_cycles):
        calls_timed.append({"names": list(calls), "rounds": rounds, "warmup": warmup})
        return {name: [10.0] * rounds for name in calls}

    monkeypatch.setattr(decode, "load_splitting", load_splitting)
    for module in (decode, timing):
        monkeypatch.setattr(module, "device_state", lambda: "not collected")
        monkeypatch.setattr(module, "time_interleaved", time_interleaved)
    return calls_timed


def with_cell(cell: dict) -> dict:
    return fake_decode(V01) | {"cells": [cell]}


def test_measured_cell(timed):
    cell = decode.measure_cell(TorchBackend(), [V02, V01], TINY)
    assert find_error(with_cell(cell), DECODE_RECORD) is None
    assert (cell["batch"], cell["heads"], cell["kv_heads"]) == (2, 4, 2)
    assert (cell["seq_q"], cell["seq_k"], cell["head_dim"]) == (3, 96, 64)
    attentions = cell["attentions"]
    assert list(attentions) == ["v02", "v01", "sdpa_cudnn", "flash_attention_3"]
    assert attentions["sdpa_cudnn"] == {"missing": "no such shape"}
    ours = attentions["v02"]
    num_bytes = 2 * 2 * prod((2, 4, 3, 64)) + 2 * 2 * prod((2, 2, 96, 64)) + 4 * prod((2, 4, 3))
    assert ours["bytes_per_second"] == round(num_bytes / 10e-3)
    assert ours["tflops"] == pytest.approx(4 * 2 * 4 * 3 * 96 * 64 / 10e-3 / 1e12)
    assert (ours["time_ms"], ours["samples_ms"], ours["difference"]) == (10.0, [10.0] * 8, 0.0)
    assert cell["routes"] == {"flash_attention_3": "fake"}
    assert cell["taken"] == "v02"
    names = ["v02", "v01", "flash_attention_3"]
    assert timed == [
        {"names": names, "rounds": 2, "warmup": 0},
        {"names": names, "rounds": 8, "warmup": 1},  # of 30 ms each
    ]


@pytest.mark.parametrize(("call_ms", "rounds"), [(0.01, 20), (10.0, 12), (300.0, 5)])
def test_rounds_follow_from_the_time_of_one(monkeypatch, timed, call_ms, rounds):
    samples = {"v02": [call_ms] * 2, "flash_attention_3": [call_ms, 2 * call_ms]}
    monkeypatch.setattr(decode, "time_interleaved", lambda calls, **_: samples)
    decode.measure_cell(TorchBackend(), [V02], TINY)
    assert timed[-1]["rounds"] == rounds


@pytest.mark.parametrize(
    ("reasons", "warmup"),
    [(["gpu idle"], 1), (None, 1), ([POWER_CAP], 15), (["gpu idle", POWER_CAP], 15)],
)
def test_a_card_at_its_power_limit_settles_first(monkeypatch, timed, reasons, warmup):
    """Two calls of 10 ms, and one to sleep before: 0.3 s are 15 rounds."""
    monkeypatch.setattr(decode, "device_state", lambda: {"throttle_reasons": reasons})
    decode.measure_cell(TorchBackend(), [V02], TINY)
    assert timed[-1]["warmup"] == warmup


@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_who_disagrees_with_the_others(timed, error):
    """The step that is compared is wrong, or else whoever disagrees with it."""
    with pytest.raises(UsageError, match=r"v02 agrees with nobody on tiny: .*; v01: a row of its"):
        decode.measure_cell(TorchBackend(v02=error), [V02, V01], TINY)
    with pytest.raises(UsageError, match="v02 agrees with nobody on tiny: "):
        decode.measure_cell(TorchBackend(v02=error, v01=error), [V02, V01], TINY)
    cell = decode.measure_cell(TorchBackend(v01=error), [V02, V01], TINY)
    assert cell["attentions"]["v01"]["missing"].startswith("a row of its o differs by ")
    assert timed[-1]["names"] == ["v02", "flash_attention_3"]


def test_the_step_before_need_not_run(timed):
    refused = TorchBackend(v01=UsageError("v01 takes head_dim 128"))
    cell = decode.measure_cell(refused, [V02, V01], TINY)
    assert cell["attentions"]["v01"] == {"missing": "v01 takes head_dim 128"}
    assert find_error(with_cell(cell), DECODE_RECORD) is None


FEW = replace(V02, few=FEW_QUERIES)
TILES = replace(V02, name="v03", few=FEW_WORK_TILES)
ROWS = replace(V02, name="v04", few=FEW_ROWS)
FEWEST = replace(V02, name="v06", few=FEWEST_ROWS)
HEADS = replace(V02, name="v05", few=FEW_HEADS)


@pytest.mark.parametrize(
    ("steps", "seq_q", "taken"),
    [
        ([FEW, V01], 64, "v02"),
        ([FEW, V01], 65, "v01"),
        ([V02, V01], 65, "v02"),
        ([FEW], 65, "v02"),
        ([TILES, FEW, V01], 64, "v02"),
        ([TILES, FEW, V01], 65, "v01"),
        ([ROWS, V01], 16, "v04"),
        ([ROWS, V01], 17, "v01"),
        ([FEW, V01], 16, "v01"),  # as attention() takes no other step for few rows
        ([HEADS, V01], 64, "v01"),  # there are many heads
    ],
)
def test_a_step_for_few_is_taken_only_for_them(timed, steps, seq_q, taken):
    case = replace(TINY, shape=Shape(34, 4, 2, seq_q, 96, 8))
    cell = decode.measure_cell(TorchBackend(), steps, case)
    assert cell["taken"] == taken
    assert find_error(with_cell(cell), DECODE_RECORD) is None


@pytest.mark.parametrize(
    ("shape", "taken"),
    [
        (Shape(1, 4, 2, 17, 129, 8), "v05"),
        (Shape(1, 4, 2, 1, 96, 8), "v06"),
        (Shape(1, 4, 2, 9, 96, 8), "v04"),
        (Shape(1, 4, 2, 65, 8193, 8), "v03"),
        (Shape(34, 4, 2, 17, 96, 8), "v02"),
        (Shape(34, 4, 2, 65, 96, 8), "v01"),
    ],
)
def test_what_reads_the_keys_again_is_run_only_where_one_such_is_taken(timed, shape, taken):
    steps = [HEADS, FEWEST, ROWS, TILES, FEW, V01]
    again = {
        "v04": "for few rows",
        "v05": "for few queries of few heads",
        "v06": "for the fewest rows",
    }
    missing = {
        name: {"missing": f"it is {few}"} for name, few in again.items() if taken not in again
    }
    compared = [each.name for each in steps if each.name not in missing]
    refusals = {name: UsageError("run") for name in missing}
    cell = decode.measure_cell(TorchBackend(**refusals), steps, replace(TINY, shape=shape))
    assert cell["taken"] == taken
    assert timed[-1]["names"] == [*compared, "flash_attention_3"]
    attentions = cell["attentions"]
    assert list(attentions) == [*(each.name for each in steps), "sdpa_cudnn", "flash_attention_3"]
    for name in compared:
        assert attentions[name]["time_ms"] == 10.0
    for name, told in missing.items():
        assert attentions[name] == told
    assert find_error(with_cell(cell), DECODE_RECORD) is None


def test_the_step_that_is_taken_must_agree_with_a_peer(timed):
    """Others that are wrong, or would be, are none of its concern."""
    case = replace(TINY, shape=Shape(34, 4, 2, 17, 96, 8))
    told = r"v02 agrees with nobody on tiny: .*v04: it is for few rows; "
    with pytest.raises(UsageError, match=told):
        decode.measure_cell(TorchBackend(v02=1.0), [ROWS, FEW, V01], case)
    cell = decode.measure_cell(TorchBackend(v04=1.0, v01=1.0), [ROWS, FEW, V01], case)
    assert timed[-1]["names"] == ["v02", "flash_attention_3"]
    assert cell["attentions"]["v02"]["difference"] == 0.0


def test_without_peers_a_later_step_is_the_witness(timed, monkeypatch):
    monkeypatch.setattr(decode, "load_splitting", lambda *_: {"sdpa_cudnn": "no such shape"})
    steps = [ROWS, FEW, V01]
    case = replace(TINY, shape=Shape(34, 4, 2, 17, 96, 8))
    decode.measure_cell(TorchBackend(v04=1.0), steps, case)
    assert timed[-1]["names"] == ["v02", "v01"]
    with pytest.raises(UsageError, match="v02 agrees with nobody on tiny: "):
        decode.measure_cell(TorchBackend(v04=1.0, v02=1.0), steps, case)


def test_difference_is_of_the_worst_row():
    o = torch.ones(2, 3, 5, 16)
    other = o.clone()
    other[1, 2, 4, 0] += 2.0
    assert comparison.difference_of(other, o) == pytest.approx(0.5)
    assert comparison.difference_of(o, o) == 0.0


def test_copy(monkeypatch):
    copied = []

    def time_interleaved(calls, *, rounds):
        copied.append(calls["copy"]().nbytes)
        return {"copy": [2.0] * rounds}

    monkeypatch.setattr(decode, "COPY_BYTES", 1000)
    monkeypatch.setattr(decode, "time_interleaved", time_interleaved)
    copy = decode.measure_copy(torch.device("cpu"))
    assert copy == {"copy_bytes_per_second": 10**6, "copy_samples_ms": [2.0] * 20}
    assert copied == [1000]


NAMES = list(DECODE)[:4]


@pytest.fixture
def measure(monkeypatch, tmp_path) -> Callable[..., list[str]]:
    """Measures four fake cells into tmp_path, as far as told; returns which ones were measured.

    The third does not fit.
    """
    fake = fake_decode(NEWEST)
    monkeypatch.setattr(decode, "DECODE", {name: DECODE[name] for name in NAMES})
    monkeypatch.setattr(decode, "GpuBackend", TorchBackend)
    monkeypatch.setattr(decode, "build_all", lambda *_: None)
    monkeypatch.setattr(decode, "versions", lambda: {"device": "NVIDIA H200"})
    copy = {key: fake[key] for key in ("copy_bytes_per_second", "copy_samples_ms")}
    monkeypatch.setattr(decode, "measure_copy", lambda device: copy)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(resumed, "SAVE_SECONDS", -1.0)
    monkeypatch.setattr(resumed, "PROFILES_DIR", tmp_path / "profiles")
    monkeypatch.setattr(resumed, "BUILD_DIR", tmp_path / "build")

    def run(until: int = 4) -> list[str]:
        measured = []

        def measure_cell(backend, steps, case):
            if len(measured) == until:
                raise KeyboardInterrupt
            measured.append(case.name)
            if case.name == NAMES[2]:
                raise NotEnoughMemoryError("v13 needs more")
            return fake["cells"][0] | {"name": case.name, "steps": [each.name for each in steps]}

        monkeypatch.setattr(decode, "measure_cell", measure_cell)
        if until < 4:
            with pytest.raises(KeyboardInterrupt):
                decode.measure_decode()
        else:
            assert decode.measure_decode() == tmp_path / "profiles/h200/decode.json"
        return measured

    return run


def recorded(tmp_path: Path) -> dict | None:
    return read_record(tmp_path / "profiles/h200/decode.json", DECODE_RECORD)


def test_record(measure, tmp_path):
    assert measure() == NAMES
    record = recorded(tmp_path)
    assert [cell["name"] for cell in record["cells"]] == [NAMES[0], NAMES[1], NAMES[3]]
    assert record["skipped"] == {NAMES[2]: "v13 needs more"}
    names = [step.name for step in STEPS]
    assert record["sources"] == {step.name: {"code_sha256": step.code_sha256} for step in STEPS}
    assert list(record["sources"]) == record["cells"][0]["steps"] == names


def test_steps_that_are_compared():
    assert [step.few for step in STEPS] == [
        *(FEW_HEADS, FEWEST_ROWS, FEW_ROWS, FEW_WORK_TILES, FEW_QUERIES, None)
    ]
    assert all(step.operation == FORWARD and not step.takes_lengths for step in STEPS)
    general = replace(V01, few=None)
    newer = replace(FEW, name="v09")
    assert decode.decode_steps([general, FEW, newer]) == [newer, general]
    with_lengths = replace(newer, name="v10", takes_lengths=True)
    ordered = [ROWS, TILES, FEW, general]
    assert decode.decode_steps([general, TILES, FEW, ROWS, with_lengths]) == ordered
    draft = replace(newer, draft="new")
    assert decode.decode_steps([replace(V01, draft="new"), V02, FEW, draft]) == [FEW, V02]


def test_an_interrupted_run_goes_on_and_loses_no_earlier_record(measure, tmp_path, capsys):
    measure()
    earlier = recorded(tmp_path)
    assert measure(until=3) == NAMES[:3]
    assert recorded(tmp_path) == earlier
    assert measure() == NAMES[3:]  # without the one that does not fit
    assert "going on after 3 of 4 cells" in capsys.readouterr().err
    assert [cell["name"] for cell in recorded(tmp_path)["cells"]] == [*NAMES[:2], NAMES[3]]
    assert not list((tmp_path / "build").rglob("*.json"))
    assert measure() == NAMES


def test_an_interrupted_run_of_other_code_begins_again(measure, monkeypatch):
    measure(until=2)
    monkeypatch.setattr(decode, "steps_to_run", lambda: STEPS[1:])
    assert measure() == NAMES


def test_a_step_that_does_not_run_here_is_one_clear_line(measure, monkeypatch, tmp_path):
    told = "takes compute capability 9.0"
    monkeypatch.setattr(TorchBackend, "refusal", lambda *_: told)
    with pytest.raises(UsageError, match=rf"{NEWEST.name} {told}"):
        decode.measure_decode()
    assert recorded(tmp_path) is None


# ---- the record and its table


def load_fake(project: Path, **changes) -> RecordSet:
    """The record set of a project with such a record of v02 and v01, changed as told."""
    folder = project / "profiles" / "h200"
    write_record(folder / "decode.json", fake_decode(V02, V01) | changes)
    return load_record_set(folder, project)


@pytest.fixture
def record_set(tmp_path):
    """load_fake(), for one test."""
    return partial(load_fake, tmp_path)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory) -> RecordSet:
    """What load_fake() gives, for tests that only look at it."""
    return load_fake(tmp_path_factory.mktemp("project"))


def fake_of_two() -> dict:
    """attention() takes v02 but for 128 queries, where it takes v01: 3 ms, and 0.8 of a peer. v02,
    which is for fewer, has not been run there.
    """
    record = fake_decode(V02, V01)
    for cell in record["cells"]:
        if cell["seq_q"] == 128:
            cell["taken"] = "v01"
            cell["attentions"]["v02"] = {"missing": "attention() takes it only for few rows"}
    return record


def test_the_fake_record_is_one():
    for record in (fake_decode(V02, V01), fake_decode(V01), fake_of_two()):
        assert find_error(record, DECODE_RECORD) is None


def test_ratios_and_shares():
    record = fake_decode(V02, V01)
    ratios = decode_ratios(record)
    assert ratios.keys() == {cell["name"] for cell in record["cells"]}
    assert len(ratios) == 864 / 3 - 12
    assert (ratios["d64_b1_h32_kv8_q1_1024"], ratios["d64_b8_h32_kv8_q4_2048"]) == (2.0, 1.5)
    assert ratios["d256_b64_h32_kv8_q128_65536"] == 0.8
    assert {*decode_ratios(record, "v01").values()} == {3.0}
    shares = copy_shares(record)
    assert len(shares) == 3 * 5
    assert shares["d64_b8_h32_kv8_q1_8192"] == pytest.approx(0.9)
    assert shares["d64_b8_h32_kv8_q1_131072"] == pytest.approx(0.7)


def test_ratios_are_of_the_step_that_attention_takes():
    record = fake_of_two()
    ratios = decode_ratios(record)
    assert len(ratios) == 276
    assert ratios["d64_b8_h32_kv8_q16_2048"] == 1.5
    assert ratios["d256_b64_h32_kv8_q128_65536"] == pytest.approx(0.8 / 3)
    gains = decode_ratios(record, "v01")
    assert gains == {name: 3.0 for name in ratios if "_q128_" not in name}
    record["cells"] = [cell | {"taken": "v01"} for cell in record["cells"]]
    assert copy_shares(record)["d64_b8_h32_kv8_q1_8192"] == pytest.approx(0.3)
    assert not decode_ratios(record, "v01")


def test_figures_of_steps():
    figures = decode_step_figures(fake_of_two())
    assert list(figures) == ["v02", "v01"]
    assert {*map(tuple, figures.values())} == {DECODE_STEP_FIGURES}
    first = "d64_b1_h32_kv8_q{}_1024".format
    assert figures["v02"] == {
        "cells": 207,
        "mean": pytest.approx((2 * 1.5 * 1.5) ** (1 / 3)),
        "smallest": 1.5,
        "smallest_cell": first(4),
        "slower": 0,
        "gain": pytest.approx(3.0),
        "smallest_gain": pytest.approx(3.0),
        "smallest_gain_cell": first(1),
    }
    assert figures["v01"] == {
        "cells": 69,
        "mean": pytest.approx(0.8 / 3),
        "smallest": pytest.approx(0.8 / 3),
        "smallest_cell": first(128),
        "slower": 69,
        "gain": None,
        "smallest_gain": None,
        "smallest_gain_cell": None,
    }
    mean = (2 * 1.5 * 1.5 * 0.8 / 3) ** (1 / 4)
    assert decode_figures(fake_of_two())["mean"] == pytest.approx(mean)


def test_figures():
    record = fake_decode(V02, V01)
    figures = decode_figures(record)
    assert list(figures) == list(DECODE_FIGURES)
    mean = (2 * 1.5 * 1.5 * 0.8) ** (1 / 4)  # as many cells of each number of queries
    assert figures == {
        "cells": 276,
        "mean": pytest.approx(mean),
        "smallest": 0.8,
        "smallest_cell": "d64_b1_h32_kv8_q128_1024",
        "slower": 69,
        "smallest_copy_share": pytest.approx(0.7),
        "copy_tb_per_s": 4.0,
    }
    for cell in record["cells"]:
        cell["attentions"] = {name: cell["attentions"][name] for name in ("v02",)}
    alone = decode_figures(record)
    assert (alone["cells"], alone["mean"], alone["smallest_cell"]) == (0, None, None)


def test_rows():
    by_row = {(row["head_dim"], row["seq_q"]): row for row in rows.decode(fake_set())}
    assert len(by_row) == 12
    row = by_row[64, 1]
    assert row["by_keys"]["8192"] == {"mean": pytest.approx(2.0), "smallest": 2.0}
    assert list(row["by_keys"]) == ["1024", "8192", "131072"]
    assert (row["slower"], row["cells"]) == (0, 23)
    assert row["copy_share"] == pytest.approx(0.7)
    row = by_row[256, 128]
    assert (row["slower"], row["cells"]) == (23, 23)
    assert "copy_share" not in row


def fake_set(**changes):
    record = fake_decode(V02, V01) | changes
    return SimpleNamespace(decode=Whole(record))


def test_table(record_set):
    lines = decode_table.decode(record_set()).splitlines()
    assert lines[:3] == [
        "| head_dim | Queries | 1024 keys: mean, smallest | 8192 keys: mean, smallest | "
        "131072 keys: mean, smallest | Slower | Of a copy's speed |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        f"| 64 | 1 | {' | '.join(['**2.000 ×**, **2.000 ×**'] * 3)} | 0 of 23 | 70 % |",
    ]
    assert lines[5] == f"| 64 | 128 | {' | '.join(['0.800 ×, 0.800 ×'] * 3)} | 23 of 23 |  |"
    caption = lines[-1]
    for told in (
        "v02 over the fastest peer: geometric mean of 276 cells 1.377 ×, smallest 0.800 × (d64_b1_",
        "; v02 over v01: geometric mean of 276 cells 3.000 ×, ",
        "of batches 1, 8 and 64 and of heads 32/8; ",
        "with 1024 to 131072 keys, ",
        "reads and writes, 4 TB/s; the smallest share at batch 8 from 8192 keys on. NVIDIA H200, ",
        "Peers: flash_attention_3: fake. Median of 3 interleaved rounds",
        "Missing: sdpa_cudnn in 69 of 276 cells: no such shape. ",
        "12 cells do not fit into the device's memory. Before and after: SM clock 1000 → 1000",
    ):
        assert told in caption


def test_table_of_two_steps(record_set):
    lines = decode_table.decode(record_set(cells=fake_of_two()["cells"])).splitlines()
    assert lines[5] == f"| 64 | 128 | {' | '.join(['0.267 ×, 0.267 ×'] * 3)} | 23 of 23 |  |"
    assert lines[-1].startswith(
        "v02 or v01, as attention() takes one or the other, over the fastest peer: geometric mean "
        "of 276 cells 1.047 ×, smallest 0.267 × (d64_b1_h32_kv8_q128_1024); v02 over v01: "
        "geometric mean of 207 cells 3.000 ×, smallest "
    )
    assert (
        "Missing: sdpa_cudnn in 69 of 276 cells: no such shape.; v02 in 69 of 276 cells: "
        "attention() takes it only for few rows. 12 cells do not fit"
    ) in lines[-1]


def test_a_step_that_is_missing_in_a_cell_is_no_error(record_set):
    loaded = record_set(cells=fake_of_two()["cells"])
    missing = "d64_b1_h32_kv8_q128_1024"
    assert evaluate(f"decode.{missing}.v02.time_ms : .1f", loaded) == "missing"
    assert evaluate(f"decode.{missing}.v01.time_ms : .1f", loaded) == "3.0"
    assert evaluate("decode.v02.cells", loaded) == "207"
    (row,) = (row for row in rows.decode(loaded) if (row["head_dim"], row["seq_q"]) == (64, 128))
    assert (row["slower"], row["cells"]) == (23, 23)
    # Where none of the cells has it, attention() takes another one everywhere.
    cells = [cell for cell in fake_of_two()["cells"] if cell["seq_q"] == 128]
    without = record_set(cells=cells)
    assert evaluate("decode.v02.gain : .1f", without) == "not measured"
    caption = decode_table.decode(without).splitlines()[-1]
    assert caption.startswith("v01 over the fastest peer: geometric mean of 69 cells 0.267 ×, ")
    assert "; v02 over v01: not measured. " in caption


def test_what_is_missing_in_a_table(record_set):
    record = fake_decode(V02)
    cells = [cell for cell in record["cells"] if cell["seq_k"] < 131072]
    cells[0]["attentions"]["v02"]["samples_ms"] = [1.0] * 20
    table = decode_table.decode(record_set(sources=record["sources"], cells=cells, skipped={}))
    assert table.splitlines()[2].endswith("| missing | 0 of 21 | 90 % |")
    assert "; v02 over " not in table
    assert "Median of 3 to 20 interleaved rounds" in table
    assert "memory." not in table


def test_tables_without_numbers(record_set, tmp_path):
    assert decode_table.decode(load_record_set(tmp_path / "profiles/h100", tmp_path)) == (
        "not measured"
    )
    sources = {name: {"code_sha256": "0" * 64} for name in ("v02", "v01")}
    changed = record_set(sources=sources)
    assert evaluate("decode.mean", changed) == "stale"
    assert evaluate("decode.v02.mean", changed) == "stale"


def test_a_number_is_stale_where_a_step_that_it_is_of_has_changed(record_set):
    """The table shows it, and says which step that is."""
    changed = record_set(
        sources={
            "v02": {"code_sha256": V02.code_sha256},
            "v01": {"code_sha256": "0" * 64},
        }
    )
    cell = "decode.d64_b1_h32_kv8_q1_1024"
    for asked in ("decode.mean", "decode.v01.mean", "decode.v02.gain", f"{cell}.v01.time_ms"):
        assert evaluate(asked, changed) == "stale"
    for asked in ("decode.v02.mean", f"{cell}.v02.time_ms", f"{cell}.flash_attention_3.time_ms"):
        assert evaluate(asked, changed) == evaluate(asked, record_set()) != "stale"
    caption = decode_table.decode(changed).splitlines()[-1]
    assert "; v02 over v01 (stale): geometric mean" in caption


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("decode.mean : .3f", "1.377"),
        ("decode.smallest : .3f", "0.800"),
        ("decode.smallest_cell", "d64_b1_h32_kv8_q128_1024"),
        ("decode.slower", "69"),
        ("decode.cells - decode.slower : .0f", "207"),
        ("decode.smallest_copy_share : .0%", "70%"),
        ("decode.v02.cells", "276"),  # of all of them v02 is taken
        ("decode.v02.mean : .3f", "1.377"),
        ("decode.v02.slower", "69"),
        ("decode.v02.gain : .1f", "3.0"),
        ("decode.v01.gain : .1f", "not measured"),
        ("h100 decode.v02.gain : .1f", "not measured"),
        ("decode.copy_tb_per_s : .1f", "4.0"),
        ("h200 decode.mean : .3f", "1.377"),
        ("h100 decode.mean : .3f", "not measured"),
        (f"1000 * decode.{SMALLEST}.v01.time_ms : .0f", "3000"),
        (f"decode.{SMALLEST}.v01.time_ms / decode.{SMALLEST}.v02.time_ms : .1f", "3.0"),
        (f"decode.{SMALLEST}.sdpa_cudnn.time_ms : .1f", "missing"),
        (f"decode.{LARGEST}.v02.time_ms : .1f", "not measured"),  # not among those with 32 heads
        (f"h100 decode.{SMALLEST}.v02.time_ms : .1f", "not measured"),
    ],
)
def test_expression(unchanged, expression, text):
    assert evaluate(expression, unchanged) == text


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("decode", "does not read like 'decode.mean'"),
        ("decode.v02.mean.x.y", "does not read like 'decode.mean' or 'decode.d128_"),
        ("decode.mean.v02", "no 'v02'; there are cells, mean, smallest"),
        ("decode.v03.mean", "no 'v03'; there are v02, v01"),
        (f"decode.{SMALLEST}", "no 'd64_b1_h32_kv8_q1_1024'; there are cells, mean, smallest"),
        ("decode.mean.v02.time_ms", "no 'mean'; there are d64_b1_h32_kv8_q1_1024, "),
        (f"decode.{SMALLEST}.v03.time_ms", "no 'v03'; there are v02, v01, sdpa_cudnn, "),
        (f"decode.{SMALLEST}.v02.rong", "no 'rong'; there are time_ms, "),
        ("decode.rong", "no 'rong'; there are cells, mean, smallest"),
        ("h100 decode.rong", "no 'rong'; there are cells, mean, smallest"),
    ],
)
def test_expression_that_means_nothing(unchanged, expression, told):
    with pytest.raises(UsageError) as error:
        evaluate(expression, unchanged)
    assert told in str(error.value)


def test_markers(record_set, tmp_path, monkeypatch):
    monkeypatch.setitem(REQUIRED_TABLES, "text.md", ())
    loaded, path = record_set(), tmp_path / "text.md"
    markers = ("table: decode", "table: decode h100", "= decode.mean : .2f")
    path.write_text("".join(f"<!-- {marker} --><!-- end -->" for marker in markers))
    filled = render(path, loaded, []).split("<!-- end -->")
    here, other, number = (text.split(" -->")[1].strip() for text in filled[:-1])
    assert (here, other, number) == (decode_table.decode(loaded), "not measured", "1.38")


@pytest.mark.gpu
def test_small_cells_on_a_gpu(monkeypatch, tmp_path):
    names = (
        *("d64_b1_h32_kv8_q1_1024", "d128_b1_h64_kv8_q16_1024", "d128_b1_h64_kv8_q128_2048"),
        *("d128_b1_h64_kv8_q128_1024", "d256_b8_h16_kv16_q4_2048"),
    )
    if refusal := GpuBackend().refusal(NEWEST, DECODE[names[0]].specialization):
        pytest.skip(f"{NEWEST.name} {refusal}")
    monkeypatch.setattr(decode, "DECODE", {name: DECODE[name] for name in names})
    monkeypatch.setattr(resumed, "PROFILES_DIR", tmp_path)
    monkeypatch.setattr(resumed, "BUILD_DIR", tmp_path)
    record = read_record(decode.measure_decode(), DECODE_RECORD)
    assert [cell["name"] for cell in record["cells"]] == list(names)
    assert not record["skipped"]
    steps = [step.name for step in STEPS]
    assert {cell["taken"] for cell in record["cells"]} == {*steps}
    for cell in record["cells"]:
        taken = steps.index(cell["taken"])
        for name in steps[:taken]:
            assert "missing" in cell["attentions"][name]
        for name in steps[taken:]:
            assert 0 <= cell["attentions"][name]["difference"] < 0.01
    assert 0.1e12 < record["copy_bytes_per_second"] < 100e12
