"""What training takes: how it is measured, its record, its table and numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from common import UsageError, commands
from common.__main__ import main
from common.bench import attentions, timing, training_speed
from common.bench.attentions import Differentiable, load_attentions
from common.bench.corpus import read_text
from common.bench.gpt import GPT
from common.bench.llama import LlamaSize
from common.bench.train import PLAN, TINY_PLAN, TINY_TEXT
from common.bench.training_speed import (
    GPT_PLAN,
    LLAMA_PLAN,
    measure_layer,
    measure_model,
    measure_training_speed,
)
from common.operation import BACKWARD, FORWARD
from common.problem import Problem, Shape
from common.record_schema import TRAINING_SPEED_RECORD, find_error
from common.records import read_record, write_record
from common.report import tables
from common.report.expressions import evaluate
from common.report.record_set import RecordSet, load_record_set
from common.runtime.cpu import CpuBackend
from common.runtime.gpu import GpuBackend
from verify.tests.fake_records import (
    B_STEP,
    HEADS_STEP,
    ROWS_STEP,
    V_STEP,
    fake_training_speed,
)

SDPA = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
TINY_LAYER = Problem(Shape(1, 4, 2, 136, 136, 16), "bf16", causal=True)
TINY_LLAMA = replace(TINY_PLAN, size=LlamaSize(1, 4, 16, 32, kv_heads=2, mlp_width=96))
TEXT = read_text([TINY_TEXT])


@pytest.fixture
def record_set(tmp_path):
    """Loads the record set of a project with a record of training's speed, changed as given."""

    def load(**changes) -> RecordSet:
        folder = tmp_path / "profiles" / "h200"
        record = fake_training_speed(V_STEP, B_STEP) | changes
        write_record(folder / "training_speed.json", record)
        return load_record_set(folder, tmp_path)

    return load


@pytest.fixture
def without_a_gpu(monkeypatch):
    """Calls are made but not timed: each takes 2 ms and 1000 bytes.

    Returns a function that sets what the one peer that is there computes.
    """

    def time_interleaved(calls):
        return {name: [call() is None or 2.0] * 3 for name, call in calls.items()}

    def find_differentiable(peer, name, shape, *, causal):
        if name != "sdpa_flash":
            raise ImportError(f"no {name}")
        return peer, "torch"

    def set_peer(peer) -> None:
        found = partial(find_differentiable, peer)
        monkeypatch.setattr(attentions, "find_differentiable", found)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "device_state", lambda: "not collected")
    monkeypatch.setattr(timing, "time_interleaved", time_interleaved)
    monkeypatch.setattr(training_speed, "peak_memory", lambda call: (call(), 1000))
    set_peer(SDPA)
    return set_peer


def test_workloads_are_those_of_the_models():
    layer = LLAMA_PLAN.problem
    assert layer == Problem(Shape(1, 32, 8, 8192, 8192, 128), "bf16", causal=True)
    assert (LLAMA_PLAN.size.width, LLAMA_PLAN.size.mlp_width) == (4096, 14336)
    assert LLAMA_PLAN.size.rotary_base == 500000
    assert (GPT_PLAN.size, GPT_PLAN.batch) == (PLAN.size, PLAN.batch)


def test_llama_block_has_the_parameters_and_heads_of_its_size():
    size = TINY_LLAMA.size
    model = GPT(size, seed=0)
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    assert block == 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    given = []

    def attention(q, k, v):
        given.extend(x.shape for x in (q, k, v))
        return SDPA(q, k, v)

    logits = model(TEXT[None, : size.context].long(), attention)
    assert logits.shape == (1, size.context, 256)
    assert given == [size.shape(1).q, size.shape(1).kv, size.shape(1).kv]


def test_llama_block_looks_back_only():
    model = GPT(TINY_LLAMA.size, seed=0)
    text = TEXT[None, :12].long()
    changed = text.clone()
    changed[0, 7] += 1
    same = (model(changed, SDPA) - model(text, SDPA)).abs().amax(-1)[0] < 1e-6
    assert same.tolist() == [True] * 7 + [False] * 5


def test_attentions_are_ours_and_the_peers(without_a_gpu):
    loaded = load_attentions(CpuBackend(), TINY_LAYER)
    assert list(loaded) == ["ours", "sdpa_flash", "sdpa_cudnn", "flash_attention_3"]
    assert loaded["ours"].route == f"{HEADS_STEP.name} and {B_STEP.name}"
    assert loaded["sdpa_flash"] == Differentiable(SDPA, "torch")
    assert loaded["sdpa_cudnn"] == "no sdpa_cudnn"


