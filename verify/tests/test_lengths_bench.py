"""Packed sequences, windows and caches: how their cells are measured, and recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common import commands
from common.bench import comparison, lengths, resumed, timing
from common.bench.peers import Peer, load_with_lengths
from common.catalog import all_steps
from common.errors import UsageError
from common.operation import BACKWARD, FORWARD, Operation
from common.problem import LENGTHS, Sequences
from common.record_schema import LENGTHS_RECORD, find_error
from common.records import read_record, write_record
from common.runtime.gpu import GpuBackend
from verify.reference import attention_reference, oracle_of
from verify.tests.fake_records import fake_lengths
from verify.tests.lengths_measured import (
    B01,
    B02,
    BATCH,
    CACHE,
    CAUSAL,
    EQUAL,
    OPERATIONS,
    PADDING,
    RAGGED,
    SLIDING,
    V01,
    V02,
    WITH_LENGTHS,
)
from verify.tests.torch_backend import TorchBackend

# In place of the steps that a cell is measured with.
CHOSEN = {
    FORWARD: lengths.Chosen([V02], V01, V02),
    BACKWARD: lengths.Chosen([B02], B01, V02),
}


def test_difference_of_rows():
    """As many rows of a head as are told are compared as one; the last ones may be fewer."""
    expected = torch.ones(2, 3, 70, 16)
    other = expected.clone()
    other[1, 2, 4, 0] += 2.0
    assert comparison.difference_of(other, expected) == pytest.approx(0.5)
    assert comparison.difference_of(other, expected, 64) == pytest.approx(0.5 / 8)
    other[0, 0, 69, 0] += 2.0
    assert comparison.difference_of(other, expected, 64) == pytest.approx(0.5 / 6**0.5)
    assert comparison.difference_of(expected, expected, 64) == 0.0


@pytest.fixture
def timed(monkeypatch) -> list[dict]:
    """Every call takes 100 ms, varlen_attn 200; FlashAttention-3 is there where it is to be."""
    calls_timed = []

    def load_with_lengths(operation, inputs, given, *, causal, longest):
        scale = inputs[0].shape[-1] ** -0.5
        arguments = {"causal": causal, "softmax_scale": scale, "lengths": given}
        outputs = oracle_of(operation)(*inputs, **arguments)
        found = outputs[0] if operation == FORWARD else outputs
        return {"flash_attention_3": "no such shape", "varlen_attn": Peer(lambda: found, "fake")}

    def time_interleaved(calls, *, rounds, warmup, sleep_cycles):
        calls_timed.append({"names": list(calls), "rounds": rounds, "warmup": warmup})
        return {name: [200.0 if name == "varlen_attn" else 100.0] * rounds for name in calls}

    monkeypatch.setattr(lengths, "load_with_lengths", load_with_lengths)
    monkeypatch.setattr(timing, "device_state", lambda: "not collected")
    monkeypatch.setattr(timing, "time_interleaved", time_interleaved)
    return calls_timed


def measure(
    sequences: Sequences, operation: Operation = FORWARD, output: int = 0, **errors: float
) -> dict:
    case = lengths.case_of("tiny", sequences, operation)
    backend = TorchBackend(output, **errors)
    return lengths.measure_cell(backend, CHOSEN[operation], case, sequences)


def with_cell(cell: dict) -> dict:
    return fake_lengths(V02, V01) | {"cells": [cell]}


@OPERATIONS
def test_inputs(operation):
    case = lengths.case_of("tiny", CAUSAL, operation)
    inputs = lengths.make_inputs(TorchBackend(), V02, case)
    assert len(inputs) == len(operation.inputs)
    for operand, x in zip(operation.inputs, inputs, strict=True):
        assert (x.transpose(1, 2) if operand.strided else x).is_contiguous()
        assert x.dtype == (torch.bfloat16 if operand.strided else torch.float32)
    if operation == BACKWARD:
        saved = attention_reference(*inputs[:3], **case.arguments)
        for x, expected in zip(inputs[3:5], saved, strict=True):
            torch.testing.assert_close(x, expected.to(x.dtype))
        assert not torch.equal(inputs[5], inputs[0])


def test_measured_cell(timed):
    cell = measure(CAUSAL)
    assert find_error(with_cell(cell), LENGTHS_RECORD) is None
    assert (cell["name"], cell["title"], cell["group"]) == ("tiny", "3 of 1 to 9", "packed")
    attentions = cell["attentions"]
    assert list(attentions) == ["v02", "flash_attention_3", "varlen_attn", "padded_v01"]
    assert attentions["flash_attention_3"] == {"missing": "no such shape"}
    ours = attentions["v02"]
    assert ours["tflops"] == pytest.approx(CAUSAL.flops(2) / 100e-3 / 1e12)
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


def test_measured_cell_of_backward(timed):
    cell = measure(CAUSAL, BACKWARD)
    record = fake_lengths(B02, B01) | {"cells": [cell]}
    assert find_error(record, LENGTHS_RECORD) is None
    attentions = cell["attentions"]
    assert list(attentions) == ["b02", "flash_attention_3", "varlen_attn", "padded_b01"]
    ours = attentions["b02"]
    assert ours["tflops"] == pytest.approx(CAUSAL.flops(5) / 100e-3 / 1e12)
    assert (ours["time_ms"], ours["difference"]) == (100.0, 0.0)
    assert 0 < attentions["varlen_attn"]["difference"] < 0.01  # it has not been rounded to bf16
    assert 0 <= attentions["padded_b01"]["difference"] < 0.01
    assert cell["slow"] == ["varlen_attn"]


@pytest.mark.parametrize(
    ("sequences", "padded"),
    [(RAGGED, False), (EQUAL, True), (SLIDING, False), (BATCH, False)],
)
def test_padding_of_backward(timed, sequences, padded):
    attentions = measure(sequences, BACKWARD)["attentions"]
    assert ("padded_b01" in attentions) == padded
    assert "padded_b01" not in attentions or attentions["padded_b01"]["difference"] < 0.01


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
    # o, dout and three gradients more.
    monkeypatch.setattr(lengths, "MOST_PADDED_BYTES", 2 * bytes_padded)
    assert "missing" not in measure(CAUSAL, BACKWARD)["attentions"]["padded_b01"]
    monkeypatch.setattr(lengths, "MOST_PADDED_BYTES", 2 * bytes_padded - 1)
    assert "missing" in measure(CAUSAL, BACKWARD)["attentions"]["padded_b01"]


def test_steps_that_take_other_head_dims_are_left_out(timed, monkeypatch):
    """And so is the padded batch, where the step for it does not take the cell's."""
    narrow = replace(V02.limits, highest_head_dim=32)
    steps = [replace(V02, limits=narrow), replace(V02, name="v03")]
    monkeypatch.setitem(CHOSEN, FORWARD, lengths.Chosen(steps, replace(V01, limits=narrow), V02))
    attentions = measure(CAUSAL)["attentions"]
    assert list(attentions) == ["v03", "flash_attention_3", "varlen_attn", "padded_v01"]
    told = "takes head_dim 8 to 32 in multiples of 8, not 64"
    assert attentions["padded_v01"] == {"missing": told}


