"""What is measured together at the headline problem, and whether its record has every part."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from common.bench import headline, timing, trial
from common.bench.headline import measure, step_candidate
from common.bench.peers import Peer
from common.catalog import find_step
from common.operation import BACKWARD, FORWARD
from common.problem import Problem, Shape
from common.record_schema import RECORD
from common.records import read_record
from common.runtime.build import Resources
from common.runtime.cpu import CpuBackend
from verify.case import Case
from verify.reference import oracle_of

TINY = Problem(Shape(1, 2, 1, 24, 24, 64), "bf16")


class TimedBackend(CpuBackend):
    """A stand-in for the GPU."""

    def resources(self, step, spec):
        kernels = [kernel.name.decode() for kernel in self.descriptor(step, spec).kernels]
        return {name: Resources(32, 0, 0, 0, 0, 0) for name in kernels if name}

    def compile_command(self, step, spec):
        return ["nvcc"]


@pytest.fixture
def memory(monkeypatch, tmp_path) -> list:
    """Measures a tiny problem in place of the headline one, into tmp_path, without a GPU.

    Every call takes 2 ms and 100 bytes. Returns the calls whose memory was measured.
    """
    called = []

    def load(operation, inputs, *, causal):
        outputs = oracle_of(operation)(*inputs, causal=causal, softmax_scale=64**-0.5)
        return {
            "sdpa_math": Peer(lambda: outputs, "torch", held_bytes=1000),
            "flash_attention_3": "not installed",
        }

    def load_peer(name, operation, inputs, *, causal):
        return load(operation, inputs, causal=causal)[name]

    def peak_memory(call):
        called.append(call)
        return call(), 100

    def case_of(name, problem, operation):
        return Case.of(name, TINY, operation)

    monkeypatch.setattr(headline, "GpuBackend", TimedBackend)
    monkeypatch.setattr(headline, "Case", SimpleNamespace(of=case_of))
    monkeypatch.setattr(headline, "PROFILES_DIR", tmp_path)
    monkeypatch.setattr(headline, "MEMORY_SEQS", (8, 16))
    monkeypatch.setattr(headline, "load", load)
    monkeypatch.setattr(headline, "load_peer", load_peer)
    monkeypatch.setattr(headline, "versions", lambda: {"device": "NVIDIA H200"})
    for module in (headline, trial):
        monkeypatch.setattr(module, "peak_memory", peak_memory)
    monkeypatch.setattr(timing, "device_state", lambda: "not collected")
    monkeypatch.setattr(timing, "time_interleaved", lambda calls: dict.fromkeys(calls, (2.0, 2.0)))
    return called


@pytest.mark.parametrize(
    ("name", "operation", "least_bytes"),
    [
        # In elements of 2 bytes, of which a head of q has 24 x 64; lse has 2 x 24 of 4.
        ("v03", FORWARD, 2 * (2 + 1 + 1 + 2) * 24 * 64 + 4 * 2 * 24),
        ("b02", BACKWARD, 2 * (4 * 2 + 2 * 2) * 24 * 64 + 4 * 2 * 24),
    ],
)
def test_record(memory, tmp_path, name, operation, least_bytes):
    step = find_step(name)
    assert measure([step_candidate(step)]) == [tmp_path / f"h200/{name}.json"]
    record = read_record(tmp_path / f"h200/{name}.json", RECORD)
    outputs = [output.name for output in operation.outputs]
    assert list(record["errors"]) == list(record["torch_errors"]) == outputs
    assert record["tflops"] == operation.flops(TINY) / 2e9
    assert record["baseline"]["step"] == f"{name[0]}0{int(name[1:]) - 1}"
    peers = record["peers"]
    assert peers["flash_attention_3"] == {"missing": "not installed"}
    assert (record["peak_memory_bytes"], peers["sdpa_math"]["peak_memory_bytes"]) == (100, 1100)
    assert record["memory"] == [{"seq": 8, "bytes": 100}, {"seq": 16, "bytes": 100}]
    assert record["naive_memory"] == [{"seq": 8, "bytes": 1100}, {"seq": 16, "bytes": 1100}]
    assert record["least_bytes"] >= least_bytes  # and the workspace


def test_memory_is_that_of_the_operation_at_other_lengths(memory):
    """Of zeros in the place of its inputs."""
    measure([step_candidate(find_step("b01"))])
    tensors = [call.args[2:] for call in memory if isinstance(call, partial)][-1]
    shapes = [tuple(x.shape) for x in tensors]
    q, kv = (1, 2, 16, 64), (1, 1, 16, 64)
    assert shapes == [q, kv, kv, q, q[:3], q]
    assert [x.dtype for x in tensors] == [torch.bfloat16] * 4 + [torch.float32, torch.bfloat16]


def test_ladders_are_measured_in_runs_of_their_own(memory, tmp_path):
    written = measure([step_candidate(find_step(name)) for name in ("v03", "b01")])
    first, second = (read_record(path, RECORD) for path in written)
    assert (first["step"], second["step"]) == ("v03", "b01")
    assert first["run"] != second["run"]
    assert second["baseline"] is None
    assert (first["flops"], second["flops"]) == (FORWARD.flops(TINY), BACKWARD.flops(TINY))