def test_a_peer_that_refuses_when_it_runs_is_missing(without_a_gpu):
    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return q.clone()

        @staticmethod
        def backward(ctx, dout):
            raise RuntimeError("no gradients here\nbut many lines")

    without_a_gpu(NoBackward.apply)
    assert load_attentions(CpuBackend(), TINY_LAYER)["sdpa_flash"] == "no gradients here"


def test_measured_workloads(without_a_gpu, monkeypatch, tmp_path, tiny_corpus):
    """Through forward and backward steps on the SIMT runtime."""
    monkeypatch.setattr(training_speed, "GpuBackend", CpuBackend)
    monkeypatch.setattr(training_speed, "GPT_PLAN", TINY_PLAN)
    monkeypatch.setattr(training_speed, "LLAMA_PLAN", TINY_LLAMA)
    monkeypatch.setattr(training_speed, "build_all", lambda *_: None)
    monkeypatch.setattr(training_speed, "read_corpus", lambda _: tiny_corpus)
    monkeypatch.setattr(training_speed, "versions", lambda: {"device": "NVIDIA H200"})
    monkeypatch.setattr(training_speed, "PROFILES_DIR", tmp_path)
    path = measure_training_speed()
    assert path == tmp_path / "h200" / "training_speed.json"
    record = read_record(path, TRAINING_SPEED_RECORD)
    assert sorted(record["sources"]) == sorted(step.name for step in (ROWS_STEP, B_STEP))
    layer, gpt, llama = record["workloads"].values()
    assert layer["shape"] == TINY_LLAMA.problem.as_record()
    assert layer["attentions"]["flash_attention_3"] == {"missing": "no flash_attention_3"}
    for workload in (layer, gpt, llama):
        ours = workload["attentions"]["ours"]
        assert ours["route"] == f"{ROWS_STEP.name} and {B_STEP.name}"
        assert (ours["time_ms"], ours["peak_memory_bytes"]) == (2.0, 1000)
        assert len(ours["samples_ms"]) == 3
    flops = sum(each.flops(TINY_LLAMA.problem) for each in (FORWARD, BACKWARD))
    assert layer["attentions"]["ours"]["tflops"] == flops / 2e9
    for workload in (gpt, llama):
        losses = [workload["attentions"][name]["losses"] for name in ("ours", "sdpa_flash")]
        assert [len(each) for each in losses] == [TINY_PLAN.steps] * 2
        assert losses[0] == pytest.approx(losses[1], rel=TINY_PLAN.tolerance)
        assert losses[0] != losses[1]
    assert llama["config"]["kv_heads"] == 2
    assert "layer:" in tables.training_speed(load_record_set(path.parent, tmp_path))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda q, k, v: 1.5 * SDPA(q, k, v), "in o"),
        (lambda q, k, v: SDPA(q, k.detach() + 0 * k, v), "in dk"),
        (lambda q, k, v: SDPA(q, k, v) + q * torch.nan, "of nan in o"),
    ],
)
def test_a_wrong_layer_is_not_timed(without_a_gpu, wrong, told):
    without_a_gpu(wrong)
    with pytest.raises(UsageError, match="sdpa_flash is wrong on layer: an error of") as error:
        measure_layer(CpuBackend(), TINY_LAYER)
    assert told in str(error.value)


@pytest.mark.parametrize("plan", [TINY_PLAN, TINY_LLAMA])
def test_losses_that_drift_apart_are_an_error(without_a_gpu, plan):
    without_a_gpu(lambda q, k, v: SDPA(q, k, v, scale=0))
    with pytest.raises(UsageError, match=r"^the losses drift apart: over step .* sdpa_flash"):
        measure_model(CpuBackend(), plan, TEXT)


@pytest.mark.gpu
def test_tiny_workloads_on_a_gpu():
    backend = GpuBackend()
    fake = fake_training_speed(V_STEP, B_STEP)["workloads"]
    measured = {
        "layer": measure_layer(backend, TINY_LAYER),
        "gpt": measure_model(backend, TINY_PLAN, TEXT),
        "llama": measure_model(backend, TINY_LLAMA, TEXT),
    }
    record = fake_training_speed(V_STEP, B_STEP) | {"workloads": measured}
    assert find_error(record, TRAINING_SPEED_RECORD) is None
    assert measured.keys() == fake.keys()
    for workload in measured.values():
        assert workload["attentions"]["ours"]["peak_memory_bytes"] > 0
        assert "time_ms" in workload["attentions"]["sdpa_flash"]