@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_who_disagrees_with_the_others(timed, error):
    with pytest.raises(UsageError, match=r"v02 agrees with nobody on tiny: .*; varlen_attn: a row"):
        measure(CAUSAL, v02=error)
    cell = measure(CAUSAL, v01=error)
    assert cell["attentions"]["padded_v01"]["missing"].startswith("a row of its o differs by ")


@pytest.mark.parametrize("error", [1.0, float("nan")])
@pytest.mark.parametrize(("output", "name"), [(0, "dq"), (1, "dk"), (2, "dv")])
def test_who_disagrees_in_a_gradient(timed, output, name, error):
    told = rf"b02 agrees with nobody on tiny: .*; varlen_attn: a part of its {name} differs by "
    with pytest.raises(UsageError, match=told):
        measure(CAUSAL, BACKWARD, output, b02=error)
    # The last row of the padded batch is one of the longest sequence's.
    missing = measure(CAUSAL, BACKWARD, output, b01=error)["attentions"]["padded_b01"]["missing"]
    assert missing.startswith(f"a part of its {name} differs by ")


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
    some = {name: LENGTHS[name] for name in NAMES}
    monkeypatch.setattr(lengths, "CELLS", dict.fromkeys((FORWARD, BACKWARD), some))
    monkeypatch.setattr(lengths, "GpuBackend", TorchBackend)
    monkeypatch.setattr(lengths, "build_all", lambda *_: None)
    monkeypatch.setattr(lengths, "versions", lambda: {"device": "NVIDIA H200"})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(resumed, "SAVE_SECONDS", -1.0)
    monkeypatch.setattr(resumed, "PROFILES_DIR", tmp_path / "profiles")
    monkeypatch.setattr(resumed, "BUILD_DIR", tmp_path / "build")

    def run(until: int = 3, operation: Operation = FORWARD) -> list[str]:
        measured = []

        def measure_cell(backend, chosen, case, sequences):
            if len(measured) == until:
                raise KeyboardInterrupt
            assert sequences is LENGTHS[case.name]
            assert case.operation == operation
            measured.append(case.name)
            return fake["cells"][0] | {"name": case.name}

        monkeypatch.setattr(lengths, "measure_cell", measure_cell)
        if until < 3:
            with pytest.raises(KeyboardInterrupt):
                lengths.measure_lengths(operation)
        else:
            path = tmp_path / "profiles/h200" / f"lengths{operation.suffix}.json"
            assert lengths.measure_lengths(operation) == path
        return measured

    return run


