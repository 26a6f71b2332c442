"""Packed sequences, windows and caches: cells, how they are measured, their record and table."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import varlen

from common.bench import lengths, peers, resumed, timing
from common.bench.peers import Peer, load_with_lengths
from common.catalog import all_steps
from common.errors import UsageError
from common.lengths import UNLIMITED, Lengths
from common.operation import FORWARD
from common.problem import GROUPS, LENGTHS, Sequences, Shape
from common.record_schema import LENGTHS_RECORD, find_error
from common.records import read_record, write_record
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
from common.runtime.gpu import GpuBackend
from verify.lengths import CaseLengths
from verify.reference import attention_reference
from verify.tests.fake_records import fake_lengths

V01, V02 = all_steps()[:2]
WITH_LENGTHS = [s for s in all_steps() if s.takes_lengths and s.operation == FORWARD][::-1]
RAGGED = Sequences("3 of 1 to 9", (4, 1, 9), (4, 1, 9), 4, 2, 64)
CAUSAL = replace(RAGGED, causal=True)
WINDOW = replace(RAGGED, window=(2, 3))
SLIDING = replace(CAUSAL, window=(3, UNLIMITED))
EQUAL = replace(RAGGED, seqlens_q=(5, 5), seqlens_k=(7, 7))
BATCH = replace(EQUAL, packed=False, window=(2, 0))
CACHE = replace(EQUAL, packed=False, causal=True, seqused_k=(5, 7))
NO_END = (UNLIMITED, UNLIMITED)
find_flash_attention_3 = peers._find_flash_attention_3


# ---- cells


def test_cells():
    assert 50 <= len(LENGTHS) <= 60
    groups = [sequences.group for sequences in LENGTHS.values()]
    assert {group: groups.count(group) for group in GROUPS} == {
        "packed": 36,
        "windows": 16,
        "caches": 4,
    }
    for name, each in LENGTHS.items():
        assert each.dtype == "bf16"
        assert name.startswith(f"d{each.head_dim}_h{each.heads}")
        assert name.endswith("_causal") == each.causal
        assert not each.seqused_k or len(each.seqused_k) == len(each.seqlens_k)
    assert {(each.head_dim, each.heads, each.kv_heads) for each in LENGTHS.values()} == {
        (64, 32, 32),
        (128, 16, 16),
        (128, 32, 8),
        (256, 8, 8),
    }
    # Drawn anew, they would not be those that were measured.
    assert LENGTHS["d64_h32_ragged"].seqlens_q[:4] == (650, 2431, 3571, 3386)
    assert LENGTHS["d128_h16_caches_causal"].seqused_k[:3] == (6369, 7697, 4699)
    assert LENGTHS["d128_h32_kv8_4x4096"].shape == Shape(1, 32, 8, 16384, 16384, 128)
    assert LENGTHS["d256_h8_caches_causal"].shape == Shape(8, 8, 8, 1024, 8192, 256)
    assert LENGTHS["d64_h32_window_1023_causal"].window == (1023, UNLIMITED)


def count_visible(sequences: Sequences) -> int:
    left, right = sequences.window
    total = 0
    for seq_q, seq_k in zip(
        sequences.seqlens_q, sequences.seqused_k or sequences.seqlens_k, strict=True
    ):
        for i in range(seq_q):
            own = i + seq_k - seq_q
            last = own + (min(right, 0) if sequences.causal else right)
            total += sum(own - left <= j <= last for j in range(seq_k))
    return total


def test_visible_pairs():
    assert RAGGED.visible == 16 + 1 + 81
    assert CAUSAL.visible == 10 + 1 + 45
    assert LENGTHS["d128_h16_1x16384_causal"].visible == 16384 * 16385 // 2
    assert WINDOW.flops == 4 * 4 * 64 * WINDOW.visible
    for each in (WINDOW, SLIDING, EQUAL, BATCH, CACHE):
        assert each.visible == count_visible(each)
    rng = random.Random(0)
    for _ in range(300):
        seqlens_q, seqlens_k = (tuple(rng.randint(0, 9) for _ in range(3)) for _ in range(2))
        window = tuple(rng.choice((UNLIMITED, 0, 1, 4, 20)) for _ in range(2))
        causal = rng.random() < 0.5
        each = Sequences("", seqlens_q, seqlens_k, 1, 1, 64, causal=causal, window=window)
        assert each.visible == count_visible(each), each


def test_what_a_record_says_of_sequences():
    assert SLIDING.as_record() == {
        "title": "3 of 1 to 9",
        "group": "windows",
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "causal": True,
        "packed": True,
        "visible": SLIDING.visible,
        "window": [3, None],
        "sequences": 3,
        "are_equal": False,
        "queries": 14,
        "keys": 14,
        "most_queries": 9,
        "most_keys": 9,
    }
    of_cache = CACHE.as_record()
    assert (of_cache["group"], of_cache["keys"], of_cache["most_keys"]) == ("caches", 12, 7)


def test_cases():
    case = lengths.case_of("ragged", SLIDING)
    assert case.shape == Shape(1, 4, 2, 14, 14, 64)
    assert case.lengths == CaseLengths((4, 1, 9), (4, 1, 9), None, 3, UNLIMITED)
    case = lengths.case_of("cache", CACHE)
    assert (case.shape, case.causal) == (Shape(2, 4, 2, 5, 7, 64), True)
    assert case.lengths == CaseLengths(None, None, (5, 7), *NO_END)


def test_steps():
    steps, padding = lengths.chosen_steps(all_steps())
    assert steps == WITH_LENGTHS
    assert padding.name == "v12"
    with pytest.raises(UsageError, match="nothing to measure: there is no step that takes lengths"):
        lengths.chosen_steps([V01])
    with pytest.raises(UsageError, match=r"there is no step that attention\(\) takes without"):
        lengths.chosen_steps(WITH_LENGTHS)


# ---- peers


def expected_of(sequences: Sequences):
    """Inputs as a cell's, its lengths, and o."""
    case = lengths.case_of("tiny", sequences)
    inputs = lengths._make_inputs(case, torch.device("cpu"))
    o, _ = attention_reference(*inputs, **case.arguments)
    return inputs, case.arguments["lengths"], o


