"""Kinds of inputs: their cells, how they are measured, and how their record is shown."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.bench import distributions
from common.bench.distributions import (
    cases_with,
    count_repairs,
    make_inputs,
    measure_inputs,
    read_shares,
    words_of,
)
from common.catalog import all_steps, find_step
from common.errors import UsageError
from common.operation import FORWARD
from common.paths import ROOT
from common.problem import DISTRIBUTIONS, INPUTS, NORMAL
from common.record_schema import DISTRIBUTIONS_RECORD, find_error
from common.records import read_record, write_record
from common.report import plots, tables
from common.report.expressions import evaluate
from common.report.markdown import REQUIRED_TABLES, regenerate
from common.report.record_set import RecordSet, load_record_set
from common.runtime.cpu import CpuBackend
from common.runtime.gpu import GpuBackend
from common.trained_inputs import TrainedInputs, write_trained
from verify import inputs
from verify.accuracy import expect
from verify.cases import BF16, FP16, Case, Shape
from verify.reference import attention_reference
from verify.tests.drawings import clashes, dots, texts
from verify.tests.fake_records import fake_distributions

V01, V02, V03 = all_steps()[:3]
TINY = Case("d64_causal_fp16_normal_4", Shape(1, 2, 2, 160, 160, 64), FP16, causal=True)
SMALL = Case("small", Shape(2, 4, 2, 700, 700, 64), BF16)
PATCHES = sorted((ROOT / "common" / "bench" / "repairs").glob("*.patch"))


@pytest.fixture
def record_set(tmp_path):
    """Loads the record set of a project that has a record of v01 and v02, changed as told."""

    def load(previous: dict | None = None, **changes) -> RecordSet:
        folder = tmp_path / "profiles" / "h200"
        write_record(folder / "distributions.json", fake_distributions(V01, V02) | changes)
        if previous:
            write_record(folder / "distributions_previous.json", previous)
        return load_record_set(folder, tmp_path)

    return load


def test_cells():
    cases = cases_with(None)
    assert len(cases) == 3 * 2 * 2 * 9
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        shape = case.shape
        assert (shape.batch, shape.seq_q, shape.seq_k) == (4, 4096, 4096)
        assert shape.heads * shape.head_dim == shape.kv_heads * shape.head_dim == 2048
        assert case.inputs is inputs.DISTRIBUTIONS[DISTRIBUTIONS[case.name][1]]
    assert {case.dtype for case in cases} == {BF16, FP16}


def test_cells_of_trained_inputs():
    """As they are kept, for every sequence of a batch that has as many rows as the other cells."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = kept = tuple(torch.randn(6, 1024, 64, generator=rng).bfloat16() for _ in range(3))
    *others, bf16, fp16 = cases_with(TrainedInputs(kept, "2000-01-01 a"))
    assert [case.name for case in others] == [case.name for case in cases_with(None)]
    assert (bf16.name, bf16.dtype) == ("d64_causal_bf16_trained", BF16)
    assert (fp16.name, fp16.dtype) == ("d64_causal_fp16_trained", FP16)
    shape = bf16.shape
    assert shape == Shape(85, 6, 6, 1024, 1024, 64)
    rows = {case.shape.batch * case.shape.heads * case.shape.seq_q for case in others[:1]}
    assert shape.batch * shape.heads * shape.seq_q == pytest.approx(rows.pop(), rel=0.01)
    for case in (bf16, fp16):
        assert case.causal
        tiny = replace(case, shape=replace(shape, batch=2))
        for x, y in zip(make_inputs(tiny, "cpu"), (q, k, v), strict=True):
            assert (x.dtype, x.is_contiguous()) == (case.dtype, True)
            assert torch.equal(x, y.to(case.dtype).expand(2, -1, -1, -1))


def test_all_kinds_of_inputs_are_defined():
    assert tuple(inputs.DISTRIBUTIONS) == INPUTS


def logits_of(kind: str, case: Case = SMALL) -> torch.Tensor:
    """[batch, heads, seq_q, seq_k]"""
    q, k, v = inputs.DISTRIBUTIONS[kind](case, torch.Generator().manual_seed(0))
    assert (q.shape, k.shape, v.shape) == (case.shape.q, case.shape.kv, case.shape.kv)
    assert v.std() == pytest.approx(1, abs=0.02)
    return case.scale * q @ k.repeat_interleave(2, dim=1).mT