@OPERATIONS
def test_record(measure_all, tmp_path, capsys, operation):
    assert measure_all(2, operation) == NAMES[:2]
    path = tmp_path / "profiles/h200" / f"lengths{operation.suffix}.json"
    assert not path.exists()
    assert measure_all(3, operation) == NAMES[2:]
    assert "going on after 2 of 3 cells" in capsys.readouterr().err
    record = read_record(path, LENGTHS_RECORD)
    assert [cell["name"] for cell in record["cells"]] == NAMES
    names = [step.name for step in WITH_LENGTHS[operation]]
    assert list(record["sources"]) == [*names, PADDING[operation]]
    assert record["dtype"] == "bf16"


@OPERATIONS
def test_a_step_that_does_not_run_here_is_one_clear_line(measure_all, monkeypatch, operation):
    told = "takes compute capability 9.0"
    monkeypatch.setattr(TorchBackend, "refusal", lambda *_: told)
    with pytest.raises(UsageError, match=rf"{WITH_LENGTHS[operation][0].name} {told}"):
        lengths.measure_lengths(operation)


def test_command(monkeypatch, tmp_path, capsys):
    """Both operations are measured, and their tables shown."""
    fakes = {FORWARD: fake_lengths(V02, V01), BACKWARD: fake_lengths(B02, B01)}

    def measure_lengths(operation):
        path = tmp_path / "profiles/h200" / f"lengths{operation.suffix}.json"
        write_record(path, fakes[operation])
        return path

    monkeypatch.setattr(lengths, "measure_lengths", measure_lengths)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    monkeypatch.setattr(commands, "_require_gpu", lambda: None)
    monkeypatch.setattr(commands, "_report_regenerated", lambda: None)
    assert commands.bench_lengths() == 0
    out = capsys.readouterr().out
    told = (
        "recorded profiles/h200/lengths.json",
        "TFLOP/s of v02 / ",
        "recorded profiles/h200/lengths_backward.json",
        "TFLOP/s of b02 / ",
    )
    places = [out.index(each) for each in told]
    assert places == sorted(places)


SMALL = {
    FORWARD: ("d64_h32_tiny_causal", "d128_h16_window_256_256", "d128_h16_caches_causal"),
    BACKWARD: ("d64_h32_tiny_causal", "d128_h16_window_256_256", "d256_h8_ragged_causal"),
}


@pytest.mark.gpu
@OPERATIONS
def test_small_cells_on_a_gpu(monkeypatch, tmp_path, operation):
    names, chosen = SMALL[operation], lengths.chosen_steps(all_steps(), operation)
    step, first = chosen.steps[0], lengths.case_of("", LENGTHS[names[0]], operation)
    if refusal := GpuBackend().refusal(step, first.specialization):
        pytest.skip(f"{step.name} {refusal}")
    for name in names[1:]:
        _, missing = peers_of(LENGTHS[name], chosen, operation)
        if len(missing) == 2:
            pytest.skip(f"no peer for {name}: {missing}")
    monkeypatch.setitem(lengths.CELLS, operation, {name: LENGTHS[name] for name in names})
    monkeypatch.setattr(resumed, "PROFILES_DIR", tmp_path)
    monkeypatch.setattr(resumed, "BUILD_DIR", tmp_path)
    record = read_record(lengths.measure_lengths(operation), LENGTHS_RECORD)
    assert [cell["name"] for cell in record["cells"]] == list(names)
    for cell in record["cells"]:
        assert "missing" not in cell["attentions"][chosen.steps[-1].name]
    padded = record["cells"][0]["attentions"][f"padded_{PADDING[operation]}"]
    assert 0 <= padded["difference"] < comparison.MOST_DIFFERENCE


def peers_of(
    sequences: Sequences, chosen: lengths.Chosen, operation: Operation
) -> tuple[list[str], list[str]]:
    """Who is there, and who is missing, on a GPU."""
    case = lengths.case_of("", sequences, operation)
    inputs = lengths.make_inputs(GpuBackend(), chosen.saving, case)
    longest = (max(sequences.seqlens_q), max(sequences.seqlens_k))
    given = case.arguments_on("cuda")["lengths"]
    found = load_with_lengths(operation, inputs, given, causal=case.causal, longest=longest)
    there = [name for name, peer in found.items() if isinstance(peer, Peer)]
    return there, [name for name in found if name not in there]