def load(sequences: Sequences):
    inputs, given, o = expected_of(sequences)
    longest = (max(sequences.seqlens_q), max(sequences.seqlens_k))
    return load_with_lengths(*inputs, given, causal=sequences.causal, longest=longest), o


def packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, causal, window_size):
    """What the libraries compute, of tensors [total, heads, head_dim]."""
    sides = (UNLIMITED if side == -1 else side for side in window_size)
    given = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, *sides)
    assert all(x.is_contiguous() for x in (q, k, v))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    o, _ = attention_reference(q, k, v, causal=causal, softmax_scale=scale, lengths=given)
    return o[0].transpose(0, 1)


@pytest.fixture
def libraries(monkeypatch):
    """FlashAttention-3's operator and varlen_attn of some version, on the CPU."""

    def fwd(q, k, v, *, is_causal, window_size_left, window_size_right, seqused_k, **packed):
        window = (window_size_left, window_size_right)
        if not packed:
            batch, seq_q, _, _ = q.shape
            starts = [torch.arange(batch + 1, dtype=torch.int32) * x.shape[1] for x in (q, k)]
            flat = [x.flatten(0, 1) for x in (q, k, v)]
            o = packed_attention(*flat, *starts, seqused_k, is_causal, window)
            return o.unflatten(0, (batch, seq_q)), None
        longest = tuple(
            packed[f"cu_seqlens_{x}"].diff().max().item() == packed[f"max_seqlen_{x}"] for x in "qk"
        )
        assert longest == (True, True)
        starts = (packed["cu_seqlens_q"], packed["cu_seqlens_k"])
        return packed_attention(q, k, v, *starts, seqused_k, is_causal, window), None

    def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        assert (cu_seq_q.dtype, cu_seq_k.dtype) == (torch.int32, torch.int32)
        longest = tuple(x.diff().max().item() for x in (cu_seq_q, cu_seq_k))
        assert longest == (max_q, max_k)
        return packed_attention(q, k, v, cu_seq_q, cu_seq_k, None, False, window_size)

    ops = SimpleNamespace(flash_attn_3=SimpleNamespace(fwd=fwd))
    monkeypatch.setattr(torch, "ops", ops)
    monkeypatch.setattr(peers, "_find_flash_attention_3", lambda: peers._registered_ops("fake"))
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize("sequences", [RAGGED, CAUSAL, WINDOW, SLIDING, EQUAL, BATCH, CACHE])
def test_peers_compute_the_same(libraries, sequences):
    found, o = load(sequences)
    assert list(found) == ["flash_attention_3", "varlen_attn"]
    if sequences is CACHE:
        assert found.pop("varlen_attn").endswith("'s varlen_attn has no seqused_k")
    for peer in found.values():
        assert isinstance(peer, Peer), peer
        torch.testing.assert_close(peer.call(), o)
    assert found["flash_attention_3"].route == "fake"