def test_table(record_set):
    lines = tables.training_speed(record_set()).splitlines()
    code, memory = f"{V_STEP.name} and {B_STEP.name}", "68.0 MB"
    assert lines[:6] == [
        "| Workload | Attention | Code | Time (ms) | p25–p75 (ms) | Speed of ours over it "
        "| Peak memory | Loss |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
        f"| layer | ours | {code} | 20 | 19.8–20.2 |  | {memory} |  |",
        f"| layer | sdpa_flash | torch 1.0 | 30 | 29.7–30.3 | **1.500 ×** | {memory} |  |",
        f"| layer | sdpa_cudnn | torch 1.0 | 10 | 9.9–10.1 | 0.500 × | {memory} |  |",
        "| layer | flash_attention_3 | missing: not installed |  |  |  |  |  |",
    ]
    assert lines[6].endswith(f"| {memory} | 5.0000 |")
    assert len(lines) == 2 + 12 + 2
    for told in (
        "NVIDIA H200. layer: forward and backward of attention alone, by autograd; batch 4, heads "
        "16/8, sequence 4096, head_dim 128, bf16, causal",
        "220.0 M parameters, 1 × 8192 bytes",
        "Median of 3 interleaved rounds",
        "Loss: of step 2 of gpt and 2 of llama, in nats a byte",
        "ours is within 0.3 % of each peer's at every step of gpt, within 0.3 % of llama",
        "throttle reasons after: none",
    ):
        assert told in lines[-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"models": {"bench/gpt.py": "0"}},
        {"sources": {V_STEP.name: {"code_sha256": "0"}}},
        {"sources": {B_STEP.name: {"code_sha256": "0"}}},
    ],
)
def test_what_has_changed_since_is_not_shown(record_set, changes):
    changed = record_set(**changes)
    assert tables.training_speed(changed) == "stale"
    assert evaluate("training_speed.layer.ours.time_ms", changed) == "stale"


def test_without_a_record(tmp_path):
    nothing = load_record_set(tmp_path, tmp_path)
    assert tables.training_speed(nothing) == "not measured"
    assert evaluate("training_speed.layer.ours.time_ms", nothing) == "not measured"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("training_speed.llama.ours.time_ms : .1f", "20.0"),
        ("training_speed.gpt.sdpa_cudnn.time_ms / training_speed.gpt.ours.time_ms : .2f", "0.50"),
        ("training_speed.layer.flash_attention_3.time_ms", "missing"),
        (
            "training_speed.gpt.ours.time_ms / training_speed.layer.ours.time_ms",
            "not measured together",
        ),
        ("training_speed.layer.ours.errors.dq", "0.001"),
        ("training_speed.gpt.config.steps", "2"),
    ],
)
def test_expression(record_set, expression, text):
    assert evaluate(expression, record_set()) == text


@pytest.mark.parametrize(
    "expression",
    ["training_speed", "training_speed.bert", "training_speed.gpt", "training_speed.gpt.v12"],
)
def test_expression_that_means_nothing(record_set, expression):
    with pytest.raises(UsageError):
        evaluate(expression, record_set())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sources": {}}, "sources cannot be {}"),
        ({"models": None}, "models is None, not an object"),
        ({"workloads": {}}, "workloads has no layer"),
    ],
)
def test_malformed_record_is_named_with_what_is_wrong(record_set, change, told):
    with pytest.raises(UsageError, match=re.escape("training_speed.json: the record")) as error:
        record_set(**change)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("workload", "key", "told"),
    [
        ("layer", "shape", "layer has no shape"),
        ("gpt", "config", "gpt has no config"),
        ("llama", "environment", "llama has no environment"),
        ("llama", "losses", "ours has no losses"),
        ("layer", "errors", "ours has no errors"),
    ],
)
def test_malformed_workload_is_named_with_what_is_wrong(record_set, workload, key, told):
    workloads = fake_training_speed(V_STEP, B_STEP)["workloads"]
    measured = workloads[workload]
    del (measured if key in measured else measured["attentions"]["ours"])[key]
    with pytest.raises(UsageError, match=told):
        record_set(workloads=workloads)


def test_on_a_gpu_the_table_is_shown(capsys, monkeypatch, record_set, tmp_path):
    record_set()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    monkeypatch.setattr(commands, "regenerate", lambda: ["README.md"])
    path = tmp_path / "profiles" / "h200" / "training_speed.json"
    monkeypatch.setattr(training_speed, "measure_training_speed", lambda: path)
    assert main(["bench", "--training"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "recorded profiles/h200/training_speed.json"
    assert lines[1].startswith("| Workload | Attention |")
    assert lines[-1] == "regenerated README.md"