@pytest.mark.parametrize(("kind", "std"), NORMAL.items())
@pytest.mark.parametrize("scale", [None, 0.03])
def test_standard_deviation_of_normal_logits(kind, std, scale):
    logits = logits_of(kind, replace(SMALL, softmax_scale=scale))
    assert logits.std().item() == pytest.approx(std, rel=0.02)
    assert abs(logits.mean().item()) < 0.1 * std


def test_later_keys_are_larger():
    logits = logits_of("later_keys_larger")
    assert logits[..., :256].std().item() == pytest.approx(2, rel=0.03)
    assert logits[..., 256:].std().item() == pytest.approx(8, rel=0.03)


def test_each_query_has_its_own_key():
    logits = logits_of("own_key")
    own = logits.diagonal(dim1=-2, dim2=-1)
    assert own.mean().item() == pytest.approx(2 * math.sqrt(64), rel=0.03)
    assert logits.std().item() == pytest.approx(4, rel=0.05)
    fewer = replace(SMALL, shape=replace(SMALL.shape, seq_q=100))
    own = logits_of("own_key", fewer).diagonal(offset=600, dim1=-2, dim2=-1)
    assert own.mean().item() == pytest.approx(2 * math.sqrt(64), rel=0.05)


def test_the_first_key_is_a_sink():
    logits = logits_of("first_key_sink")
    lead = logits[..., 0] - logits[..., 1:].amax(-1)
    assert lead.mean().item() == pytest.approx(17, abs=1)
    assert lead.min() > 5
    assert logits[..., 1:].std().item() == pytest.approx(1, rel=0.05)


def test_all_keys_are_equal():
    logits = logits_of("equal_keys")
    assert torch.equal(logits, logits[..., :1].expand_as(logits))
    assert logits.std().item() == pytest.approx(1, rel=0.1)


def test_inputs_are_those_of_a_call_and_the_same_again():
    case = replace(TINY, inputs=inputs.equal_keys)
    drawn = make_inputs(case, "cpu")
    assert all(x.dtype == FP16 and x.is_contiguous() for x in drawn)
    assert all(torch.equal(x, y) for x, y in zip(drawn, make_inputs(case, "cpu"), strict=True))


def descriptor(tile: int = 8, threads: int = 32 * 7) -> SimpleNamespace:
    """Of a workspace [batch, heads, seq_q in tiles], as launch.h describes it."""
    axes = [(0, 1), (1, 1), (3, tile), (0, 0)]
    shape = [SimpleNamespace(size=size, tile=each) for size, each in axes]
    return SimpleNamespace(
        workspace=[SimpleNamespace(shape=shape)], kernels=[SimpleNamespace(threads=threads)]
    )


def test_words_become_shares():
    """Of three work tiles: one rescaled by two warps, one redone, one left alone."""
    workspace = torch.full((3, 8), -1, dtype=torch.int32)
    workspace[:, :3] = torch.tensor([[1, 0, 1], [0, 0, 3], [0, 0, 0]])
    words = words_of(workspace.view(-1).view(torch.uint8), descriptor())
    assert words.shape == (3, 3)
    assert read_shares(words) == pytest.approx({"rescaled": 2 / 3, "redone": 1 / 3})


@pytest.mark.parametrize("word", [-1, 4])
def test_a_warp_that_says_nothing_is_named(word):
    words = torch.zeros(3, 12, dtype=torch.int32)
    words[2, 11] = word
    with pytest.raises(UsageError, match=f"^consumer warp 11 of work tile 2 wrote {word} and not"):
        read_shares(words)