def test_missing_peers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.delenv("FLASH_ATTN_3_LIB", raising=False)
    found, _ = load(RAGGED)
    assert all(isinstance(peer, str) for peer in found.values()), found


def test_flash_attn_interface(monkeypatch, libraries):
    """Each kind of lengths has a function there."""
    called = []

    def function(name):
        def call(q, k, v, **options):
            called.append((name, {key for key, each in options.items() if each is not None}))
            assert options["window_size"] == (-1, 0)
            return q, None  # as versions do that return lse, too

        return call

    names = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
    module = SimpleNamespace(**{name: function(name) for name in names})
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.delenv("FLASH_ATTN_3_LIB", raising=False)
    library = find_flash_attention_3()
    always = {"causal", "window_size"}
    packed = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    for sequences, name, options in (
        (CAUSAL, "flash_attn_varlen_func", packed),
        (replace(CACHE, seqused_k=None), "flash_attn_func", set()),
        (CACHE, "flash_attn_with_kvcache", {"cache_seqlens"}),
    ):
        inputs, given, _ = expected_of(sequences)
        tensors = [x.transpose(1, 2) for x in inputs]
        o = library.with_lengths(*tensors, given, True, (9, 9))
        assert o is tensors[0]
        assert called.pop() == (name, always | options)


# ---- measuring


class TorchBackend:
    """A stand-in for the GPU: what a step adds to the last row of the reference's o."""

    device = torch.device("cpu")

    def __init__(self, **errors: float) -> None:
        self.errors = errors

    def launch(self, step, *tensors, **arguments):
        inputs, outputs = tensors[:3], tensors[3:]
        for output, found in zip(outputs, attention_reference(*inputs, **arguments), strict=True):
            output.copy_(found)
        outputs[0][-1, -1, -1] += self.errors.get(step.name, 0.0)

    def refusal(self, step, spec):
        return None


@pytest.fixture
def timed(monkeypatch) -> list[dict]:
    """Every call takes 100 ms, varlen_attn 200; FlashAttention-3 is there where it is to be."""
    calls_timed = []

    def load_with_lengths(q, k, v, given, *, causal, longest):
        scale = q.shape[-1] ** -0.5
        o, _ = attention_reference(q, k, v, causal=causal, softmax_scale=scale, lengths=given)
        return {"flash_attention_3": "no such shape", "varlen_attn": Peer(lambda: o, "fake")}

    def time_interleaved(calls, *, rounds, warmup, sleep_cycles):
        calls_timed.append({"names": list(calls), "rounds": rounds, "warmup": warmup})
        return {name: [200.0 if name == "varlen_attn" else 100.0] * rounds for name in calls}

    monkeypatch.setattr(lengths, "load_with_lengths", load_with_lengths)
    monkeypatch.setattr(timing, "device_state", lambda: "not collected")
    monkeypatch.setattr(timing, "time_interleaved", time_interleaved)
    return calls_timed


def measure(sequences: Sequences, **errors: float) -> dict:
    case = lengths.case_of("tiny", sequences)
    return lengths.measure_cell(TorchBackend(**errors), [V02], V01, case, sequences)


def with_cell(cell: dict) -> dict:
    return fake_lengths(V02, V01) | {"cells": [cell]}


