"""`make train`: the text, the model, two trainings side by side, their record, plot and numbers."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from common import UsageError, commands
from common.__main__ import main
from common.bench import train as train_module
from common.bench.corpus import cut, draw, read_corpus, read_text
from common.bench.gpt import GPT, Size
from common.bench.train import PLAN, TINY_PLAN, TINY_TEXT, measure_training, try_training
from common.bench.trainer import Training, require_agreement, train
from common.paths import ROOT
from common.problem import TRAINED_SHAPE
from common.record_schema import TRAIN_RECORD
from common.records import read_record, write_record
from common.report import terminal
from common.report.expressions import evaluate
from common.report.plots import render_plots
from common.report.record_set import RecordSet, load_record_set
from common.runtime.cpu import CpuBackend
from common.trained_inputs import TrainedInputs, read_trained, write_trained
from verify.tests.drawings import clashes, dots, texts
from verify.tests.fake_records import B_STEP, ROWS_STEP, V_STEP, fake_training

SDPA = partial(scaled_dot_product_attention, is_causal=True)
CPU = torch.device("cpu")
TEXT = torch.arange(2000).remainder(97).to(torch.uint8)


@pytest.fixture
def record_set(tmp_path):
    """Loads the record set of a project with a record of a training, changed as given."""

    def load(steps: int = 8, **changes) -> RecordSet:
        folder = tmp_path / "profiles" / "h200"
        write_record(folder / "train.json", fake_training(V_STEP, B_STEP, steps) | changes)
        return load_record_set(folder, tmp_path)

    return load


def write_files(root: Path, **files: str) -> None:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_text_is_that_of_tracked_files(tmp_path):
    write_files(tmp_path, a_py="a" * 60, b__c_cu="c" * 40, d_json="{}", e_md="not tracked")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "add", "a.py", "b/c.cu", "d.json"], check=True)
    corpus = read_corpus(tmp_path)
    everything = bytes(torch.cat((corpus.learned, corpus.held_out)).tolist())
    assert everything in (b"a" * 60 + b"c" * 40, b"c" * 40 + b"a" * 60)
    assert len(corpus.held_out) == 5
    assert {**corpus.as_record(), "sha256": ""} == {
        "files": 2,
        "bytes": 100,
        "held_out": 5,
        "sha256": "",
    }


def test_text_without_git_is_that_of_all_files_but_what_was_built(tmp_path):
    files = {"a_py": "a", "b__c_cu": "c", "build__d_cu": "d", "_venv__e_py": "e", "f_txt": "f"}
    write_files(tmp_path, **files)
    corpus = read_corpus(tmp_path)
    assert sorted(bytes(corpus.learned.tolist())) == sorted(b"ac")


def test_text_of_the_repository_is_enough():
    corpus = read_corpus(ROOT)
    assert len(cut(corpus.held_out, PLAN.held_out, PLAN.size.context + 1)) == PLAN.held_out


def test_sequences_of_a_text():
    rng = torch.Generator().manual_seed(0)
    drawn = draw(TEXT, 300, 1990, rng)
    assert drawn.shape == (300, 1990)
    assert {*drawn[:, 0].tolist()} == {*range(11)}  # every place where as many bytes follow
    assert torch.equal(drawn[7], TEXT[drawn[7, 0] :][:1990].long())
    parts = cut(TEXT, 5, 600)
    assert torch.equal(parts, TEXT[:1800].view(3, 600).long())


def test_model_is_drawn_from_the_seed_and_looks_back_only():
    size = Size(layers=2, heads=2, head_dim=8, context=12)
    model = GPT(size, seed=1)
    text = TEXT[None, :12].long()
    logits = model(text, SDPA)
    assert logits.shape == (1, 12, 256)
    assert torch.equal(logits, GPT(size, seed=1)(text, SDPA))
    assert not torch.equal(logits, GPT(size, seed=2)(text, SDPA))
    changed = text.clone()
    changed[0, 7] += 1
    same = (model(changed, SDPA) - logits).abs().amax(-1)[0] < 1e-6
    assert same.tolist() == [True] * 7 + [False] * 5


def test_attention_sees_distances_not_places():
    """Rotary positions: the same text later in a sequence has the same logits between its bytes."""
    size = Size(layers=1, heads=1, head_dim=8, context=24)
    seen = []

    def attention(q, k, v):
        seen.append(q @ k.mT)
        return SDPA(q, k, v)

    GPT(size, seed=0)(TEXT[None, :12].long().repeat(1, 2), attention)
    (scores,) = seen
    torch.testing.assert_close(scores[..., :12, :12], scores[..., 12:, 12:])
    assert not torch.allclose(scores[..., :12, :12], scores[..., 12:, :12])


def test_a_model_learns():
    plan = replace(TINY_PLAN, steps=30, warmup=3, learning_rate=1e-2)
    training = Training(plan, SDPA, CPU)
    before = training.mean_loss([TEXT[None, :33].long()])
    train(plan, {"sdpa": training}, TEXT)
    assert len(training.losses) == len(training.step_ms) == 30
    assert training.losses[-1] < training.losses[0] - 1.5
    assert training.mean_loss([TEXT[None, :33].long()]) < before - 1.5


def test_learning_rate():
    rates = [PLAN.rate(step) for step in range(PLAN.steps + 1)]
    assert rates[0] == pytest.approx(1 / PLAN.warmup, rel=0.01)
    assert max(rates) == rates[PLAN.warmup - 1] == pytest.approx(1, rel=0.01)
    assert rates[-1] == pytest.approx(0.1)


def test_trainings_learn_the_same_batches_in_both_orders():
    learned = []

    class Recorder:
        losses = (1.0,)

        def __init__(self, name):
            self.name = name

        def step(self, sequences):
            learned.append((self.name, sequences))

    plan = replace(TINY_PLAN, steps=2)
    train(plan, {name: Recorder(name) for name in "ab"}, TEXT)
    assert [name for name, _ in learned] == ["a", "b", "b", "a"]
    first, same, second, _ = (sequences for _, sequences in learned)
    assert first.shape == (plan.batch, plan.size.context + 1)
    assert first is same
    assert not torch.equal(first, second)


def test_heads_are_those_that_attention_gets():
    """Of layer i head i, with positions, in bf16."""
    given = []

    def attention(q, k, v):
        given.append((q, k, v))
        return SDPA(q, k, v)

    training = Training(TINY_PLAN, attention, CPU)
    tensors = training.heads(TEXT[None, :33].long())
    for n, x in enumerate(tensors):
        assert (x.shape, x.dtype) == ((2, 32, 16), torch.bfloat16)
        for layer in range(2):
            assert torch.equal(x[layer], given[layer][n][0, layer].bfloat16())


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        ([4.0, 3.0, 2.0], None),
        ([4.1, 2.91, 2.0], None),
        ([4.0, 3.0, 2.3], "over steps 2 to 3 that of ours is 2.6500, that of sdpa 2.5000, 6.00%"),
        ([4.0, float("nan"), 2.0], "over steps 1 to 2 that of ours is nan"),
    ],
)
def test_losses_that_drift_apart_are_an_error(ours, told):
    plan = replace(PLAN, window=2)
    losses = {"ours": ours, "sdpa": [4.0, 3.0, 2.0]}
    if told is None:
        require_agreement(plan, losses)
    else:
        with pytest.raises(UsageError, match=f"^the losses drift apart: {re.escape(told)}"):
            require_agreement(plan, losses)


def test_tiny_training_agrees_with_torch():
    """Through forward and backward steps on the SIMT runtime."""
    losses = try_training()
    require_agreement(TINY_PLAN, losses)
    assert [len(each) for each in losses.values()] == [TINY_PLAN.steps] * 2
    assert losses["ours"] != losses["sdpa"]


@pytest.mark.parametrize("lost", ["q", "k", "v"])
def test_tiny_training_needs_every_gradient(lost):
    def attention(q, k, v):
        given = {"q": q, "k": k, "v": v}
        given[lost] = given[lost].detach()
        return SDPA(*given.values())

    trainings = {
        name: Training(TINY_PLAN, each, CPU) for name, each in (("ours", attention), ("sdpa", SDPA))
    }
    train(TINY_PLAN, trainings, read_text([TINY_TEXT]))
    with pytest.raises(UsageError, match="the losses drift apart: over step "):
        require_agreement(TINY_PLAN, {name: each.losses for name, each in trainings.items()})


@pytest.fixture
def without_a_gpu(monkeypatch, tmp_path, tiny_corpus):
    """Measures the tiny training on the CPU, into tmp_path."""
    monkeypatch.setattr(train_module, "read_corpus", lambda _: tiny_corpus)
    monkeypatch.setattr(train_module, "GpuBackend", CpuBackend)
    monkeypatch.setattr(train_module, "PLAN", replace(TINY_PLAN, window=2))
    monkeypatch.setattr(train_module, "build_all", lambda *_: None)
    monkeypatch.setattr(train_module, "versions", lambda: {"device": "NVIDIA H200"})
    monkeypatch.setattr(train_module, "device_state", lambda: "not collected")
    monkeypatch.setattr(train_module, "peak_memory", lambda call: (call(), 1000))
    monkeypatch.setattr(train_module, "PROFILES_DIR", tmp_path)


def test_record(without_a_gpu, tmp_path):
    path = measure_training()
    assert path == tmp_path / "h200" / "train.json"
    record = read_record(path, TRAIN_RECORD)
    assert list(record["sources"]) == [ROWS_STEP.name, B_STEP.name]
    ours, sdpa = record["ours"], record["sdpa"]
    assert ours["route"] == f"{ROWS_STEP.name} and {B_STEP.name}"
    assert sdpa["route"].startswith(f"torch {torch.__version__}, ")
    assert ours["loss"] == pytest.approx(sum(record["losses"]["ours"][-2:]) / 2)
    assert ours["held_out_loss"] == pytest.approx(sdpa["held_out_loss"], rel=0.002)
    assert (ours["peak_memory_bytes"], len(record["step_ms"]["sdpa"])) == (1000, TINY_PLAN.steps)
    assert record["config"]["parameters"] == 2 * 256 * 32 + 2 * (12 * 32**2 + 2 * 32) + 32
    with np.load(tmp_path / "h200" / "trained.npz") as kept:
        assert kept["q"].shape == (2, 32, 16)
        assert str(kept["run"]) == record["run"]


@pytest.mark.gpu
def test_record_of_a_tiny_training_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(train_module, "PLAN", TINY_PLAN)
    monkeypatch.setattr(train_module, "PROFILES_DIR", tmp_path)
    path = measure_training()
    record = read_record(path, TRAIN_RECORD)
    assert record["ours"]["peak_memory_bytes"] > 0
    assert path.with_name("trained.npz").is_file()


def test_trainings_that_drift_apart_leave_no_record(without_a_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(train_module, "PLAN", replace(TINY_PLAN, steps=2, tolerance=-1.0))
    with pytest.raises(UsageError, match="the losses drift apart"):
        measure_training()
    assert not [*tmp_path.iterdir()]


def kept_inputs(heads: int = TRAINED_SHAPE.heads) -> TrainedInputs:
    rng = torch.Generator().manual_seed(0)
    shape = (heads, *TRAINED_SHAPE.q[2:])
    q, k, v = (torch.randn(shape, generator=rng).bfloat16() for _ in range(3))
    return TrainedInputs((q, k, v), "2000-01-01 a")


def test_trained_inputs_survive_writing_bit_for_bit(tmp_path):
    kept = kept_inputs()
    path = tmp_path / "h200" / "trained.npz"
    write_trained(path, kept)
    read = read_trained(path)
    assert read.run == kept.run
    for x, y in zip(read.tensors, kept.tensors, strict=True):
        assert x.dtype == torch.bfloat16
        assert torch.equal(x, y)
    assert path.stat().st_size < 4e6


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"\1", b"\2")), "cannot be read"),
        (lambda path: np.savez(path, q=np.zeros(2)), "cannot be read"),
        (lambda path: np.savez(path, q=np.array([{}])), "cannot be read"),
        (lambda path: write_trained(path, kept_inputs(5)), "q is uint16 [5, 1024, 64], not uint16"),
    ],
)
def test_damaged_trained_inputs_are_one_clear_line(tmp_path, spoil, told):
    path = tmp_path / "trained.npz"
    write_trained(path, kept_inputs())
    spoil(path)
    with pytest.raises(UsageError) as error:
        read_trained(path)
    message = str(error.value)
    assert message.startswith(f"{path}")
    assert told in message
    assert message.endswith("make train writes it again")
    assert len(message.splitlines()) == 1


def test_without_a_gpu_losses_are_printed_and_nothing_is_recorded(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    losses = {"ours": [5.5, 5.0], "sdpa": [5.5, 5.001]}
    monkeypatch.setattr(train_module, "try_training", lambda: losses)
    assert main(["train"]) == 0
    out = capsys.readouterr().out
    assert "| 2 | 5.0000 | 5.0010 |" in out
    assert out.endswith("Nothing is recorded, as there is no CUDA device.\n")
    losses["sdpa"][1] = 5.1
    assert main(["train"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the losses drift apart: over step 2 that of ours is 5.0000")


def test_on_a_gpu_the_record_is_shown(capsys, monkeypatch, record_set, tmp_path):
    record_set()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    monkeypatch.setattr(commands, "regenerate", lambda: ["profiles/h200/train.svg"])
    path = tmp_path / "profiles" / "h200" / "train.json"
    monkeypatch.setattr(train_module, "measure_training", lambda: path)
    assert main(["train"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "recorded profiles/h200/train.json"
    assert re.sub(" +", " ", lines[1]) == (
        " ours loss 3.0450, held out 4.0600 nats a byte; 20 ms a step, 1.00 GB; "
        f"{V_STEP.name} and {B_STEP.name}"
    )
    assert lines[3] == "regenerated profiles/h200/train.svg"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("train.ours.loss : .3f", "3.045"),
        ("train.sdpa.held_out_loss : .1f", "4.0"),
        ("train.ours.loss / train.sdpa.loss : .3f", "1.015"),
        ("train.ours.ms_per_step / train.sdpa.ms_per_step", "2.0"),
        ("train.ours.ms_per_step / v01.time_ms", "not measured"),
        ("train.config.steps", "8"),
        ("train.text.bytes / 1000000 : .1f", "1.0"),
    ],
)
def test_expression(record_set, expression, text):
    assert evaluate(expression, record_set()) == text


@pytest.mark.parametrize("expression", ["train", "train.ours", "train.losses.ours", "train.v12"])
def test_expression_that_means_nothing(record_set, expression):
    with pytest.raises(UsageError):
        evaluate(expression, record_set())


@pytest.mark.parametrize("step", [V_STEP, B_STEP])
def test_training_on_a_changed_step_is_stale(record_set, step):
    sources = fake_training(V_STEP, B_STEP)["sources"]
    sources[step.name] = {"code_sha256": "0" * 64}
    changed = record_set(sources=sources)
    assert evaluate("train.ours.loss", changed) == "stale"
    found = [text.text for text in texts(render_plots(changed)["train.svg"])]
    assert "ours (stale)" in found


def test_without_a_record(tmp_path):
    nothing = load_record_set(tmp_path, tmp_path)
    assert evaluate("train.ours.loss", nothing) == "not measured"
    assert "train.svg" not in render_plots(nothing)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"losses": {"ours": [1.0]}}, "losses cannot be"),
        ({"losses": {"ours": [1.0], "sdpa": [1.0, 2.0]}}, "losses cannot be"),
        ({"losses": {"ours": [], "sdpa": []}}, "losses cannot be"),
        ({"step_ms": {"ours": [0], "sdpa": [1.0]}}, "step_ms cannot be"),
        ({"sources": {V_STEP.name: {"code_sha256": "0"}}}, "sources cannot be"),
        ({"sources": {"v01": {"code_sha256": "0"}, "v02": {"code_sha256": "0"}}}, "sources cannot"),
        ({"ours": {}}, "ours has no route"),
        ({"config": {}}, "config has no layers"),
        ({"text": None}, "text is None, not an object"),
    ],
)
def test_malformed_record_is_named_with_what_is_wrong(record_set, change, told):
    with pytest.raises(UsageError, match=re.escape("train.json: the record")) as error:
        record_set(**change)
    assert told in str(error.value)


def points(svg: str) -> list[list[tuple[float, float]]]:
    """Of each curve, in the order in which they are drawn."""
    return [
        [tuple(map(float, point.split(","))) for point in curve.split()]
        for curve in re.findall(r'<polyline points="([^"]*)"', svg)
    ]


@pytest.mark.parametrize("steps", [8, 1500])
def test_plot(record_set, steps):
    """Losses of both, the one over the other in per cent, and both of the held-out text."""
    svg = render_plots(record_set(steps))["train.svg"]
    assert not clashes(svg)
    sdpa, ours, apart = points(svg)
    assert len(sdpa) == len(ours) == len(apart) == (8 if steps == 8 else 375)
    assert all(one[1] > other[1] for one, other in zip(sdpa, ours, strict=True))  # ours is above
    heights = [y for _, y in sdpa]
    assert heights == sorted(heights)
    assert len({y for _, y in apart}) == 1  # 1.5 % all the time
    held_out = [y for _, y, _ in dots(svg)]
    assert sdpa[0][1] < held_out[1] < held_out[0] < sdpa[-1][1]
    found = [text.text for text in texts(svg)]
    assert found[0].startswith("NVIDIA H200: a byte-level GPT of 10.0 M parameters, 6 layers")
    assert any(f"{V_STEP.name} and {B_STEP.name}: loss 3.0450 in the" in text for text in found)
    assert {"held out", "3", "5", "+2", "-2"} <= {*found}
    mean = "steps of 16 × 1024 bytes" + "; a point is the mean of 4" * (steps > 8)
    assert mean in found


def test_terminal_has_a_row_for_each_step():
    text = terminal.losses({"ours": [5.5, 5.0], "sdpa": [5.4, 5.1]})
    assert text.splitlines()[2:] == ["| 1 | 5.5000 | 5.4000 |", "| 2 | 5.0000 | 5.1000 |"]