class RepairingBackend:
    """A stand-in for the GPU: torch, whose every second work tile of 8 queries is rescaled."""

    device = torch.device("cpu")

    def __init__(self, needs: str | None = None, error: float = 0.0):
        self.needs, self.error = needs, error

    def refusal(self, step, spec):
        return self.needs

    def descriptor(self, step, spec):
        return descriptor()

    def launch(self, step, q, k, v, o, lse, *, causal, softmax_scale):
        result = attention_reference(q, k, v, causal=causal, softmax_scale=softmax_scale)
        o.copy_(result[0] + self.error)
        lse.copy_(result[1])
        words = torch.full((*q.shape[:2], q.shape[2] // 8, 8), -1, dtype=torch.int32)
        words[..., :3] = 0
        words[:, :, ::2, 1] = 1
        return [words.view(-1).view(torch.uint8)]


def test_a_wrong_step_is_not_timed(without_a_gpu):
    with pytest.raises(UsageError, match="v01 is wrong on d64_causal_fp16_normal_4"):
        measure_inputs(RepairingBackend(error=0.1), [V01, V02], TINY, None)


def test_repairs_of_a_wrong_kernel_are_not_counted():
    drawn = make_inputs(TINY, "cpu")
    expected = expect(TINY, *drawn)
    assert count_repairs(RepairingBackend(), V03, TINY, drawn, expected) == {
        "rescaled": 0.5,
        "redone": 0.0,
    }
    with pytest.raises(UsageError, match="v03 with its patch is wrong on d64_causal_fp16_normal_4"):
        count_repairs(RepairingBackend(error=0.1), V03, TINY, drawn, expected)


def test_measured_cell(without_a_gpu):
    case = replace(TINY, inputs=inputs.DISTRIBUTIONS["normal_4"])
    count = partial(count_repairs, RepairingBackend(), V02)
    cell = measure_inputs(RepairingBackend(), [V01, V02], case, count)
    record = fake_distributions(V01, V02) | {"cells": [cell]}
    assert find_error(record, DISTRIBUTIONS_RECORD) is None
    assert (cell["dtype"], cell["inputs"]) == ("fp16", "normal_4")
    assert list(cell["tflops"]) == ["v01", "v02", "sdpa_cudnn", "sdpa_flash"]
    assert (cell["rescaled"], cell["redone"]) == (0.5, 0.0)


@pytest.mark.parametrize("count", [None, partial(count_repairs, RepairingBackend("sm_90a"), V02)])
def test_cell_without_repairs(without_a_gpu, count):
    cell = measure_inputs(RepairingBackend(), [V01, V02], TINY, count)
    record = fake_distributions(V01, V02) | {"cells": [cell]}
    assert find_error(record, DISTRIBUTIONS_RECORD) is None
    assert (cell["rescaled"], cell["redone"]) == (None, None)


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Writes a record of fake cells in tmp_path; returns its path and what was built."""
    fake = fake_distributions(V01, V02)["cells"][0]
    built = []
    backend = SimpleNamespace(device="cuda")
    monkeypatch.setattr(distributions, "GpuBackend", lambda poison=False: backend)
    monkeypatch.setattr(distributions, "build_all", lambda backend, steps, _: built.extend(steps))
    monkeypatch.setattr(distributions, "versions", lambda: {"device": "NVIDIA H200"})
    monkeypatch.setattr(
        distributions,
        "measure_inputs",
        lambda backend, steps, case, count: fake | {"name": case.name},
    )
    monkeypatch.setattr(distributions, "PROFILES_DIR", tmp_path)
    return lambda: (distributions.measure_distributions(), built)


def read(path: Path) -> dict | None:
    return read_record(path, DISTRIBUTIONS_RECORD)


def test_record(measure, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(distributions, "repairs_patch", lambda step: tmp_path / "none.patch")
    path, built = measure()
    assert path == tmp_path / "h200" / "distributions.json"
    record = read(path)
    general = [step.name for step in all_steps() if step.is_general]
    assert list(record["sources"]) == [name for name in general if name >= "v09"]
    assert [step.name for step in built] == list(record["sources"])
    assert record["repairs"] is None
    assert [cell["name"] for cell in record["cells"]] == list(DISTRIBUTIONS)[:-2]
    assert record["trained"] is None
    (note,) = capsys.readouterr().err.splitlines()
    missing = tmp_path / "h200" / "trained.npz"
    assert note == f"note: trained inputs are left out, no {missing}: make train first"
    write_record(path, record | {"driver": "first"})
    measure()
    assert read(path.with_name("distributions_previous.json"))["driver"] == "first"
    assert "driver" not in read(path)


def test_trained_inputs_are_measured_where_they_are(measure, tmp_path, capsys):
    x = torch.zeros(6, 1024, 64, dtype=BF16)
    write_trained(tmp_path / "h200" / "trained.npz", TrainedInputs((x, x, x), "2000-01-01 a"))
    path, _ = measure()
    record = read(path)
    assert [cell["name"] for cell in record["cells"]] == list(DISTRIBUTIONS)
    assert record["trained"] == "2000-01-01 a"
    assert not capsys.readouterr().err
    (tmp_path / "h200" / "trained.npz").write_bytes(b"")
    with pytest.raises(UsageError, match=r"trained\.npz cannot be read"):
        measure()


def add_patch(folder: Path, name: str) -> Path:
    """A patch of a step that changes its code."""
    step = find_step(name).path
    source = f"steps/{step.name}"
    line = next(line for line in step.read_text().splitlines() if line.startswith("#include"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.patch"
    added = "+constexpr int ADDED = 1;"
    path.write_text(f"--- a/{source}\n+++ b/{source}\n@@ -1 +1,2 @@\n {line}\n{added}\n")
    return path


def test_repairs_are_those_of_the_last_step_with_a_patch(measure, monkeypatch, tmp_path):
    """It is compiled like the steps before anything is measured."""
    path = add_patch(tmp_path, "v09")
    monkeypatch.setattr(distributions, "repairs_patch", lambda step: path.with_stem(step.name))
    written, built = measure()
    repairs = read(written)["repairs"]
    assert repairs["step"] == "v09"
    assert repairs["code_sha256"] == built[-1].code_sha256 != find_step("v09").code_sha256


def test_patches_of_one_name_do_not_overwrite_each_other(tmp_path):
    one, other = (find_step(add_patch(tmp_path / folder, "v09")) for folder in ("one", "other"))
    assert one.path != other.path


@pytest.fixture
def repaired(record_set, tmp_path):
    """A record set whose record counts the repairs of v02 as it is patched now."""
    path = add_patch(tmp_path / "common" / "bench" / "repairs", "v02")
    sha256 = find_step(path).code_sha256
    return lambda **changes: record_set(
        **{"repairs": {"step": "v02", "code_sha256": sha256}} | changes
    )


def test_table(repaired):
    lines = tables.distributions(repaired()).splitlines()
    assert lines[0] == (
        "| Inputs | dtype | Mask | D 64: v02 (v01) | D 64: rescaled, redone | D 128: v02 (v01) | "
        "D 128: rescaled, redone | D 256: v02 (v01) | D 256: rescaled, redone |"
    )
    assert lines[2] == "| `normal_1` | bf16 | none |" + 3 * " 0.312 × (0.156) | 25 %, < 1 % |"
    assert len(lines) == 2 + 9 * 4 + 2
    assert [line.split("|")[1].strip(" `") for line in lines[2::4][:9]] == list(INPUTS)
    caption = lines[-1]
    assert caption.startswith(
        "v02 over the fastest peer: geometric mean of 108 cells 0.312 ×, smallest 0.312 × "
        "(d64_bf16_normal_1). NVIDIA H200; batch 4, N 4096, 2048 / D heads. Rescaled and redone:"
    )
    assert "counted in v02. " in caption
    assert "Median of 3 interleaved rounds" in caption
    assert "throttle reasons after: none" in caption
    assert "In the run before" not in caption


def test_table_of_trained_inputs(repaired):
    """A row for each dtype, with a head dimension and a mask; their shape is below."""
    record = fake_distributions(V01, V02, trained=True)
    text = tables.distributions(repaired(cells=record["cells"]))
    without = tables.distributions(repaired()).splitlines()
    lines = text.splitlines()
    assert lines[-4:-2] == [
        f"| `trained` | {dtype} | causal | 0.312 × (0.156) | 25 %, < 1 % |  |  |  |  |"
        for dtype in ("bf16", "fp16")
    ]
    assert lines[:-4] == without[:-2]
    assert "geometric mean of 110 cells" in lines[-1]
    assert "one head of each layer, 85 × 6 × 1024. Median of 3" in lines[-1]
    assert "trained" not in without[-1]


def test_table_of_faster_and_missing_cells(record_set):
    first, second, *others = fake_distributions(V01, V02)["cells"]
    first |= {"tflops": first["tflops"] | {"v02": 704.0}}
    second |= {"tflops": second["tflops"] | {"v02": {"missing": "too large"}}}
    rows = tables.distributions(record_set(cells=[first, second, *others])).splitlines()
    assert rows[2].startswith("| `normal_1` | bf16 | none | **1.100 ×** (0.156) | 0.312 × (")
    assert rows[6].startswith("| `normal_2` | bf16 | none | missing (0.156) | 0.312 × (")


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (0.001, "< 1 %"), (0.25, "25 %"), (0.999, "> 99 %"), (1, "100 %")],
)
def test_shares_do_not_round_to_none_or_all(repaired, share, text):
    cells = [cell | {"redone": share} for cell in fake_distributions(V01, V02)["cells"]]
    assert f"| 25 %, {text} |" in tables.distributions(repaired(cells=cells))


def test_run_before_is_told_below_the_table(record_set):
    previous = fake_distributions(V01, V02)
    for cell in previous["cells"]:
        cell["tflops"] = cell["tflops"] | {"v02": 320.0}
    told = (
        "In the run before, of the same sources: geometric mean of 108 cells 0.500 ×, smallest "
        "0.500 × (d64_bf16_normal_1)."
    )
    assert told in tables.distributions(record_set(previous))


def test_changed_step_is_called_stale(record_set):
    sources = fake_distributions(V01, V02)["sources"]
    sources["v02"]["code_sha256"] = "0" * 64
    changed = record_set(sources=sources)
    assert "| D 64: v02 (stale) (v01) |" in tables.distributions(changed)
    assert "v02 (stale), causal" in plots.render_plots(changed)["distributions.svg"]
    told = evaluate("distributions.d64_bf16_normal_1.v02", changed)
    assert told == "stale"


def test_shares_of_another_patch_are_not_shown(repaired, record_set, tmp_path):
    expression = "distributions.d64_bf16_normal_1.rescaled : .0%"
    assert evaluate(expression, repaired()) == "25%"
    for changed in (
        repaired(repairs={"step": "v02", "code_sha256": "0" * 64}),
        repaired(repairs={"step": "v01", "code_sha256": V01.code_sha256}),  # which has no patch
    ):
        assert evaluate(expression, changed) == "not measured"
        text = tables.distributions(changed)
        assert "%" not in text
        assert "How many work tiles were rescaled or done again: not measured." in text


def test_without_a_record(tmp_path):
    nothing = load_record_set(tmp_path, tmp_path)
    assert tables.distributions(nothing) == "not measured"
    assert evaluate("distributions.d64_bf16_normal_1.v10", nothing) == "not measured"
    assert evaluate("distributions.d64_bf16_normal_1.redone", nothing) == "not measured"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("distributions.d64_bf16_normal_1.v01 : .0f", "100"),
        ("distributions.d64_causal_fp16_own_key.sdpa_flash", "160.0"),
        (
            "distributions.d64_bf16_normal_1.v02 / distributions.d64_bf16_normal_1.sdpa_flash",
            "1.25",
        ),
        (
            "distributions.d64_bf16_normal_1.v02 / distributions.d64_bf16_normal_2.v02",
            "not measured together",
        ),
        ("distributions.d64_bf16_normal_1.sdpa_math", "missing"),
        ("distributions.d64_bf16_normal_1.v03", "not measured"),
        ("distributions.d64_bf16_normal_1.v02.error", "0.002"),
    ],
)
def test_expression(record_set, expression, text):
    assert evaluate(expression, record_set()) == text


@pytest.mark.parametrize(
    "expression",
    [
        "distributions",
        "distributions.d64_bf16_normal_1",
        "distributions.d64_4096.v01",
        "distributions.d64_bf16_normal_1.v99",
        "distributions.d64_bf16_normal_1.rescaled.error",
    ],
)
def test_expression_that_means_nothing(record_set, expression):
    with pytest.raises(UsageError):
        evaluate(expression, record_set())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sources": {"v01": {}}}, "sources: v01 has no code_sha256"),
        ({"repairs": {"step": "v02"}}, "repairs cannot be"),
        ({"cells": []}, "cells cannot be"),
        ({"rescaled": 1.5}, "cells cannot be"),
        ({"redone": "0"}, "cells cannot be"),
        ({"inputs": 4}, "cells cannot be"),
    ],
)
def test_malformed_record_is_named_with_what_is_wrong(record_set, change, told):
    if not change.keys() & {"sources", "repairs", "cells"}:
        change = {"cells": [fake_distributions(V01, V02)["cells"][0] | change]}
    with pytest.raises(UsageError, match=re.escape(f"distributions.json: the record: {told}")):
        record_set(**change)


def test_plot(record_set):
    """A panel for each dtype and head dimension, a row for each kind of inputs."""
    svg = plots.render_plots(record_set())["distributions.svg"]
    assert not clashes(svg)
    found = [text.text for text in texts(svg)]
    for name in ("bf16", "fp16"):
        assert found.count(name) == 1
    assert [text for text in found if text.startswith("D ")] == ["D 64", "D 128", "D 256"] * 2
    legend = ["v02, no mask", "v02, causal mask", "v01, no mask", "v01, causal mask"]
    assert found[1:5] == legend
    assert found.count("logits of std 16") == found.count("later keys larger") == 2
    rows: dict[float, list[float]] = {}
    for x, y, _ in dots(svg):
        rows.setdefault(y, []).append(x)
    _, *shown = rows.values()
    assert len(shown) == 2 * len(INPUTS)
    places = {tuple(sorted({*row})) for row in shown}
    assert len(places) == 1  # all rates are the same
    ((first, second, *_),) = places
    tick = next(text for text in texts(svg) if text.text == "0")
    zero = tick.left + tick.width / 2
    assert second - zero == pytest.approx(2 * (first - zero), rel=0.02)  # 100 and 200 TFLOP/s


def test_plot_of_trained_inputs(record_set):
    """A row more, of another length than the title's, and in one panel for each dtype."""
    cells = fake_distributions(V01, V02, trained=True)["cells"]
    svg = plots.render_plots(record_set(cells=cells))["distributions.svg"]
    assert not clashes(svg)
    labels = [text for text in texts(svg) if text.text == "trained, N = 1024"]
    assert len(labels) == 2
    assert min(text.left for text in labels) > 0
    for text in labels:
        shown = [x for x, y, _ in dots(svg) if text.top < y < text.bottom]
        assert len(shown) == 2  # of both steps, under one mask


def test_check_finds_an_edit_of_table_and_plot(record_set, tmp_path):
    record_set()
    required = REQUIRED_TABLES["worklog.md"]
    tables_ = "".join(f"<!-- table: {name} --><!-- end -->\n" for name in required)
    (tmp_path / "README.md").write_text(tables_)
    (tmp_path / "worklog.md").write_text(tables_)
    plot, page = "profiles/h200/distributions.svg", "worklog.md"
    assert {plot, page} <= set(regenerate(tmp_path))
    for name, old in ((page, "0.312 × (0.156)"), (plot, "std 16")):
        text = (tmp_path / name).read_text()
        assert old in text
        (tmp_path / name).write_text(text.replace(old, "better", 1))
        assert regenerate(tmp_path, check=True) == [name]
        assert regenerate(tmp_path) == [name]
        assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_the_patched_step_counts_its_repairs(patch):
    """Every consumer warp writes its word: where it has rows and where it has none, and no other.

    Logits that stay where the first tile put them need no repair; rising ones do.
    """
    patched, backend = find_step(patch), CpuBackend()
    shape = Shape(1, 4, 2, 500, 600, 64)
    found = []
    for kind in (inputs.DISTRIBUTIONS["equal_keys"], inputs.rising_logits):
        case = Case("repairs", shape, FP16, inputs=kind)
        tensors = case.make("cpu")
        found.append(count_repairs(backend, patched, case, tensors, expect(case, *tensors)))
    assert found[0] == {"rescaled": 0, "redone": 0}
    assert found[1]["rescaled"] > 0


@pytest.mark.gpu
def test_tiny_cell_on_a_gpu(monkeypatch):
    steps = [step for step in all_steps() if step.operation is FORWARD][-2:]
    backend = GpuBackend()
    monkeypatch.setitem(DISTRIBUTIONS, "tiny", (TINY.problem, "normal_4"))
    case = replace(TINY, name="tiny", inputs=inputs.DISTRIBUTIONS["normal_4"])
    patched = distributions.patched_step(steps)
    count = patched and partial(count_repairs, GpuBackend(poison=True), patched)
    cell = measure_inputs(backend, steps, case, count)
    fake = fake_distributions(V01, V02)
    assert find_error(fake | {"cells": [cell]}, DISTRIBUTIONS_RECORD) is None
    assert isinstance(cell["tflops"]["sdpa_flash"], float)