def test_measured_cell(timed):
    cell = measure(CAUSAL)
    assert find_error(with_cell(cell), LENGTHS_RECORD) is None
    assert (cell["name"], cell["title"], cell["group"]) == ("tiny", "3 of 1 to 9", "packed")
    attentions = cell["attentions"]
    assert list(attentions) == ["v02", "flash_attention_3", "varlen_attn", "padded_v01"]
    assert attentions["flash_attention_3"] == {"missing": "no such shape"}
    ours = attentions["v02"]
    assert ours["tflops"] == pytest.approx(CAUSAL.flops / 100e-3 / 1e12)
    assert (ours["time_ms"], ours["difference"]) == (100.0, 0.0)
    assert 0 <= attentions["padded_v01"]["difference"] < 0.01
    assert cell["routes"] == {"varlen_attn": "fake"}
    assert cell["slow"] == ["varlen_attn"]
    fast = ["v02", "padded_v01"]
    assert timed == [
        {"names": [*fast[:1], "varlen_attn", *fast[1:]], "rounds": 3, "warmup": 0},
        {"names": fast, "rounds": 10, "warmup": 3},
        {"names": ["varlen_attn"], "rounds": 10, "warmup": 3},
    ]


@pytest.mark.parametrize(
    ("sequences", "padded"),
    [(RAGGED, False), (EQUAL, True), (SLIDING, False), (BATCH, False), (CACHE, False)],
)
def test_padding_is_measured_where_it_changes_nothing(timed, sequences, padded):
    cell = measure(sequences)
    assert find_error(with_cell(cell), LENGTHS_RECORD) is None
    assert ("padded_v01" in cell["attentions"]) == padded
    assert "padded_v01" not in cell["attentions"] or (
        cell["attentions"]["padded_v01"]["difference"] < 0.01
    )


def test_a_batch_that_is_too_large_is_not_padded(timed, monkeypatch):
    bytes_padded = 2 * 3 * 9 * 64 * (2 * 4 + 2 * 2)
    monkeypatch.setattr(lengths, "MOST_PADDED_BYTES", bytes_padded)
    assert "missing" not in measure(CAUSAL)["attentions"]["padded_v01"]
    monkeypatch.setattr(lengths, "MOST_PADDED_BYTES", bytes_padded - 1)
    missing = measure(CAUSAL)["attentions"]["padded_v01"]
    assert missing == {"missing": "the padded batch takes 0 GB"}


@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_who_disagrees_with_the_others(timed, error):
    with pytest.raises(UsageError, match=r"v02 agrees with nobody on tiny: .*; varlen_attn: a row"):
        measure(CAUSAL, v02=error)
    cell = measure(CAUSAL, v01=error)
    assert cell["attentions"]["padded_v01"]["missing"].startswith("a row of its o differs by ")


def test_a_lone_step_is_not_believed(timed, monkeypatch):
    nobody = dict.fromkeys(("flash_attention_3", "varlen_attn"), "not installed")
    monkeypatch.setattr(lengths, "load_with_lengths", lambda *_, **__: nobody)
    assert "missing" not in measure(CAUSAL)["attentions"]["padded_v01"]
    with pytest.raises(UsageError, match="v02 agrees with nobody on tiny: flash_attention_3: not"):
        measure(SLIDING)


NAMES = list(LENGTHS)[:3]


@pytest.fixture
def measure_all(monkeypatch, tmp_path):
    """Measures three fake cells into tmp_path, as far as told; returns which were measured."""
    fake = fake_lengths(V02, V01)
    monkeypatch.setattr(lengths, "LENGTHS", {name: LENGTHS[name] for name in NAMES})
    monkeypatch.setattr(lengths, "GpuBackend", TorchBackend)
    monkeypatch.setattr(lengths, "build_all", lambda *_: None)
    monkeypatch.setattr(lengths, "versions", lambda: {"device": "NVIDIA H200"})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(resumed, "SAVE_SECONDS", -1.0)
    monkeypatch.setattr(resumed, "PROFILES_DIR", tmp_path / "profiles")
    monkeypatch.setattr(resumed, "BUILD_DIR", tmp_path / "build")

    def run(until: int = 3) -> list[str]:
        measured = []

        def measure_cell(backend, steps, padding, case, sequences):
            if len(measured) == until:
                raise KeyboardInterrupt
            assert sequences is LENGTHS[case.name]
            measured.append(case.name)
            return fake["cells"][0] | {"name": case.name}

        monkeypatch.setattr(lengths, "measure_cell", measure_cell)
        if until < 3:
            with pytest.raises(KeyboardInterrupt):
                lengths.measure_lengths()
        else:
            assert lengths.measure_lengths() == tmp_path / "profiles/h200/lengths.json"
        return measured

    return run


