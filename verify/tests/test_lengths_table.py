"""Packed sequences, windows and caches: what reads their record: figures, table and numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from common.errors import UsageError
from common.operation import BACKWARD
from common.problem import LENGTHS
from common.record_schema import LENGTHS_RECORD, find_error
from common.records import write_record
from common.report import lengths_table, rows
from common.report.derived import (
    LENGTHS_FIGURES,
    fastest_peer,
    lengths_figures,
    lengths_ratios,
    padded_ratios,
)
from common.report.expressions import evaluate
from common.report.markdown import REQUIRED_TABLES, render
from common.report.record_set import RecordSet, load_record_set
from verify.tests.fake_records import fake_lengths
from verify.tests.lengths_measured import B01, B02, V01, V02


def load_fake(project: Path, **changes) -> RecordSet:
    """The record set of a project with such a record of v02 and v01, changed as told, and
    one of b02 and b01.
    """
    folder = project / "profiles" / "h200"
    write_record(folder / "lengths.json", fake_lengths(V02, V01) | changes)
    write_record(folder / "lengths_backward.json", fake_lengths(B02, B01))
    return load_record_set(folder, project)


@pytest.fixture
def record_set(tmp_path):
    """load_fake(), for one test."""
    return partial(load_fake, tmp_path)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory) -> RecordSet:
    """What load_fake() gives, for tests that only look at it."""
    return load_fake(tmp_path_factory.mktemp("project"))


def test_the_fake_records_are_some():
    for steps in ((V02, V01), (B02, B01)):
        assert find_error(fake_lengths(*steps), LENGTHS_RECORD) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"group": "none"},
        {"window": [1]},
        {"window": [-1, None]},
        {"visible": 0},
        {"slow": "v02"},
        {"attentions": {"v02": {}}},
    ],
)
def test_malformed_cells(changes):
    record = fake_lengths(V02, V01)
    record["cells"][0] |= changes
    assert find_error(record, LENGTHS_RECORD).startswith("the record: cells cannot be ")


def test_ratios():
    record = fake_lengths(V02, V01)
    ratios = lengths_ratios(record)
    assert len(ratios) == len(LENGTHS) - 1
    assert {ratios[name] for name in ("d64_h32_ragged", "d256_h8_4x4096_causal")} == {2.0}
    assert ratios["d128_h16_ragged_window_511_causal"] == 1.5
    assert ratios["d128_h32_kv8_caches_causal"] == 0.8
    assert {*lengths_ratios(record, "varlen_attn").values()} == {4.0}
    assert {*padded_ratios(record, equal=False).values()} == {3.0}
    assert {*padded_ratios(record, equal=True).values()} == {1.25}
    assert "d64_h32_one_long_causal" not in padded_ratios(record, equal=False)
    cell = record["cells"][0]
    assert fastest_peer(cell, record["sources"]) == "flash_attention_3"
    del cell["attentions"]["flash_attention_3"]
    assert fastest_peer(cell, record["sources"]) == "varlen_attn"
    del cell["attentions"]["varlen_attn"]
    assert fastest_peer(cell, record["sources"]) is None
    assert cell["name"] not in lengths_ratios(record)


def test_figures():
    record = fake_lengths(V02, V01)
    figures = lengths_figures(record)
    assert list(figures) == list(LENGTHS_FIGURES)
    assert figures == {
        "cells": 79,
        "mean": pytest.approx((2**35 * 1.5**16 * 0.8**4 * 1.2**24) ** (1 / 79)),
        "smallest": 0.8,
        "smallest_cell": "d64_h32_caches_causal",
        "slower": 4,
        "packed_cells": 35,
        "packed_mean": pytest.approx(2.0),
        "packed_smallest": 2.0,
        "packed_smallest_cell": "d64_h32_4x4096",
        "packed_slower": 0,
        "windows_cells": 16,
        "windows_mean": pytest.approx(1.5),
        "windows_smallest": 1.5,
        "windows_smallest_cell": "d64_h32_window_127_causal",
        "windows_slower": 0,
        "caches_cells": 4,
        "caches_mean": pytest.approx(0.8),
        "caches_smallest": 0.8,
        "caches_smallest_cell": "d64_h32_caches_causal",
        "caches_slower": 4,
        "decoding_cells": 24,
        "decoding_mean": pytest.approx(1.2),
        "decoding_smallest": pytest.approx(1.2),
        "decoding_smallest_cell": "d64_h32_decode_64_causal",
        "decoding_slower": 0,
        "over_padded": pytest.approx(3.0),
        "over_padded_equal": pytest.approx(1.25),
    }
    for cell in record["cells"]:
        cell["attentions"] = {"v02": cell["attentions"]["v02"]}
    backward = lengths_figures(fake_lengths(B02, B01))
    assert list(backward) == list(LENGTHS_FIGURES)
    assert (backward["cells"], backward["packed_cells"], backward["windows_cells"]) == (51, 35, 16)
    assert backward["mean"] == pytest.approx((2**35 * 1.5**16) ** (1 / 51))
    assert (backward["caches_cells"], backward["caches_mean"]) == (0, None)
    assert backward["over_padded"] == pytest.approx(3.0)
    alone = lengths_figures(record)
    assert (alone["cells"], alone["mean"], alone["windows_smallest"]) == (0, None, None)
    assert alone["over_padded"] is None


def test_rows(record_set):
    found = rows.lengths(record_set())
    assert len(found) == 24
    row = next(row for row in found if row["window"] == [1023, None])
    assert (row["causal"], row["group"]) == (True, "windows")
    by_heads = row["by_heads"]
    assert list(by_heads) == [
        "head_dim 64, 32 heads",
        "head_dim 128, 16 heads",
        "head_dim 128, 32/8 heads",
        "head_dim 256, 8 heads",
    ]
    flops = LENGTHS["d128_h16_window_1023_causal"].flops(2)
    assert by_heads["head_dim 128, 16 heads"] == {
        "step": pytest.approx(flops / 1e9),
        "peer": pytest.approx(flops / 1.5e9),
        "name": "flash_attention_3",
        "ratio": 1.5,
    }


def test_rows_of_backward(record_set):
    found = rows.lengths(record_set(), BACKWARD)
    assert len(found) == 17
    row = next(row for row in found if row["window"] == [1023, None])
    assert list(row["by_heads"]) == [
        "head_dim 64, 32 heads",
        "head_dim 128, 16 heads",
        "head_dim 128, 32/8 heads",
        "head_dim 256, 8 heads",
    ]
    rate = row["by_heads"]["head_dim 128, 16 heads"]["step"]
    assert rate == pytest.approx(LENGTHS["d128_h16_window_1023_causal"].flops(5) / 1e9)


def test_table_of_backward(record_set):
    lines = lengths_table.lengths(record_set(), BACKWARD).splitlines()
    assert lines[0].endswith("| head_dim 128, 32/8 heads | head_dim 256, 8 heads |")
    assert lines[2].startswith("| 4 of 4096 | none | 1374 / 687, **2.000 ×** | ")
    caption = lines[-1]
    for told in (
        "TFLOP/s of b02 / of the fastest peer, ",
        "whoever computes more. FLOPs are 2.5 times forward's. b02 over the fastest peer: ",
        "; packed: geometric mean of 35 cells 2.000 ×, ",
        "; with windows: geometric mean of 16 cells 1.500 ×, ",
        ". b02 over b01 of a batch of the packed ",
        "; q, k, v and dout normally distributed",
        ". All read q, k, v, o and dout where they lie: ",
    ):
        assert told in caption
    assert "on caches" not in caption


def test_table(record_set):
    lines = lengths_table.lengths(record_set()).splitlines()
    assert lines[0] == (
        "| Sequences | Mask | head_dim 64, 32 heads | head_dim 128, 16 heads | "
        "head_dim 128, 32/8 heads | head_dim 256, 8 heads |"
    )
    assert lines[2] == (
        "| 4 of 4096 | none | 550 / 275, **2.000 ×** | 550 / 275, **2.000 ×** | "
        "1100 / 550, **2.000 ×** | 550 / 275, **2.000 ×** |"
    )
    firsts = [" | ".join(line.split(" | ")[:2]) for line in lines[2:26]]
    assert firsts[1] == "| 4 of 4096 | causal"
    assert "| 1000 of 1 to 100 | causal" in firsts
    assert firsts[12:] == [
        "| a batch of 1 of 16384 | causal, 127 before",
        "| a batch of 1 of 16384 | causal, 1023 before",
        "| a batch of 1 of 16384 | causal, 4095 before",
        "| a batch of 4 of 4096 | 256 before, 256 after",
        "| 16 of 100 to 4000 | causal, 511 before",
        "| a batch of 8 of 1024, on 1024 to 8192 keys | causal",
        "| a batch of 64 of 1, on 100 to 4096 keys | causal",
        "| a batch of 8 of 1, on 1024 to 8192 keys | causal",
        "| a batch of 8 of 4, on 1024 to 8192 keys | causal",
        "| a batch of 1 of 1, on 40000 of 131072 keys | causal",
        "| a batch of 1 of 16, on 16000 of 16384 keys | causal",
        "| a batch of 8 of 1, on 1024 to 8192 keys | causal, 1023 before",
    ]
    assert lines[19].endswith("405 / 507, 0.800 × |")
    one_long = next(line for line in lines if "| 1 of 30000" in line)
    assert one_long.endswith("×** |  |")  # the cell that was skipped
    caption = lines[-1]
    for told in (
        "TFLOP/s of v02 / of the fastest peer, ",
        "v02 over the fastest peer: geometric mean of 79 cells 1.542 ×, smallest 0.800 × (d64_h32_",
        "; packed: geometric mean of 35 cells 2.000 ×, ",
        "; with windows: geometric mean of 16 cells 1.500 ×, ",
        "; on caches: geometric mean of 4 cells 0.800 ×, ",
        "; of up to 16 queries: geometric mean of 24 cells 1.200 ×, ",
        ". That is flash_attention_3 in 79 cells. v02 over v01 of a batch of the packed ",
        "hides the padding: geometric mean of 8 cells 3.000 ×, ",
        "there is no padding: geometric mean of 12 cells 1.250 ×, ",
        "NVIDIA H200, bf16; q, k and v normally distributed",
        "Peers: flash_attention_3: fake. Median of 3 interleaved rounds per cell, L2 flushed",
        "Missing: padded_v01 in 4 of 79 cells: the padded batch takes 15 GB; varlen_attn in 28 of ",
        "1 cells do not fit into the device's memory. Before and after: SM clock 1000 → 1000",
    ):
        assert told in caption


def test_what_is_missing_in_a_table(record_set):
    record = fake_lengths(V02, V01)
    first, second, *_ = cells = record["cells"][:2]
    for name in ("flash_attention_3", "varlen_attn", "padded_v01"):
        first["attentions"][name] = {"missing": "not installed"}
    second["attentions"]["v02"] = {"missing": "it disagrees"}
    table = lengths_table.lengths(record_set(cells=cells, skipped={}))
    lines = table.splitlines()
    assert lines[2] == "| 4 of 4096 | none | 550 / missing |"
    assert lines[3] == "| 4 of 4096 | causal | missing / 137 |"
    assert "over the fastest peer: not measured. That is flash_attention_3 in 1 cells. " in table
    del cells[1]
    assert ". That is missing. " in lengths_table.lengths(record_set(cells=cells))


def test_tables_without_numbers(record_set, tmp_path):
    nothing = load_record_set(tmp_path / "profiles/h100", tmp_path)
    assert lengths_table.lengths(nothing) == "not measured"
    sources = {name: {"code_sha256": "0" * 64} for name in ("v02", "v01")}
    assert lengths_table.lengths(nothing, BACKWARD) == "not measured"
    changed = record_set(sources=sources)
    assert lengths_table.lengths(changed) == "stale"
    assert evaluate("lengths.mean", changed) == "stale"
    assert evaluate("lengths_backward.packed_mean : .1f", changed) == "2.0"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("lengths.mean : .3f", "1.542"),
        ("lengths.packed_mean : .3f", "2.000"),
        ("lengths.windows_smallest : .1f", "1.5"),
        ("lengths.smallest_cell", "d64_h32_caches_causal"),
        ("lengths.cells - lengths.slower : .0f", "75"),
        ("lengths.over_padded : .1f", "3.0"),
        ("h200 lengths.mean : .3f", "1.542"),
        ("h100 lengths.mean : .3f", "not measured"),
        ("lengths.d128_h16_ragged.v02.time_ms : .1f", "1.0"),
        ("lengths.d128_h16_4x4096.v02.tflops : .0f", "550"),
        (
            "lengths.d128_h16_ragged.varlen_attn.time_ms / lengths.d128_h16_ragged.v02.time_ms",
            "4.0",
        ),
        ("lengths.d128_h16_ragged_causal.padded_v01.time_ms : .1f", "3.0"),
        ("lengths.d128_h16_caches_causal.varlen_attn.time_ms : .1f", "missing"),
        ("lengths.d256_h8_one_long.v02.time_ms : .1f", "not measured"),
        ("lengths_backward.mean : .3f", "1.827"),
        ("lengths_backward.smallest : .1f", "1.5"),
        ("lengths_backward.smallest_cell", "d64_h32_window_127_causal"),
        ("lengths_backward.caches_mean : .1f", "not measured"),
        ("lengths_backward.d128_h16_4x4096.b02.tflops : .0f", "1374"),
        ("lengths_backward.d128_h16_ragged_causal.padded_b01.time_ms : .1f", "3.0"),
        ("lengths_backward.d256_h8_one_long.b02.time_ms : .1f", "not measured"),
        ("h100 lengths_backward.mean : .3f", "not measured"),
    ],
)
def test_expression(unchanged, expression, text):
    assert evaluate(expression, unchanged) == text


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("lengths", "does not read like 'lengths.mean' or 'lengths.d128_h16_ragged.v14.tflops'"),
        ("lengths.rong", "no 'rong'; there are cells, mean, smallest"),
        ("lengths.rong.v02.time_ms", "no 'rong'; there are d64_h32_4x4096, "),
        ("lengths.d128_h16_ragged.v03.time_ms", "no 'v03'; there are v02, flash_attention_3, "),
        ("lengths.d128_h16_ragged.v02.rong", "no 'rong'; there are time_ms, "),
        ("lengths_backward", "'lengths_backward.mean' or 'lengths_backward.d128_h16_ragged.b11.t"),
        ("lengths_backward.d256_h8_caches.b02.time_ms", "no 'd256_h8_caches'; there are d64_"),
    ],
)
def test_expression_that_means_nothing(unchanged, expression, told):
    with pytest.raises(UsageError) as error:
        evaluate(expression, unchanged)
    assert told in str(error.value)


def test_markers(record_set, tmp_path, monkeypatch):
    monkeypatch.setitem(REQUIRED_TABLES, "text.md", ())
    loaded, path = record_set(), tmp_path / "text.md"
    markers = (
        "table: lengths",
        "table: lengths h100",
        "= lengths.mean : .2f",
        "table: lengths_backward",
        "table: lengths_backward h100",
        "= lengths_backward.mean : .2f",
    )
    path.write_text("".join(f"<!-- {marker} --><!-- end -->" for marker in markers))
    filled = render(path, loaded, []).split("<!-- end -->")
    assert [text.split(" -->")[1].strip() for text in filled[:-1]] == [
        lengths_table.lengths(loaded),
        "not measured",
        "1.54",
        lengths_table.lengths(loaded, BACKWARD),
        "not measured",
        "1.83",
    ]