def test_record(measure_all, tmp_path, capsys):
    assert measure_all(until=2) == NAMES[:2]
    path = tmp_path / "profiles/h200/lengths.json"
    assert not path.exists()
    assert measure_all() == NAMES[2:]
    assert "going on after 2 of 3 cells" in capsys.readouterr().err
    record = read_record(path, LENGTHS_RECORD)
    assert [cell["name"] for cell in record["cells"]] == NAMES
    assert list(record["sources"]) == [*(step.name for step in WITH_LENGTHS), "v12"]
    assert record["dtype"] == "bf16"


def test_a_step_that_does_not_run_here_is_one_clear_line(measure_all, monkeypatch):
    told = "takes compute capability 9.0"
    monkeypatch.setattr(TorchBackend, "refusal", lambda *_: told)
    with pytest.raises(UsageError, match=rf"{WITH_LENGTHS[0].name} {told}"):
        lengths.measure_lengths()


# ---- the record and its table


@pytest.fixture
def record_set(tmp_path):
    """Loads the record set of a project with such a record of v02 and v01, changed as told."""

    def load(**changes) -> RecordSet:
        folder = tmp_path / "profiles" / "h200"
        write_record(folder / "lengths.json", fake_lengths(V02, V01) | changes)
        return load_record_set(folder, tmp_path)

    return load


def test_the_fake_record_is_one():
    assert find_error(fake_lengths(V02, V01), LENGTHS_RECORD) is None


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
        "cells": 55,
        "mean": pytest.approx((2**35 * 1.5**16 * 0.8**4) ** (1 / 55)),
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
        "over_padded": pytest.approx(3.0),
        "over_padded_equal": pytest.approx(1.25),
    }
    for cell in record["cells"]:
        cell["attentions"] = {"v02": cell["attentions"]["v02"]}
    alone = lengths_figures(record)
    assert (alone["cells"], alone["mean"], alone["windows_smallest"]) == (0, None, None)
    assert alone["over_padded"] is None


def test_rows(record_set):
    found = rows.lengths(record_set())
    assert len(found) == 18
    row = next(row for row in found if row["window"] == [1023, None])
    assert (row["causal"], row["group"]) == (True, "windows")
    by_heads = row["by_heads"]
    assert list(by_heads) == [
        "head_dim 64, 32 heads",
        "head_dim 128, 16 heads",
        "head_dim 128, 32/8 heads",
        "head_dim 256, 8 heads",
    ]
    flops = LENGTHS["d128_h16_window_1023_causal"].flops
    assert by_heads["head_dim 128, 16 heads"] == {
        "step": pytest.approx(flops / 1e9),
        "peer": pytest.approx(flops / 1.5e9),
        "name": "flash_attention_3",
        "ratio": 1.5,
    }


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
    firsts = [" | ".join(line.split(" | ")[:2]) for line in lines[2:20]]
    assert firsts[1] == "| 4 of 4096 | causal"
    assert "| 1000 of 1 to 100 | causal" in firsts
    assert firsts[12:] == [
        "| a batch of 1 of 16384 | causal, 127 before",
        "| a batch of 1 of 16384 | causal, 1023 before",
        "| a batch of 1 of 16384 | causal, 4095 before",
        "| a batch of 4 of 4096 | 256 before, 256 after",
        "| 16 of 100 to 4000 | causal, 511 before",
        "| a batch of 8 of 1024, on 1024 to 8192 keys | causal",
    ]
    assert lines[19].endswith("405 / 507, 0.800 × |")
    one_long = next(line for line in lines if "| 1 of 30000" in line)
    assert one_long.endswith("×** |  |")  # the cell that was skipped
    caption = lines[-1]
    for told in (
        "TFLOP/s of v02 / of the fastest peer, ",
        "v02 over the fastest peer: geometric mean of 55 cells 1.721 ×, smallest 0.800 × (d64_h32_",
        "; packed: geometric mean of 35 cells 2.000 ×, ",
        "; with windows: geometric mean of 16 cells 1.500 ×, ",
        "; on caches: geometric mean of 4 cells 0.800 ×, ",
        ". That is flash_attention_3 in 55 cells. v02 over v01 of a batch of the packed ",
        "hides the padding: geometric mean of 8 cells 3.000 ×, ",
        "there is no padding: geometric mean of 12 cells 1.250 ×, ",
        "NVIDIA H200, bf16; q, k and v normally distributed",
        "Peers: flash_attention_3: fake. Median of 3 interleaved rounds per cell, L2 flushed",
        "Missing: padded_v01 in 4 of 55 cells: the padded batch takes 15 GB; varlen_attn in 4 of ",
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
    changed = record_set(sources=sources)
    assert lengths_table.lengths(changed) == "stale"
    assert evaluate("lengths.mean", changed) == "stale"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("lengths.mean : .3f", "1.721"),
        ("lengths.packed_mean : .3f", "2.000"),
        ("lengths.windows_smallest : .1f", "1.5"),
        ("lengths.smallest_cell", "d64_h32_caches_causal"),
        ("lengths.cells - lengths.slower : .0f", "51"),
        ("lengths.over_padded : .1f", "3.0"),
        ("h200 lengths.mean : .3f", "1.721"),
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
    ],
)
def test_expression(record_set, expression, text):
    assert evaluate(expression, record_set()) == text


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("lengths", "does not read like 'lengths.mean' or 'lengths.d128_h16_ragged.v14.tflops'"),
        ("lengths.rong", "no 'rong'; there are cells, mean, smallest"),
        ("lengths.rong.v02.time_ms", "no 'rong'; there are d64_h32_4x4096, "),
        ("lengths.d128_h16_ragged.v03.time_ms", "no 'v03'; there are v02, flash_attention_3, "),
        ("lengths.d128_h16_ragged.v02.rong", "no 'rong'; there are time_ms, "),
    ],
)
def test_expression_that_means_nothing(record_set, expression, told):
    with pytest.raises(UsageError) as error:
        evaluate(expression, record_set())
    assert told in str(error.value)


def test_markers(record_set, tmp_path, monkeypatch):
    monkeypatch.setitem(REQUIRED_TABLES, "text.md", ())
    loaded, path = record_set(), tmp_path / "text.md"
    markers = ("table: lengths", "table: lengths h100", "= lengths.mean : .2f")
    path.write_text("".join(f"<!-- {marker} --><!-- end -->" for marker in markers))
    filled = render(path, loaded, []).split("<!-- end -->")
    here, other, number = (text.split(" -->")[1].strip() for text in filled[:-1])
    assert (here, other, number) == (lengths_table.lengths(loaded), "not measured", "1.72")


@pytest.mark.gpu
def test_small_cells_on_a_gpu(monkeypatch, tmp_path):
    names = ("d64_h32_tiny_causal", "d128_h16_window_256_256", "d128_h16_caches_causal")
    step = WITH_LENGTHS[0]
    if refusal := GpuBackend().refusal(step, lengths.case_of("", LENGTHS[names[0]]).specialization):
        pytest.skip(f"{step.name} {refusal}")
    for name in names[1:]:
        _, missing = peers_of(LENGTHS[name])
        if len(missing) == 2:
            pytest.skip(f"no peer for {name}: {missing}")
    monkeypatch.setattr(lengths, "LENGTHS", {name: LENGTHS[name] for name in names})
    monkeypatch.setattr(resumed, "PROFILES_DIR", tmp_path)
    monkeypatch.setattr(resumed, "BUILD_DIR", tmp_path)
    record = read_record(lengths.measure_lengths(), LENGTHS_RECORD)
    assert [cell["name"] for cell in record["cells"]] == list(names)
    for cell in record["cells"]:
        assert "missing" not in cell["attentions"][step.name]
    padded = record["cells"][0]["attentions"]["padded_v12"]
    assert 0 <= padded["difference"] < 0.01


def peers_of(sequences: Sequences) -> tuple[list[str], list[str]]:
    """Who is there, and who is missing, on a GPU."""
    case = lengths.case_of("", sequences)
    inputs = lengths._make_inputs(case, torch.device("cuda"))
    longest = (max(sequences.seqlens_q), max(sequences.seqlens_k))
    given = case.arguments_on("cuda")["lengths"]
    found = load_with_lengths(*inputs, given, causal=case.causal, longest=longest)
    there = [name for name, peer in found.items() if isinstance(peer, Peer)]
    return there, [name for name in found if name not in there]
